"""Makes the sequences of an admitted request."""

from __future__ import annotations

import dataclasses
import random

from logitship.sampler.processors.processor_use import ProcessorUse
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.metrics.engine_stats import ModelInfo
from logitship.server.requests.messages import GenerationRequest
from logitship.server.requests.sequence import Sequence, Sink
from logitship.server.tokenizer import Tokenizer

from .beam_group import BeamGroup

_SEEDS = 1 << 64
_SEED_STEP = 0x9E3779B97F4A7C15
"""Distance between the seeds of a request's continuations: 2^64 divided by the golden ratio, as in SplitMix64."""


class SequenceFactory:
    """Makes the sequences of requests.

    Args:
        random_seed: seed of the seeds of requests that have none.
    """

    def __init__(self, model: ModelInfo, tokenizer: Tokenizer, random_seed: int | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._random = random.Random(random_seed)

    def make(self, request: GenerationRequest, index: int, uses: list[ProcessorUse], sink: Sink) -> Sequence:
        """Make one of the sequences that a request starts with; for a beam search, its lead beam.

        Args:
            request: the request.
            index: which continuation.
            uses: its processors.
            sink: takes its chunks.
        """
        params = request.sampling_params
        capacity = self._model.max_model_len - len(request.prompt_token_ids)
        sequence = Sequence(
            rid=request.rid,
            index=index,
            names=_names(request, index),
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=dataclasses.replace(
                params,
                seed=continuation_seed(self._seed_of(params), index),
                logprobs=0 if request.ranks and params.logprobs is None else params.logprobs,
                eos_token_ids=self._model.eos_token_ids,
                processors=tuple(uses),
            ),
            max_tokens=capacity if params.max_tokens is None else params.max_tokens,
            tokenizer=self._tokenizer,
            sink=sink,
            tenant=request.tenant,
        )
        if request.beam_search is None:
            return sequence
        return BeamGroup(
            request.beam_search, sequence, request.n, self._model.vocab_size, shown_logprobs=params.logprobs, sink=sink
        ).lead

    def _seed_of(self, params: SamplingParams) -> int:
        return self._random.getrandbits(64) if params.seed is None else params.seed


def continuation_seed(seed: int, index: int) -> int:
    """Return the seed of a continuation, from 0 to 2^64 - 1. It does not depend on how many continuations there are.

    Args:
        seed: the request's seed, which is also that of continuation 0.
        index: which continuation.
    """
    return (seed + index * _SEED_STEP) % _SEEDS


def _names(request: GenerationRequest, index: int) -> frozenset[str]:
    """Return the ids that abort a continuation: its request's, its batch's, and its own if there are several."""
    names = {request.rid, request.batch_rid or request.rid}
    return frozenset(names | {f"{request.rid}_{index}"} if request.num_started > 1 else names)
