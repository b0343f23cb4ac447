"""The seven processors of logits-processor-zoo, compared with the originals on random sequences."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.builtin_processors import (
    CiteFromPromptLogitsProcessor,
    ForceLastPhraseLogitsProcessor,
    GenLengthLogitsProcessor,
    MaxTimeLogitsProcessor,
    MultipleChoiceLogitsProcessor,
    PreventHallucinationLogitsProcessor,
    TriggerPhraseLogitsProcessor,
)
from logitship.builtin_processors.base import BuiltinProcessor
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow
from tests.helpers.clock import Clock
from tests.helpers.zoo import set_clock

EOS, FULL_STOP, NEW_LINE, TRIGGER = 2, 6, 4, 37
VOCAB_SIZE = 48
PHRASES = ["Thanks", "a fig b", "...I know.", "\n\nReferences:\n", "So final answer", "</think>"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return set_clock(monkeypatch)


def length_params(rng: random.Random) -> dict[str, Any]:
    target = {"boost_token_str": rng.choice(["</think>", ".", "fig"])} if rng.random() < 0.5 else {}
    return {"complete_sentences": rng.random() < 0.5, **target}


PARAMS: dict[type[BuiltinProcessor], Callable[[random.Random], dict[str, Any]]] = {
    CiteFromPromptLogitsProcessor: lambda rng: {
        "boost_factor": rng.choice([1.0, -0.5, 3.25, 0.0]),
        "boost_eos": rng.random() < 0.5,
        "conditional_boost_factor": rng.choice([0.0, 2.0, -1.5]),
    },
    ForceLastPhraseLogitsProcessor: lambda rng: {"phrase": rng.choice(PHRASES)},
    # p = 0: the two variants disagree in the first step, see test_gen_length.py.
    GenLengthLogitsProcessor: lambda rng: {
        **length_params(rng),
        "boost_factor": rng.uniform(-5, 5),
        "p": rng.choice([1, 2, 3]),
    },
    MaxTimeLogitsProcessor: lambda rng: {**length_params(rng), "max_time": rng.choice([0, 0.25, 1.5, 2.0])},
    MultipleChoiceLogitsProcessor: lambda rng: {
        "choices": rng.choice([["1", "2", "3", "4"], ["a", "b"], ["c", "a", "1"]]),
        "delimiter": rng.choice([".", ")", ":"]),
        "boost_first_words": rng.choice([0.0, 0.5, -1.0]),
    },
    PreventHallucinationLogitsProcessor: lambda rng: {
        "phrase": rng.choice(PHRASES),
        "minp": rng.choice([0.1, 0.3, 0.5, 0.9]),
        "tolerate": rng.choice([0, 1, 3]),
    },
    TriggerPhraseLogitsProcessor: lambda rng: {
        "phrase": rng.choice(PHRASES),
        "trigger_count": rng.choice([0, 1, 2, 5]),
        "trigger_after": rng.random() < 0.5,
        **rng.choice(
            [
                {"trigger_token_phrase": "fig"},
                {"trigger_time": 1.5},
                {"trigger_token_phrase": "fig", "trigger_time": 2.0},
            ]
        ),
    },
}


def random_prompt(rng: random.Random) -> list[int]:
    """Return words, and some questions with choices."""
    prompt = rng.choices(range(VOCAB_SIZE), k=rng.randrange(1, 6))
    for number in range(rng.randrange(4)):
        line = [rng.choice([4, 5]), rng.choice([12, 16]) + number, rng.choice([6, 7, 8]), rng.randrange(VOCAB_SIZE)]
        prompt += line + rng.choices(range(VOCAB_SIZE), k=rng.randrange(3))
    return prompt


def random_logits(rng: random.Random) -> torch.Tensor:
    """Return logits [vocab]: smooth, with ties, flat, or with a dominant token; sometimes with forbidden tokens."""
    logits = torch.tensor([rng.gauss(0, 2) for _ in range(VOCAB_SIZE)])
    kind = rng.randrange(4)
    if kind == 0:
        logits = logits.round()
    if kind == 1:
        logits[rng.choice([EOS, TRIGGER, 20])] = 7.0
    if rng.random() < 0.05:
        logits[:] = 0.5
    if rng.random() < 0.1:
        logits[rng.sample(range(VOCAB_SIZE), 3)] = -torch.inf
    return logits


class Original:
    """A processor of the zoo with one sequence."""

    def __init__(
        self,
        processor: type[BuiltinProcessor],
        variant: str,
        params: dict[str, Any],
        model: ModelView,
        prompt: list[int],
    ) -> None:
        cls = getattr(importlib.import_module(f"logits_processor_zoo.{variant}"), processor.__name__)
        batch_size = {}
        if variant == "transformers" and "batch_size" in cls.__init__.__code__.co_varnames:
            batch_size = {"batch_size": 1}
        self._processor = cls(tokenizer=model.tokenizer, **params, **batch_size)
        self._is_vllm = variant == "vllm"
        self._prompt = prompt

    def __call__(self, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if self._is_vllm:
            result: torch.Tensor = self._processor(self._prompt, output, logits.clone())
            return result
        result = self._processor(torch.tensor([self._prompt + output]), logits.clone().unsqueeze(0))
        return result[0]


@pytest.mark.parametrize("variant", ["transformers", "vllm"])
@pytest.mark.parametrize("processor", PARAMS, ids=lambda processor: processor.name)
def test_equals_the_original(
    processor: type[BuiltinProcessor], variant: str, clock: Clock, zoo_model: ModelView, make_row: MakeRow
) -> None:
    """Batches of sequences with different parameters. The original has an object per sequence."""
    rng = random.Random(f"{processor.name} {variant}")
    timed = processor in (MaxTimeLogitsProcessor, TriggerPhraseLogitsProcessor)
    compared = edited = 0
    for _ in range(25):
        ours = processor(clock) if timed else processor()  # type: ignore[call-arg]
        clock.now = 1e6
        rows = [
            make_row(
                PARAMS[processor](rng),
                random_prompt(rng),
                [],
                vocab_size=48,
                eos_token_ids={EOS},
                tokenizer=zoo_model.tokenizer,
            )
            for _ in range(4)
        ]
        originals = []
        for row in rows:
            params, prompt = (
                {name: value for name, value in row.items() if name != "__req__"},
                row["__req__"].origin_input_ids,
            )
            originals.append(Original(processor, variant, params, zoo_model, prompt))
        for _ in range(14):
            logits = torch.stack([random_logits(rng) for _ in rows])
            got = ours(logits.clone(), rows)
            for row, original, before, after in zip(rows, originals, logits, got, strict=True):
                output = row["__req__"].output_ids
                expected = original(output, before)
                assert not after.isnan().any()
                assert not after.isposinf().any()
                if not (expected.isnan().any() or expected.isposinf().any()):  # else it enforced a forbidden token
                    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)
                    compared += 1
                    edited += not torch.equal(after, before)
                output.append(
                    rng.choice([EOS, FULL_STOP, NEW_LINE, rng.randrange(VOCAB_SIZE), rng.randrange(VOCAB_SIZE)])
                )
            clock.now += rng.choice([0, 0.25, 0.5])
    assert compared > 1000
    assert edited > 100
