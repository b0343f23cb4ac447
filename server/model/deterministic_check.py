"""Test at start that a model is batch-invariant: that it computes each token independently, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from logitship.server.refusals import StartError

from .model_runner import Chunk, ModelRunner

_LENGTHS = (41, 12, 5)
"""Tokens of the test sequences: together several tiles, and more than one thread's share."""

_MAX_CHUNK = 9
_MAX_DECODE = 4
"""Longer chunks of a started sequence are computed as prompt chunks."""

Step = list[tuple[int, int]]
"""The chunks of a forward pass: (sequence, number of tokens)."""


class NotDeterministic(StartError):
    """A logit depends on the rest of the batch. The message says on what."""


def check_determinism(runner: ModelRunner) -> None:
    """Compute random tokens in one pass, then in other batches, chunks, orders and slots, and compare the bits.

    Overwrites the keys and values in the cache. Takes about ten forward passes.

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
        "in other chunks and batches": [*_random_steps(lengths, rng)],
    }
    for way, steps in ways.items():
        slots = slots[1:] + slots[:1]
        for want, got in zip(expected, _logits(runner, sequences, slots, steps), strict=True):
            differing = (want != got).any(dim=-1).nonzero()[:, 0].tolist()
            if differing:
                raise NotDeterministic(_message(runner, way, differing, float((want - got).abs().max())))


def _logits(runner: ModelRunner, sequences: list[list[int]], slots: list[int], steps: list[Step]) -> list[torch.Tensor]:
    """Return the logits of all tokens of each sequence: float32 [tokens, vocab]."""
    done = [0] * len(sequences)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        decode = [(i, count) for i, count in step if done[i] > 0 and count <= _MAX_DECODE]
        prefill = [chunk for chunk in step if chunk not in decode]
        of_decode, of_prefill = (
            [Chunk(slots[i], done[i], sequences[i][done[i] : done[i] + count]) for i, count in chunks]
            for chunks in (decode, prefill)
        )
        counts = [count for _, count in (*decode, *prefill)]
        # In reverse order, so that a token's row in the LM head differs from its row in the layers.
        logits = runner.logits(of_decode, of_prefill, [*reversed(range(sum(counts)))]).flip(0)
        for (i, count), part in zip((*decode, *prefill), torch.split(logits, counts), strict=True):
            parts[i].append(part)
            done[i] += count
    return [torch.cat(each) for each in parts]


def _random_steps(lengths: list[int], rng: random.Random) -> Iterator[Step]:
    """Yield chunks of random lengths in random order until all tokens are computed. Some sequences skip steps."""
    left = list(lengths)
    while any(left):
        running = [i for i, tokens in enumerate(left) if tokens and (rng.random() < 0.7 or tokens == sum(left))]
        rng.shuffle(running)
        step = [(i, rng.randint(1, min(_MAX_CHUNK, left[i]))) for i in running]
        for i, count in step:
            left[i] -= count
        if step:
            yield step


def _message(runner: ModelRunner, way: str, differing: list[int], difference: float) -> str:
    return (
        f"--enable-deterministic-inference: {type(runner.model).__name__} in {runner.dtype} on {runner.device}, with "
        f"{torch.get_num_threads()} threads, is not batch-invariant. The logits of {len(differing)} tokens (the first "
        f"at position {differing[0]} of its sequence) differ when computed {way} instead of in one pass, by "
        f"up to {difference:.1e}. Leave the flag out, or try another --dtype, or another number of threads "
        "(OMP_NUM_THREADS)"
    )
