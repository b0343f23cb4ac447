"""A class of one tenant, or an error of the server on it, ends or delays no request of another tenant."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.client.serialization.processor_string import InstalledProcessor, SourceProcessor
from logitship.sampler.edits.edit_operations import num_touched
from logitship.sampler.edits.merged_edits import _Target, apply_separately
from logitship.sampler.processors import processor_groups
from logitship.sampler.processors.processor_groups import ProcessorGroup
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.sandbox_executor import SandboxGroup
from logitship.sampler.sandbox.sandbox_run import SandboxRun
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.requests.messages import GenerationRequest, ProcessorRequest, RequestError
from logitship.server.tokenizer import Tokenizer
from tests.helpers.clock import Clock

BuildEngine = Callable[..., AsyncEngine]

FIRST = 40
"""The first token that `Mixing` writes."""

MIXING = '''
import torch
from logitship import CustomLogitProcessor

class Mixing(CustomLogitProcessor):
    """Writes a few tokens, then lets each row have a logit of the row before it."""
    def __call__(self, logits, custom_param_list=None):
        values = [logits[row, [50]].clone() for row in range(len(logits))]
        for row, params in enumerate(custom_param_list):
            length = len(params["__req__"].output_ids)
            if length < params["count"]:
                logits[row, :] = -torch.inf
                logits[row, 40 + length] = 0.0
            else:
                logits[row, [60]] = values[row - 1]
        return logits
'''

BAN = '''
from logitship import CustomLogitProcessor

class Ban(CustomLogitProcessor):
    """Bans tokens, by itself and without a look at the logits."""
    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            logits[row, params["ids"]] = -float("inf")
        return logits
'''


@dataclass
class End:
    """The end of a request, as its client sees it.

    Attributes:
        token_ids: its tokens.
        kind: its finish reason.
        error: its error.
    """

    token_ids: list[int] = field(default_factory=list)
    kind: str = ""
    error: RequestError | None = None


def request(rid: str, tenant: str, processors: Sequence[ProcessorRequest] = (), **params: Any) -> GenerationRequest:
    sampling = SamplingParams(**({"max_tokens": 24, "ignore_eos": True, "temperature": 0.0} | params))
    return GenerationRequest(
        rid=rid,
        tenant=tenant,
        prompt_token_ids=[5, 6, *rid.encode()],
        sampling_params=sampling,
        processors=tuple(processors),
    )


def mixing(count: int) -> ProcessorRequest:
    return ProcessorRequest(SourceProcessor(MIXING, "Mixing"), {"count": count})


def ban(*ids: int) -> ProcessorRequest:
    return ProcessorRequest(SourceProcessor(BAN, "Ban"), {"ids": list(ids)})


def run(engine: AsyncEngine, wanted: Sequence[GenerationRequest], timeout: float = 240.0) -> dict[str, End]:
    ends = {each.rid: End() for each in wanted}

    async def take(one: GenerationRequest) -> None:
        end = ends[one.rid]
        async for chunk in await engine.submit(one):
            end.token_ids += chunk.token_ids
            if chunk.finish_reason is not None:
                end.kind, end.error = chunk.finish_reason.kind, chunk.finish_reason.error

    async def take_all() -> None:
        async with asyncio.timeout(timeout):
            await asyncio.gather(*map(take, wanted))

    asyncio.run(take_all())
    return ends


SETTINGS: dict[str, Any] = {
    "processor_isolation": "sandbox",
    "max_num_seqs": 16,
    "processor_wait": float("inf"),
}
"""Steps wait for all calls, so that they do not depend on how busy the machine is."""


@pytest.mark.parametrize("count", [4, *(pytest.param(count, marks=pytest.mark.thorough) for count in (6, 8))])
def test_row_that_ends_in_a_run_of_a_call_whose_rows_depend_on_each_other(
    make_engine: BuildEngine, tokenizer: Tokenizer, count: int
) -> None:
    """A text stop ends one sequence in the middle of a run, for whose end the processor was called with both."""
    engine = make_engine(**SETTINGS)
    stop = tokenizer.decode([FIRST + count - 1])
    ends = run(
        engine,
        [
            request("a", "hostile", [mixing(count)], stop=[stop]),
            request("b", "hostile", [mixing(count)]),
            request("victim", "honest", max_tokens=60),
        ],
    )
    assert engine.stats().forced > 0
    assert (ends["a"].kind, len(ends["a"].token_ids)) == ("stop", count)
    assert (ends["b"].kind, len(ends["b"].token_ids)) == ("length", 24)
    assert (ends["victim"].kind, len(ends["victim"].token_ids)) == ("length", 60)
    assert ends["b"].token_ids[:count] == [*range(FIRST, FIRST + count)]


@pytest.mark.thorough
def test_edits_that_cannot_be_applied_end_their_rows_alone(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the edits of all groups are applied together."""
    wanted = [
        request("a", "x", [ban(41)]),
        request("b", "y", [ban(42, 7)]),
        request("c", "z", [ban(*range(50, 120))]),
        request("d", "z"),
    ]
    expected = run(make_engine(**SETTINGS), wanted)
    positions = _Target._positions

    def failing(target: _Target, layer: Sequence[Any]) -> Any:
        if any(7 in edit.positions.tolist() for _, _, edit in layer):
            raise IndexError("an error of the server")
        return positions(target, layer)

    monkeypatch.setattr(_Target, "_positions", failing)
    monkeypatch.setattr(_Target, "_few_positions", None)
    found = run(make_engine(**SETTINGS), wanted)
    error = found.pop("b").error
    del expected["b"]
    assert error is not None
    assert (error.status_code, error.kind) == (500, "internal")
    assert found == expected


@pytest.mark.parametrize(
    "name", ["_take", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("promise", "finish", "_enter"))]
)
def test_error_of_the_server_in_a_call_ends_its_rows_alone(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wanted = [request("a", "x", [ban(41)]), request("b", "y", [ban(42)]), request("c", "z")]
    expected = run(make_engine(**SETTINGS), wanted)
    fail_for(monkeypatch, name, "y")
    found = run(make_engine(**SETTINGS), wanted)
    error = found.pop("b").error
    del expected["b"]
    assert error is not None
    assert (error.status_code, error.kind) == (500, "internal")
    assert found == expected


def fail_for(monkeypatch: pytest.MonkeyPatch, name: str, tenant: str) -> None:
    """Let the server fail in a part of the calls of a tenant's processors."""
    owner: Any = {"_take": ShippedProcessors, "promise": SandboxGroup, "finish": SandboxRun, "_enter": SandboxRun}[name]
    function = getattr(owner, name)

    def failing(self: Any, *args: Any) -> Any:
        group = args[0] if args and isinstance(args[0], ProcessorGroup) else self
        processor = getattr(group, "processor", None) or self._processor
        if processor.tenant == tenant:
            raise KeyError("an error of the server")
        return function(self, *args)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.thorough
def test_built_in_that_fails_to_restrict_ends_nothing(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call forbids the same tokens once the logits exist."""
    grammar = ProcessorRequest(InstalledProcessor("grammar"), {"regex": "abc[0-9]defghi"})
    wanted = [request("a", "x", [grammar]), request("b", "y", [ban(42)]), request("c", "z")]
    expected = run(make_engine(**SETTINGS), wanted)
    calls = []

    def failing(self: GrammarProcessor, *args: Any) -> None:
        calls.append(args)
        raise KeyError("an error of the server")

    monkeypatch.setattr(GrammarProcessor, "restrict", failing)
    assert run(make_engine(**SETTINGS), wanted) == expected
    assert calls


CHAOS = """
import os, time
import torch
from logitship import CustomLogitProcessor

class Chaos(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        rows = range(len(logits))
        steps = []
        for params in custom_param_list:
            req = params["__req__"]
            length = len(req.output_ids)
            assert req.state.get("length", -1) == length - 1, (req.state, length)
            req.state["length"] = length
            steps.append(params["program"][length % len(params["program"])])
        saved = [logits[row, [50, 51]].clone() for row in rows] if any(a in ("take", "swap") for a, _ in steps) else []
        for row, (action, number) in zip(rows, steps):
            if action == "force":
                logits[row, :] = -torch.inf
                logits[row, number] = 0.0
            elif action == "keep":
                kept = logits[row, [number]].clone()
                logits[row] = -torch.inf
                logits[row, [number]] = kept
            elif action == "bias":
                logits[row, number] += 2.0
            elif action == "take":
                logits[row, [number, 61]] = saved[row - 1] * 0.5
            elif action == "swap":
                logits[row, [51, 50]] = saved[row - 1]
                logits[row - 1, [50, 51]] = saved[row]
            elif action == "read":
                logits[row, number] = logits[row].max()
            elif action == "nan":
                logits[row, number] = float("nan")
            elif action == "raise":
                raise ValueError("as asked")
            elif action == "sleep":
                time.sleep(number / 1000)
            elif action == "die":
                os._exit(3)
        return logits
"""
ACTIONS = ["force", "keep", "bias", "take", "take", "swap", "swap", "read", "pass"]


def random_program(generator: random.Random, actions: Sequence[str]) -> list[tuple[str, int]]:
    """Return what a sequence does at each token: force some, then something else, and so on."""
    forced = [("force", token) for token in generator.sample(range(40, 90), k=generator.randrange(9))]
    return forced + [(generator.choice(actions), generator.randrange(40, 90)) for _ in range(generator.randrange(1, 5))]


def chaos(program: Sequence[tuple[str, int]]) -> ProcessorRequest:
    return ProcessorRequest(SourceProcessor(CHAOS, "Chaos"), {"program": [*map(list, program)]})


def honest_requests() -> list[GenerationRequest]:
    grammar = ProcessorRequest(InstalledProcessor("grammar"), {"regex": "(ab|cd)+[0-9]{30}"})
    return [
        request("plain", "honest", max_tokens=40),
        request("ban", "honest", [ban(*range(40, 200, 3))], max_tokens=40),
        request("grammar", "other", [grammar], max_tokens=40),
        request("sampled", "other", [ban(41)], max_tokens=40, temperature=1.0, seed=3),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("wait", [float("inf"), 0.2])
def test_random_classes_end_no_request_of_others(make_engine: BuildEngine, tokenizer: Tokenizer, wait: float) -> None:
    generator = random.Random(f"{wait}")
    engine = make_engine(**SETTINGS | {"processor_wait": wait})
    expected = run(engine, honest_requests())
    forced = 0
    for number in range(12):
        rare = [generator.choice(["raise", "nan", "sleep", "die"])]
        programs = [random_program(generator, ACTIONS + rare) for _ in range(2)]
        hostile = []
        for each in range(5):
            program = generator.choice(programs)
            stop = tokenizer.decode([generator.choice(program[-4:])[1]])
            limits: dict[str, Any] = generator.choice([{}, {"stop": [stop]}, {"max_tokens": 9}])
            tenant = generator.choice(["hostile", "hostile", "another"])
            hostile.append(request(f"{number}.{each}", tenant, [chaos(program)], **limits))
        ends = run(engine, [*hostile, *honest_requests()])
        assert {rid: ends.pop(rid) for rid in expected} == expected
        kinds = {end.error.kind for end in ends.values() if end.error is not None}
        assert kinds <= {"exception", "non_finite", "crash", "load", "deadline"}
        forced += engine.stats().forced
    assert forced > 0


@pytest.mark.thorough
def test_classes_that_sleep_delay_no_request_of_others(make_engine: BuildEngine) -> None:
    engine = make_engine(**SETTINGS | {"processor_wait": 0.2})
    ended: list[str] = []

    async def take(one: GenerationRequest) -> None:
        async for chunk in await engine.submit(one):
            if chunk.finish_reason is not None:
                assert chunk.finish_reason.error is None
                ended.append(one.rid)

    async def take_all() -> None:
        sleep = chaos([("force", 50), ("sleep", 200)])
        async with asyncio.timeout(240):
            await asyncio.gather(
                *(take(request(f"slow {number}", "hostile", [sleep], max_tokens=40)) for number in range(3)),
                *map(take, honest_requests()),
            )

    asyncio.run(take_all())
    assert {*ended[:4]} == {each.rid for each in honest_requests()}


def test_time_to_apply_edits_is_charged_to_the_tenants_whose_edits_they_are(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock on which applying an edit takes 10 ms for each logit. The calls themselves take less."""
    clock = Clock()

    def slow(logits: torch.Tensor, groups: Sequence[tuple[Sequence[int], Any]]) -> dict[int, Exception]:
        clock.now += 0.01 * sum(num_touched(edits, logits.shape[-1]) for _, edits in groups)
        return apply_separately(logits, groups)

    monkeypatch.setattr(processor_groups, "apply_separately", slow)
    monkeypatch.setattr(processor_groups, "time", SimpleNamespace(perf_counter=clock))
    engine = make_engine(**SETTINGS)
    run(engine, [request("a", "dear", [ban(*range(40, 100))]), request("b", "cheap", [ban(41)]), request("c", "none")])
    seconds = engine.stats().tenant_step_seconds
    assert seconds["dear"] > 24 * 60 * 0.01 * 0.9
    assert seconds["cheap"] < seconds["dear"] / 4
    assert "none" not in seconds
