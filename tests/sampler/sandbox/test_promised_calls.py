"""Calls that begin before their logits exist, in real sandboxes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.processors.call_state import CallState, InvalidTransition
from logitship.sampler.processors.executor import LoadedProcessor, RunOutcome
from logitship.sampler.sandbox import call_exchange, sandbox_run
from logitship.sampler.sandbox import sandbox as sandbox_module
from logitship.sampler.sandbox.cpu_time import DEFERRED_NICE
from logitship.sampler.sandbox.sandbox import Sandbox
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor
from logitship.sampler.sandbox.sandbox_run import SandboxRun

from .conftest import MAX_ROWS, VOCAB, Caller, faults, sandbox_of, source, stopped

LONG = 60.0

FORBIDS = "for row, params in zip(logits, custom_param_list):\n    row[params['ids']] = -5.0\nreturn logits"
READS = "return logits * 2 * logits.amax()"
RETURNS_ANOTHER = "return torch.full((len(logits), 260), 3.0)"
FAILS = "raise ValueError('as asked')"
DIES = "import os\nos._exit(3)"
SENDS_GARBAGE = """
import os, struct, sys
frame = sys._getframe()
while "connection" not in frame.f_locals:
    frame = frame.f_back
os.write(frame.f_locals["connection"], struct.pack("<IIQ", 7, frame.f_locals["server"]._number, 3) + b"abc")
while True: pass
"""

FORGES_ITS_TIME = """
import logitship.sampler.sandbox.worker as worker
worker.Stopwatch.seconds = lambda self: 0.0
worker._faults_answer = lambda faults: (worker.Answer.DONE, bytes(8))
"""
SPINS = """
import time
end = time.process_time() + 0.1
while time.process_time() < end: pass
logits[:] = 2.0
return logits
"""

Promise = Callable[..., SandboxRun]


@pytest.fixture
def early_answers(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts the answers that were received before the logits existed."""
    semaphore = threading.Semaphore(0)
    on_readable = SandboxRun.on_readable

    def counted(run: SandboxRun) -> bool:
        goes_on = True
        try:
            goes_on = on_readable(run)
        finally:
            if not run.state.is_open:
                semaphore.release()
        return goes_on

    monkeypatch.setattr(SandboxRun, "on_readable", counted)
    return semaphore


@pytest.fixture
def promise(executor: SandboxExecutor, caller: Caller) -> Promise:
    """Begins a call with promised logits, given the parameters of its rows."""

    def begun(processor: LoadedProcessor, *params: dict[str, Any]) -> SandboxRun:
        group = executor.group(processor, [caller.attach(processor, **each) for each in params])
        run = group.promise()
        assert run is not None
        return run

    return begun


def finished(run: SandboxRun, num_rows: int = 1) -> tuple[torch.Tensor, RunOutcome]:
    """Finish a call. Return its rows, which were ones, and the outcome."""
    logits = torch.ones(num_rows, VOCAB)
    run.provide(logits)
    return logits, run.finish()


def pidfd_of(processor: LoadedProcessor) -> int:
    return sandbox_of(processor)._process.pidfd


def test_edits_are_decoded_before_the_logits_exist(
    executor: SandboxExecutor, promise: Promise, early_answers: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [promise(executor.load(source(f"{FORBIDS}  # {number}")), {"ids": [1, number]}) for number in range(3)]
    for _ in runs:
        assert early_answers.acquire(timeout=LONG)
    monkeypatch.delattr(sandbox_module, "decode")
    for number, run in enumerate(runs):
        assert not run.needs_logits()
        collected: list[Any] = []
        outcome = run.finish(lambda *edits, to=collected: to.append(edits))  # type: ignore[misc]
        (([place], [put]),) = collected
        assert (place, put.positions.tolist(), put.value) == (0, sorted([1, number]), -5.0)
        assert (outcome.faults, outcome.logits_use) == ({}, "unread")


def test_answer_after_printed_text_is_received_early(
    executor: SandboxExecutor, promise: Promise, early_answers: threading.Semaphore
) -> None:
    processor = executor.load(source(f"import time\nprint('one')\ntime.sleep(0.05)\nprint('two')\n{FORBIDS}"))
    run = promise(processor, {"ids": [1]})
    assert early_answers.acquire(timeout=LONG)
    assert not run.needs_logits()
    outcome = finished(run)[1]
    assert (outcome.faults, outcome.printed) == ({}, "one\ntwo\n")


def test_answer_that_arrives_after_the_logits(
    executor: SandboxExecutor, promise: Promise, early_answers: threading.Semaphore
) -> None:
    processor, quick = executor.load(source(FORBIDS)), executor.load(source(FORBIDS), "another")
    with stopped(pidfd_of(processor)):
        run, quick_run = promise(processor, {"ids": [2]}), promise(quick, {"ids": [3]})
        assert early_answers.acquire(timeout=LONG)
        assert not quick_run.needs_logits()
        assert run.needs_logits()
        assert not run.wait(0.0)
    for each, token in ((run, 2), (quick_run, 3)):
        logits, outcome = finished(each)
        assert outcome.faults == {}
        assert (logits != 1.0).nonzero().tolist() == [[0, token]]
    assert not early_answers.acquire(blocking=False)


def test_answer_that_arrives_while_another_is_awaited(executor: SandboxExecutor, promise: Promise) -> None:
    """Also one that was never asked for: a step is aborted call by call."""
    processors = [executor.load(source(FORBIDS), tenant) for tenant in "abc"]
    with stopped(pidfd_of(processors[0])), stopped(pidfd_of(processors[2])):
        runs = [promise(processor, {"ids": [4]}) for processor in processors]
    for run in runs:
        logits, outcome = finished(run)
        assert (outcome.faults, logits[0, 4]) == ({}, -5.0)


def test_answer_longer_than_what_is_read_first(
    executor: SandboxExecutor, promise: Promise, early_answers: threading.Semaphore
) -> None:
    ids = range(1, 200)
    run = promise(executor.load(source(FORBIDS)), *[{"ids": [*ids]}] * MAX_ROWS)
    assert 4 * len(ids) * MAX_ROWS > call_exchange._CHUNK
    assert early_answers.acquire(timeout=LONG)
    assert not run.needs_logits()
    logits, _ = finished(run, MAX_ROWS)
    expected = torch.ones(MAX_ROWS, VOCAB)
    expected[:, 1:200] = -5.0
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("body", "expected"), [(READS, 2.0), (RETURNS_ANOTHER, 3.0), (FORBIDS, 1.0)], ids=["read", "another", "edits"]
)
def test_result(
    body: str, expected: float, executor: SandboxExecutor, promise: Promise, early_answers: threading.Semaphore
) -> None:
    run = promise(executor.load(source(body)), {"ids": [0]}, {"ids": [1]})
    assert early_answers.acquire(timeout=LONG)
    assert run.needs_logits() is (body is not FORBIDS)
    logits, outcome = finished(run, 2)
    assert (logits[:, 2:] == expected).all()
    assert outcome.faults == {}
    assert outcome.logits_use == ("read" if body is READS else "unread")


@pytest.mark.parametrize(
    ("body", "kind"),
    [(FAILS, "exception"), (DIES, "crash"), (SENDS_GARBAGE, "protocol"), ("while True: pass", "deadline")],
)
def test_fault(body: str, kind: str, executor: SandboxExecutor, promise: Promise) -> None:
    run = promise(executor.load(source(body)), {}, {})
    _, outcome = finished(run, 2)
    assert {row: fault for row, (fault, _) in faults(outcome).items()} == {0: kind, 1: kind}


def test_wait_without_a_limit_ends_at_the_deadline(executor: SandboxExecutor, promise: Promise) -> None:
    """The call uses no CPU time, and nobody has provided its logits."""
    run = promise(executor.load(source("import time\ntime.sleep(3600)")), {})
    assert run.needs_logits()
    assert run.wait(math.inf)
    assert [kind for kind, _ in faults(finished(run)[1]).values()] == ["deadline"]


def test_calls_after_a_read_have_their_logits(executor: SandboxExecutor, caller: Caller) -> None:
    """First one, then twice as many after each further read, though the engine asks twice: `promise`, then `begin`."""
    processor = executor.load(source(READS))
    group = executor.group(processor, [caller.attach(processor)])
    uses = ""
    for _ in range(20):
        run = group.promise()
        outcome = finished(run)[1] if run is not None else group.begin(torch.ones(1, VOCAB)).finish()
        uses += {"read": "R", "given": "."}[outcome.logits_use]
    assert uses == "R.R..R....R........R"


@pytest.mark.parametrize("is_given", [False, True])
def test_forged_time_is_not_what_limits_count(executor: SandboxExecutor, caller: Caller, is_given: bool) -> None:
    honest = source(SPINS)
    processor = executor.load(replace(honest, source=FORGES_ITS_TIME + honest.source))
    processor.instance.reads.never_promise = is_given
    row = caller.attach(processor)
    outcome = executor.group(processor, [row]).begin(torch.zeros(1, VOCAB)).finish()
    assert (outcome.faults, outcome.logits_use) == ({}, "given" if is_given else "unread")
    assert outcome.charged >= 0.1
    assert outcome.occupied >= 0.1
    assert is_given == (outcome.seconds >= 0.1)


@pytest.mark.parametrize("is_given", [False, True])
def test_deferred_call_is_charged_for_the_core_that_it_waits_for(
    executor: SandboxExecutor, caller: Caller, is_given: bool
) -> None:
    """Many of them would otherwise slow down the engine for ever, but never exceed the share of their tenant."""
    honest = source(SPINS)
    processor = executor.load(replace(honest, source=FORGES_ITS_TIME + honest.source))
    processor.instance.reads.never_promise = is_given
    group, logits = executor.group(processor, [caller.attach(processor)]), torch.zeros(1, VOCAB)
    with spinning_beside(sandbox_of(processor)):
        run = group.begin(logits)
        run.defer(logits)
        while not run.wait(0.0):  # nobody waits for it: that would be charged, too
            time.sleep(0.001)
        outcome = run.finish()
    assert outcome.faults == {}
    assert outcome.charged < outcome.occupied
    assert outcome.occupied >= 0.15  # 0.1 of its own, and about as much of the other's


@contextmanager
def spinning_beside(sandbox: Sandbox) -> Iterator[None]:
    """Let another process compute on the only core of a sandbox, with the priority of deferred calls."""
    core = {min(os.sched_getaffinity(0))}
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as other:
        try:
            os.setpriority(os.PRIO_PROCESS, other.pid, DEFERRED_NICE)
            for pid in (sandbox._pid, other.pid):
                os.sched_setaffinity(pid, core)
            yield
        finally:
            other.kill()


def test_answer_on_which_the_server_fails_ends_its_rows_alone(
    executor: SandboxExecutor, promise: Promise, early_answers: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the thread that receives early answers, which goes on, and while another call is waited for."""
    broken = executor.load(source(FORBIDS))
    decode_edits = Sandbox.decode_edits

    def failing(sandbox: Sandbox, body: bytes, num_rows: int) -> Any:
        if sandbox is sandbox_of(broken):
            raise KeyError("an error of the server")
        return decode_edits(sandbox, body, num_rows)

    monkeypatch.setattr(Sandbox, "decode_edits", failing)
    run = promise(broken, {"ids": [1]})
    assert early_answers.acquire(timeout=LONG)
    other = executor.load(source(FORBIDS), "another")
    other_run = promise(other, {"ids": [3]})
    assert early_answers.acquire(timeout=LONG)
    assert (finished(other_run)[0] != 1.0).nonzero().tolist() == [[0, 3]]
    failed = {0: ("internal", "the server failed on a call of processor P: its log has the details")}
    assert faults(finished(run)[1]) == failed
    executor.ensure(broken)
    with stopped(pidfd_of(broken)), stopped(pidfd_of(other)):
        run, other_run = promise(broken, {"ids": [1]}), promise(other, {"ids": [2]})
        run.provide(torch.ones(1, VOCAB))
        logits = torch.ones(1, VOCAB)
        other_run.provide(logits)
    assert other_run.finish().faults == {}
    assert (logits != 1.0).nonzero().tolist() == [[0, 2]]
    assert faults(run.finish()) == failed


@pytest.mark.parametrize("part", ["decode_edits", "apply_edits"])
def test_work_on_the_edits_counts_as_time_of_the_call(
    executor: SandboxExecutor, promise: Promise, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Its sandbox decides how much that is, and may send the same bytes again and again."""
    owner: Any = Sandbox if part == "decode_edits" else sandbox_run
    function = getattr(owner, part)

    def slow(*args: Any) -> Any:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return function(*args)

    processor = executor.load(source(FORBIDS))
    finished(promise(processor, {"ids": [1]}))  # the first call has a deadline of its own
    monkeypatch.setattr(owner, part, slow)
    outcome = finished(promise(processor, {"ids": [1]}))[1]
    assert outcome.faults == {}
    assert outcome.occupied >= 0.2
    assert outcome.charged >= 0.2


def test_call_of_an_aborted_step(
    executor: SandboxExecutor, promise: Promise, caller: Caller, early_answers: threading.Semaphore
) -> None:
    """Its sandbox is killed, because its state is not known; nobody else notices."""
    processor, other = executor.load(source(FORBIDS)), executor.load(source(FORBIDS), "other")
    with stopped(pidfd_of(processor)):
        promise(processor, {"ids": [1]})
        next_run = promise(processor, {"ids": [2]})
    other_run = promise(other, {"ids": [3]})
    (fault,) = finished(next_run)[1].faults.values()
    assert isinstance(fault, ProcessorFault)
    assert "was killed because its previous call was not finished" in fault.message
    logits, outcome = finished(other_run)
    assert (outcome.faults, logits[0, 3]) == ({}, -5.0)


def test_call_has_one_life(executor: SandboxExecutor, promise: Promise) -> None:
    """A step cannot do twice what it may do once: an error of the server then, which `GuardedRun` contains."""
    processor = executor.load(source(FORBIDS))
    with stopped(pidfd_of(processor)):
        run = promise(processor, {"ids": [1]})
        with pytest.raises(InvalidTransition):
            run.defer(torch.ones(1, VOCAB))
        run.provide(torch.ones(1, VOCAB))
        with pytest.raises(InvalidTransition):
            run.provide(torch.ones(1, VOCAB))
        run.defer(torch.ones(1, VOCAB))
        assert run.state is CallState.DEFERRED
    assert run.finish().faults == {}
    assert run.state is CallState.TAKEN
    with pytest.raises(InvalidTransition):
        run.finish()


def test_executor_ends_while_calls_are_promised(executor: SandboxExecutor, promise: Promise) -> None:
    processor = executor.load(source(FORBIDS))
    signal.pidfd_send_signal(pidfd_of(processor), signal.SIGSTOP)
    run = promise(processor, {"ids": [1]})
    executor.close()
    assert faults(finished(run)[1]) == {0: ("crash", "processor P was unloaded")}
