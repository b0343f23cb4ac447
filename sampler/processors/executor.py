"""The narrow place where shipped code is loaded and called.

Everything else in the package handles a `LoadedProcessor` as a name and a digest. Where the code really runs is the
executor's business: in this process (`LocalExecutor`), or in a process of its own (`SandboxExecutor`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from logitship.client.errors import ProcessorLoadError

if TYPE_CHECKING:
    import torch

    from logitship.client.errors import ProcessorFault
    from logitship.client.serialization.processor_string import ProcessorString
    from logitship.sampler.sampling_params import SamplingParams

    from .request_view import ModelView


PREPARED_KEY = "__prepared__"
"""What an installed processor finds under, in a row's parameters, what it made of them at admission."""


@dataclass(frozen=True, eq=False)
class LoadedProcessor:
    """A processor that its executor is ready to run.

    Attributes:
        digest: its identity, `sha256:…` of what the executor runs.
        name: the class's name, for people.
        executor: who runs it.
        instance: whatever the executor needs for that. Nobody else touches it.
        per_sequence: it was made for one sequence and runs on that one's row alone, whoever has the same digest.
        is_mask: it only ever sets logits to -inf, on the grounds of the history alone: it runs before a request's other
            processors, and once more after them.
        is_trusted: it comes with logitship. What it leaves is not checked after its call, which takes a look at all
            logits, but at the end of the step, with those of all rows.
        tenant: whose it is. Two tenants never share a loaded processor, because a class may keep things on itself.
        description: what a shipped class says that it does; "" if it does not say.
        params_schema: JSON Schema of its parameters, as a shipped class says, or None.
    """

    digest: str
    name: str
    executor: ProcessorExecutor
    instance: Any
    per_sequence: bool = False
    is_mask: bool = False
    is_trusted: bool = False
    tenant: str = ""
    description: str = ""
    params_schema: Mapping[str, Any] | None = None

    @property
    def group_name(self) -> str:
        """The same for all uses of it, and for those of no other: rows of the same name are a group."""
        return f"{self.tenant}/{self.digest}"


@dataclass(frozen=True)
class ExecutorSequence:
    """A sequence that carries a processor, as its executor gets to know it.

    Attributes:
        rid: the request id.
        params: the request's parameters for the processor; not to be changed.
        prompt_token_ids: the prompt.
        output_token_ids: the engine's own list of output tokens, which grows.
        sampling_params: the request's sampling parameters.
        model: what processors may know of the model.
        prepared: what an installed processor made of the parameters at admission; None for all others.
    """

    rid: str
    params: Mapping[str, Any]
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    model: ModelView
    prepared: Any = None


class ExecutorRow(Protocol):
    """A sequence at its executor, while it has a row of the batch."""

    def fork(self, output_token_ids: list[int]) -> ExecutorRow:
        """Take in another sequence, which goes on from the history that this one had in its last step.

        It has its own copy of what the processor keeps of the sequence: the parameters, and `__req__` with its `state`.
        What cannot be copied is a fault of the other sequence: of this call, or of its next step where the copy is made
        in another process.

        Args:
            output_token_ids: the engine's own list of the other sequence; begins with this one's tokens up to its last
                step, and grows.

        Raises:
            ProcessorFault: something cannot be copied.
        """
        ...

    def close(self) -> None:
        """The sequence left the batch, or will never have a row of it."""
        ...


class RunOutcome(NamedTuple):
    """What came of a call.

    Attributes:
        seconds: how long it took.
        faults: of the rows, by their place in the call, that have none of the processor's logits, and why.
        row_by_row: the call failed for all rows together, and was made again for each of them.
    """

    seconds: float
    faults: Mapping[int, ProcessorFault] = MappingProxyType({})
    row_by_row: bool = False


class Run(Protocol):
    """A call that was begun."""

    def finish(self) -> RunOutcome:
        """Wait for its end. The rows hold what the processor made of them; those of the faults are unspecified."""
        ...


class ExecutorGroup(Protocol):
    """The rows of a processor at its executor, until the batch changes."""

    def begin(self, logits: torch.Tensor) -> Run:
        """Begin to call the processor. Calls for several groups may be begun before the first is finished.

        The processor sees all tokens of the rows' outputs.

        Args:
            logits: float32 [rows, vocab], contiguous; edited in place until the call is finished. The author's code
                only ever gets another tensor, on the same memory or not.
        """
        ...


class ProcessorExecutor(Protocol):
    """Loads processors and runs them."""

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """Make a processor ready to run. May take long; never called on the step path.

        Raises:
            ProcessorLoadError: it cannot be loaded; the message is for the client.
        """
        ...

    def ensure(self, processor: LoadedProcessor) -> None:
        """Make a processor ready again, if what ran it is gone. May take long; never called on the step path.

        Raises:
            ProcessorLoadError: it cannot be loaded any more.
        """
        ...

    def unload(self, processor: LoadedProcessor) -> None:
        """Let go of a processor that nobody uses any more."""
        ...

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> ExecutorRow:
        """Take in a sequence that got a row of the batch."""
        ...

    def group(self, processor: LoadedProcessor, rows: Sequence[ExecutorRow]) -> ExecutorGroup:
        """Put together what a processor is called for, until the batch changes.

        Args:
            rows: what `attach` gave, in row order.
        """
        ...


class DisabledExecutor:
    """Stands where a executor would be if shipped code were allowed: nothing is loaded, so nothing can run.

    Args:
        reason: what clients are told.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def load(self, string: ProcessorString, tenant: str = "") -> NoReturn:
        """Refuse.

        Raises:
            ProcessorLoadError: always.
        """
        raise ProcessorLoadError(self._reason)

    def ensure(self, processor: LoadedProcessor) -> NoReturn:
        """Never called: there is no processor of this executor."""
        raise AssertionError("no processor was loaded")

    def unload(self, processor: LoadedProcessor) -> NoReturn:
        """Never called."""
        raise AssertionError("no processor was loaded")

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> NoReturn:
        """Never called."""
        raise AssertionError("no processor was loaded")

    def group(self, processor: LoadedProcessor, rows: Sequence[ExecutorRow]) -> NoReturn:
        """Never called."""
        raise AssertionError("no processor was loaded")
