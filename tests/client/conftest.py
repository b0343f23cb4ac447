"""Fixtures that run processors in other processes: the author's, stock SGLang, and one with logitship only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROJECT = HERE / "author_project"

# Loads each string with SGLang's own code and runs it in SGLang's own step. logitship cannot be imported.
ON_SGLANG = """
import importlib.abc, json, sys
class NoLogitship(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "logitship":
            raise ModuleNotFoundError(f"no module named {name!r}: this is a stock SGLang", name=name)
sys.meta_path.insert(0, NoLogitship())
sys.path.insert(0, sys.argv[1])
import torch
import sglang_peer
peer = sglang_peer.load()
base = peer.custom_logit_processor.CustomLogitProcessor
results = {}
for name, text in json.load(sys.stdin).items():
    try:
        logits = torch.zeros(2, 4)
        processor = base.from_str(text)
        assert isinstance(processor, base)
        peer.apply(logits, [(processor, [0, 1])], [{}, {}])
        results[name] = logits.tolist()
    except Exception as error:
        results[name] = repr(error)
assert not any(name.partition(".")[0] == "logitship" for name in sys.modules)
json.dump(results, sys.stdout)
"""

# Loads each string with logitship, from pickle and source, in a process without the author's modules.
ON_LOGITSHIP = """
import json, sys
import torch
from logitship.client.serialization.loading import instantiate, load_class
from logitship.client.serialization.processor_string import parse
def run(string):
    try:
        return instantiate(load_class(string))(torch.zeros(2, 4)).tolist()
    except Exception as error:
        return repr(error)
results = {}
for name, text in json.load(sys.stdin).items():
    string = parse(text)
    results[name] = {"pickle": run(string), "source": string.source and run(string.source)}
assert not {"acme", "script"} & set(sys.modules)
json.dump(results, sys.stdout)
"""


@dataclass(frozen=True)
class ProjectResults:
    """Results of the author's processors in each process, by class name.

    Attributes:
        strings: their processor strings.
        expected: their results on zeros [2, 4] in the author's process.
        on_sglang: their results on stock SGLang.
        from_pickle: their results with logitship, from the pickle.
        from_source: their results with logitship, from the source; None if the string has no source.
    """

    strings: dict[str, str]
    expected: dict[str, Any]
    on_sglang: dict[str, Any]
    from_pickle: dict[str, Any]
    from_source: dict[str, Any]


def run_python(*args: str, cwd: Path, stdin: str = "", **environment: str) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run(
        [sys.executable, *args], cwd=cwd, input=stdin, env=variables, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="session")
def python() -> Callable[..., str]:
    """Return a function that runs Python in a new process and returns its stdout."""
    return run_python


@pytest.fixture(scope="session")
def serialize_project() -> Callable[..., dict[str, dict[str, Any]]]:
    """Return a function that runs the author's script: {class name: {"string": …, "expected": …}}."""

    def run(project: Path = PROJECT, **environment: str) -> dict[str, dict[str, Any]]:
        report: dict[str, dict[str, Any]] = json.loads(run_python("script.py", cwd=project, **environment))
        return report

    return run


@pytest.fixture(scope="session")
def results(serialize_project: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> ProjectResults:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    report = serialize_project()
    strings = {name: entry["string"] for name, entry in report.items()}
    stdin = json.dumps(strings)
    here = json.loads(run_python("-c", ON_LOGITSHIP, cwd=elsewhere, stdin=stdin))
    return ProjectResults(
        strings=strings,
        expected={name: entry["expected"] for name, entry in report.items()},
        on_sglang=json.loads(run_python("-c", ON_SGLANG, str(HERE.parent / "peers"), cwd=elsewhere, stdin=stdin)),
        from_pickle={name: result["pickle"] for name, result in here.items()},
        from_source={name: result["source"] for name, result in here.items()},
    )
