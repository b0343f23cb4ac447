"""An engine on a machine that has no thread left for a while: requests are refused, and nobody waits afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString, SourceProcessor
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.config import ServerConfig
from logitship.server.engine import build
from logitship.server.engine.async_engine import _MANY_SEQUENCES, AsyncEngine
from logitship.server.engine.readiness import Readiness
from logitship.server.http_server import running_server
from logitship.server.model.model_loader import LoadedModel
from logitship.server.refusals import ServiceUnavailable
from logitship.server.requests.messages import GenerationRequest, ProcessorRequest

BuildEngine = Callable[..., AsyncEngine]


class Threads:
    """Lets threads start, or not. Stands in for `Thread.start`.

    Attributes:
        share: share of the starts that fail.
        num_failed: starts that failed.
    """

    def __init__(self, start: Callable[[threading.Thread], None]) -> None:
        self._start = start
        self._random = random.Random(0)
        self.share = 0.0
        self.num_failed = 0

    def start(self, thread: threading.Thread) -> None:
        if self._random.random() < self.share:
            self.num_failed += 1
            raise RuntimeError("can't start new thread")
        self._start(thread)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    made = Threads(threading.Thread.start)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: made.start(thread))
    return made


def shipped(number: int) -> SourceProcessor:
    source = f"""
from logitship import CustomLogitProcessor

class P{number}(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits
"""
    return SourceProcessor(source, f"P{number}")


def requests(number: int) -> list[GenerationRequest]:
    """Return a request for each way to a thread of its own: each kind of processor, and many sequences."""
    ways: list[tuple[int, ProcessorString | None, dict[str, Any]]] = [
        (1, InstalledProcessor("disallowed_tokens"), {"token_ids": [5]}),
        (1, InstalledProcessor("grammar"), {"regex": f"[a-f]{{{number + 1}}}x*"}),
        (1, shipped(number), {}),
        (_MANY_SEQUENCES + 1, None, {}),
    ]
    return [
        GenerationRequest(
            rid=f"{number}-{way}",
            tenant="one",
            prompt_token_ids=[5],
            n=n,
            sampling_params=SamplingParams(max_tokens=2, ignore_eos=True),
            processors=() if string is None else (ProcessorRequest(string, params),),
        )
        for way, (n, string, params) in enumerate(ways)
    ]


async def outcome(engine: AsyncEngine, request: GenerationRequest) -> str:
    """Run a request. Return how it ends: with its finish reason, or refused."""
    try:
        chunks = [chunk async for chunk in await engine.submit(request)]
    except ServiceUnavailable:
        return "refused"
    assert chunks[-1].finish_reason is not None
    return chunks[-1].finish_reason.kind


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 120))


def test_requests_are_refused_while_no_thread_starts(make_engine: BuildEngine, threads: Threads) -> None:
    engine = make_engine()

    async def scenario() -> None:
        running = GenerationRequest(
            rid="runs",
            tenant="two",
            prompt_token_ids=[5],
            sampling_params=SamplingParams(max_tokens=100, ignore_eos=True),
        )
        other = asyncio.create_task(outcome(engine, running))
        threads.share = 1.0
        for number in range(3):
            outcomes = [await outcome(engine, each) for each in requests(number)]
            assert outcomes == ["refused"] * 4
        assert await other == "length"
        threads.share = 0.0
        assert [await outcome(engine, each) for each in requests(0)] == ["length"] * 4

    run(scenario())
    assert not engine._active


def test_requests_end_while_few_threads_start(make_engine: BuildEngine, threads: Threads) -> None:
    """Each is refused at once, or served, also by what started before."""
    engine = make_engine()

    async def scenario() -> None:
        threads.share = 0.5
        outcomes: set[str] = set()
        for number in range(12):
            own = requests(number)
            theirs = [dataclasses.replace(each, tenant="two") for each in requests(number)]
            outcomes.update(await asyncio.gather(*(outcome(engine, each) for each in (*own, *theirs))))
        assert outcomes == {"refused", "length"}
        threads.share = 0.0
        assert [await outcome(engine, each) for each in requests(20)] == ["length"] * 4

    run(scenario())
    assert threads.num_failed > 20
    assert not engine._active
    assert engine.pool.num_running == engine.pool.num_waiting == 0


def test_shutdown_without_a_thread_stops_the_engine(make_engine: BuildEngine, threads: Threads) -> None:
    engine = make_engine()
    threads.share = 1.0
    run(engine.shutdown(1.0))
    assert not engine.healthy


def test_zygote_is_revived_once_a_thread_starts(make_engine: BuildEngine, threads: Threads) -> None:
    class Lost:
        can_start = False
        num_revived = 0

        def revive(self) -> None:
            self.num_revived += 1

    engine, lost = make_engine(), Lost()
    readiness = Readiness(engine._active, engine._thread, lost, 60.0)  # type: ignore[arg-type]

    async def scenario() -> None:
        threads.share = 1.0
        assert len(await readiness.reasons()) == 1
        threads.share = 0.0
        assert len(await readiness.reasons()) == 1
        assert readiness._reviving is not None
        await readiness._reviving
        assert lost.num_revived == 1

    run(scenario())


def test_server_that_cannot_start_stops_its_engine(make_engine: BuildEngine, threads: Threads) -> None:
    engine = make_engine()
    threads.share = 1.0
    with pytest.raises(RuntimeError, match="can't start new thread"), running_server(engine.config, engine):
        pass
    assert not engine.healthy


def test_engine_that_cannot_start_leaves_no_process(
    loaded_model: LoadedModel, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(build, "start_zygote", started.append)
    threads.share = 1.0
    with pytest.raises(RuntimeError, match="can't start new thread"):
        build.build_engine(ServerConfig(enable_custom_logit_processor=True), loaded_model)
    assert not started
