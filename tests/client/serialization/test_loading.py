"""Loading of processor strings, and error messages for invalid ones."""

from __future__ import annotations

import gc
import importlib
import json
import linecache
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dill
import pytest
import torch

from logitship import CustomLogitProcessor, ProcessorLoadError
from logitship.client import shipped_lines
from logitship.client.author_errors import author_traceback
from logitship.client.serialization.code_names import missing_globals
from logitship.client.serialization.loading import explain_name_error, instantiate, load_class
from logitship.client.serialization.processor_string import PYTHON, PickledProcessor, SourceProcessor, parse
from logitship.client.serialization.shipped_names import SGLANG_MODULE
from logitship.client.shipped_lines import line_of

DATA = Path(__file__).parents[2] / "data"
SGLANG = json.loads((DATA / "sglang_strings.json").read_text())["strings"][PYTHON]
BUILTINS = [name for name in SGLANG if name.endswith("Processor")]
USERS = ["Boost", "Countdown", "ForceToken"]


def load(text: str, names: dict[tuple[str, str], Any] | None = None) -> type[CustomLogitProcessor]:
    string = parse(text)
    assert isinstance(string, PickledProcessor | SourceProcessor)
    return load_class(string, names or {})


def source(text: str, class_name: str = "Ban") -> type[CustomLogitProcessor]:
    return load_class(SourceProcessor(text, class_name))


class StubProcessor(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits


# --- SGLang's strings ---


def test_recorded_strings_are_complete() -> None:
    assert sorted([*BUILTINS, *USERS]) == sorted(SGLANG)


@pytest.mark.parametrize("name", BUILTINS)
def test_sglang_builtin_is_found_by_name(name: str) -> None:
    assert load(SGLANG[name], {(SGLANG_MODULE, name): StubProcessor}) is StubProcessor
    with pytest.raises(ProcessorLoadError, match=rf"has no '{name}' here, only CustomLogitProcessor"):
        load(SGLANG[name])


def run(name: str, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
    cls = load(SGLANG[name])
    assert issubclass(cls, CustomLogitProcessor)
    return instantiate(cls)(logits, params)


def test_force_token() -> None:
    result = run("ForceToken", torch.zeros(2, 5), [{"token_id": 1}, {"token_id": 4}])
    assert torch.isfinite(result).nonzero().tolist() == [[0, 1], [1, 4]]


def test_boost_returns_float64() -> None:
    result = run("Boost", torch.ones(2, 3), [{"token_id": 0}, {"token_id": 2}])
    assert result.dtype is torch.float64
    assert result.tolist() == [[8.5, 1.0, 1.0], [1.0, 1.0, 8.5]]


def test_countdown_reads_history() -> None:
    rows = [([1, 2], [3]), ([4] * 5, [6, 7])]
    params = [{"__req__": SimpleNamespace(origin_input_ids=p, output_ids=o)} for p, o in rows]
    result = run("Countdown", torch.zeros(2, 6), params)
    assert torch.isfinite(result).nonzero().tolist() == [[0, 3], [1, 1]]


def in_main(body: str, **variables: Any) -> str:
    """Return a string as SGLang makes it of a class in `__main__`: its functions use the loader's `__main__`."""
    main: Any = sys.modules["__main__"]
    before = dict(vars(main))
    scope = vars(main)
    scope.update(variables, CustomLogitProcessor=CustomLogitProcessor)
    try:
        exec(compile(body, "author.py", "exec"), scope)
        return json.dumps({"callable": dill.dumps(scope["Ban"]).hex()})
    finally:
        scope.clear()
        scope.update(before)


COUNTING = """
class Ban(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        global counter
        counter = globals().get("counter", 0) + 1
        return logits + counter
"""


@pytest.fixture
def sglang_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plain dill pickle our base class under SGLang's name, as on SGLang."""
    module: Any = SimpleNamespace(CustomLogitProcessor=CustomLogitProcessor)
    for part in ("sglang", "sglang.srt", "sglang.srt.sampling"):
        monkeypatch.setitem(sys.modules, part, SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, SGLANG_MODULE, module)
    monkeypatch.setattr(sys.modules["sglang.srt.sampling"], "custom_logit_processor", module, raising=False)
    monkeypatch.setattr(CustomLogitProcessor, "__module__", SGLANG_MODULE)


@pytest.mark.usefixtures("sglang_base")
def test_main_globals_are_isolated() -> None:
    text = in_main(COUNTING)
    first, second = instantiate(load(text)), instantiate(load(text))
    zeros = torch.zeros(1, 1)
    assert [first(zeros).item(), first(zeros).item(), second(zeros).item()] == [1.0, 2.0, 1.0]
    assert not hasattr(sys.modules["__main__"], "counter")


USES_MISSING_HELPER = """
class Ban(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        if logits is None:
            return never_defined
        return helper(logits) + len(custom_param_list)
"""


@pytest.mark.usefixtures("sglang_base")
def test_missing_global_is_explained() -> None:
    cls = load(in_main(USES_MISSING_HELPER, helper=abs))
    assert missing_globals(cls) == ["helper", "never_defined"]
    with pytest.raises(NameError) as raised:
        instantiate(cls)(torch.zeros(1, 1), [{}])
    explanation = explain_name_error(raised.value, cls)
    assert explanation is not None
    assert explanation.startswith("'helper' was a global of the author's module and was not serialized")
    assert "logitship's to_str()" in explanation


def test_other_name_errors_are_not_explained() -> None:
    cls = source(BAN)
    assert missing_globals(cls) == []
    assert explain_name_error(NameError("name 'x' is not defined", name="x"), cls) is None
    assert explain_name_error(UnboundLocalError("x"), cls) is None


# --- other Python versions ---


def test_error_names_both_python_versions() -> None:
    with pytest.raises(ProcessorLoadError, match=rf"by Python 3.2, this server runs Python {PYTHON}"):
        load_class(PickledProcessor(b"\x80\x04.", python="3.2"))


# --- refused ---


def test_data_is_not_a_pickle() -> None:
    with pytest.raises(ProcessorLoadError, match="the processor's data is not a pickle"):
        load_class(PickledProcessor(b"hello"))


@pytest.mark.parametrize("name", USERS)
def test_truncated_data(name: str) -> None:
    payload = bytes.fromhex(json.loads(SGLANG[name])["callable"])
    for length in range(2, len(payload), 37):
        with pytest.raises(ProcessorLoadError, match="is truncated or damaged"):
            load_class(PickledProcessor(payload[:length]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1}, "the processor is not a class but dict"),
        (dict, "class dict is not a subclass of CustomLogitProcessor"),
        (len, "the processor is not a class but builtin_function_or_method"),
    ],
)
def test_payload_is_not_a_processor(value: Any, message: str) -> None:
    with pytest.raises(ProcessorLoadError, match=message):
        load_class(PickledProcessor(dill.dumps(value)))


def test_missing_module_is_named() -> None:
    payload = b"\x80\x04\x8c\x09my_module\x8c\x03Ban\x93."
    with pytest.raises(ProcessorLoadError, match=r"needs the module 'my_module', which is not installed here.*to_str"):
        load_class(PickledProcessor(payload))


def test_class_pickled_by_reference_to_main() -> None:
    payload = b"\x80\x04\x8c\x08__main__\x8c\x03Ban\x93."
    with pytest.raises(ProcessorLoadError, match="refers to 'Ban' of the author's script by name"):
        load_class(PickledProcessor(payload))


class Explodes:
    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


def test_code_raises_during_load() -> None:
    with pytest.raises(ProcessorLoadError, match="raised while it was loaded: ZeroDivisionError: division by zero"):
        load_class(PickledProcessor(dill.dumps(Explodes())))


# --- source ---

BAN = """
from logitship import CustomLogitProcessor

class Ban(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        logits[:, 0] = -1.0
        return logits
"""


@pytest.mark.parametrize(
    "line",
    [
        "from logitship import CustomLogitProcessor",
        "from logitship.client import CustomLogitProcessor",
        "import logitship; CustomLogitProcessor = logitship.CustomLogitProcessor",
        "from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor",
        "from sglang.srt.sampling.custom_logit_processor import *",
        "from sglang.srt.sampling import custom_logit_processor as m; CustomLogitProcessor = m.CustomLogitProcessor",
        "import sglang.srt.sampling.custom_logit_processor as m; CustomLogitProcessor = m.CustomLogitProcessor",
        "import sglang.srt.sampling.custom_logit_processor\n"
        "CustomLogitProcessor = sglang.srt.sampling.custom_logit_processor.CustomLogitProcessor",
    ],
)
def test_base_class_import_paths(line: str) -> None:
    before = set(sys.modules)
    cls = source(BAN.replace("from logitship import CustomLogitProcessor", line))
    assert cls.__bases__ == (CustomLogitProcessor,)
    assert instantiate(cls)(torch.zeros(1, 2)).tolist() == [[-1.0, 0.0]]
    assert set(sys.modules) == before


@pytest.fixture
def without_vllm_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove `vllm` from `sys.modules`, where an engine of an earlier test may have put it."""
    finders = [finder for finder in sys.meta_path if type(finder).__name__ != "VllmNamesFinder"]
    monkeypatch.setattr(sys, "meta_path", finders)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("without_vllm_names")
def test_names_table_is_used_at_run_time() -> None:
    text = BAN.replace(
        "logits[:, 0] = -1.0", "from vllm.v1.sample.logits_processor import BatchUpdate; assert BatchUpdate == 'ours'"
    )
    string = SourceProcessor(text, "Ban")
    names = {("vllm.v1.sample.logits_processor", "BatchUpdate"): "ours"}
    assert instantiate(load_class(string, names))(torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        instantiate(load_class(string))(torch.zeros(1, 2))
    with pytest.raises(ImportError, match="has no 'BatchUpdate' here, only Other"):
        instantiate(load_class(string, {("vllm.v1.sample.logits_processor", "Other"): 1}))(torch.zeros(1, 2))


def test_dataclass_in_source() -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass Pair:\n    a: int\n    b: ClassVar[int] = 2\n" + BAN.replace("-1.0", "Pair(3).a + Pair.b")
    )
    with pytest.raises(ProcessorLoadError, match=f"not valid Python {PYTHON}: line"):
        source(BAN + "from __future__ import annotations")
    assert instantiate(source(text))(torch.zeros(1, 2)).tolist() == [[5.0, 0.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Ban:\n    def :", rf"the source is not valid Python {PYTHON}: line 2: "),
        ("a\0b", rf"the source is not valid Python {PYTHON}"),
        (BAN.replace("Ban", "Other"), "the source does not define 'Ban'; its classes are: Other"),
        ("x = 1", "the source does not define 'Ban'; its classes are: none"),
        ("Ban = 1", "the processor is not a class but int"),
        ("class Ban: pass", "class Ban is not a subclass of CustomLogitProcessor"),
        (BAN.replace("__call__", "call"), "class Ban is abstract: it lacks __call__"),
        ("import no_such_library", "needs the module 'no_such_library', which is not installed here"),
        ("raise SystemExit(3)", "the source raised while it was loaded: SystemExit: 3"),
    ],
)
def test_invalid_source(text: str, message: str) -> None:
    with pytest.raises(ProcessorLoadError, match=message):
        source(text)


def test_author_traceback_is_kept() -> None:
    with pytest.raises(ProcessorLoadError) as raised:
        source("def fail():\n    raise ValueError('no')\n\nfail()\n")
    message = str(raised.value)
    assert "line 2, in fail\n    raise ValueError('no')\n" in message
    assert "loading.py" not in message


def test_author_traceback_quotes_the_right_line() -> None:
    with pytest.raises(ProcessorLoadError, match=r"line 4, in <module>\n    1 / 0\n"):
        source("\x0c\nTEXT = 'a\u2028b\x1cc'\n\n1 / 0\n")


AUTHOR_MODULE = """
from logitship import CustomLogitProcessor


def look_up(params):
    return params["token"]  # the last frame


class Pickled(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for params in custom_param_list:
            logits += look_up(params)
        return logits
"""


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PickledProcessor:
    """The class of `AUTHOR_MODULE`, from its processor string."""
    (tmp_path / "author_module.py").write_text(AUTHOR_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    cls = importlib.import_module("author_module").Pickled
    monkeypatch.delitem(sys.modules, "author_module")
    string = parse(cls.to_str())
    assert isinstance(string, PickledProcessor)
    return string


def traceback_of_call(string: PickledProcessor) -> str:
    with pytest.raises(KeyError) as raised:
        instantiate(load_class(string))(torch.zeros(1, 2), [{}])
    return author_traceback(raised.value).partition('  File "author_module.py"')[2]


def test_traceback_of_pickled_class_has_source_lines(pickled: PickledProcessor) -> None:
    assert traceback_of_call(pickled).splitlines() == [
        ", line 12, in __call__",
        "    logits += look_up(params)",
        '  File "author_module.py", line 6, in look_up',
        '    return params["token"]  # the last frame',
        "KeyError: 'token'",
    ]


def test_traceback_without_listing_has_no_source_lines(pickled: PickledProcessor) -> None:
    assert "look_up(params)" not in traceback_of_call(replace(pickled, listing=None))


def test_source_lines_are_removed_with_class(pickled: PickledProcessor) -> None:
    cls = load_class(pickled)
    code = cls.__call__.__code__
    assert line_of(code, 12) == "logits += look_up(params)"
    key = id(code)
    assert key in shipped_lines._lines_of
    del cls, code
    gc.collect()
    assert key not in shipped_lines._lines_of


def test_linecache_entry_is_removed_with_class() -> None:
    cls = source(BAN)
    filename = cls.__call__.__code__.co_filename
    assert linecache.getline(filename, 4) == "class Ban(CustomLogitProcessor):\n"
    del cls
    gc.collect()
    assert filename not in linecache.cache
    with pytest.raises(ProcessorLoadError):
        source("raise ValueError")
    assert not [name for name in linecache.cache if name.startswith("<processor")]


def test_captured_values_must_be_a_dict() -> None:
    with pytest.raises(ProcessorLoadError, match="'captured' is not a dict of values but list"):
        load_class(SourceProcessor(BAN, "Ban", dill.dumps([1])))


# --- instances ---


def test_init_with_required_arguments() -> None:
    cls = source(BAN + "\n    def __init__(self, token):\n        pass\n")
    with pytest.raises(ProcessorLoadError, match="Ban cannot be created without arguments: missing a"):
        instantiate(cls)


def test_init_raises() -> None:
    cls = source(BAN + "\n    def __init__(self):\n        raise OSError('disk')\n")
    with pytest.raises(ProcessorLoadError, match=r"Ban raised when it was created: OSError: disk") as raised:
        instantiate(cls)
    assert "line 10, in __init__" in str(raised.value)
