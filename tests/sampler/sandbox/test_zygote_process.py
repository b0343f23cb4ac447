from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox import zygote_process
from logitship.sampler.sandbox.kernel.protections import Protections
from logitship.sampler.sandbox.zygote_process import ForkedProcess, ZygoteError, ZygoteProcess
from tests.helpers.descriptors import no_file_stays_open

NAMES = "logitship.builtin_processors.sglang_names:SGLANG_NAMES"
MODEL = ModelView(8, frozenset({1}), None)
MEMORY_SIZE = 2 * 8 * 4
LONG = 60.0


def make(names: str = NAMES) -> ZygoteProcess:
    zygote = ZygoteProcess(names=names, max_rows=2, memory_limit=64 << 20)
    zygote.start()
    return zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[ZygoteProcess]:
    zygote = make()
    assert zygote.set_up(MODEL).sufficient
    yield zygote
    zygote.close()


class Forked:
    """A sandbox, and the server's end of its connection."""

    def __init__(self, zygote: ZygoteProcess) -> None:
        self.connection, theirs = socket.socketpair()
        shared_memory = os.memfd_create("shared memory")
        try:
            os.ftruncate(shared_memory, MEMORY_SIZE)
            self.process: ForkedProcess = zygote.fork(theirs.fileno(), shared_memory)
        except ZygoteError:
            self.connection.close()
            raise
        finally:
            os.close(shared_memory)
            theirs.close()

    def ended(self) -> bool:
        poll = select.poll()
        poll.register(self.process.pidfd, select.POLLIN)
        return bool(poll.poll(LONG * 1e3))

    def close(self) -> None:
        self.connection.close()
        assert self.ended()
        os.close(self.process.pidfd)


def zygote_pid(forked: Forked) -> int:
    """Return the PID of the zygote, which is the parent of the sandbox."""
    fields = Path(f"/proc/self/fdinfo/{forked.process.pidfd}").read_text().split()
    sandbox = fields[fields.index("Pid:") + 1]
    return int(Path(f"/proc/{sandbox}/stat").read_text().rpartition(")")[2].split()[1])


def test_sandbox_exits_when_connection_closes(zygote: ZygoteProcess) -> None:
    forked = Forked(zygote)
    forked.close()
    assert forked.process.status.result(LONG) == 0


def test_killed_sandbox(zygote: ZygoteProcess) -> None:
    forked = Forked(zygote)
    forked.process.kill()
    assert forked.process.status.result(LONG) == signal.SIGKILL
    assert forked.ended()
    forked.process.kill()  # idempotent
    forked.close()


def test_killed_zygote_is_replaced(zygote: ZygoteProcess) -> None:
    lost = [Forked(zygote), Forked(zygote)]
    os.kill(zygote_pid(lost[0]), signal.SIGKILL)
    for forked in lost:
        assert forked.process.status.result(LONG) is None
        forked.close()
    Forked(zygote).close()


def test_fork_from_several_threads(zygote: ZygoteProcess) -> None:
    forked: list[Forked] = []
    threads = [threading.Thread(target=lambda: forked.append(Forked(zygote))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pids = {Path(f"/proc/self/fdinfo/{each.process.pidfd}").read_text().split("Pid:")[1] for each in forked}
    assert len(pids) == 8
    for each in forked:
        each.close()


def test_stuck_zygote_is_replaced(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_process, "FORK_TIMEOUT", 0.3)
    monkeypatch.setattr(zygote_process, "END_TIMEOUT", 0.1)
    before = Forked(zygote)
    os.kill(zygote_pid(before), signal.SIGSTOP)
    after = Forked(zygote)
    assert before.ended(), "the stopped zygote and its sandboxes are killed"
    after.close()
    before.close()


def test_close_ends_everything_and_is_idempotent() -> None:
    zygote = make()
    zygote.set_up(MODEL)
    forked = Forked(zygote)
    launcher_and_others = {thread.name for thread in threading.enumerate()}
    assert "logitship-zygote" in launcher_and_others
    zygote.close()
    zygote.close()
    assert forked.ended()
    with pytest.raises(ZygoteError, match="shutting down"):
        Forked(zygote)
    forked.close()


def test_close_before_set_up() -> None:
    make().close()
    ZygoteProcess(names=NAMES, max_rows=1, memory_limit=1).close()


def test_close_does_not_wait_for_a_starting_zygote() -> None:
    zygote = make()
    refused: list[str] = []

    def set_up() -> None:
        try:
            zygote.set_up(MODEL)
        except ZygoteError as error:
            refused.append(str(error))

    thread = threading.Thread(target=set_up)
    thread.start()
    began = time.monotonic()
    zygote.close()
    thread.join(LONG)
    assert time.monotonic() - began < LONG
    assert refused in ([], ["the server is shutting down"])


def test_tokenizer_that_cannot_be_pickled() -> None:
    zygote = make()
    with pytest.raises(ZygoteError, match="tokenizer cannot be pickled for sandboxes"):
        zygote.set_up(ModelView(8, frozenset(), lambda text: text))
    zygote.close()


@pytest.mark.thorough
def test_launcher_that_does_not_start(capfd: pytest.CaptureFixture[str]) -> None:
    zygote = make("logitship.no_such_module:NAMES")
    with pytest.raises(ZygoteError, match=r"does not start .* standard error output"):
        zygote.set_up(MODEL)
    zygote.close()
    assert "No module named 'logitship.no_such_module'" in capfd.readouterr().err


def test_insufficient_protections(monkeypatch: pytest.MonkeyPatch) -> None:
    too_little = Protections(seccomp=False)
    monkeypatch.setattr(Protections, "from_json", lambda text: too_little)
    zygote = make()
    with pytest.raises(ZygoteError, match=r"cannot sandbox shipped code: .* no seccomp filters"):
        zygote.set_up(MODEL)
    zygote.close()


def test_environment_is_not_inherited(monkeypatch: pytest.MonkeyPatch, zygote: ZygoteProcess) -> None:
    monkeypatch.setenv("LOGITSHIP_API_KEY", "a-secret-key")
    other = make()
    other.set_up(MODEL)  # wait for its program to run: before, its environment cannot be read
    launcher: Any = other._launcher
    environment = Path(f"/proc/{launcher.pid}/environ").read_bytes()
    other.close()
    assert b"OMP_NUM_THREADS=1" in environment
    assert b"a-secret-key" not in environment


def test_launcher_does_not_start_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = zygote_process._VARIABLES
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ZygoteError, match="rename the file"):
        make()


def test_close_leaks_no_descriptor() -> None:
    with no_file_stays_open():
        zygote = make()
        zygote.set_up(MODEL)
        forked = Forked(zygote)
        os.kill(zygote_pid(forked), signal.SIGKILL)
        forked.close()
        Forked(zygote).close()
        zygote.close()


def test_thread_that_cannot_start_ends_the_new_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next fork starts another one, and the process can be closed."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    zygote = make()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with no_file_stays_open():
            for start in (lambda: zygote.set_up(MODEL), lambda: Forked(zygote)):
                with pytest.raises(ZygoteError, match="can't start new thread"):
                    start()
    Forked(zygote).close()
    zygote.close()


def test_descriptor_that_is_lost_ends_its_sandbox_alone(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has no descriptor left for the one that the zygote sends. The other sandboxes go on."""
    other, lost = Forked(zygote), threading.Event()
    receive = zygote_process.Channel.receive

    def without_descriptors(channel: zygote_process.Channel) -> Any:
        note, values, descriptors = receive(channel)
        if descriptors and not lost.is_set():
            lost.set()
            for descriptor in descriptors:
                os.close(descriptor)
            return note, values, []
        return note, values, descriptors

    with monkeypatch.context() as patch:
        patch.setattr(zygote_process.Channel, "receive", without_descriptors)
        Forked(zygote).close()  # ends the `receive` in which the reader waited before
        with pytest.raises(ZygoteError, match="no file descriptor left"):
            Forked(zygote)
    Forked(zygote).close()
    assert not other.process.status.done()
    other.close()
