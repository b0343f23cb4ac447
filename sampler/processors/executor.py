"""The `ProcessorExecutor` protocol: loads and runs the processors of requests.

The rest of the package handles a `LoadedProcessor` by name and digest. The executor decides where its code runs: in
this process (`LocalExecutor`) or in a process of its own (`SandboxExecutor`).
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
"""Key in a row's parameters of what an installed processor prepared from them at admission."""


@dataclass(frozen=True, eq=False)
class LoadedProcessor:
    """A processor that its executor is ready to run.

    Attributes:
        digest: identity of the processor: `sha256:…` of the code that the executor runs.
        name: name of the class, for people.
        executor: the executor that runs it.
        instance: private to the executor.
        per_sequence: True if it was made for one sequence. It then runs on that sequence's row alone, even if others
            have the same digest.
        is_mask: True if it only sets logits to -inf, and depends on the history alone. It runs before the request's
            other processors, and again after them.
        is_trusted: True if it comes with logitship. Its rows are not checked after each call, which reads all logits,
            but once at the end of the step.
        tenant: owner of the processor. Two tenants never share one, because a class may keep state on itself.
        description: description that a shipped class gives of itself; "" if it has none.
        params_schema: JSON Schema of the parameters, from a shipped class; None if it has none.
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
        """Name shared by exactly the uses of this processor: rows with the same name form a group."""
        return f"{self.tenant}/{self.digest}"


@dataclass(frozen=True)
class ExecutorSequence:
    """A sequence with a processor, as passed to the processor's executor.

    Attributes:
        rid: request id.
        params: the request's parameters for the processor. Read-only.
        prompt_token_ids: token ids of the prompt.
        output_token_ids: the engine's live list of output tokens: it grows.
        sampling_params: sampling parameters of the request.
        model: view of the model for processors.
        prepared: result of an installed processor's `prepare` at admission; None for other processors.
    """

    rid: str
    params: Mapping[str, Any]
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    model: ModelView
    prepared: Any = None


class ExecutorRow(Protocol):
    """A sequence at its executor, while it holds a row of the batch."""

    def fork(self, output_token_ids: list[int]) -> ExecutorRow:
        """Attach another sequence that continues from this one's history as of its last step.

        The new sequence gets its own copy of the per-sequence state: the parameters, and `__req__` with its `state`. If
        that cannot be copied, the new sequence fails: in this call, or in its next step if another process does the
        copying.

        Args:
            output_token_ids: the engine's live list of the new sequence. It begins with this sequence's tokens up to
                its last step, and grows.

        Raises:
            ProcessorFault: the state cannot be copied.
        """
        ...

    def close(self) -> None:
        """Release the sequence: it was removed from the batch, or will never be added to it."""
        ...


class RunOutcome(NamedTuple):
    """Result of a call.

    Attributes:
        seconds: duration of the call.
        faults: faults of failed rows, by row index within the call. The logits of these rows are unspecified.
        row_by_row: True if the call failed for the whole group and was repeated for each row.
    """

    seconds: float
    faults: Mapping[int, ProcessorFault] = MappingProxyType({})
    row_by_row: bool = False


class Run(Protocol):
    """A call that has begun."""

    def finish(self) -> RunOutcome:
        """Wait for the call to end. The rows then hold the processor's logits, except for rows with a fault."""
        ...


class ExecutorGroup(Protocol):
    """The rows of one processor at its executor. Valid until the batch changes."""

    def begin(self, logits: torch.Tensor) -> Run:
        """Begin a call of the processor. Several groups may begin before the first one finishes.

        The processor sees all output tokens of its rows.

        Args:
            logits: float32 [rows, vocab], contiguous; edited in place until the call finishes. The author's code never
                gets this tensor object, though its tensor may share the memory.
        """
        ...


class ProcessorExecutor(Protocol):
    """Loads processors and runs them."""

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """Load a processor. May be slow; never called on the step path.

        Raises:
            ProcessorLoadError: the processor cannot be loaded; the message is for the client.
        """
        ...

    def ensure(self, processor: LoadedProcessor) -> None:
        """Reload a processor if the process that ran it is gone. May be slow; never called on the step path.

        Raises:
            ProcessorLoadError: the processor can no longer be loaded.
        """
        ...

    def unload(self, processor: LoadedProcessor) -> None:
        """Release a processor that is no longer in use."""
        ...

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> ExecutorRow:
        """Register a sequence that was given a row of the batch."""
        ...

    def group(self, processor: LoadedProcessor, rows: Sequence[ExecutorRow]) -> ExecutorGroup:
        """Group the rows that the processor is called for until the batch changes.

        Args:
            processor: the processor of all rows.
            rows: results of `attach`, in row order.
        """
        ...


class DisabledExecutor:
    """The executor of a server that does not allow shipped code: refuses to load anything.

    Args:
        reason: error message for clients.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def load(self, string: ProcessorString, tenant: str = "") -> NoReturn:
        """Refuse to load.

        Raises:
            ProcessorLoadError: always.
        """
        raise ProcessorLoadError(self._reason)

    def ensure(self, processor: LoadedProcessor) -> NoReturn:
        """Never called: this executor has no processors."""
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
