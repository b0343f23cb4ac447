from __future__ import annotations

from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import pytest

from logitship.sampler.batch.persistent_batch import BatchUpdateBuilder
from logitship.sampler.batch_processors.adapter import AdapterLogitsProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.batch_processors.slot_interface import (
    LogitsContext,
    LogitsProcRequestState,
    SlotLogitsProcessor,
)
from logitship.sampler.batch_processors.vllm_config import VllmConfig
from logitship.server.vllm_names.names import HINTS, NAMES

ALL_OF_VLLM_0_32 = {
    "AdapterLogitsProcessor",
    "BatchUpdate",
    "BatchUpdateBuilder",
    "LOGITSPROCS_GROUP",
    "LogitBiasLogitsProcessor",
    "LogitsProcessor",
    "LogitsProcessors",
    "MinPLogitsProcessor",
    "MinTokensLogitsProcessor",
    "MoveDirectionality",
    "STR_POOLING_REJECTS_LOGITSPROCS",
    "build_logitsprocs",
}
"""`vllm.v1.sample.logits_processor.__all__`."""


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_every_name_resolves_to_the_object_in_the_table(module: str, name: str, hook_is_on: None) -> None:
    assert getattr(import_module(module), name) is resolve_name(NAMES[module][name])


def test_every_module_has_its_parent() -> None:
    assert {name.rpartition(".")[0] for name in (*NAMES, *HINTS)} - {""} <= set(NAMES)
    assert not set(HINTS) & set(NAMES)


def test_all_exports_of_vllm_for_batch_processors() -> None:
    assert set(NAMES["vllm.v1.sample.logits_processor"]) > ALL_OF_VLLM_0_32


@pytest.mark.parametrize(
    ("module", "cls"),
    [
        ("vllm.v1.sample.logits_processor", LogitsProcessor),
        ("vllm.v1.sample.logits_processor", BatchUpdate),
        ("vllm.v1.sample.logits_processor", LogitsProcessors),
        ("vllm.v1.sample.logits_processor", AdapterLogitsProcessor),
        ("vllm.v1.sample.logits_processor.interface", LogitsProcessor),
        ("vllm.v1.sample.logits_processor.interface", MoveDirectionality),
        ("vllm.v1.sample.logits_processor.state", BatchUpdateBuilder),
        ("vllm.v1.worker.gpu.sample.logits_processor", LogitsContext),
        ("vllm.v1.worker.gpu.sample.logits_processor", LogitsProcRequestState),
        ("vllm.v1.worker.gpu.sample.logits_processor.interface", LogitsProcRequestState),
        ("vllm.config", VllmConfig),
    ],
)
def test_classes_are_not_copies(module: str, cls: type, hook_is_on: None) -> None:
    assert getattr(import_module(module), cls.__name__) is cls


def test_request_level_type_has_two_names(hook_is_on: None) -> None:
    """Plugins import it from either module."""
    here: Any = import_module("vllm.v1.sample.logits_processor")
    there: Any = import_module("vllm.logits_process")
    assert here.RequestLogitsProcessor is there.LogitsProcessor


def test_each_interface_has_its_base_class(hook_is_on: None) -> None:
    """Both have the name LogitsProcessor."""
    here: Any = import_module("vllm.v1.sample.logits_processor")
    there: Any = import_module("vllm.v1.worker.gpu.sample.logits_processor")
    assert (here.LogitsProcessor, there.LogitsProcessor) == (LogitsProcessor, SlotLogitsProcessor)


def test_sampling_params_have_the_same_fields(hook_is_on: None) -> None:
    params = import_module("vllm").SamplingParams(temperature=0, extra_args={"target_token": 7})
    assert (params.temperature, params.extra_args) == (0, {"target_token": 7})


def test_messages_are_those_of_vllm(hook_is_on: None) -> None:
    module: Any = import_module("vllm.v1.sample.logits_processor")
    assert module.LOGITSPROCS_GROUP == "vllm.logits_processors"
    assert module.STR_POOLING_REJECTS_LOGITSPROCS == "Pooling models do not support custom logits processors."
    assert (
        module.STR_SPEC_DEC_REJECTS_LOGITSPROCS
        == "Custom logits processors are not supported when speculative decoding is enabled."
    )
