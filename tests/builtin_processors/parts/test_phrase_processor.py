"""Common behavior of the three phrase processors: states are restored with removed tokens, and fork."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.builtin_processors import (
    ForceLastPhraseLogitsProcessor,
    PreventHallucinationLogitsProcessor,
    TriggerPhraseLogitsProcessor,
)
from logitship.builtin_processors.parts.phrase_processor import PhraseProcessor
from logitship.builtin_processors.parts.step_states import STEPS_KEPT
from logitship.sampler.processors.request_view import ModelView
from tests.helpers.clock import Clock

EOS, TRIGGER = 2, 37
ALPHABET = 8

PROCESSORS: dict[str, tuple[type[PhraseProcessor], dict[str, Any]]] = {
    "force_last_phrase": (ForceLastPhraseLogitsProcessor, {"phrase": "So final answer"}),
    "prevent_hallucination": (
        PreventHallucinationLogitsProcessor,
        {"phrase": "Thanks bye", "minp": 0.3, "tolerate": 2},
    ),
    "trigger_phrase": (
        TriggerPhraseLogitsProcessor,
        {"phrase": "a b c", "trigger_token_phrase": "fig", "trigger_time": 9, "trigger_count": 3},
    ),
}


def logits_after(output: list[int]) -> torch.Tensor:
    """Return logits [vocab] that depend on the tokens only."""
    rng = random.Random(str(output))
    logits = torch.tensor([rng.gauss(0, 1) for _ in range(48)])
    logits[rng.choice([EOS, TRIGGER, 20, 21])] = rng.choice([1.0, 6.0])
    return logits


class Sequence:
    def __init__(self, name: str, model: ModelView, make_row: Callable[..., dict[str, Any]]) -> None:
        cls, self.params = PROCESSORS[name]
        self.clock = Clock(0.0)  # one second per output token, so that removing tokens moves the time back
        self.processor = cls(self.clock) if cls is TriggerPhraseLogitsProcessor else cls()
        self.model, self.make_row = model, make_row

    def row(self, output: list[int], state: dict[str, Any]) -> dict[str, Any]:
        return self.make_row(
            self.params, [1], output, state, eos_token_ids=self.model.eos_token_ids, tokenizer=self.model.tokenizer
        )

    def step(self, output: list[int], state: dict[str, Any]) -> torch.Tensor:
        self.clock.now = float(len(output))
        logits = logits_after(output).unsqueeze(0)
        return self.processor(logits, [self.row(output, state)])[0]

    def anew(self, output: list[int]) -> torch.Tensor:
        """Return the result for a sequence that never had other tokens."""
        state: dict[str, Any] = {}
        for length in range(len(output)):
            self.step(output[:length], state)
        return self.step(output, state)


@pytest.fixture(params=PROCESSORS)
def sequence(request: pytest.FixtureRequest, zoo_model: ModelView, make_row: Callable[..., dict[str, Any]]) -> Sequence:
    return Sequence(request.param, zoo_model, make_row)


@pytest.mark.slow
def test_states_are_restored_with_removed_tokens(sequence: Sequence) -> None:
    rng = random.Random(0)
    output, state, forced = list[int](), dict[str, Any](), 0
    for _ in range(150):
        got = sequence.step(output, state)
        assert torch.equal(got, sequence.anew(output))
        forced += not torch.equal(got, logits_after(output))
        if rng.random() < 0.2:
            del output[max(0, len(output) - rng.randrange(1, 6)) :]
        elif len(output) < 45:
            output.append(rng.randrange(ALPHABET))
    assert forced > 10


def test_repeated_step_gives_same_result(sequence: Sequence) -> None:
    output, state = list[int](), dict[str, Any]()
    for token in range(30):
        assert torch.equal(sequence.step(output, state), sequence.step(output, state))
        output.append(token % ALPHABET)


@pytest.mark.slow
def test_forks(sequence: Sequence) -> None:
    rng = random.Random(1)
    for _ in range(15):
        output, state = list[int](), dict[str, Any]()
        for _ in range(rng.randrange(1, 12)):
            sequence.step(output, state)
            output.append(rng.randrange(ALPHABET))
        for _ in range(2):
            fork, its_state = list(output), copy.deepcopy(state)
            for _ in range(8):
                assert torch.equal(sequence.step(fork, its_state), sequence.anew(fork))
                fork.append(rng.randrange(ALPHABET))


def test_continues_from_oldest_state(zoo_model: ModelView, make_row: Callable[..., dict[str, Any]]) -> None:
    sequence, state = Sequence("force_last_phrase", zoo_model, make_row), dict[str, Any]()
    ends = torch.zeros(1, 48)
    ends[0, EOS] = 5.0
    for length in range(STEPS_KEPT + 10):  # the phrase is written in the first steps
        sequence.processor(ends.clone(), [sequence.row([1] * length, state)])
    assert torch.equal(sequence.processor(ends.clone(), [sequence.row([1] * 3, state)]), ends)


def test_changing_batch_composition(sequence: Sequence) -> None:
    rng = random.Random(2)
    outputs: list[list[int]] = [[] for _ in range(6)]
    states: list[dict[str, Any]] = [{} for _ in outputs]
    alone: list[dict[str, Any]] = [{} for _ in outputs]
    for step in range(120):
        length = min(map(len, outputs))  # those of one length: there is one clock
        members = [number for number, output in enumerate(outputs) if len(output) == length and rng.random() < 0.8]
        if step % 3:
            rng.shuffle(members)
        sequence.clock.now = float(length)
        logits = torch.stack([logits_after(outputs[number]) for number in members]) if members else torch.empty(0, 48)
        got = sequence.processor(logits, [sequence.row(outputs[number], states[number]) for number in members])
        for row, number in zip(got, members, strict=True):
            assert torch.equal(row, sequence.step(outputs[number], alone[number]))
            outputs[number].append(rng.randrange(ALPHABET))
    assert min(map(len, outputs)) > 10


def test_no_rows_is_a_noop(sequence: Sequence) -> None:
    logits = torch.zeros(0, 48)
    assert sequence.processor(logits, []) is logits
    assert sequence.processor(logits) is logits


def test_phrase_continues_after_forbidden_token(zoo_model: ModelView, make_row: Callable[..., dict[str, Any]]) -> None:
    sequence = Sequence("force_last_phrase", zoo_model, make_row)
    phrase = zoo_model.tokenizer.encode("So final answer", add_special_tokens=False)
    state: dict[str, Any] = {}
    sampled = []
    for length in range(len(phrase)):
        logits = torch.arange(48.0).unsqueeze(0)
        logits[0, EOS] = 100.0
        logits[0, phrase[2]] = -torch.inf
        sampled.append(int(sequence.processor(logits, [sequence.row([1] * length, state)]).argmax()))
    assert sampled == [*phrase[:2], EOS, *phrase[3:]]
