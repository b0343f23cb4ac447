"""Scenarios that hold in every engine, on a fake of each that schedules at random, as the engine may."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.processors.executor import RunOutcome
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.server.runtime import allowances
from logitship.server.runtime.request_runtime import RequestRuntime
from logitship.server.vllm.batch_requests import BatchRequests
from tests.helpers.processors import CHECKS_HISTORY, shipped, shipped_by_row
from tests.helpers.random_cases import random_seeds
from tests.server.sglang.fake_sglang import Sglang, SglangDrafts
from tests.server.vllm.fake_vllm import Vllm, VllmV2Drafts

from .early_executor import EarlyExecutor, EarlyRun
from .fake_engine import (
    CHOICE,
    FOLLOWS,
    MAX_ROWS,
    BatchedEngine,
    FakeEngine,
    FakeGroup,
    FakeRequest,
    Job,
    PluginEngine,
)
from .fake_engines import BATCHED, DEFERRING, DRAFTING, EARLY, ENGINES, PLUGINS, Own

Test = TypeVar("Test", bound=Callable[..., None])


def on(engines: tuple[type[FakeEngine], ...]) -> Callable[[Test], Test]:
    """Run a test on each of these engines. The whole own engine is no fake: `--fast` leaves it out."""
    params = [
        pytest.param(each, id=each.__name__, marks=[pytest.mark.slow] * issubclass(each, Own)) for each in engines
    ]
    return pytest.mark.parametrize("engine", params)


def random_jobs(seed: int, count: int) -> list[Job]:
    """Return requests without a processor, and with ones that run, that fail, and that forbid no token."""
    rng, jobs = random.Random(seed), []
    for number in range(count):
        prompt, tokens, first = rng.randint(1, 9), rng.randint(1, 20), rng.randint(2, 40)
        kind = rng.choice(["plain", "runs", "follows", "fails", "stops"])
        jobs.append(
            Job(
                str(number),
                None if kind == "plain" else first,
                prompt,
                tokens,
                fails_at=rng.randrange(tokens) if kind == "fails" else None,
                stops_at=rng.randint(1, tokens) if kind == "stops" else None,
                own=number % 2,
                **({"source": FOLLOWS} if kind == "follows" else {}),
            )
        )
    return jobs


@pytest.mark.slow
@on(ENGINES)
@pytest.mark.parametrize("share", [0.0, 0.7])
@random_seeds(12)
def test_histories_are_exact_in_every_schedule(seed: int, engine: type[FakeEngine], share: float) -> None:
    """Covers prompt chunks, preemption, retraction, moves of rows, tokens in flight, a step too many, early calls."""
    executor = EarlyExecutor(engine.vocab_size)
    executor.share = share
    is_plugin = issubclass(engine, PluginEngine)
    if engine.defers:
        executor.delays = [0, 0, 1, 2, 6]  # others would end the requests of late calls
    fake, jobs = engine(executor), random_jobs(seed, 24 if is_plugin else 12)
    assert fake.run(seed, *jobs) == {job.rid: fake.expected(job) for job in jobs}
    assert fake.ends.keys() == {job.rid for job in jobs if job.fails_at is not None}
    cut = {job.rid for job in jobs if job.fails_at is not None or job.stops_at is not None}
    calls = {job.rid: job.tokens for job in jobs if job.first is not None and job.rid not in cut}
    if engine is not VllmV2Drafts:  # it does not know the last draft tokens that vLLM accepts
        assert calls.items() <= fake.receipts.items()
    if isinstance(fake, Vllm):
        lengths = {job.rid: len(job.expected) for job in jobs if job.first is not None and job.fails_at is None}
        assert {rid: fake.sent_steps[rid, length] for rid, length in lengths.items()} == lengths
    assert not fake.held
    assert bool(executor.num_early) == (share > 0 and fake.begins_early)
    assert not isinstance(fake, PluginEngine) or bool(fake.runtime._allowances.num_deferred) == fake.defers
    assert not executor.unfinished
    assert not executor.attached
    assert bool(fake.num_accepted) == (engine in DRAFTING)


@on(ENGINES)
@pytest.mark.parametrize(("tokens", "stop"), [(4, ()), (8, (5,))], ids=["its_length", "a_stop_token"])
def test_processor_is_not_called_after_the_end(engine: type[FakeEngine], tokens: int, stop: tuple[int, ...]) -> None:
    """Engines compute one step more than they need, before they know the token that ended the request."""
    fake = engine()
    assert fake.run(0, Job("x", tokens=tokens, stop=stop, fails_at=4))["x"] == [2, 3, 4, 5]
    assert not fake.ends


@on(ENGINES)
def test_fault_ends_its_request_with_the_traceback(engine: type[FakeEngine]) -> None:
    fake = engine()
    failing, other = Job("fails", fails_at=2), Job("other", first=20)
    assert fake.run(1, failing, other) == {"fails": [2, 3], "other": other.expected}
    assert "processor ChecksHistory raised RuntimeError: requested" in fake.ends["fails"]
    assert "Traceback" in fake.ends["fails"]
    assert fake.ends.keys() == {"fails"}


@on(ENGINES)
def test_processor_that_cannot_be_loaded_ends_its_request(engine: type[FakeEngine]) -> None:
    fake = engine()
    broken, other = Job("broken", processor='{"name": "nothing"}'), Job("other")
    assert fake.run(1, broken, other) == {"broken": [], "other": other.expected}
    assert "no processor is installed or registered as 'nothing'" in fake.ends["broken"]
    assert not fake.held


@on(PLUGINS)
def test_step_that_loaded_for_long_loads_no_more_classes(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of classes that hang when they are loaded would stop all requests for minutes."""
    fake = engine()
    known = Job("known", own=1)
    fake.run(0, known)
    monkeypatch.setattr("logitship.server.runtime.request_runtime.MAX_LOADING", -1.0)
    assert fake.run(0, known, Job("new", own=2)) == {"known": known.expected, "new": []}
    assert "try again" in fake.ends["new"]


@on(ENGINES)
def test_error_of_the_server_ends_the_requests_and_is_not_raised(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    fake, plain = engine(), Job("plain", first=None)
    with monkeypatch.context() as patch:
        patch.setattr(ShippedProcessors, "apply", fail)
        outputs = fake.run(0, Job("x"), *[plain] * fake.fails_alone)
    assert outputs.pop("x") == []
    assert (outputs or fake.run(0, plain)) == {"plain": fake.expected(plain)}
    assert fake.internal_error in fake.ends["x"]


@on((*EARLY, Own))
def test_error_of_the_server_in_a_call_ends_its_rows_alone(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = EarlyRun.finish

    def failing(run: EarlyRun, *args: Any) -> RunOutcome:
        outcome = finish(run, *args)
        if run._edited[0, 20] == 0.0:
            raise KeyError("an error of the server")
        return outcome

    monkeypatch.setattr(EarlyRun, "finish", failing)
    fake, other = engine(EarlyExecutor(engine.vocab_size)), Job("other", first=30, own=1)
    assert fake.run(0, Job("broken", first=20), other) == {"broken": [], "other": other.expected}
    assert "the server failed on a call of processor" in fake.ends["broken"]


RANDOM = shipped("Random", "return logits + torch.rand(logits.shape)")


@on(PLUGINS)
def test_code_in_this_process_leaves_the_random_numbers_of_ranks_as_they_were(engine: type[PluginEngine]) -> None:
    """The ranks sample from generators in the same state. One that drew more numbers would sample other tokens."""
    before = torch.random.get_rng_state()
    fake = engine(group=FakeGroup.of(2, present=1)[0])
    fake.run(0, Job("x", source=SourceProcessor(RANDOM.source + "torch.rand(1)\n", "Random")))
    assert not fake.ends
    assert torch.equal(torch.random.get_rng_state(), before)


@on(PLUGINS)
def test_audit_log_has_a_line_for_each_request(engine: type[PluginEngine], tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    fake = engine(audit_log=str(path))
    jobs = Job("runs"), Job("fails", fails_at=2), Job("broken", processor='{"name": "nothing"}')
    fake.run(0, Job("plain", first=None), *jobs)
    failed, finished, broken = sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: line["end"])
    assert [finished["end"], failed["end"], broken["end"]] == ["finished", "exception", "load"]
    assert failed["error"] == "processor ChecksHistory raised RuntimeError: requested"
    assert "no processor is installed" in broken["error"]
    assert broken["processors"] == [{"name": "nothing"}]
    (checks,) = finished["processors"]
    assert checks["name"] == "ChecksHistory"
    assert checks["digest"].startswith("sha256:")
    assert checks["calls"] > 1
    assert finished["tenant"] == ""


SLEEPS = shipped("Sleeps", "import time; time.sleep(6.0); return logits + 0.0")


@pytest.mark.thorough  # a fast call has to get a core within a second
@on(tuple(engine for engine in BATCHED if not engine.defers))
def test_slow_request_ends_and_others_continue(engine: type[PluginEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second may find the processor busy with a call of the first."""
    monkeypatch.setattr(allowances, "BURST", 1.0)  # a fast call takes less on a busy machine, too
    monkeypatch.setattr(allowances, "MIN_NEW", 1.0)
    fake = engine(processor_isolation="sandbox")
    plain = [Job(f"plain {number}", first=None, tokens=20) for number in range(3)]
    fast = Job("fast", first=20)
    slow = [Job(f"slow {number}", source=SLEEPS) for number in range(2)]
    outputs = fake.run(0, *plain, *slow, fast)
    assert outputs == {job.rid: job.expected for job in [*plain, fast]} | {"slow 0": [], "slow 1": []}
    assert fake.ends.keys() == {"slow 0", "slow 1"}
    assert all("processor Sleeps is too slow: steps have waited" in message for message in fake.ends.values())
    assert not fake.held
    fake.processors.close()


LOOPS = shipped("Loops", "while True: pass")


@pytest.mark.thorough  # as above
@on(tuple(engine for engine in BATCHED if not engine.defers))
def test_calls_of_requests_that_have_ended_are_killed(
    engine: type[PluginEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the latest two of a tenant."""
    monkeypatch.setattr(allowances, "BURST", 0.1)
    fake = engine(processor_isolation="sandbox")
    plain, loops = Job("plain", first=None, tokens=60), [Job(f"{n}", source=LOOPS, own=n + 1) for n in range(5)]
    assert fake.run(0, plain, *loops)["plain"] == fake.expected(plain)
    assert fake.ends.keys() == {job.rid for job in loops}
    fake.runtime.begin_step()
    assert len(fake.runtime._allowances) == 2
    assert fake.processors._loader.cache_stats().entries == 2
    fake.processors.close()


@pytest.mark.thorough  # as above
@on(DEFERRING)
def test_slow_request_sits_out_until_its_sandbox_ends(
    engine: type[PluginEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call in a sandbox may take 10 s, the next one 1 s."""
    monkeypatch.setattr(allowances, "BURST", 1.0)
    monkeypatch.setattr(allowances, "MIN_NEW", 1.0)
    fake = engine(processor_isolation="sandbox")
    plain = [Job(f"plain {number}", first=None, tokens=20) for number in range(3)]
    slow, fast = Job("slow", source=SLEEPS), Job("fast", first=20)
    outputs = fake.run(0, *plain, slow, fast)
    assert outputs == {job.rid: job.expected for job in [*plain, fast]} | {"slow": [CHOICE]}
    assert fake.ends.keys() == {"slow"}
    assert "processor Sleeps" in fake.ends["slow"]
    assert "too slow: steps have waited" not in fake.ends["slow"]
    assert fake.runtime._allowances.num_deferred == 2
    assert not fake.held
    fake.processors.close()


@on(PLUGINS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_other_types(engine: type[FakeEngine], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors get float32."""
    apply = RequestRuntime.apply

    def in_other_type(runtime: RequestRuntime, logits: torch.Tensor, *args: Any) -> None:
        other = logits.to(dtype)
        apply(runtime, other, *args)
        logits.copy_(other)

    monkeypatch.setattr(RequestRuntime, "apply", in_other_type)
    fake, job = engine(), Job("x")
    assert fake.run(0, job)["x"] == job.expected
    assert not fake.ends


@pytest.mark.mode("vLLM", "tensor parallel", "a scripted fake")
@pytest.mark.mode("SGLang", "tensor parallel", "a scripted fake")
@on(BATCHED)
@random_seeds(4)
def test_ranks_sample_the_same_tokens(seed: int, engine: type[BatchedEngine]) -> None:
    """The second rank has no processors. It gets tokens, also those behind drafts, and faults from the first."""
    jobs = random_jobs(seed, 8)
    ranks = [engine(group=group) for group in FakeGroup.of(2)]
    with ThreadPoolExecutor() as pool:
        outputs = [*pool.map(lambda rank: rank.run(seed, *jobs), ranks)]
    assert outputs == [{job.rid: job.expected for job in jobs}] * 2
    assert not ranks[0].held
    assert not ranks[1].runtime._running
    assert ranks[1].processors.in_use == 0


RAISES_BEHIND_9 = shipped_by_row("Raises", 'if req.output_ids[-1:] == [9]: raise RuntimeError("saw the draft")')
UNCOPYABLE = shipped_by_row("Uncopyable", 'req.state["generator"] = (each for each in ())')


@on(DRAFTING)
@pytest.mark.parametrize("source", [RAISES_BEHIND_9, UNCOPYABLE], ids=lambda each: each.class_name)
def test_error_behind_a_rejected_draft_does_not_count(engine: type[FakeEngine], source: SourceProcessor) -> None:
    """These processors change no logits."""
    fake = engine()
    fake.draft_tokens = (9,)
    assert fake.run(0, Job("x", source=source)) == {"x": fake.expected(Job("x", None))}
    assert not fake.ends


@on((SglangDrafts, VllmV2Drafts))
@pytest.mark.parametrize(("source", "output"), [(UNCOPYABLE, [CHOICE, CHOICE]), (CHECKS_HISTORY, [4, CHOICE])])
def test_error_behind_an_accepted_draft_ends_its_request_after_it(
    engine: type[BatchedEngine], source: SourceProcessor, output: list[int]
) -> None:
    fake = engine()
    fake.draft_tokens = (CHOICE, 6)
    x = fake.start(Job("x", 4, fails_at=2, source=source))
    fake.step(x)
    fake.step(x)
    assert x.visible == output
    assert fake.is_failed(x)


@random_seeds(6)
def test_branches_of_drafts_are_more_rows_than_requests(seed: int) -> None:
    """A sandbox has room for as many rows as an engine has requests."""
    executor = EarlyExecutor()
    fake = SglangDrafts(executor)
    jobs = [Job(str(number), prompt=number + 1, tokens=20, source=FOLLOWS) for number in range(12)]
    assert fake.run(seed, *jobs) == {job.rid: fake.expected(job) for job in jobs}
    assert fake.receipts == {job.rid: job.tokens for job in jobs}
    assert executor.most_rows == MAX_ROWS
    assert not executor.attached


@on(DRAFTING)
def test_draft_that_ends_its_request_is_the_last_call(engine: type[FakeEngine]) -> None:
    """The processor would fail in the call after it."""
    fake = engine()
    fake.draft_tokens = (3, 4, 5)
    assert fake.run(0, Job("x", tokens=9, stop=(4,), fails_at=3)) == {"x": [2, 3, 4]}
    assert not fake.ends


def start(engine: type[BatchedEngine], *jobs: Job) -> tuple[EarlyExecutor, BatchedEngine, list[FakeRequest]]:
    """Return an engine whose calls begin early, with requests in its batch."""
    executor = EarlyExecutor()
    fake = engine(executor)
    return executor, fake, [fake.start(job) for job in jobs]


A, B = Job("a"), Job("b", first=20)


@on(EARLY)
def test_calls_begin_before_the_logits_exist(engine: type[BatchedEngine]) -> None:
    executor, fake, (a, b) = start(engine, A, B)
    for step in range(3):
        fake.begin({a: a.missing, b: b.missing})
        assert executor.num_early == step + 1
        assert len(executor.unfinished) == 1
        assert fake.sampled(a, b) == [2 + step, 20 + step]
        assert not executor.unfinished


@on(EARLY)
@pytest.mark.parametrize("finishes", [False, True])
def test_step_without_logits_ends_its_requests(engine: type[BatchedEngine], finishes: bool) -> None:
    """It failed, or the engine sampled nothing. The processor was called for a token that was not sampled."""
    executor, fake, (a, b) = start(engine, A, B)
    assert fake.step(a, b) == [2, 20]
    fake.begin({a: 1, b: 1})
    assert len(executor.unfinished) == 1
    if finishes:
        fake.finish(a)
    fake.begin({b: 0} if finishes else {a: 0, b: 0})
    assert not executor.unfinished
    assert fake.sampled(b) == [None]
    assert "did not sample the token" in fake.ends["b"]
    assert executor.num_early == 2
    assert fake.processors.in_use == 2 - (finishes and engine is not Sglang)


@on(EARLY)
def test_row_that_was_not_planned_ends_the_requests_that_began(engine: type[BatchedEngine]) -> None:
    executor, fake, (a, b) = start(engine, A, B)
    fake.begin({a: 3, b: 2})
    b.computed += 1
    assert fake.sampled(a, b) == [None, 20]
    assert not executor.unfinished


@on(EARLY)
def test_planned_row_that_is_not_sampled_ends_alone(engine: type[BatchedEngine]) -> None:
    """The call goes on for the other row."""
    executor, fake, (a, b) = start(engine, A, B)
    fake.begin({a: 3, b: 3})
    assert fake.sampled(a) == [2]
    fake.begin({a: 1, b: 0})
    assert fake.sampled(a, b) == [3, None]
    assert not executor.unfinished


@on(EARLY)
def test_history_that_grows_after_the_call_began_ends_the_request(engine: type[BatchedEngine]) -> None:
    executor, fake, (a,) = start(engine, A)
    fake.begin({a: 3})
    fake.commit(a, [9])
    a.take(1)
    a.computed += 1
    assert fake.sampled(a) == [None]
    assert not executor.unfinished


@on(EARLY)
@pytest.mark.parametrize("method", ["begin", "apply"])
def test_error_of_the_server_ends_begun_calls(
    engine: type[BatchedEngine], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ShippedProcessors.begin

    def fail(shipped: ShippedProcessors, *_: Any) -> None:
        if method == "begin":
            begin(shipped)
        raise RuntimeError("a bug")

    executor, fake, (a,) = start(engine, A)
    monkeypatch.setattr(ShippedProcessors, method, fail)
    fake.begin({a: 3})
    assert len(executor.unfinished) == 1
    assert fake.sampled(a) == [None]
    monkeypatch.undo()
    fake.finish(a)
    fake.end()
    assert not executor.unfinished
    assert executor.num_early == 1


def start_late(engine: type[BatchedEngine], *jobs: Job) -> tuple[EarlyExecutor, BatchedEngine, list[FakeRequest]]:
    """Return an engine whose calls do not end, with requests in its batch and one without a processor."""
    executor, fake, requests = start(engine, *jobs, Job("plain", first=None, tokens=40))
    executor.delays = [math.inf]
    return executor, fake, requests


def end_calls(executor: EarlyExecutor) -> None:
    """Let all calls end, from now on."""
    executor.delays = [0]
    for run in executor.unfinished:
        run._delay = 0


@on(DEFERRING)
def test_late_request_sits_out_and_goes_on(engine: type[BatchedEngine]) -> None:
    """The other gets a token in each step."""
    executor, fake, (a, plain) = start_late(engine, A)
    assert fake.step(a, plain) == [None, CHOICE]
    assert not fake.may_run(a)
    for _ in range(9):
        assert fake.step(plain) == [CHOICE]
    end_calls(executor)
    assert not fake.may_run(a)
    assert fake.step(plain) == [CHOICE]
    assert fake.may_run(a)
    assert [fake.step(a, plain) for _ in range(3)] == [[2, CHOICE], [3, CHOICE], [4, CHOICE]]
    fake.finish(a)
    fake.end()
    assert fake.receipts == {"a": 3}
    assert not fake.ends


@on(DEFERRING)
def test_requests_with_a_busy_class_sit_out(engine: type[BatchedEngine]) -> None:
    """The processor of the second is called once the call for the first has ended."""
    executor, fake, (a, b, plain) = start_late(engine, A, B)
    assert fake.step(a, plain) == [None, CHOICE]
    assert fake.step(b, plain) == [None, CHOICE]
    assert len(executor.unfinished) == 1
    assert not fake.may_run(b)
    end_calls(executor)
    fake.step(plain)
    assert fake.step(a, b, plain) == [2, 20, CHOICE]


@on(DEFERRING)
def test_preempted_request_sits_out_again(engine: type[BatchedEngine]) -> None:
    executor, fake, (a, plain) = start_late(engine, A)
    assert fake.step(a, plain) == [None, CHOICE]
    fake._preempt(a)
    assert fake.may_run(a)
    assert fake.step(a, plain) == [None, CHOICE]
    assert not fake.may_run(a)
    assert len(executor.unfinished) == 1
    end_calls(executor)
    fake.step(plain)
    assert fake.step(a, plain) == [2, CHOICE]


@on(DEFERRING)
def test_request_that_ends_while_it_sits_out_is_released(engine: type[BatchedEngine]) -> None:
    """Its call goes on. The next request of the class waits for it."""
    executor, fake, (a, plain) = start_late(engine, A)
    assert fake.step(a, plain) == [None, CHOICE]
    fake.finish(a)
    fake.step(plain)
    assert not executor.attached
    assert not fake.held
    b = fake.start(B)
    assert fake.step(b, plain) == [None, CHOICE]
    end_calls(executor)
    fake.step(plain)
    assert fake.step(b, plain) == [20, CHOICE]
    assert not executor.unfinished


@on(DEFERRING)
def test_call_that_fails_while_its_request_sits_out_ends_it(engine: type[BatchedEngine]) -> None:
    executor, fake, (a, plain) = start_late(engine, Job("a", fails_at=0))
    assert fake.step(a, plain) == [None, CHOICE]
    assert not fake.ends
    end_calls(executor)
    fake.step(plain)
    assert fake.step(a, plain) == [None, CHOICE]
    assert "processor ChecksHistory raised RuntimeError: requested" in fake.ends["a"]


@on(DEFERRING)
def test_error_of_the_server_ends_requests_that_sit_out(
    engine: type[BatchedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, fake, (a, plain) = start_late(engine, A)
    assert fake.step(a, plain) == [None, CHOICE]
    with monkeypatch.context() as patch:
        patch.setattr(BatchRequests, "is_unfinished", lambda *_: 1 / 0)
        fake.step(plain)
    fake.step(plain)
    assert fake.step(a, plain) == [None, CHOICE]
    assert fake.internal_error in fake.ends["a"]
    end_calls(executor)
    fake.finish(a)
    fake.end()
    assert not executor.attached
