"""Forced tokens need no steps of their own, and change nothing: through the whole engine on the tiny model."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.drafter import Drafter
from logitship.sampler.processors import early_calls
from logitship.sampler.sampler import Sampler, SamplerOutput
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine import tenant_shares
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.forward_pass import StepLogits
from logitship.server.metrics.observed_metrics import CallStatistics
from logitship.server.model.model_loader import LoadedModel
from logitship.server.requests.messages import GenerationChunk, GenerationRequest, ProcessorRequest
from logitship.server.tokenizer import Tokenizer
from tests.helpers.coroutines import run
from tests.helpers.engine_requests import BuildEngine, generate, installed
from tests.helpers.engine_requests import request as any_request
from tests.helpers.processors import shipped_by_row

LENGTH = 24
VOCAB_SIZE = 260
EOS, THINK, END_THINK = 1, 2, 3

FORCING = """
import torch
from logitship import CustomLogitProcessor

class Forcing{number}(CustomLogitProcessor):
    '''Writes a phrase now and then, in one of several ways. Each sequence is called once for each token, in order.'''
    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            req = params["__req__"]
            length = len(req.output_ids)
            assert req.state.get("length", -1) == length - 1, (req.state, length)
            req.state["length"] = length
            req.state["sum"] = req.state.get("sum", 0) + sum(req.output_ids[-1:])
            place = length % (params["pause"] + len(params["phrase"])) - params["pause"]
            if place < 0:
                logits[row, req.state["sum"] % req.vocab_size] += 1.0
            else:
                self.force(logits, row, params["phrase"][place], params["way"])
        return logits

    def force(self, logits, row, token, way):
        if way == "fill":
            logits[row, :] = -torch.inf
            logits[row, token] = 0.0
        elif way == "keep":
            kept = logits[row, [token]].clone()
            logits[row] = -torch.inf
            logits[row, [token]] = kept
        elif way == "mask":
            mask = torch.ones(logits.shape[1], dtype=torch.bool)
            mask[token] = False
            logits[row] = logits[row].masked_fill(mask, -torch.inf)
        elif way == "two":
            logits[row, :] = -torch.inf
            logits[row, [token, (token + 1) % 200]] = 0.0
        elif way == "lowest":
            logits[row, :] = torch.finfo(logits.dtype).min
            logits[row, token] = 0.0
        elif way == "read":
            largest = logits[row].max()
            logits[row, :] = -torch.inf
            logits[row, token] = largest
        elif way == "bias":
            logits[row, token] += 1e4
"""
WAYS = ["fill", "fill", "keep", "mask", "two", "lowest", "read", "bias"]

SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 3}, "is_member": {"type": "boolean"}},
    "required": ["first_name", "is_member"],
    "additionalProperties": False,
}


def shipped(generator: random.Random) -> ProcessorRequest:
    number = generator.randrange(3)
    params = {
        "phrase": [generator.randrange(4, 200) for _ in range(generator.randrange(1, 9))],
        "pause": generator.randrange(5),
        "way": generator.choice(WAYS),
    }
    return ProcessorRequest(SourceProcessor(FORCING.format(number=number), f"Forcing{number}"), params)


def built_in(generator: random.Random) -> ProcessorRequest:
    phrase = [generator.randrange(4, 200) for _ in range(6)]
    tree = {f"9{''.join(f'_{token}' for token in phrase[:end])}": phrase[end : end + 1] for end in range(6)}
    tree["9_" + "_".join(map(str, phrase))] = [EOS]
    sentences = ["the order is late", "the order was lost", "no"]
    return generator.choice(
        [
            installed("grammar", regex=generator.choice(["ab[0-9]cdefg(hij|hkl)m*", "(yes|no): [a-c]+ end"])),
            installed("grammar", choice=generator.sample(sentences, k=generator.randrange(1, 4))),
            installed("grammar", json_schema=json.dumps(SCHEMA)),
            installed("tree", tree={"start_token_id": 9, "end_token_id": EOS, "prefix_dict": tree}),
            installed("thinking_budget", thinking_budget=3, start=[THINK], end=[40, 41, 42, END_THINK], newline=[14]),
            installed("think_mode", max_thinking_tokens=4, end_think_token_ids=[50, 51, END_THINK]),
            installed("force_last_phrase", phrase="good bye"),
            installed("trigger_phrase", phrase="now", trigger_token_phrase="a", trigger_count=2),
            installed("no_repeat_ngram", ngram_size=2, window_size=50),
            installed("disallowed_tokens", token_ids=list(range(40, 120))),
        ]
    )


def random_params(generator: random.Random) -> dict[str, Any]:
    """Return sampling parameters: about a third of each kind."""
    choices: list[dict[str, Any]] = [
        {"stop": generator.sample(["e", "f", "mem", "rst_", "was"], k=2)},
        {"stop_regex": generator.sample(["[e-h]$", "m.m", "(?i)RST_+", r"\bwas", "\\d+[a-z]"], k=2)},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"min_tokens": 6, "stop_token_ids": list(range(80, 100))},
        {"logprobs": 2},
        {"logprobs": 1, "logprobs_mode": "processed_logprobs"},
        {"trace": 2},
        {"logit_bias": {50: 3.0, 51: -100.0}},
        {"allowed_token_ids": generator.sample(range(VOCAB_SIZE), k=generator.choice([1, 1, 3, 200]))},
        {"bad_words_token_ids": [[a, b] for a in range(4, 40) for b in range(60, 90)]},
        {"thinking_token_budget": 5},
    ]
    params: dict[str, Any] = {"max_tokens": generator.randrange(6, LENGTH), "ignore_eos": generator.random() < 0.5}
    if generator.random() < 0.5:
        params |= {"temperature": 1.0, "seed": generator.randrange(1000)}
        choices += [{"top_p": 0.8, "top_k": 30}, {"min_p": 0.1}]
    else:
        params |= {"temperature": 0.0}
    for each in choices:
        if generator.random() < 0.15:
            params |= each
    return params


def random_request(rid: str, generator: random.Random) -> GenerationRequest:
    processors = [shipped(generator)] * (generator.random() < 0.6) + [built_in(generator)] * (generator.random() < 0.5)
    generator.shuffle(processors)
    return GenerationRequest(
        rid=rid,
        tenant=generator.choice("ab"),
        prompt_token_ids=[THINK, *(generator.randrange(4, 200) for _ in range(generator.randrange(1, 12)))],
        sampling_params=SamplingParams(**random_params(generator)),
        processors=tuple(processors),
        n=generator.choice([1, 1, 1, 2]),
    )


class Continuation:
    """One continuation as its client gets it, without times."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.num_forced = 0
        self.others: list[Any] = []

    def add(self, chunk: GenerationChunk) -> None:
        """Add a chunk."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        for logprob in chunk.logprobs:
            self.logprobs.append(logprob.logprob or 0.0)
            self.others.append((logprob.token_id, logprob.rank, [token for token, _ in logprob.top]))
        self.others += [
            (trace.token_id, trace.candidates, [stage.stage for stage in trace.stages]) for trace in chunk.traces
        ]
        self.others += [receipt.steps for receipt in chunk.receipts]
        self.num_forced += max((receipt.forced_steps for receipt in chunk.receipts), default=0)
        if chunk.finish_reason is not None:
            error = chunk.finish_reason.error
            message = error and re.sub(r"processor_\d+", "processor", error.message)
            self.others.append(
                (chunk.finish_reason.kind, chunk.finish_reason.matched, message, chunk.completion_tokens)
            )


def run_all(engine: AsyncEngine, wanted: Iterable[GenerationRequest]) -> dict[tuple[str, int], Continuation]:
    found: defaultdict[tuple[str, int], Continuation] = defaultdict(Continuation)

    async def take(request: GenerationRequest) -> None:
        async for chunk in await engine.submit(request):
            found[request.rid, chunk.index].add(chunk)

    async def take_all() -> None:
        await asyncio.gather(*map(take, wanted))

    run(take_all(), timeout=240)
    return found


def assert_equal(
    forced: dict[tuple[str, int], Continuation], plain: dict[tuple[str, int], Continuation], wanted: Sequence[Any] = ()
) -> None:
    requests = {request.rid: request for request in wanted}
    assert forced.keys() == plain.keys()
    for key, expected in plain.items():
        found, about = forced[key], requests.get(key[0])
        assert found.token_ids == expected.token_ids, about
        assert found.text == expected.text, about
        assert found.others == expected.others, about
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4), about


SETTINGS: dict[str, Any] = {
    "reasoning_config": {"reasoning_parser": "qwen3"},
    "max_num_seqs": 16,
    "processor_wait": float("inf"),
    "chunked_prefill_size": 32,
}


@pytest.mark.parametrize("speculation", [pytest.param(None, marks=pytest.mark.thorough), "NGRAM"])
@pytest.mark.parametrize("isolation", ["none", pytest.param("sandbox", marks=pytest.mark.thorough)])
def test_forced_runs_change_nothing(make_engine: BuildEngine, isolation: str, speculation: str | None) -> None:
    settings = SETTINGS | {"processor_isolation": isolation, "speculative_algorithm": speculation}
    generator = random.Random(f"{isolation} {speculation}")
    wanted = [random_request(f"r{number}", generator) for number in range(200)]
    plain = run_all(make_engine(**settings, max_forced_run=0), wanted)
    engine = make_engine(**settings)
    forced = run_all(engine, wanted)
    assert_equal(forced, plain, wanted)
    assert engine.stats().forced > 50
    assert all(each.num_forced == 0 for each in plain.values())


def forcing(way: str, length: int = 8, **params: Any) -> GenerationRequest:
    """Return a request whose sandboxed processor writes a phrase again and again, after pauses of four tokens."""
    phrase = ProcessorRequest(
        SourceProcessor(FORCING.format(number=(number := WAYS.index(way))), f"Forcing{number}"),
        {"phrase": list(range(40, 40 + length)), "pause": 4, "way": way},
    )
    return any_request("r", [5, 6], [phrase], **({"max_tokens": 60, "temperature": 0.0} | params))


def alone(engine: AsyncEngine, request: GenerationRequest) -> Continuation:
    return run_all(engine, [request])["r", 0]


@pytest.fixture(scope="module")
def sandboxed(make_module_engine: BuildEngine) -> AsyncEngine:
    return make_module_engine(processor_isolation="sandbox")


@pytest.mark.parametrize("way", ["fill", "keep", "mask"])
def test_sandboxed_processor_forces_a_run(sandboxed: AsyncEngine, way: str) -> None:
    before = sandboxed.stats()
    found = alone(sandboxed, forcing(way))
    after = sandboxed.stats()
    # Five phrases of eight tokens. The first token of the first one shows that the processor forces tokens at all.
    assert found.num_forced == after.forced - before.forced >= 4 * 8
    assert after.steps - before.steps <= 60 - 4 * 7 + 2


@pytest.mark.parametrize("way", ["two", "lowest", "read", "bias"])
def test_what_leaves_other_tokens_is_not_forced(sandboxed: AsyncEngine, way: str) -> None:
    """The lowest finite number leaves a token possible, if barely."""
    before = sandboxed.stats().forced
    alone(sandboxed, forcing(way, temperature=1.0, seed=3))
    assert sandboxed.stats().forced == before


def test_processor_that_forces_nothing_is_not_looked_at(
    sandboxed: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    draft = Drafter.draft
    monkeypatch.setattr(Drafter, "draft", lambda self, rows: looked_at.append(rows) or draft(self, rows))
    alone(sandboxed, forcing("bias"))
    assert not looked_at
    alone(sandboxed, forcing("fill"))
    assert looked_at


@pytest.mark.parametrize(("most", "steps"), [(0, 60), pytest.param(1, 40, marks=pytest.mark.thorough), (3, 30)])
def test_runs_are_bounded(make_engine: BuildEngine, most: int, steps: int) -> None:
    engine = make_engine(processor_isolation="sandbox", max_forced_run=most)
    found = alone(engine, forcing("fill"))
    assert found.num_forced == 60 - engine.stats().steps
    assert engine.stats().steps == 60 if most == 0 else steps <= engine.stats().steps < 60


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_guesses_of_a_grammar_are_verified(
    make_engine: BuildEngine, float32_model: LoadedModel, loaded_model: LoadedModel, dtype: str
) -> None:
    """The text is the only one; its tokens are single bytes, as usual for this model. Fused layers compute float32."""
    engine = make_engine({"float32": float32_model, "float64": loaded_model}[dtype])
    request = replace(forcing("fill"), processors=(installed("grammar", choice=["the delivery is late", "the delay"]),))
    found = alone(
        engine, replace(request, sampling_params=SamplingParams(max_tokens=40, eos_token_ids=frozenset({EOS})))
    )
    assert found.text in ("the delivery is late", "the delay")
    assert found.num_forced >= 5


def test_tokenizer_with_more_tokens_than_logits(make_engine: BuildEngine, loaded_model: LoadedModel) -> None:
    """The masks of a grammar are longer there than that of the allowed tokens."""
    larger = copy.deepcopy(loaded_model.tokenizer.hf_tokenizer)
    larger.add_tokens([f"<extra_{number}>" for number in range(60)])
    engine = make_engine(replace(loaded_model, tokenizer=Tokenizer(larger)))
    sampling = SamplingParams(max_tokens=40, eos_token_ids=frozenset({EOS}), allowed_token_ids=list(range(250)))
    request = replace(
        forcing("fill"), processors=(installed("grammar", regex="[ab]{3}late"),), sampling_params=sampling
    )
    found = alone(engine, request)
    assert re.fullmatch("[ab]{3}late", found.text)
    assert found.num_forced >= 4


@pytest.mark.parametrize(
    ("params", "is_sampled"),
    [
        ({}, False),
        ({"min_tokens": 10, "bad_words_token_ids": [[9, 9]]}, False),
        ({"temperature": 1.0, "seed": 3}, True),
        ({"logit_bias": {50: 1.0}}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"logprobs": 0}, True),
    ],
)
def test_guesses_of_greedy_requests_need_no_sampler(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], is_sampled: bool
) -> None:
    """Unless something edits the logits of the few tokens that a mask leaves, or all logits are asked for."""
    sample, num_sampled = Sampler.sample, 0

    def counting(sampler: Sampler, logits: torch.Tensor, rows: Sequence[int] | None = None) -> SamplerOutput:
        nonlocal num_sampled
        num_sampled += len(logits)
        return sample(sampler, logits, rows)

    monkeypatch.setattr(Sampler, "sample", counting)
    request = replace(forcing("fill"), processors=(installed("grammar", choice=["the delivery is late"]),))
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "eos_token_ids": frozenset({EOS})} | params)
    found = alone(make_engine(), replace(request, sampling_params=sampling))
    assert found.text == "the delivery is late"
    assert num_sampled == len(found.token_ids) if is_sampled else num_sampled < 5


def test_installed_batch_processor_may_do_anything(make_engine: BuildEngine) -> None:
    engine = make_engine(logits_processors=(AddsNothing,))
    request = replace(forcing("fill"), processors=(installed("grammar", choice=["the delivery is late"]),))
    alone(engine, request)
    assert engine.stats().forced == 0


class AddsNothing(LogitsProcessor):
    """A batch processor of which nothing is known."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@pytest.mark.parametrize("way", ["fill", "keep"])
@pytest.mark.parametrize("isolation", ["none", pytest.param("sandbox", marks=pytest.mark.thorough)])
def test_logits_that_are_not_finite(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch, isolation: str, way: str
) -> None:
    """A model's logit of a certain token is NaN: what happens is the same as one by one."""
    of, single = StepLogits.of, StepLogits.single

    def broken(*args: Any) -> torch.Tensor:
        logits = of(*args)
        logits[:, 45] = math.nan
        return logits

    def broken_single(logits: StepLogits, depth: int, token_ids: dict[int, list[int]]) -> dict[int, list[float]]:
        return {
            row: [math.nan if token == 45 else value for token, value in zip(token_ids[row], values, strict=True)]
            for row, values in single(logits, depth, token_ids).items()
        }

    monkeypatch.setattr(StepLogits, "of", broken)
    monkeypatch.setattr(StepLogits, "single", broken_single)
    found = [
        alone(make_engine(processor_isolation=isolation, max_forced_run=most), request)
        for request in (
            forcing(way),
            replace(forcing(way), processors=(installed("grammar", regex="[a-c]{4}(hijk)*m+"),)),
        )
        for most in (0, 16)
    ]
    for plain, forced in (found[:2], found[2:]):
        assert forced.token_ids == plain.token_ids
        assert forced.others == plain.others


SLEEPING = shipped_by_row(
    "Sleeping",
    """
    # Force tokens until it blocks, without using CPU time.
    import time
    length = len(req.output_ids)
    if length == 6:
        time.sleep(3600)
    row[:] = -torch.inf
    row[40 + length] = 0.0
    """,
)


def test_processor_that_blocks_ahead_of_the_model(sandboxed: AsyncEngine) -> None:
    """No step is planned meanwhile, as its sequence is the only one; the deadline ends its call nevertheless."""
    found = alone(sandboxed, replace(forcing("fill"), processors=(ProcessorRequest(SLEEPING, {}),)))
    ((kind, _, message, num_tokens),) = found.others[-1:]
    assert (kind, num_tokens) == ("abort", 6)
    assert "gave no answer within 1 s" in message
    assert len(alone(sandboxed, forcing("fill")).token_ids) == 60


READING = shipped_by_row(
    "Reading",
    """
    # Write a phrase, and use the values of the logits after it.
    length = len(req.output_ids)
    print("token", length)
    if 4 <= length < 12:
        row[:] = -torch.inf
        row[40 + length] = 0.0
    elif length == 12:
        row[60] = row.max() + 1
    else:
        row[70] += 1.0
    """,
)


def reading(rid: str = "r", **params: Any) -> GenerationRequest:
    return replace(forcing("fill", max_tokens=20, **params), rid=rid, processors=(ProcessorRequest(READING, {}),))


@pytest.mark.parametrize("others", [pytest.param((), marks=pytest.mark.thorough), ("plain",)])
def test_next_request_after_one_that_ended_within_its_run(
    make_engine: BuildEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    """The class was called for the token after the run, and waits for its logits when a stop string ends the run."""
    monkeypatch.setattr(early_calls, "MAX_WAIT", 60.0)  # also on a busy machine
    monkeypatch.setattr(tenant_shares, "MIN_WAIT", 60.0)
    engine = make_engine(processor_isolation="sandbox")
    expected = alone(engine, reading())
    beside = [replace(forcing("fill"), rid=rid, processors=()) for rid in others]
    stop = tokenizer.decode([48])
    stopped = run_all(engine, [reading("stopped", stop=[stop]), *beside])["stopped", 0]
    assert stopped.token_ids == expected.token_ids[:9]
    for _ in range(2):
        assert run_all(engine, [reading("next"), *beside])["next", 0].token_ids == expected.token_ids


@pytest.mark.parametrize("most", [0, 16])
def test_forced_tokens_are_in_receipts_and_metrics(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    rows_of_calls = []
    monkeypatch.setattr(CallStatistics, "observe", lambda self, num_rows, *_: rows_of_calls.append(num_rows))
    engine = make_engine(processor_isolation="sandbox", max_forced_run=most)
    (receipt,) = run(generate(engine, reading())).receipts
    assert receipt.printed.split("\n")[:-1] == [f"token {number}" for number in range(20)]
    assert receipt.forced_steps == (7 if most else 0)
    assert rows_of_calls == [1] * 20
