"""Forks of the built-in processors' states: both sequences continue independently."""

from __future__ import annotations

import copy
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.builtin_processors.base import BuiltinProcessor
from logitship.builtin_processors.no_repeat_ngram import NGramIndex
from logitship.builtin_processors.parameter_processors import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from logitship.builtin_processors.parts.state_history import StateHistory
from logitship.builtin_processors.think_mode import StrictThinkModeLogitsProcessor
from logitship.builtin_processors.thinking_budget import ThinkingBudgetLogitProcessor
from logitship.builtin_processors.thinking_token_budget import ThinkingTokenBudgetLogitsProcessor
from logitship.builtin_processors.tree import TreeLogitsProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.vllm_config import ReasoningConfig
from logitship.sampler.processors.executor import ExecutorRow, ExecutorSequence, LoadedProcessor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.tokenizer import Tokenizer
from tests.builtin_processors.conftest import ReadLogits
from tests.helpers.watermarks import installed_processors

MODEL = ModelView(4, frozenset(), None)

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "rtp_llm.json").read_text())
VOCAB = 260
REGISTRY = installed_processors()
NAMES = [name for name in REGISTRY if not issubclass(REGISTRY.get(name), ThinkingBudgetLogitProcessor)]
"""All but those that force tokens of one model."""


class Rows:
    """Sequences of one processor."""

    def __init__(self, processor: BuiltinProcessor, model: ModelView, params: dict[str, Any]) -> None:
        self._loaded = LoadedProcessor("sha256:0", processor.name, InProcessExecutor({}, MODEL), processor)
        self._model = model
        self._params = params
        self._prepared = processor.prepare(params, model)

    def attach(self, prompt: list[int], output: list[int]) -> ExecutorRow:
        sequence = ExecutorSequence("r", self._params, prompt, output, SamplingParams(), self._model, self._prepared)
        return self._loaded.executor.attach(self._loaded, sequence)

    def step(self, rows: list[ExecutorRow], logits: torch.Tensor) -> torch.Tensor:
        outcome = self._loaded.executor.group(self._loaded, rows).call(logits := logits.clone())
        assert not outcome.faults
        return logits


@pytest.mark.parametrize("name", NAMES)
def test_fork_equals_separate_sequence(name: str, tokenizer: Tokenizer) -> None:
    processor = REGISTRY.make(name)
    assert isinstance(processor, BuiltinProcessor)
    generator, torch_generator = random.Random(0), torch.Generator().manual_seed(0)
    all_rows = Rows(processor, ModelView(VOCAB, frozenset({1}), tokenizer.hf_tokenizer), dict(processor.example))
    prompt = tokenizer.encode("1. a\n2. so", add_special_tokens=False)

    def logits_of(step: int, count: int) -> torch.Tensor:
        torch_generator.manual_seed(step)
        return torch.randn(1, VOCAB, generator=torch_generator).expand(count, -1).clone() * 3

    # A history of steps, out of which every sequence can be played again from its beginning.
    outputs: list[list[int]] = [[]]
    rows = [all_rows.attach(prompt, outputs[0])]
    for length in range(9):
        edited = all_rows.step(rows, logits_of(length, len(rows)))
        for row, output in enumerate(list(outputs)):
            alone: list[int] = []
            again = all_rows.attach(prompt, alone)
            for place in range(length + 1):
                expected = all_rows.step([again], logits_of(place, 1))
                alone += output[place : place + 1]
            assert torch.equal(edited[row], expected[0]), (name, output)
        if length % 2 == 0 and len(rows) < 6:
            source = generator.randrange(len(rows))
            outputs.append(list(outputs[source]))
            rows.append(rows[source].fork(outputs[-1]))
        for output in outputs:
            output.append(generator.choice([3, 4, 5, *prompt]))


def test_history_copy_shares_states() -> None:
    history: StateHistory[tuple[list[int], int]] = StateHistory(([], 0))
    history.follow(range(50), lambda state, token: (state[0], token))
    copied = copy.deepcopy(history)
    assert len(copied) == 50
    assert copied.follow(range(50), lambda state, token: state)[0] is history.follow(range(50), lambda s, t: s)[0]
    copied.follow(range(60), lambda state, token: (state[0], token))
    assert (len(history), len(copied)) == (50, 60)


def test_index_copy_is_independent() -> None:
    generator = random.Random(1)
    index = NGramIndex(2, 30)
    prompt, output = generator.choices(range(4), k=20), generator.choices(range(4), k=20)
    index.follow(prompt, output)
    copied = copy.deepcopy(index)
    for _ in range(40):
        output.append(generator.randrange(4))
        copied.follow(prompt, output)
        fresh = NGramIndex(2, 30)
        fresh.follow(prompt, output)
        assert copied.followers() == fresh.followers()
    fresh = NGramIndex(2, 30)
    fresh.follow(prompt, output[:20])
    index.follow(prompt, output[:20])
    assert index.followers() == fresh.followers()


def test_long_history_is_copied_fast() -> None:
    """Far below the time to copy each state: deepcopy() of 8000 tuples takes more than ten milliseconds."""
    history: StateHistory[tuple[int, int]] = StateHistory((0, 0))
    index = NGramIndex(3, 8000)
    tokens = list(range(8000))
    history.follow(tokens, lambda state, token: (token, state[0]))
    index.follow([], tokens)
    for kept in (history, index):
        seconds = []
        for _ in range(5):
            began = time.thread_time()
            copy.deepcopy(kept)
            seconds.append(time.thread_time() - began)
        assert min(seconds) < 0.01


BATCH_PARAMS = SamplingParams(
    min_tokens=4,
    logit_bias={3: 2.0},
    min_p=0.3,
    thinking_token_budget=2,
    eos_token_ids={1},
    stop_token_ids={9},
    extra_args={},
)


@pytest.mark.parametrize(
    "make",
    [
        MinTokensLogitsProcessor,
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        ThinkingTokenBudgetLogitsProcessor,
    ],
)
def test_batch_processors_accept_row_with_output(make: type[LogitsProcessor]) -> None:
    """As in vLLM for resumed requests. The result is the same as for a row that was in the batch from its start."""
    reasoning = ReasoningConfig(
        reasoning_start_str="<",
        reasoning_end_str=">",
        reasoning_start_token_ids=[5],
        reasoning_end_token_ids=[6, 7],
        natural_reasoning_end_token_ids=[6, 7],
    )
    config = SimpleNamespace(
        reasoning_config=reasoning, scheduler_config=SimpleNamespace(max_num_seqs=4), speculative_config=None
    )
    tokens = [3, 5, 8, 8, 6, 7, 3, 5, 3]
    early, logits = make(config, torch.device("cpu"), False), torch.linspace(-3, 3, 12).expand(1, -1)
    output: list[int] = []
    early.update_state(BatchUpdate(1, [], [(0, BATCH_PARAMS, [4], output)], []))
    for length, token in enumerate(tokens):
        if length:
            early.update_state(None)
        late = make(config, torch.device("cpu"), False)
        late.update_state(BatchUpdate(1, [], [(0, BATCH_PARAMS, [4], list(output))], []))
        assert torch.equal(late.apply(logits.clone()), early.apply(logits.clone())), (make, output)
        output.append(token)


def reordered(section: str) -> dict[str, Any]:
    """RTP-LLM's recorded case in which beams are reordered: row i becomes a copy of row `src[i]`."""
    (case,) = (case for case in RECORDED[section] if any(step["op"] == "reorder" for step in case.get("steps", ())))
    assert isinstance(case, dict)
    return case


def test_recorded_tree_beams_are_forks(recorded_logits: ReadLogits) -> None:
    case = reordered("tree")
    model = ModelView(recorded_vocab(case), frozenset({2}), None)
    replay(case, Rows(TreeLogitsProcessor(), model, {"tree": case["config"]}), recorded_logits)


def test_recorded_thinking_beams_are_forks(recorded_logits: ReadLogits) -> None:
    case = reordered("think")
    known = StrictThinkModeLogitsProcessor.Params.model_fields
    params = {name: value for name, value in case["generate_config"].items() if name in known}
    model = ModelView(recorded_vocab(case), frozenset(), None)
    replay(case, Rows(StrictThinkModeLogitsProcessor(), model, params), recorded_logits)


def recorded_vocab(case: dict[str, Any]) -> int:
    logits = next(step["logits_in"] for step in case["steps"] if step["op"] == "process")
    return len(logits[0])


def replay(case: dict[str, Any], all_rows: Rows, recorded_logits: ReadLogits) -> None:
    prompt = case["generate_config"]["input_length"]
    outputs: list[list[int]] = [[] for _ in range(case["num_sequences"])]
    rows = [all_rows.attach([1] * prompt, output) for output in outputs]
    for step in case["steps"]:
        if step["op"] == "update":
            for output, tokens in zip(outputs, step["tokens"], strict=True):
                output += tokens[prompt + len(output) :]  # of beams, the whole sequence is recorded
        elif step["op"] == "reorder":
            outputs = [list(outputs[source]) for source in step["src"]]
            rows = [rows[source].fork(output) for source, output in zip(step["src"], outputs, strict=True)]
        elif step["op"] == "process":
            assert step.get("sequence_lengths", []) in ([], [prompt + len(output) for output in outputs])
            assert torch.equal(
                all_rows.step(rows, recorded_logits(step["logits_in"])), recorded_logits(step["expect_logits"])
            )
