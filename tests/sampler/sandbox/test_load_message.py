"""Classes as a sandbox gets them: with their artifacts, and with the lines of their files."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor, ProcessorLoadError
from logitship.client.serialization.artifact import Artifact
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.client.serialization.serialize import serialize
from logitship.sampler.sandbox.protocol import load_message, shipped_string
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor

from .conftest import Caller

WEIGHTS = torch.arange(20_000.0)
LARGE = torch.ones(30 << 18)
"""30 MiB."""


class Weighs(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        WEIGHTS[0] += 1.0
        return logits + WEIGHTS[3] + custom_param_list[0]["add"]


class Heavy(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits + LARGE[0]


def test_string_comes_back_as_it_was() -> None:
    pickled = serialize(Weighs, artifact_size=1 << 16)
    assert pickled.listing is not None
    (artifact,) = pickled.artifacts
    for string in (
        replace(pickled, source=None, dill=None, name=None),
        SourceProcessor("class A: ...", "A", b"x", "3.11", (artifact,)),
    ):
        read = shipped_string(load_message(string))
        assert read == string
        assert [each.content.data for each in read.artifacts if each.content] == [WEIGHTS.numpy().tobytes()]


def test_missing_artifact() -> None:
    with pytest.raises(ProcessorLoadError, match="is missing"):
        load_message(SourceProcessor("class A: ...", "A", artifacts=(Artifact("sha256:1"),)))


def test_artifacts_and_lines_reach_the_sandbox(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(serialize(Weighs, artifact_size=1 << 16))
    assert caller.call(processor, caller.attach(processor, add=4.0))[0] == [7.0]
    _, outcome = caller.call(processor, caller.attach(processor))
    assert outcome.faults[0].traceback.endswith(
        "    return logits + WEIGHTS[3] + custom_param_list[0][\"add\"]\nKeyError: 'add'\n"
    )


def test_server_keeps_only_what_runs(executor: SandboxExecutor) -> None:
    string = serialize(Weighs)
    assert string.source is not None
    processor = executor.load(string)
    assert processor.instance.string == replace(string, source=None, params_schema=None)
    assert processor.digest == string.digest


def test_sandbox_memory_counts_artifacts(executor: SandboxExecutor) -> None:
    """The sandbox has 64 MiB."""
    with pytest.raises(ProcessorLoadError, match=r"MemoryError|ended its process|not enough memory"):
        executor.load(serialize(Heavy, artifact_size=1 << 16))


def test_unloading_frees_artifacts(executor: SandboxExecutor) -> None:
    string = serialize(Weighs, artifact_size=1 << 16)
    gc.collect()  # since Python 3.13, a pickler is in a reference cycle
    assert string.artifacts[0].content is not None
    content = weakref.ref(string.artifacts[0].content)
    processor = executor.load(string)
    del string
    executor.unload(processor)
    del processor
    assert content() is None
