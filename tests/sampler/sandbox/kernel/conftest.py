"""Fixtures that run code in a locked-down process; see `locked_process.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

Run = Callable[..., SimpleNamespace]


@pytest.fixture(scope="session")
def forker() -> Iterator[subprocess.Popen[str]]:
    """A `locked_process.py` process, which forks a child for each plan."""
    program = [sys.executable, "-I", str(Path(__file__).with_name("locked_process.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield process


@pytest.fixture
def run_plan(forker: subprocess.Popen[str]) -> Run:
    """A function that runs `locked_process.py` with the fields of a `Plan`, and returns those of its `Outcome`."""

    def run(attempt: str, argument: Any = None, **plan: Any) -> SimpleNamespace:
        assert forker.stdin is not None
        assert forker.stdout is not None
        print(json.dumps({"attempt": attempt, "argument": argument, **plan}), file=forker.stdin, flush=True)
        answer = json.loads(forker.stdout.readline())
        assert "failure" not in answer, answer["failure"]
        return SimpleNamespace(**answer)

    return run


USERS = {"user": False, "nobody": True} if os.geteuid() == 0 else {"user": False}


@pytest.fixture(params=USERS.values(), ids=USERS.keys())
def nobody(request: pytest.FixtureRequest) -> bool:
    """True to change to an unprivileged user first: False and True if the tests run as root."""
    return bool(request.param)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that all users can access, unlike `tmp_path`."""
    with TemporaryDirectory(prefix="logitship-test-", dir="/tmp") as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        yield folder
