"""The server's handle of a sandbox, against a fake sandbox that answers correctly, slowly, or with garbage."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.sandbox import sandbox as sandbox_module
from logitship.sampler.sandbox.call_exchange import CallExchange
from logitship.sampler.sandbox.cpu_time import ProcessClock
from logitship.sampler.sandbox.protocol import (
    ANSWERS,
    DUMP_SIGNAL,
    HEADER,
    MAX_ANSWER,
    MAX_PRINTED,
    Answer,
    Command,
    pack,
)
from logitship.sampler.sandbox.sandbox import Sandbox, SandboxDied, wait_for_any
from logitship.sampler.sandbox.zygote_process import ForkedProcess, ZygoteError
from tests.helpers.descriptors import no_file_stays_open
from tests.helpers.random_cases import examples

LONG = 60.0


class Peer:
    """A fake zygote and sandbox.

    Attributes:
        process: a process that does nothing, in place of the sandbox's.
        connection: the sandbox's end of the connection.
        shared_memory: descriptor of its shared memory.
        status: wait status of the process.
    """

    def __init__(self) -> None:
        # Like a sandbox, it survives the question where it is.
        self.process = subprocess.Popen(
            ["sleep", "1000"], preexec_fn=lambda: signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
        )
        self.status: Future[int | None] = Future()

    def fork(self, connection: int, shared_memory: int) -> ForkedProcess:
        self.connection = socket.socket(fileno=os.dup(connection))
        self.connection.settimeout(LONG)
        self.shared_memory = os.dup(shared_memory)
        return ForkedProcess(os.pidfd_open(self.process.pid), self.status)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self.connection.recv(size - len(data))
        return data

    def read_message(self) -> tuple[int, int, bytes]:
        kind, number, size = HEADER.unpack(self.read(HEADER.size))
        return kind, number, self.read(size)

    def killed(self) -> bool:
        return self.process.wait(LONG) == -signal.SIGKILL

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        os.close(self.shared_memory)


def make() -> tuple[Sandbox, Peer]:
    peer = Peer()
    return Sandbox(peer, max_rows=2, vocab_size=3), peer  # type: ignore[arg-type]  # has `fork`, as a zygote


@pytest.fixture
def pair() -> Iterator[tuple[Sandbox, Peer]]:
    sandbox, peer = make()
    yield sandbox, peer
    sandbox.close()
    peer.close()


def died(sandbox: Sandbox) -> SandboxDied:
    with pytest.raises(SandboxDied) as raised:
        sandbox.finish()
    return raised.value


def test_call_and_answer(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    for number, body in enumerate((b"", b"some", b"x" * MAX_ANSWER), 1):
        sandbox.begin(Command.STEP, b"rows", LONG)
        assert peer.read_message() == (Command.STEP, number, b"rows")
        peer.connection.sendall(pack(Answer.DONE, number, body))
        assert sandbox.finish() == (Answer.DONE, body)
    assert sandbox.alive
    assert sandbox.check()


def test_queued_commands_are_sent_first(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.enqueue(Command.ATTACH, b"one")
    sandbox.enqueue(Command.DETACH, b"two")
    sandbox.begin(Command.STEP, b"", LONG)
    assert [peer.read_message()[::2] for _ in range(3)] == [(2, b"one"), (3, b"two"), (4, b"")]


def test_flush_sends_queued_commands(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.enqueue(Command.DETACH, b"gone")
    sandbox.flush()
    assert peer.read_message() == (Command.DETACH, 0, b"gone")


def test_shared_memory_is_sealed(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.logits.copy_(torch.arange(6.0).view(2, 3))
    with mmap.mmap(peer.shared_memory, 0) as memory:
        view = torch.frombuffer(memory, dtype=torch.float32, count=6)
        assert view.tolist() == [0, 1, 2, 3, 4, 5]
        view[4] = 40
        del view
    assert sandbox.logits[1, 1] == 40
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(peer.shared_memory, size)


def test_answer_in_pieces(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", LONG)
    for byte in pack(Answer.FAULTS, 1, b"[]"):
        assert sandbox.advance() is None
        peer.connection.sendall(bytes([byte]))
    assert sandbox.advance() == (Answer.FAULTS, b"[]")


def test_kill_by_another_thread_between_two_looks(pair: tuple[Sandbox, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, _ = pair
    sandbox.begin(Command.STEP, b"", LONG)
    receive = CallExchange.receive

    def killed_after(exchange: CallExchange) -> None:
        receive(exchange)
        sandbox.kill("crash", "was killed because its load was cancelled")

    monkeypatch.setattr(CallExchange, "receive", killed_after)
    assert str(died(sandbox)) == "was killed because its load was cancelled"
    assert not sandbox.in_call


def test_call_larger_than_socket_buffer(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    body = os.urandom(4 << 20)
    reader = threading.Thread(
        target=lambda: peer.connection.sendall(pack(Answer.DONE, peer.read_message()[1], b"all of it"))
    )
    sandbox.begin(Command.STEP, body, LONG)
    reader.start()
    assert sandbox.finish() == (Answer.DONE, b"all of it")
    reader.join()


def test_answer_before_whole_call_was_sent_is_ignored(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    peer.connection.sendall(pack(Answer.DONE, 1))
    sandbox.begin(Command.STEP, bytes(4 << 20), 0.05)
    assert died(sandbox).kind == "deadline"


@pytest.mark.parametrize(
    "answer",
    [
        pack(Answer.DONE, 2),
        pack(Answer.DONE, 0),
        pack(Answer.DONE, 1, b"body") + b"!",
        pack(Answer.DONE, 1) + pack(Answer.DONE, 2),
        pack(0, 1),
        pack(99, 1),
        HEADER.pack(Answer.DONE, 1, MAX_ANSWER + 1),
        HEADER.pack(Answer.DONE, 1, (1 << 64) - 1),
        b"\xff" * 200,
        bytes(1 << 17),
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
    ids=lambda answer: f"{answer[:20]!r}",
)
def test_invalid_answer_kills_the_sandbox(pair: tuple[Sandbox, Peer], answer: bytes) -> None:
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", LONG)
    peer.connection.sendall(answer)
    end = died(sandbox)
    assert (end.kind, end.reason) == ("protocol", "sent an invalid answer: its process was killed")
    assert peer.killed()


@pytest.mark.parametrize("answer", set(Answer) - {Answer.PRINTED})
@pytest.mark.parametrize("command", ANSWERS)
def test_answer_must_be_one_to_the_command(pair: tuple[Sandbox, Peer], command: Command, answer: Answer) -> None:
    sandbox, peer = pair
    sandbox.begin(command, b"", LONG)
    peer.connection.sendall(pack(answer, 1))
    if answer in ANSWERS[command]:
        assert sandbox.finish() == (answer, b"")
    else:
        assert died(sandbox).kind == "protocol"


def test_printed_text_comes_before_the_answer(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", LONG)
    whole = (
        pack(Answer.PRINTED, 1, b"one\n") + pack(Answer.PRINTED, 1, "zw\xf6lf".encode()) + pack(Answer.DONE, 1, b"x")
    )
    for byte in range(len(whole)):
        assert sandbox.advance() is None
        peer.connection.sendall(whole[byte : byte + 1])
    assert sandbox.finish() == (Answer.DONE, b"x")
    assert sandbox.take_printed() == "one\nzw\xf6lf"
    assert sandbox.take_printed() == ""


def test_printed_text_is_scrubbed(pair: tuple[Sandbox, Peer]) -> None:
    """Terminals of clients would interpret the control characters; and folders of the server are nobody's business."""
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", LONG)
    text = f"\x1b[31m \x07\ttab {torch.__file__} <object object at 0x7f12a4>\n"
    peer.connection.sendall(pack(Answer.PRINTED, 1, text.encode()) + pack(Answer.DONE, 1))
    sandbox.finish()
    assert sandbox.take_printed() == "\\x1b[31m \\x07\ttab torch/__init__.py <object object at 0x…>\n"


@pytest.mark.parametrize(
    "printed",
    [
        [HEADER.pack(Answer.PRINTED, 1, MAX_PRINTED)],
        [pack(Answer.PRINTED, 1, b"x" * 1000)] * 9,
        [pack(Answer.PRINTED, 1, b"\x1b" * 1000)] * 9,
        [pack(Answer.PRINTED, 1)] * (MAX_PRINTED // HEADER.size + 1),
        [pack(Answer.PRINTED, 2, b"x")],
    ],
)
def test_printing_too_much_kills_the_sandbox(pair: tuple[Sandbox, Peer], printed: list[bytes]) -> None:
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", LONG)
    peer.connection.sendall(b"".join(printed))
    assert died(sandbox).kind == "protocol"
    assert len(sandbox.take_printed()) <= MAX_PRINTED


def test_printed_text_of_a_process_that_ended(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", LONG)
    peer.connection.sendall(pack(Answer.PRINTED, 1, b"the last words"))
    assert sandbox.advance() is None
    assert sandbox.is_receiving
    peer.connection.close()
    assert sandbox.advance() is None
    assert not sandbox.is_receiving, "its connection stays readable"
    peer.status.set_result(0)
    assert died(sandbox).kind == "crash"
    assert sandbox.take_printed() == "the last words"


def test_unsolicited_answer_kills_the_sandbox(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    peer.connection.sendall(pack(Answer.DONE, 0))
    sandbox.begin(Command.STEP, b"", LONG)
    peer.connection.sendall(pack(Answer.DONE, 1))
    assert died(sandbox).kind == "protocol"


@examples(50)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=100),
            st.builds(pack, st.integers(0, 8), st.integers(0, 3), st.binary(max_size=50)),
            st.builds(HEADER.pack, st.integers(0, 8), st.integers(0, 3), st.integers(0, (1 << 64) - 1)),
        ),
        max_size=4,
    )
)
def test_arbitrary_bytes_are_an_answer_or_kill_the_sandbox(pieces: list[bytes]) -> None:
    sandbox, peer = make()
    sandbox.begin(Command.STEP, b"", LONG)
    for piece in pieces:
        peer.connection.sendall(piece)
    peer.connection.close()
    peer.status.set_result(0)
    try:
        kind, body = sandbox.finish()
    except SandboxDied:
        assert sandbox.death.kind in ("protocol", "crash")
    else:
        assert b"".join(pieces).endswith(pack(kind, 1, body))
        assert kind in ANSWERS[Command.STEP]
    sandbox.close()
    peer.close()


def test_deadline_without_answer(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", 0.05)
    began = time.monotonic()
    end = died(sandbox)
    assert time.monotonic() - began > 0.02
    assert (end.kind, end.reason) == ("deadline", "gave no answer within 0.05 s: its process was killed")
    assert end.dump == b""
    assert peer.killed()


def test_dump_after_the_deadline(pair: tuple[Sandbox, Peer]) -> None:
    """Bytes that arrive after the deadline are no answer, but text; those before it are not part of it."""
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", 0.05)
    peer.connection.send(b"abc")
    while sandbox._overdue is None:
        assert sandbox.advance() is None
    peer.connection.send(b"a dump\n")
    end = died(sandbox)
    assert (end.kind, end.dump) == ("deadline", b"a dump\n")
    assert peer.killed()


class StoppedClock(ProcessClock):
    """The clock of a process that could run, but gets no core."""

    seconds = 0.0

    def cpu_seconds(self) -> float:
        return self.seconds

    def is_runnable(self) -> bool:
        return True


def test_dump_continues_when_the_process_gets_a_core(
    pair: tuple[Sandbox, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "_DUMP_BACKSTOP", LONG)
    sandbox, peer = pair
    sandbox._clock = clock = StoppedClock(peer.process.pid)
    sandbox.begin(Command.STEP, b"", 0.05, LONG)
    clock.seconds += 0.05
    while sandbox._overdue is None:
        assert sandbox.advance() is None
    for part in (b"Stack (most recent call first):\n", b'  File "a.py", line 1 in f\n'):
        peer.connection.send(part)
        pauses_end = time.perf_counter() + 3 * sandbox_module._DUMP_PAUSE
        while time.perf_counter() < pauses_end:
            assert sandbox.advance() is None
        assert sandbox._call is not None
        assert sandbox._call.received.endswith(part)
    clock.seconds += sandbox_module._DUMP_PAUSE
    end = died(sandbox)
    assert end.dump == b'Stack (most recent call first):\n  File "a.py", line 1 in f\n'
    assert peer.killed()


def test_deadline_with_partial_answer(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", 0.05)
    peer.connection.sendall(pack(Answer.DONE, 1, b"body")[:-1])
    assert died(sandbox).kind == "deadline"


def test_answer_in_time_may_be_read_late(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", 0.001)
    peer.connection.sendall(pack(Answer.DONE, 1))
    late = time.monotonic() + 0.01
    while time.monotonic() < late:
        pass
    assert sandbox.finish() == (Answer.DONE, b"")


def test_wait_for_any_ends_at_the_earliest_deadline(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, _ = pair
    other, other_peer = make()
    sandbox.begin(Command.STEP, b"", LONG)
    other.begin(Command.STEP, b"", 0.05)
    assert wait_for_any([sandbox, other]) == [other]
    assert sandbox.advance() is None
    assert died(other).kind == "deadline"
    assert sandbox.alive
    other.close()
    other_peer.close()


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (3 << 8, "ended its process with exit status 3"),
        (0, "ended its process with exit status 0"),
        (signal.SIGSEGV, "ended its process: SIGSEGV (segmentation fault)"),
        (signal.SIGSYS, "ended its process: SIGSYS (bad system call)"),
        (40, "ended its process: signal 40"),
        (None, "was lost: the process that sandboxes are forked from ended"),
    ],
)
def test_reason_of_process_exit(pair: tuple[Sandbox, Peer], status: int | None, reason: str) -> None:
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", LONG)
    peer.status.set_result(status)
    peer.connection.close()
    end = died(sandbox)
    assert end.kind == "crash"
    assert end.reason.startswith(reason)


def test_process_that_closes_its_connection(pair: tuple[Sandbox, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, peer = pair
    monkeypatch.setattr(sandbox_module, "_STATUS_TIMEOUT", 0.01)
    peer.connection.close()
    sandbox.begin(Command.STEP, b"", LONG)
    assert died(sandbox).reason == "closed its connection: its process was killed"
    assert peer.killed()


def test_check_detects_death_while_idle(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    peer.process.kill()
    peer.process.wait()
    peer.status.set_result(signal.SIGKILL)
    assert sandbox.alive
    assert not sandbox.check()
    assert sandbox.death.reason.startswith("ended its process: SIGKILL")


def test_check_waits_for_a_late_status(pair: tuple[Sandbox, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than for that of a process that closed its connection and still runs."""
    sandbox, peer = pair
    monkeypatch.setattr(sandbox_module, "_STATUS_TIMEOUT", 0.0)
    waits, result = threading.Event(), peer.status.result

    def noticed(timeout: float | None = None) -> int | None:
        waits.set()
        return result(timeout)

    monkeypatch.setattr(peer.status, "result", noticed)
    peer.process.kill()
    peer.process.wait()
    with ThreadPoolExecutor() as pool:
        check = pool.submit(sandbox.check)
        assert waits.wait(LONG)
        peer.status.set_result(signal.SIGKILL)
        assert not check.result(LONG)
    assert sandbox.death.reason.startswith("ended its process: SIGKILL")


def test_end_is_recorded_once_its_status_is_known(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    peer.process.kill()
    peer.process.wait()
    sandbox.record_end()
    assert sandbox.alive
    peer.status.set_result(signal.SIGKILL)
    sandbox.record_end()
    assert sandbox.death.reason.startswith("ended its process: SIGKILL")


def test_kill_wakes_up_finish(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", LONG)

    def kill_once_it_waits() -> None:
        peer.read_message()
        sandbox.kill("cpu_time", "took too much")

    killer = threading.Thread(target=kill_once_it_waits)
    killer.start()
    end = died(sandbox)
    killer.join()
    assert (end.kind, end.reason) == ("cpu_time", "took too much")


def test_first_reason_is_kept(pair: tuple[Sandbox, Peer]) -> None:
    sandbox, peer = pair
    sandbox.kill("deadline", "was slow")
    sandbox.kill("crash", "was killed")
    assert peer.killed()
    peer.status.set_result(signal.SIGKILL)
    with pytest.raises(SandboxDied, match="was slow"):
        sandbox.begin(Command.STEP, b"", LONG)
    assert sandbox.death.kind == "deadline"


def test_unfinished_call_kills_the_sandbox(pair: tuple[Sandbox, Peer]) -> None:
    """The step was aborted, so the answer is never read; the next call must not mistake it for its own."""
    sandbox, peer = pair
    sandbox.begin(Command.STEP, b"", LONG)
    with pytest.raises(SandboxDied, match="its previous call was not finished"):
        sandbox.begin(Command.STEP, b"", LONG)
    assert peer.killed()


def test_close_leaks_no_descriptor() -> None:
    with no_file_stays_open():
        sandbox, peer = make()
        sandbox.close()
        sandbox.close()
        assert not sandbox.check()
        sandbox.enqueue(Command.DETACH, b"")
        sandbox.flush()
        assert peer.killed()
        peer.close()
        with pytest.raises(SandboxDied, match="was unloaded"):
            sandbox.logits.zero_()


@pytest.mark.parametrize("error", [ZygoteError, OSError])
def test_failed_fork_leaks_no_descriptor(error: type[Exception]) -> None:
    class Refusing:
        def fork(self, connection: int, shared_memory: int) -> ForkedProcess:
            raise error("there is none")

    with no_file_stays_open(), pytest.raises(error, match="there is none"):
        Sandbox(Refusing(), 2, 3)  # type: ignore[arg-type]


@contextlib.contextmanager
def computing(script: str) -> Iterator[tuple[Sandbox, Callable[[], float]]]:
    """Yield a sandbox whose process runs a script, and a function that returns its CPU seconds outside calls."""
    sandbox, peer = make()
    process = subprocess.Popen(["sh", "-c", script])
    sandbox._clock = ProcessClock(process.pid)

    def used() -> float:
        return sandbox.cpu_seconds_outside_calls()

    yield sandbox, used
    process.kill()
    process.wait()
    assert used() == 0.0
    sandbox.close()
    peer.close()


def test_cpu_time_outside_calls_counts() -> None:
    with computing("while :; do :; done") as (_, used):
        deadline = time.monotonic() + LONG
        while used() < 0.05:
            assert time.monotonic() < deadline


def test_cpu_time_in_calls_does_not_count() -> None:
    with computing("while :; do :; done") as (sandbox, used):
        sandbox.begin(Command.STEP, b"", LONG)
        before = used()
        poll = select.poll()
        poll.poll(200)  # the process computes meanwhile
        assert used() - before < 0.05


def test_long_call_that_nobody_waits_for_gets_idle_cores_alone(
    pair: tuple[Sandbox, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, peer = pair

    def policy() -> int:
        return os.sched_getscheduler(peer.process.pid)

    for is_long in (False, True):
        monkeypatch.setattr(sandbox_module, "IDLE_AFTER", -1.0 if is_long else LONG)
        sandbox.begin(Command.PROMISE, b"", LONG)
        _, number, _ = peer.read_message()
        assert sandbox.advance() is None
        assert policy() == os.SCHED_OTHER
        sandbox.lower_priority_of_call()
        assert sandbox.advance() is None
        assert policy() == (os.SCHED_IDLE if is_long else os.SCHED_OTHER)
        peer.connection.sendall(pack(Answer.DONE, number, b""))
        sandbox.finish()
        assert policy() == os.SCHED_OTHER


def test_priority_is_not_lowered_for_the_next_call(pair: tuple[Sandbox, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread receives the answer at the moment at which the priority is lowered."""
    sandbox, peer = pair
    sandbox.begin(Command.PROMISE, b"", LONG)
    _, number, _ = peer.read_message()
    peer.connection.sendall(pack(Answer.DONE, number, b""))
    real = sandbox_module.lower_priority
    receiver = threading.Thread(target=sandbox.finish)

    def lower(pid: int, nice: int) -> None:
        receiver.start()
        receiver.join(0.2)
        real(pid, nice)

    normal = os.getpriority(os.PRIO_PROCESS, peer.process.pid)
    monkeypatch.setattr(sandbox_module, "lower_priority", lower)
    sandbox.lower_priority_of_call()
    receiver.join(LONG)
    assert not sandbox.in_call
    assert os.getpriority(os.PRIO_PROCESS, peer.process.pid) == normal
    monkeypatch.setattr(sandbox_module, "lower_priority", real)
    sandbox.begin(Command.STEP, b"", LONG)
    sandbox.lower_priority_of_call()
    assert os.getpriority(os.PRIO_PROCESS, peer.process.pid) > normal
