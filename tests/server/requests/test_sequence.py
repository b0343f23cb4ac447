"""Chunks of a sequence are the same whether they are emitted after each token or later."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from logitship.sampler.sampling_params import SamplingParams
from logitship.server.requests.messages import FinishReason, GenerationChunk
from logitship.server.requests.sequence import Sequence
from logitship.server.tokenizer import Tokenizer

EOS = 1
STOP = 40


def made(tokenizer: Tokenizer, chunks: list[GenerationChunk], max_tokens: int, **params: Any) -> Sequence:
    values = SamplingParams(max_tokens=max_tokens, eos_token_ids={EOS}, **params)
    return Sequence("r", 0, frozenset("r"), [5, 6], values, max_tokens, tokenizer, chunks.append)


def random_params(rng: random.Random) -> Iterator[tuple[str, Any]]:
    yield "min_tokens", rng.choice([0, 0, 1, 4])
    yield "include_stop_str_in_output", rng.choice([True, False])
    if rng.random() < 0.3:
        yield "stop_token_ids", [STOP]
    if rng.random() < 0.3:
        yield "stop", ["ab", " the"]
    if rng.random() < 0.3:
        yield "stop_regex", [r"[a-f]\w+"]


@pytest.mark.parametrize("seed", range(200))
def test_late_chunks_are_the_same(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    params = dict(random_params(rng))
    max_tokens = rng.randint(5, 15)
    at_once: list[GenerationChunk] = []
    late: list[GenerationChunk] = []
    first, second = made(tokenizer, at_once, max_tokens, **params), made(tokenizer, late, max_tokens, **params)
    while first.finish_reason is None:
        token = rng.choice([EOS, STOP, *(rng.randrange(4, 200) for _ in range(10))])
        first.append(token, None)
        first.emit()
        second.append(token, None)
        assert second.finish_reason == first.finish_reason
        if rng.random() < 0.3:
            second.emit()
    assert late == at_once
    assert second.output_token_ids == first.output_token_ids


def test_token_that_ends_nothing_waits_for_emit(tokenizer: Tokenizer) -> None:
    chunks: list[GenerationChunk] = []
    sequence = made(tokenizer, chunks, 10)
    sequence.append(7, None)
    sequence.append(8, None)
    assert not chunks
    sequence.emit()
    sequence.emit()
    assert [(chunk.token_ids, chunk.completion_tokens) for chunk in chunks] == [([7], 1), ([8], 2)]


def test_waiting_chunks_come_before_the_end(tokenizer: Tokenizer) -> None:
    chunks: list[GenerationChunk] = []
    sequence = made(tokenizer, chunks, 10)
    sequence.append(7, None)
    sequence.finish(FinishReason("abort"))
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [([7], None), ([], FinishReason("abort"))]


def test_fork_has_the_waiting_tokens_too(tokenizer: Tokenizer) -> None:
    chunks: list[GenerationChunk] = []
    forked: list[GenerationChunk] = []
    sequence = made(tokenizer, chunks, 10)
    sequence.append(7, None)
    fork = sequence.fork(forked.append)
    for each in (fork, sequence):
        each.emit()
    assert forked == chunks != []
