from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors import TokenizerThinkingBudgetLogitProcessor
from logitship.builtin_processors.any_model_thinking_budget import TokenizerThinkingBudgetParams
from logitship.sampler.processors.request_view import ModelView
from logitship.server.tokenizer import Tokenizer
from tests.builtin_processors.conftest import MakeRow, Sglang
from tests.builtin_processors.test_thinking_budget import (
    END,
    NEW_LINE,
    START,
    TOKEN_IDS,
    VOCAB_SIZE,
    CountingList,
    SmallThinkingBudget,
    random_tokens,
)

ONE_TOKEN_EACH = {"start": [START], "end": [END], "newline": [NEW_LINE]}
SMALL_MODEL = ModelView(VOCAB_SIZE, frozenset(), None)


def hf_tokenizer(tokens: Sequence[str], *, sentence_piece: bool = False) -> PreTrainedTokenizerFast:
    """One token per character; unknown ones are `<unk>`."""
    backend = TokenizersTokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[], unk_token="<unk>")
    )
    if sentence_piece:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace()
    else:
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def read(model: ModelView, **params: Any) -> TokenizerThinkingBudgetParams:
    return TokenizerThinkingBudgetParams.read({"thinking_budget": 1, **params}, model)


def forced(logits: torch.Tensor) -> list[int | None]:
    """Return the only token that each row allows, with logit 0, or None."""
    tokens: list[int | None] = []
    for row in logits:
        (allowed,) = torch.isfinite(row).nonzero(as_tuple=True)
        tokens.append(int(allowed) if len(allowed) == 1 and row[allowed] == 0 else None)
        assert tokens[-1] is not None or len(allowed) == len(row)
    return tokens


def begun(tokens: Sequence[int], marker: Sequence[int]) -> int:
    """Return how many tokens of `marker` match at the end of the tokens."""
    return max(n for n in range(len(marker) + 1) if list(tokens[len(tokens) - n :]) == list(marker[:n]))


def expected(params: dict[str, Any], prompt: list[int], output: list[int]) -> int | None:
    """Return the token to force by definition, from the whole history."""
    start, end, newline = params["start"], params["end"], params["newline"] or []
    tokens, opened = prompt + output, None
    for place in range(1, len(tokens) + 1):
        is_start = begun(tokens[:place], start) == len(start)
        if opened is None:
            opened = place if is_start else None
        elif is_start and begun(tokens[opened:place], end) < len(start):
            opened = place
        elif begun(tokens[opened:place], end) == len(end):
            opened = None
    if opened is None or len(tokens) - opened < params["thinking_budget"]:
        return None
    of_end, of_newline = begun(tokens[opened:], end), begun(output, newline)
    if of_end or of_newline == len(newline):
        return int(end[of_end])
    return int(newline[of_newline])


def random_markers(generator: random.Random) -> dict[str, Any]:
    """Return markers of two different tokens only, so that they overlap in all ways."""

    def marker() -> list[int]:
        return generator.choices([0, 1], k=generator.randrange(1, 5))

    start = end = marker()
    while end == start:
        end = marker()
    return {"start": start, "end": end, "newline": generator.choice([None, marker()])}


def test_single_token_markers_equal_sglang(make_row: MakeRow, sglang: Sglang) -> None:
    """Sequences that grow, shrink and fork; blocks that the prompt opens, closed and reopened blocks."""
    generator = random.Random(1)
    cases, results, ours = [], [], []
    for _ in range(80):
        budget = [generator.choice([0, 1, 2, 3, 5, 8, 1000, None]) for _ in range(3)]
        prompts = [random_tokens(generator, generator.randrange(1, 12)) for _ in range(3)]
        outputs: list[list[int]] = [[], [], []]
        states: list[dict[str, Any]] = [{}, {}, {}]
        for _ in range(12):
            logits = torch.randn(3, VOCAB_SIZE)
            params = [{"thinking_budget": budget[i], **ONE_TOKEN_EACH} for i in range(3)]
            rows = [{"params": params[i], "prompt": prompts[i], "output": list(outputs[i])} for i in range(3)]
            cases.append({"logits": logits.tolist(), "rows": rows})
            ours.append(SmallThinkingBudget()(logits.clone(), [make_row(**row) for row in rows]).tolist())
            entries = [make_row(**row, state=states[i], vocab_size=VOCAB_SIZE) for i, row in enumerate(rows)]
            results.append(TokenizerThinkingBudgetLogitProcessor()(logits, entries).tolist())
            for i in range(3):
                if generator.random() < 0.15:
                    del outputs[i][generator.randrange(len(outputs[i]) + 1) :]
                else:
                    outputs[i] += random_tokens(generator, generator.randrange(1, 4))
            if generator.random() < 0.1:  # sequence 1 becomes a copy of sequence 0
                budget[1], prompts[1], outputs[1] = budget[0], prompts[0], list(outputs[0])
                states[1] = copy.deepcopy(states[0])

    theirs = sglang("ThinkingBudgetLogitProcessor", cases, **TOKEN_IDS)
    differences = [case for case, mine, other in zip(cases, results, theirs, strict=True) if mine != other]
    assert differences == []
    assert ours == theirs
    edited = sum(mine != case["logits"] for case, mine in zip(cases, results, strict=True))
    assert edited > len(cases) // 4, "the random histories hardly ever spend a budget"


def test_longer_markers_equal_definition(make_row: MakeRow) -> None:
    """Overlapping and nested markers, on sequences that grow, shrink and fork."""
    generator = random.Random(2)
    processor = TokenizerThinkingBudgetLogitProcessor()
    seen: set[int | None] = set()
    for _ in range(300):
        params = [{"thinking_budget": generator.randrange(6), **random_markers(generator)} for _ in range(2)]
        prompts = [generator.choices([0, 1, 1, 0, 4], k=generator.randrange(8)) for _ in range(2)]
        outputs: list[list[int]] = [[], []]
        states: list[dict[str, Any]] = [{}, {}]
        for _ in range(12):
            entries = [make_row(params[i], prompts[i], outputs[i], states[i], vocab_size=VOCAB_SIZE) for i in range(2)]
            got = forced(processor(torch.rand(2, VOCAB_SIZE) + 1, entries))
            assert got == [expected(params[i], prompts[i], outputs[i]) for i in range(2)]
            seen.update(got)
            for i in range(2):
                token = got[i]
                if generator.random() < 0.2:
                    del outputs[i][generator.randrange(len(outputs[i]) + 1) :]
                elif token is not None and generator.random() < 0.7:
                    outputs[i].append(token)
                else:
                    outputs[i] += generator.choices([0, 1, 4], k=generator.randrange(1, 3))
            if generator.random() < 0.1:
                params[1], prompts[1], outputs[1] = params[0], prompts[0], list(outputs[0])
                states[1] = copy.deepcopy(states[0])
    assert seen == {None, 0, 1}


@pytest.mark.parametrize(
    ("newline", "written", "then"),
    [
        ([7, 8], [], [7, 8, 4, 5, 6]),
        ([7, 8], [7], [8, 4, 5, 6]),
        ([7, 8], [7, 8], [4, 5, 6]),
        ([7, 8], [7, 9], [7, 8, 4, 5, 6]),
        ([7, 8], [4, 5], [6]),
        (None, [], [4, 5, 6]),
        (None, [4], [5, 6]),
        (None, [4, 5, 4], [5, 6]),
    ],
)
def test_forced_tokens(make_row: MakeRow, newline: list[int] | None, written: list[int], then: list[int]) -> None:
    """Partial markers are completed, and after the end the model is free."""
    params = {"thinking_budget": 3, "start": [1, 2], "end": [4, 5, 6], "newline": newline}
    prompt, output, state = [0, 1, 2], [0, 0, 0, *written], dict[str, Any]()
    for token in [*then, None]:
        row = make_row(params, prompt, output, state, vocab_size=10)
        assert forced(TokenizerThinkingBudgetLogitProcessor()(torch.ones(1, 10), [row])) == [token]
        output.append(9 if token is None else token)


def test_each_row_has_its_own_markers(make_row: MakeRow) -> None:
    rows = [
        make_row({"thinking_budget": 0, "start": [i], "end": [i, 5], "newline": [i + 1]}, [i], [], vocab_size=8)
        for i in range(3)
    ]
    assert forced(TokenizerThinkingBudgetLogitProcessor()(torch.ones(3, 8), rows)) == [1, 2, 3]


def test_no_limit_keeps_no_state(make_row: MakeRow) -> None:
    state: dict[str, Any] = {}
    row = make_row({"thinking_budget": None, **ONE_TOKEN_EACH}, [START], [0] * 9, state, vocab_size=VOCAB_SIZE)
    logits = torch.randn(1, VOCAB_SIZE)
    assert torch.equal(TokenizerThinkingBudgetLogitProcessor()(logits.clone(), [row]), logits)
    assert state == {}


def test_step_only_reads_new_tokens(make_row: MakeRow, counting_list: CountingList) -> None:
    prompt, output, state = counting_list([START] + [0] * 5000), counting_list(), dict[str, Any]()
    processor, params = TokenizerThinkingBudgetLogitProcessor(), {"thinking_budget": 9999, **ONE_TOKEN_EACH}
    row = make_row(params, prompt, output, state, vocab_size=VOCAB_SIZE)
    processor(torch.zeros(1, VOCAB_SIZE), [row])
    prompt.reads = 0
    for _ in range(100):
        output.append(0)
        processor(torch.zeros(1, VOCAB_SIZE), [row])
    assert prompt.reads == 0
    assert output.reads <= 200  # the new one, and the one before it, to see that nothing was exchanged


def test_two_budgets_on_one_sequence_are_independent(make_row: MakeRow) -> None:
    state: dict[str, Any] = {}
    for start, token in ((START, NEW_LINE), (4, None), (START, NEW_LINE)):
        params = {"thinking_budget": 0, **ONE_TOKEN_EACH, "start": [start]}
        row = make_row(params, [START, 0], [0], state, vocab_size=VOCAB_SIZE)
        assert forced(TokenizerThinkingBudgetLogitProcessor()(torch.ones(1, VOCAB_SIZE), [row])) == [token]


def test_defaults_are_tokenized_by_the_model(tokenizer: Tokenizer) -> None:
    """Special tokens are single tokens."""
    params = read(ModelView(260, frozenset({1}), tokenizer.hf_tokenizer))
    assert params.start == (2,)
    assert params.end == (3,)
    assert params.newline == tuple(tokenizer.hf_tokenizer.encode("\n"))
    assert len(params.newline) == 1


def test_texts_and_token_ids(tokenizer: Tokenizer) -> None:
    model = ModelView(260, frozenset({1}), tokenizer.hf_tokenizer)
    params = read(model, start="<reason>", end=[7, 3], newline=None)
    assert params.start == tuple(tokenizer.hf_tokenizer.encode("<reason>"))
    assert len(params.start) == len("<reason>")
    assert params.end == (7, 3)
    assert params.newline is None


def test_sentencepiece_prefix_space_is_ignored() -> None:
    model = ModelView(7, frozenset(), hf_tokenizer(["<unk>", "▁", "\n", "a", "b", "|", "</s>"], sentence_piece=True))
    assert model.tokenizer.encode("\n") == [1, 2]
    params = read(model, start="a", end="|b", newline="\n")
    assert (params.start, params.end, params.newline) == ((3,), (5, 4), (2,))
    assert read(model, start=" a", end="b").start == (1, 3)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "thinking_budget: missing from custom_params, expected an integer, 0 or greater, or null for no limit"),
        ({"thinking_budget": -1}, "thinking_budget: expected an integer, 0 or greater, or null for no limit, got -1"),
        ({"start": 5}, "start: expected a string or a list of token ids, got 5"),
        ({"start": None}, "start: expected a string or a list of token ids, got None"),
        ({"start": []}, r"start: expected at least one token id, got \[\]"),
        ({"end": [VOCAB_SIZE]}, r"end: token id 6 is outside the vocabulary \(0 to 5\)"),
        ({"end": [-1]}, "end: token id -1 is outside the vocabulary"),
        ({"newline": [True]}, "newline: expected integers, got True"),
        ({"newline": []}, r"newline: expected at least one token id, got \[\]"),
        ({"newline": 7}, "newline: expected a string or a list of token ids, got 7"),
        ({"end": [START]}, r"start and end: expected two different ones, both are the tokens \(1,\)"),
        ({"start": "<think>"}, "start: the model has no tokenizer"),
    ],
)
def test_refuses(params: dict[str, Any] | None, message: str) -> None:
    given = None if params is None else {"thinking_budget": 1, **ONE_TOKEN_EACH, **params}
    with pytest.raises(ValueError, match=f"^{message}"):
        TokenizerThinkingBudgetLogitProcessor().prepare(given, SMALL_MODEL)


def test_refuses_unknown_texts() -> None:
    model = ModelView(3, frozenset(), hf_tokenizer(["<unk>", "a", "b"]))
    assert read(model, start="a", end="<unk>", newline=None).end == (0,)
    with pytest.raises(ValueError, match=r"^end: the model has no tokens for 'ax': give another text, or token ids$"):
        read(model, start="a", end="ax", newline=None)
    with pytest.raises(ValueError, match=r"^newline: expected a string of at least one token, got '\\n'$"):
        read(model, start="a", end="b")
    with pytest.raises(ValueError, match=r"^start: expected a string of at least one token, got ''$"):
        read(model, start="", end="b", newline=None)


def test_schema() -> None:
    schema = TokenizerThinkingBudgetLogitProcessor.params_schema
    assert schema is not None
    assert schema["required"] == ["thinking_budget"]
    properties = schema["properties"]
    assert [properties[name]["default"] for name in ("start", "end", "newline")] == ["<think>", "</think>", "\n"]
    kinds = [each["type"] for each in properties["newline"]["anyOf"]]
    assert kinds == ["string", "array", "null"]
    assert all(properties[name]["description"] for name in ("thinking_budget", "start", "end", "newline"))
