from __future__ import annotations

import copy
import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from logitship.builtin_processors import CiteFromPromptLogitsProcessor
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow

EOS, VOCAB_SIZE = 2, 48


def expected_boosts(params: dict[str, Any], prompt: list[int], output: list[int]) -> list[float]:
    """Reference implementation, token by token."""
    boosts = []
    for token in range(VOCAB_SIZE):
        boost = params["boost_factor"] if token in prompt or (token == EOS and params["boost_eos"]) else 0.0
        pairs = set(pairwise(prompt))
        boosts.append(boost + params["conditional_boost_factor"] * (bool(output) and (output[-1], token) in pairs))
    return boosts


def test_rows_with_different_prompts(zoo_model: ModelView, make_row: MakeRow) -> None:
    """Includes tokens outside the vocabulary, and sequences that are added, removed and forked."""
    rng, processor = random.Random(0), CiteFromPromptLogitsProcessor()
    rows: list[dict[str, Any]] = []
    for _ in range(150):
        if len(rows) < 5 and rng.random() < 0.5:
            params = {
                "boost_factor": rng.choice([1.0, -2.0]),
                "boost_eos": rng.random() < 0.5,
                "conditional_boost_factor": rng.choice([0.0, 4.0]),
            }
            prompt = rng.choices([*range(10), 60], k=rng.randrange(20))
            rows.append(
                make_row(params, prompt, [], eos_token_ids={EOS}, tokenizer=zoo_model.tokenizer, vocab_size=VOCAB_SIZE)
            )
        if rows and rng.random() < 0.1:
            rows.append(copy.deepcopy(rng.choice(rows)))
        if rows and rng.random() < 0.2:
            del rows[rng.randrange(len(rows))]
        got = processor(torch.zeros(len(rows), VOCAB_SIZE), rows)
        for row, boosts in zip(rows, got.tolist(), strict=True):
            request = row["__req__"]
            assert boosts == expected_boosts(row, request.origin_input_ids, request.output_ids)
            request.output_ids.append(rng.randrange(12))


def test_forbidden_tokens_stay_forbidden(zoo_model: ModelView, make_row: MakeRow) -> None:
    row = make_row({"boost_factor": 5}, [1], [], eos_token_ids={EOS}, tokenizer=zoo_model.tokenizer)
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    assert CiteFromPromptLogitsProcessor()(logits, [row]).isneginf().all()


def test_prompt_with_the_numbers_of_images(zoo_model: ModelView, make_row: MakeRow) -> None:
    """As SGLang makes them. Multiplied by the size of the vocabulary, this one is 3 times that, in 64 bits."""
    image = (1 << 60) + 3
    params = {"boost_factor": 1.0, "boost_eos": False, "conditional_boost_factor": 4.0}
    row = make_row(params, [7, image, 5], [3], eos_token_ids={EOS}, tokenizer=zoo_model.tokenizer)
    boosts = CiteFromPromptLogitsProcessor()(torch.zeros(1, VOCAB_SIZE), [row])[0]
    assert boosts.nonzero().flatten().tolist() == [5, 7]
    assert boosts[5] == 1.0


def test_no_rows_is_a_noop() -> None:
    logits = torch.zeros(0, VOCAB_SIZE)
    assert CiteFromPromptLogitsProcessor()(logits, []) is logits
    assert CiteFromPromptLogitsProcessor()(logits) is logits


def test_accepts(zoo_model: ModelView) -> None:
    prepared = CiteFromPromptLogitsProcessor().prepare(None, zoo_model)
    assert (prepared.boost_factor, prepared.conditional_boost_factor, prepared.eos_token_id) == (1.0, 0.0, EOS)
    without = ModelView(VOCAB_SIZE, frozenset(), None)
    assert CiteFromPromptLogitsProcessor().prepare({"boost_eos": False}, without).eos_token_id is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"boost_factor": None}, "boost_factor: expected a number from -1e9 to 1e9, got None"),
        ({"boost_eos": 1}, "boost_eos: expected true or false, got 1"),
        ({"conditional_boost_factor": float("inf")}, "conditional_boost_factor: expected a number from -1e9 to 1e9"),
        ({}, "boost_eos: the model has no EOS token"),
    ],
)
def test_refuses(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        CiteFromPromptLogitsProcessor().prepare(params, ModelView(VOCAB_SIZE, frozenset(), None))
