"""Serialization of classes by value, and errors for objects that cannot be serialized."""

from __future__ import annotations

import copy
import functools
import io
import json
import shutil
import socket
import sys
import threading
import types
import weakref
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any

import dill
import pytest
import torch
from pydantic import BaseModel, Field

from logitship import CustomLogitProcessor, ProcessorSerializationError
from logitship.builtin_processors import DisallowedTokensLogitsProcessor
from logitship.client.params_schema import MAX_SCHEMA_BYTES
from logitship.client.serialization.loading import instantiate, load_class, names_in_use
from logitship.client.serialization.processor_string import PickledProcessor, parse
from logitship.client.serialization.serialize import dump_class, serialize

HERE = Path(__file__).parents[1]


def test_all_project_classes_run_elsewhere(results: Any) -> None:
    assert results.from_pickle == results.expected


class Recorder(dill.Unpickler):  # type: ignore[misc, unused-ignore]
    """Unpickler that records the modules referenced by a pickle."""

    modules: set[str]

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module.partition(".")[0])
        return CustomLogitProcessor if module.startswith("sglang.") else super().find_class(module, name)


def test_pickles_reference_only_installed_modules(results: Any) -> None:
    for text in results.strings.values():
        recorder = Recorder(io.BytesIO(bytes.fromhex(json.loads(text)["callable"])))
        recorder.modules = set()
        recorder.load()
        assert {"dill", "sglang", "builtins"} <= recorder.modules
        assert not recorder.modules & {"logitship", "acme", "__main__", "__builtin__", "script"}


def test_bytes_are_reproducible(serialize_project: Callable[..., Any], results: Any, tmp_path: Path) -> None:
    copy = tmp_path / "another_checkout"
    shutil.copytree(HERE / "author_project", copy, ignore=shutil.ignore_patterns("__pycache__"))
    # The first run compiles the package, the second reads its .pyc files.
    for seed in ("1", "2"):
        report = serialize_project(copy, PYTHONHASHSEED=seed, PYTHONDONTWRITEBYTECODE="")
        changed = [name for name, entry in report.items() if entry["string"] != results.strings[name]]
        assert changed == []


def test_no_author_paths_in_payload(results: Any) -> None:
    for name, text in results.strings.items():
        assert str(HERE).encode() not in parse(text).payload, name  # type: ignore[union-attr]


class Plain(CustomLogitProcessor):
    params_schema = {"type": "object", "properties": {"token_id": {"type": "integer"}}}  # noqa: RUF012

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits + 1


def test_string_metadata() -> None:
    string = serialize(Plain)
    assert string.name == "Plain"
    assert string.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert string.dill
    assert string.params_schema == Plain.params_schema
    assert string.source is not None
    assert string.source.class_name == "Plain"
    assert parse(Plain.to_str()) == string


def test_attribute_access_does_not_change_bytes() -> None:
    rounded = functools.partial(round, ndigits=1)

    class Rounding(Plain):
        digits = torch.ones(2, requires_grad=True)
        none = torch.empty(0)

        def helper(self) -> float:
            return rounded(1.25)

    first = dump_class(Rounding)
    assert rounded.__dict__ == {}
    assert dump_class(Rounding) == first


class Helper:
    def __init__(self) -> None:
        self.value = 2.0


class WithHelper(Plain):
    helper = Helper()


def test_copying_objects_changes_neither_bytes_nor_source() -> None:
    """`copyreg` keeps the names of their slots in their class."""
    first = serialize(WithHelper)
    copy.copy(Helper())
    copy.copy(WithHelper())
    assert {"__slotnames__"} <= vars(Helper).keys() & vars(WithHelper).keys()
    assert serialize(WithHelper) == first
    assert first.source is not None


def test_loaded_class_can_be_serialized_again(results: Any) -> None:
    for name, text in results.strings.items():
        loaded = load_class(parse(text))  # type: ignore[arg-type]
        again = instantiate(load_class(PickledProcessor(dump_class(loaded))))
        assert again(torch.zeros(2, 4)).tolist() == results.expected[name], name


def test_subclass_of_builtin_processor() -> None:
    class Also(DisallowedTokensLogitsProcessor):
        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            logits = super().__call__(logits, custom_param_list)
            logits[:, 3] = -1
            return logits

    string = parse(Also.to_str())
    assert isinstance(string, PickledProcessor)
    assert string.source is not None
    for form in (string, string.source):
        processor = instantiate(load_class(form, names_in_use()))
        assert isinstance(processor, DisallowedTokensLogitsProcessor)
        request = types.SimpleNamespace(state={}, vocab_size=3, eos_token_ids=set(), tokenizer=None)
        params = [{"token_ids": [row], "__req__": request} for row in range(2)]
        ninf = float("-inf")
        assert processor(torch.zeros(2, 4), params).tolist() == [[ninf, 0, 0, -1], [0, ninf, 0, -1]]


def test_class_from_interactive_prompt(python: Callable[..., str], tmp_path: Path) -> None:
    typed = (
        "from logitship import CustomLogitProcessor\n"
        "shift = 2.0\n"
        "class Typed(CustomLogitProcessor):\n"
        "    def __call__(self, logits, custom_param_list=None):\n"
        "        return logits + shift\n"
        "\n"
        "print(Typed.to_str())\n"
    )
    string = parse(python("-q", "-i", cwd=tmp_path, stdin=typed))
    assert isinstance(string, PickledProcessor)
    assert (string.source is not None) == (sys.version_info >= (3, 13))  # which keeps what was typed
    for form in filter(None, (string, string.source)):
        assert instantiate(load_class(form))(torch.zeros(1, 2)).tolist() == [[2.0, 2.0]]


def test_loaded_class_has_our_base_class() -> None:
    loaded = load_class(PickledProcessor(dump_class(Plain)))
    assert loaded is not Plain
    assert loaded.__bases__ == (CustomLogitProcessor,)
    assert instantiate(loaded)(torch.zeros(1, 2)).tolist() == [[1.0, 1.0]]


# --- objects that cannot be serialized ---

closed_file = io.FileIO(__file__)
closed_file.close()
text_file = io.TextIOWrapper(io.BytesIO())
lock = threading.Lock()
event = threading.Event()
a_socket = socket.socket()
a_socket.close()
a_thread = threading.Thread()
a_generator = (n for n in range(3))
a_frame = sys._getframe()
a_weak_reference = weakref.ref(Plain)
local_storage = threading.local()
nested = {"deep": [1, (2, closed_file)]}
this_module = sys.modules[__name__]
module_globals = vars(this_module)


class UsesAModuleAsAWhole(CustomLogitProcessor):
    """After another method used one of its names."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        return logits + len(this_module.HERE.name)  # type: ignore[attr-defined]

    def later(self, name: str) -> Any:
        return getattr(this_module, name)


def test_module_as_a_whole_is_refused_after_its_names() -> None:
    with pytest.raises(ProcessorSerializationError, match=r"is your module .* as a whole"):
        serialize(UsesAModuleAsAWhole)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not picklable")


unpicklable = Unpicklable()


class FailsToLoad:
    """Can be pickled but not loaded."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


fails_to_load = FailsToLoad()


def processor_using(variable: str) -> type[CustomLogitProcessor]:
    """Return a processor whose `__call__` uses a global of this module."""
    text = (
        "class Ban(CustomLogitProcessor):\n"
        "    def __call__(self, logits, custom_param_list=None):\n"
        f"        {variable}\n"
        "        return logits\n"
    )
    scope: dict[str, Any] = {**globals(), "__name__": "author"}
    exec(text, scope)
    cls: type[CustomLogitProcessor] = scope["Ban"]
    return cls


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("text_file", "global 'text_file' used by Ban.__call__ is an open file"),
        ("closed_file", "global 'closed_file' used by Ban.__call__ is a closed file"),
        ("lock", "global 'lock' used by Ban.__call__ is a lock"),
        ("event", "global 'event' used by Ban.__call__ is a thread synchronization object"),
        ("a_socket", "global 'a_socket' used by Ban.__call__ is a socket"),
        ("a_thread", "global 'a_thread' used by Ban.__call__ is a thread"),
        ("a_generator", "global 'a_generator' used by Ban.__call__ is a generator"),
        ("a_frame", "global 'a_frame' used by Ban.__call__ is a stack frame"),
        ("a_weak_reference", "global 'a_weak_reference' used by Ban.__call__ is a weak reference"),
        ("local_storage", "global 'local_storage' used by Ban.__call__ is thread-local storage"),
        ("nested", "global 'nested' used by Ban.__call__ holds a closed file"),
        ("this_module", "global 'this_module' used by Ban.__call__ is your module .* as a whole"),
        ("module_globals", r"global 'module_globals' used by Ban.__call__ is the globals\(\) of module"),
        ("unpicklable", "global 'unpicklable' used by Ban.__call__ cannot be serialized: RuntimeError: not picklable"),
        ("fails_to_load", "class Ban does not load after it is serialized: .*not a number"),
    ],
)
def test_unserializable_global_is_named(variable: str, message: str) -> None:
    with pytest.raises(ProcessorSerializationError, match=message):
        processor_using(variable).to_str()


def test_unserializable_object_location_is_named() -> None:
    captured = threading.Lock()

    class InClosure(Plain):
        def helper(self) -> Any:
            return captured

    class InDefault(Plain):
        def helper(self, value: Any = captured) -> Any:
            return value

    class InAttribute(Plain):
        guard = captured

    for cls, message in [
        (InClosure, "variable 'captured' captured by .*InClosure.helper is a lock"),
        (InDefault, "a default argument of .*InDefault.helper holds a lock"),
        (InAttribute, "attribute 'guard' of class .*InAttribute is a lock"),
    ]:
        with pytest.raises(ProcessorSerializationError, match=message):
            cls.to_str()


def test_compiled_author_module_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = str(tmp_path / "fastban.so")
    compiled = types.ModuleType("fastban")
    compiled.__spec__ = ModuleSpec("fastban", ExtensionFileLoader("fastban", path), origin=path)
    compiled.__file__ = path
    monkeypatch.setitem(sys.modules, "fastban", compiled)
    cls = processor_using("fastban.ban(logits)")
    cls.__call__.__globals__["fastban"] = compiled
    message = "global 'fastban' used by Ban.__call__ is your compiled module fastban"
    with pytest.raises(ProcessorSerializationError, match=message):
        cls.to_str()


def test_author_import_inside_method_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_helpers.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("my_helpers")
    with pytest.raises(ProcessorSerializationError, match=r"Ban.__call__ imports your module my_helpers"):
        processor_using("from my_helpers import VALUE").to_str()
    sys.modules.pop("my_helpers")


def test_abstract_class_is_refused() -> None:
    class Unfinished(CustomLogitProcessor):
        pass

    with pytest.raises(ProcessorSerializationError, match="Unfinished is abstract: it lacks __call__"):
        Unfinished.to_str()
    with pytest.raises(ProcessorSerializationError, match="CustomLogitProcessor is abstract"):
        CustomLogitProcessor.to_str()


def test_class_with_required_arguments_is_refused() -> None:
    class Needy(Plain):
        def __init__(self, token: int) -> None:
            self.token = token

    with pytest.raises(ProcessorSerializationError, match=r"Needy cannot be created without arguments .*'token'"):
        Needy.to_str()


@pytest.mark.parametrize("base", [dict, Exception])
def test_class_without_signature(base: type) -> None:
    """Python has none for some classes written in C."""

    class WithoutSignature(Plain, base):  # type: ignore[misc]
        pass

    loaded = instantiate(load_class(serialize(WithoutSignature)))
    assert loaded(torch.zeros(1, 1)).shape == (1, 1)


def test_non_dict_schema_is_refused() -> None:
    class BadSchema(Plain):
        params_schema = ["token_id"]  # noqa: RUF012

    with pytest.raises(ProcessorSerializationError, match="params_schema is not a dict but list"):
        BadSchema.to_str()


def test_self_referencing_class() -> None:
    class Self(Plain):
        known: list[Any] = []  # noqa: RUF012

        def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
            assert Self.known[0] is Self is type(self)
            return super().__call__(logits)

    Self.known.append(Self)
    loaded = load_class(PickledProcessor(dump_class(Self)))
    assert loaded.known[0] is loaded  # type: ignore[attr-defined]
    assert instantiate(loaded)(torch.zeros(1, 1)).tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [({"title": object()}, "params_schema: not JSON"), ({"title": "x" * MAX_SCHEMA_BYTES}, "bytes of JSON, at most")],
)
def test_schema_that_cannot_be_sent_is_refused(schema: dict[str, object], reason: str) -> None:
    class Unsendable(Plain):
        params_schema = schema

    with pytest.raises(ProcessorSerializationError, match=reason):
        Unsendable.to_str()


def test_pydantic_model_becomes_its_schema() -> None:
    class Params(BaseModel):
        sentences: int = Field(ge=1)

    class WithModel(Plain):
        params_schema = Params

    assert WithModel.params_schema == Params.model_json_schema()
    string = parse(WithModel.to_str())
    assert isinstance(string, PickledProcessor)
    assert string.params_schema == Params.model_json_schema()
    assert load_class(string).params_schema == Params.model_json_schema()
