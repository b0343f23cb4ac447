"""vLLM's own tests and examples of logits processors, as its release ships them, run here unchanged.

They import `vllm`, whose names `enable_vllm_names()` provides. `facebook/opt-125m` and `Qwen/Qwen3-0.6B` are names in a
hub cache with a tiny model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from logitship.server.model.model_loader import LoadedModel

HERE = Path(__file__).parent
CONFTEST = "import logitship\n\nassert logitship.enable_vllm_names()\n"

LEFT_OUT = {
    "tests/v1/logits_processors/test_correctness.py": "it sets attributes of vLLM's model runner: its sampling "
    "metadata, the holder of its thinking budget, the tuples in its min_tokens processor",
}
"""Files that do not run here, and why."""

REFUSED_BY_VLLM = "test_rejects_custom_logitsprocs"
"""vLLM refuses all processors for pooling models and under speculative decoding. There are no pooling models here, and
processors are applied under speculative decoding."""

OFFLINE = {
    "test_fake_entrypoint_preserves_other_groups",
    "test_custom_logitsprocs[CustomLogitprocSource.LOGITPROC_SOURCE_NONE]",
    "test_custom_logitsprocs[CustomLogitprocSource.LOGITPROC_SOURCE_ENTRYPOINT]",
    "test_custom_logitsprocs[CustomLogitprocSource.LOGITPROC_SOURCE_FQCN]",
    "test_custom_logitsprocs[CustomLogitprocSource.LOGITPROC_SOURCE_CLASS]",
    "test_custom_logitsprocs_req",
}
ONLINE = {
    f"{test}[server{index}-Qwen/Qwen3-0.6B]"
    for test in ("test_custom_logitsprocs", "test_invalid_custom_logitsproc_arg")
    for index in (0, 1)
}
LOADER = {"test_invalid_fqcn_rejected[missing-colon]", "test_invalid_fqcn_rejected[too-many-colons]"}


@pytest.fixture(scope="module")
def folder(tests_of_vllm: Path, float32_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of vLLM, with a stand-in for the helpers that they import, and a hub cache."""
    folder = tmp_path_factory.mktemp("vllm")
    for part in ("tests", "examples"):
        shutil.copytree(tests_of_vllm / part, folder / part)
    for package in (folder / "tests", folder / "tests/v1"):
        (package / "__init__.py").touch()
    shutil.copy(HERE / "vllm_tests_utils.py", folder / "tests/utils.py")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    for name in ("facebook/opt-125m", "Qwen/Qwen3-0.6B"):
        repository = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / "0"
        float32_model.model.save_pretrained(snapshot)
        float32_model.tokenizer.hf_tokenizer.save_pretrained(snapshot)
        config = json.loads((snapshot / "config.json").read_text())
        (snapshot / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text("0")
    return folder


def python(tests_of_vllm: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder, where vLLM is not installed and no network is used."""
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{tests_of_vllm / 'packages'}",
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )


def passed(tests_of_vllm: Path, folder: Path, file: str, *options: str) -> set[str]:
    """Run a file of tests, and return those that passed."""
    path = f"tests/v1/logits_processors/{file}"
    options = ("-p", "pytest_asyncio", "-p", "no:cacheprovider", "--junit-xml=results.xml", *options)
    done = python(tests_of_vllm, folder, "-m", "pytest", path, *options)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = ElementTree.parse(folder / "results.xml").iter("testcase")
    return {case.attrib["name"] for case in cases if len(case) == 0}


def test_offline(tests_of_vllm: Path, folder: Path) -> None:
    chosen = ("-k", f"not {REFUSED_BY_VLLM}")
    assert passed(tests_of_vllm, folder, "test_custom_offline.py", *chosen) == OFFLINE


def test_online(tests_of_vllm: Path, folder: Path) -> None:
    assert passed(tests_of_vllm, folder, "test_custom_online.py") == ONLINE


def test_loader(tests_of_vllm: Path, folder: Path) -> None:
    assert passed(tests_of_vllm, folder, "test_loader.py") == LOADER


@pytest.mark.parametrize("name", ["custom", "custom_req", "custom_req_init"])
def test_example(tests_of_vllm: Path, folder: Path, name: str) -> None:
    start = f"import conftest, runpy; runpy.run_path('examples/logits_processor/{name}.py', run_name='__main__')"
    done = python(tests_of_vllm, folder, "-c", start)
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = [eval(text) for text in re.findall(r"^Output:    (.*)$", done.stdout, re.MULTILINE)]
    # Requests 0 and 2 ask for one token, which the last example only forces on a GPU.
    is_forced = [len(set(output)) == 1 for output in outputs]
    assert is_forced == ([False] * 4 if name == "custom_req_init" else [True, False, True, False])


def test_example_for_model_runner_v2(tests_of_vllm: Path, folder: Path) -> None:
    """A random model repeats itself, and less with a penalty."""
    start = "import conftest, runpy; runpy.run_path('examples/logits_processor/dry.py', run_name='__main__')"
    done = python(tests_of_vllm, folder, "-c", start)
    assert done.returncode == 0, done.stderr[-4000:]
    without, with_penalty = re.findall(r"^Output:    (.*)$", done.stdout, re.MULTILINE)
    assert without != with_penalty


def test_no_file_is_forgotten(tests_of_vllm: Path, folder: Path) -> None:
    files = {
        str(path.relative_to(folder))
        for pattern in ("tests/v1/logits_processors/test_*.py", "examples/**/*.py")
        for path in folder.glob(pattern)
    }
    run_here = {f"tests/v1/logits_processors/test_{name}.py" for name in ("custom_offline", "custom_online", "loader")}
    run_here |= {f"examples/logits_processor/{name}.py" for name in ("custom", "custom_req", "custom_req_init", "dry")}
    assert files == run_here | set(LEFT_OUT)
