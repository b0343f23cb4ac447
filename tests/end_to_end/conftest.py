"""Fixtures with a server on the real model, and with the real vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from logitship import LLM
from logitship.server.config import ServerConfig
from logitship.server.http_server import running_server
from logitship.server.model.default_model import default_model_folder

NUM_SHALLOW_LAYERS = 6
"""Layers of `shallow_model`, of the thirty of the default model: a forward pass takes about a third of the time."""


@pytest.fixture(scope="session")
def real_server() -> Iterator[str]:
    """Base URL of a server on the default model that runs shipped processors: 32 sequences of up to 1,024 tokens."""
    config = ServerConfig(
        port=0,
        enable_custom_logit_processor=True,
        processor_isolation="none",
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
        max_model_len=1024,
        random_seed=0,
        log_level="warning",
    )
    with running_server(config) as base_url:
        yield base_url


@pytest.fixture(scope="session")
def shallow_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the first layers of the default model, for tests that compare what it generates with itself."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    shutil.copytree(default_model_folder(), folder)
    config_file, weights_file = folder / "config.json", folder / "model.safetensors"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"num_hidden_layers": NUM_SHALLOW_LAYERS}))
    weights = {
        name: weight
        for name, weight in load_file(weights_file).items()
        if (layer := re.match(r"model\.layers\.(\d+)\.", name)) is None or int(layer[1]) < NUM_SHALLOW_LAYERS
    }
    save_file(weights, weights_file, {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def zoo_llm() -> Iterator[LLM]:
    """An engine with fewer rows than requests, so that requests are added and removed while others run."""
    with LLM(
        max_model_len=256,
        max_num_seqs=6,
        seed=0,
        logits_processor_pattern=r"logits_processor_zoo\..*",
        enable_deterministic_inference=True,  # the compared answers come from different batches
    ) as llm:
        yield llm


@pytest.fixture(scope="session")
def vllm_environment() -> Path:
    """A virtual environment with the real vLLM."""
    return _environment("vllm", "vllm_cpu.sh")


@pytest.fixture(scope="session")
def newest_vllm() -> Path:
    """A folder with the Python modules of the newest vLLM, to be imported instead of those of `vllm_environment`."""
    return _environment("vllm_python", "vllm_python.sh")


@pytest.fixture(scope="session")
def tests_of_vllm() -> Path:
    """A folder with vLLM's own tests and examples of logits processors, and the plugin of pytest that they need."""
    return _environment("vllm_tests", "vllm_tests.sh")


@pytest.fixture(scope="session")
def clients_environment() -> Path:
    """A virtual environment with clients that others wrote."""
    return _environment("clients", "clients.sh")


def _environment(name: str, script: str) -> Path:
    """Create an environment on first use, under a lock because tests run in parallel."""
    cache = Path(os.environ.get("LOGITSHIP_PEER_CACHE", Path.home() / ".cache" / "logitship-peers"))
    cache.mkdir(parents=True, exist_ok=True)
    path = Path(__file__).parents[1] / "peers" / script
    subprocess.run(["flock", str(cache / f"{name}.lock"), str(path), str(cache / name)], check=True)
    return cache / name
