"""The recording of logits-processor-zoo's processors, `tests/data/zoo.json`, and their clock."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.helpers.clock import Clock

Script = dict[str, Any]

RECORDING: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "zoo.json").read_text())
SCRIPTS: list[Script] = [*RECORDING["vectors"], *RECORDING["chains"]]
VARIANTS = ("transformers", "vllm")


def recorded_tokenizers() -> dict[bool | None, Any]:
    """Return the recording's tokenizers by `add_prefix_space`; None if the tokenizer does not have it.

    It determines the strictness of the zoo's classes.
    """
    recorded = RECORDING["tokenizer"]
    tokenizers: dict[bool | None, Any] = {}
    for add_prefix_space in (False, None):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(recorded["tokenizer_json"])),
            eos_token="</s>",
            pad_token="<pad>",
            unk_token="<unk>",
        )
        tokenizer.add_prefix_space = add_prefix_space
        tokenizers[add_prefix_space] = tokenizer
    for text, token_ids in recorded["encodings"].items():
        assert tokenizers[False].encode(text, add_special_tokens=False) == token_ids
    return tokenizers


def add_prefix_space(script: Script) -> bool | None:
    """Return which of the tokenizers a script uses."""
    override: dict[str, bool | None] = script.get("tokenizer_override", {"add_prefix_space": False})
    return override["add_prefix_space"]


def processors_of(script: Script) -> list[dict[str, Any]]:
    chain: list[dict[str, Any]] = script.get("chain", [script])
    return chain


def params_of(recorded: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recorded["constructor_args"].items() if name != "batch_size"}


def as_logits(values: list[float | str]) -> torch.Tensor:
    return torch.tensor([float(value) for value in values])


def set_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of the zoo's modules."""
    clock = Clock(0.0)
    for variant in VARIANTS:
        for name in ("max_time", "trigger_phrase"):
            monkeypatch.setattr(importlib.import_module(f"logits_processor_zoo.{variant}.{name}"), "time", clock)
    return clock
