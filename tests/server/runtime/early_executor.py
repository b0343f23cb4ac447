"""An executor whose calls begin before their logits exist."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from logitship.sampler.processors.executor import (
    CollectEdits,
    ExecutorSequence,
    LoadedProcessor,
    LocalGroup,
    RunOutcome,
)
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.request_view import ModelView

from .fake_engine import MAX_ROWS, VOCAB_SIZE


class CountedRow:
    """A row that its executor knows until it is closed."""

    def __init__(self, executor: EarlyExecutor, row: Any) -> None:
        self.executor = executor
        self.row = row
        executor.attached.add(self)

    def fork(self, output_token_ids: list[int]) -> CountedRow:
        return CountedRow(self.executor, self.row.fork(output_token_ids))

    def close(self) -> None:
        self.executor.attached.remove(self)
        self.row.close()


class GivenRun:
    """A call that was made on a copy of its logits when it began."""

    def __init__(self, executor: EarlyExecutor, group: LocalGroup, logits: torch.Tensor) -> None:
        self._executor = executor
        self._logits = logits
        self._edited = logits.clone()
        self._outcome = group.call(self._edited)
        self._delay = executor.random.choice(executor.delays)
        executor.unfinished.append(self)

    def needs_logits(self) -> bool:
        raise AssertionError("the call was not promised its logits")

    def provide(self, logits: torch.Tensor) -> None:
        raise AssertionError("the call was not promised its logits")

    def wait(self, timeout: float) -> bool:
        self._delay -= 1
        return self._delay < 0

    def lower_priority(self) -> None:
        pass

    def defer(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
        self._logits.copy_(self._edited)
        self._executor.unfinished.remove(self)
        return self._outcome


class EarlyRun(GivenRun):
    """A call that was made when it began, on zeros. What it added to them is added to the logits."""

    def __init__(self, executor: EarlyExecutor, group: LocalGroup, num_rows: int) -> None:
        super().__init__(executor, group, torch.zeros(num_rows, executor.vocab_size))
        executor.num_early += 1

    def needs_logits(self) -> bool:
        return True

    def provide(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
        self._logits += self._edited
        self._executor.unfinished.remove(self)
        return self._outcome


class EarlyGroup:
    """Some calls of a group begin early, as `ReadHistory` decides for sandboxes."""

    def __init__(self, executor: EarlyExecutor, group: LocalGroup, num_rows: int) -> None:
        self._executor = executor
        self._group = group
        self._num_rows = num_rows

    def begin(self, logits: torch.Tensor, spent: float = 0.0) -> GivenRun:
        return GivenRun(self._executor, self._group, logits)

    def promise(self) -> EarlyRun | None:
        is_early = self._executor.random.random() < self._executor.share
        return EarlyRun(self._executor, self._group, self._num_rows) if is_early else None


class EarlyExecutor(InProcessExecutor):
    """Runs processors in this process, which never read their logits, when they are promised.

    Args:
        vocab_size: width of the logits.

    Attributes:
        share: the share of calls that begin when they are promised.
        delays: numbers of times that steps wait for a call in vain, of which each takes one at random.
        num_early: calls that began so.
        unfinished: calls that have not finished.
        attached: rows that are not closed, forks too.
        most_rows: most rows of a call so far.
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__({}, ModelView(vocab_size, frozenset(), None))
        self.vocab_size = vocab_size
        self.random = random.Random(0)
        self.share = 1.0
        self.delays: list[float] = [0]
        self.num_early = 0
        self.unfinished: list[GivenRun] = []
        self.attached: set[CountedRow] = set()
        self.most_rows = 0

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> CountedRow:
        return CountedRow(self, super().attach(processor, sequence))

    def group(self, processor: LoadedProcessor, rows: Sequence[Any]) -> Any:
        self.most_rows = max(self.most_rows, len(rows))
        assert self.most_rows <= MAX_ROWS  # as many fit into the shared memory of a sandbox
        return EarlyGroup(self, super().group(processor, [row.row for row in rows]), len(rows))
