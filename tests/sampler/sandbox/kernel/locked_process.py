"""Helper program of the tests: prepares a process, locks down a child, and calls one function in it.

A process that locks itself down must be single-threaded, and a lockdown is irrevocable, so it cannot run in pytest.

Reads lines of JSON with the fields of `Plan`, and answers each with a line: the fields of `Outcome`, or `failure`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import importlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import termios
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from logitship.sampler.sandbox.kernel import bpf, jail_root, limits, namespaces, privileges, seccomp, self_test
from logitship.sampler.sandbox.kernel.lockdown import Lockdown, readable_paths
from logitship.sampler.sandbox.kernel.syscalls import this_machine

ORDINARY = 60000
"""Id of an unprivileged user. Not 65534, the overflow id of unmapped users."""


@dataclass
class Plan:
    """A test plan.

    Attributes:
        attempt: name of the function of this module to call.
        where: "locked", in a child after `Lockdown.apply`; "jailed", in the parent of such a child; "plain", without
            any preparation of namespaces and root directory.
        argument: argument of the function.
        nobody: change to an unprivileged user first.
        deny: system calls to refuse, with an errno each, as a container's seccomp profile does.
        deny_if: system calls to refuse with EPERM if an argument (by its index) has this value.
        like_gvisor: give the answers of gVisor, as far as they differ from Linux's.
        open_first: open all descriptors below this number first.
        hard_memory: `RLIMIT_AS` to set first.
        namespaces: enter new namespaces.
        jail_root: enter a private root directory.
        landlock_abi: see `Lockdown`.
        memory_limit: see `Lockdown`.
        drop_to: see `Lockdown`.
        uid: see `Lockdown.apply`.
        readable: directories in addition to `readable_paths()`.
        keep: descriptors to keep open, in addition to the child's socket.
        imports: modules to import first.
    """

    attempt: str
    where: str = "locked"
    argument: Any = None
    nobody: bool = False
    deny: dict[str, int] = dataclasses.field(default_factory=dict)
    deny_if: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    like_gvisor: bool = False
    open_first: int = 0
    hard_memory: int | None = None
    namespaces: bool = False
    jail_root: bool = False
    landlock_abi: int | None = None
    memory_limit: int = 1 << 30
    drop_to: tuple[int, int] | None = None
    uid: int | None = None
    readable: list[str] = dataclasses.field(default_factory=list)
    keep: list[int] = dataclasses.field(default_factory=list)
    imports: list[str] = dataclasses.field(default_factory=list)


@dataclass
class Outcome:
    """Outcome of a plan.

    Attributes:
        result: the function's result; None if it was not reached.
        error: class and message of the exception raised.
        status: exit code of the child, see `os.waitstatus_to_exitcode`.
        entered: the namespaces entered.
        jailed: whether the root directory was changed.
        seen: `/proc/PID/status` of the locked-down child, read from outside; empty in a PID namespace.
    """

    result: Any = None
    error: str = ""
    status: int = 0
    entered: tuple[str, ...] = ()
    jailed: bool = False
    seen: dict[str, str] = dataclasses.field(default_factory=dict)


def main() -> None:
    """Run each plan in a forked process, because its effects are irrevocable."""
    for line in sys.stdin:
        plan = Plan(**json.loads(line))
        try:
            answer = in_child(partial(report_of, plan))
        except RuntimeError as error:
            answer = {"failure": str(error)}
        print(json.dumps(answer), flush=True)


def report_of(plan: Plan) -> dict[str, Any]:
    return dataclasses.asdict(carry_out(plan))


def carry_out(plan: Plan) -> Outcome:
    for name in plan.imports:
        importlib.import_module(name)
    readable = [*readable_paths(), *map(Path, plan.readable)]
    prepare(plan)
    outcome = Outcome()
    if plan.where == "plain":
        run_here(plan, outcome)
        return outcome
    if not plan.namespaces:
        enter_and_run(plan, outcome, readable)
        return outcome
    outcome.entered = namespaces.enter()
    return Outcome(**in_child(lambda: report_of_first(plan, outcome, readable)))


def prepare(plan: Plan) -> None:
    if plan.nobody:
        privileges.become(ORDINARY, ORDINARY)
        privileges.set_dumpable(True)  # like a process started by that user
    if plan.deny or plan.deny_if:
        deny(plan.deny, plan.deny_if)
    if plan.like_gvisor:
        answer_like_gvisor()
    while os.open("/dev/zero", os.O_RDONLY) < plan.open_first - 1:
        pass
    if plan.hard_memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (plan.hard_memory, plan.hard_memory))


def report_of_first(plan: Plan, outcome: Outcome, readable: list[Path]) -> dict[str, Any]:
    """Return the outcome of the first process in the new namespaces."""
    enter_and_run(plan, outcome, readable)
    return dataclasses.asdict(outcome)


def enter_and_run(plan: Plan, outcome: Outcome, readable: list[Path]) -> None:
    if plan.jail_root:
        outcome.jailed = jail_root.enter(readable)
    if plan.where == "jailed":
        run_here(plan, outcome)
        return
    lockdown = Lockdown(
        readable,
        memory_limit=plan.memory_limit,
        drop_to=plan.drop_to and (plan.drop_to[0], plan.drop_to[1]),
        landlock_abi=plan.landlock_abi,
        jail_root=outcome.jailed,
    )
    lock_and_run(plan, outcome, lockdown)


def run_here(plan: Plan, outcome: Outcome) -> None:
    try:
        outcome.result = globals()[plan.attempt](plan.argument)
    except BaseException as error:  # noqa: BLE001  # checked by the test
        outcome.error = f"{type(error).__name__}: {error}"


def lock_and_run(plan: Plan, outcome: Outcome, lockdown: Lockdown) -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        descriptor = theirs.fileno()
        report = Outcome()
        try:
            lockdown.apply([descriptor, *plan.keep], plan.uid)
            os.write(descriptor, b"locked")
            os.read(descriptor, 2)
            run_here(plan, report)
        except BaseException as error:  # noqa: BLE001  # checked by the test
            report.error = f"{type(error).__name__}: {error}"
        os.write(descriptor, json.dumps([report.result, report.error]).encode())
        os._exit(0)
    theirs.close()
    hello = ours.recv(6)
    if hello == b"locked":
        outcome.seen = {} if plan.namespaces else status_of(child)
        ours.sendall(b"go")
        hello = b""
    answer = hello + received(ours)
    outcome.status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if answer:
        outcome.result, outcome.error = json.loads(answer)


def in_child(call: Callable[[], Any]) -> Any:
    """Call a function in a forked child, and return its result, sent as JSON.

    Raises:
        RuntimeError: the function raised; the message is the traceback.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            answer = {"result": call()}
        except BaseException:  # noqa: BLE001  # raised again in the parent
            answer = {"failure": traceback.format_exc()}
        theirs.sendall(json.dumps(answer).encode())
        os._exit(0)
    theirs.close()
    text = received(ours)
    os.waitpid(child, 0)
    answer = json.loads(text or b'{"failure": "the process ended without an answer"}')
    if "failure" in answer:
        raise RuntimeError(answer["failure"])
    return answer["result"]


def received(connection: socket.socket) -> bytes:
    with connection, connection.makefile("rb") as file:
        return file.read()


def status_of(pid: int | str) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def deny(calls: dict[str, int], calls_if: dict[str, tuple[int, int]]) -> None:
    """Make these system calls fail with an errno, as a container's seccomp profile does."""
    machine = this_machine()
    instructions = [bpf.load(0)]
    for name, number in calls.items():
        instructions += [bpf.jump_if_equal(machine.numbers[name], 0, 1), bpf.return_value(0x00050000 | number)]
    for name, (argument, value) in calls_if.items():
        test = [bpf.load(16 + 8 * argument), bpf.jump_if_equal(value, 0, 1), bpf.return_value(seccomp.NOT_PERMITTED)]
        instructions += [bpf.load(0), bpf.jump_if_equal(machine.numbers[name], 0, len(test)), *test]
    privileges.forbid_new_privileges()
    seccomp.install(bpf.assemble([*instructions, bpf.return_value(seccomp.ALLOW)]))


GVISOR_LACKS = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "mount_setattr")
SECCOMP_SET_MODE_FILTER, CLONE_NEWCGROUP = 1, 0x02000000


def answer_like_gvisor() -> None:
    """Give the answers of gVisor: `pkg/sentry/syscalls/linux/linux64.go` and google/gvisor#13439."""
    numbers = this_machine().numbers
    invalid = bpf.return_value(0x00050000 | errno.EINVAL)
    instructions = [bpf.load(0)]
    for name in GVISOR_LACKS:
        instructions += [bpf.jump_if_equal(numbers[name], 0, 1), bpf.return_value(seccomp.NOT_IMPLEMENTED)]
    allow = bpf.return_value(seccomp.ALLOW)
    sets_filter = [bpf.load(16), bpf.jump_if_equal(SECCOMP_SET_MODE_FILTER, 0, 1), allow, invalid]
    instructions += [bpf.jump_if_equal(numbers["seccomp"], 0, len(sets_filter)), *sets_filter]
    has_cgroup = [bpf.load(16), bpf.jump_if_any_bit(CLONE_NEWCGROUP, 0, 1), invalid, allow]
    instructions += [bpf.jump_if_equal(numbers["unshare"], 0, len(has_cgroup)), *has_cgroup]
    privileges.forbid_new_privileges()
    seccomp.install(bpf.assemble([*instructions, allow]))


# Functions to call. Each takes the plan's argument, and returns a value that JSON can represent.


def nothing(_: None) -> None:
    """Do nothing, successfully."""


def forbidden_things(_: None) -> dict[str, Any]:
    start = time.perf_counter()
    return {"succeeded": self_test.run(), "seconds": time.perf_counter() - start}


def unlisted_system_calls(opens_files: bool) -> list[tuple[int, int]]:
    """Make every system call that the filter does not list. Return those that did not fail with EPERM, and errnos."""
    machine = this_machine()
    listed = {machine.numbers[name] for name in seccomp.rules(machine, opens_files=opens_files)}
    # uretprobe and uprobe bypass filters, and kill the process if called outside a probe's trampoline.
    listed |= {335, 336} if machine.name == "x86_64" else set()
    function = ctypes.CDLL(None, use_errno=True).syscall
    answers = []
    for number in sorted(set(range(600)) - listed):
        ctypes.set_errno(0)
        result = function(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
        if result != -1 or ctypes.get_errno() != errno.EPERM:
            answers.append((number, ctypes.get_errno()))
    return answers


def raw_system_call(words: list[int]) -> int:
    """Return its errno, 0 on success."""
    ctypes.set_errno(0)
    function = ctypes.CDLL(None, use_errno=True).syscall
    return ctypes.get_errno() if function(*map(ctypes.c_long, words)) == -1 else 0


def filters_are_available(_: None) -> bool:
    return seccomp.available()


def trial_of_a_filter(effect: str) -> bool:
    """Return whether filters count as available where they do nothing, or only refuse or only kill."""
    numbers = this_machine().numbers
    call, action = {
        "nothing": ("socket", seccomp.NOT_PERMITTED),
        "refuses": ("getppid", seccomp.NOT_PERMITTED),
        "kills": ("getuid", seccomp.KILL_PROCESS),
    }[effect]
    test = [bpf.jump_if_equal(numbers[call], 0, 1), bpf.return_value(action)]
    program = bpf.assemble([bpf.load(0), *test, bpf.return_value(seccomp.ALLOW)])
    install = seccomp.install
    seccomp.install = lambda _: install(program)  # type: ignore[assignment]
    return seccomp.available()


def import_modules(names: list[str]) -> list[str]:
    return [importlib.import_module(name).__name__ for name in names]


def arithmetic(_: None) -> list[float]:
    """Do what processors do. The modules were imported before."""
    import dill
    import numpy
    import torch

    namespace: dict[str, Any] = {}
    exec("def ban(logits): logits[:, 3] = -1e9; return logits", namespace)
    ban = dill.loads(dill.dumps(namespace["ban"], recurse=True))
    logits = ban(torch.arange(2000 * 8, dtype=torch.float32).view(8, -1))
    probabilities = logits.softmax(-1)
    sampled = torch.multinomial(probabilities, 1)
    product = torch.rand(300, 300) @ torch.rand(300, 300)
    spectrum = numpy.fft.fft(numpy.random.default_rng().random(64))
    assert sampled.shape == (8, 1)
    assert torch.linalg.svd(product).S.isfinite().all()
    assert numpy.isfinite(spectrum).all()
    return [float(probabilities[0, 3]), float(probabilities.sum())]


def look_at_paths(paths: list[str]) -> dict[str, Any]:
    """List each directory or read each file. Return names, text, or an errno."""
    return {path: look_at(path) for path in paths}


def look_at(path: str) -> Any:
    try:
        return sorted(os.listdir(path))
    except NotADirectoryError:
        pass
    except OSError as error:
        return error.errno
    try:
        return Path(path).read_text()
    except OSError as error:
        return error.errno


def write_to_paths(paths: list[str]) -> dict[str, int]:
    """Create a file in each directory. Return the errno, 0 on success."""
    return {path: write_to(path) for path in paths}


def write_to(path: str) -> int:
    try:
        Path(path, "written").write_text("")
    except OSError as error:
        return error.errno or -1
    return 0


def environment(_: None) -> dict[str, Any]:
    """Return what a process can see of its namespaces."""
    return {
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "interfaces": [name for _, name in socket.if_nameindex()],
        "user": os.geteuid(),
        "namespaces": links_of_namespaces(),
    }


def sandbox_namespaces(_: None) -> list[dict[str, str]]:
    """Return the namespaces of this process, and those of a child that entered its own."""

    def of_child() -> dict[str, str]:
        namespaces.enter_for_sandbox()
        return links_of_namespaces()

    return [links_of_namespaces(), in_child(of_child)]


def links_of_namespaces() -> dict[str, str]:
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}


def root_and_mounts(_: None) -> list[Any]:
    """Return the names in the root directory, the working directory, and the mounts with their options."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [sorted(os.listdir("/")), os.getcwd(), sorted([words[4], words[5]] for words in mounts)]


def as_another_user(path: str) -> Any:
    if os.geteuid() == 0:
        privileges.become(60001, 60001)
    return look_at(path)


def limits_of_resources(_: None) -> dict[str, int]:
    names = ("CORE", "FSIZE", "MEMLOCK", "MSGQUEUE", "NPROC", "NOFILE", "CPU")
    return {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] for name in names}


def allocate(sizes: list[int]) -> list[bool]:
    """Return whether each size could be allocated, one after the other."""
    return [could_allocate(size) for size in sizes]


def could_allocate(size: int) -> bool:
    try:
        mmap.mmap(-1, size, mmap.MAP_PRIVATE).close()
    except OSError:
        return False
    return True


def address_space(hard: int | None) -> list[int]:
    """Return the measured size, the size reported by the kernel, and the limits before and after."""
    if hard is not None:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    measured = limits.address_space()
    return [measured, pages * mmap.PAGESIZE, *before, *resource.getrlimit(resource.RLIMIT_AS)]


def oom_score(_: None) -> str:
    limits.die_first_when_memory_is_short()
    return Path("/proc/self/oom_score_adj").read_text().strip()


def descriptors(_: None) -> dict[str, int]:
    """Return the open descriptors, with their device numbers (0 if not a device)."""
    found = {}
    for descriptor in range(200):
        with contextlib.suppress(OSError):
            found[str(descriptor)] = os.fstat(descriptor).st_rdev
    return found


def print_much(_: None) -> None:
    print("x" * 100_000, flush=True)
    print("x" * 100_000, file=sys.stderr, flush=True)


def end_by(how: str) -> None:
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "abort":
        os.abort()
    elif how == "foreign ABI":
        ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 + 39))  # getpid of x32


def terminal_attributes(_: None) -> int | None:
    try:
        termios.tcgetattr(0)
    except termios.error as error:
        return int(error.args[0])
    return None


def can_become(ids: list[int]) -> bool:
    return privileges.can_become(*ids)


def become(ids: list[int]) -> list[Any]:
    privileges.become(*ids)
    return [os.getresuid(), os.getresgid(), os.getgroups(), privileges.capabilities()]


def drop_capabilities(_: None) -> dict[str, str]:
    privileges.drop_capabilities()
    return status_of("self")  # not by PID: `/proc` may show another PID namespace


def outlive_the_parent(_: None) -> bool:
    """Return whether a child with a parent-death signal outlives its parent."""
    pipe, kept_by_child = os.pipe()
    parent = os.fork()
    if parent == 0:
        ready, told = os.pipe()
        if os.fork() == 0:
            privileges.die_with_parent(signal.SIGKILL)
            os.write(told, b"x")
            signal.pause()
        os.read(ready, 1)
        os._exit(0)
    os.close(kept_by_child)
    os.waitpid(parent, 0)
    return os.read(pipe, 1) != b""  # end of file when the child exits, which holds the other end


if __name__ == "__main__":
    main()
