from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.builtin_processors import (
    DeepSeekR1ThinkingBudgetLogitProcessor,
    Glm4MoeThinkingBudgetLogitProcessor,
    InklingThinkingBudgetLogitProcessor,
    Qwen3ThinkingBudgetLogitProcessor,
    ThinkingBudgetLogitProcessor,
)
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow, Sglang

CountingList = Callable[..., Any]
VOCAB_SIZE = 6
START, END, NEW_LINE = 1, 2, 3
TOKEN_IDS = {"THINKING_START_TOKEN_ID": START, "THINKING_END_TOKEN_ID": END, "NEW_LINE_TOKEN_ID": NEW_LINE}
MODELS = [
    DeepSeekR1ThinkingBudgetLogitProcessor,
    Glm4MoeThinkingBudgetLogitProcessor,
    InklingThinkingBudgetLogitProcessor,
    Qwen3ThinkingBudgetLogitProcessor,
]


class SmallThinkingBudget(ThinkingBudgetLogitProcessor):
    name = "small_thinking_budget"
    THINKING_START_TOKEN_ID = START
    THINKING_END_TOKEN_ID = END
    NEW_LINE_TOKEN_ID = NEW_LINE


def random_tokens(generator: random.Random, length: int) -> list[int]:
    return generator.choices(range(VOCAB_SIZE), weights=[6, 1, 1, 2, 6, 6], k=length)


def test_equals_sglang_on_every_history(make_row: MakeRow, sglang: Sglang) -> None:
    """Sequences that grow, shrink and fork, several per batch, with valid, missing and invalid budgets."""
    generator = random.Random(1)
    budgets: list[Any] = [0, 1, 2, 3, 5, 8, 1000, None, -1, 2.0, "3", True]
    cases, results = [], []
    for _ in range(60):
        budget = [generator.choice(budgets) for _ in range(3)]
        prompts = [random_tokens(generator, generator.randrange(1, 12)) for _ in range(3)]
        outputs: list[list[int]] = [[], [], []]
        states: list[dict[str, Any]] = [{}, {}, {}]
        for _ in range(12):
            logits = torch.randn(3, VOCAB_SIZE)
            rows: list[dict[str, Any]] = [
                {"params": {"thinking_budget": budget[i]}, "prompt": prompts[i], "output": list(outputs[i])}
                for i in range(3)
            ]
            cases.append({"logits": logits.tolist(), "rows": rows})
            entries = [make_row(**row, state=states[i]) for i, row in enumerate(rows)]
            results.append(SmallThinkingBudget()(logits, entries).tolist())
            for i in range(3):
                if generator.random() < 0.15:
                    del outputs[i][generator.randrange(len(outputs[i]) + 1) :]
                else:
                    outputs[i] += random_tokens(generator, generator.randrange(1, 4))
            if generator.random() < 0.1:  # sequence 1 becomes a copy of sequence 0
                budget[1], prompts[1], outputs[1] = budget[0], prompts[0], list(outputs[0])
                states[1] = copy.copy(states[0])

    # A history that shrank and grew again before the processor saw it has its state rolled back: see below.
    theirs = sglang("ThinkingBudgetLogitProcessor", cases, **TOKEN_IDS)
    differences = [case for case, mine, other in zip(cases, results, theirs, strict=True) if mine != other]
    assert differences == []
    forced = sum(mine != case["logits"] for case, mine in zip(cases, results, strict=True))
    assert forced > len(cases) // 4, "the random histories hardly ever spend a budget"


def test_rejected_drafts_leave_no_trace(make_row: MakeRow) -> None:
    """A rolled-back state equals one that never saw the drafts."""
    generator = random.Random(2)
    processor = SmallThinkingBudget()
    prompt, output, state = [4, START], list[int](), dict[str, Any]()
    for _ in range(200):
        snapshot = copy.copy(state)
        draft = output + random_tokens(generator, 3)
        processor(torch.zeros(1, VOCAB_SIZE), [make_row({"thinking_budget": 2}, prompt, draft, state)])
        state = snapshot
        output += random_tokens(generator, 1)
        rolled_back = processor(
            torch.zeros(1, VOCAB_SIZE), [make_row({"thinking_budget": 2}, prompt, list(output), state)]
        )
        fresh = processor(torch.zeros(1, VOCAB_SIZE), [make_row({"thinking_budget": 2}, prompt, list(output))])
        assert torch.equal(rolled_back, fresh)


def test_step_only_reads_new_tokens(make_row: MakeRow, counting_list: CountingList) -> None:
    prompt, output, state = counting_list([START] + [0] * 5000), counting_list(), dict[str, Any]()
    processor = SmallThinkingBudget()
    processor(torch.zeros(1, VOCAB_SIZE), [make_row({"thinking_budget": 9999}, prompt, output, state)])
    prompt.reads = 0
    for _ in range(100):
        output.append(0)
        processor(torch.zeros(1, VOCAB_SIZE), [make_row({"thinking_budget": 9999}, prompt, output, state)])
    assert prompt.reads == 0
    assert output.reads <= 300  # the new token, and the last one that is known, to see whether it still is


def test_new_line_then_end_of_thinking(make_row: MakeRow) -> None:
    processor, state, output = SmallThinkingBudget(), dict[str, Any](), [5, 5]
    sampled = []
    for _ in range(3):
        logits = processor(torch.randn(1, VOCAB_SIZE), [make_row({"thinking_budget": 2}, [0, START], output, state)])
        sampled.append(int(logits.argmax()))
        if len(sampled) < 3:
            assert torch.isinf(logits).sum() == VOCAB_SIZE - 1
            assert logits.max() == 0
        output = [*output, sampled[-1]]
    assert sampled[:2] == [NEW_LINE, END]
    assert torch.isfinite(logits).all()


def test_two_budgets_on_one_sequence_are_independent(make_row: MakeRow) -> None:
    class OtherTokens(SmallThinkingBudget):
        THINKING_START_TOKEN_ID = 4

    state: dict[str, Any] = {}
    row = make_row({"thinking_budget": 0}, [START, 0], [0], state)
    assert torch.isinf(SmallThinkingBudget()(torch.zeros(1, VOCAB_SIZE), [row])).any()
    assert torch.isfinite(OtherTokens()(torch.zeros(1, VOCAB_SIZE), [row])).all()


@pytest.mark.parametrize("model", MODELS)
def test_model_tokens_are_sglangs(model: type[ThinkingBudgetLogitProcessor], make_row: MakeRow, sglang: Sglang) -> None:
    """In a vocabulary that just contains the tokens, both force the same one after the same start token."""
    start, end, new_line = model.THINKING_START_TOKEN_ID, model.THINKING_END_TOKEN_ID, model.NEW_LINE_TOKEN_ID
    logits = [[0.5] * (max(start, end, new_line) + 1)]
    for output in ([7], [7, new_line], [end]):
        row = {"params": {"thinking_budget": 1}, "prompt": [start], "output": output}
        (theirs,) = sglang(model.__name__, [{"logits": logits, "rows": [row]}])
        assert model()(torch.tensor(logits), [make_row(**row)]).tolist() == theirs


@pytest.mark.parametrize("params", [{"thinking_budget": 0}, {"thinking_budget": 10**9}, {"thinking_budget": None}])
def test_accepts(params: dict[str, Any]) -> None:
    SmallThinkingBudget().prepare(params, ModelView(VOCAB_SIZE, frozenset(), None))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "thinking_budget: missing from custom_params, expected an integer, 0 or greater, or null for no limit"),
        ({"thinking_bugdet": 3}, "thinking_budget: missing"),
        ({"thinking_budget": -1}, "thinking_budget: expected an integer, 0 or greater, or null for no limit, got -1"),
        ({"thinking_budget": 2.0}, r"thinking_budget: expected an integer.*got 2\.0"),
        ({"thinking_budget": "3"}, "thinking_budget: expected an integer.*got '3'"),
        ({"thinking_budget": True}, "thinking_budget: expected an integer.*got True"),
    ],
)
def test_refuses(params: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmallThinkingBudget().prepare(params, ModelView(VOCAB_SIZE, frozenset(), None))


@pytest.mark.parametrize("model", MODELS)
def test_refuses_a_model_without_its_tokens(model: type[ThinkingBudgetLogitProcessor]) -> None:
    """SGLang admits the request and stops with an IndexError in its step."""
    needed = max(model.THINKING_START_TOKEN_ID, model.THINKING_END_TOKEN_ID, model.NEW_LINE_TOKEN_ID) + 1
    model().prepare({"thinking_budget": 5}, ModelView(needed, frozenset(), None))
    with pytest.raises(ValueError, match=f"{model.__name__} is not for this model"):
        model().prepare({"thinking_budget": 5}, ModelView(needed - 1, frozenset(), None))


def test_refuses_the_base_class() -> None:
    with pytest.raises(ValueError, match="has no THINKING_START_TOKEN_ID: use the subclass for the model"):
        ThinkingBudgetLogitProcessor().prepare({"thinking_budget": 5}, ModelView(VOCAB_SIZE, frozenset(), None))
