"""Compatibility of processor strings with SGLang's own code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.client.serialization.loading import instantiate, load_class
from logitship.client.serialization.processor_string import PickledProcessor, parse

PEERS = Path(__file__).parents[2] / "peers"
NAMES = [
    "Annotated",
    "ClassTensors",
    "Classes",
    "Constants",
    "Dataclasses",
    "Enums",
    "Generators",
    "GlobalStatement",
    "Helpers",
    "Imported",
    "Imports",
    "Local",
    "Metaclasses",
    "Mixins",
    "ModuleAttributes",
    "Network",
    "NoSource",
    "Notebook",
    "SetLater",
    "SharingHelpers",
    "Submodules",
    "Trained",
    "TypeCheckingNames",
    "UsesTokenizer",
]


def test_names_are_complete(results: Any) -> None:
    assert sorted(results.strings) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_our_string_runs_on_stock_sglang(results: Any, name: str) -> None:
    assert results.on_sglang[name] == results.expected[name]


def test_sglang_string_runs_here(python: Callable[..., str], tmp_path: Path) -> None:
    program = tmp_path / "made_by_sglang.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(PEERS)!r})\n"
        "import sglang_peer\n"
        "base = sglang_peer.load().custom_logit_processor.CustomLogitProcessor\n"
        "class Add(base):\n"
        "    def __call__(self, logits, custom_param_list=None):\n"
        "        return logits + custom_param_list[0]['amount']\n"
        "print(Add.to_str())\n"
    )
    string = parse(python(str(program), cwd=tmp_path))
    assert isinstance(string, PickledProcessor)
    result = instantiate(load_class(string))(torch.zeros(1, 3), [{"amount": 2.0}])
    assert result.tolist() == [[2.0, 2.0, 2.0]]
    assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]


def test_string_has_extra_key_for_logitship(results: Any) -> None:
    assert set(json.loads(results.strings["Mixins"])) == {"callable", "logitship"}
