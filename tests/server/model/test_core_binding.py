"""In processes of their own: how many threads PyTorch has is settled when a process starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

CORES = sorted(os.sched_getaffinity(0))

PROGRAM = """
import json, os, threading
import torch
from logitship.server.model.core_binding import CoreBinding

def cores(): return {task: sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}

def run():
    if TEAM_IS_THERE:
        torch.ones(1 << 20).add_(1)
    before = cores()
    binding = CoreBinding()
    name = open("/proc/thread-self/comm").read().strip()
    with binding:
        within = cores()
    print(json.dumps([before, within, cores(), str(threading.get_native_id()), name]))

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def run(num_threads: int, team_is_there: bool = False) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]:
    """The cores of each thread before, within and after, and which thread made the binding."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("TEAM_IS_THERE", str(team_is_there))],
        env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
        capture_output=True,
        check=True,
        text=True,
    )
    before, within, after, own, name = json.loads(done.stdout)
    assert not name.startswith("omp")
    return before, within, after, own


@pytest.mark.skipif(len(CORES) == 1, reason="one core is nothing to choose from")
def test_each_thread_has_a_core_and_others_keep_theirs() -> None:
    before, within, after, own = run(len(CORES))
    workers = set(within) - set(before)
    assert sorted(within[task] for task in {own, *workers}) == [[core] for core in CORES]
    assert all(within[task] == CORES for task in set(before) - {own})
    # What the thread starts elsewhere may use all cores.
    assert after[own] == CORES


@pytest.mark.parametrize(("num_threads", "team_is_there"), [(1, False), (len(CORES), True)])
def test_nothing_is_bound(num_threads: int, team_is_there: bool) -> None:
    """One thread, and a team that was there before."""
    for each in run(num_threads, team_is_there)[:3]:
        assert all(cores == CORES for cores in each.values())
