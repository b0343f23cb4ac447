from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
from tqdm import tqdm

from logitship.server.offline.llm import LLM
from logitship.server.offline.outputs import CompletionOutput, RequestOutput
from logitship.server.offline.progress import Progress
from logitship.server.offline.sampling_params import SamplingParams


class Bar:
    """Records the calls to it."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.ticks = 0
        self.postfixes: list[str] = []
        self.closed = False

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.postfixes.append(text)

    def update(self, count: int) -> None:
        self.ticks += count

    def close(self) -> None:
        self.closed = True


def test_bar_counts_finished_requests(make_llm: Callable[..., LLM]) -> None:
    bars: list[Bar] = []

    def make_bar(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    make_llm().generate(["a", "b", "c"], SamplingParams(n=2, max_tokens=2), use_tqdm=make_bar)
    (bar,) = bars
    assert bar.options["total"] == 3
    assert bar.ticks == 3
    assert len(bar.postfixes) == 3
    assert all("input:" in text and "output:" in text and "tokens/s" in text for text in bar.postfixes)
    assert bar.closed


def test_token_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.0])
    monkeypatch.setattr("logitship.server.offline.progress.time.perf_counter", lambda: next(now))
    completion = CompletionOutput(0, "", [1] * 8, None, None, "length")
    bar = Bar()
    with Progress(lambda **_: bar, 1) as progress:
        progress.tick(RequestOutput("0", None, [1] * 5, None, [completion, completion], finished=True))
    assert bar.postfixes == ["input: 2.50 tokens/s, output: 8.00 tokens/s"]


def test_tqdm_bar(make_llm: Callable[..., LLM]) -> None:
    file = io.StringIO()
    make_llm().generate(["a", "b"], use_tqdm=functools.partial(tqdm, file=file))
    assert "2/2" in file.getvalue()
    assert "tokens/s" in file.getvalue()


def test_bar_is_optional(make_llm: Callable[..., LLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm = make_llm()
    llm.generate("a", use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate("a")
    assert "1/1" in capsys.readouterr().err
