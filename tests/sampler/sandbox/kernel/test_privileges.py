from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

Run = Callable[..., SimpleNamespace]
ROOT = os.geteuid() == 0
UID, GID = 60001, 60002
SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def test_root_becomes_another_user_for_good(run_plan: Run) -> None:
    outcome = run_plan("become", [UID, GID], where="plain")
    if ROOT:
        assert outcome.result == [[UID] * 3, [GID] * 3, [], 0]
    else:
        assert "PermissionError" in outcome.error


def test_an_ordinary_user_becomes_nobody_else(run_plan: Run) -> None:
    outcome = run_plan("become", [UID, GID], where="plain", nobody=ROOT)
    assert "PermissionError" in outcome.error


@pytest.mark.parametrize("namespaces", [False, True])
def test_it_is_known_beforehand_whether_it_works(run_plan: Run, nobody: bool, namespaces: bool) -> None:
    plan = {"where": "jailed", "nobody": nobody, "namespaces": namespaces}
    outcome = run_plan("can_become", [UID, GID], **plan)
    assert outcome.result == (ROOT and not nobody)
    assert outcome.result == (run_plan("become", [UID, GID], **plan).error == "")


def test_no_capability_is_left(run_plan: Run, nobody: bool) -> None:
    status = run_plan("drop_capabilities", where="plain", nobody=nobody).result
    left = {name for name in SETS if int(status[name], 16)}
    # Who has no capabilities cannot empty the bounding set, which then bounds nothing.
    assert left <= ({"CapBnd"} if nobody or not ROOT else set())


def test_no_capability_is_left_of_those_of_a_new_user_namespace(run_plan: Run, nobody: bool) -> None:
    status = run_plan("drop_capabilities", where="jailed", namespaces=True, nobody=nobody).result
    assert {int(status[name], 16) for name in SETS} == {0}


def test_a_process_ends_with_its_parent(run_plan: Run, nobody: bool) -> None:
    assert run_plan("outlive_the_parent", where="plain", nobody=nobody).result is False
