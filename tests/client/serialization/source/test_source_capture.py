"""Capture of source that behaves like the pickle."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.client.serialization.loading import instantiate, load_class
from logitship.client.serialization.processor_string import PickledProcessor, parse
from logitship.client.serialization.source.source_capture import capture_source

WITHOUT_SOURCE = {"ModuleAttributes", "NoSource", "SetLater", "Trained"}
"""Classes without source: it uses a module as an object, its code was only exec'd, or an object was changed after the
statement that created it."""


def test_source_gives_same_results_as_pickle(results: Any) -> None:
    with_source = {name: result for name, result in results.from_source.items() if result is not None}
    assert with_source == {name: result for name, result in results.expected.items() if name not in WITHOUT_SOURCE}


def test_source_keeps_author_text(results: Any) -> None:
    string = parse(results.strings["Helpers"])
    assert isinstance(string, PickledProcessor)
    assert string.source is not None
    text = string.source.source
    assert text.startswith("from __future__ import annotations\n")
    assert "from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor\n" in text
    assert "\ndouble = lambda x: x * 2" in text
    assert "@functools.cache\ndef fibonacci(n: int) -> int:\n" in text
    assert "SCALE = 2.0\n" in text
    assert text.index("class Adding(CustomLogitProcessor)") < text.index("class Helpers(Adding)")
    assert text.index("def politely") < text.index("class Helpers(Adding)")
    assert "logitship" not in text


def test_imported_names_are_kept(results: Any) -> None:
    string = parse(results.strings["Imported"])
    assert isinstance(string, PickledProcessor)
    assert string.source is not None
    assert "SCALE = 3.0\n" in string.source.source
    assert "FACTOR = SCALE\n" in string.source.source


class Score:
    """A class of the author."""


score, names = Score(), {}
names[score] = "a"


def test_statement_that_only_reads_a_name_does_not_bind_it() -> None:
    class Scored(CustomLogitProcessor):
        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            return logits if isinstance(score, Score) else -logits

    source, _ = capture_source(Scored)
    assert source is not None
    assert "score, names = Score(), {}" in source.source


limit = 1.0


def shadowed() -> float:
    return limit


def test_name_clash_has_no_source() -> None:
    limit = 2.0

    class Clash(CustomLogitProcessor):
        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            return logits + limit + shadowed()

    assert capture_source(Clash)[0] is None
    loaded = instantiate(load_class(parse_pickled(Clash.to_str())))
    assert loaded(torch.zeros(1, 1)).tolist() == [[3.0]]


def parse_pickled(text: str) -> PickledProcessor:
    string = parse(text)
    assert isinstance(string, PickledProcessor)
    return string


def test_multiline_strings_keep_indentation() -> None:
    class Quoting(CustomLogitProcessor):
        text = """
        indented
        """

        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            return logits

    source, _ = capture_source(Quoting)
    assert source is not None
    assert load_class(source).text == Quoting.text  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value",
    [float("inf"), {1, 2}, torch.tensor([1.0, 2.0]), b"bytes", ("a", [1, {"b": None}]), 1 << 2047, [-(10**5000)]],
)
def test_captured_constants_are_equal(value: Any, make_processor: Callable[[Any], type[CustomLogitProcessor]]) -> None:
    source, _ = capture_source(make_processor(value))
    assert source is not None
    held = instantiate(load_class(source)).held()  # type: ignore[attr-defined]
    assert type(held) is type(value)
    assert torch.equal(held, value) if isinstance(value, torch.Tensor) else held == value


@pytest.fixture
def make_processor() -> Callable[[Any], type[CustomLogitProcessor]]:
    def make(value: Any) -> type[CustomLogitProcessor]:
        class Holder(CustomLogitProcessor):
            def held(self) -> Any:
                return value

            def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
                return logits

        return Holder

    return make


def test_random_weights_have_no_source() -> None:
    class Random(CustomLogitProcessor):
        head = torch.nn.Linear(2, 2)
        shift = random.random() + np.random.random()

        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            return self.head(logits).detach() + self.shift  # type: ignore[no-any-return]

    def states() -> list[Any]:
        return [torch.random.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]

    before = states()
    assert capture_source(Random)[0] is None
    assert states() == before
    logits = torch.ones(1, 2)
    loaded = instantiate(load_class(parse_pickled(Random.to_str())))
    assert torch.equal(loaded(logits), Random()(logits))


USES_LAZY_PACKAGE = """
from lazy_package import double, FACTOR as factor
from logitship import CustomLogitProcessor

class Doubling(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return double(logits) * factor
"""


def test_name_that_only_the_modules_getattr_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lazy_package.py").write_text(
        "def __getattr__(name):\n    import lazy_helpers\n    return getattr(lazy_helpers, name)\n"
    )
    (tmp_path / "lazy_helpers.py").write_text("FACTOR = 3\ndef double(x):\n    return 2 * x\n")
    (tmp_path / "uses_lazy_package.py").write_text(USES_LAZY_PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    string = parse_pickled(import_module("uses_lazy_package").Doubling.to_str())
    assert string.source is not None
    assert instantiate(load_class(string.source))(torch.ones(1, 1)).tolist() == [[6.0]]
    for name in ("lazy_package", "lazy_helpers", "uses_lazy_package"):
        sys.modules.pop(name)


def test_source_that_raises_is_dropped() -> None:
    class Once(CustomLogitProcessor):
        handle = open_once()

        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            return logits + self.handle

    assert capture_source(Once)[0] is None


opened: list[int] = []


def open_once(seen: list[int] = opened) -> int:
    if seen:
        raise FileExistsError("already open")
    seen.append(1)
    return 1
