"""Refuses to load a model whose weights do not fit into memory: the kernel would end the process without a word."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from logitship.sampler.cgroup_limits import memory_limit
from logitship.server.refusals import StartError

_GIB = 1 << 30
_BESIDE_WEIGHTS = 1 << 28
"""Bytes that the server allocates at least beside the weights: buffers of a forward pass, a small cache, sandboxes."""


_BEFORE_MODEL = 300 << 20
"""Bytes that this process and the zygote allocate between the start of the engine and the loading of the model."""


class NotEnoughMemory(StartError):
    """The server or its model does not fit into the memory that this process may use. The message says what does."""


def free_main_memory() -> float:
    """Return the free bytes of the machine's memory, at most what the limit of the container leaves."""
    return min(_available_memory(Path("/proc/meminfo")), memory_limit().free)


def require_memory_to_start() -> None:
    """Refuse to start where the imports would use up the memory, before the model is loaded.

    Raises:
        NotEnoughMemory: they would.
    """
    free = free_main_memory()
    if free < _BEFORE_MODEL:
        needed, missing = _BEFORE_MODEL / _GIB, (_BEFORE_MODEL - free) / _GIB
        raise NotEnoughMemory(
            f"{free / _GIB:.2f} GiB of memory are free{limit_note()}: the server takes {needed:.2f} GiB before it "
            f"loads its model. Raise the limit: at least {missing:.2f} GiB more are needed, and the size of its "
            "weights"
        )


def require_memory(outline: PreTrainedModel, model_path: str) -> None:
    """Refuse a model whose weights are larger than the free memory.

    Args:
        outline: the model without data, see `outline_of`.
        model_path: its name for the message.

    Raises:
        NotEnoughMemory: they are.
    """
    weights: int = outline.get_memory_footprint()  # type: ignore[no-untyped-call]
    free = free_main_memory()
    if weights + _BESIDE_WEIGHTS <= free:
        return
    dtype = str(outline.dtype).removeprefix("torch.")
    raise NotEnoughMemory(
        f"the weights of {model_path} take {weights / _GIB:.2f} GiB in {dtype}, and {free / _GIB:.2f} GiB of memory "
        f"are free{limit_note()}: at least {(weights + _BESIDE_WEIGHTS - free) / _GIB:.2f} GiB more are needed. "
        "Raise the limit, choose a smaller --dtype, or a smaller model"
    )


def limit_note() -> str:
    """Return " of the … GiB that the container may use", where there is such a limit; else ""."""
    limit = memory_limit().limit
    return "" if math.isinf(limit) else f" of the {limit / _GIB:.2f} GiB that the container may use"


def outline_of(hf_config: Any, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel | None:
    """Return a model on the meta device, whose tensors have a size but no data; None if it cannot be built there.

    Args:
        hf_config: the model's configuration.
        dtype: of its weights.
        trust_remote_code: run code that comes with it.
    """
    try:
        with torch.device("meta"):
            outline: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                hf_config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    # The model's own code may do anything; the error of loading it is the one to report.
    except Exception:  # noqa: BLE001  # boundary: third-party code
        return None
    return outline


def _available_memory(meminfo: Path) -> int:
    """Return the bytes available without swapping: free memory, and the page cache."""
    for line in meminfo.read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
