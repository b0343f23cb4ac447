"""Commands of SGLang and vLLM on a CPU, alone and with logitship's plugin."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def peer_python(name: str) -> str:
    """Return the interpreter of an environment that the tests created: of `sglang` or `vllm`."""
    cache = Path(os.environ.get("LOGITSHIP_PEER_CACHE", Path.home() / ".cache" / "logitship-peers"))
    return str(cache / name / "bin" / "python")


def sglang_command(python: str, model: Path, *flags: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves the model with SGLang, and its environment."""
    backends = "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend xgrammar"
    more = "--dtype float32 --max-total-tokens 16384 --max-running-requests 32 --skip-server-warmup --host 127.0.0.1"
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "2"}
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model), *backends.split(), *more.split()]
    return [*command, *flags], environment


def sglang_with_plugin(python: str, model: Path, folder: Path, *flags: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves the model with SGLang and the plugin, and its environment.

    Args:
        folder: as `add_distribution` filled it.
    """
    flags = ("--enable-custom-logit-processor", "--log-level", "warning", *flags)
    command, environment = sglang_command(python, model, *flags)
    path = os.pathsep.join((str(ROOT / "src"), str(folder)))
    return command, {**environment, "SGLANG_PLUGINS": "logitship", "PYTHONPATH": path}


def vllm_with_plugin(python: str, model: Path, folder: Path, *flags: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves the model with vLLM and the plugin, and its environment.

    Args:
        folder: as `add_distribution` filled it.
    """
    more = "--dtype float32 --max-model-len 1024 --enforce-eager --logits-processors"
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *more.split()]
    path = os.pathsep.join((str(ROOT / "src"), str(folder)))
    environment = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR": "1"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the executor of one GPU; on a CPU vLLM uses another
    return [*command, "logitship.server.vllm:LogitshipLogitsProcessor", *flags], environment


def add_distribution(folder: Path) -> None:
    """Write what `pip install` writes, so that SGLang and vLLM find the plugins of a logitship on `PYTHONPATH`."""
    metadata = folder / "logitship-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: logitship\nVersion: 0\n")
    sglang, vllm = "logitship = logitship_sglang:load", "logitship = logitship_vllm:load"
    entry_points = f"[sglang.srt.plugins]\n{sglang}\n[vllm.general_plugins]\n{vllm}\n"
    (metadata / "entry_points.txt").write_text(entry_points)
