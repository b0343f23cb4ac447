"""The plugin in vLLM's model runner V2: its own Python code, with fakes for the parts that need Triton on a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1500)  # vLLM is installed on first use

ROOT = Path(__file__).parents[2]
FAULT = 63


@pytest.fixture(scope="module")
def ran_before(vllm_environment: Path) -> Any:
    """Output of the script with vLLM 0.32."""
    return run(vllm_environment)


@pytest.fixture(scope="module")
def ran_newest(vllm_environment: Path, newest_vllm: Path) -> Any:
    """Its output with vLLM 0.33."""
    return run(vllm_environment, newest_vllm)


@pytest.fixture(params=["ran_before", "ran_newest"], ids=["0.32", "0.33"])
def ran(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def run(environment: Path, *folders: Path) -> Any:
    result = subprocess.run(
        [str(environment / "bin" / "python"), str(Path(__file__).with_name("vllm_runner_v2.py"))],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT / "src"])),
            "LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.mode(
    "vLLM", "V2, synchronous and asynchronous scheduling", "its own code, 0.32.0 and 0.33.0, with fakes of kernels"
)
@pytest.mark.parametrize("scheduling", ["synchronous", "asynchronous"])
def test_one_call_per_token_in_any_row(ran: Any, scheduling: str) -> None:
    """The n-th call for a request samples token 10 + n; rows are in the order of the step."""
    assert ran["steps"][scheduling]["tokens"] == [
        [0, 11],  # the first chunk of a's prompt is not processed
        [12, 11],
        [11, 12],
        [13, FAULT, 13],  # b was preempted and kept its state; c fails
        [11, 14],  # d has the slot of a finished request, and none of its state
        [15, 12],
    ]


def test_faults_are_attached_to_vllms_output(ran: Any) -> None:
    for scheduling in ("synchronous", "asynchronous"):
        faults = ran["steps"][scheduling]["faults"]
        assert [*faults] == ["c"]
        assert re.match(r"ProcessorFault: .*RuntimeError: as asked\nTraceback ", faults["c"])


def test_calls_begin_early_with_synchronous_scheduling(ran: Any) -> None:
    """All rows of each step begin early. A call that failed has used its logits, so the next one is made with them."""
    assert ran["steps"]["synchronous"]["early"] == [1, 2, 2, 3, 0, 2, 1]
    assert ran["steps"]["asynchronous"]["early"] == [0] * 7


def test_prompt_of_embeddings_ends_its_request(ran: Any) -> None:
    assert ran["embeddings"] == [[11, FAULT], [12]]


def test_unsupported_configurations(ran_newest: Any) -> None:
    *options, changed = ran_newest["refused"]
    assert [option.split(": it needs")[0] for option in options] == [
        'logitship cannot run with synthetic verification (rejection_sample_method "synthetic")',
        "logitship cannot run with diffusion models",
        "logitship cannot run with prefill context parallelism (--prefill-context-parallel-size)",
        "logitship cannot run with batch-sharded sampling (--enable-batch-sharded-sampling)",
    ]
    assert changed.startswith("logitship does not know the model runner of this vLLM")


@pytest.mark.mode("vLLM", "V2, drafts", "its own code, 0.33.0, with fakes of kernels")
def test_processors_follow_accepted_draft_tokens(ran_newest: Any) -> None:
    """The n-th call for a request samples token 10 + n: rejected draft tokens leave no trace in state or receipts."""
    assert ran_newest["drafts"] == [
        {"a": [12, 13, 14], "b": [12]},
        {"a": [15, 16], "b": [13]},
        {"a": [17], "b": [14, 15, 16, 17]},
        {"a": [18], "b": [18, 19]},
        {"a": [4, 6, 7, 8], "b": [2, 3, 7, 9]},
    ]


@pytest.mark.mode("vLLM", "V2, drafts are refused in 0.32", "its own code, 0.32.0, with fakes of kernels")
def test_speculation_is_refused_where_processors_are_skipped(ran_before: Any) -> None:
    assert ran_before["drafts"].startswith(
        "logitship cannot run with speculative decoding (--speculative-config) before vLLM 0.33: it needs"
    )


LOADED_BY_VLLM = """
import importlib.abc, sys
from vllm.v1.sample.logits_processor import _load_custom_logitsprocs
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs

class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ImportError("a broken installation")

sys.meta_path.insert(0, Broken())
for load in (_load_custom_logitsprocs, _load_v2_logitsprocs):
    try:
        print("loaded", load(["logitship.server.vllm:LogitshipLogitsProcessor"]))
    except (ImportError, RuntimeError) as error:
        print("does not start:", error.__cause__ or error)
"""


@pytest.mark.parametrize("broken", ["httpx", "logitship.client", "logitship.server.vllm.params_validation", "orjson"])
def test_vllm_does_not_start_with_a_broken_installation(broken: str, vllm_environment: Path) -> None:
    """Neither model runner goes on without a plugin that it was told to load."""
    done = subprocess.run(
        [str(vllm_environment / "bin" / "python"), "-c", LOADED_BY_VLLM, broken],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-2:] == ["does not start: a broken installation"] * 2
