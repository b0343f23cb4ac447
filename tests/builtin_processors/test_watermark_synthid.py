"""SynthID's tournament: transformers' edited logits, sampling limits, repeated contexts, and no change on average."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from logitship.builtin_processors import WatermarkKey, WatermarkSynthidLogitsProcessor
from logitship.builtin_processors.watermark_synthid import hold_tournament
from logitship.builtin_processors.watermarks.context_history import ContextHistory
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.watermarks import WATERMARK_KEY

MakeRow = Callable[..., dict[str, Any]]
VOCAB = 140
MODEL = ModelView(VOCAB, frozenset(), None)


def original(ngram_len: int, depth: int = 30, history: int = 1024) -> Any:
    """Return transformers' processor, for one batch of sequences."""
    config = SynthIDTextWatermarkingConfig(
        ngram_len=ngram_len,
        keys=WATERMARK_KEY.synthid_keys(depth),
        context_history_size=history,
        sampling_table_seed=WATERMARK_KEY.sampling_table_seed,
    )  # type: ignore[no-untyped-call]
    return config.construct_processor(VOCAB, "cpu")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("ngram_len", "depth", "history"), [(2, 30, 1024), (5, 30, 1024), (3, 7, 4), (2, 3, 0)])
def test_rows_are_those_of_transformers(ngram_len: int, depth: int, history: int, make_row: MakeRow) -> None:
    """Step by step, with contexts that repeat: the same probabilities."""
    peer = original(ngram_len, depth, history)
    processor = WatermarkSynthidLogitsProcessor(WATERMARK_KEY)
    params = {"ngram_len": ngram_len, "depth": depth, "context_history_size": history}
    generator = random.Random(0)
    outputs: list[list[int]] = [[] for _ in range(3)]
    rows = [make_row(params, [9], output, vocab_size=VOCAB) for output in outputs]
    num_unmarked = 0
    for _ in range(40):
        logits = torch.randn(3, VOCAB) * 3
        inputs = torch.tensor([[9, *output] for output in outputs])
        found, expected = processor(logits.clone(), rows), peer(inputs, logits)
        # transformers returns logarithms of probabilities, not below the least float.
        torch.testing.assert_close(found.softmax(1), expected.softmax(1), atol=1e-6, rtol=1e-4)
        num_unmarked += (found == logits).all(1).sum().item()
        for output in outputs:
            output.append(generator.choice([3, 4]))
    assert (num_unmarked > 0) == (history > 0)


LIMITS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 12},
    {"top_k": 1},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.6, "top_k": 30, "top_p": 0.6},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("candidates", [60, 256])
def test_tournament_follows_the_limits(candidates: int, make_row: MakeRow) -> None:
    """The probabilities after temperature are those of transformers after its warpers, whose order is ours."""
    processor = WatermarkSynthidLogitsProcessor(WATERMARK_KEY)
    for seed, limits in enumerate(LIMITS * 3):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
        sampling = SamplingParams(**limits)
        row = make_row({"candidates": candidates}, [1], [], vocab_size=VOCAB, sampling_params=sampling)
        found = processor(logits.clone(), [row]) / sampling.temperature
        expected, inputs = logits.clone(), torch.tensor([[1]])
        warpers: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
        warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
        warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k > 0 else []
        warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        for warper in warpers:
            expected = warper(inputs, expected)
        marked = original(5)(inputs, expected).softmax(1)
        if candidates >= VOCAB or warpers[1:]:
            torch.testing.assert_close(found.softmax(1), marked, atol=1e-5, rtol=1e-3)
            assert torch.equal(found.isneginf(), expected.isneginf())
        else:
            # The others keep their logits, and so, with the candidates' sum, their probabilities.
            others = logits.argsort(1, descending=True)[:, candidates:]
            assert torch.equal(found.gather(1, others), logits.gather(1, others) / sampling.temperature)
            before = (logits / sampling.temperature).softmax(1).gather(1, others)
            torch.testing.assert_close(found.softmax(1).gather(1, others), before)


def test_batch_equals_alone(make_row: MakeRow) -> None:
    processor = WatermarkSynthidLogitsProcessor(WATERMARK_KEY)
    variants: list[dict[str, Any]] = [{}, {"ngram_len": 3}, {"depth": 5}, {"candidates": 20}]
    rows = [
        make_row(params, [1], [2, 3], vocab_size=VOCAB, sampling_params=SamplingParams(**limits))
        for params in variants
        for limits in [*LIMITS, {"temperature": 0.0}]
    ]
    logits = torch.randn(len(rows), VOCAB) * 3
    logits[4, 10:] = -torch.inf
    logits[7, :] = -torch.inf
    together = processor(logits.clone(), rows)
    for row, params in enumerate(rows):
        params["__req__"].state.clear()
        alone = processor(logits[row : row + 1].clone(), [params])[0]
        assert torch.equal(alone, together[row]), row
        greedy = params["__req__"].sampling_params.temperature == 0
        assert not greedy or torch.equal(alone, logits[row])
    assert together[4, 10:].isneginf().all()
    assert together[7].isneginf().all()


def test_finite_logits_stay_finite(make_row: MakeRow) -> None:
    """Without limits, a token that has lost every match can still be forced."""
    processor = WatermarkSynthidLogitsProcessor(WATERMARK_KEY)
    for scale in (0.0, 1.0, 30.0):
        logits = torch.randn(4, VOCAB) * scale
        rows = [make_row({"depth": 64}, [1], [row], vocab_size=VOCAB) for row in range(4)]
        assert processor(logits, rows).isfinite().all()


def test_tokens_keep_their_probabilities_on_average(make_row: MakeRow) -> None:
    """Over many keys: the mark does not make any token more likely."""
    logits = torch.randn(1, VOCAB) * 2
    total = torch.zeros(1, VOCAB)
    squares = torch.zeros(1, VOCAB)
    number = 1500
    for index in range(number):
        processor = WatermarkSynthidLogitsProcessor(WatermarkKey(index.to_bytes(16, "little")))
        row = make_row({"depth": 4}, [1], [5, 6, 7, 8], vocab_size=VOCAB)
        found = processor(logits.clone(), [row]).softmax(1)
        total += found
        squares += found**2
    mean = total / number
    deviation = ((squares / number - mean**2) / number).sqrt()
    assert ((mean - logits.softmax(1)).abs() < 5 * deviation + 1e-7).all()


def test_matches_of_two_players() -> None:
    """The closed form equals a tournament of 2 ** layers players, on average."""
    torch.manual_seed(0)
    probabilities, g_values = torch.tensor([[0.5, 0.2, 0.2, 0.1]]), torch.randint(0, 2, (3, 1, 4)).float()
    players = probabilities.multinomial(8 * 40_000, replacement=True).view(-1, 8)
    for layer in g_values[:, 0]:
        pairs = players.view(len(players), -1, 2)
        first, second = layer[pairs[..., 0]], layer[pairs[..., 1]]
        coins = torch.rand(first.shape) < 0.5
        wins = (first > second) | ((first == second) & coins)
        players = torch.where(wins, pairs[..., 0], pairs[..., 1])
    frequencies = players.flatten().bincount(minlength=4) / len(players)
    assert torch.allclose(hold_tournament(probabilities, g_values)[0], frequencies, atol=0.01)


def test_context_history_follows_removals_and_copies() -> None:
    generator = random.Random(3)
    for width in (1, 2, 4):
        history, output = ContextHistory(width), list[int]()
        for _ in range(400):
            choice = generator.random()
            if choice < 0.2 and output:
                del output[generator.randrange(len(output)) :]
            elif choice < 0.3 and output:
                output[-1] = generator.randrange(3)
            elif choice < 0.4:
                history = copy.deepcopy(history)
            else:
                output.append(generator.randrange(3))
            padded = [0] * width + output
            contexts = [tuple(padded[step : step + width]) for step in range(len(output) + 1)]
            same = [step for step in range(len(output)) if contexts[step] == contexts[-1]]
            _, steps_ago = history.follow(output)
            assert steps_ago == (len(output) - same[-1] if same else None)


def test_step_reads_new_tokens_only(make_row: MakeRow, counting_list: Callable[..., Any]) -> None:
    processor = WatermarkSynthidLogitsProcessor(WATERMARK_KEY)
    output = counting_list(range(VOCAB))
    row = make_row({}, [1], output, vocab_size=VOCAB)
    processor(torch.randn(1, VOCAB), [row])
    output.append(3)
    output.reads = 0
    processor(torch.randn(1, VOCAB), [row])
    assert output.reads <= 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ngram_len": 1}, "ngram_len: expected an integer from 2 to 16, got 1"),
        ({"depth": 65}, "depth: expected an integer from 1 to 64, got 65"),
        ({"candidates": 0}, "candidates: expected an integer from 1 to 4096"),
        ({"context_history_size": -1}, "context_history_size: expected an integer, 0 or greater"),
    ],
)
def test_invalid_params(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        WatermarkSynthidLogitsProcessor(WATERMARK_KEY).prepare(params, MODEL)


def test_without_a_key() -> None:
    with pytest.raises(ValueError, match="no watermark key: its operator sets one with --watermark-key-file"):
        WatermarkSynthidLogitsProcessor().prepare({}, MODEL)
