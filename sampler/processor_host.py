"""The narrow place where shipped code is loaded and called.

Everything else in the package handles a `LoadedProcessor` as a name and a digest. Where the code really runs is the
host's business: in this process (`InProcessHost`), or elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from logitship.client.errors import ProcessorLoadError

if TYPE_CHECKING:
    import torch

    from logitship.client.processor_string import ProcessorString


@dataclass(frozen=True, eq=False)
class LoadedProcessor:
    """A processor that its host is ready to run.

    Attributes:
        digest: its identity, `sha256:…` of what the host runs.
        name: the class's name, for people.
        size: bytes it counts for in the cache.
        host: who runs it.
        instance: whatever the host needs for that. Nobody else touches it.
        per_sequence: it was made for one sequence and runs on that one's row alone, whoever has the same digest.
    """

    digest: str
    name: str
    size: int
    host: ProcessorHost
    instance: Any
    per_sequence: bool = False


class ProcessorHost(Protocol):
    """Loads processors and runs them."""

    def load(self, string: ProcessorString) -> LoadedProcessor:
        """Make a processor ready to run. May take long; never called on the step path.

        Raises:
            ProcessorLoadError: it cannot be loaded; the message is for the client.
        """
        ...

    def run(
        self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """Call a processor on the rows of its group.

        Args:
            logits: float32 [rows, vocab], contiguous; may be edited in place.
            param_list: one dict a row, in row order.

        Returns:
            float32 [rows, vocab] on the device of `logits`: either `logits` itself or a new tensor.

        Raises:
            ProcessorFault: it raised, or returned something other than a float tensor of that shape on that device.
        """
        ...


class NoHost:
    """Stands where a host would be if shipped code were allowed: nothing is loaded, so nothing can run.

    Args:
        reason: what clients are told.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def load(self, string: ProcessorString) -> NoReturn:
        """Refuse.

        Raises:
            ProcessorLoadError: always.
        """
        raise ProcessorLoadError(self._reason)

    def run(self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]) -> NoReturn:
        """Never called: there is no processor of this host."""
        raise AssertionError("no processor was loaded")
