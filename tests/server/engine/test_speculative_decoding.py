"""Outputs with and without drafts are equal, whatever is drafted: through the whole engine on the tiny model."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import BatchRows
from logitship.server.engine import build
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import StartError
from logitship.server.requests.messages import GenerationRequest
from logitship.server.requests.sequence import Sequence
from logitship.server.speculation.ngram_speculation import NGramSpeculation
from tests.helpers.coroutines import run
from tests.helpers.engine_requests import BuildEngine, Output, generate, generate_together, installed, request
from tests.helpers.processors import shipped_by_row

LENGTH = 30
REASONING = {"reasoning_parser": "qwen3"}
THINK, END_THINK = 2, 3

STATEFUL = shipped_by_row(
    "Stateful",
    """
    # Boost a token that depends on the calls and on earlier logits. Assert one call per token.
    calls = req.state["calls"] = req.state.get("calls", 0) + 1
    params["seen"].append(list(req.output_ids))
    assert calls == len(req.output_ids) + 1
    assert [len(seen) for seen in params["seen"]] == list(range(calls))
    req.state["largest"] = max(req.state.get("largest", 0), int(row.argmax()))
    row[(7 * calls + req.state["largest"] + sum(req.output_ids)) % req.vocab_size] += 3.0
    """,
)
FAILS_AT_NINE = shipped_by_row("FailsAtNine", 'if len(req.output_ids) == 9: raise RuntimeError("nine")')


class EveryThird(LogitsProcessor):
    """Boosts a token of each row, and another one at every third position."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.outputs: BatchRows[list[int]] = BatchRows(lambda params, prompt, output: output)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.outputs.update(batch_update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return self.apply_with_spec_decode(logits, [1] * len(logits))

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: list[int]) -> torch.Tensor:
        rows = [row for row, drafts in enumerate(num_draft_tokens) for _ in range(drafts)]
        assert len(rows) == len(logits)
        for place, row in enumerate(rows):
            logits[place, 100 if len(self.outputs[row]) % 3 else 50] += 20.0
        return logits


class WithoutDrafts(EveryThird):
    apply_with_spec_decode = None  # type: ignore[assignment]


CASES: dict[str, tuple[Any, ...]] = {
    "greedy": ({},),
    "random": ({"temperature": 1.0, "seed": 1},),
    "filtered": ({"temperature": 0.8, "seed": 2, "top_p": 0.9, "top_k": 20},),
    "min_p": ({"temperature": 1.5, "seed": 3, "min_p": 0.1},),
    "penalties": ({"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},),
    "bias": ({"logit_bias": {30: 2.0, 31: -5.0}},),
    "min_tokens": ({"min_tokens": 9, "stop_token_ids": list(range(100, 200))},),
    "bad_words": ({"bad_words_token_ids": [[a, b] for a in range(4, 60) for b in range(60, 200)]},),
    "allowed": ({"allowed_token_ids": list(range(50, 150))},),
    "logprobs": ({"logprobs": 3},),
    "processed_logprobs": ({"logprobs": 2, "logprobs_mode": "processed_logprobs", "temperature": 0.7, "seed": 4},),
    "stop_string": ({"stop": ["a", "e", "x", "Z"]},),
    "thinking_token_budget": ({"thinking_token_budget": 7},),
    "random thinking": ({"thinking_token_budget": 5, "temperature": 1.0, "seed": 5},),
    "stateful": ({}, (STATEFUL, {"seen": []})),
    "stateful, random": ({"temperature": 1.0, "seed": 6}, (STATEFUL, {"seen": []})),
    "fails": ({}, (FAILS_AT_NINE, None)),
    "two": (
        {},
        (STATEFUL, {"seen": []}),
        installed("disallowed_tokens", token_ids=list(range(4, 40))),
    ),
    "no_repeat_ngram": ({}, installed("no_repeat_ngram", ngram_size=2, window_size=50)),
    "thinking_budget": (
        {},
        installed("thinking_budget", thinking_budget=6, start=[THINK], end=[END_THINK], newline=[14]),
    ),
    "think_mode": ({}, installed("think_mode", max_thinking_tokens=6, end_think_token_ids=[END_THINK])),
    "tree": (
        {},
        installed("tree", tree={"start_token_id": 9, "end_token_id": 1, "prefix_dict": {"9": [40, 41], "9_40": [42]}}),
    ),
    "grammar": ({"temperature": 1.0, "seed": 7}, installed("grammar", ebnf='root ::= ("a" | "b")* "c"')),
    "gen_length": ({}, installed("gen_length", boost_factor=0.3)),
    "cite_from_prompt": ({}, installed("cite_from_prompt", boost_factor=2.0, conditional_boost_factor=2.0)),
    "force_last_phrase": ({}, installed("force_last_phrase", phrase="bye")),
    "trigger_phrase": ({}, installed("trigger_phrase", phrase="now", trigger_token_phrase="a", trigger_count=1)),
    "prevent_hallucination": ({}, installed("prevent_hallucination", phrase="no", minp=0.2, tolerate=2)),
}
"""Sampling parameters and processors."""


def requests(names: Iterable[str] = CASES) -> list[GenerationRequest]:
    built = []
    for number, name in enumerate(names):
        params, *processors = CASES[name]
        prompt = [THINK, *(4 + (7 * number + 13 * place) % 250 for place in range(5 + number))]
        built.append(request(name, prompt, processors, **({"max_tokens": LENGTH, "temperature": 0.0} | params)))
    return built


def run_all(engine: AsyncEngine, wanted: Iterable[GenerationRequest]) -> dict[str, Output]:
    """Return the outputs of requests that run at the same time, by their ids."""
    wanted = list(wanted)
    outputs = run(generate_together(engine, wanted), timeout=240)
    return {each.rid: output for each, output in zip(wanted, outputs, strict=True)}


def logprobs(output: Output) -> list[float]:
    return [each.logprob for each in output.logprobs if each.logprob is not None]


def steps(output: Output) -> list[int]:
    return [receipt.steps for receipt in output.receipts]


def reason(result: Output) -> str:
    """Return the finish reason, without the number in the module name of a loaded class."""
    return re.sub(r"processor_\d+", "processor", str(result.finish_reason))


class Oracle:
    """Drafts the known output, with random mistakes."""

    def __init__(self, known: dict[str, Output], mistakes: float) -> None:
        self.known = known
        self.mistakes = mistakes
        self.random = random.Random(0)
        self.drafted = self.accepted = 0
        self._before: dict[str, tuple[int, int]] = {}

    def drafts(self, decoding: Iterable[Sequence]) -> dict[Sequence, list[int]]:
        drafts = {}
        for sequence in decoding:
            done = len(sequence.output_token_ids)
            last, drafted = self._before.get(sequence.rid, (done, 0))
            self.accepted += max(0, done - last - 1) if drafted else 0
            expected_tokens = self.known[sequence.rid].token_ids[done:] + [5] * 9
            most = min(self.random.randrange(9), sequence.num_missing - 1)
            draft = [
                self.random.randrange(260) if self.random.random() < self.mistakes else token
                for token in expected_tokens[:most]
            ]
            self._before[sequence.rid] = done, len(draft)
            self.drafted += len(draft)
            if draft:
                drafts[sequence] = draft
        return drafts


@pytest.fixture(scope="module", params=["none", pytest.param("sandbox", marks=pytest.mark.thorough)])
def isolation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("mistakes", [pytest.param(0.0, marks=pytest.mark.thorough), 0.3, 1.0])
def test_drafts_do_not_change_outputs(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch, isolation: str, mistakes: float
) -> None:
    settings = {
        "enable_custom_logit_processor": True,
        "processor_isolation": isolation,
        "reasoning_config": REASONING,
        "max_num_seqs": 40,
    }
    plain = run_all(make_engine(**settings), requests())
    oracle = Oracle(plain, mistakes)
    monkeypatch.setattr(NGramSpeculation, "drafts", lambda self, decoding: oracle.drafts(decoding))
    engine = make_engine(**settings, speculative_algorithm="NGRAM")
    drafted = run_all(engine, requests())
    for name, expected in plain.items():
        assert drafted[name].token_ids == expected.token_ids, name
        assert drafted[name].text == expected.text, name
        assert logprobs(drafted[name]) == pytest.approx(logprobs(expected), abs=1e-4), name
        assert steps(drafted[name]) == steps(expected), name
        assert reason(drafted[name]) == reason(expected), name
    assert oracle.drafted > 500
    if mistakes < 1:
        # Not the number of steps: it depends on how soon all requests run side by side.
        assert oracle.accepted > 0.2 * oracle.drafted


def test_batch_processor_gets_the_rows_with_accepted_drafts(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = requests(["greedy", "random", "filtered", "penalties"])
    plain = run_all(make_engine(logits_processors=(EveryThird,)), wanted)
    assert 100 in plain["greedy"].token_ids
    oracle = Oracle(plain, 0.2)
    monkeypatch.setattr(NGramSpeculation, "drafts", lambda self, decoding: oracle.drafts(decoding))
    engine = make_engine(logits_processors=(EveryThird,), speculative_algorithm="NGRAM")
    drafted = run_all(engine, wanted)
    assert {name: each.token_ids for name, each in drafted.items()} == {
        name: each.token_ids for name, each in plain.items()
    }
    assert oracle.accepted > 0.3 * oracle.drafted


def test_batch_processor_without_draft_support_is_refused(make_engine: BuildEngine) -> None:
    with pytest.raises(StartError, match=r"speculative decoding is enabled. \(.*WithoutDrafts: no apply_with_spec"):
        make_engine(logits_processors=(WithoutDrafts,), speculative_algorithm="NGRAM")


def test_prompt_lookup_saves_steps(make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with repetitive output takes fewer steps than it has tokens, with the same output.

    Every step costs the same here: on a busy machine, measured costs may say that drafts do not pay off.
    """
    observe = NGramSpeculation.observe
    monkeypatch.setattr(build, "measure_step_cost", lambda runner, most_tokens: lambda num_tokens: 1.0)
    monkeypatch.setattr(
        NGramSpeculation, "observe", lambda self, rows, drafts, accepted, _: observe(self, rows, drafts, accepted, 1.0)
    )
    no_repeats = installed("no_repeat_ngram", ngram_size=60, window_size=100)
    bias = {40: 30.0, 41: 29.0}
    looping = request("loop", [10, 11, 12], [no_repeats], max_tokens=200, temperature=0.0, logit_bias=bias)
    plain = run(generate(make_engine(), looping))
    engine = make_engine(speculative_algorithm="NGRAM")
    assert run(generate(engine, looping)).token_ids == plain.token_ids
    assert engine.stats().steps < 120


@pytest.mark.thorough
def test_samples_follow_the_distribution_of_the_model(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample three tokens out of three 3,000 times with a constant draft, and compare with the enumerated distribution.

    Uses a chi-square test; the seeds differ from those of the enumeration.
    """
    tokens = [50, 60, 70]
    defaults: dict[str, Any] = {"max_tokens": 3, "allowed_token_ids": tokens, "temperature": 1.0, "logprobs": 0}
    wanted = [request(str(seed), [10, 11, 12], seed=seed, **defaults) for seed in range(3000)]
    decoded = 0

    def constant(self: NGramSpeculation, decoding: Iterable[Sequence]) -> dict[Sequence, list[int]]:
        nonlocal decoded
        drafts = {each: [60, 60][: each.num_missing - 1] for each in decoding}
        decoded += len(drafts)
        return drafts

    monkeypatch.setattr(NGramSpeculation, "drafts", constant)
    engine = make_engine(speculative_algorithm="NGRAM", max_num_seqs=64, max_queued_requests=5000)
    probability = enumerated(make_engine(), tokens)
    sampled = Counter(tuple(each.token_ids) for each in run(generate_together(engine, wanted), timeout=240))
    assert sum(probability.values()) == pytest.approx(1, abs=1e-3)
    chi_square = sum((sampled[path] - 3000 * p) ** 2 / (3000 * p) for path, p in probability.items())
    # 26 degrees of freedom: exceeds 54 with a probability of 0.001.
    assert chi_square < 54
    # Without drafts, each request has a row in two steps after its first token. Some of the drafts are accepted.
    assert decoded < 0.95 * 2 * 3000


def enumerated(engine: AsyncEngine, tokens: list[int]) -> dict[tuple[int, ...], float]:
    """Return the probability of each output of three tokens, from the log-probabilities after each prefix."""
    params: Any = {"allowed_token_ids": tokens, "logprobs": 3, "logprobs_mode": "processed_logprobs"}

    def probabilities(prefix: tuple[int, ...]) -> dict[int, float]:
        wanted = request(prompt=[10, 11, 12, *prefix], max_tokens=1, temperature=1.0, seed=0, **params)
        (position,) = run(generate(engine, wanted)).logprobs
        return {token: math.exp(logprob) for token, logprob in position.top}

    paths = {(): 1.0}
    for _ in range(3):
        paths = {(*path, token): p * each for path, p in paths.items() for token, each in probabilities(path).items()}
    return paths
