"""Core binding, tested in subprocesses: PyTorch's number of threads is fixed when a process starts."""

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
    if TEAM_EXISTS:
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


def run(num_threads: int, team_exists: bool = False) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]:
    """Return each thread's cores before, within and after the block, and the id of the thread that made the binding."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("TEAM_EXISTS", str(team_exists))],
        env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
        capture_output=True,
        check=True,
        text=True,
    )
    before, within, after, own, name = json.loads(done.stdout)
    assert not name.startswith("omp")
    return before, within, after, own


@pytest.mark.skipif(len(CORES) == 1, reason="needs several cores")
def test_each_thread_of_the_team_gets_a_core() -> None:
    before, within, after, own = run(len(CORES))
    workers = set(within) - set(before)
    assert sorted(within[task] for task in {own, *workers}) == [[core] for core in CORES]
    assert all(within[task] == CORES for task in set(before) - {own})
    # Threads started outside the block may use all cores.
    assert after[own] == CORES


@pytest.mark.parametrize(("num_threads", "team_exists"), [(1, False), (len(CORES), True)])
def test_nothing_is_bound(num_threads: int, team_exists: bool) -> None:
    """With one thread, or a team that was started before."""
    for each in run(num_threads, team_exists)[:3]:
        assert all(cores == CORES for cores in each.values())
