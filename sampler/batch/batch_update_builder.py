"""Builder of a step's `BatchUpdate`."""

from __future__ import annotations

from logitship.sampler.batch_processors.interface import AddedRequest, BatchUpdate, MovedRequest, RemovedRequest


class BatchUpdateBuilder:
    """Collects the changes of one step. Names are those of vLLM's class of the same name.

    A step first registers all removals. It then fills freed rows: an addition, or a move from the end of the batch,
    takes the lowest one with `pop_removed`. The rows left in `removed` at the end were not filled again.

    Assumptions:
    * A step registers its last removal before it first reads, peeks at or pops `removed`. `removed_append` raises on a
      later one.
    * Only `removed_append` and `pop_removed` change `removed`; `added` and `moved` are appended to.

    Guarantees:
    * `removed` is descending and has no popped rows. So a row that a request was added or moved to is not in it, and
      removals and additions may be processed in either order.
    * `peek_removed` and `pop_removed` return the lowest freed row.
    * The lists of an update are not reused: the next step has new ones.

    Args:
        removed: rows freed so far, in any order.
        added: additions so far.
        moved: moves so far.

    Attributes:
        added: additions, in order.
        moved: moves, in order.
        batch_changed: True from the first removal on. Callers that add without an entry in `added` set it, as vLLM does
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
        """Rows that were freed and not filled again, descending."""
        if not self._removed_was_read:
            self._removed.sort(reverse=True)
            self._removed_was_read = True
        return self._removed

    def removed_append(self, index: int) -> None:
        """Register that row `index` was freed.

        Raises:
            RuntimeError: the removals of this step were already read.
        """
        if self._removed_was_read:
            raise RuntimeError(
                f"row {index} can no longer be removed in this step: its removals were already read. Register all "
                "removals first"
            )
        self._removed.append(index)
        self.batch_changed = True

    def has_removed(self) -> bool:
        """Return whether some freed row is not filled."""
        return bool(self._removed)

    def peek_removed(self) -> int | None:
        """Return the lowest freed row; None if there is none."""
        return self.removed[-1] if self._removed else None

    def pop_removed(self) -> int | None:
        """Return the lowest freed row, for the caller to fill; None if there is none."""
        return self.removed.pop() if self._removed else None

    def reset(self) -> bool:
        """Drop the changes of this step.

        Returns:
            `batch_changed` before the call.
        """
        batch_changed = self.batch_changed
        self._removed.clear()
        self.added.clear()
        self.moved.clear()
        self._begin_step()
        return batch_changed

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """Return the update of this step, and start the next step.

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
