from __future__ import annotations

import errno
import os

import pytest

from tests.sampler.sandbox.kernel.conftest import Run

OTHERS = ["pid", "mount", "net", "ipc", "uts", "cgroup"]
LINKS = {"pid": "pid", "mount": "mnt", "net": "net", "ipc": "ipc", "uts": "uts", "cgroup": "cgroup", "user": "user"}


def own(name: str) -> str:
    return os.readlink(f"/proc/self/ns/{LINKS[name]}")


def test_all_namespaces_are_entered(run_plan: Run, nobody: bool) -> None:
    outcome = run_plan("environment", where="jailed", namespaces=True, nobody=nobody)
    may_without = os.geteuid() == 0 and not nobody
    assert outcome.entered == (OTHERS if may_without else ["user", *OTHERS])
    for name in outcome.entered:
        assert outcome.result["namespaces"][LINKS[name]] != own(name)
    assert outcome.result["pid"] == 1
    assert outcome.result["host"] == "sandbox"
    assert outcome.result["interfaces"] == ["lo"]


def test_user_is_kept(run_plan: Run, nobody: bool) -> None:
    outcome = run_plan("environment", where="jailed", namespaces=True, nobody=nobody)
    assert outcome.result["user"] == (60000 if nobody else os.geteuid())


@pytest.mark.parametrize("answer", [errno.EPERM, errno.ENOSYS, errno.EINVAL], ids=errno.errorcode.get)
def test_kernel_without_namespaces(run_plan: Run, nobody: bool, answer: int) -> None:
    outcome = run_plan("environment", where="jailed", namespaces=True, nobody=nobody, deny={"unshare": answer})
    assert outcome.error == ""
    assert outcome.entered == []
    assert outcome.result["namespaces"]["user"] == own("user")
    assert outcome.result["host"] == os.uname().nodename


def test_refused_namespace_is_skipped(run_plan: Run, nobody: bool) -> None:
    new_cgroup_namespace = 0x02000000
    refused = {"unshare": (0, new_cgroup_namespace)}
    outcome = run_plan("environment", where="jailed", namespaces=True, nobody=nobody, deny_if=refused)
    assert [name for name in outcome.entered if name != "user"] == [name for name in OTHERS if name != "cgroup"]


def test_sandbox_has_its_own_namespaces(run_plan: Run, nobody: bool) -> None:
    outcome = run_plan("sandbox_namespaces", where="jailed", namespaces=True, nobody=nobody)
    zygote, sandbox = outcome.result
    different = {name for name in zygote if zygote[name] != sandbox[name]}
    assert different == {"user", "net", "ipc", "uts", "cgroup"}


def test_sandbox_without_namespaces(run_plan: Run, nobody: bool) -> None:
    outcome = run_plan("sandbox_namespaces", where="jailed", nobody=nobody, deny={"unshare": errno.EPERM})
    zygote, sandbox = outcome.result
    assert zygote == sandbox


def test_sandbox_enters_each_namespace_that_there_is(run_plan: Run, nobody: bool) -> None:
    outcome = run_plan("sandbox_namespaces", where="jailed", namespaces=True, nobody=nobody, like_gvisor=True)
    zygote, sandbox = outcome.result
    assert {name for name in zygote if zygote[name] != sandbox[name]} == {"user", "net", "ipc", "uts"}
    assert "cgroup" not in outcome.entered
