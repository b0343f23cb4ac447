"""Fixtures that run hostile processors and detect successful attacks.

- `target` is what they attack: listening sockets, files, a process, secrets. `target.changes(report)` lists what has
  changed, seen from outside.
- `sandboxed` runs a processor as the server does. `unsandboxed` runs the same one in a process without a sandbox: the
  control, in which the attack must succeed, which proves that the test can fail.
- `attacker.py` holds the processors' helpers.
"""

from __future__ import annotations

import _ctypes
import contextlib
import dataclasses
import errno
import inspect
import json
import os
import re
import resource
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.client.errors import ProcessorFault, ProcessorLoadError
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor
from logitship.sampler.processors.executor import ExecutorSequence, LoadedProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits
from logitship.sampler.sandbox.zygote_process import ForkedProcess, ZygoteProcess

HERE = Path(__file__).parent
VOCAB = 8192
MAX_ROWS = 4
MEMORY_LIMIT = 256 << 20
LONG_DEADLINES = SandboxLimits(cpu_time=20.0, step_timeout=20.0, first_step_timeout=20.0, load_timeout=20.0)
SHORT_DEADLINES = SandboxLimits(cpu_time=0.3, step_timeout=1.0, first_step_timeout=1.0, load_timeout=3.0)
MODEL = ModelView(VOCAB, frozenset({1}), None)
EXIT_TIMEOUT = 60.0
"""Seconds for a process to exit, which takes milliseconds."""

SECRET = f"SECRET-{secrets.token_hex(16)}"
HELD_BY_THIS_PROCESS = [bytearray(SECRET.encode())]

IN_A_CALL = """
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        attacker.run(attempt, W)
        return attacker.report(logits)
"""
"""The default class of a hostile processor: makes the attempt in each call."""


@dataclasses.dataclass
class Report:
    """The result of running a processor.

    Attributes:
        pid: PID of its process.
        outcomes: the outcomes of its attempts, as reported.
        load_error: why it could not be loaded, or "".
        faults: messages and tracebacks of its faults.
        kinds: kinds of the faults; empty for controls.
        status: exit code of a control that ended its process, see `os.waitstatus_to_exitcode`.
        seen: all data received from it.
    """

    pid: int = 0
    outcomes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    load_error: str = ""
    faults: list[str] = dataclasses.field(default_factory=list)
    kinds: list[str] = dataclasses.field(default_factory=list)
    status: int | None = None
    seen: bytes = b""

    @property
    def answer(self) -> str:
        """Outcome of the first attempt: the name of an errno, an exception, or `returned …`."""
        if not self.outcomes:
            return "no outcome was reported"
        first = self.outcomes[0]
        if "returned" in first:
            return f"returned {first['returned']}"
        return errno.errorcode.get(first["errno"], "") or str(first["raised"])

    def take_logits(self, data: bytes) -> None:
        """Read the outcomes that `attacker.report` wrote."""
        self.seen += data
        row = torch.frombuffer(bytearray(data), dtype=torch.float32)[:VOCAB]
        length = int(row[0]) if row[0].isfinite() else 0
        if 0 < length < VOCAB:
            text = bytes(row[1 : 1 + length].to(torch.uint8).tolist())
            self.outcomes = json.loads(text)
            self.seen += text


class Target:
    """Resources to attack."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        # Not below pytest's directory, which is private: only the sandbox is to deny access.
        self.folder = Path(tempfile.mkdtemp(prefix=f"canary-{self.token}-", dir="/tmp"))
        self.shared_memory = Path(f"/dev/shm/canary-{self.token}")
        self._make_files()
        self._make_sockets()
        self.victim = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "victim.py"), SECRET, str(self.secret_file)],
            env={"API_KEY": SECRET},
            stdout=subprocess.PIPE,
        )
        assert self.victim.stdout is not None
        self.secret_at, self.secret_descriptor = map(int, self.victim.stdout.readline().split())
        self.signals: list[int] = []
        self._handlers = {
            number: signal.signal(number, lambda number, _: self.signals.append(number))
            for number in (signal.SIGUSR1, signal.SIGIO)
        }
        self._before = self._state()

    def _make_files(self) -> None:
        self.folder.chmod(0o777)
        self.secret_file = self.folder / "secret.txt"
        self.plain_file = self.folder / "plain.txt"
        self.inner = self.folder / "inner"
        self.secret_file.write_text(f"# {SECRET}\n")
        self.plain_file.write_text("original\n")
        self.inner.mkdir()
        (self.inner / f"{SECRET}.name").touch()
        (self.folder / "link").symlink_to(SECRET)
        (self.folder / "canary.py").write_text(f"KEY = {SECRET!r}\n")
        shutil.copy(_ctypes.__file__, self.folder / "library.so")
        torch.save({"key": SECRET}, self.folder / "secret.pt")
        for path in (self.plain_file, self.secret_file, self.inner):
            path.chmod(0o777)
        self.time_ns = secrets.randbelow(10**18)
        os.utime(self.plain_file, ns=(self.time_ns, self.time_ns))

    def _make_sockets(self) -> None:
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(type=socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.path = socket.socket(socket.AF_UNIX)
        self.path.bind(str(self.folder / "socket"))
        (self.folder / "socket").chmod(0o777)
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0canary-{self.token}")
        for each in (self.path, self.abstract):
            each.listen()
        for each in (self.tcp, self.udp, self.path, self.abstract):
            each.setblocking(False)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.free_port = free.getsockname()[1]

    def attributes(self) -> dict[str, Any]:
        """Return what hostile processors see of it: everything but the secret."""
        return {
            "folder": str(self.folder),
            "secret_file": str(self.secret_file),
            "secret_tensor": str(self.folder / "secret.pt"),
            "plain_file": str(self.plain_file),
            "inner": str(self.inner),
            "library": str(self.folder / "library.so"),
            "shared_memory": str(self.shared_memory),
            "tcp_port": self.tcp.getsockname()[1],
            "udp_port": self.udp.getsockname()[1],
            "free_port": self.free_port,
            "abstract": f"canary-{self.token}",
            "server": os.getpid(),
            "victim": self.victim.pid,
            "secret_at": self.secret_at,
            "secret_descriptor": self.secret_descriptor,
        }

    def changes(self, report: Report) -> list[str]:
        """Return a description of each change; empty if there is none."""
        found = []
        for name, listener in (("TCP", self.tcp), ("Unix", self.path), ("abstract", self.abstract)):
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append(f"{name} connection")
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(100)
            found.append("UDP datagram")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self.free_port)) == 0:
                found.append("TCP listener")
        now = self._state()
        found += [f"changed: {name}" for name in {**self._before, **now} if self._before.get(name) != now.get(name)]
        if SECRET.encode() in report.seen:
            found.append("the secret leaked")
        if str(self.time_ns).encode() in report.seen:
            found.append("file times leaked")
        if f"process-{self.victim.pid}-".encode() in report.seen:
            found.append("PIDs leaked")
        if self.signals:
            found.append("the server was signalled")
        if report.pid:
            found += [f"started: {each}" for each in started_by(report.pid)]
        return found

    def changes_until(self, change: str, report: Report) -> list[str]:
        """Return `changes` once one matches the pattern, because a signal, say, takes a moment to arrive."""
        found: list[str] = []
        deadline = time.monotonic() + EXIT_TIMEOUT
        while not any(re.fullmatch(change, each) for each in found) and time.monotonic() < deadline:
            found += self.changes(report)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.victim.wait(0.01)
        return found

    def _state(self) -> dict[str, Any]:
        """Return the state of the files and of the victim process."""
        pid = self.victim.pid
        state: dict[str, Any] = {}
        for path in (self.folder, *self.folder.rglob("*")):
            found = path.lstat()
            owned = (found.st_mode, found.st_uid, found.st_nlink, found.st_mtime_ns)
            attributes = os.listxattr(path, follow_symlinks=False)
            content = path.read_bytes() if path.is_file() else b""
            state[path.name.replace(SECRET, "…")] = (owned, attributes, content)
        state["/dev/shm"] = self.shared_memory.exists()
        state["the victim exited"] = self.victim.poll() is not None
        with contextlib.suppress(OSError):
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            state["the victim's tracer"] = status["TracerPid"]
            state["the victim's nice value"] = os.getpriority(os.PRIO_PROCESS, pid)
            state["the victim's affinity"] = os.sched_getaffinity(pid)
            state["the victim's scheduling"] = os.sched_getscheduler(pid)
            state["the victim's limits"] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        return state

    def close(self) -> None:
        """Remove everything."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.victim.kill()
        self.victim.communicate()
        for each in (self.tcp, self.udp, self.path, self.abstract):
            each.close()
        self.shared_memory.unlink(missing_ok=True)
        shutil.rmtree(self.folder)


def started_by(pid: int) -> list[str]:
    """Return the children and additional threads of a process."""
    found = [f"process {child}" for child in children_of(pid)]
    with contextlib.suppress(OSError):
        found += [f"thread {task}" for task in os.listdir(f"/proc/{pid}/task") if task != str(pid)]
    return found


def children_of(pid: int) -> list[int]:
    """Return the PIDs of a process's children."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and parent_of(int(name)) == pid]


def parent_of(pid: int) -> int:
    """Return the PID of a process's parent; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def pid_of(pidfd: int) -> int:
    """Return a process's PID in this PID namespace; -1 once it has exited."""
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pid:"))


class RecordingZygote(ZygoteProcess):
    """Records the processes that it forked."""

    def __init__(self) -> None:
        super().__init__(
            names="logitship.builtin_processors.sglang_names:SGLANG_NAMES",
            max_rows=MAX_ROWS,
            memory_limit=MEMORY_LIMIT,
        )
        self.forked: list[ForkedProcess] = []

    def fork(self, connection: int, shared_memory: int) -> ForkedProcess:
        self.forked.append(super().fork(connection, shared_memory))
        return self.forked[-1]


class Jail:
    """The zygote of all tests, and executors with long and with short deadlines."""

    def __init__(self) -> None:
        self.zygote = RecordingZygote()
        self.zygote.start()
        self.protections = self.zygote.set_up(MODEL)
        self.executor = SandboxExecutor(self.zygote, LONG_DEADLINES, MAX_ROWS, VOCAB)
        self.short_deadline_executor = SandboxExecutor(self.zygote, SHORT_DEADLINES, MAX_ROWS, VOCAB)
        first = self.executor.load(source_of(nothing))
        self.zygote_pid = parent_of(pid_of(self.zygote.forked[-1].pidfd))
        self.zygote_pidfd = os.pidfd_open(self.zygote_pid)
        self.executor.unload(first)

    def zygote_alive(self) -> bool:
        """Return whether the zygote is still the original process."""
        return not select.select([self.zygote_pidfd], [], [], 0)[0]

    def close(self) -> None:
        """End all sandboxes and the zygote."""
        self.short_deadline_executor.close()
        self.executor.close()
        assert select.select([self.zygote_pidfd], [], [], EXIT_TIMEOUT)[0]
        os.close(self.zygote_pidfd)


def nothing(target: Any) -> None:
    """Attempt nothing."""


def source_of(
    attempt: Callable[..., object], attributes: dict[str, Any] | None = None, frame: str = IN_A_CALL
) -> SourceProcessor:
    """Return a hostile processor.

    Args:
        attempt: a function of one argument, the attributes of the target. Its source is shipped, so it must contain its
            imports. Helpers are imported from `attacker`.
        attributes: attributes of the target.
        frame: source that defines the class `P`, using `attempt`, `W` (the target) and `attacker`.
    """
    body = textwrap.dedent(inspect.getsource(attempt)).replace(f"def {attempt.__name__}(", "def attempt(", 1)
    tools = (HERE / "attacker.py").read_text()
    source = f"""
from __future__ import annotations
import gc, json, sys, types
import torch
from logitship import CustomLogitProcessor
attacker = types.ModuleType("attacker")
exec({tools!r}, vars(attacker))
sys.modules["attacker"] = attacker
W = types.SimpleNamespace(**json.loads({json.dumps(attributes or {})!r}))
{body}
{frame}
"""
    return SourceProcessor(source, "P")


class Sandboxed:
    """Runs processors as the server does."""

    model = MODEL
    secret = SECRET

    def __init__(self, jail: Jail, executor: SandboxExecutor, target: Target) -> None:
        self.jail = jail
        self.executor = executor
        self._world = target
        self._loaded: list[LoadedProcessor] = []

    def __call__(
        self, attempt: Callable[[Any], object], *, frame: str = IN_A_CALL, calls: int = 1, **attributes: Any
    ) -> Report:
        """Run an attempt."""
        return self.run(self.source(attempt, frame, **attributes), calls=calls)

    def source(self, attempt: Callable[[Any], object], frame: str = IN_A_CALL, **attributes: Any) -> SourceProcessor:
        """Return the processor of an attempt."""
        return source_of(attempt, self._world.attributes() | attributes, frame)

    def run(self, string: SourceProcessor | PickledProcessor, *, calls: int = 1) -> Report:
        """Load a processor, and call it on rows of zeros."""
        try:
            processor = self.load(string)
        except ProcessorLoadError as error:
            return Report(load_error=str(error), seen=str(error).encode())
        return self.call(processor, calls=calls)

    def call(self, processor: LoadedProcessor, *, calls: int = 1) -> Report:
        """Call a processor on rows of zeros."""
        report = Report()
        row = self.attach(processor)
        for _ in range(calls):
            logits = torch.zeros(1, VOCAB)
            for fault in self.step(processor, logits, [row]).values():
                report.faults.append(f"{fault}\n{fault.traceback}")
                report.kinds.append(fault.kind)
                report.seen += f"{fault}{fault.traceback}{fault.name}".encode()
            report.take_logits(logits.numpy().tobytes())
        # All data that the server could read.
        report.seen += processor.name.encode() + processor.instance.sandbox.logits.numpy().tobytes()
        report.pid = self.pid_of(processor)
        return report

    def load(self, string: SourceProcessor | PickledProcessor, tenant: str = "") -> LoadedProcessor:
        """Load a processor, which is unloaded after the test."""
        self._loaded.append(self.executor.load(string, tenant))
        return self._loaded[-1]

    def attach(self, processor: LoadedProcessor, **params: Any) -> Any:
        """Attach a sequence with these parameters to a processor."""
        return self.executor.attach(processor, ExecutorSequence("rid", params, [5, 6], [], SamplingParams(), MODEL))

    def step(self, processor: LoadedProcessor, logits: torch.Tensor, rows: list[Any]) -> dict[int, ProcessorFault]:
        """Call a processor: edit the logits in place, return the faults."""
        return dict(self.executor.group(processor, rows).call(logits).faults)

    def pid_of(self, processor: LoadedProcessor) -> int:
        """Return the PID of a processor's process; -1 once it has exited."""
        return pid_of(processor.instance.sandbox._process.pidfd)

    def has_ended(self, processor: LoadedProcessor) -> bool:
        """Wait for its process to exit or be killed. Return whether it did."""
        return bool(select.select([processor.instance.sandbox._process.pidfd], [], [], EXIT_TIMEOUT)[0])

    def clear(self) -> None:
        """Unload all processors, and check that nothing is left."""
        for each in self._loaded:
            self.executor.unload(each)
        while self.jail.zygote.forked:
            self.jail.zygote.forked.pop().status.result(EXIT_TIMEOUT)
        assert self._world.changes(Report()) == []
        assert children_of(self.jail.zygote_pid) == []
        assert self.jail.zygote_alive()


class Unsandboxed:
    """Runs processors without a sandbox, in a child of a process that holds the secret."""

    def __init__(self, process: subprocess.Popen[bytes], target: Target) -> None:
        self._process = process
        self._world = target

    def __call__(
        self,
        attempt: Callable[[Any], object],
        *,
        frame: str = IN_A_CALL,
        calls: int = 1,
        end: bool = False,
        **attributes: Any,
    ) -> Report:
        """Run an attempt."""
        return self.run(source_of(attempt, self._world.attributes() | attributes, frame), calls=calls, end=end)

    def run(self, string: SourceProcessor | PickledProcessor, *, calls: int = 1, end: bool = False) -> Report:
        """Load a processor, call it on rows of zeros and, if `end`, release it."""
        if isinstance(string, SourceProcessor):
            plan = {"source": string.source, "pickle": string.captured.hex()}
        else:
            plan = {"source": None, "pickle": string.payload.hex()}
        answer = self._request({**plan, "calls": calls, "vocab": VOCAB, "end": end})
        report = Report(answer["pid"], load_error=answer.get("load_error", ""), faults=answer.get("faults", []))
        report.status = answer.get("status")
        report.seen += f"{report.load_error}{report.faults}".encode()
        if answer.get("logits"):
            report.take_logits(bytes.fromhex(answer["logits"]))
        return report

    def clear(self) -> None:
        """Kill the last process, and all that it started."""
        self._request({})

    def _request(self, plan: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(plan).encode() + b"\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture(scope="session")
def held_secrets() -> Iterator[None]:
    """Put the secret into this process's environment and open files before the zygote is started."""
    os.environ["SECRET_OF_THE_SERVER"] = SECRET
    descriptor = os.memfd_create("secret", 0)
    os.write(descriptor, SECRET.encode())
    os.set_inheritable(descriptor, True)
    yield
    os.close(descriptor)
    del os.environ["SECRET_OF_THE_SERVER"]


@pytest.fixture(scope="session")
def jail(held_secrets: None) -> Iterator[Jail]:
    """The zygote and executors of all tests."""
    jail = Jail()
    yield jail
    jail.close()


@pytest.fixture(scope="session")
def control_process(held_secrets: None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs `unsandboxed.py`."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "unsandboxed.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    ) as process:
        yield process


@pytest.fixture(scope="session")
def targets() -> Iterator[list[Target]]:
    """The current target, replaced after a test that changed it."""
    targets = [Target()]
    yield targets
    targets.pop().close()


@pytest.fixture
def target(targets: list[Target]) -> Iterator[Target]:
    """An unchanged target."""
    yield targets[0]
    if targets[0].changes(Report()):
        targets.pop().close()
        targets.append(Target())


@pytest.fixture
def sandboxed(jail: Jail, target: Target) -> Iterator[Sandboxed]:
    """Runs hostile processors in sandboxes. Afterwards, checks that nothing is left and the zygote is alive."""
    sandboxed = Sandboxed(jail, jail.executor, target)
    yield sandboxed
    sandboxed.clear()


@pytest.fixture
def short_deadlines(jail: Jail, target: Target) -> Iterator[Sandboxed]:
    """Like `sandboxed`, with short deadlines."""
    sandboxed = Sandboxed(jail, jail.short_deadline_executor, target)
    yield sandboxed
    sandboxed.clear()


@pytest.fixture
def unsandboxed(control_process: subprocess.Popen[bytes], target: Target) -> Iterator[Unsandboxed]:
    """Runs the same processors without a sandbox. What they start is killed at the end of the test."""
    unsandboxed = Unsandboxed(control_process, target)
    yield unsandboxed
    unsandboxed.clear()
