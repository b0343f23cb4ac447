from __future__ import annotations

import pytest

from tests.sampler.sandbox.kernel.conftest import Run

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize("hard", [None, 2 * GIB, 300 * GIB])
def test_address_space_is_measured_without_changing_limits(run_plan: Run, hard: int | None) -> None:
    measured, really, *limits = run_plan("address_space", hard, where="plain").result
    assert really <= measured < really + 2 * MIB
    assert limits[:2] == limits[2:]


def test_exhausted_hard_limit_is_an_error(run_plan: Run) -> None:
    outcome = run_plan("address_space", MIB, where="plain")
    assert "no mapping fits under the limit of 1048576 bytes" in outcome.error


@pytest.mark.parametrize("memory", [64 * MIB, 2 * GIB])
def test_memory_limit_is_added_to_current_size(run_plan: Run, nobody: bool, memory: int) -> None:
    outcome = run_plan("allocate", [memory - 8 * MIB, memory + MIB], memory_limit=memory, nobody=nobody)
    assert outcome.result == [True, False]


def test_lower_existing_limit_is_kept(run_plan: Run) -> None:
    outcome = run_plan("allocate", [64 * MIB, 512 * MIB], memory_limit=GIB, hard_memory=256 * MIB)
    assert outcome.result == [True, False]


def test_other_resource_limits(run_plan: Run, nobody: bool) -> None:
    unlimited = -1
    assert run_plan("limits_of_resources", nobody=nobody).result == {
        "CORE": 0,
        "FSIZE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "NPROC": 0,
        "NOFILE": 32,
        "CPU": unlimited,
    }


def test_oom_score(run_plan: Run, nobody: bool) -> None:
    assert run_plan("oom_score", where="plain", nobody=nobody).result == "1000"
