"""The effect of vLLM's scheduling on when a step's calls may begin."""

from __future__ import annotations

from typing import Any


def begins_early(vllm_config: Any) -> bool:
    """Return whether calls may begin before the model computes.

    That takes two things. The last tokens are known: with asynchronous scheduling, vLLM plans a step before it has
    them. And vLLM samples what it plans: an instance that only encodes images samples nothing.
    """
    encoders = vllm_config.ec_transfer_config
    only_encodes = encoders is not None and encoders.is_encode_only
    return not vllm_config.scheduler_config.async_scheduling and not only_encodes
