from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors import DRYLogitsProcessor
from logitship.builtin_processors.parts.text_tokens import MAX_BOOST
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from tests.builtin_processors.sampling_rows import MakeRow
from tests.helpers.random_cases import random_seeds

NONE = ModelView(100, frozenset(), None)
WORDS = ["a", "b", "a:", ":", "x\n", "\n", ".\n\n", "\n\n#", "##", "#", "q", "-a", "aaa"]


@pytest.fixture(scope="module")
def model() -> ModelView:
    """A model whose tokens are `WORDS`, and single characters."""
    characters = [each for each in sorted(set("".join(WORDS))) if each not in WORDS]
    texts = [*WORDS, *characters]
    backend = Backend(models.WordLevel({text: token for token, text in enumerate(texts)}, unk_token="q"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    return ModelView(len(texts) + 3, frozenset(), tokenizer)


def penalties(
    history: list[int], multiplier: float, base: float, allowed: int, last_n: int, breakers: set[int]
) -> dict[int, float]:
    """Compute DRY as in text-generation-webui, whose breakers are single tokens, without its limit of 50 tokens."""
    tokens = history[-last_n:] if last_n > 0 else history if last_n < 0 else []
    lengths: dict[int, int] = {}
    for place, token in enumerate(tokens[1:]):
        length = 0
        while length <= place and tokens[place - length] == tokens[-1 - length] not in breakers:
            length += 1
        if length >= allowed and token not in breakers:
            lengths[token] = max(length, lengths.get(token, 0))
    return {token: min(multiplier * base ** (length - allowed), MAX_BOOST) for token, length in lengths.items()}


@random_seeds(600, shares_fixtures=True)
def test_equals_the_original(seed: int, make_row: MakeRow, model: ModelView) -> None:
    """Sequences of several rows grow by one or several tokens a step, fork, and lose tokens."""
    generator = random.Random(seed)
    processor = DRYLogitsProcessor()
    size = model.vocab_size
    texts = generator.sample([":", "q", "##"], k=generator.randrange(3))
    breakers = {token for token, word in enumerate(WORDS) if any(text in word for text in texts)}
    params: dict[str, Any] = {
        "dry_multiplier": generator.choice([0.8, 1e8]),
        "dry_base": generator.choice([1.0, 1.75, 30.0]),
        "dry_allowed_length": generator.choice([1, 2, 3]),
        "dry_penalty_last_n": generator.choice([-1, 0, 6, 20]),
        "dry_sequence_breakers": texts,
    }
    if "##" in texts:
        params["dry_sequence_breakers"] = [each for each in texts if each != "##"] + ["##"]
    rows = []
    for _ in range(3):
        prompt = generator.choices(range(6), k=generator.randrange(1, 12))
        rows.append(make_row(params, prompt, [], vocab_size=size, tokenizer=model.tokenizer))
    for _ in range(15):
        logits = torch.randn(len(rows), size)
        logits[:, 1] = -torch.inf
        edited = processor(logits.clone(), rows)
        expected = logits.clone()
        for place, row in enumerate(rows):
            history = row["__req__"].origin_input_ids + row["__req__"].output_ids
            found = penalties(
                history,
                params["dry_multiplier"],
                params["dry_base"],
                params["dry_allowed_length"],
                params["dry_penalty_last_n"],
                breakers,
            )
            for token, penalty in found.items():
                expected[place, token] -= penalty
        assert torch.allclose(edited, expected, rtol=1e-5)
        assert edited[:, 1].isneginf().all()
        for row in rows:
            output, chance = row["__req__"].output_ids, generator.random()
            if chance < 0.1:
                del output[generator.randrange(len(output) + 1) :]
            elif chance < 0.2 and output:
                output[-1] = generator.randrange(6)
            else:
                output += generator.choices(range(6), k=generator.choice([1, 1, 4]))
        if generator.random() < 0.1:
            rows[0] = copy.deepcopy(rows[0])


def test_breakers_are_found_in_the_vocabulary(model: ModelView) -> None:
    """As llama.cpp's `get_overlapping_token_sequences` finds them."""
    ids = {word: token for token, word in enumerate(WORDS)}
    prepared = DRYLogitsProcessor().prepare({"dry_multiplier": 1, "dry_sequence_breakers": ["\n\n"]}, model)
    assert prepared.breakers.single == {ids[".\n\n"], ids["\n\n#"]}
    longer = [(ids["x\n"], ids["\n"]), (ids["\n"], ids["\n"])]
    for sequence in longer:
        assert prepared.breakers.shortest_at_end(sequence) == 2
    assert prepared.breakers.shortest_at_end((ids["#"], ids["\n"])) == 0


def test_defaults_are_llama_cpps(model: ModelView) -> None:
    prepared = DRYLogitsProcessor().prepare({"dry_multiplier": 0.8}, model)
    assert prepared.allowed_length == 2
    assert prepared.window is None
    assert prepared.penalties[:3].tolist() == pytest.approx([0.8, 0.8 * 1.75, 0.8 * 1.75**2])
    texts = ["\n", ":", '"', "*"]
    assert prepared.breakers.single == {
        token for token, word in enumerate(WORDS) if any(text in word for text in texts)
    }


@pytest.mark.parametrize(
    ("params", "highest"),
    [
        ({"dry_multiplier": 1, "dry_base": 1.0}, 1.0),
        ({"dry_multiplier": 1e9, "dry_base": 1e9}, MAX_BOOST),
        ({"dry_multiplier": 1e-300, "dry_base": 1.0000001}, 0.0),
        ({"dry_multiplier": 2, "dry_base": 1.75}, MAX_BOOST),
        ({"dry_multiplier": 0}, 0.0),
    ],
)
def test_highest_penalty(params: dict[str, Any], highest: float) -> None:
    prepared = DRYLogitsProcessor().prepare({**params, "dry_sequence_breakers": []}, NONE)
    assert prepared.penalties[-1] == pytest.approx(highest)
    assert len(prepared.penalties) == prepared.longest - prepared.allowed_length + 1
    assert len(prepared.penalties) <= 100_001


def test_greedy_requests_are_penalized(make_row: MakeRow) -> None:
    params = {"dry_multiplier": 1.0, "dry_sequence_breakers": []}
    row = make_row(params, [1, 2, 3, 1, 2], [], sampling_params=SamplingParams(temperature=0))
    edited = DRYLogitsProcessor()(torch.zeros(1, 100), [row])
    assert edited.nonzero().tolist() == [[0, 3]]
    assert edited[0, 3] == -1


def test_tokens_outside_the_vocabulary_are_not_penalized(make_row: MakeRow) -> None:
    """SGLang's numbers for images."""
    params = {"dry_multiplier": 1.0, "dry_sequence_breakers": []}
    row = make_row(params, [1, 2, 10**12, 1, 2], [])
    assert torch.equal(DRYLogitsProcessor()(torch.zeros(1, 100), [row]), torch.zeros(1, 100))


def test_step_reads_the_new_tokens_only(make_row: MakeRow, counting_list: Any) -> None:
    params = {"dry_multiplier": 1.0, "dry_sequence_breakers": []}
    prompt, output = counting_list(range(5000)), counting_list(range(5000))
    row, processor = make_row(params, prompt, output), DRYLogitsProcessor()
    processor(torch.zeros(1, 100), [row])
    prompt.reads = output.reads = 0
    output.append(7)
    began = time.thread_time()
    processor(torch.zeros(1, 100), [row])
    assert time.thread_time() - began < 0.01
    assert prompt.reads + output.reads <= 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "dry_multiplier: missing from custom_params, expected a number from 0 to 1e9"),
        ({"dry_multiplier": -1}, "dry_multiplier: expected a number from 0 to 1e9, got -1"),
        ({"dry_multiplier": 1, "dry_base": 0.9}, "dry_base: expected a number from 1 to 1e9, got 0.9"),
        ({"dry_multiplier": 1, "dry_allowed_length": 0}, "dry_allowed_length: expected an integer from 1 to"),
        ({"dry_multiplier": 1, "dry_penalty_last_n": -2}, "dry_penalty_last_n: expected an integer, -1 or greater"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": "\n"}, "dry_sequence_breakers: expected a list of up to 64"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": [""]}, "dry_sequence_breakers: expected a list of up to 64"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["a" * 41]}, "dry_sequence_breakers: expected a list of up"),
        ({"dry_multiplier": 1}, "dry_sequence_breakers: the model has no tokenizer to read a text with"),
    ],
)
def test_refuses(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        DRYLogitsProcessor().prepare(params, NONE)
