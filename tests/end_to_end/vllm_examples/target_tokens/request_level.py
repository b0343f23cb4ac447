"""Callables for one request, of both signatures, and adapters that make batch processors of them."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

logger = init_logger(__name__)


class OnlyToken:
    """Forces one token for the first `steps` tokens of the output."""

    def __init__(self, token_id: int, steps: int | None) -> None:
        self.token_id = token_id
        self.steps = steps

    def __call__(self, output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if self.steps is not None and len(output_token_ids) >= self.steps:
            return logits
        kept = logits[self.token_id].item()
        logits[:] = -torch.inf
        logits[self.token_id] = kept
        return logits


class OnlyTokenForRequests(AdapterLogitsProcessor):
    """Applies `OnlyToken` to requests with `{"only_token": 42}` and optionally `"only_token_steps"`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        extra_args = params.extra_args or {}
        token_id = extra_args.get("only_token")
        if token_id is None:
            return None
        if not isinstance(token_id, int):
            logger.warning("only_token must be a token id, not %r: it is ignored", token_id)
            return None
        return OnlyToken(token_id, extra_args.get("only_token_steps"))


def repeat_the_prompt(prompt_token_ids: list[int], output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Repeat the prompt as the output."""
    repeated = torch.full_like(logits, -torch.inf)
    repeated[prompt_token_ids[len(output_token_ids) % len(prompt_token_ids)]] = 0.0
    return repeated


class RepeatThePromptForRequests(AdapterLogitsProcessor):
    """Applies `repeat_the_prompt` to requests with `{"repeat_the_prompt": true}`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        return repeat_the_prompt if (params.extra_args or {}).get("repeat_the_prompt") else None
