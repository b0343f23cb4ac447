"""SIGKILL of any sandbox process at any moment.

Nothing hangs, every request ends with its tokens or with a typed error, and nothing leaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import re
import select
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.sandbox import zygote_process
from logitship.sampler.sandbox.sandbox import Sandbox
from logitship.sampler.sandbox.zygote_process import ZygoteProcess
from logitship.server.config import ServerConfig
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.build import build_engine
from logitship.server.model.model_loader import LoadedModel
from logitship.server.model.model_runner import ModelRunner
from logitship.server.refusals import BadRequest, ServiceUnavailable
from logitship.server.requests.messages import FinishReason, GenerationRequest
from tests.helpers.coroutines import run
from tests.helpers.engine_requests import generate, request
from tests.helpers.processors import COUNTDOWN, shipped

KILLS = 200
LENGTH = 12
PATIENCE = 60.0
"""Seconds after which a request counts as hanging. It takes less than a second."""
WEIGHTS = {"sandbox": 150, "zygote": 36, "between": 8, "launcher": 6}
"""Relative frequency of kills by role. A launcher takes longest to restart, because it imports torch."""
PASSES = {"before a fork": 2, "after a fork": 2}
"""Passes of a trace point from which one is chosen. Forks are rare, and each is the first of its sandbox."""
NUMBERS = itertools.count()

BAN = shipped(
    "Ban",
    """
    result = logits.clone()
    for row, params in zip(result, custom_param_list):
        row[params["token_ids"]] = -torch.inf
    return result
    """,
)


@dataclass(frozen=True)
class Stream:
    """A request that is sent repeatedly.

    Attributes:
        new_class_each_time: change the class for each request, so that a new sandbox is forked.
    """

    name: str
    seed: int
    tenant: str = ""
    processors: tuple[tuple[SourceProcessor, dict[str, Any]], ...] = ()
    new_class_each_time: bool = False

    def request(self) -> GenerationRequest:
        number = next(NUMBERS)
        processors = [(self._string(string, number), params) for string, params in self.processors]
        rid = f"{self.name} {number}"
        return request(rid, self.name, processors, tenant=self.tenant, max_tokens=LENGTH, seed=self.seed)

    def _string(self, string: SourceProcessor, number: int) -> SourceProcessor:
        return (
            SourceProcessor(f"# {number}\n{string.source}", string.class_name) if self.new_class_each_time else string
        )


PLAIN = [Stream(f"without a processor {number}", number) for number in range(4)]
SANDBOXED = [
    Stream("ban", 10, processors=((BAN, {"token_ids": [40]}),)),
    Stream("ban others", 11, processors=((BAN, {"token_ids": [41, 42]}),)),
    Stream("ban, another tenant", 12, "a", ((BAN, {"token_ids": [40]}),)),
    Stream("ban, a third tenant", 13, "b", ((BAN, {"token_ids": [43]}),)),
    Stream("countdown", 14, processors=((COUNTDOWN, {"plus": 0}),)),
    Stream("countdown, another tenant", 15, "a", ((COUNTDOWN, {"plus": 7}),)),
    Stream("countdown, a fourth tenant", 16, "c", ((COUNTDOWN, {"plus": 9}),)),
    Stream("new class each time", 18, "d", ((BAN, {"token_ids": [60]}),), new_class_each_time=True),
    Stream("another new class each time", 19, "d", ((BAN, {"token_ids": [61]}),), new_class_each_time=True),
    Stream("both", 17, processors=((BAN, {"token_ids": [50]}), (COUNTDOWN, {"plus": 3}))),
]


async def run_through(engine: AsyncEngine, wanted: GenerationRequest) -> tuple[list[int], FinishReason]:
    """Return a request's tokens and finish reason. It must end in time, possibly with an error."""
    async with asyncio.timeout(PATIENCE):
        output = await generate(engine, wanted)
    return output.token_ids, output.finish_reason


def config(**settings: Any) -> ServerConfig:
    defaults: dict[str, Any] = {
        "model_path": "tiny",
        "max_num_seqs": 16,
        "random_seed": 0,
        "enable_custom_logit_processor": True,
        "processor_isolation": "sandbox",
        "sandbox_memory": 64 << 20,
        "max_sandboxes": 12,
        # On a busy machine, a processor that nobody kills may get no core for a second, which is the default.
        "sandbox_step_timeout": PATIENCE / 2,
        "sandbox_load_timeout": PATIENCE / 2,
    }
    return ServerConfig(**(defaults | settings))


class Trap:
    """Runs an action when the engine passes a trace point for the nth time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._armed: tuple[str, int, Callable[[], bool]] | None = None
        self.sprung = threading.Event()
        for cls, method, before, after in (
            (ModelRunner, "forward", "before the model", "after the model"),
            (Sandbox, "begin", "before a call is sent", "while a call is in flight"),
            (Sandbox, "advance", "before an answer is read", "after an answer was read"),
            (Sandbox, "enqueue", "before a command is queued", "after a command was queued"),
            (ZygoteProcess, "fork", "before a fork", "after a fork"),
        ):
            patch.setattr(cls, method, self._watched(getattr(cls, method), before, after))

    def _watched(self, method: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        self.trace_points = (*getattr(self, "trace_points", ()), before, after)

        def watched(*arguments: Any, **options: Any) -> Any:
            self._pass(before)
            try:
                return method(*arguments, **options)
            finally:
                self._pass(after)

        return watched

    def arm(self, trace_point: str, passes: int, action: Callable[[], bool]) -> None:
        """Run `action` at this trace point after `passes` passes; again at the next pass if it returns False."""
        self.sprung.clear()
        self._armed = trace_point, passes, action

    def _pass(self, trace_point: str) -> None:
        with self._lock:
            if self._armed is None or self._armed[0] != trace_point:
                return
            _, passes, action = self._armed
            if passes > 0 or not action():
                self._armed = trace_point, max(passes - 1, 0), action
                return
            self._armed = None
        self.sprung.set()


def kill(process: int, mark: str, *, wait: bool = False) -> bool:
    """SIGKILL a process, unless its PID was reused; and wait until it has ended."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(process)
        try:
            if mark.encode() in Path(f"/proc/{process}/cmdline").read_bytes():
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if wait:
                    poll = select.poll()
                    poll.register(pidfd, select.POLLIN)
                    assert poll.poll(PATIENCE * 1e3)
                return True
        finally:
            os.close(pidfd)
    return False


class Load:
    """Runs all streams repeatedly, and counts how their requests end.

    Args:
        engine: runs the requests.
        expected: the tokens of each stream without kills.
    """

    def __init__(self, engine: AsyncEngine, expected: dict[str, list[int]]) -> None:
        self._engine = engine
        self._expected = expected
        self._stopping = False
        self._succeeded = asyncio.Event()
        self.ends: Counter[str] = Counter()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for stream in PLAIN + SANDBOXED:
                group.create_task(self._run(stream))
            yield
            self._stopping = True

    async def wait_until_sandboxes_work(self) -> None:
        self._succeeded.clear()
        await self._succeeded.wait()

    async def _run(self, stream: Stream) -> None:
        while not self._stopping:
            try:
                tokens, reason = await run_through(self._engine, stream.request())
            except (BadRequest, ServiceUnavailable) as refused:  # 503 if the zygote was killed
                assert stream in SANDBOXED
                self.ends[f"refused: {refused.param}"] += 1
                await asyncio.sleep(0.05)  # clients do not try again at once
                continue
            expected = self._expected[stream.name]
            assert tokens == expected[: len(tokens)], stream.name
            if reason.error is None:
                assert (reason.kind, len(tokens)) == ("length", LENGTH)
                self.ends["complete"] += 1
                if stream in SANDBOXED:
                    self._succeeded.set()
                continue
            assert stream in SANDBOXED, (stream.name, reason)
            assert reason.error.type == "ProcessorFault", reason
            assert reason.error.kind in ("crash", "load"), reason
            self.ends[reason.error.kind] += 1


@dataclass(frozen=True)
class Resources:
    """Resources of this process that could leak."""

    descriptors: Counter[str]
    mappings: int
    threads: int
    children: int
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        return cls(
            descriptors=Counter(descriptor_kinds()),
            mappings=Path("/proc/self/maps").read_text().count("memfd:logitship"),
            threads=sum(map(is_of_logitship, threading.enumerate())),
            children=sum(child_of_this_process(folder) for folder in Path("/proc").iterdir()),
            # Tests in other processes, such as vLLM's, have files there too.
            shared_memory=frozenset(name for name in os.listdir("/dev/shm") if "logitship" in name),
        )


def is_of_logitship(thread: threading.Thread) -> bool:
    """Return whether logitship started a thread. Those of a work pool do not count: idle ones end after a while."""
    return thread.name.startswith("logitship") and not thread.name.startswith("logitship-work")


def descriptor_kinds() -> Iterator[str]:
    """Yield the type of each open descriptor: `socket`, `anon_inode:[pidfd]`, `/memfd`, and so on."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            kind = re.sub(r":\[\d+\]$", "", os.readlink(f"/proc/self/fd/{descriptor}")).split(" ")[0]
            if not re.fullmatch(r"/proc/\d+/stat", kind):  # opened by the executor to check a sandbox
                yield kind


def child_of_this_process(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        # Includes zombies.
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
    return False


async def undisturbed(engine: AsyncEngine) -> dict[str, list[int]]:
    streams = PLAIN + SANDBOXED
    running = [asyncio.create_task(run_through(engine, stream.request())) for stream in streams]
    await asyncio.wait(running)  # all: those that wait for a launcher must not pile up while others are sent again
    results = [each.result() for each in running]
    assert all(reason.kind == "length" for _, reason in results)
    return {stream.name: tokens for stream, (tokens, _) in zip(streams, results, strict=True)}


async def idle_resources(engine: AsyncEngine) -> Resources:
    """Return the resources while only the sandboxes of `undisturbed` exist."""
    assert await engine.flush_cache()
    await undisturbed(engine)
    async with asyncio.timeout(PATIENCE):
        await start_spares(engine)
    return await asyncio.get_running_loop().run_in_executor(None, Resources.now)


async def start_spares(engine: AsyncEngine) -> None:
    """Wait until the pool is full: else a sandbox may just be starting, and have more descriptors than later."""
    assert engine._sandboxes is not None
    spares = engine._sandboxes._spares
    spares._missing.set()  # one that could not be started is only started again after the next one was taken
    while len(spares._spares) < spares._count:
        await asyncio.sleep(0.01)


async def undisturbed_again(engine: AsyncEngine) -> dict[str, list[int]]:
    """Return the tokens of `undisturbed` after kills.

    A failure to load a processor is remembered for some seconds, and nothing can be loaded until a killed zygote has
    been replaced.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await undisturbed(engine)
            except (BadRequest, ServiceUnavailable):
                await asyncio.sleep(0.1)


@pytest.fixture
def trap() -> Iterator[Trap]:
    with pytest.MonkeyPatch.context() as patch:
        yield Trap(patch)


@pytest.fixture
def no_idle_processes() -> None:
    """Wait for the processes that earlier tests used, and that end once they have been idle for a while."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "logitship-idle":
            thread.join()


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("no_idle_processes")
def test_kills_under_load(loaded_model: LoadedModel, sandbox_processes: Any, trap: Trap) -> None:
    chance = random.Random(4)
    killed: Counter[str] = Counter()
    initial = Resources.now()
    engine = build_engine(config(), loaded_model)

    def kill_one() -> bool:
        roles = list(WEIGHTS)
        if killed.total() > KILLS // 2:  # chance may have left out a rare one
            roles = [role for role in WEIGHTS if not killed[role]] or roles
        (wanted,) = chance.choices(roles, [WEIGHTS[role] for role in roles])
        processes = sorted(sandbox_processes.of(wanted))
        if not processes or not kill(chance.choice(processes), sandbox_processes.mark):
            return False
        killed[wanted] += 1
        return True

    async def scene() -> tuple[Counter[str], Resources, Resources]:
        expected = await undisturbed(engine)
        loop = asyncio.get_running_loop()
        before = await idle_resources(engine)
        load = Load(engine, expected)
        async with load.running():
            for _ in range(KILLS):
                await load.wait_until_sandboxes_work()
                trace_point = chance.choice(trap.trace_points)
                trap.arm(trace_point, chance.randrange(PASSES.get(trace_point, 8)), kill_one)
                await loop.run_in_executor(None, trap.sprung.wait, PATIENCE)
                assert trap.sprung.is_set()
        assert await undisturbed_again(engine) == expected
        after = await idle_resources(engine)
        end = loop.time() + PATIENCE
        while after != before and loop.time() < end:  # dead sandboxes are closed a little later
            after = await loop.run_in_executor(None, Resources.now)
        return load.ends, before, after

    try:
        ends, before, after = run(scene(), timeout=800)
    finally:
        engine.stop()
    assert killed.total() == KILLS
    assert set(killed) == set(WEIGHTS)
    assert ends["complete"] > KILLS
    assert ends["crash"] > KILLS // 4, "the kills had no effect"
    assert asdict(after) == asdict(before)
    assert before.mappings > 0
    assert all(end in ("complete", "crash", "load") or end.startswith("refused: processors[") for end in ends)
    assert not sandbox_processes.roles()
    assert Resources.now() == initial


def test_engines_are_independent(loaded_model: LoadedModel, sandbox_processes: Any) -> None:
    first = build_engine(config(), loaded_model)
    first_processes = sandbox_processes.roles()
    second = build_engine(config(), loaded_model)
    second_processes = sandbox_processes.roles().keys() - first_processes.keys()

    async def scene() -> None:
        expected = await undisturbed(first)
        assert await undisturbed(second) == expected
        for process in second_processes:
            kill(process, sandbox_processes.mark, wait=True)
            assert await undisturbed(first) == expected
        assert await undisturbed_again(second) == expected
        second.stop()
        assert await undisturbed(first) == expected

    try:
        run(scene(), timeout=800)
        assert first_processes.items() <= sandbox_processes.roles().items()
    finally:
        first.stop()
        second.stop()
    assert not sandbox_processes.roles()


@pytest.mark.parametrize("stuck", ["launcher", "between", "zygote", "sandbox"])
def test_engine_stop_kills_stopped_processes(
    loaded_model: LoadedModel, sandbox_processes: Any, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    monkeypatch.setattr(zygote_process, "END_TIMEOUT", 0.2)
    engine = build_engine(config(), loaded_model)
    run(undisturbed(engine), timeout=800)
    for process in sandbox_processes.of(stuck):
        os.kill(process, signal.SIGSTOP)
    engine.stop()
    sandbox_processes.wait_for_end()
