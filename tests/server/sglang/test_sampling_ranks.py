"""Two ranks that sample the same rows: a group of threads in place of processes."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from logitship.sampler.processors.request_view import ModelView
from logitship.server.plugins.plugin_processors import PluginProcessors
from logitship.server.sglang import sampling_ranks
from logitship.server.sglang.generate_fields import ADMITTED
from logitship.server.sglang.sampling_ranks import SamplingRanks, check_ranks
from logitship.server.sglang.sglang_settings import SglangSettings
from logitship.server.sglang.step_processors import StepProcessors

from .conftest import MakeReq
from .fake_scheduler import FakeReq, FakeScheduler
from .test_draft_processors import FakeVerifier, random_tree


class FakeGroup:
    """Fake of SGLang's `GroupCoordinator`, of one rank."""

    world_size = 2

    def __init__(self, rank: int, sent: list[Any], barrier: threading.Barrier) -> None:
        self.rank_in_group = rank
        self._sent = sent
        self._barrier = barrier

    def broadcast_object(self, obj: Any, src: int) -> Any:
        if self.rank_in_group == src:
            self._sent[:] = [obj]
        self._barrier.wait(30)
        received = self._sent[0]
        self._barrier.wait(30)
        return received

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        received: torch.Tensor = self.broadcast_object(tensor, src)
        return received.clone()


class LonelyGroup:
    """Fake of the `GroupCoordinator` of the first of two ranks, whose broadcasts nobody receives."""

    world_size = 2
    rank_in_group = 0

    def broadcast_object(self, obj: Any, src: int) -> Any:
        return obj

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        return tensor


RANDOM = ADMITTED + json.dumps(
    {
        "class_name": "Random",
        "source": """
import torch
from logitship import CustomLogitProcessor

torch.rand(1)

class Random(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits + torch.rand(logits.shape)
""",
    }
)


def test_random_processor_leaves_the_tokens_of_other_requests_alone(
    settings: SglangSettings, model: ModelView, processors: PluginProcessors, make_req: MakeReq
) -> None:
    """The ranks sample from generators in the same state. One that drew more numbers would sample other tokens."""
    req = make_req()
    req.custom_logit_processor = RANDOM
    before = torch.random.get_rng_state()
    steps = StepProcessors(settings, model, processors, SamplingRanks(LonelyGroup()))
    FakeScheduler(0, steps, overlap=False).run(req)
    assert req.finished_reason == "length"
    assert torch.equal(torch.random.get_rng_state(), before)


def meet(versions: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let ranks with these versions meet, of which the last never comes if it has none. Return their errors."""
    store = HashStore()
    local = threading.local()
    monkeypatch.setattr(sampling_ranks, "version", lambda name: local.version)
    errors: list[str] = []

    def start(rank: int) -> None:
        local.version = versions[rank]
        try:
            check_ranks(store, rank, len(versions), timedelta(seconds=30 if all(versions) else 0.2))
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=start, args=[rank]) for rank, each in enumerate(versions) if each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_ranks_that_all_run_the_plugin_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meet(["1.0", "1.0", "1.0"], monkeypatch) == []


def test_no_rank_starts_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without the plugin would unpickle processors, and would not call `share`."""
    errors = meet(["1.0", "1.0", ""], monkeypatch)
    assert len(errors) == 2
    assert all("does not run in ranks [2]" in error for error in errors)


def test_no_rank_starts_with_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = sorted(meet(["1.0", "1.1"], monkeypatch))
    assert "is 1.0 in rank 0, and 1.1 in rank 1" in errors[0]
    assert "is 1.1 in rank 1, and 1.0 in rank 0" in errors[1]


def test_ranks_agree(
    settings: SglangSettings, model: ModelView, processors: PluginProcessors, make_req: MakeReq
) -> None:
    """The second rank has no processors, and gets tokens and faults from the first."""
    sent: list[Any] = []
    barrier = threading.Barrier(2)
    reqs: list[list[FakeReq]] = []
    threads = []
    for rank in range(2):
        ranks = SamplingRanks(FakeGroup(rank, sent, barrier))
        steps = StepProcessors(settings, model, processors if rank == 0 else None, ranks)
        scheduler = FakeScheduler(5, steps, overlap=True)
        reqs.append([make_req("a", tokens=9), make_req("b", first=None), make_req("c", first=20, fails_at=3)])
        threads.append(threading.Thread(target=scheduler.run, args=reqs[rank]))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for of_rank in reqs:
        assert [req.visible for req in of_rank] == [list(range(2, 11)), [5] * 8, [20, 21, 22]]
        assert of_rank[2].finished_reason.err_type == "ProcessorFault"


def test_ranks_agree_about_drafts(
    settings: SglangSettings, model: ModelView, processors: PluginProcessors, make_req: MakeReq
) -> None:
    """The second rank gets the rows behind draft tokens, and the faults behind accepted ones."""
    sent: list[Any] = []
    barrier = threading.Barrier(2)
    reqs: list[list[FakeReq]] = []
    threads = []
    for rank in range(2):
        ranks = SamplingRanks(FakeGroup(rank, sent, barrier))
        verifier = FakeVerifier(
            StepProcessors(settings, model, processors if rank == 0 else None, ranks), random_tree, seed=4
        )
        reqs.append([make_req("a", tokens=9), make_req("b", first=None), make_req("c", first=20, fails_at=3)])
        threads.append(threading.Thread(target=verifier.run, args=reqs[rank]))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for of_rank in reqs:
        assert [req.visible for req in of_rank] == [list(range(2, 11)), [5] * 8, [20, 21, 22]]
        assert of_rank[2].finished_reason.err_type == "ProcessorFault"
