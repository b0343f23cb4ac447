"""Source of registered classes that runs, shown by running it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.builtin_processors.disallowed_tokens import DisallowedTokensLogitsProcessor
from logitship.client.serialization.artifact import Artifact
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.client.serialization.serialize import serialize
from logitship.server.processors.runnable_source import runnable_text, uploaded_artifacts

BIAS = torch.tensor([0.5, 1.5, 2.5])
DIGITS = re.compile(r"\d+")
STEP = 2


def add(row: torch.Tensor, text: str) -> torch.Tensor:
    return row + BIAS * len(DIGITS.findall(text)) + STEP


class Adds(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return torch.stack([add(row, params["text"]) for row, params in zip(logits, custom_param_list, strict=True)])


class AlwaysDisallows(DisallowedTokensLogitsProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        logits[:, STEP] = 0.0
        return logits


def run(text: str, class_name: str) -> Any:
    variables: dict[str, Any] = {"__name__": "shown"}
    exec(compile(text, "<shown>", "exec", dont_inherit=True), variables)
    return variables[class_name]()


@pytest.mark.parametrize("cls", [Adds, AlwaysDisallows])
def test_captured_source_runs_and_does_the_same(cls: type[CustomLogitProcessor]) -> None:
    source = serialize(cls).source
    assert source is not None
    assert "sglang" in source.source
    text = runnable_text(source)
    assert "sglang" not in text
    shown = run(text, source.class_name)
    params = [{"text": "1 2 3"}, {"text": ""}]
    expected = cls()(torch.ones(2, 3), params)
    assert torch.equal(shown(torch.ones(2, 3), params), expected)
    assert not torch.equal(expected, torch.ones(2, 3))


def test_source_that_a_client_wrote_is_unchanged() -> None:
    text = "from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor\n"
    assert runnable_text(SourceProcessor(text, "A")) == text


def test_unknown_names_of_sglang_are_kept() -> None:
    text = "from sglang.srt.sampling.custom_logit_processor import Odd as Even\n"
    assert runnable_text(SourceProcessor(text, "A", python="3.11")) == text


WEIGHTS = torch.arange(1000.0)


class Weighs(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits + WEIGHTS[3] + len(DIGITS.findall("1"))


def test_tensors_that_the_pickle_has_are_in_the_text() -> None:
    source = serialize(Weighs).source
    assert source is not None
    assert len(source.artifacts) == 1
    assert run(runnable_text(source), "Weighs")(torch.zeros(1, 1)).tolist() == [[4.0]]
    assert uploaded_artifacts(source) == []


def test_uploaded_artifacts_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = serialize(Weighs).source
    assert source is not None
    (artifact,) = source.artifacts
    uploaded = replace(source, artifacts=(Artifact(artifact.digest),))
    assert uploaded_artifacts(uploaded) == [artifact.digest]
    monkeypatch.chdir(tmp_path)
    (tmp_path / artifact.digest).write_bytes(WEIGHTS.numpy().tobytes())
    assert run(runnable_text(uploaded), "Weighs")(torch.zeros(1, 1)).tolist() == [[4.0]]
