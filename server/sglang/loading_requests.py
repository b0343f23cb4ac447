"""New requests whose processors are loading: they wait outside of SGLang's batch, like those whose grammar compiles.

Those with a class that was too slow a moment ago wait here as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .sampling_ranks import SamplingRanks


class LoadsProcessors(Protocol):
    """Loads the processors of requests on the first rank."""

    def must_wait(self, req: Any) -> bool:
        """Begin to load in the background, and return whether the request is to wait."""
        ...

    def load(self, req: Any) -> str | None:
        """Load the processors of a request, and return the reason if they cannot run."""
        ...


class LoadingRequests:
    """Requests that wait for their processors, in the order of their arrival. The same on all ranks.

    Args:
        seat: loads the processors.
        ranks: the first one decides when a request has waited long enough.
    """

    def __init__(self, seat: LoadsProcessors, ranks: SamplingRanks) -> None:
        self._seat = seat
        self._ranks = ranks
        self._reqs: list[Any] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def add(self, req: Any) -> None:
        """Let a request wait, SGLang's `Req`."""
        self._reqs.append(req)

    def take_ready(self) -> list[tuple[Any, str | None]]:
        """Return the requests that need not wait any longer, with the reasons of those that cannot run.

        Called on all ranks, at the same point between two steps.
        """
        if not self._reqs:
            return []
        ready: dict[int, str | None] = {}
        if self._ranks.is_first:
            ready = {
                index: self._seat.load(req) for index, req in enumerate(self._reqs) if not self._seat.must_wait(req)
            }
        ready = self._ranks.from_first(ready)
        taken = [(self._reqs[index], reason) for index, reason in ready.items()]
        self._reqs = [req for index, req in enumerate(self._reqs) if index not in ready]
        return taken

    def abort(self, queue: list[Any], abort: Callable[[], None]) -> None:
        """Let SGLang abort requests as if those that wait here were in its waiting queue.

        Args:
            queue: SGLang's waiting queue.
            abort: removes the requests from it that are to be aborted.
        """
        waiting = {id(req) for req in self._reqs}
        queue += self._reqs
        abort()
        self._reqs = [req for req in queue if id(req) in waiting]
        queue[:] = [req for req in queue if id(req) not in waiting]
