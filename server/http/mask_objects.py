"""Sampling masks in responses: as lists of token ids, or packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from logitship.sampler.ops.sampling_masks import RowMask
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.requests.messages import Continuation, GenerationChunk
from logitship.server.requests.sampling_records import sampling_record
from logitship.server.schemas.response_schemas import SamplingMaskFields, SamplingRecordObject

from .json_responses import finite


def mask_fields(params: SamplingParams, vocab_size: int, part: Continuation | GenerationChunk) -> SamplingMaskFields:
    """Return the masks of a part of an output, as the OpenAI routes do; empty if none were requested."""
    if not params.return_sampling_mask:
        return {}
    if params.sampling_mask_format == "packed":
        return {"sampling_record": packed_masks(params, vocab_size, part)}
    return {
        "sampling_mask": listed_tokens(part.masks),
        "sampling_logprobs": listed_logprobs(params, part.masks),
    }


def listed_tokens(masks: Sequence[RowMask]) -> list[list[int]]:
    """Return the tokens of masks of form `KEPT`."""
    return [mask.tokens.tolist() for mask in masks]


def listed_logprobs(params: SamplingParams, masks: Sequence[RowMask]) -> list[float] | list[list[float]]:
    """Return the log-probabilities of the output tokens, or of all tokens of their masks, as the request asks."""
    found: list[list[float]] = [mask.logprobs.tolist() for mask in masks]
    lists = [[finite(logprob) for logprob in each] for each in found]
    return lists if params.sampling_logprobs_mode == "support" else [logprob for (logprob,) in lists]


def packed_masks(params: SamplingParams, vocab_size: int, part: Continuation | GenerationChunk) -> SamplingRecordObject:
    """Return the record of a part of an output: of the whole output so far, or of the new tokens of a chunk."""
    start = part.completion_tokens - len(part.token_ids)
    record = sampling_record(params.temperature, vocab_size, part.token_ids, part.masks, start)
    return cast("SamplingRecordObject", record.to_json())
