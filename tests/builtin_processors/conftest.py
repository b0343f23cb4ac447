"""Rows as the sampler hands them to a processor, and SGLang's real processors to compare with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    """A row's entry of `custom_param_list`. `state` is the sequence's own: hand in the same one at each step."""

    def make(
        params: dict[str, Any], prompt: list[int], output: list[int], state: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        request = SimpleNamespace(
            rid="r", origin_input_ids=prompt, output_ids=output, state={} if state is None else state
        )
        return {**params, "__req__": request}

    return make


@pytest.fixture(scope="session")
def sglang() -> Iterator[Callable[..., list[Any]]]:
    """SGLang's real processors: `sglang(class_name, cases, **class_attributes)`.

    A case is `{"logits": …, "rows": [{"params": …, "prompt": …, "output": …}]}`; its result is the logits
    afterwards, or the name of an exception. A class name of None asks for the names of SGLang's classes.
    """
    runner = Path(__file__).with_name("sglang_runner.py")
    with subprocess.Popen(
        [sys.executable, str(runner)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def run(class_name: str | None, cases: list[dict[str, Any]] | None = None, **attributes: int) -> list[Any]:
            request = {"class_name": class_name, "cases": cases or [], "attributes": attributes}
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            answer = stdout.readline()
            assert answer, "SGLang's process ended; its error is on stderr"
            results: list[Any] = json.loads(answer)
            return results

        yield run
        stdin.close()
