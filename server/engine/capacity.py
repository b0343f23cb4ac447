"""How long sequences may be, so that the cache fits into memory."""

from __future__ import annotations

import logging
import os

import torch
from transformers import PreTrainedModel

from logitship.server.config import ServerConfig

from .model_runner import cache_shape

logger = logging.getLogger(__name__)


class CacheTooLarge(Exception):
    """The cache that was asked for does not fit. The message says what would."""


def max_model_len(config: ServerConfig, model: PreTrainedModel, model_len: int) -> int:
    """The longest sequence to serve: what the operator says, else the model's length, or what fits into memory.

    Raises:
        CacheTooLarge: the operator's length does not fit, or is longer than the model was made for.
    """
    wanted = config.max_model_len or model_len
    if wanted > model_len:
        raise CacheTooLarge(f"--max-model-len {wanted} is longer than the model's own length, {model_len}")
    per_token = cache_shape(model, config.max_num_seqs, 1).nbytes(model.dtype)
    free = _free_bytes(model.device)
    fits = int(free * config.mem_fraction_static) // per_token
    if wanted <= fits:
        return wanted
    if config.max_model_len is not None or fits < 1:
        raise CacheTooLarge(
            f"a cache for {config.max_num_seqs} sequences of {wanted} tokens takes "
            f"{wanted * per_token / 2**30:.1f} GiB, more than {config.mem_fraction_static:.0%} of the {free / 2**30:.1f} GiB that are free: lower "
            f"--max-model-len (at most {fits}) or --max-num-seqs, or raise --mem-fraction-static"
        )
    logger.warning(
        "serving sequences of up to %d tokens, not the model's %d: the cache for %d of them would not fit into memory",
        fits,
        model_len,
        config.max_num_seqs,
    )
    return fits


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
