"""`SlotSeat` on a fake of model runner V2; histories are compared with a slow, simple scheduler."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.server.requests.messages import ProcessorRequest
from tests.helpers.random_cases import random_seeds

from . import fake_slots
from .conftest import fake_params
from .early_executor import EarlyExecutor
from .fake_runner import EOS, FAULT_TOKEN, VOCAB_SIZE, OneRank
from .fake_slots import MAX_LEN

History = tuple[tuple[int, ...], tuple[int, ...]]
Call = Callable[[torch.Tensor, list[dict[str, Any]]], Any]


class OtherRank(OneRank):
    is_first = False


class Processors:
    """Loads one processor for every request, and tracks the uses."""

    def __init__(self, call: Call) -> None:
        self.executor = EarlyExecutor(VOCAB_SIZE)
        self._call = call
        self.in_use: list[str] = []

    def load(self, requested: Sequence[ProcessorRequest], rid: str) -> tuple[ProcessorUse, ...]:
        (request,) = requested
        assert isinstance(request.string, InstalledProcessor)
        name = request.string.name
        if name == "none of this name":
            raise ValueError(name)
        loaded = LoadedProcessor(f"sha256:{sha256(name.encode()).hexdigest()}", name, self.executor, self._call)
        self.in_use.append(rid)
        return (ProcessorUse(loaded, {}, rid),)

    def release(self, uses: Iterable[ProcessorUse]) -> None:
        for use in uses:
            self.in_use.remove(use.rid)


def params_of(processor: str | None) -> Any:
    extra_args = {"custom_logit_processor": {"name": processor}} if processor else None
    return fake_params(extra_args, max_tokens=2 * MAX_LEN, stop_token_ids=[EOS, FAULT_TOKEN])


class Request(fake_slots.Request):
    """A request with a processor of this name, or none."""

    def __init__(self, req_id: str, processor: str | None, prompt: list[int], output: Sequence[int] = ()) -> None:
        super().__init__(req_id, params_of(processor), prompt, [*output])
        self.processor = processor
        self.expected: list[History] = []


class Runner(fake_slots.Runner):
    """The model runner, with one processor for all requests."""

    def __init__(self, call: Call, ranks: OneRank | None = None, **options: bool) -> None:
        self.processors: Any = Processors(call)
        super().__init__(self.processors, ranks=ranks, **options)


class Recorder:
    """A processor that records the histories it sees, and adds a number that depends on them and on its state."""

    def __init__(self) -> None:
        self.seen: defaultdict[str, list[History]] = defaultdict(list)

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        for row, param in zip(logits, params, strict=True):
            request = param["__req__"]
            history = tuple(request.origin_input_ids), tuple(request.output_ids)
            self.seen[request.rid].append(history)
            request.state["calls"] = request.state.get("calls", 0) + 1
            row += added_by(history, request.state["calls"])
        return logits


def added_by(history: History, calls: int) -> torch.Tensor:
    prompt, output = history
    return torch.full((VOCAB_SIZE,), float(sum(prompt) + 3 * sum(output) + calls))


def expected_logits(request: Request, logits: torch.Tensor) -> torch.Tensor:
    """Return the expected row, from the scheduler's own lists."""
    history = tuple(request.prompt), tuple(request.output)
    request.expected.append(history)
    row = logits + added_by(history, len(request.expected))
    row[FAULT_TOKEN] = -torch.inf
    return row


@pytest.mark.parametrize("begins_early", [True, False])
@random_seeds(30)
def test_histories_are_exact_in_every_schedule(seed: int, begins_early: bool) -> None:
    rng = random.Random(seed)
    recorder = Recorder()
    runner = Runner(recorder, begins_early=begins_early)
    runner.processors.executor.share = 0.8
    requests: list[Request] = []
    running: list[Request] = []
    preempted: list[Request] = []
    for step in range(60):
        finished = [each for each in running if each.ended and rng.random() < 0.7]
        finished += [each for each in running if not each.ended and rng.random() < 0.05]  # aborted
        for request in finished:
            running.remove(request)
            runner.remove(request)
        aborted_while_preempted = [each for each in preempted if rng.random() < 0.1]
        preempted = [each for each in running if not each.ended and rng.random() < 0.1]
        for request in preempted:
            running.remove(request)
            runner.remove(request)
        preempted = [each for each in preempted if each not in aborted_while_preempted]
        for request in [each for each in preempted if rng.random() < 0.5 and runner.free]:
            if runner.free:
                preempted.remove(request)
                runner.add(request)
                running.append(request)
        preempted += preempted
        while runner.free and rng.random() < 0.5:
            processor = rng.choice([None, "a", "b"])
            prompt = [rng.randrange(10) for _ in range(rng.randrange(1, 9))]
            request = Request(f"r{len(requests)}", processor, prompt)
            requests.append(request)
            runner.add(request)
            running.append(request)
        runner.seat.remove_finished({each.req_id for each in finished + aborted_while_preempted})

        scheduled = [(each, 0) for each in running if rng.random() < 0.8]
        rng.shuffle(scheduled)
        scheduled = [(each, rng.randint(1, max(1, each.prefill_len - each.computed))) for each, _ in scheduled]
        if not scheduled:
            runner.plan([])
            continue
        logits = torch.randn(len(scheduled), VOCAB_SIZE, generator=torch.Generator().manual_seed(step))
        expected = logits.clone()
        sampled: list[Request] = []
        for row, (request, count) in enumerate(scheduled):
            if request.computed + count >= request.prefill_len:
                sampled.append(request)
                if request.processor is not None and not request.ended:
                    expected[row] = expected_logits(request, logits[row])
        result = runner.step(scheduled, logits)
        assert torch.equal(result, expected)
        for request in sampled:
            if len(request.tokens) < MAX_LEN and not request.ended:
                runner.commit(request, EOS if rng.random() < 0.1 else rng.randrange(10))
            else:  # vLLM computed a step more than it needed
                request.computed -= 1
    with_processors = [each for each in requests if each.processor is not None]
    assert {each.req_id: each.expected for each in with_processors if each.expected} == dict(recorder.seen)
    assert sum(len(each.expected) for each in with_processors) > 20
    runner.seat.remove_finished({each.req_id for each in requests})
    assert runner.processors.in_use == []
    assert bool(runner.processors.executor.num_early) is begins_early
    assert not runner.processors.executor.unfinished


def started(runner: Runner, req_id: str = "r", processor: str = "a") -> Request:
    request = Request(req_id, processor, [1, 2])
    runner.add(request)
    runner.seat.remove_finished(())
    return request


def is_ended(row: torch.Tensor) -> bool:
    """Return True if only the fault token is left."""
    return torch.equal(row.isfinite().nonzero().flatten(), torch.tensor([FAULT_TOKEN]))


def test_prompt_of_embeddings_ends_its_request() -> None:
    """Also after it was preempted. Another one beside it continues."""
    recorder = Recorder()
    runner = Runner(recorder)
    request, other = Request("r", "a", [0, 0]), Request("other", "a", [1])
    runner.add(request, holds_embeddings=True)
    runner.add(other)
    logits = runner.step([(request, 2), (other, 1)], torch.zeros(2, VOCAB_SIZE))
    assert is_ended(logits[0])
    assert torch.equal(logits[1], expected_logits(other, torch.zeros(VOCAB_SIZE)))
    runner.commit(request, 5)
    runner.remove(request)
    runner.add(request, holds_embeddings=True)
    assert is_ended(runner.step([(request, 3)], torch.zeros(1, VOCAB_SIZE))[0])
    assert recorder.seen.keys() == {"other"}


def test_calls_begin_before_the_logits_exist() -> None:
    recorder = Recorder()
    runner = Runner(recorder)
    request = started(runner)
    executor = runner.processors.executor
    for step in range(3):
        slots = runner.plan([(request, 1 if step else 2)])
        assert executor.num_early == step + 1
        assert len(executor.unfinished) == 1
        logits = torch.zeros(1, VOCAB_SIZE)
        runner.sample(slots, [request], logits)
        assert torch.equal(logits[0], expected_logits(request, torch.zeros(VOCAB_SIZE)))
        assert not executor.unfinished
        runner.commit(request, 5)
    assert recorder.seen["r"] == request.expected


def test_step_without_logits_ends_its_requests() -> None:
    """It failed. The processor has been called for a token that was not sampled."""
    recorder = Recorder()
    runner = Runner(recorder)
    request = started(runner)
    runner.plan([(request, 2)])
    runner.seat.remove_finished(())
    assert is_ended(runner.step([(request, 0)], torch.zeros(1, VOCAB_SIZE))[0])
    assert len(recorder.seen["r"]) == 1
    assert not runner.processors.executor.unfinished


def test_other_rows_than_planned_end_the_requests() -> None:
    recorder = Recorder()
    runner = Runner(recorder)
    a, b = started(runner, "a"), started(runner, "b")
    slots = runner.plan([(a, 2), (b, 2)])
    logits = runner.sample(slots[::-1], [b, a], torch.zeros(2, VOCAB_SIZE))
    assert all(is_ended(row) for row in logits)
    assert len(recorder.seen["a"]) == len(recorder.seen["b"]) == 1
    assert not runner.processors.executor.unfinished


def test_calls_begin_with_logits_if_the_plan_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    runner = Runner(recorder, begins_early=False)
    request = started(runner)
    runner.seat.begin((1 // length, length) for length in (1, 0))
    logits = runner.step([(request, 2)], torch.zeros(1, VOCAB_SIZE))
    assert torch.equal(logits[0], expected_logits(request, torch.zeros(VOCAB_SIZE)))
    assert runner.processors.executor.num_early == 0
    assert "ZeroDivisionError" in caplog.text


def test_fault_ends_its_row_and_no_other() -> None:
    def fails_for_b(logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        if any(param["__req__"].rid == "b" for param in params):
            raise RuntimeError("not b")
        return logits + 1

    runner = Runner(fails_for_b)
    a, b = started(runner, "a", "x"), started(runner, "b", "y")
    logits = runner.step([(b, 2), (a, 2)], torch.zeros(2, VOCAB_SIZE))
    assert is_ended(logits[0])
    assert logits[1, :FAULT_TOKEN].tolist() == [1.0] * FAULT_TOKEN
    runner.commit(a, 5)
    runner.commit(b, FAULT_TOKEN)
    runner.seat.remove_finished({"b"})
    logits = runner.step([(a, 1)], torch.zeros(1, VOCAB_SIZE))
    assert logits[0, :FAULT_TOKEN].tolist() == [1.0] * FAULT_TOKEN


def test_history_of_wrong_length_ends_the_request() -> None:
    recorder = Recorder()
    runner = Runner(recorder)
    request = started(runner)
    runner.buffers.total_len.gpu[request.slot] = 1
    assert is_ended(runner.step([(request, 2)], torch.zeros(1, VOCAB_SIZE))[0])
    assert recorder.seen == {}


def test_unreadable_buffers_end_the_requests() -> None:
    recorder = Recorder()
    runner = Runner(recorder)
    request = started(runner)
    runner.buffers.all_token_ids = None
    assert is_ended(runner.step([(request, 2)], torch.zeros(1, VOCAB_SIZE))[0])
    assert recorder.seen == {}


class ForbiddingRecorder(Recorder):
    """Forbids a token that depends on the history, too."""

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        super().__call__(logits, params)
        for row, param in zip(logits, params, strict=True):
            row[forbidden_after(param["__req__"].output_ids)] = -torch.inf
        return logits


def forbidden_after(output: list[int]) -> int:
    return (sum(output) + len(output)) % 5


def logits_after(request: Request, drafts: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Return the expected row behind some draft tokens: the processor has been called once for each token before."""
    output = request.output + drafts
    row = logits + added_by((tuple(request.prompt), tuple(output)), len(output) + 1)
    row[[FAULT_TOKEN, forbidden_after(output)]] = -torch.inf
    return row


@random_seeds(40)
def test_processors_follow_the_accepted_draft_tokens(seed: int) -> None:
    """Rows that count are those a processor leaves that was called for the accepted tokens alone, in order."""
    rng = random.Random(seed)
    runner = Runner(ForbiddingRecorder(), begins_early=False, has_drafts=True)
    running: list[Request] = []
    preempted: list[Request] = []
    num_accepted = 0
    for step in range(50):
        finished = [each for each in running if each.ended or len(each.tokens) > MAX_LEN - 8 or rng.random() < 0.05]
        left = [each for each in running if each not in finished]
        paused = [each for each in left if rng.random() < 0.1]
        for request in finished + paused:
            running.remove(request)
            runner.remove(request)
        for request in [each for each in preempted if rng.random() < 0.5 and runner.free]:
            if runner.free:
                preempted.remove(request)
                runner.add(request)
                running.append(request)
        preempted += paused
        while runner.free and rng.random() < 0.5:
            request = Request(f"r{step} {len(running)}", rng.choice([None, "a", "b"]), [rng.randrange(10), 3])
            runner.add(request)
            running.append(request)
        runner.seat.remove_finished({each.req_id for each in finished})
        scheduled = [
            (each, [rng.choice([*range(5), -1, EOS]) for _ in range(rng.randrange(4))])
            for each in running
            if rng.random() < 0.8
        ]
        if not scheduled:
            continue
        num_rows = sum(1 + len(drafts) for _, drafts in scheduled)
        given = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(step))
        result = runner.verify(scheduled, given.clone())
        row = 0
        for request, drafts in scheduled:
            in_prefill = len(request.tokens) == request.prefill_len
            accepted: list[int] = []
            for depth in range(len(drafts) + 1):
                expected = given[row + depth]
                if request.processor is not None:
                    expected = logits_after(request, accepted, given[row + depth])
                assert torch.equal(result[row + depth], expected)
                token = drafts[depth] if depth < len(drafts) and not in_prefill else -1
                if token == -1 or expected[token].isneginf() or rng.random() < 0.2:
                    break
                accepted.append(token)
                num_accepted += 1
                if token == EOS:
                    break
            bonus = [] if EOS in accepted else [rng.choice([5, 6, 7])]
            for token in accepted + bonus:
                runner.commit(request, token)
            row += 1 + len(drafts)
    assert num_accepted > 10
    runner.seat.remove_finished({each.req_id for each in running + preempted})
    assert runner.processors.in_use == []
    assert not runner.processors.executor.attached


def test_fault_behind_a_draft_token_counts_if_it_is_accepted() -> None:
    def fails_after_seven(logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        if any(7 in param["__req__"].output_ids for param in params):
            raise RuntimeError("not after 7")
        return logits + 1

    for accepts in (False, True):
        runner = Runner(fails_after_seven, begins_early=False, has_drafts=True)
        request = started(runner)
        runner.verify([(request, [])], torch.zeros(1, VOCAB_SIZE))
        runner.commit(request, 5)
        logits = runner.verify([(request, [7, 6])], torch.zeros(3, VOCAB_SIZE))
        assert logits[0, :FAULT_TOKEN].tolist() == [1.0] * FAULT_TOKEN
        assert is_ended(logits[1])
        assert is_ended(logits[2])
        for token in [7, FAULT_TOKEN] if accepts else [6]:
            runner.commit(request, token)
        logits = runner.verify([(request, [])], torch.zeros(1, VOCAB_SIZE))
        assert is_ended(logits[0]) is accepts


def test_state_that_cannot_be_copied_ends_the_request() -> None:
    def keeps_a_generator(logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        params[0]["__req__"].state["numbers"] = (number for number in range(3))
        return logits

    runner = Runner(keeps_a_generator, begins_early=False, has_drafts=True)
    request = started(runner)
    runner.verify([(request, [])], torch.zeros(1, VOCAB_SIZE))
    runner.commit(request, 5)
    logits = runner.verify([(request, [7])], torch.zeros(2, VOCAB_SIZE))
    assert is_ended(logits[1])


def test_other_tokens_than_drafted_end_the_request() -> None:
    recorder = Recorder()
    runner = Runner(recorder, begins_early=False, has_drafts=True)
    request = started(runner)
    runner.verify([(request, [])], torch.zeros(1, VOCAB_SIZE))
    runner.commit(request, 5)
    runner.verify([(request, [7])], torch.zeros(2, VOCAB_SIZE))
    for token in (8, 6):
        runner.commit(request, token)
    assert is_ended(runner.verify([(request, [])], torch.zeros(1, VOCAB_SIZE))[0])


def test_unexpected_rows_end_their_requests() -> None:
    recorder = Recorder()
    runner = Runner(recorder)
    request = started(runner)
    ctx = SimpleNamespace(
        idx_mapping_np=np.array([request.slot]),
        expanded_idx_mapping=torch.tensor([request.slot] * 3),
        seq_lens_upper_bound_np=np.array([2]),
    )
    logits = torch.zeros(3, VOCAB_SIZE)
    runner.seat.apply(logits, ctx)
    assert all(is_ended(row) for row in logits)
    assert recorder.seen == {}


def test_resumed_request_without_state_ends() -> None:
    recorder = Recorder()
    runner = Runner(recorder)
    request = Request("r", "a", [1, 2], output=[3])
    runner.add(request)
    runner.seat.remove_finished(())
    assert is_ended(runner.step([(request, 3)], torch.zeros(1, VOCAB_SIZE))[0])
    assert recorder.seen == {}


def test_resumed_request_with_fewer_tokens_ends() -> None:
    recorder = Recorder()
    runner = Runner(recorder)
    request = started(runner)
    for computed in (2, 1, 1):
        runner.step([(request, computed)], torch.zeros(1, VOCAB_SIZE))
        runner.commit(request, 7)
    runner.remove(request)
    del request.output[1:]
    runner.add(request)
    runner.seat.remove_finished(())
    assert is_ended(runner.step([(request, 3)], torch.zeros(1, VOCAB_SIZE))[0])
    assert len(recorder.seen["r"]) == 3


def test_request_id_reused_in_the_same_step_is_a_new_request() -> None:
    recorder = Recorder()
    runner = Runner(recorder)
    first = started(runner)
    runner.step([(first, 2)], torch.zeros(1, VOCAB_SIZE))
    runner.commit(first, 7)
    runner.remove(first)
    again = Request("r", "a", [4, 5, 6])
    runner.add(again)
    runner.seat.remove_finished({"r"})
    runner.step([(again, 3)], torch.zeros(1, VOCAB_SIZE))
    assert recorder.seen["r"] == [((1, 2), ()), ((4, 5, 6), ())]
    assert runner.processors.in_use == ["r"]


def test_other_ranks_run_no_processors() -> None:
    recorder = Recorder()
    runner = Runner(recorder, OtherRank())
    request = started(runner)
    logits = torch.zeros(1, VOCAB_SIZE)
    assert torch.equal(runner.step([(request, 2)], logits), torch.zeros(1, VOCAB_SIZE))
    assert recorder.seen == {}
    assert runner.processors.in_use == []


def test_buffers_are_not_read_without_processors() -> None:
    runner = Runner(Recorder())
    request = Request("r", None, [1, 2])
    runner.add(request)
    runner.buffers.all_token_ids = runner.buffers.total_len = None
    logits = torch.zeros(1, VOCAB_SIZE)
    assert torch.equal(runner.step([(request, 2)], logits), torch.zeros(1, VOCAB_SIZE))
