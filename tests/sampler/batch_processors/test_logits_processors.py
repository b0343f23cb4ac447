from __future__ import annotations

import torch

from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import ForcingLogitsProcessor, LogitsProcessors


class Recorder(LogitsProcessor):
    def __init__(self, invariant: bool) -> None:
        self.invariant = invariant
        self.updates: list[BatchUpdate | None] = []

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)


class Forcer(Recorder, ForcingLogitsProcessor):
    pass


def test_split_keeps_order() -> None:
    a, b, c, d = Recorder(True), Recorder(False), Recorder(True), Recorder(False)
    e, f = Forcer(False), Forcer(False)
    processors = LogitsProcessors([a, e, b, c, f, d])
    assert processors.non_argmax_invariant == [b, d]
    assert processors.forcing == [e, f]
    assert processors.argmax_invariant == [a, c]
    assert list(processors.all) == [b, d, e, f, a, c]


def test_every_processor_gets_every_update() -> None:
    recorders = [Recorder(True), Recorder(False), Forcer(False)]
    processors = LogitsProcessors(recorders)
    update = BatchUpdate(0, [], [], [])
    processors.update_state(update)
    processors.update_state(None)
    assert [recorder.updates for recorder in recorders] == [[update, None]] * 3
