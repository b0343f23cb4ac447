"""Report of `logitship doctor` about this machine: versions, limits, and what protects sandboxes here.

It is made for bug reports, and says for each missing protection what that means and which setting brings it back.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from errno import EOPNOTSUPP, EPERM
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from logitship.builtin_processors.sglang_names import SGLANG_NAMES_REFERENCE
from logitship.sampler.cgroup_limits import cpu_quota, memory_limit, num_cores, process_limit
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.kernel import privileges
from logitship.sampler.sandbox.kernel.protections import Protections
from logitship.sampler.sandbox.kernel.syscalls import syscall
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess

_PACKAGES = ("logitship", "torch", "transformers", "numpy", "dill", "sglang", "vllm")
_GIB, _MIB = 1 << 30, 1 << 20
_MIN_PROCESSES = 128
"""Processes and threads that a server with some sandboxes needs at least."""
_MIN_TMP = 64 * _MIB
_CLONE_NEWUSER = 0x10000000
_CREATE_RULESET_VERSION = 1
_SETFCAP, _SETUID = 1 << 31, 1 << 7
"""Capabilities, see capabilities(7)."""
_SYSCTLS = (
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
    "user/max_user_namespaces",
)


@dataclass(frozen=True)
class MissingLayer:
    """A protection that sandboxes lack here.

    Attributes:
        layer: its name, as in the server's log.
        meaning: what still protects, or what is visible to a sandbox.
        remedy: the setting that brings it back.
    """

    layer: str
    meaning: str
    remedy: str


@dataclass(frozen=True)
class Host:
    """The system, as far as protections and limits depend on it.

    Attributes:
        versions: versions of Python and of packages, by name; those that are not installed are left out.
        kernel: of `uname`.
        container: the runtime; "" outside of a container.
        uid: effective user.
        capabilities: effective capabilities, a bit mask.
        no_new_privileges: `no_new_privs` is set.
        is_filtered: a seccomp filter applies to this process, that of a container or of a systemd unit.
        apparmor: the AppArmor profile; "" if there is none.
        landlock_errno: errno of asking for Landlock; 0 if there is.
        user_namespace_errno: errno of entering a user namespace; 0 if that is allowed.
        sysctls: those about namespaces, by path below `/proc/sys`; missing ones are left out.
    """

    versions: Mapping[str, str]
    kernel: str
    container: str = ""
    uid: int = 0
    capabilities: int = 0
    no_new_privileges: bool = False
    is_filtered: bool = False
    apparmor: str = ""
    landlock_errno: int = 0
    user_namespace_errno: int = 0
    sysctls: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostLimits:
    """The resources that this process may use. None: there is no limit.

    Attributes:
        memory: bytes, by the control group.
        free_memory: of those, the free bytes.
        cores: of the machine that this process may use.
        cpu_quota: time of so many cores that it may use.
        compute_threads: threads that a server computes with.
        processes: processes and threads.
        tmp: free bytes in the folder of temporary files.
        shared_memory: free bytes of `/dev/shm`, which engines share between their processes.
    """

    memory: float | None
    free_memory: float | None
    cores: int
    cpu_quota: float | None
    compute_threads: int
    processes: float | None
    tmp: int | None
    shared_memory: int | None

    def remarks(self) -> list[str]:
        """Return sentences about limits that are too low to serve."""
        found = []
        if self.free_memory is not None and self.free_memory < _GIB:
            found.append(
                f"{self.free_memory / _GIB:.2f} GiB of memory are free: the server needs its model's weights, some "
                "0.8 GiB for itself and the zygote, and 10 MiB for each sandbox. Raise the container's limit"
            )
        if self.processes is not None and self.processes < _MIN_PROCESSES:
            found.append(
                f"{self.processes:.0f} processes and threads are allowed: requests will be refused with 503. Raise "
                f"--pids-limit, podPidsLimit or TasksMax= to {_MIN_PROCESSES} and one for each sandbox"
            )
        if self.cpu_quota is not None and self.cpu_quota < 2:
            found.append(
                f"{self.cpu_quota:g} cores' time is allowed: the engine and the sandboxes share one core. Give the "
                "server one more than its engine computes on"
            )
        if self.tmp is not None and self.tmp < _MIN_TMP:
            found.append(f"{self.tmp // _MIB} MiB are free in the folder of temporary files: mount a larger one there")
        return found


@dataclass(frozen=True)
class HostReport:
    """The report.

    Attributes:
        protections: of the sandboxes; None if none can be started.
        refusal: why none can be started, or "".
        missing: the protections that they lack.
    """

    host: Host
    limits: HostLimits
    protections: Protections | None
    refusal: str
    missing: tuple[MissingLayer, ...]

    @property
    def text(self) -> str:
        """The report, some twenty lines."""
        host, limits = self.host, self.limits
        privileged = [
            "no_new_privs" if host.no_new_privileges else "",
            "seccomp filter" if host.is_filtered else "",
            f"AppArmor {host.apparmor}" if host.apparmor else "",
        ]
        around = ", ".join(filter(None, privileged)) or "nothing"
        quota = "" if limits.cpu_quota is None else f", time of {limits.cpu_quota:g} of them"
        memory = "no limit"
        if limits.memory is not None:
            memory = f"limit {_size(limits.memory)}, of which {_size(limits.free_memory)} are free"
        lines = [
            _line("versions", ", ".join(f"{name} {each}" for name, each in host.versions.items())),
            _line("kernel", host.kernel),
            _line("container", host.container or "none"),
            _line("user", f"{host.uid}, capabilities {host.capabilities:#x}"),
            _line("around", around),
            _line("memory", memory),
            _line("cores", f"{limits.cores}{quota}: {limits.compute_threads} threads compute"),
            _line("processes", "no limit" if limits.processes is None else f"at most {limits.processes:.0f}"),
            _line("temporary files", f"{_size(limits.tmp)} free; /dev/shm: {_size(limits.shared_memory)}"),
            _line("sandboxes", self.refusal if self.protections is None else self.protections.describe()),
        ]
        for each in self.missing:
            lines += ["", f"without {each.layer}: {each.meaning}", f"  to get it: {each.remedy}"]
        for remark in limits.remarks():
            lines += ["", f"{remark}."]
        verdict = (
            "OK: shipped processors can be sandboxed here." if self.is_ok else "Shipped processors are refused here."
        )
        return "\n".join([*lines, "", verdict])

    @property
    def is_ok(self) -> bool:
        """True if shipped processors can run in sandboxes here."""
        return self.protections is not None

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        return json.dumps(asdict(self) | {"remarks": self.limits.remarks(), "is_ok": self.is_ok}, indent=2)


def make_report(proc_self: Path = Path("/proc/self")) -> HostReport:
    """Look at this system, and start sandboxes as a server does. Takes some seconds."""
    host = read_host(proc_self)
    protections, refusal = _try_sandboxes()
    return HostReport(host, read_limits(), protections, refusal, missing_layers(host, protections))


def missing_layers(host: Host, protections: Protections | None) -> tuple[MissingLayer, ...]:
    """Return the layers that sandboxes lack.

    Args:
        host: where they run.
        protections: what they have; None if none can be started.
    """
    found = protections or Protections(seccomp=True)
    layers = []
    if found.landlock_abi == 0:
        meaning = (
            "without a root directory of its own either, a processor can open no file at all"
            if not found.jail_root
            else "its root directory hides the machine's files; the filter refuses sockets and signals"
        )
        layers.append(MissingLayer("Landlock", meaning, _landlock_remedy(host)))
    if not found.namespaces:
        meaning = "sockets, signals and other processes are refused by the filter and by Landlock only"
        layers.append(MissingLayer("namespaces", meaning, _namespace_remedy(host)))
    if not found.jail_root:
        meaning = "whether a file exists, its size and its time are visible to processors, its content is not"
        layers.append(MissingLayer("root directory of its own", meaning, _root_directory_remedy(host, found)))
    if not found.uid_drop:
        meaning = "sandboxes have the server's user; the filter and Landlock separate them from it and from each other"
        remedy = "run as root with CAP_SETUID and CAP_SETGID; an ordinary user protects more, see docs/security.md"
        layers.append(MissingLayer("change of user", meaning, remedy))
    return tuple(layers)


def _landlock_remedy(host: Host) -> str:
    if host.landlock_errno == EOPNOTSUPP:
        return "the kernel has it, but it is off: boot with lsm=landlock,… (see /sys/kernel/security/lsm)"
    if host.landlock_errno == EPERM:
        return "the seccomp profile of the container refuses it: use one of 2023 or later"
    if host.container == "gVisor":
        return "gVisor has none"
    return "use Linux 5.13 or later with CONFIG_SECURITY_LANDLOCK, or a runtime whose seccomp profile knows it"


def _namespace_remedy(host: Host) -> str:
    if host.sysctls.get("user/max_user_namespaces") == "0":
        return "sysctl user.max_user_namespaces=10000"
    if host.sysctls.get("kernel/unprivileged_userns_clone") == "0":
        return "sysctl kernel.unprivileged_userns_clone=1"
    if host.is_filtered and host.user_namespace_errno:
        return (
            "the seccomp profile refuses unshare: allow unshare, mount, umount2, pivot_root and mount_setattr in it "
            "(securityContext.seccompProfile, --security-opt seccomp=FILE, no RestrictNamespaces= in systemd), or in "
            "Kubernetes hostUsers: false with capabilities.add: [SYS_ADMIN]"
        )
    return "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, or an AppArmor profile with userns"


def _root_directory_remedy(host: Host, found: Protections) -> str:
    if not found.namespaces:
        return "as for namespaces"
    if host.sysctls.get("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "an AppArmor profile with userns for this Python, or sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if host.uid == 0 and not host.capabilities & _SETFCAP:
        return "run as an ordinary user (USER, runAsNonRoot), or keep CAP_SETFCAP: root without it cannot map its user"
    if host.apparmor and "unconfined" not in host.apparmor:
        return f"an AppArmor profile that allows mount, instead of {host.apparmor}"
    return "allow mount, umount2 and pivot_root in the seccomp profile"


def read_host(proc_self: Path = Path("/proc/self")) -> Host:
    """Look at this system.

    Args:
        proc_self: `/proc/self`.
    """
    lines = (line.partition(":") for line in _read(proc_self / "status").splitlines())
    status = {name: text.strip() for name, _, text in lines}
    system = os.uname()
    sysctls = {name: _read(Path("/proc/sys", name)).strip() for name in _SYSCTLS}
    apparmor = _read(proc_self / "attr/apparmor/current")
    return Host(
        versions={"Python": platform.python_version()} | _package_versions(),
        kernel=f"{system.sysname} {system.release} {system.machine}",
        container=_container(os.environ),
        uid=os.geteuid(),
        capabilities=privileges.capabilities(),
        no_new_privileges=status.get("NoNewPrivs") == "1",
        is_filtered=status.get("Seccomp") == "2",
        apparmor=apparmor.strip("\0\n"),
        landlock_errno=_errno_of(lambda: syscall("landlock_create_ruleset", None, 0, _CREATE_RULESET_VERSION)),
        user_namespace_errno=_errno_in_child(lambda: syscall("unshare", _CLONE_NEWUSER)),
        sysctls={name: text for name, text in sysctls.items() if text},
    )


def read_limits() -> HostLimits:
    """Look at the resources of this process."""
    memory = memory_limit()
    return HostLimits(
        memory=_finite(memory.limit),
        free_memory=_finite(memory.free),
        cores=len(os.sched_getaffinity(0)),
        cpu_quota=_finite(cpu_quota()),
        compute_threads=num_cores(),
        processes=_finite(process_limit()),
        tmp=_free_space(os.environ.get("TMPDIR", "/tmp")),
        shared_memory=_free_space("/dev/shm"),
    )


def _try_sandboxes() -> tuple[Protections | None, str]:
    zygote = ZygoteProcess(names=SGLANG_NAMES_REFERENCE, max_rows=1, memory_limit=_GIB)
    try:
        zygote.start()
        return zygote.set_up(ModelView(8, frozenset(), None)), ""
    except (ZygoteError, OSError) as error:
        return None, str(error)
    finally:
        zygote.close()


def _container(environment: Mapping[str, str]) -> str:
    """Return the name of the container runtime; "" if there is none."""
    if "gvisor" in _read(Path("/proc/version")).lower():
        return "gVisor"
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "Kubernetes"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.path.exists("/.dockerenv"):
        return "Docker"
    return environment.get("container", "")


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _errno_of(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


def _errno_in_child(call: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        os._exit(_errno_of(call))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _free_space(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _finite(number: float) -> float | None:
    return None if math.isinf(number) else number


def _size(nbytes: float | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / _GIB:.2f} GiB"


def _line(name: str, text: str) -> str:
    return f"{name + ':':17}{text}"


def run_report_command(as_json: bool) -> int:
    """Print the report about this machine. Return the exit status: 0 if shipped processors can be sandboxed here."""
    report = make_report()
    print(report.to_json() if as_json else report.text)
    sys.stdout.flush()
    return 0 if report.is_ok else 1
