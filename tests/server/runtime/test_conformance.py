"""Scenarios that hold in every engine, on a fake of each that schedules at random, as the engine may."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.server.runtime import allowances
from logitship.server.runtime.request_runtime import RequestRuntime
from logitship.server.sglang.sampling_ranks import SamplingRanks
from logitship.server.transformers import generate_seat
from tests.helpers.random_cases import random_seeds
from tests.server.vllm.early_executor import EarlyExecutor
from tests.server.vllm.fake_runner import OneRank

from .fake_engines import BATCHED, ENGINES, FakeEngine, Job

engines = pytest.mark.parametrize("engine", ENGINES)


@engines
@pytest.mark.parametrize("share", [0.0, 0.7])
@random_seeds(12)
def test_histories_are_exact_in_every_schedule(seed: int, engine: type[FakeEngine], share: float) -> None:
    """Covers prompt chunks, preemption, retraction, moves of rows, tokens in flight, a step too many, early calls."""
    executor = EarlyExecutor()
    executor.share = share
    rng = random.Random(seed)
    fake, expected, jobs = engine(executor), {}, []
    for number in range(24):
        prompt, tokens, first = rng.randint(1, 9), rng.randint(1, 20), rng.randint(2, 40)
        kind = rng.choice(["plain", "runs", "runs", "fails"])
        fails_at = rng.randrange(tokens) if kind == "fails" else None
        job = Job(str(number), None if kind == "plain" else first, prompt, tokens, fails_at, own=number % 2)
        jobs.append(job)
        expected[job.rid] = fake.plain(job) if kind == "plain" else job.forced
    assert fake.run(seed, *jobs) == expected
    assert fake.ends.keys() == {job.rid for job in jobs if job.fails_at is not None}
    assert fake.processors.in_use == 0
    assert not fake.runtime._kept
    assert bool(executor.num_early) == (share > 0 and fake.begins_early)
    assert not executor.unfinished
    assert not executor.attached


@engines
@pytest.mark.parametrize(("tokens", "stop"), [(4, ()), (8, (5,))], ids=["its_length", "a_stop_token"])
def test_processor_is_not_called_after_the_end(engine: type[FakeEngine], tokens: int, stop: tuple[int, ...]) -> None:
    """Engines compute one step more than they need, before they know the token that ended the request."""
    fake = engine()
    assert fake.run(0, Job("x", tokens=tokens, stop=stop, fails_at=4))["x"] == [2, 3, 4, 5]
    assert not fake.ends


@engines
def test_fault_ends_its_request_with_the_traceback(engine: type[FakeEngine]) -> None:
    fake = engine()
    failing, other = Job("fails", fails_at=2), Job("other", first=20)
    assert fake.run(1, failing, other) == {"fails": [2, 3], "other": other.forced}
    assert "processor ChecksHistory raised RuntimeError: requested" in fake.ends["fails"]
    assert "Traceback" in fake.ends["fails"]
    assert fake.ends.keys() == {"fails"}


@engines
def test_processor_that_cannot_be_loaded_ends_its_request(engine: type[FakeEngine]) -> None:
    fake = engine()
    broken, other = Job("broken", processor='{"name": "nothing"}'), Job("other")
    assert fake.run(1, broken, other) == {"broken": [], "other": other.forced}
    assert "no processor is installed or registered as 'nothing'" in fake.ends["broken"]
    assert fake.processors.in_use == 0


@engines
def test_step_that_loaded_for_long_loads_no_more_classes(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of classes that hang when they are loaded would stop all requests for minutes."""
    fake = engine()
    known = Job("known", own=1)
    fake.run(0, known)
    monkeypatch.setattr("logitship.server.runtime.request_runtime.MAX_LOADING", -1.0)
    assert fake.run(0, known, Job("new", own=2)) == {"known": known.forced, "new": []}
    assert "try again" in fake.ends["new"]


@engines
def test_error_of_the_plugin_ends_the_requests_and_is_not_raised(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ShippedProcessors, "apply", fail)
    fake, plain = engine(), Job("plain", first=None)
    assert fake.run(0, Job("x"), plain) == {"x": [], "plain": fake.plain(plain)}
    assert "the server had an internal error" in fake.ends["x"]


RANDOM = """
import torch
from logitship import CustomLogitProcessor

torch.rand(1)

class Random(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits + torch.rand(logits.shape)
"""


@engines
def test_code_in_this_process_leaves_the_random_numbers_of_ranks_as_they_were(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks sample from generators in the same state. One that drew more numbers would sample other tokens."""
    for ranks in (SamplingRanks, OneRank, generate_seat.OneRank):
        monkeypatch.setattr(ranks, "size", 2)
    monkeypatch.setattr(SamplingRanks, "share", lambda _, logits, rows, ended: ended)
    before = torch.random.get_rng_state()
    fake = engine()
    fake.run(0, Job("x", source=(RANDOM, "Random")))
    assert not fake.ends
    assert torch.equal(torch.random.get_rng_state(), before)


SLEEPS = """
import time
from logitship import CustomLogitProcessor

class Sleeps(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        time.sleep(6.0)
        return logits + 0.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", BATCHED)
def test_slow_request_ends_and_others_continue(engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second may find the processor busy with a call of the first."""
    monkeypatch.setattr(allowances, "BURST", 1.0)  # a fast call takes less on a busy machine, too
    monkeypatch.setattr(allowances, "MIN_NEW", 1.0)
    fake = engine(processor_isolation="sandbox")
    plain = [Job(f"plain {number}", first=None, tokens=20) for number in range(3)]
    fast = Job("fast", first=20)
    slow = [Job(f"slow {number}", source=(SLEEPS, "Sleeps")) for number in range(2)]
    expected = {job.rid: fake.plain(job) for job in plain} | {"fast": fast.forced, "slow 0": [], "slow 1": []}
    assert fake.run(0, *plain, *slow, fast) == expected
    assert fake.ends.keys() == {"slow 0", "slow 1"}
    assert all("processor Sleeps is too slow: steps have waited" in message for message in fake.ends.values())
    assert fake.processors.in_use == 0


@engines
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_other_types(engine: type[FakeEngine], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors get float32."""
    apply = RequestRuntime.apply

    def in_other_type(runtime: RequestRuntime, logits: torch.Tensor, *args: Any) -> None:
        other = logits.to(dtype)
        apply(runtime, other, *args)
        logits.copy_(other)

    monkeypatch.setattr(RequestRuntime, "apply", in_other_type)
    fake, job = engine(), Job("x")
    assert fake.run(0, job)["x"] == job.forced
    assert not fake.ends
