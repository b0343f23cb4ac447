from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.builtin_processors.parameter_processors import MinTokensLogitsProcessor
from logitship.builtin_processors.thinking_token_budget import ThinkingTokenBudgetLogitsProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.batch_processors.vllm_config import ReasoningConfig, SchedulerConfig, VllmConfig
from logitship.sampler.row_errors import NoTokenLeftError
from logitship.sampler.sampler import Sampler
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.random_cases import random_seeds

CPU = torch.device("cpu")
DATA = Path(__file__).parents[1] / "data"
RECORDING: dict[str, Any] = json.loads((DATA / "vllm_thinking.json").read_text())
PLAIN: dict[str, list[list[int | None]]] = json.loads((DATA / "vllm_thinking_plain.json").read_text())["forced"]

Forced = list[list[int | None]]
"""By step and row."""


def config(start: Sequence[int], end: Sequence[int], natural_end: Sequence[int] | None = None) -> VllmConfig:
    reasoning = ReasoningConfig(
        reasoning_start_str="start",
        reasoning_end_str="end",
        reasoning_start_token_ids=list(start),
        reasoning_end_token_ids=list(end),
        natural_reasoning_end_token_ids=list(end if natural_end is None else natural_end),
    )
    return VllmConfig(SchedulerConfig(max_num_seqs=8), reasoning_config=reasoning)


def new_processor(
    start: Sequence[int], end: Sequence[int], natural_end: Sequence[int] | None = None
) -> ThinkingTokenBudgetLogitsProcessor:
    return ThinkingTokenBudgetLogitsProcessor(config(start, end, natural_end), CPU, False)


def with_budget(budget: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, thinking_token_budget=budget)


def forced_tokens(processor: LogitsProcessor, rows: int, vocab_size: int) -> list[int | None]:
    """Return the token that `apply` forces in each row, or None."""
    kept = [row.nonzero()[:, 0].tolist() for row in processor.apply(torch.zeros(rows, vocab_size)) == 0]
    assert all(len(tokens) in (1, vocab_size) for tokens in kept)
    return [tokens[0] if len(tokens) == 1 else None for tokens in kept]


# ---- vLLM's recordings

SINGLE_END = "vLLM skips the first forced token of every thinking after a forced end of a single token"
"""Only with `predict_bonus_token=True`, with which the recording was made, and which vLLM sets for the row of the bonus
token of speculative decoding alone. `vllm_thinking_plain.json` was recorded without it."""
START_IN_PROMPT = "vLLM counts from the second token of a start marker in the prompt on, and allows more"
STRAY_END = "an end without a start makes vLLM overlook the next one: it forces an end into the answer"

QUIRKS: dict[tuple[int, int], tuple[str, dict[int, int | None]]] = {
    (3, 1): (SINGLE_END, {12: 25}),
    (6, 0): (START_IN_PROMPT, {2: 20}),
    (8, 0): (SINGLE_END, {13: 23}),
    (14, 0): (SINGLE_END, {11: 24}),
    (25, 1): (SINGLE_END, {8: 25}),
    (26, 2): (START_IN_PROMPT, {1: 27}),
    (30, 0): (SINGLE_END, {9: 30}),
    (32, 0): (STRAY_END, {6: None}),
    (32, 1): (SINGLE_END, {3: 25, 6: 25, 11: 25}),
    (33, 0): (SINGLE_END, {10: 24}),
    (34, 0): (SINGLE_END, {8: 23}),
    (37, 1): (START_IN_PROMPT, {1: 26}),
    (40, 1): (SINGLE_END, {9: 23}),
    (41, 1): (STRAY_END, {9: None}),
    (44, 1): (SINGLE_END, {8: 22}),
    (49, 2): (SINGLE_END, {9: 25}),
    (55, 0): (SINGLE_END, {9: 25}),
    (56, 2): (START_IN_PROMPT, {1: 30}),
    (57, 1): (SINGLE_END, {12: 23}),
    (57, 2): (SINGLE_END, {9: 23}),
}
"""(seed, row) → reason for a difference, and the token forced here by step. All other steps are as recorded."""


def expected(case: dict[str, Any], recorded: Forced, reasons: set[str]) -> Forced:
    forced = [list(rows) for rows in recorded]
    for (seed, row), (reason, steps) in QUIRKS.items():
        if seed == case["seed"] and reason in reasons:
            for step, token in steps.items():
                assert forced[step][row] != token, "there is no such quirk"
                forced[step][row] = token
    return forced


def replay(case: dict[str, Any]) -> Forced:
    """Return the forced tokens along the recorded outputs."""
    processor = new_processor(case["start"], case["end"])
    outputs: list[list[int]] = [[] for _ in case["reqs"]]
    added = [
        (row, with_budget(request["budget"]), request["prompt"], outputs[row])
        for row, request in enumerate(case["reqs"])
    ]
    processor.update_state(BatchUpdate(len(added), [], added, []))
    forced = []
    for step in case["steps"]:
        processor.update_state(None)
        forced.append(forced_tokens(processor, len(outputs), RECORDING["vocab_size"]))
        for output, token in zip(outputs, step["sampled"], strict=True):
            output.append(token)
    return forced


@pytest.mark.parametrize("case", RECORDING["cases"], ids=lambda case: f"seed{case['seed']}")
def test_replay(case: dict[str, Any]) -> None:
    got = replay(case)
    recorded = [step["forced"] for step in case["steps"]]
    assert got == expected(case, recorded, {SINGLE_END, START_IN_PROMPT, STRAY_END})
    assert got == expected(case, PLAIN[str(case["seed"])], {START_IN_PROMPT, STRAY_END})


# ---- against a rescan of everything


def occurrences(marker: list[int], tokens: list[int]) -> list[int]:
    return [i for i in range(len(tokens)) if tokens[i : i + len(marker)] == marker]


def reference_forced(start: list[int], end: list[int], budget: int, prompt: list[int], output: list[int]) -> int | None:
    """Return the token to force, by scanning the whole history for markers."""
    opened = max(occurrences(start, prompt), default=-1)
    closed = max((i + len(end) for i in occurrences(end, prompt)), default=0)
    is_thinking = opened >= closed
    section = opened + len(start) if is_thinking else closed
    history = prompt + output
    while True:
        marker = end if is_thinking else start
        # A marker that the prompt holds in full was dealt with above: only later ones close or open a section here.
        ends = [i + len(marker) for i in occurrences(marker, history) if i >= section]
        ends = [each for each in ends if each > len(prompt)]
        if not ends:
            break
        section, is_thinking = ends[0], not is_thinking
    if not is_thinking or len(history) - section < budget:
        return None
    written = history[section:]
    return end[max(n for n in range(len(end)) if n <= len(written) and written[len(written) - n :] == end[:n])]


@random_seeds(300)
def test_against_a_rescan(seed: int) -> None:
    rng = random.Random(seed)
    vocab_size = rng.choice([3, 5, 8])
    start, end = ([rng.randrange(vocab_size) for _ in range(rng.randint(1, 3))] for _ in range(2))
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(8))] + start * rng.randrange(2)
    prompt += [rng.randrange(vocab_size) for _ in range(rng.randrange(3))]
    budget = rng.randrange(5)
    processor = new_processor(start, end)
    output: list[int] = []
    planned: list[int] = []
    processor.update_state(BatchUpdate(1, [], [(0, with_budget(budget), prompt, output)], []))
    for _ in range(40):
        processor.update_state(None)
        (forced,) = forced_tokens(processor, 1, vocab_size)
        assert forced == reference_forced(start, end, budget, prompt, output)
        planned = planned or rng.choice([start, end, [rng.randrange(vocab_size)]])[:]
        token = planned.pop(0)
        # Something after this processor may have overruled it.
        output.append(token if forced is None or rng.random() < 0.1 else forced)
        if rng.random() < 0.1:  # rejected drafts
            del output[rng.randrange(len(output)) :]


# ---- one by one

START, END = [1, 2], [3, 4]


class Generation:
    """One request at row 0."""

    def __init__(
        self, processor: ThinkingTokenBudgetLogitsProcessor, budget: int, prompt: list[int] | None = None
    ) -> None:
        self.processor = processor
        self.output: list[int] = []
        processor.update_state(BatchUpdate(1, [], [(0, with_budget(budget), prompt, self.output)], []))

    def forced_after(self, *tokens: int) -> int | None:
        self.output += tokens
        self.processor.update_state(None)
        return forced_tokens(self.processor, 1, 10)[0]


def test_is_not_argmax_invariant() -> None:
    assert not new_processor(START, END).is_argmax_invariant()


def test_zero_budget_ends_thinking_at_once() -> None:
    sequence = Generation(new_processor(START, END), 0, [7])
    assert [sequence.forced_after(token) for token in (7, 1, 2, 3, 4, 7)] == [None, None, 3, 4, None, None]


def test_thinking_in_prompt_counts() -> None:
    assert Generation(new_processor(START, END), 3, [1, 2, 7, 7]).forced_after() is None
    assert Generation(new_processor(START, END), 3, [1, 2, 7, 7]).forced_after(7) == 3
    assert Generation(new_processor(START, END), 3, [1, 2, 7, 7, 7, 7]).forced_after() == 3
    assert Generation(new_processor(START, END), 0, [1, 2, 7, 3, 4]).forced_after(7) is None
    assert Generation(new_processor(START, END), 0).forced_after(7) is None


def test_markers_between_prompt_and_output() -> None:
    assert Generation(new_processor(START, END), 0, [7, 1]).forced_after(2) == 3
    assert Generation(new_processor(START, END), 1, [1, 2, 3]).forced_after() == 4
    # These tokens stand in the prompt's end marker already.
    assert Generation(new_processor([4, 2], END), 0, [3, 4]).forced_after(2) is None


def test_budget_restarts_with_each_thinking_block() -> None:
    sequence = Generation(new_processor([1], [3]), 2, [1])
    tokens = (7, 7, 3, 8, 1, 7, 7, 3, 1, 7, 3, 1, 7, 7)
    forced = [sequence.forced_after(token) for token in tokens]
    assert forced == [None, 3, None, None, None, None, 3, None, None, None, None, None, None, 3]


def test_start_marker_inside_thinking_is_ignored() -> None:
    sequence = Generation(new_processor([1], [3]), 3)
    assert [sequence.forced_after(token) for token in (1, 7, 1, 1)] == [None, None, None, 3]


def test_partial_end_marker_is_continued() -> None:
    assert Generation(new_processor([1], [3, 4, 5]), 2).forced_after(1, 7, 3) == 4
    assert Generation(new_processor([1], [3, 3, 4]), 3).forced_after(1, 3, 3, 3) == 4


def test_natural_end_marker() -> None:
    processor = new_processor([1], [8, 9, 3], natural_end=[3])
    sequence = Generation(processor, 2)
    assert [sequence.forced_after(token) for token in (1, 7, 3, 7, 7)] == [None] * 5
    assert [sequence.forced_after(token) for token in (1, 7, 7, 8, 9, 3)] == [None, None, 8, 9, 3, None]
    assert Generation(processor, 2, [1, 7, 7, 3]).forced_after() is None


def test_natural_end_inside_forced_end() -> None:
    sequence = Generation(new_processor([1], [3, 9], natural_end=[3]), 1)
    assert [sequence.forced_after(token) for token in (1, 7, 3, 9, 7)] == [None, 3, 9, None, None]
    assert sequence.forced_after(1, 3) is None


def test_overruled_token_is_forced_again() -> None:
    sequence = Generation(new_processor([1], END), 0)
    assert [sequence.forced_after(token) for token in (1, 7, 3, 7, 3, 4, 7)] == [3, 3, 4, 3, 4, None, None]


def test_removed_tokens() -> None:
    sequence = Generation(new_processor([1], END), 1)
    assert sequence.forced_after(1, 7) == 3
    del sequence.output[1:]
    assert sequence.forced_after() is None
    assert sequence.forced_after(8, 3) == 4
    del sequence.output[:]
    assert sequence.forced_after(7) is None


def test_rows_are_added_moved_and_removed() -> None:
    processor = new_processor([1], [3])
    outputs: list[list[int]] = [[1], [], [1]]
    added = [(row, with_budget(0), [7], outputs[row]) for row in range(3)]
    processor.update_state(BatchUpdate(3, [], added, []))
    assert forced_tokens(processor, 3, 5) == [3, None, 3]
    processor.update_state(BatchUpdate(3, [], [], [(0, 1, MoveDirectionality.SWAP)]))
    assert forced_tokens(processor, 3, 5) == [None, 3, 3]
    processor.update_state(BatchUpdate(2, [1], [], [(2, 1, MoveDirectionality.UNIDIRECTIONAL)]))
    outputs[2].append(3)
    processor.update_state(BatchUpdate(2, [], [(0, with_budget(None), [1], [])], []))
    assert forced_tokens(processor, 2, 5) == [None, None]


def test_forced_token_keeps_its_logit() -> None:
    processor = new_processor([1], [3])
    processor.update_state(BatchUpdate(2, [], [(1, with_budget(0), [1], [])], []))
    logits = torch.arange(10.0).reshape(2, 5)
    assert processor.apply(logits) is logits
    assert logits.tolist() == [[0, 1, 2, 3, 4], [-math.inf] * 3 + [8, -math.inf]]


def test_history_is_read_once() -> None:
    """If the output grows by a token, a step reads two: the last known one, and the new one."""

    class Counted(list[int]):
        read = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            self.read += len(found) if isinstance(index, slice) else 1
            return found

        def __iter__(self) -> Any:
            raise AssertionError("all of it is read")

    processor = new_processor(START, END)
    prompt, output = Counted([1, 2, *range(5, 10)] * 100), Counted()
    processor.update_state(BatchUpdate(1, [], [(0, with_budget(10_000), prompt, output)], []))
    prompt.read = 0
    for token in range(500):
        output.append(token % 10)
        output.read = 0
        processor.update_state(None)
        assert output.read <= 2
    assert prompt.read == 0


# ---- in the sampler


def sampled(
    sampler_processors: list[LogitsProcessor], params: SamplingParams, logits: list[float], output: list[int]
) -> int | Exception:
    """Return the token that a greedy request samples while thinking."""
    sampler = Sampler(len(logits), CPU, LogitsProcessors(sampler_processors))
    sampler.update_state(BatchUpdate(1, [], [(0, params, [1], output)], []))
    result = sampler.sample(torch.tensor([logits]))
    return result.faults[0][1] if result.faults else result.token_ids[0]


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, thinking_token_budget=0, **params)


@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        greedy(repetition_penalty=100.0, frequency_penalty=2.0, presence_penalty=2.0),
        greedy(logit_bias={3: -1e30, 2: 1e30}),
        greedy(allowed_token_ids=[0, 3]),
        greedy(bad_words_token_ids=[[0], [2, 3]]),
    ],
)
def test_only_masks_override_forcing(params: SamplingParams) -> None:
    assert sampled([new_processor([1], [3])], params, [0.0, 1.0, 9.0, -5.0], [0]) == 3


@pytest.mark.parametrize(
    ("params", "output", "also"),
    [
        (greedy(allowed_token_ids=[0, 1, 2]), [0], "allowed_token_ids"),
        (greedy(bad_words_token_ids=[[0, 3]]), [0], "bad_words"),
        (greedy(min_tokens=2, stop_token_ids=[3]), [0], "min_tokens"),
    ],
)
def test_mask_that_forbids_the_end_ends_the_request(params: SamplingParams, output: list[int], also: str) -> None:
    processors: list[LogitsProcessor] = [MinTokensLogitsProcessor(None, CPU, False), new_processor([1], [3])]
    fault = sampled(processors, params, [0.0, 1.0, 9.0, -5.0], output)
    assert isinstance(fault, NoTokenLeftError)
    assert f"Together, {also}, thinking_token_budget forbid the whole vocabulary" in str(fault)


def test_random_rows_and_log_probabilities() -> None:
    params = SamplingParams(
        temperature=1.5, top_p=0.5, top_k=1, min_p=0.5, seed=1, thinking_token_budget=0, logprobs=2,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    sampler = Sampler(4, CPU, LogitsProcessors([new_processor([1], [3])]))
    sampler.update_state(BatchUpdate(1, [], [(0, params, [1], [])], []))
    result = sampler.sample(torch.tensor([[0.0, 1.0, 9.0, -5.0]]))
    assert result.token_ids == [3]
    assert result.logprobs[0] is not None
    assert result.logprobs[0].logprob == 0.0


@pytest.mark.parametrize("value", [True, 1.0, -1.0, "5", -2, [1]])
def test_invalid_budgets(value: Any) -> None:
    with pytest.raises(ValueError, match="thinking_token_budget: must be an integer: 0 or greater, or -1"):
        SamplingParams(thinking_token_budget=value)


def test_no_limit() -> None:
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    assert SamplingParams().forbidding_fields == ()
    assert SamplingParams(thinking_token_budget=0).forbidding_fields == ("thinking_token_budget",)
