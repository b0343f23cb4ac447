"""The processors of a step on a fake of SGLang's scheduler."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.processors.executor import CollectEdits, RunOutcome
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.sglang import hooks
from logitship.server.sglang.forward_step import ForwardStep
from logitship.server.sglang.generate_fields import ADMITTED
from logitship.server.sglang.sglang_seat import SglangSeat, find_scheduled, scheduled
from tests.helpers.random_cases import random_seeds

from ..vllm.early_executor import EarlyExecutor, EarlyRun  # noqa: TID252
from .conftest import MakeReq, NewSteps
from .fake_scheduler import VOCAB_SIZE, FakeReq, FakeScheduler


@random_seeds(8, shares_fixtures=True)
def test_stop_between_the_begin_of_a_call_and_its_logits_ends_only_its_request(
    seed: int, new_steps: NewSteps, make_req: MakeReq
) -> None:
    """With a grammar in the batch, SGLang samples a step after it has looked for stop strings in the one before."""
    early_executor = EarlyExecutor()
    processors, steps = new_steps(early_executor)
    rng = random.Random(seed)
    expected: dict[FakeReq, list[int]] = {}
    for number in range(16):
        tokens, first = rng.randint(1, 12), rng.randint(2, 40)
        req = make_req(str(number), tokens=12, first=first, own=number % 3)
        req.stops_at = tokens
        expected[req] = list(range(first, first + tokens))
    FakeScheduler(seed, steps, overlap=True, delayed=True).run(*expected)
    assert {req.rid: req.visible for req in expected} == {req.rid: tokens for req, tokens in expected.items()}
    assert early_executor.num_early
    assert not early_executor.unfinished
    with steps.sampling(None):  # type: ignore[arg-type]  # a later step releases the last ones
        pass
    assert processors.in_use == 0


def test_begun_call_without_its_logits_ends_the_request(
    early_executor: EarlyExecutor, steps: SglangSeat, make_req: MakeReq
) -> None:
    """Another call would be the second one for the same token."""
    early_executor.share = 1.0
    req = make_req()
    step = ForwardStep(SimpleNamespace(seq_lens_cpu=torch.tensor([3])))
    steps.begin({0: scheduled(req)}, step)
    assert early_executor.num_early == 1
    steps.begin({0: scheduled(req)}, step)
    steps.apply(torch.zeros(1, VOCAB_SIZE), {0: scheduled(req)}, 1)
    assert "did not sample the token" in req.to_finish.message
    assert not early_executor.unfinished


def test_dropped_tokens_occur(steps: SglangSeat, make_req: MakeReq) -> None:
    """The conformance suite covers retraction with a token in flight, which is sampled again without a call."""
    dropped = 0
    for seed in range(12):
        scheduler = FakeScheduler(seed, steps, overlap=True)
        scheduler.run(*(make_req(str(number), tokens=12) for number in range(12)))
        dropped += scheduler.num_dropped
    assert dropped > 5


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_fault_ends_its_request_with_the_traceback(overlap: bool, steps: SglangSeat, make_req: MakeReq) -> None:
    failing, other = make_req("fails", fails_at=2), make_req("other")
    FakeScheduler(1, steps, overlap=overlap).run(failing, other)
    assert failing.visible == [2, 3]
    assert failing.finished_reason.status_code == 400
    assert failing.finished_reason.err_type == "ProcessorFault"
    message = failing.finished_reason.message
    assert message.startswith("ProcessorFault: processor ChecksHistory raised RuntimeError: requested")
    assert "Traceback" in message
    assert other.visible == list(range(2, 10))


def test_receipt_counts_the_calls(steps: SglangSeat, make_req: MakeReq) -> None:
    req = make_req(tokens=7)
    FakeScheduler(3, steps, overlap=True).run(req)
    request = find_scheduled(req)
    assert request is not None
    assert request.uses is not None
    assert [use.receipt.steps for use in request.uses] == [7]


def test_invalid_processor_ends_its_request(steps: SglangSeat, make_req: MakeReq) -> None:
    """A front end that does not check requests does not stop the scheduler."""
    req = make_req()
    req.custom_logit_processor = ADMITTED + "nonsense"
    FakeScheduler(0, steps, overlap=False).run(req)
    assert req.visible == []
    assert "is not JSON" in req.finished_reason.message


def test_request_that_did_not_pass_the_front_end_ends(
    steps: SglangSeat, processors: PluginProcessors, make_req: MakeReq
) -> None:
    """Such as one of a gRPC server that sends requests to SGLang's scheduler itself."""
    req = make_req()
    assert req.custom_logit_processor is not None
    req.custom_logit_processor = req.custom_logit_processor.removeprefix(ADMITTED)
    FakeScheduler(0, steps, overlap=False).run(req)
    assert req.visible == []
    assert "has not been checked" in req.finished_reason.message
    assert processors.in_use == 0


def test_beam_search_ends_its_request(steps: SglangSeat, make_req: MakeReq) -> None:
    """SGLang selects beams from logits that no processor has seen. Its operator may have set `beam_width`."""
    req = make_req()
    req.beam_group = object()
    FakeScheduler(0, steps, overlap=False).run(req)
    assert req.visible == []
    assert "does not call processors in a beam search" in req.finished_reason.message


def test_steps_without_processors_release_those_of_finished_requests(
    steps: SglangSeat, processors: PluginProcessors, make_req: MakeReq, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeScheduler(0, steps, overlap=False).run(make_req())
    assert processors.in_use == 1
    monkeypatch.setattr(hooks, "_steps", steps)
    plain = SimpleNamespace(sampling_info=SimpleNamespace(has_custom_logit_processor=False))
    assert hooks.sample(lambda *args: "tokens", object(), object(), plain) == "tokens"
    assert processors.in_use == 0
    assert not steps.are_used


def test_error_of_the_plugin_between_steps_is_not_raised(
    steps: SglangSeat, processors: PluginProcessors, make_req: MakeReq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's scheduler would end."""
    FakeScheduler(0, steps, overlap=False).run(make_req())
    monkeypatch.setattr(processors, "release", None)
    with steps.sampling(None):  # type: ignore[arg-type]
        pass


def test_drafts_end_the_request(steps: SglangSeat, make_req: MakeReq) -> None:
    req = make_req()
    logits = torch.zeros(4, VOCAB_SIZE)
    steps.apply(logits, {0: scheduled(req)}, 4)
    assert "drafts" in req.to_finish.message
    assert not logits.any()


@pytest.mark.parametrize("seed", range(6))
def test_repeated_token_has_its_first_log_probabilities(seed: int, steps: SglangSeat, make_req: MakeReq) -> None:
    """A dropped token is forced when it is sampled again. SGLang reports those of its call."""
    requests = [make_req(str(number), tokens=12, others=-2.0) for number in range(12)]
    scheduler = FakeScheduler(seed, steps, overlap=True)
    scheduler.run(*requests)
    assert scheduler.num_dropped
    logits = torch.stack([torch.full((VOCAB_SIZE,), -2.0 - call) for call in range(12)])
    logits[range(12), range(2, 14)] = 0.0
    logprobs = logits.log_softmax(-1)
    highest = logprobs.topk(2)
    for req in requests:
        assert [own for own, _, _ in req.logprobs] == pytest.approx(logprobs.amax(-1).tolist())
        assert [values for _, values, _ in req.logprobs] == [pytest.approx(each) for each in highest.values.tolist()]
        assert [indices[0] for _, _, indices in req.logprobs] == list(range(2, 14))
        assert all(indices[1] != indices[0] for _, _, indices in req.logprobs)


@pytest.mark.parametrize("seed", range(8))
def test_stop_while_a_call_whose_rows_depend_on_each_other_waits_ends_only_its_request(
    seed: int, early_executor: EarlyExecutor, steps: SglangSeat, make_req: MakeReq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has ended before its logits exist. Its edits let each row have a logit of the row before it."""
    early_executor.share = 1.0
    num_rows = []

    def finish(run: EarlyRun, collect: CollectEdits | None = None) -> RunOutcome:
        log = EditLog(len(run._edited), VOCAB_SIZE)
        first = [row * VOCAB_SIZE for row in range(log.num_rows)]
        saved = log.save(first)
        log.restore([*first[1:], first[0]], saved)
        for row, added in enumerate(run._edited):
            log.edit_rows([row], "+", added.numpy())
        num_rows.append(log.num_rows)
        assert collect is not None
        collect(range(log.num_rows), log.edits)
        early_executor.unfinished.remove(run)
        return run._outcome

    monkeypatch.setattr(EarlyRun, "needs_logits", lambda run: False)
    monkeypatch.setattr(EarlyRun, "finish", finish)
    rng = random.Random(seed)
    expected: dict[FakeReq, list[int]] = {}
    for number in range(16):
        tokens, first = rng.randint(1, 12), rng.randint(2, 40)
        req = make_req(str(number), tokens=12, first=first)
        req.stops_at = tokens
        expected[req] = list(range(first, first + tokens))
    FakeScheduler(seed, steps, overlap=True, delayed=True).run(*expected)
    assert {req.rid: req.visible for req in expected} == {req.rid: tokens for req, tokens in expected.items()}
    assert max(num_rows) > 1


def test_error_of_the_server_in_a_call_ends_its_rows_alone(
    early_executor: EarlyExecutor, steps: SglangSeat, make_req: MakeReq, monkeypatch: pytest.MonkeyPatch
) -> None:
    early_executor.share = 1.0
    finish = EarlyRun.finish

    def failing(run: EarlyRun, *args: Any) -> RunOutcome:
        if run._edited[0, 20] == 0.0:
            raise KeyError("an error of the server")
        return finish(run, *args)

    monkeypatch.setattr(EarlyRun, "finish", failing)
    broken, other = make_req("broken", first=20), make_req("other", first=30, own=1)
    FakeScheduler(0, steps, overlap=False).run(broken, other)
    assert broken.finished_reason.message.startswith("ProcessorFault: the server failed on a call of processor")
    assert other.visible == list(range(30, 38))
