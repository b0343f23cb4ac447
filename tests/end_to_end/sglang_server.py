"""The real `sglang.launch_server` on a CPU, with a tiny random model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


def add_distribution(
    folder: Path, name: str = "logitship", plugin: str = "logitship_sglang:load", group: str = "sglang.srt.plugins"
) -> None:
    """Write what `pip install` writes, for a package with a plugin of an engine that is found by `PYTHONPATH`."""
    metadata = folder / f"{name}-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {plugin}\n")


@dataclass
class SglangServer:
    """A running server.

    Attributes:
        url: its base URL.
        log: its output so far.
        process: its first process.
    """

    url: str
    log: list[str]
    process: subprocess.Popen[str]

    @property
    def text(self) -> str:
        """Its output so far."""
        return "".join(self.log)

    def is_alive(self) -> bool:
        """Return whether it answers a request without a processor."""
        body = {"text": "?", "sampling_params": {"max_new_tokens": 1}}
        try:
            return httpx.post(f"{self.url}/generate", json=body, timeout=60).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def sglang_serve(
    python: Path, model: Path, folders: Sequence[Path], environment: Mapping[str, str], *arguments: str
) -> Iterator[SglangServer]:
    """Run SGLang.

    Args:
        python: the interpreter of its environment.
        model: the model's folder.
        folders: additional folders that its processes import from.
        environment: additional environment variables.
        arguments: additional command line arguments.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"]
    command += ["--max-total-tokens", "8192", "--max-running-requests", "32", "--skip-server-warmup"]
    command += ["--sleep-on-idle"]  # else an idle server uses a core
    command += ["--enable-custom-logit-processor", "--host", "127.0.0.1", "--port", str(port), *arguments]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",  # a second thread would wait in a loop, beside so small a model
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", *folders))),
    }
    process = subprocess.Popen(
        command,
        env=os.environ | settings | dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    log: list[str] = []
    ready = threading.Event()
    reader = threading.Thread(target=_read, args=(process, log, ready))
    reader.start()
    try:
        ready.wait()
        assert re.search("ready to roll", "".join(log)), "".join(log)
        yield SglangServer(f"http://127.0.0.1:{port}", log, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def _read(process: subprocess.Popen[str], log: list[str], ready: threading.Event) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        log.append(line)
        if "ready to roll" in line:
            ready.set()
    ready.set()
