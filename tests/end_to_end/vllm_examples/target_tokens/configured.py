"""A wrapped callable whose constructor reads the engine's vocabulary size and device."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from .request_level import OnlyToken


class TokenFromTheEnd(AdapterLogitsProcessor):
    """Forces the last token of the vocabulary for a request with `{"token_from_the_end": 1}`.

    With `"only_on": "cuda"`, only on that type of device.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        is_pin_memory: bool,
        argument: str = "token_from_the_end",
    ) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.device_type = device.type
        self.argument = argument

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        extra_args = params.extra_args or {}
        if self.argument not in extra_args or extra_args.get("only_on", self.device_type) != self.device_type:
            return None
        return OnlyToken(self.vocab_size - extra_args[self.argument], steps=None)
