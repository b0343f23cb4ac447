"""Division of the memory for keys and values: the longest sequence, and the size of the prefix cache."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from logitship.server.config import ServerConfig
from logitship.server.refusals import StartError

from .fused_decoder import can_fuse, packed_bytes
from .kv_cache import BLOCK_SIZE, block_bytes
from .memory_check import free_main_memory, limit_note
from .model_runner import cache_shape

logger = logging.getLogger(__name__)


_PREFIX_SHARE = 10
"""The prefix cache takes 1 / `_PREFIX_SHARE` of the memory, unless the operator sets its size."""


class CacheTooLarge(StartError):
    """The requested cache does not fit into memory. The message says what would."""


def free_bytes(config: ServerConfig, model: PreTrainedModel) -> float:
    """Return the free memory, without what the model runner is going to use for packed weights.

    Args:
        config: with the operator's settings.
        model: the loaded model.
    """
    free = _free_bytes(model.device)
    is_fused = config.model_impl == "auto" and not config.enable_deterministic_inference and can_fuse(model)
    return max(0, free - packed_bytes(model)) if is_fused else free


def max_model_len(config: ServerConfig, model: PreTrainedModel, model_len: int, free: float) -> int:
    """Return the longest sequence to serve: the operator's setting, else the model's length, or what fits into memory.

    Args:
        config: with the operator's settings.
        model: the loaded model.
        model_len: the longest sequence that the model was trained for.
        free: the free memory in bytes, see `free_bytes`.

    Raises:
        CacheTooLarge: the operator's length does not fit, or is longer than `model_len`; or not one token fits.
    """
    wanted = config.max_model_len or model_len
    if wanted > model_len:
        raise CacheTooLarge(f"--max-model-len {wanted} is longer than the model's own length, {model_len}")
    per_token = cache_shape(model, config.max_num_seqs, 1).nbytes(model.dtype)
    fits = (_cache_bytes(config, free) - _prefix_cache_bytes(config, free)) // per_token
    if wanted <= fits:
        return wanted
    if config.max_model_len is not None or fits < 1:
        lower_length = f"--max-model-len (at most {fits}), " if fits > 0 else ""
        limit = limit_note() if model.device.type == "cpu" else ""
        raise CacheTooLarge(
            f"a cache for {config.max_num_seqs} sequences of {wanted} tokens takes "
            f"{wanted * per_token / 2**30:.1f} GiB; together with the prefix cache, which takes "
            f"{_prefix_cache_bytes(config, free) / 2**30:.1f} GiB, that is more than {config.mem_fraction_static:.0%} "
            f"of the {free / 2**30:.1f} GiB that are free{limit}: lower {lower_length}--max-num-seqs or "
            "--prefix-cache-bytes, or raise --mem-fraction-static"
        )
    logger.warning(
        "serving sequences of up to %d tokens, not the model's %d: the cache for %d of them would not fit into memory",
        fits,
        model_len,
        config.max_num_seqs,
    )
    return fits


def prefix_cache_blocks(config: ServerConfig, model: PreTrainedModel, model_len: int, free: float) -> int:
    """Return the number of blocks of the prefix cache: what fits into its memory, at most what the slots hold.

    Args:
        config: with the operator's settings.
        model: the loaded model.
        model_len: the longest sequence that is served.
        free: the free memory in bytes before the cache of the slots was allocated, see `free_bytes`.
    """
    fits = _prefix_cache_bytes(config, free) // block_bytes(cache_shape(model, 1, 1), model.dtype)
    return min(fits, config.max_num_seqs * model_len // BLOCK_SIZE)


def _cache_bytes(config: ServerConfig, free: float) -> int:
    """Return the bytes for keys and values."""
    return int(free * config.mem_fraction_static)


def _prefix_cache_bytes(config: ServerConfig, free: float) -> int:
    given = config.prefix_cache_bytes
    return _cache_bytes(config, free) // _PREFIX_SHARE if given is None else given


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return free_main_memory()
