"""`SglangSeat` alone: how requests end, tokens that are sampled again, and SGLang's draft tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.processors.executor import CollectEdits, RunOutcome
from logitship.server.sglang import hooks
from logitship.server.sglang.generate_fields import ADMITTED
from tests.server.runtime.early_executor import EarlyExecutor, EarlyRun
from tests.server.runtime.fake_engine import VOCAB_SIZE, Job

from .fake_sglang import FakeReq, Sglang, SglangDrafts, SglangGrammar, SglangOverlap, tracked, tree_of

SEEDS = pytest.mark.parametrize("seed", range(6))


@SEEDS
def test_repeated_token_has_its_first_log_probabilities(seed: int) -> None:
    """A dropped token is forced when it is sampled again. SGLang reports those of its call."""
    fake, reqs = SglangOverlap(), list[FakeReq]()
    request = fake.request

    def kept(job: Job) -> FakeReq:
        reqs.append(request(job))
        return reqs[-1]

    fake.request = kept  # type: ignore[method-assign]
    fake.run(seed, *(Job(str(number), tokens=12, others=-2.0) for number in range(12)))
    assert fake.num_dropped
    logits = torch.stack([torch.full((VOCAB_SIZE,), -2.0 - call) for call in range(12)])
    logits[range(12), range(2, 14)] = 0.0
    logprobs = logits.log_softmax(-1)
    highest = logprobs.topk(2).values
    for req in reqs:
        reported = [req.logprobs[place] for place in range(12)]
        assert [own for own, _, _ in reported] == pytest.approx(logprobs.amax(-1).tolist())
        assert [values for _, values, _ in reported] == [pytest.approx(each) for each in highest.tolist()]
        assert [indices[0] for _, _, indices in reported] == list(range(2, 14))
        assert all(indices[1] != indices[0] for _, _, indices in reported)


@SEEDS
def test_stop_while_a_call_whose_rows_depend_on_each_other_waits_ends_only_its_request(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has ended before its logits exist. Its edits let each row have a logit of the row before it."""
    executor, num_rows = EarlyExecutor(), []

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
        executor.unfinished.remove(run)
        return run._outcome

    monkeypatch.setattr(EarlyRun, "needs_logits", lambda run: False)
    monkeypatch.setattr(EarlyRun, "finish", finish)
    rng = random.Random(seed)
    jobs = [Job(str(n), rng.randint(2, 40), tokens=12, stops_at=rng.randint(1, 12)) for n in range(16)]
    assert SglangGrammar(executor).run(seed, *jobs) == {job.rid: job.expected for job in jobs}
    assert max(num_rows) > 1


def test_fault_is_the_reason_of_an_abort() -> None:
    fake = Sglang()
    req = fake.start(Job("x", fails_at=0))
    assert fake.step(req) == [None]
    assert (req.finished_reason.status_code, req.finished_reason.err_type) == (400, "ProcessorFault")
    assert req.finished_reason.message.startswith("ProcessorFault: processor ChecksHistory raised RuntimeError:")
    assert "Traceback" in req.finished_reason.message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"custom_logit_processor": f"{ADMITTED}:nonsense"}, "is not JSON"),
        ({"custom_logit_processor": Job("x").string}, "has not been checked"),
        ({"beam_group": object()}, "does not call processors in a beam search"),
    ],
    ids=["not_checked", "not_through_the_front_end", "beam_search"],
)
def test_request_whose_processors_cannot_run_ends(changed: dict[str, Any], message: str) -> None:
    """A front end may not check requests, or not be there, as with gRPC. An operator may set `beam_width`."""
    fake = Sglang()
    req = fake.start(Job("x"))
    vars(req).update(changed)
    assert fake.step(req) == [None]
    assert message in req.finished_reason.message
    assert fake.processors.in_use == 0


def test_steps_without_processors_release_those_of_finished_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Sglang()
    fake.step(fake.start(Job("x", tokens=1)))
    assert fake.processors.in_use == 1
    monkeypatch.setattr(hooks, "_steps", fake.seat)
    plain = SimpleNamespace(sampling_info=SimpleNamespace(has_custom_logit_processor=False))
    assert hooks.sample(lambda *args: "tokens", object(), object(), plain) == "tokens"
    assert fake.processors.in_use == 0
    assert not fake.seat.are_used


def test_idle_scheduler_releases_those_of_finished_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Sglang()
    fake.step(fake.start(Job("x", tokens=1)))
    monkeypatch.setattr(hooks, "_steps", fake.seat)
    for batch, in_use in (object(), 1), (None, 0):
        plan = SimpleNamespace(batch_to_run=batch)
        assert hooks.add_loaded(lambda *args, plan=plan, **kwargs: plan, object(), None, None) is plan
        assert fake.processors.in_use == in_use


def test_metrics_of_sglang_have_those_of_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(MultiProcessCollector, "__init__", MultiProcessCollector.__init__)  # restored afterwards
    assert hooks.METRICS.difference is None
    hooks.METRICS.wrap()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    (tmp_path / "logitship-1-0.json").write_text('[["logitship_x", "X.", "counter", [["logitship_x_total", {}, 2.0]]]]')
    assert registry.get_sample_value("logitship_x_total") == 2


def test_error_of_the_plugin_between_steps_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's scheduler would end."""
    fake = Sglang()
    fake.step(fake.start(Job("x", tokens=1)))
    monkeypatch.setattr(fake.processors, "release", None)
    fake.seat.drop_finished()


Verify = Callable[[SglangDrafts, torch.Tensor, Any], None]


def verify(trees: Any, accepted: list[int]) -> Verify:
    """Return the verification of the draft tokens of one request."""

    def run(fake: SglangDrafts, logits: torch.Tensor, rows: Any) -> None:
        fake.seat.apply_to_drafts(logits, rows, trees)
        fake.seat.take_accepted(logits, rows, [accepted])

    return run


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda fake, logits, rows: fake.seat.apply(logits, rows, 4), "verifies drafts"),
        (verify(None, [0, -1]), "verifies drafts"),
        (verify([tree_of(0, [40], [-1])], [0]), "do not follow its output"),
        (verify([tree_of(0, [2, 40], [-1, 0])], [0, 1]), "behind which no processor was called"),
    ],
    ids=["not_hooked", "no_tree", "other_output", "accepted_without_a_call"],
)
def test_drafts_that_cannot_be_followed_end_the_request(run: Verify, message: str) -> None:
    """SGLang's simulated acceptance ignores the logits, for example."""
    fake = SglangDrafts()
    req = fake.start(Job("x"))
    assert fake.step(req) == [2]
    run(fake, torch.zeros(4, VOCAB_SIZE), tracked([req]))
    assert message in req.to_finish.message
