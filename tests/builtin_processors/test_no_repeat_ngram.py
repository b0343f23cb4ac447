from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.builtin_processors import DeepseekOCRNoRepeatNGramLogitProcessor
from logitship.builtin_processors.no_repeat_ngram import NGramIndex
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow, Sglang

CountingList = Callable[..., Any]
VOCAB_SIZE = 8
IMAGE = 1_000_000 + (1 << 61)


def banned(logits: torch.Tensor) -> list[int]:
    return logits[0].isinf().nonzero().flatten().tolist()


def random_params(generator: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {
        "ngram_size": generator.choice([1, 1, 2, 2, 2, 3, 3, 4, 7, 0, None, -2]),
        "window_size": generator.choice([1, 2, 3, 5, 8, 8, 13, 1000, 1000, 0, None, -1]),
    }
    if generator.random() < 0.5:
        params["whitelist_token_ids"] = generator.choice([None, [], [1], [0, 2, 2, VOCAB_SIZE + 5]])
    return params


def test_equals_sglang_on_every_history(make_row: MakeRow, sglang: Sglang) -> None:
    """Sequences that grow, shrink and fork, several per batch; windows shorter than n, n longer than the history."""
    generator = random.Random(1)
    cases, results = [], []
    for _ in range(80):
        params = [random_params(generator) for _ in range(3)]
        alphabet = range(generator.choice([2, 3, VOCAB_SIZE]))
        prompts = [generator.choices(alphabet, k=generator.randrange(1, 12)) for _ in range(3)]
        outputs: list[list[int]] = [[], [], []]
        states: list[dict[str, Any]] = [{}, {}, {}]
        for _ in range(12):
            logits = torch.randn(3, VOCAB_SIZE)
            rows: list[dict[str, Any]] = [
                {"params": params[i], "prompt": prompts[i], "output": list(outputs[i])} for i in range(3)
            ]
            cases.append({"logits": logits.tolist(), "rows": rows})
            entries = [make_row(**row, state=states[i]) for i, row in enumerate(rows)]
            results.append(DeepseekOCRNoRepeatNGramLogitProcessor()(logits, entries).tolist())
            for i in range(3):
                if generator.random() < 0.15:
                    del outputs[i][generator.randrange(len(outputs[i]) + 1) :]
                else:
                    outputs[i] += generator.choices(alphabet, k=generator.randrange(1, 4))
            if generator.random() < 0.1:  # sequence 1 becomes a copy of sequence 0
                params[1], prompts[1], outputs[1] = params[0], prompts[0], list(outputs[0])
                states[1] = copy.deepcopy(states[0])

    theirs = sglang("DeepseekOCRNoRepeatNGramLogitProcessor", cases)
    differences = [case for case, mine, other in zip(cases, results, theirs, strict=True) if mine != other]
    assert differences == []
    edited = sum(mine != case["logits"] for case, mine in zip(cases, results, strict=True))
    assert edited > len(cases) // 3, "the random histories hardly ever repeat"


def test_parameters_that_are_not_validated_equal_sglangs(make_row: MakeRow, sglang: Sglang) -> None:
    """As those of a subclass that a request sends."""
    params: list[dict[str, Any]] = [
        {"ngram_size": size, "window_size": window, "whitelist_token_ids": whitelist}
        for size, window in [(1, 9), ("1", 9.0), (2.5, "9"), ("x", 9), (1, [9])]
        for whitelist in (["3"], [3.5], 5, ["x", 3], "3", {"3": 0})
    ]
    cases = [
        {"logits": [[0.0] * VOCAB_SIZE], "rows": [{"params": each, "prompt": [2, 3, 2], "output": [3, 3]}]}
        for each in params
    ]
    results = [
        DeepseekOCRNoRepeatNGramLogitProcessor()(
            torch.zeros(1, VOCAB_SIZE), [make_row(each, prompt=[2, 3, 2], output=[3, 3])]
        ).tolist()
        for each in params
    ]
    assert results == sglang("DeepseekOCRNoRepeatNGramLogitProcessor", cases)


@pytest.mark.parametrize(
    ("ngram_size", "prompt", "expected"),
    [(1, [5, 100_000_000], [3, 5]), (2, [5, 3, VOCAB_SIZE, 3, 6], [6]), (2, [3, VOCAB_SIZE], [])],
)
def test_prompt_tokens_beyond_the_logits(
    make_row: MakeRow, ngram_size: int, prompt: list[int], expected: list[int]
) -> None:
    """A server may represent an image by such ids."""
    row = make_row({"ngram_size": ngram_size, "window_size": 100}, prompt, [3])
    assert banned(DeepseekOCRNoRepeatNGramLogitProcessor()(torch.zeros(1, VOCAB_SIZE), [row])) == expected


def test_rejected_drafts_leave_no_trace(make_row: MakeRow) -> None:
    """A rolled-back state equals one that never saw the drafts."""
    generator = random.Random(2)
    processor = DeepseekOCRNoRepeatNGramLogitProcessor()
    params = {"ngram_size": 3, "window_size": 40}
    prompt, output, state = [0, 1], list[int](), dict[str, Any]()
    for _ in range(200):
        snapshot = copy.deepcopy(state)
        draft = output + generator.choices(range(3), k=3)
        processor(torch.zeros(1, VOCAB_SIZE), [make_row(params, prompt, draft, state)])
        state = snapshot
        output += generator.choices(range(3), k=1)
        rolled_back = processor(torch.zeros(1, VOCAB_SIZE), [make_row(params, prompt, list(output), state)])
        fresh = processor(torch.zeros(1, VOCAB_SIZE), [make_row(params, prompt, list(output))])
        assert torch.equal(rolled_back, fresh)


def test_step_only_reads_new_tokens(make_row: MakeRow, counting_list: CountingList) -> None:
    generator = random.Random(3)
    prompt = counting_list(generator.choices(range(VOCAB_SIZE), k=5000))
    output, state = counting_list(), dict[str, Any]()
    params = {"ngram_size": 4, "window_size": 100_000}
    processor = DeepseekOCRNoRepeatNGramLogitProcessor()
    processor(torch.zeros(1, VOCAB_SIZE), [make_row(params, prompt, output, state)])
    prompt.reads = 0
    for step in range(100):
        output.append(step % VOCAB_SIZE)
        processor(torch.zeros(1, VOCAB_SIZE), [make_row(params, prompt, output, state)])
    assert prompt.reads + output.reads <= 100 * 4  # the new token, and n - 1 before it


def test_removing_tokens_does_not_reread_history(make_row: MakeRow, counting_list: CountingList) -> None:
    prompt, state = counting_list([1, 2, 3, 4] * 1000), dict[str, Any]()
    params = {"ngram_size": 3, "window_size": 100_000}
    processor = DeepseekOCRNoRepeatNGramLogitProcessor()
    processor(torch.zeros(1, VOCAB_SIZE), [make_row(params, prompt, [5, 6, 7], state)])
    prompt.reads = 0
    processor(torch.zeros(1, VOCAB_SIZE), [make_row(params, prompt, [5], state)])
    assert prompt.reads <= 3


@given(
    st.integers(1, 4),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 2), max_size=12)), max_size=12),
)
def test_index_covers_the_window(ngram_size: int, more: int, changes: list[tuple[int, list[int]]]) -> None:
    """Tokens are removed, also more than the window holds, and others appended."""
    window_size = ngram_size + more
    index, prompt, output = NGramIndex(ngram_size, window_size), [0, 1, 0, 1], list[int]()
    for taken_back, new in changes:
        del output[max(0, len(output) - taken_back) :]
        for token in [None, *new]:
            output += [] if token is None else [token]
            index.follow(prompt, output)
            window = (prompt + output)[-window_size:]
            ngrams = [window[start : start + ngram_size] for start in range(len(window) - ngram_size + 1)]
            prefix = window[len(window) - ngram_size + 1 :] if len(window) >= ngram_size else None
            assert index.followers() == {ngram[-1] for ngram in ngrams if ngram[:-1] == prefix}
            assert len(index) == len({tuple(ngram[:-1]) for ngram in ngrams})


@pytest.mark.parametrize("ngram_size", [1, 2])
def test_prompt_with_tokens_outside_the_vocabulary(ngram_size: int, make_row: MakeRow) -> None:
    """SGLang's numbers for images; a row without them in the same batch is not affected."""
    processor = DeepseekOCRNoRepeatNGramLogitProcessor()
    params = {"ngram_size": ngram_size, "window_size": 20}
    prompts = [7, IMAGE, IMAGE, VOCAB_SIZE, 7, 3, 7], [7, 3, 7]
    rows = [make_row(params, prompt, [], vocab_size=VOCAB_SIZE) for prompt in prompts]
    first, second = processor(torch.zeros(2, VOCAB_SIZE), rows)
    assert torch.equal(first, second)
    assert banned(first.unsqueeze(0)) == ([3, 7] if ngram_size == 1 else [3])


def test_ngrams_leave_the_window(make_row: MakeRow) -> None:
    processor = DeepseekOCRNoRepeatNGramLogitProcessor()
    history = [1, 2, 0, 0, 0, 1]
    for window_size, expected in ((6, [2]), (5, [])):
        row = make_row({"ngram_size": 2, "window_size": window_size}, history, [])
        assert banned(processor(torch.zeros(1, VOCAB_SIZE), [row])) == expected


def test_two_sizes_on_one_sequence(make_row: MakeRow) -> None:
    processor, state = DeepseekOCRNoRepeatNGramLogitProcessor(), dict[str, Any]()
    history = [1, 2, 3, 4, 2]
    for ngram_size, expected in ((2, [3]), (3, []), (2, [3])):
        row = make_row({"ngram_size": ngram_size, "window_size": 99}, history, [], state)
        assert banned(processor(torch.zeros(1, VOCAB_SIZE), [row])) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"ngram_size": 3, "window_size": 90},
        {"ngram_size": 0, "window_size": 0, "whitelist_token_ids": None},
        {"ngram_size": 30, "window_size": 9, "whitelist_token_ids": [0, 7, 7]},
    ],
)
def test_accepts(params: dict[str, Any]) -> None:
    DeepseekOCRNoRepeatNGramLogitProcessor().prepare(params, ModelView(VOCAB_SIZE, frozenset(), None))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "ngram_size: missing from custom_params, expected an integer, 0 or greater"),
        ({"ngram_size": 3}, "window_size: missing"),
        ({"ngram_size": None, "window_size": 1}, "ngram_size: expected an integer, 0 or greater, got None"),
        ({"ngram_size": "3", "window_size": 1}, "ngram_size: expected an integer, 0 or greater, got '3'"),
        ({"ngram_size": 3, "window_size": -1}, "window_size: expected an integer, 0 or greater, got -1"),
        ({"ngram_size": 3, "window_size": True}, "window_size: expected an integer.*got True"),
        ({"ngram_size": 3, "window_size": 2.5}, r"window_size: expected an integer.*got 2\.5"),
        ({"ngram_size": 3, "window_size": 9, "whitelist_token_ids": 5}, "whitelist_token_ids: expected a list"),
        ({"ngram_size": 3, "window_size": 9, "whitelist_token_ids": ["a"]}, "whitelist_token_ids: expected integers"),
        ({"ngram_size": 3, "window_size": 9, "whitelist_token_ids": [8]}, r"token id 8 is outside.*\(0 to 7\)"),
    ],
)
def test_refuses(params: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepseekOCRNoRepeatNGramLogitProcessor().prepare(params, ModelView(VOCAB_SIZE, frozenset(), None))
