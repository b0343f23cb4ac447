"""One side of a benchmark in its own process, for sides that need different environments.

A worker is a script that calls `serve`. This module imports nothing but the standard library, so that a worker runs in
any environment that has what it measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


class WorkerProcess:
    """A worker process. It is idle between commands, so that workers can take turns.

    Args:
        python: interpreter of the worker's environment.
        script: calls `serve`.
        arguments: of the script.
        threads: of OpenMP; scripts take PyTorch's number from there.

    Attributes:
        about: the worker's first message, such as the version that it measures.

    Raises:
        SystemExit: the worker ended without an answer; also raised by `ask`. Its standard error has the reason.
    """

    def __init__(self, python: str, script: Path, arguments: Sequence[str], threads: int) -> None:
        self._name = " ".join((script.name, *arguments))
        self._process = subprocess.Popen(
            [python, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        self.about: Any = self._read()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def ask(self, command: object) -> Any:
        """Send a command, any JSON value, and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended: its error is above")
        return json.loads(line)


@contextlib.contextmanager
def beside_vllm(
    script: Path, vllm_python: str | None, threads: int
) -> Iterator[tuple[WorkerProcess, WorkerProcess | None]]:
    """Start workers of a script with the arguments `logitship` and, if there is a Python that has it, `vllm`."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(WorkerProcess(sys.executable, script, ["logitship"], threads))
        peer = stack.enter_context(WorkerProcess(vllm_python, script, ["vllm"], threads)) if vllm_python else None
        yield ours, peer


def serve(start: Callable[[], tuple[object, Callable[[Any], object]]]) -> None:
    """Answer commands until there are no more.

    Args:
        start: imports what is slow. Returns the worker's first message, and the function that answers a command.
    """
    # Libraries print to standard output: what they print goes to standard error, and the answers keep the stream.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    about, answer = start()
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
