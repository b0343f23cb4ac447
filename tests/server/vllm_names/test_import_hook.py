from __future__ import annotations

import importlib.metadata
import importlib.util
import pickle
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

from logitship.sampler.batch_processors.interface import LogitsProcessor, MoveDirectionality
from logitship.sampler.batch_processors.vllm_config import VllmConfig
from logitship.server.vllm_names import enable_vllm_names
from logitship.server.vllm_names.import_hook import VllmNamesFinder
from logitship.server.vllm_names.names import NAMES

TARGET_TOKEN = '''
"""Lets a request ask for one token; written for vLLM."""

from typing import Optional

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

logger = init_logger(__name__)


class TargetToken(LogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target = (params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token {target!r} is not an int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, int] = {}
        self.most_rows = vllm_config.scheduler_config.max_num_seqs
        logger.info_once("at most %d rows", self.most_rows)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Optional[BatchUpdate]) -> None:
        if not batch_update:
            return
        for row in batch_update.removed:
            self.targets.pop(row, None)
        for row, params, _, _ in batch_update.added:
            self.targets.pop(row, None)
            if params.extra_args and (target := params.extra_args.get("target_token")) is not None:
                self.targets[row] = target
        for source, destination, direction in batch_update.moved:
            moved, replaced = self.targets.pop(source, None), self.targets.pop(destination, None)
            if moved is not None:
                self.targets[destination] = moved
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self.targets[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, target in self.targets.items():
            kept = logits[row, target].clone()
            logits[row] = float("-inf")
            logits[row, target] = kept
        return logits
'''

RUN_TARGET_TOKEN = """
import torch
from target_token import TargetToken
from vllm import SamplingParams
from vllm.config import SchedulerConfig, VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

processor = TargetToken(VllmConfig(SchedulerConfig(max_num_seqs=2)), torch.device("cpu"), False)
asking, silent = SamplingParams(extra_args={"target_token": 2}), SamplingParams()
TargetToken.validate_params(asking)
processor.update_state(BatchUpdate(2, [], [(0, asking, [1], []), (1, silent, [1], [])], []))
print(processor.apply(torch.zeros(2, 4)).isfinite().sum(-1).tolist())
processor.update_state(BatchUpdate(2, [], [], [(0, 1, MoveDirectionality.SWAP)]))
print(processor.apply(torch.zeros(2, 4)).isfinite().sum(-1).tolist())
"""

ADAPTER = """
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logits_process import LogitsProcessor as RequestCallable
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, RequestLogitsProcessor


class Forced:
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[:] = float("-inf")
        logits[self.token + len(prompt) + len(output)] = 1.0
        return logits


class ForcedAdapter(AdapterLogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if (params.extra_args or {}).get("token", 0) < 0:
            raise VLLMValidationError("is negative", parameter="token")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        super().__init__(vllm_config, device, is_pin_memory)
        self.is_cuda = device.type == "cuda"

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        token: Any | None = params.extra_args and params.extra_args.get("token")
        return None if token is None else Forced(token)


processor = ForcedAdapter(None, torch.device("cpu"), False)
output: list[int] = []
params = SamplingParams(extra_args={"token": 1})
processor.update_state(BatchUpdate(2, [], [(0, SamplingParams(), [9], []), (1, params, [9], output)], []))
print(processor.apply(torch.zeros(2, 6)).argmax(-1).tolist())
output.append(3)
processor.update_state(None)
print(processor.apply(torch.zeros(2, 6)).argmax(-1).tolist())
"""

TURN_ON = "from logitship.server.vllm_names import enable_vllm_names\nassert enable_vllm_names() is True\n"


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a subprocess, with its folder first in the import path."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-W", "error", "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def output_of(folder: Path, script: str) -> list[str]:
    done = run(folder, script)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_plugin_needs_the_hook(tmp_path: Path) -> None:
    (tmp_path / "target_token.py").write_text(TARGET_TOKEN)
    done = run(tmp_path, "import logitship, logitship.server.vllm_names\nimport target_token")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'vllm'"


def test_batch_processor_written_for_vllm(tmp_path: Path) -> None:
    (tmp_path / "target_token.py").write_text(TARGET_TOKEN)
    assert output_of(tmp_path, TURN_ON + RUN_TARGET_TOKEN) == ["[1, 4]", "[4, 1]"]


def test_request_level_callable_wrapped_for_vllm(tmp_path: Path) -> None:
    assert output_of(tmp_path, TURN_ON + ADAPTER) == ["[0, 2]", "[0, 3]"]


def test_names_are_imported_lazily(tmp_path: Path) -> None:
    script = """
    import sys
    before = set(sys.modules)
    enable_vllm_names()
    print(sorted(set(sys.modules) - before))
    import vllm.v1.sample.logits_processor.interface
    print(sorted(set(sys.modules) - before))
    print("torch" in sys.modules)
    """
    nothing, imported, torch = output_of(tmp_path, TURN_ON + textwrap.dedent(script))
    interface = "vllm.v1.sample.logits_processor.interface"
    assert nothing == "[]"
    assert imported == str(["vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.logits_processor", interface])
    assert torch == "False"


def test_transformers_does_not_import_vllm(tmp_path: Path) -> None:
    script = "import sys, transformers.generation.utils\nprint([name for name in sys.modules if name[:4] == 'vllm'])"
    assert output_of(tmp_path, TURN_ON + script) == ["[]"]


def test_installed_vllm_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("SamplingParams = 'installed'")
    script = """
    import sys
    from logitship.server.vllm_names import enable_vllm_names
    finders = list(sys.meta_path)
    print(enable_vllm_names(), sys.meta_path == finders, "vllm" in sys.modules)
    from vllm import SamplingParams
    print(SamplingParams)
    print(enable_vllm_names(), sys.meta_path == finders)
    """
    assert output_of(tmp_path, script) == ["False True False", "installed", "False True"]


def test_folder_named_vllm_is_not_vllm(tmp_path: Path) -> None:
    """In the folder above a clone of vLLM, `import vllm` finds the clone's folder as an empty package."""
    (tmp_path / "vllm").mkdir()
    script = TURN_ON + "from vllm.v1.sample.logits_processor import LogitsProcessor\nprint(LogitsProcessor.__module__)"
    assert output_of(tmp_path, script) == ["logitship.sampler.batch_processors.interface"]


def test_hook_is_installed_once(hook_is_on: None) -> None:
    module = import_module("vllm.config")
    assert enable_vllm_names() is True
    assert sum(isinstance(finder, VllmNamesFinder) for finder in sys.meta_path) == 1
    assert import_module("vllm.config") is module


def test_star_import(hook_is_on: None) -> None:
    namespace: dict[str, object] = {}
    exec("from vllm.v1.sample.logits_processor import *", namespace)
    assert namespace.keys() - {"__builtins__"} == NAMES["vllm.v1.sample.logits_processor"].keys()
    assert namespace["LogitsProcessor"] is LogitsProcessor


def test_submodules_are_attributes(hook_is_on: None) -> None:
    vllm = import_module("vllm")
    assert vllm.config.VllmConfig is VllmConfig
    assert vllm.v1.sample.logits_processor.interface.LogitsProcessor is LogitsProcessor
    assert {"SamplingParams", "config", "v1"} <= set(dir(vllm))


def test_pickles_made_with_vllm_load(hook_is_on: None) -> None:
    by_vllm = b"cvllm.v1.sample.logits_processor.interface\nMoveDirectionality\n."
    assert pickle.loads(by_vllm) is MoveDirectionality
    assert b"vllm" not in pickle.dumps(import_module("vllm.v1.sample.logits_processor").LogitsProcessor)


def test_metadata_and_specs(hook_is_on: None) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations == []
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")


def test_other_modules_are_ignored() -> None:
    finder = VllmNamesFinder()
    assert [finder.find_spec(name, None) for name in ("vllmlp", "torch.nothing", "vllm.nothing.at_all")] == [None] * 3


@pytest.mark.parametrize(
    "statement",
    [
        "from vllm import PoolingParams",
        "import vllm.PoolingParams",
        "from vllm.PoolingParams import x",
    ],
)
def test_import_error_lists_the_available_names(statement: str, hook_is_on: None) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(statement)
    assert caught.value.name == "vllm"
    assert str(caught.value).startswith(
        "vLLM is not installed, and in its place logitship has no 'PoolingParams' in 'vllm', only: CompletionOutput, "
        "LLM, RequestOutput, SamplingParams, __version__, config, "
    )


def test_import_error_in_a_module_without_submodules(hook_is_on: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no 'LoRAConfig' in 'vllm.config', only: DeviceConfig, "):
        exec("from vllm.config import LoRAConfig")


def test_missing_attribute_is_an_attribute_error(hook_is_on: None) -> None:
    vllm = import_module("vllm")
    assert not hasattr(vllm, "PoolingParams")
    with pytest.raises(AttributeError, match=r"vLLM is not installed, .* no 'PoolingParams' in 'vllm', only: "):
        _ = vllm.PoolingParams


def test_hint_for_the_loader_of_model_runner_v2(hook_is_on: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"loads .* by itself: name the class in logits_processors"):
        import_module("vllm.v1.worker.gpu.sample.logits_processor.loader")
