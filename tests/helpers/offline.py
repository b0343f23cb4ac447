"""Calls of an `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from logitship import CustomLogitProcessor
from logitship.server.offline.llm import LLM
from logitship.server.offline.outputs import RequestOutput
from logitship.server.offline.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FOREVER = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
"""Five hundred steps of the tiny model."""


def quiet(llm: LLM, prompts: Any, *params: Any) -> list[RequestOutput]:
    """Generate without a progress bar."""
    return llm.generate(prompts, *params, use_tqdm=False)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return the tokens of the first continuation of each prompt."""
    return [output.outputs[0].token_ids for output in outputs]


def count_up(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[100 + len(output_token_ids)] += 1000
    return logits


class Force(CustomLogitProcessor):
    """Forces `token_id`."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list, strict=True):
            row[:] = -torch.inf
            row[params["token_id"]] = 0.0
        return logits
