"""Fixtures with `LLM` and `AsyncLLM` on the tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.offline.async_llm import AsyncLLM
from logitship.server.offline.llm import LLM
from logitship.server.offline.sampling_params import SamplingParams


@pytest.fixture
def make_llm(make_engine: Callable[..., AsyncEngine]) -> Iterator[Callable[..., LLM]]:
    """Make an `LLM` with settings of `ServerConfig`; it is shut down after the test."""
    made: list[LLM] = []

    def make(**settings: object) -> LLM:
        settings = {"logits_processor_pattern": ".*", **settings}
        made.append(LLM._from_engine(make_engine(**settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="module")
def llm(make_module_engine: Callable[..., AsyncEngine]) -> Iterator[LLM]:
    """One `LLM` for the tests of a file."""
    llm = LLM._from_engine(make_module_engine(logits_processor_pattern=".*"))
    yield llm
    llm.shutdown()


@pytest.fixture
def assert_idle() -> Callable[[LLM], None]:
    """Fail if a request of an earlier call still runs. The request made here follows the cancellation of those."""

    def check(llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate("still here", params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        stats = llm._engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)

    return check


@pytest.fixture
def make_async_llm(make_engine: Callable[..., AsyncEngine]) -> Iterator[Callable[..., AsyncLLM]]:
    """Make an `AsyncLLM` with settings of `ServerConfig`; it is shut down after the test."""
    made: list[AsyncLLM] = []

    def make(**settings: object) -> AsyncLLM:
        made.append(AsyncLLM._from_engine(make_engine(**settings)))
        return made[-1]

    yield make
    for async_llm in made:
        async_llm.shutdown()
