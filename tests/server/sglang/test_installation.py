"""Installation of the plugin, on fakes of SGLang's modules."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from logitship.server.runtime.hook_target import HookTarget
from logitship.server.sglang import installation
from logitship.server.sglang.hooks import TARGETS
from logitship_sglang import GENERATE, NOT_RUN, ProcessorText, load


class FakeManager:
    """Fake of SGLang's `TokenizerManager`."""

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[str]:
        yield "generated"


class FakeProcessor:
    """Fake of SGLang's `CustomLogitProcessor`."""

    @classmethod
    def from_str(cls, json_str: str) -> Any:
        raise AssertionError("unpickled")


class FakeRegistry:
    """Fake of SGLang's `HookRegistry`, which logs what goes wrong and goes on."""

    def __init__(self, unknown: str = "") -> None:
        self._unknown = unknown
        self._hooks: dict[str, Any] = {}
        self._patched: set[str] = set()

    def register(self, target: str, hook: Any, hook_type: Any) -> None:
        self._hooks[target] = hook

    def apply_hooks(self) -> None:
        self._patched |= self._hooks.keys() - {self._unknown}


class FakeSglang:
    """Fake of SGLang's modules.

    Attributes:
        manager: its `TokenizerManager`.
        processors: the module of `CustomLogitProcessor`.
        registry: its `HookRegistry`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.manager: Any = type("TokenizerManager", (FakeManager,), {})
        self.processors = SimpleNamespace(
            CustomLogitProcessor=type("CustomLogitProcessor", (FakeProcessor,), {}),
            _cache_from_str=lambda text: "unpickled",
            dill=SimpleNamespace(loads=lambda data: "unpickled", dumps=lambda value: b"pickle"),
        )
        self.registry = FakeRegistry()
        self._add("sglang.srt.sampling", custom_logit_processor=self.processors)
        self._add("sglang.srt.managers.tokenizer_manager", TokenizerManager=self.manager)
        self._add(
            "sglang.srt.plugins.hook_registry", HookRegistry=self.registry, HookType=SimpleNamespace(AROUND="around")
        )

    def _add(self, name: str, **contents: Any) -> None:
        module = ModuleType(name)
        vars(module).update(contents)
        parts = name.split(".")
        for number in range(1, len(parts)):
            parent = ".".join(parts[:number])
            if parent not in sys.modules:
                self._patch.setitem(sys.modules, parent, ModuleType(parent))
            sys.modules[parent].__path__ = []  # type: ignore[attr-defined]
            child = sys.modules.get(".".join(parts[: number + 1]), module)
            self._patch.setattr(sys.modules[parent], parts[number], child, raising=False)
        self._patch.setitem(sys.modules, name, module)

    def generate(self, processor: str | None) -> list[str]:
        """Send a request with a processor, or None."""

        async def responses() -> list[str]:
            obj = SimpleNamespace(custom_logit_processor=processor)
            return [each async for each in self.manager().generate_request(obj)]

        return asyncio.run(responses())


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> FakeSglang:
    return FakeSglang(monkeypatch)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Sets the parameters of `generate_request` that the plugin knows, its only target."""

    def set_known(parameters: list[str]) -> None:
        monkeypatch.setattr(installation, "TARGETS", [HookTarget(GENERATE, parameters, len)])

    return set_known


def assert_unpickles_nothing(sglang: FakeSglang) -> None:
    assert isinstance(sglang.processors.CustomLogitProcessor.from_str("text"), ProcessorText)
    with pytest.raises(ValueError, match="refuses"):
        sglang.processors._cache_from_str("text")
    with pytest.raises(ValueError, match="refuses"):
        sglang.processors.dill.loads(b"")
    assert sglang.processors.dill.dumps(1) == b"pickle"


def test_hooks_are_applied_to_a_known_version(sglang: FakeSglang, known: Callable[[list[str]], None]) -> None:
    known(["obj", "request"])
    load()
    assert_unpickles_nothing(sglang)
    assert sglang.registry._patched == {GENERATE}
    assert sglang.generate("text") == ["generated"]


@pytest.mark.parametrize("reason", ["other parameters", "not applied", "a wrong setting"])
def test_processors_are_refused_otherwise(
    reason: str,
    sglang: FakeSglang,
    known: Callable[[list[str]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    known(["obj"] if reason == "other parameters" else ["obj", "request"])
    if reason == "not applied":
        sglang.registry._unknown = GENERATE
    elif reason == "a wrong setting":
        monkeypatch.setenv("LOGITSHIP_SGLANG_X", "1")
    load()
    assert_unpickles_nothing(sglang)
    assert sglang.generate(None) == ["generated"]
    with pytest.raises(ValueError, match="logitship refuses custom logit processors"):
        sglang.generate("text")
    assert "all of them are refused" in caplog.text


def test_sglang_does_not_start_if_processors_cannot_be_refused(
    sglang: FakeSglang, known: Callable[[list[str]], None]
) -> None:
    known(["obj"])
    del FakeManager.generate_request
    try:
        with pytest.raises(SystemExit, match="SGLANG_PLUGINS"):
            load()
    finally:
        FakeManager.generate_request = GENERATE_REQUEST  # type: ignore[method-assign]
    assert_unpickles_nothing(sglang)


GENERATE_REQUEST = FakeManager.generate_request


def test_text_ends_requests_that_no_hook_runs() -> None:
    request = SimpleNamespace(to_finish=None)
    logits = object()
    assert ProcessorText("text")(logits, [None, {"__req__": request}]) is logits
    assert request.to_finish.message == NOT_RUN
    assert request.to_finish.status_code == 400


def test_difference_names_the_parameters(sglang: FakeSglang) -> None:
    assert HookTarget(GENERATE, ["obj", "request"], len).difference is None
    assert HookTarget(GENERATE, ["obj"], len).difference == f"{GENERATE} takes obj, request"
    assert "no_such" in str(HookTarget("sglang.no_such.function", [], len).difference)


def test_targets_have_different_paths() -> None:
    assert len({target.path for target in TARGETS}) == len(TARGETS) == 15


ROOT = Path(__file__).parents[3]
ENTRY_POINT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
BROKEN = ["httpx", "logitship", "logitship.client", "logitship.server.sglang.hooks", "numpy", "orjson", "torch"]
"""Modules that may be missing or broken in the environment of an engine."""
LOADED_BY_SGLANG = """
import asyncio, importlib.abc, logging, sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ImportError("a broken installation")

sys.meta_path.insert(0, Broken())
try:  # as SGLang does in load_plugins
    EntryPoint("logitship", sys.argv[2], "sglang.srt.plugins").load()()
except Exception:
    logging.exception("Failed to load plugin")

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling import custom_logit_processor

async def generate(processor):
    obj = SimpleNamespace(custom_logit_processor=processor)
    return [each async for each in TokenizerManager().generate_request(obj)]

unpickled = []
try:
    unpickled.append(custom_logit_processor.CustomLogitProcessor.from_str("text"))
    unpickled.append(custom_logit_processor._cache_from_str("text"))
except ValueError as error:
    print(error)
print([each for each in unpickled if each == "unpickled"], asyncio.run(generate(None)))
try:
    print(asyncio.run(generate("text")))
except ValueError as error:
    print(error)
"""
SGLANG_FILES = {
    "sglang/srt/sampling/custom_logit_processor.py": """
def _cache_from_str(json_str):
    return "unpickled"

class CustomLogitProcessor:
    @classmethod
    def from_str(cls, json_str):
        return _cache_from_str(json_str)
""",
    "sglang/srt/managers/tokenizer_manager.py": """
class TokenizerManager:
    async def generate_request(self, obj, request=None):
        yield "generated"
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_nothing_is_unpickled_if_a_module_cannot_be_imported(broken: str, tmp_path: Path) -> None:
    """SGLang logs the error and starts: nothing that logitship needs for running may be needed for refusing."""
    for name, text in SGLANG_FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BY_SGLANG, broken, ENTRY_POINT["logitship"]],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [NOT_RUN, "[] ['generated']", NOT_RUN]
    assert "all of them are refused" in done.stderr
    assert "a broken installation" in done.stderr


def test_entry_point_needs_only_the_standard_library() -> None:
    """Apart from what its functions import."""
    module, _, _ = ENTRY_POINT["logitship"].partition(":")
    body = ast.parse((ROOT / "src" / f"{module}.py").read_text()).body
    imported = {each.module for each in body if isinstance(each, ast.ImportFrom)}
    imported |= {alias.name for each in body if isinstance(each, ast.Import) for alias in each.names}
    assert {str(name).split(".")[0] for name in imported} <= sys.stdlib_module_names
