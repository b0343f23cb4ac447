from __future__ import annotations

from tests.sampler.sandbox.kernel.conftest import Run


def test_most_operations_succeed_without_lockdown(run_plan: Run, nobody: bool) -> None:
    """Shows that an empty list is significant."""
    found = set(run_plan("forbidden_things", where="plain", nobody=nobody).result["succeeded"])
    assert found >= {
        "read /etc/passwd",
        "write in /tmp",
        "write in /dev/shm",
        "make a file in memory",
        "open an internet socket",
        "open a Unix socket",
        "open a netlink socket",
        "connect",
        "fork",
        "start a thread",
        "execute a program",
        "redirect signals",
        "be traced",
        "read another process",
        "mount",
        "change its own attributes",
    }


def test_inherited_descriptor_is_found(run_plan: Run) -> None:
    assert run_plan("forbidden_things", keep=[7], open_first=8).result["succeeded"] == ["use an inherited descriptor"]


def test_no_operation_succeeds_after_lockdown(run_plan: Run, nobody: bool) -> None:
    result = run_plan("forbidden_things", nobody=nobody).result
    assert result["succeeded"] == []
    # Milliseconds. On a busy machine it may be a second; a connection that it waited for would take minutes.
    assert result["seconds"] < 30
