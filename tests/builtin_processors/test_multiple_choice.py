from __future__ import annotations

from typing import Any

import pytest
import torch

from logitship.builtin_processors import MultipleChoiceLogitsProcessor
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow

ONE, TWO, DOT, NEW_LINE, CAMERA, SCREEN = 12, 13, 6, 4, 20, 21
PROMPT = [NEW_LINE, ONE, DOT, CAMERA, NEW_LINE, TWO, DOT, SCREEN]


def answer(params: dict[str, Any], prompt: list[int], logits: torch.Tensor, model: ModelView, make_row: MakeRow) -> int:
    row = make_row(params, prompt, [], eos_token_ids=model.eos_token_ids, tokenizer=model.tokenizer, vocab_size=48)
    got = MultipleChoiceLogitsProcessor()(logits.unsqueeze(0).clone(), [row])[0]
    assert not got.isnan().any()
    return int(got.argmax())


def test_first_words_boost_their_choices(zoo_model: ModelView, make_row: MakeRow) -> None:
    logits = torch.zeros(48)
    logits[ONE], logits[SCREEN] = 1.0, 4.0
    assert answer({}, PROMPT, logits, zoo_model, make_row) == ONE
    assert answer({"boost_first_words": 0.5}, PROMPT, logits, zoo_model, make_row) == TWO


@pytest.mark.parametrize(("boost", "word"), [(0.5, SCREEN), (-0.5, CAMERA)])
def test_forbidden_first_word_is_ignored(boost: float, word: int, zoo_model: ModelView, make_row: MakeRow) -> None:
    """Its -inf would lower the logit of its choice, or raise it if the boost is negative."""
    logits = torch.zeros(48)
    logits[TWO], logits[word] = 1.0, -torch.inf
    assert answer({"boost_first_words": boost}, PROMPT, logits, zoo_model, make_row) == TWO


def test_forbidden_choice_stays_forbidden(zoo_model: ModelView, make_row: MakeRow) -> None:
    logits = torch.zeros(48)
    logits[ONE], logits[SCREEN] = -torch.inf, 9.0
    assert answer({"choices": ["1", "2"]}, PROMPT, logits, zoo_model, make_row) == TWO


def test_first_word_outside_the_vocabulary(zoo_model: ModelView, make_row: MakeRow) -> None:
    logits = torch.zeros(48)
    logits[TWO] = 1.0
    prompt = [NEW_LINE, ONE, DOT, 60, NEW_LINE, TWO, DOT, SCREEN]
    assert answer({"boost_first_words": 1.0}, prompt, logits, zoo_model, make_row) == TWO


def test_choice_after_an_image(zoo_model: ModelView, make_row: MakeRow) -> None:
    """SGLang's prompts have numbers there that the tokenizer cannot decode."""
    logits = torch.zeros(48)
    logits[TWO] = 1.0
    prompt = [(1 << 61) + 1_000_000, *PROMPT[1:]]
    assert answer({"boost_first_words": 1.0}, prompt, logits, zoo_model, make_row) == TWO


def test_prompt_is_read_once(zoo_model: ModelView, make_row: MakeRow) -> None:
    row = make_row({"boost_first_words": 1.0}, list(PROMPT), [], tokenizer=zoo_model.tokenizer, vocab_size=48)
    logits = torch.arange(48.0).unsqueeze(0)
    processor = MultipleChoiceLogitsProcessor()
    first = processor(logits.clone(), [row])
    row["__req__"].origin_input_ids = None
    row["__req__"].output_ids.append(ONE)
    assert torch.equal(processor(logits.clone(), [row]), first)


def test_rows_with_different_choices(zoo_model: ModelView, make_row: MakeRow) -> None:
    lists = (["1", "2"], ["a"], ["b", "c", "d", "4"])
    rows = [make_row({"choices": choices}, PROMPT, [], tokenizer=zoo_model.tokenizer) for choices in lists]
    got = MultipleChoiceLogitsProcessor()(torch.arange(48.0).repeat(3, 1), rows)
    assert got.argmax(1).tolist() == [TWO, 16, 19]
    for row, choices in zip(got, lists, strict=True):
        assert int((row == 0).sum()) == 48 - len(choices)


def test_no_rows_is_a_noop() -> None:
    logits = torch.zeros(0, 48)
    assert MultipleChoiceLogitsProcessor()(logits, []) is logits
    assert MultipleChoiceLogitsProcessor()(logits) is logits


def test_defaults_equal_the_original(zoo_model: ModelView) -> None:
    prepared = MultipleChoiceLogitsProcessor().prepare(None, zoo_model)
    assert (prepared.choices, prepared.delimiter, prepared.boost_first_words) == ((12, 13, 14, 15), DOT, 0.0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"choices": []}, r"choices: expected a list of 1 to 1024 texts of one token each, got \[\]"),
        ({"choices": "1"}, "choices: expected a list of 1 to 1024 texts of one token each, got '1'"),
        ({"choices": ["1", 2]}, "choices: expected a string of one token, got 2"),
        ({"choices": ["a b c"]}, "choices: expected a string of one token, but 'a b c' is 5 tokens of this model"),
        ({"delimiter": ".)"}, r"delimiter: expected a string of one token, but '\.\)' is 2 tokens of this model"),
        ({"boost_first_words": "1"}, "boost_first_words: expected a number from -1e9 to 1e9, got '1'"),
    ],
)
def test_refuses(params: dict[str, Any], message: str, zoo_model: ModelView) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        MultipleChoiceLogitsProcessor().prepare(params, zoo_model)
