"""Two ranks that sample the same rows: a group of threads in place of processes."""

from __future__ import annotations

import threading
from typing import Any

import torch

from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.seat import EngineWorker
from logitship.server.sglang.sampling_ranks import SamplingRanks
from logitship.server.sglang.sglang_seat import SglangSeat
from logitship.server.sglang.sglang_settings import SglangSettings
from logitship_sglang import logger

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
        steps = SglangSeat(EngineWorker(settings, model, ranks, processors if rank == 0 else None, logger))
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
        worker = EngineWorker(settings, model, ranks, processors if rank == 0 else None, logger)
        verifier = FakeVerifier(SglangSeat(worker), random_tree, seed=4)
        reqs.append([make_req("a", tokens=9), make_req("b", first=None), make_req("c", first=20, fails_at=3)])
        threads.append(threading.Thread(target=verifier.run, args=reqs[rank]))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for of_rank in reqs:
        assert [req.visible for req in of_rank] == [list(range(2, 11)), [5] * 8, [20, 21, 22]]
        assert of_rank[2].finished_reason.err_type == "ProcessorFault"
