"""The executor with real sandboxes, without an engine."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.client.errors import ProcessorFault, ProcessorLoadError
from logitship.client.serialization.processor_string import InstalledProcessor, SourceProcessor
from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.processors.executor import (
    ExecutorUnavailable,
    ProcessorExecutor,
    RunOutcome,
)
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox import cpu_time, sandbox_executor, spare_sandboxes
from logitship.sampler.sandbox import sandbox as sandbox_module
from logitship.sampler.sandbox.cpu_time import BACKSTOP
from logitship.sampler.sandbox.sandbox import Sandbox
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits, SandboxStats
from logitship.sampler.sandbox.sandbox_run import SandboxedProcessor, read_faults
from logitship.sampler.sandbox.zygote_process import ZygoteProcess
from tests.helpers.random_cases import random_seeds

from .conftest import MAX_ROWS, VOCAB, Caller, faults, sandbox_of, source, stopped

LONG = 60.0


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_sandboxes, "PAUSE", 0.0)


LIMITS = SandboxLimits(cpu_time=2.0, step_timeout=1.0, first_step_timeout=1.0, load_timeout=10.0)
NO_ANSWER = "gave no answer within 2 s of CPU time: its process was killed"

LOOPS = "while True: pass"
ADDS = "for row, params in zip(logits, custom_param_list):\n    row += params['by']\nreturn logits"
SPINS_AFTER_ITS_ANSWER = """
import os, struct, sys
frame = sys._getframe()
while "connection" not in frame.f_locals:
    frame = frame.f_back
os.write(frame.f_locals["connection"], struct.pack("<IIQ", 3, frame.f_locals["server"]._number, 0))
while True: pass
"""
COUNTS = "self.calls = getattr(self, 'calls', 0) + 1\nlogits[:] = self.calls\nreturn logits"
COUNTS_VIEWS = """
import gc
logits[:] = sum(type(each).__name__ == "SequenceState" for each in gc.get_objects())
return logits
"""
FAILS_ON_REQUEST = "assert not any(params['fails'] for params in custom_param_list), 'as requested'\nreturn logits + 1"


def test_load_and_call(executor: SandboxExecutor, caller: Caller) -> None:
    string = source(ADDS)
    processor = executor.load(string, "tenant")
    assert (processor.digest, processor.name, processor.tenant) == (string.digest, "P", "tenant")
    rows = [caller.attach(processor, by=by) for by in (1.0, 2.0, 3.0)]
    assert caller.call(processor, *rows)[0] == [1, 2, 3]
    assert caller.call(processor, rows[2], rows[0])[0] == [3, 1]


def test_garbage_is_collected(executor: SandboxExecutor, caller: Caller) -> None:
    """Unlike in the launcher while it starts."""
    processor = executor.load(source("import gc\nlogits[:] = gc.isenabled()\nreturn logits"))
    assert caller.call(processor, caller.attach(processor))[0] == [1]


def test_class_description(executor: SandboxExecutor) -> None:
    string = source(ADDS)
    silent = executor.load(string)
    assert (silent.description, silent.params_schema) == ("", None)
    header = "class P(CustomLogitProcessor):\n    'Adds.'\n    params_schema = {'type': 'object'}\n\n"
    described = string.source.replace("class P(CustomLogitProcessor):\n", header)
    loaded = executor.load(replace(string, source=described))
    assert (loaded.description, loaded.params_schema) == ("Adds.", {"type": "object"})
    for processor in (silent, loaded):
        executor.unload(processor)


def test_installed_processor_is_refused(executor: SandboxExecutor) -> None:
    with pytest.raises(ProcessorLoadError, match="ships no code"):
        executor.load(InstalledProcessor("min_p"))


def test_tenants_share_no_sandbox(executor: SandboxExecutor, caller: Caller) -> None:
    one, other = executor.load(source(COUNTS), "one"), executor.load(source(COUNTS), "other")
    row = caller.attach(one)
    assert [caller.call(one, row)[0] for _ in range(3)] == [[1], [2], [3]]
    assert caller.call(other, caller.attach(other))[0] == [1]
    assert sandbox_of(one) is not sandbox_of(other)


def test_only_the_failing_row_has_a_fault(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(FAILS_ON_REQUEST))
    rows = [caller.attach(processor, fails=row == 1) for row in range(3)]
    values, outcome = caller.call(processor, *rows)
    assert [values[0], values[2]] == [1, 1]
    assert faults(outcome) == {1: ("exception", "processor P raised AssertionError: as requested")}


def test_non_plain_parameters_are_a_fault_of_their_row(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(ADDS))
    rows = [caller.attach(processor, by=1.0), caller.attach(processor, by=object()), caller.attach(processor, by=3.0)]
    values, outcome = caller.call(processor, *rows)
    assert [values[0], values[2]] == [1, 3]
    assert set(outcome.faults) == {1}
    assert "cannot be given its parameters" in outcome.faults[1].message


@pytest.mark.parametrize(
    ("params", "fails"),
    [({}, False), ({}, True), ({"text": "x" * (4 << 20)}, False)],
    ids=["in one exchange", "in two exchanges", "in more than the kernel holds"],
)
def test_hanging_processor_does_not_delay_others(
    executor: SandboxExecutor, caller: Caller, params: dict[str, Any], fails: bool
) -> None:
    """Both calls begin at the same time, and the one that hangs is finished first."""
    hanging, other = executor.load(source(LOOPS)), executor.load(source(FAILS_ON_REQUEST))
    logits = [torch.zeros(1, VOCAB), torch.zeros(2, VOCAB)]
    rows = [caller.attach(other, fails=False, **params), caller.attach(other, fails=fails)]
    first = executor.group(hanging, [caller.attach(hanging)]).begin(logits[0])
    second = executor.group(other, rows).begin(logits[1])
    assert faults(first.finish()) == {0: ("deadline", f"processor P {NO_ANSWER}")}
    assert set(second.finish().faults) == ({1} if fails else set())
    assert logits[1][0, 0] == 1
    assert sandbox_of(other).alive


def test_dead_sandbox_is_replaced_for_new_sequences(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(COUNTS))
    old = caller.attach(processor)
    caller.call(processor, old)
    sandbox_of(processor).kill("deadline", "was slow")
    executor.ensure(processor)
    values, outcome = caller.call(processor, old, caller.attach(processor))
    assert faults(outcome) == {0: ("deadline", "processor P was slow")}
    assert values[1] == 1, "the class is instantiated again"
    assert faults(caller.call(processor, old)[1]) == {0: ("deadline", "processor P was slow")}


def test_ensure_replaces_sandbox_that_died_while_idle(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(COUNTS))
    caller.call(processor, caller.attach(processor))
    sandbox_of(processor)._process.kill()
    sandbox_of(processor)._process.status.result(30)
    executor.ensure(processor)
    executor.ensure(processor)
    values, outcome = caller.call(processor, caller.attach(processor))
    assert values == [1]
    assert not outcome.faults


def test_step_never_starts_a_sandbox(
    executor: SandboxExecutor, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting one may take seconds. The rows end at once, and the next request restarts it at admission."""
    processor = executor.load(source(ADDS))
    with_state, new = caller.attach(processor, by=1.0), caller.attach(processor, by=1.0)
    caller.call(processor, with_state)
    sandbox_of(processor).kill("crash", "crashed")
    assert not executor.is_ready(processor)

    def started_in_a_step(*_: object) -> Sandbox:
        raise AssertionError("a step started a sandbox")

    with monkeypatch.context() as patch:
        patch.setattr(sandbox_executor, "Sandbox", started_in_a_step)
        _, outcome = caller.call(processor, with_state, new)
    assert faults(outcome) == {
        0: ("crash", "processor P crashed"),
        1: ("load", "processor P lost its process before the first step of this request: try again"),
    }
    executor.ensure(processor)
    assert executor.is_ready(processor)
    assert caller.call(processor, caller.attach(processor, by=1.0))[0] == [1]


def test_step_does_not_wait_for_the_status_of_a_process_that_died_while_idle(
    executor: SandboxExecutor, caller: Caller, zygote: ZygoteProcess
) -> None:
    """New rows have their fault at once. The others have it once the reason is known, which may take seconds."""
    processor = executor.load(source(ADDS))
    with_state, new = caller.attach(processor, by=1.0), caller.attach(processor, by=1.0)
    caller.call(processor, with_state)
    assert zygote._zygote is not None
    with stopped(zygote._zygote.pidfd):  # it reports no wait status
        sandbox_of(processor)._process.kill()
        while sandbox_of(processor).is_running:
            time.sleep(0.001)
        run = executor.group(processor, [with_state, new]).begin(torch.zeros(2, VOCAB))
        assert not run.wait(0)
    assert faults(run.finish()) == {
        0: ("crash", "processor P ended its process: SIGKILL (killed)"),
        1: ("load", "processor P lost its process before the first step of this request: try again"),
    }


def test_sandbox_that_is_replaced_while_a_call_begins(
    executor: SandboxExecutor, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the thread of a load. The row was not in the sandbox that died, and does not get that one's fault."""
    processor = executor.load(source(ADDS))
    old = sandbox_of(processor)
    old.kill("deadline", "was slow")
    executor.ensure(processor)
    found = [sandbox_of(processor)] * 3 + [old]
    monkeypatch.setattr(SandboxedProcessor, "current_sandbox", property(lambda _: found.pop()))
    _, outcome = caller.call(processor, caller.attach(processor, by=1.0))
    assert [fault.kind for fault in outcome.faults.values()] == ["load"]


def assert_too_late(outcome: RunOutcome, seconds: float) -> None:
    """Check that the only row has used its CPU time; or its time by the clock, if the machine is busy."""
    limits = f"({seconds:.4g} s of CPU time|{BACKSTOP * seconds:.4g} s, in which it got .* s of CPU time)"
    ((kind, message),) = faults(outcome).values()
    assert kind == "deadline"
    assert re.fullmatch(f"processor P gave no answer within {limits}: its process was killed", message), message


@pytest.fixture
def time_for_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may deliver the signal late, and a process that sleeps does not get there before it."""
    monkeypatch.setattr(sandbox_module, "_DUMP_TIMEOUT", 60.0)
    monkeypatch.setattr(sandbox_module, "_DUMP_BACKSTOP", 60.0)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("while True:\n    pass", "(while True:|pass)"),
        ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", r"re\.match\(.*"),
        ("import time\ntime.sleep(1000)", r"time\.sleep\(1000\)"),
        ("import time\ndef waits():\n    time.sleep(1000)\nwaits()", r"time\.sleep\(1000\)"),
    ],
    ids=["loop", "in C", "sleeps", "in a function"],
)
@pytest.mark.usefixtures("time_for_dumps")
def test_timeout_says_where(executor: SandboxExecutor, caller: Caller, body: str, line: str) -> None:
    processor = executor.load(source(body))
    (fault,) = caller.call(processor, caller.attach(processor))[1].faults.values()
    assert fault.kind == "deadline"
    first, *frames, advice = fault.traceback.splitlines()
    assert first == "Traceback (most recent call last):"
    assert re.fullmatch(r'  File "<logitship_processor_\d+>", line \d+, in __call__', frames[0])
    assert any(re.fullmatch(f"    {line}", frame) for frame in frames), frames
    assert not any("sampler" in frame or "runpy" in frame for frame in frames)
    assert advice.startswith("TimeoutError: it was here when its time was over.")
    assert "sandbox_step_timeout" in advice


@pytest.mark.usefixtures("time_for_dumps")
def test_timeout_quotes_the_right_line(executor: SandboxExecutor, caller: Caller) -> None:
    """`str.splitlines` breaks at characters at which Python's line numbers do not."""
    string = source("while True: pass")
    processor = executor.load(replace(string, source=f"TEXT = 'a\u2028b\x1cc'\n\x0c\n{string.source}"))
    (fault,) = caller.call(processor, caller.attach(processor))[1].faults.values()
    assert "in __call__\n    while True: pass\n" in fault.traceback


@pytest.mark.usefixtures("time_for_dumps")
def test_timeout_of_a_load_says_where(zygote: ZygoteProcess) -> None:
    limits = SandboxLimits(cpu_time=2.0, step_timeout=1.0, first_step_timeout=1.0, load_timeout=0.5)
    executor = SandboxExecutor(zygote, limits, MAX_ROWS, VOCAB)
    with pytest.raises(ProcessorLoadError) as raised:
        executor.load(SourceProcessor(HANGS_IN_INIT.format(body="while True: pass"), "P"))
    executor.close()
    message = str(raised.value)
    assert "its process was killed (while it was loaded)\nTraceback (most recent call last):\n" in message
    assert re.search(r"in __init__\n    .*while True: pass\nTimeoutError: ", message)


SPINS_ONCE = """
import time
if not hasattr(self, "called"):
    self.called = True
    end = time.process_time() + {seconds}
    while time.process_time() < end: pass
return logits + 1
"""


def test_first_call_may_take_longer_once(zygote: ZygoteProcess, model: ModelView) -> None:
    limits = SandboxLimits(cpu_time=20.0, step_timeout=0.5, first_step_timeout=60.0, load_timeout=20.0)
    executor = SandboxExecutor(zygote, limits, MAX_ROWS, VOCAB)
    caller = Caller(executor, model)
    slow_at_first = executor.load(source(SPINS_ONCE.format(seconds=0.8)), "one")
    assert caller.call(slow_at_first, caller.attach(slow_at_first)) == ([1], RunOutcome(ANY, {}, False, 0.0, ANY, ANY))
    hangs_later = executor.load(
        source("if hasattr(self, 'called'):\n    while True: pass\nself.called = 1\nreturn logits")
    )
    row = caller.attach(hangs_later)
    assert not caller.call(hangs_later, row)[1].faults
    assert_too_late(caller.call(hangs_later, row)[1], 0.5)
    executor._first_calls.use("one", 1000.0)
    another = executor.load(source(SPINS_ONCE.format(seconds=3.0)), "one")
    assert_too_late(caller.call(another, caller.attach(another))[1], 0.5)
    executor.close()


def test_earlier_stages_use_up_the_deadline(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(LOOPS))
    row = caller.attach(processor)
    outcome = executor.group(processor, [row]).begin(torch.zeros(1, VOCAB), 1.5).finish()
    assert_too_late(outcome, 0.5)
    assert outcome.seconds >= outcome.charged > 0.4
    executor.ensure(processor)
    row = caller.attach(processor)
    outcome = executor.group(processor, [row]).begin(torch.zeros(1, VOCAB), 100.0).finish()
    assert_too_late(outcome, 0.0625)


SLEEPS = "import time\ntime.sleep(0.5)\nlogits[:, 0] = 1.0\nreturn logits"


def test_waiting_counts_against_the_deadline(executor: SandboxExecutor, caller: Caller) -> None:
    """Also if the call has begun without its logits."""
    processor = executor.load(source(SLEEPS))
    values, outcome = caller.call(processor, caller.attach(processor))
    assert (values, outcome.faults, outcome.logits_use) == ([1], {}, "unread")
    assert outcome.charged > 0.25


def test_waiting_uses_up_the_time_of_first_calls(zygote: ZygoteProcess, model: ModelView) -> None:
    limits = SandboxLimits(cpu_time=20.0, step_timeout=0.1, first_step_timeout=60.0, load_timeout=20.0)
    executor = SandboxExecutor(zygote, limits, MAX_ROWS, VOCAB)
    caller = Caller(executor, model)
    processor = executor.load(source(SLEEPS), "one")
    assert not caller.call(processor, caller.attach(processor))[1].faults
    assert executor._first_calls.remaining("one") < 59.8
    executor.close()


def test_waiting_before_and_after_a_read_shares_the_deadline(zygote: ZygoteProcess, model: ModelView) -> None:
    limits = SandboxLimits(cpu_time=20.0, step_timeout=0.8, first_step_timeout=0.8, load_timeout=20.0)
    executor = SandboxExecutor(zygote, limits, MAX_ROWS, VOCAB)
    caller = Caller(executor, model)
    processor = executor.load(source(f"import time\ntime.sleep(0.6)\nfloat(logits.max())\n{SLEEPS}"))
    outcome = caller.call(processor, caller.attach(processor))[1]
    assert outcome.logits_use == "read"
    assert [fault.kind for fault in outcome.faults.values()] == ["deadline"]
    executor.close()


COMPUTES = """
import time
end = time.process_time() + 0.15
while time.process_time() < end: pass
return logits + 1
"""


@pytest.mark.thorough  # the spinners and the others share a core for as long as a deadline
def test_spinners_do_not_end_an_honest_processor(zygote: ZygoteProcess, model: ModelView) -> None:
    """It needs less than half of its CPU time, but on a core that it shares with spinners, more than that by the clock.

    The spinners end: some by their CPU time, the others by the backstop.
    """
    limits = SandboxLimits(cpu_time=20.0, step_timeout=0.4, first_step_timeout=0.4, load_timeout=20.0)
    executor = SandboxExecutor(zygote, limits, MAX_ROWS, VOCAB)
    caller = Caller(executor, model)
    spinners = [executor.load(source(f"{LOOPS}  # {number}"), f"tenant {number}") for number in range(4)]
    honest = executor.load(source(COMPUTES))
    core = min(os.sched_getaffinity(0))
    for processor in (*spinners, honest):
        os.sched_setaffinity(sandbox_of(processor)._pid, {core})
    logits = [torch.zeros(1, VOCAB) for _ in range(5)]
    runs = [
        executor.group(processor, [caller.attach(processor)]).begin(rows)
        for processor, rows in zip((*spinners, honest), logits, strict=True)
    ]
    *spun, answered = [run.finish() for run in runs]
    assert faults(answered) == {}
    assert answered.seconds > limits.step_timeout
    assert answered.charged < limits.step_timeout
    assert logits[4][0, 0] == 1
    assert [faults(outcome)[0][0] for outcome in spun] == ["deadline"] * 4
    assert all("of CPU time: its process was killed" in faults(outcome)[0][1] for outcome in spun)
    executor.close()


class ShiftedTime:
    """The wall clock, which the test moves forward."""

    def __init__(self) -> None:
        self.offset = 0.0
        self.clock_gettime = time.clock_gettime

    def perf_counter(self) -> float:
        return time.perf_counter() + self.offset


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ShiftedTime:
    clock = ShiftedTime()
    for module in (sandbox_module, cpu_time):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_long_forward_pass_does_not_end_a_call(executor: SandboxExecutor, caller: Caller, clock: ShiftedTime) -> None:
    """The call got no core during the forward pass. It has its time once the logits are there."""
    processor = executor.load(source(ADDS))
    process = sandbox_of(processor)._process
    signal.pidfd_send_signal(process.pidfd, signal.SIGSTOP)
    run = executor.group(processor, [caller.attach(processor, by=3.0)]).promise()
    assert run is not None
    clock.offset += 1000.0
    logits = torch.zeros(1, VOCAB)
    run.provide(logits)
    assert sandbox_of(processor).in_call
    signal.pidfd_send_signal(process.pidfd, signal.SIGCONT)
    assert faults(run.finish()) == {}
    assert logits[0, 0] == 3


def test_call_that_hangs_ends_after_the_forward_pass(
    executor: SandboxExecutor, caller: Caller, clock: ShiftedTime
) -> None:
    processor = executor.load(source("import time\ntime.sleep(1e6)"))
    run = executor.group(processor, [caller.attach(processor)]).promise()
    assert run is not None
    run.provide(torch.zeros(1, VOCAB))
    clock.offset += 1000.0
    ((kind, message),) = faults(run.finish()).values()
    assert kind == "deadline"
    assert message.startswith("processor P gave no answer within 10 s, in which it got 0"), message


CLOSES_ITS_CONNECTION = """
import os, sys, time
frame = sys._getframe()
while "connection" not in frame.f_locals:
    frame = frame.f_back
os.close(frame.f_locals["connection"])
time.sleep(1000)
"""


def test_processes_that_close_their_connections_are_awaited_together(
    executor: SandboxExecutor, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their wait statuses never come. The step waits for one of them, not for each in turn."""
    monkeypatch.setattr(sandbox_module, "_STATUS_TIMEOUT", 2.0)
    processors = [executor.load(source(f"{CLOSES_ITS_CONNECTION}# {number}")) for number in range(6)]
    began = time.monotonic()
    runs = [executor.group(each, [caller.attach(each)]).begin(torch.zeros(1, VOCAB)) for each in processors]
    outcomes = [run.finish() for run in runs]
    assert time.monotonic() - began < 6 * 2.0
    reason = "processor P closed its connection: its process was killed"
    assert [faults(outcome) for outcome in outcomes] == [{0: ("crash", reason)}] * 6


def test_sandbox_that_cannot_be_started_is_not_the_fault_of_the_processor(
    executor: SandboxExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = executor.load(source(ADDS))
    sandbox_of(processor).kill("crash", "crashed")

    def no_descriptor(*_: object) -> Sandbox:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(sandbox_executor, "Sandbox", no_descriptor)
    for start in (lambda: executor.load(source(COUNTS)), lambda: executor.ensure(processor)):
        with pytest.raises(ExecutorUnavailable, match=r"no sandbox can be started: .* Too many open files"):
            start()


HANGS_IN_INIT = """
import time
from logitship import CustomLogitProcessor

class P(CustomLogitProcessor):
    def __init__(self):
        {body}

    def __call__(self, logits, custom_param_list=None):
        return logits
"""


def nice_of(process: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, process)


NORMAL = nice_of(0)


def test_sandboxes_are_forked_in_the_background(zygote: ZygoteProcess) -> None:
    sandbox = Sandbox(zygote, MAX_ROWS, VOCAB)
    assert nice_of(sandbox._pid) == max(NORMAL, cpu_time.LOADING_NICE)
    assert os.sched_getaffinity(sandbox._pid) == cpu_time.background_cores(1)
    sandbox.close()


def test_loaded_sandbox_leaves_the_background(executor: SandboxExecutor) -> None:
    process = sandbox_of(executor.load(source(ADDS)))._pid
    assert nice_of(process) == NORMAL
    assert os.sched_getaffinity(process) == os.sched_getaffinity(0)


def test_sandboxes_share_the_session(executor: SandboxExecutor) -> None:
    """Else nice values would not count between them and the engine, and share nothing else: no terminal, no group."""
    process = sandbox_of(executor.load(source(ADDS)))._pid
    assert os.getsid(process) == os.getsid(0)
    assert os.getpgid(process) == process


SPINS = "import time\nend = time.perf_counter() + 0.5\nwhile time.perf_counter() < end: pass\nreturn logits"


def test_deferred_call_runs_at_the_lowest_priority(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(SPINS))
    process = sandbox_of(processor)._pid
    logits = torch.zeros(1, VOCAB)
    run = executor.group(processor, [caller.attach(processor)]).begin(logits)
    assert not run.wait(0)
    assert nice_of(process) == NORMAL
    run.defer(logits.clone())
    assert nice_of(process) == cpu_time.DEFERRED_NICE
    assert not run.finish().faults
    assert nice_of(process) == NORMAL


FAILS_FOR_GROUPS = f"if len(logits) > 1: raise ValueError\n{SPINS}"


def test_call_keeps_its_lowered_priority(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(FAILS_FOR_GROUPS))
    process = sandbox_of(processor)._pid
    run = executor.group(processor, [caller.attach(processor) for _ in range(2)]).begin(torch.zeros(2, VOCAB))
    run.lower_priority()
    values = {nice_of(process)}
    while not run.wait(0.05):
        values.add(nice_of(process))
    assert values == {cpu_time.DEFERRED_NICE}
    assert not run.finish().faults
    assert nice_of(process) == NORMAL


@pytest.mark.parametrize("body", ["time.sleep(1000)", "while True: pass"])
def test_cancelled_load_fails_soon_and_runs_at_low_priority(
    executor: SandboxExecutor, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    string = SourceProcessor(HANGS_IN_INIT.format(body=body), "P")
    failed: list[str] = []

    def load() -> None:
        with pytest.raises(ProcessorLoadError) as raised:
            executor.load(string, "tenant")
        failed.append(str(raised.value))

    thread = threading.Thread(target=load)
    thread.start()
    while not (running := list(executor._sandboxes)):
        assert thread.is_alive()
    assert [nice_of(each._pid) for each in running] == [cpu_time.LOADING_NICE]
    executor.cancel_load(string.digest, "another")
    executor.cancel_load(string.digest, "tenant")
    thread.join(LONG)
    assert failed == ["the processor was killed because its load was cancelled (while it was loaded)"]
    assert not executor._loading
    assert not executor._sandboxes
    assert executor.stats().ended == {"unloaded": 1}
    assert not caplog.records, "a client that disconnects causes no warning"


def test_sandbox_computing_between_calls_is_killed(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(SPINS_AFTER_ITS_ANSWER))
    row = caller.attach(processor)
    assert not caller.call(processor, row)[1].faults
    assert sandbox_of(processor)._process.status.result(30) == 9
    assert faults(caller.call(processor, row)[1]) == {
        0: ("cpu_time", "processor P used over 0.3 s of CPU between its calls: its process was killed")
    }


def test_unfinished_call_kills_only_its_sandbox(executor: SandboxExecutor, caller: Caller) -> None:
    unfinished, other = executor.load(source(ADDS)), executor.load(source(COUNTS))
    row = caller.attach(unfinished, by=1.0)
    executor.group(unfinished, [row]).begin(torch.zeros(1, VOCAB))
    assert caller.call(other, caller.attach(other))[0] == [1]
    message = "processor P was killed because its previous call was not finished"
    assert faults(caller.call(unfinished, row)[1]) in ({0: ("crash", message)}, {})
    executor.ensure(unfinished)
    assert caller.call(unfinished, caller.attach(unfinished, by=2.0))[0] == [2]
    assert sandbox_of(other).alive


def test_closed_row_frees_its_state(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(COUNTS_VIEWS))
    rows = [caller.attach(processor) for _ in range(3)]
    assert caller.call(processor, *rows)[0] == [3, 3, 3]
    rows[0].close()
    rows[1].close()
    assert caller.call(processor, rows[2])[0] == [1]


def test_unload_kills_the_process(executor: SandboxExecutor) -> None:
    processor = executor.load(source(ADDS))
    process = sandbox_of(processor)._process
    executor.unload(processor)
    executor.unload(processor)
    assert process.status.result(30) == 9


def test_close_kills_all_sandboxes(zygote: ZygoteProcess, model: ModelView) -> None:
    before = set(threading.enumerate())
    executor = SandboxExecutor(zygote, LIMITS, MAX_ROWS, VOCAB)
    processes = [sandbox_of(executor.load(source(body)))._process for body in (ADDS, COUNTS)]
    executor.close()
    executor.close()
    assert [process.status.result(30) for process in processes] == [9, 9]
    assert "logitship-sandboxes" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_spare_sandbox_is_counted_once_used(zygote: ZygoteProcess, model: ModelView) -> None:
    executor = SandboxExecutor(zygote, LIMITS, MAX_ROWS, VOCAB, num_spares=1)
    caller = Caller(executor, model)
    assert (executor.stats().alive, executor.stats().started) == (0, 0)
    for by in (1.0, 2.0):  # the second may find no spare
        processor = executor.load(source(f"{ADDS}  # {by}"))
        assert caller.call(processor, caller.attach(processor, by=by))[0] == [by]
    assert (executor.stats().alive, executor.stats().started) == (2, 2)
    executor.close()
    assert (executor.stats().alive, executor.stats().started) == (0, 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
FAULT = st.tuples(
    st.lists(st.integers(-1, 4) | st.booleans(), max_size=3),
    st.sampled_from(["exception", "bad_result", "crash", "non_finite"]),
    st.text(max_size=20) | st.integers().map(lambda number: "x" * (abs(number) % 20000)),
    st.text(max_size=20) | st.none(),
)


@given(
    st.binary(max_size=60)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.lists(FAULT, max_size=3).map(lambda value: json.dumps(value).encode())
)
def test_read_faults_returns_valid_faults_or_raises(body: bytes) -> None:
    processor = SandboxedProcessor(SourceProcessor("class A: ...", "A"), "")
    try:
        parsed = read_faults(body, processor, 3)
    except ValueError:
        return
    for row, fault in parsed.items():
        assert type(row) is int
        assert 0 <= row < 3
        assert isinstance(fault, ProcessorFault)
        assert fault.kind in ("exception", "bad_result")
        assert fault.digest == processor.digest
        assert len(fault.message) <= 8192
        assert len(fault.traceback) <= 8192


def test_read_faults_rejects_deep_nesting() -> None:
    with pytest.raises(ValueError, match="depth limit"):
        read_faults(b"[" * 60000, SandboxedProcessor(SourceProcessor("class A: ...", "A"), ""), 3)


# The same batch, in this process and in sandboxes.

HISTORY = """
req = custom_param_list[0]["__req__"]
for row, params in enumerate(custom_param_list):
    req = params["__req__"]
    history = req.origin_input_ids + req.output_ids
    seen = req.state.setdefault("seen", [])
    assert seen == req.output_ids[: len(seen)]
    seen += req.output_ids[len(seen):]
    logits[row, history[-5:]] -= 3.5
    logits[row, len(seen) % req.vocab_size] += 1
return logits
"""
MUTATES = """
result = logits.double() * 1.5
for row, params in enumerate(custom_param_list):
    params["nested"]["list"].append(len(params["__req__"].output_ids))
    params["count"] = params.get("count", 0) + 1
    result[row, : params["count"]] += sum(params["nested"]["list"])
    params["__req__"].output_ids.append(7)
    params["__req__"].origin_input_ids.clear()
return result
"""
READS = """
for row, params in enumerate(custom_param_list):
    req = params["__req__"]
    text = req.tokenizer.decode(req.output_ids)
    sampling = {name: getattr(req.sampling_params, name) for name in SAMPLING_FIELDS}
    values = (text, req.rid, sampling, sorted(req.eos_token_ids), params["text"], params["pair"])
    logits[row, sum(map(ord, repr(values))) % req.vocab_size] = 100.0
return logits
"""
READS = READS.replace(
    "SAMPLING_FIELDS", repr(sorted({field.name for field in fields(SamplingParams)} - {"processors"}))
)
KEEPS = """
self.calls = getattr(self, "calls", 0) + 1
self.rows = getattr(self, "rows", 0) + len(logits)
return torch.softmax(logits, -1) + self.calls - self.rows / 7
"""
BODIES = [HISTORY, MUTATES, READS, KEEPS]
TENANTS = ["", "a", "b"]


class Side:
    """A batch whose processors run in one of the executors."""

    def __init__(self, executor: ProcessorExecutor, model: ModelView, new_request: Callable[..., Any]) -> None:
        self._loaded = {
            (tenant, number): executor.load(source(body), tenant)
            for tenant in TENANTS
            for number, body in enumerate(BODIES)
        }
        self._new_request = new_request
        self._batch: PersistentBatch[Any] = PersistentBatch(MAX_ROWS)
        self._shipped = ShippedProcessors(None, torch.device("cpu"), False, model=model)

    def __len__(self) -> int:
        return len(self._batch)

    def add(self, name: str, tenant: str, numbers: Sequence[int], prompt: list[int], top_k: int) -> None:
        params = {"nested": {"list": [1]}, "text": f"for {name}", "pair": (1, 2.5)}
        uses = tuple(ProcessorUse(self._loaded[tenant, number], params, name) for number in numbers)
        sampling = SamplingParams(
            top_k=top_k, stop=["."], logit_bias={5: 1.5}, allowed_token_ids=None, custom_params=params
        )
        self._batch.add(self._new_request(name, with_processors(sampling, uses), prompt))

    def remove(self, row: int) -> None:
        self._batch.remove(self._batch.members[row])

    def swap(self, one: int, other: int) -> None:
        self._batch.swap(one, other)

    def step(self, logits: torch.Tensor, new_tokens: Sequence[int], pause: float) -> tuple[torch.Tensor, list[Any]]:
        """Make a step whose forward pass takes some seconds."""
        self._shipped.update_state(self._batch.commit())
        self._shipped.begin()
        time.sleep(pause)
        result = self._shipped.apply(logits.clone())
        faults = [(row, fault.kind, fault.message) for row, fault in self._shipped.take_faults()]
        for member, token in zip(self._batch.members, new_tokens, strict=True):
            member.output_token_ids.append(token)
        return result, faults


def with_processors(sampling: SamplingParams, uses: tuple[ProcessorUse, ...]) -> SamplingParams:
    values = {field.name: getattr(sampling, field.name) for field in fields(SamplingParams)}
    return SamplingParams(**(values | {"processors": uses}))


@random_seeds(4, shares_fixtures=True)
def test_results_equal_those_of_in_process_executor(
    zygote: ZygoteProcess,
    model: ModelView,
    new_request: Callable[..., Any],
    seed: int,
) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    executor = SandboxExecutor(zygote, replace(LIMITS, step_timeout=30.0, first_step_timeout=30.0), MAX_ROWS, VOCAB)
    sides = [
        Side(InProcessExecutor({}, model), model, new_request),
        Side(executor, model, new_request),
    ]
    applied = 0
    for step in range(40):
        for _ in range(chance.randrange(3)):
            if len(sides[0]):
                row = chance.randrange(len(sides[0]))
                for side in sides:
                    side.remove(row)
                break
        while len(sides[0]) < MAX_ROWS and chance.random() < 0.6:
            numbers = [chance.randrange(len(BODIES)) for _ in range(chance.randrange(4))]
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 30))]
            arguments = (f"r{step}", chance.choice(TENANTS), numbers, prompt, chance.randrange(5))
            for side in sides:
                side.add(*arguments)
        if not len(sides[0]):
            continue
        logits = torch.randn(len(sides[0]), VOCAB)
        new_tokens = [chance.randrange(VOCAB) for _ in range(len(sides[0]))]
        pause = chance.choice([0.0, 0.001, 0.005])
        (expected, no_faults), (result, also_none) = (side.step(logits, new_tokens, pause) for side in sides)
        assert torch.equal(result, expected)
        assert no_faults == also_none == []
        applied += not torch.equal(expected, logits)
    assert applied > 20
    executor.close()


def test_changing_groups(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(ADDS))
    one, other = caller.attach(processor, by=1), caller.attach(processor, by=2)
    groups = [executor.group(processor, rows) for rows in ([one], [other], [one, other], [other, one])]
    for _ in range(2):
        for group, expected in zip(groups, ([1], [2], [1, 2], [2, 1]), strict=True):
            logits = torch.zeros(len(expected), VOCAB)
            group.begin(logits).finish()
            assert logits[:, 0].tolist() == expected


COUNTS_ITS_CALLS = """
import gc
for row, params in zip(logits, custom_param_list):
    state = params["__req__"].state
    row[0] = state["calls"] = state.get("calls", 0) + 1
    row[1] = sum(type(each).__name__ == "SequenceState" for each in gc.get_objects())
return logits
"""


def test_fork_copies_state_in_the_sandbox(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(COUNTS_ITS_CALLS))
    row = caller.attach(processor)
    early_fork = row.fork([])  # its source is not in a sandbox yet: it starts from scratch
    assert caller.call(processor, row)[0] == [1]
    fork, dropped = row.fork([]), row.fork([])
    assert caller.call(processor, row, fork, early_fork)[0] == [2, 2, 1]
    assert caller.call(processor, fork)[0] == [3]
    dropped.close()
    logits = torch.zeros(1, VOCAB)
    executor.group(processor, [row]).begin(logits).finish()
    assert logits[0, :2].tolist() == [3, 3]


def test_failed_copy_is_a_fault_of_the_fork(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(
        source("custom_param_list[0]['__req__'].state['kept'] = (x for x in ())\nreturn logits + 1")
    )
    row, other = caller.attach(processor), caller.attach(processor)
    caller.call(processor, row)
    logits, outcome = caller.call(processor, row.fork([]), other, row)
    assert logits[1:] == [1, 1]
    ((faulty_row, (kind, message)),) = faults(outcome).items()
    assert (faulty_row, kind) == (0, "uncopyable")
    assert "processor P keeps state of a sequence that cannot be copied" in message


def test_fork_of_row_in_dead_sandbox_has_its_fault(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source(COUNTS_ITS_CALLS))
    row = caller.attach(processor)
    caller.call(processor, row)
    before = row.fork([])
    sandbox_of(processor).kill("crash", "crashed")
    for fork in (before, row.fork([]), row):
        assert faults(caller.call(processor, fork)[1]) == {0: ("crash", "processor P crashed")}


def test_copy_past_the_deadline_kills_the_sandbox(executor: SandboxExecutor, caller: Caller) -> None:
    body = """
class Slow:
    def __deepcopy__(self, memo):
        while True: pass
custom_param_list[0]["__req__"].state["slow"] = Slow()
return logits + 1
"""
    processor = executor.load(source(body))
    row = caller.attach(processor)
    caller.call(processor, row)
    row.fork([])
    assert faults(caller.call(processor, row)[1]) == {0: ("deadline", f"processor P {NO_ANSWER}")}


def test_stats_count_each_sandbox_once(executor: SandboxExecutor, caller: Caller) -> None:
    kept, unloaded, hanging = executor.load(source(ADDS)), executor.load(source(COUNTS)), executor.load(source(LOOPS))
    assert executor.stats() == SandboxStats(alive=3, started=3, ended={})
    executor.unload(unloaded)
    caller.call(hanging, caller.attach(hanging))
    # The death is counted either by the watcher thread or here.
    executor.ensure(hanging)
    executor.ensure(kept)
    with pytest.raises(ProcessorLoadError):
        executor.load(SourceProcessor("raise ValueError", "P"))
    executor.unload(hanging)
    executor.unload(hanging)
    assert executor.stats() == SandboxStats(alive=1, started=5, ended={"unloaded": 3, "deadline": 1})


def test_unloaded_sandbox_is_not_reported_as_dead(
    executor: SandboxExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processor = executor.load(source(ADDS))
    sandbox = processor.instance.sandbox
    close = sandbox.close

    def close_and_report() -> None:
        close()
        executor._report(sandbox)  # as the watcher thread may do at this moment

    monkeypatch.setattr(sandbox, "close", close_and_report)
    executor.unload(processor)
    assert executor.stats().ended == {"unloaded": 1}
    assert not caplog.records


@pytest.mark.parametrize("failing", range(3))
def test_executor_without_its_threads_leaves_nothing(
    failing: int, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its three threads cannot be started."""
    real, starts, closed = threading.Thread.start, itertools.count(), threading.Event()

    def start(thread: threading.Thread) -> None:
        if next(starts) == failing:
            raise RuntimeError("can't start new thread")
        real(thread)

    before, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(zygote, "close", closed.set)
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            SandboxExecutor(zygote, LIMITS, MAX_ROWS, VOCAB, num_spares=1)
    assert closed.is_set()
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG)
        assert not thread.is_alive()
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_load_that_is_killed_is_not_the_fault_of_the_processor(executor: SandboxExecutor) -> None:
    """The kernel kills sandboxes first when memory is short."""
    string = SourceProcessor(HANGS_IN_INIT.format(body="time.sleep(1000)"), "P")
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(executor.load, string)
        while not (running := list(executor._sandboxes)):
            assert not loading.done()
        os.kill(running[0]._pid, signal.SIGKILL)
        with pytest.raises(ExecutorUnavailable, match="was killed, as the system does when memory is short"):
            loading.result(LONG)
