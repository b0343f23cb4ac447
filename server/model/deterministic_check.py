"""Tries at start whether a model computes each token by itself, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from logitship.server.refusals import StartError

from .model_runner import Chunk, ModelRunner

_LENGTHS = (41, 12, 5)
"""Of the sequences that are computed, in tokens: together some tiles, and more than a thread takes at a time."""

_LONGEST_CHUNK = 9
_LONGEST_DECODE = 4
"""Longer chunks of a sequence that has begun are handed to the model as chunks of a prompt."""

Step = list[tuple[int, int]]
"""The chunks of a forward pass: (sequence, number of tokens)."""


class NotDeterministic(StartError):
    """Something made a logit differ. The message says what."""


def check_determinism(runner: ModelRunner) -> None:
    """Compute random tokens in one pass, then in other company, chunks, order and slots, and compare the bits.

    Leaves the keys and values of these tokens behind in the cache. Takes some ten forward passes.

    Raises:
        NotDeterministic: a logit of some token differs.
    """
    rng = random.Random(0)
    shape = runner.cache.shape
    vocab_size = runner.model.config.get_text_config().vocab_size
    lengths = [min(length, shape.max_len) for length in _LENGTHS[: shape.num_slots]]
    sequences = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    slots = [number * (shape.num_slots - 1) // max(1, len(lengths) - 1) for number in range(len(lengths))]
    whole = list(enumerate(lengths))
    expected = _logits(runner, sequences, slots, [whole])
    ways: dict[str, list[Step]] = {
        "each sequence by itself": [[chunk] for chunk in whole],
        "in other chunks and other company": [*_random_steps(lengths, rng)],
    }
    for way, steps in ways.items():
        slots = slots[1:] + slots[:1]
        for want, got in zip(expected, _logits(runner, sequences, slots, steps), strict=True):
            differing = (want != got).any(dim=-1).nonzero()[:, 0].tolist()
            if differing:
                raise NotDeterministic(_message(runner, way, differing, float((want - got).abs().max())))


def _logits(runner: ModelRunner, sequences: list[list[int]], slots: list[int], steps: list[Step]) -> list[torch.Tensor]:
    """Of each sequence, the logits of all its tokens: float32 [tokens, vocab]."""
    done = [0] * len(sequences)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        decode = [(i, count) for i, count in step if done[i] > 0 and count <= _LONGEST_DECODE]
        prefill = [chunk for chunk in step if chunk not in decode]
        of_decode, of_prefill = (
            [Chunk(slots[i], done[i], sequences[i][done[i] : done[i] + count]) for i, count in chunks]
            for chunks in (decode, prefill)
        )
        counts = [count for _, count in (*decode, *prefill)]
        # Asked for in reverse, so that a token's place in the LM head is not that in the layers.
        logits = runner.forward(of_decode, of_prefill, [*reversed(range(sum(counts)))]).flip(0)
        for (i, count), part in zip((*decode, *prefill), torch.split(logits, counts), strict=True):
            parts[i].append(part)
            done[i] += count
    return [torch.cat(of_sequence) for of_sequence in parts]


def _random_steps(lengths: list[int], rng: random.Random) -> Iterator[Step]:
    """Chunks of random lengths, in random order, until all tokens are computed. Some sequences pause in between."""
    left = list(lengths)
    while any(left):
        going = [i for i, tokens in enumerate(left) if tokens and (rng.random() < 0.7 or tokens == sum(left))]
        rng.shuffle(going)
        step = [(i, rng.randint(1, min(_LONGEST_CHUNK, left[i]))) for i in going]
        for i, count in step:
            left[i] -= count
        if step:
            yield step


def _message(runner: ModelRunner, way: str, differing: list[int], difference: float) -> str:
    return (
        f"--enable-deterministic-inference: {type(runner.model).__name__} in {runner.dtype} on {runner.device}, with "
        f"{torch.get_num_threads()} threads, cannot be served so. The logits of {len(differing)} tokens (the first at "
        f"position {differing[0]} of its sequence) are others when computed {way} than all in one pass: they differ "
        f"by up to {difference:.1e}. Leave the flag out, or try another --dtype, or another number of threads "
        "(OMP_NUM_THREADS)"
    )
