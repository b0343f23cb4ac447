"""Collects what happens to the persistent batch in a step, and makes a `BatchUpdate` of it."""

from __future__ import annotations

from logitship.sampler.batch_processors.interface import AddedRequest, BatchUpdate, MovedRequest, RemovedRequest


class BatchUpdateBuilder:
    """The changes of one step, under the names of vLLM's class of the same name.

    A step first registers all removals. It then fills freed rows: an addition, or a move from the end of the batch,
    takes the lowest one with `pop_removed`. What is left in `removed` at the end was filled by nobody.

    Assumptions:
    * A step registers its last removal before it first reads `removed`, or peeks at or pops one. `removed_append`
      refuses a later one.
    * Only `removed_append` and `pop_removed` change `removed`; `added` and `moved` are appended to.

    Guarantees:
    * `removed` descends, without what was popped. So a row that a request was added to, or moved to, is not in it, and
      it makes no difference whether removals or additions are processed first.
    * `peek_removed` and `pop_removed` give the lowest freed row.
    * The lists of an update belong to that update: those of the next step are new ones.

    Args:
        removed: rows freed so far, in any order.
        added: additions so far.
        moved: moves so far.

    Attributes:
        added: additions, in their order.
        moved: moves, in their order.
        batch_changed: True from the first removal on. Whoever adds without an entry in `added` sets it, as vLLM does
            for pooling models.
    """

    def __init__(
        self,
        removed: list[RemovedRequest] | None = None,
        added: list[AddedRequest] | None = None,
        moved: list[MovedRequest] | None = None,
    ) -> None:
        self._removed = removed or []
        self._removed_was_read = False
        self.added = added or []
        self.moved = moved or []
        self.batch_changed = False

    @property
    def removed(self) -> list[RemovedRequest]:
        """The rows that were freed and not filled, descending."""
        if not self._removed_was_read:
            self._removed.sort(reverse=True)
            self._removed_was_read = True
        return self._removed

    def removed_append(self, index: int) -> None:
        """Register that row `index` was freed.

        Raises:
            RuntimeError: the removals of this step were read already.
        """
        if self._removed_was_read:
            raise RuntimeError(
                f"row {index} cannot be removed any more in this step: its removals were read, and rows filled "
                "accordingly. Register all removals first"
            )
        self._removed.append(index)
        self.batch_changed = True

    def has_removed(self) -> bool:
        """True if some freed row is not filled."""
        return bool(self._removed)

    def peek_removed(self) -> int | None:
        """The lowest freed row; None if there is none."""
        return self.removed[-1] if self._removed else None

    def pop_removed(self) -> int | None:
        """The lowest freed row, for the caller to fill; None if there is none."""
        return self.removed.pop() if self._removed else None

    def reset(self) -> bool:
        """Forget the changes of this step.

        Returns:
            `batch_changed`, as it was before.
        """
        batch_changed = self.batch_changed
        self._removed.clear()
        self.added.clear()
        self.moved.clear()
        self._begin_step()
        return batch_changed

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """The update of this step, and a new beginning.

        Args:
            batch_size: number of requests in the batch now.

        Returns:
            None if nothing was removed, added or moved.
        """
        update = None
        if self._removed or self.added or self.moved:
            update = BatchUpdate(batch_size, self.removed, self.added, self.moved)
            self._removed, self.added, self.moved = [], [], []
        self._begin_step()
        return update

    def _begin_step(self) -> None:
        self._removed_was_read = False
        self.batch_changed = False
