from __future__ import annotations

import os

import pytest

from tests.sampler.sandbox.kernel.conftest import Run

ROOT = os.geteuid() == 0
UID, GID = 60001, 60002
SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def test_root_changes_its_user(run_plan: Run) -> None:
    outcome = run_plan("become", [UID, GID], where="plain")
    if ROOT:
        assert outcome.result == [[UID] * 3, [GID] * 3, [], 0]
    else:
        assert "PermissionError" in outcome.error


def test_unprivileged_user_cannot_change_its_user(run_plan: Run) -> None:
    outcome = run_plan("become", [UID, GID], where="plain", nobody=ROOT)
    assert "PermissionError" in outcome.error


@pytest.mark.parametrize("namespaces", [False, True])
def test_can_become_predicts_become(run_plan: Run, nobody: bool, namespaces: bool) -> None:
    plan = {"where": "jailed", "nobody": nobody, "namespaces": namespaces}
    outcome = run_plan("can_become", [UID, GID], **plan)
    assert outcome.result == (ROOT and not nobody)
    assert outcome.result == (run_plan("become", [UID, GID], **plan).error == "")


def test_no_capabilities_remain(run_plan: Run, nobody: bool) -> None:
    status = run_plan("drop_capabilities", where="plain", nobody=nobody).result
    left = {name for name in SETS if int(status[name], 16)}
    # An unprivileged process cannot clear its bounding set, which has no effect there.
    assert left <= ({"CapBnd"} if nobody or not ROOT else set())


def test_no_capabilities_remain_in_user_namespace(run_plan: Run, nobody: bool) -> None:
    status = run_plan("drop_capabilities", where="jailed", namespaces=True, nobody=nobody).result
    assert {int(status[name], 16) for name in SETS} == {0}


def test_process_dies_with_its_parent(run_plan: Run, nobody: bool) -> None:
    assert run_plan("outlive_the_parent", where="plain", nobody=nobody).result is False
