from __future__ import annotations

import json
import pickle
import pickletools
import sys
import tracemalloc
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dill
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logitship.builtin_processors import (
    INSTALLED_BY_REFERENCE,
    SGLANG_NAMES,
    DisallowedTokensLogitsProcessor,
    ThinkingBudgetLogitProcessor,
    installed_processors,
)
from logitship.builtin_processors.base import BuiltinProcessor
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization import processor_string
from logitship.client.serialization.loading import load_class
from logitship.client.serialization.processor_string import PYTHON, PickledProcessor
from logitship.client.serialization.shipped_names import SGLANG_MODULE

STRINGS: dict[str, str] = json.loads(
    (Path(__file__).parents[1] / "data" / "sglang_strings.json").read_text(encoding="utf-8")
)["strings"][PYTHON]
INSTALLED = [
    processor for name in installed_processors() if "_pickles_as" in vars(processor := installed_processors().get(name))
]
"""Classes that SGLang has too."""


def installed_by_reference(payload: bytes) -> type[BuiltinProcessor] | None:
    return INSTALLED_BY_REFERENCE.get(PickledProcessor(payload).reference)


REFERENCE = bytes.fromhex(json.loads(STRINGS["DisallowedTokensLogitsProcessor"])["callable"])


@pytest.fixture
def sglang_class(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], type]:
    """Create an empty class that can be pickled by reference under any module and name."""

    def make(module_name: str, name: str) -> type:
        value = type(name, (), {"__module__": module_name})
        holder: object = value
        attribute, path = name, module_name
        while path:
            module = types.ModuleType(path)
            setattr(module, attribute, holder)
            monkeypatch.setitem(sys.modules, path, module)
            holder, (path, _, attribute) = module, path.rpartition(".")
        return value

    return make


def test_names_are_sglangs_public_classes(sglang: Callable[..., list[Any]]) -> None:
    assert sorted(name for _, name in SGLANG_NAMES) == sglang(None)
    assert {module for module, _ in SGLANG_NAMES} == {SGLANG_MODULE}


def test_all_but_the_base_classes_are_installed() -> None:
    assert set(SGLANG_NAMES.values()) == {*INSTALLED, CustomLogitProcessor, ThinkingBudgetLogitProcessor}
    assert all(value.__name__ == name for (_, name), value in SGLANG_NAMES.items())


@pytest.mark.parametrize("processor", INSTALLED)
def test_classes_are_serialized_as_sglangs(processor: type[BuiltinProcessor]) -> None:
    assert json.loads(processor.to_str())["callable"] == json.loads(STRINGS[processor.__name__])["callable"]


def test_subclass_is_serialized_by_value() -> None:
    class OtherModel(ThinkingBudgetLogitProcessor):
        THINKING_START_TOKEN_ID = 1
        THINKING_END_TOKEN_ID = 2
        NEW_LINE_TOKEN_ID = 3

    string = processor_string.parse(OtherModel.to_str())
    assert isinstance(string, PickledProcessor)
    assert string.reference is None
    operations = list(pickletools.genops(string.payload))
    assert "ThinkingBudgetLogitProcessor" in [argument for _, argument, _ in operations]

    loaded: Any = load_class(string, SGLANG_NAMES)
    assert loaded is not OtherModel
    assert issubclass(loaded, ThinkingBudgetLogitProcessor)
    assert (loaded.THINKING_START_TOKEN_ID, loaded.THINKING_END_TOKEN_ID, loaded.NEW_LINE_TOKEN_ID) == (1, 2, 3)


@pytest.mark.parametrize("name", STRINGS)
def test_recorded_strings(name: str) -> None:
    payload = bytes.fromhex(json.loads(STRINGS[name])["callable"])
    by_value = name in {"ForceToken", "Boost", "Countdown"}
    assert installed_by_reference(payload) is (None if by_value else SGLANG_NAMES[SGLANG_MODULE, name])


@pytest.mark.parametrize("processor", INSTALLED)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("optimize", [False, True])
def test_every_pickler_and_protocol(
    sglang_class: Callable[[str, str], type], processor: type, protocol: int, optimize: bool
) -> None:
    value = sglang_class(SGLANG_MODULE, processor.__name__)
    # C's pickler, Python's, and dill's differ in framing and memo.
    for dumps in (pickle.dumps, pickle._dumps, dill.dumps):  # type: ignore[attr-defined, unused-ignore]
        payload: bytes = dumps(value, protocol=protocol)
        if optimize:
            payload = pickletools.optimize(payload)
        assert pickle.loads(payload) is value
        assert installed_by_reference(payload) is processor


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_other_references_are_to_no_installed_class(sglang_class: Callable[[str, str], type], protocol: int) -> None:
    for module, name in [
        (SGLANG_MODULE, "Unknown"),
        (SGLANG_MODULE, "CustomLogitProcessor"),
        (SGLANG_MODULE, "ThinkingBudgetLogitProcessor"),
        ("sglang.srt.sampling", "DisallowedTokensLogitsProcessor"),
        ("evil", "DisallowedTokensLogitsProcessor"),
    ]:
        assert installed_by_reference(pickle.dumps(sglang_class(module, name), protocol=protocol)) is None


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b".",
        REFERENCE[:-1],
        REFERENCE + b".",
        REFERENCE + b"\n",
        REFERENCE[:-1] + b")R.",  # an instance of it: a call
        REFERENCE[:-1] + b"0" + REFERENCE,
        b"(" + REFERENCE,
        REFERENCE.replace(b"\x2a", b"\x2b"),  # a length that is not the name's
        b"cos\nsystem\n(S'true'\ntR.",
        b"cos\nsystem\n0" + f"c{SGLANG_MODULE}\nDisallowedTokensLogitsProcessor\n.".encode(),
        pickle.dumps([1, 2, 3]),
    ],
)
def test_extra_bytes_are_no_reference(payload: bytes) -> None:
    assert installed_by_reference(payload) is None


def test_declared_lengths_are_not_allocated() -> None:
    """`pickletools.genops` would allocate the bytearray of 256 MiB that this pickle declares."""
    payload = b"\x80\x05\x96" + (1 << 28).to_bytes(8, "little") + b"."
    tracemalloc.start()
    try:
        assert installed_by_reference(payload) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
@example(b"\x80\x04\x8c\x00\x8c\x00\x93.")
def test_arbitrary_bytes_are_no_reference(payload: bytes) -> None:
    assert installed_by_reference(payload) is None


@given(st.integers(0, len(REFERENCE) - 1), st.integers(0, 255), st.integers(0, 3), st.binary(max_size=3))
def test_mutated_reference_agrees_with_pickle(position: int, byte: int, cut: int, inserted: bytes) -> None:
    """If a class is recognized, an unpickler that accepts the bytes looks up that class's name."""
    payload = REFERENCE[:position] + bytes([byte]) + inserted + REFERENCE[position + cut :]
    found = installed_by_reference(payload)
    if found is not None:
        operations = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(payload)]
        texts = [argument for name, argument in operations if name == "SHORT_BINUNICODE"]
        assert texts == [SGLANG_MODULE, "DisallowedTokensLogitsProcessor"]
        assert found is DisallowedTokensLogitsProcessor
        assert {name for name, _ in operations} <= {
            "PROTO", "FRAME", "SHORT_BINUNICODE", "MEMOIZE", "STACK_GLOBAL", "STOP",
        }  # fmt: skip
