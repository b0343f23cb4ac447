from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

import logitship.builtin_processors
from logitship.builtin_processors import (
    DisallowedTokensLogitsProcessor,
    Qwen3ThinkingBudgetLogitProcessor,
    Registry,
    installed_processors,
)
from logitship.builtin_processors.base import BuiltinProcessor
from logitship.builtin_processors.registry import BUILTIN_PROCESSORS
from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.shipped_names import SGLANG_MODULE
from logitship.sampler.processors.request_view import ModelView

INSTALLED = [installed_processors().get(name) for name in installed_processors()]


def test_names_are_sorted_and_documented() -> None:
    names = list(installed_processors())
    assert names == sorted(processor.name for processor in BUILTIN_PROCESSORS)
    assert len(installed_processors()) == len(names) == len(BUILTIN_PROCESSORS)
    page = (Path(__file__).parents[2] / "docs" / "builtin-processors.md").read_text()
    summary = page.partition("## Parameters")[0]
    assert set(re.findall(r"`(\w+)`", summary)) >= set(names)


def test_get() -> None:
    assert installed_processors().get("disallowed_tokens") is DisallowedTokensLogitsProcessor
    assert "disallowed_tokens" in installed_processors()
    assert "min_p" not in installed_processors()


def test_unknown_name_lists_known_names() -> None:
    registry = Registry([Qwen3ThinkingBudgetLogitProcessor, DisallowedTokensLogitsProcessor])
    expected = "no processor is installed as 'qwen3'; installed are: disallowed_tokens, qwen3_thinking_budget"
    with pytest.raises(ProcessorLoadError, match=f"^{re.escape(expected)}$"):
        registry.get("qwen3")


def test_unknown_name_in_empty_registry() -> None:
    with pytest.raises(ProcessorLoadError, match="installed are: none"):
        Registry([]).get("a" * 10_000)


def test_duplicate_name_is_refused() -> None:
    registry = installed_processors()
    registry.add("disallowed_tokens", DisallowedTokensLogitsProcessor)
    with pytest.raises(
        ValueError, match=r"cannot install Qwen3Think.* as 'disallowed_tokens': DisallowedTokensL.* has that name"
    ):
        registry.add("disallowed_tokens", Qwen3ThinkingBudgetLogitProcessor)


def test_registries_are_independent() -> None:
    registry = installed_processors()
    registry.add("mine", DisallowedTokensLogitsProcessor)
    assert "mine" in registry
    assert "mine" not in installed_processors()


@pytest.mark.parametrize("processor", INSTALLED)
def test_installed_processors_have_name_and_schema(processor: type[BuiltinProcessor]) -> None:
    assert not inspect.isabstract(processor)
    assert processor.__doc__
    # In the class's own __dict__: a user's subclass must not be pickled under this name.
    assert vars(processor).get("_pickles_as") in (None, (SGLANG_MODULE, processor.__name__))
    schema = json.loads(json.dumps(processor.params_schema))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    required = schema.get("required", [])
    assert set(required) <= set(schema["properties"])
    for name in required[:1]:
        with pytest.raises(ValueError, match=f"^{name}: missing from custom_params"):
            processor().prepare(None, ModelView(300_000, frozenset({0}), None))


def test_exports_are_sorted_and_complete() -> None:
    exported = logitship.builtin_processors.__all__
    assert sorted(exported, key=lambda name: (not name.isupper(), name)) == exported
    assert all(hasattr(logitship.builtin_processors, name) for name in exported)
