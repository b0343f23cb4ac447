from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler import cgroup_limits
from logitship.sampler.cgroup_limits import MemoryLimit, cpu_quota, memory_limit, num_cores, process_limit

GIB = 1 << 30
UNLIMITED_V1 = (1 << 63) - 4096

MakeProc = Callable[..., Path]


def v2_memory(limit: int | str, used: int, file: int = 0, shmem: int = 0, high: int | str = "max") -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.high": f"{high}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon {used - file}\nfile {file}\nshmem {shmem}\ninactive_file 3\n",
    }


def v1_memory(limit: int, used: int, cache: int = 0, shmem: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        # Those without `total_` are of the group alone, without the groups below it.
        "memory.stat": f"cache 1\nshmem 1\nrss 5\ntotal_cache {cache}\ntotal_shmem {shmem}\n",
    }


@pytest.fixture
def proc(tmp_path: Path) -> MakeProc:
    """A function that makes a `/proc/self` and the files of control groups.

    Its arguments: the lines of `cgroup`; the mounts as (root, mount point, type, options); the groups by their folder.
    """

    def make(groups: str, mounts: list[tuple[str, str, str, str]], files: dict[str, dict[str, str]]) -> Path:
        own = tmp_path / "proc self"
        own.mkdir(exist_ok=True)
        (own / "cgroup").write_text(groups)
        escaped = str(tmp_path).replace(" ", r"\040")
        lines = ["22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/vda rw"]
        lines += [
            f"3{index} 22 0:2{index} {root} {escaped}{point} rw,nosuid shared:9 master:2 - {kind} cgroup {options}"
            for index, (root, point, kind, options) in enumerate(mounts)
        ]
        (own / "mountinfo").write_text("\n".join(lines) + "\n")
        for folder, contents in files.items():
            path = tmp_path / folder.lstrip("/")
            path.mkdir(parents=True, exist_ok=True)
            for name, text in contents.items():
                (path / name).write_text(text)
        return own

    return make


V2 = ("/", "/cg", "cgroup2", "rw,nsdelegate")


def test_container_with_version_2(proc: MakeProc) -> None:
    files = v2_memory(GIB, 600 << 20, file=150 << 20, shmem=50 << 20) | {"cpu.max": "200000 100000\n", "pids.max": "64"}
    own = proc("0::/\n", [V2], {"/cg": files})
    assert memory_limit(own) == MemoryLimit(GIB, GIB - (500 << 20))
    assert cpu_quota(own) == 2
    assert process_limit(own) == 64


def test_container_with_version_1(proc: MakeProc) -> None:
    """Without a namespace of control groups, the path is the machine's, and the mount shows a part of it."""
    path = "/docker/0123abcd"
    mounts = [
        (path, "/cg/memory", "cgroup", "rw,memory"),
        (path, "/cg/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
        (path, "/cg/pids", "cgroup", "rw,pids"),
        ("/", "/cg/unified", "cgroup2", "rw"),
    ]
    own = proc(
        f"4:memory:{path}\n3:cpu,cpuacct:{path}\n2:pids:{path}\n1:name=systemd:{path}\n0::/\n",
        mounts,
        {
            "/cg/memory": v1_memory(GIB, 900 << 20, cache=300 << 20, shmem=100 << 20),
            "/cg/cpu,cpuacct": {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"},
            "/cg/pids": {"pids.max": "24\n"},
            "/cg/unified": {},
        },
    )
    assert memory_limit(own) == MemoryLimit(GIB, GIB - (700 << 20))
    assert cpu_quota(own) == 1.5
    assert process_limit(own) == 24


@pytest.mark.parametrize(
    ("groups", "mounts", "files"),
    [
        ("", [], {}),
        ("0::/\n", [V2], {"/cg": {}}),
        ("0::/\n", [V2], {"/cg": v2_memory("max", 5) | {"cpu.max": "max 100000\n", "pids.max": "max\n"}}),
        (
            "2:memory:/\n1:cpu:/\n",
            [("/", "/m", "cgroup", "rw,memory"), ("/", "/c", "cgroup", "rw,cpu")],
            {"/m": v1_memory(UNLIMITED_V1, 5), "/c": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}},
        ),
        # The files of another kind of mount, or of a hierarchy that this process is not in.
        ("0::/\n", [("/", "/cg", "tmpfs", "rw,memory")], {"/cg": v2_memory(5, 5) | {"pids.max": "5"}}),
        ("0::/\n", [("/", "/cg", "cgroup", "rw,memory,pids")], {"/cg": v1_memory(5, 5) | {"pids.max": "5"}}),
        ("0::/\n", [V2], {"/cg": {"memory.max": "nonsense", "cpu.max": "1", "pids.max": ""}}),
    ],
)
def test_no_limit(
    proc: MakeProc, groups: str, mounts: list[tuple[str, str, str, str]], files: dict[str, dict[str, str]]
) -> None:
    own = proc(groups, mounts, files)
    assert memory_limit(own) == MemoryLimit()
    assert cpu_quota(own) == process_limit(own) == math.inf
    assert num_cores(own) == len(os.sched_getaffinity(0))


def test_no_proc(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) == MemoryLimit()
    assert cpu_quota(tmp_path) == math.inf


@given(
    limits=st.lists(st.none() | st.integers(1, 1000), min_size=3, max_size=3),
    used=st.lists(st.integers(0, 1000), min_size=3, max_size=3),
    quotas=st.lists(st.none() | st.integers(1000, 10**7), min_size=3, max_size=3),
)
def test_tightest_group_on_the_way_up_counts(
    tmp_path_factory: pytest.TempPathFactory,
    limits: list[int | None],
    used: list[int],
    quotas: list[int | None],
) -> None:
    base = tmp_path_factory.mktemp("groups")
    folders = [base / "cg", base / "cg/system.slice", base / "cg/system.slice/a.service"]
    for folder, limit, use, quota in zip(folders, limits, used, quotas, strict=True):
        folder.mkdir()
        for name, text in v2_memory("max" if limit is None else limit, use).items():
            (folder / name).write_text(text)
        (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} 100000\n")
    (base / "cg/other.slice").mkdir()
    (base / "cg/other.slice/cpu.max").write_text("1 100000\n")
    (base / "cgroup").write_text("0::/system.slice/a.service\n")
    (base / "mountinfo").write_text(f"30 22 0:2 / {base}/cg rw - cgroup2 cgroup rw\n")
    free = [max(0, limit - use) for limit, use in zip(limits, used, strict=True) if limit is not None]
    assert memory_limit(base).free == min(free, default=math.inf)
    assert cpu_quota(base) == min((each / 100000 for each in quotas if each is not None), default=math.inf)


def test_throttling_begins_at_the_high_limit(proc: MakeProc) -> None:
    own = proc("0::/\n", [V2], {"/cg": v2_memory(1000, 100, high=300)})
    assert memory_limit(own) == MemoryLimit(300, 200)


def test_group_outside_the_mount_is_read_at_its_root(proc: MakeProc) -> None:
    """A process that was moved after its namespace was made: cgroup_namespaces(7)."""
    own = proc("0::/../other\n", [V2], {"/cg": v2_memory(1000, 100)})
    assert memory_limit(own) == MemoryLimit(1000, 900)
    own = proc("0::/elsewhere\n", [("/docker/x", "/cg", "cgroup2", "rw")], {})
    assert memory_limit(own) == MemoryLimit(1000, 900)


def test_more_is_used_than_allowed(proc: MakeProc) -> None:
    own = proc("0::/\n", [V2], {"/cg": v2_memory(300, 600, file=50)})
    assert memory_limit(own) == MemoryLimit(300, 0)


@pytest.mark.parametrize(("quota", "cores"), [(2.0, 2), (2.9, 2), (0.5, 1), (1.0, 1), (64.0, 64), (100.0, 64)])
def test_cores_follow_the_quota(proc: MakeProc, monkeypatch: pytest.MonkeyPatch, quota: float, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    own = proc("0::/\n", [V2], {"/cg": {"cpu.max": f"{int(quota * 100000)} 100000"}})
    assert num_cores(own) == cores


def test_affinity_limits_the_cores(proc: MakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 7, 9})
    assert num_cores(proc("0::/\n", [V2], {"/cg": {"cpu.max": "800000 100000"}})) == 3


def test_this_machine() -> None:
    assert 1 <= num_cores() <= len(os.sched_getaffinity(0))
    assert memory_limit().free > 0
    assert list(cgroup_limits._folders("memory", Path("/proc/self"))) != []
