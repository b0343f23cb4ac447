"""The `ProcessorExecutor` protocol: loads and runs the processors of requests.

The rest of the package handles a `LoadedProcessor` by name and digest. The executor decides where its code runs: in
this process (`LocalExecutor`) or in a process of its own (`SandboxExecutor`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, TypeAlias

from logitship.client.errors import ProcessorLoadError

if TYPE_CHECKING:
    import torch

    from logitship.client.errors import ProcessorFault
    from logitship.client.serialization.processor_string import ProcessorString
    from logitship.sampler.allowed_tokens import AllowedTokens
    from logitship.sampler.edits.edit_operations import GroupEdits
    from logitship.sampler.sampling_params import SamplingParams

    from .request_view import ModelView

PREPARED_KEY = "__prepared__"
"""Key in a row's parameters for the object that an installed processor prepared from them at admission."""


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

    @cached_property
    def group_name(self) -> str:
        """Name shared by exactly the uses of this processor: rows with the same name form a group."""
        return group_name(self.tenant, self.digest)


def group_name(tenant: str, digest: str) -> str:
    """Return `LoadedProcessor.group_name` of a processor."""
    return f"{tenant}/{digest}"


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


NO_FAULTS: Mapping[int, ProcessorFault] = MappingProxyType({})
"""Faults of a call without faults."""

LogitsUse: TypeAlias = Literal["given", "unread", "read"]
"""Use that a call makes of its logits' values, see `RunOutcome`."""


class RunOutcome(NamedTuple):
    """Result of a call.

    Attributes:
        seconds: duration of the call, for people: an untrusted process may have measured it.
        faults: faults of failed rows, by row index within the call. The logits of these rows are unspecified.
        row_by_row: True if the call failed for the whole group and was repeated for each row.
        charged: seconds that count against the deadline of the step: 0 in this process, where there is none.
        occupied: seconds that its tenant is charged: at least those in which it kept a core busy, or the step waiting;
            for a deferred call also those in which it waited for a core.
        logits_use: "unread" if the call began before its logits existed, and never used one; "read" if it began so, and
            then used them; "given" if it began with them.
        printed: the last text that the processor printed.
    """

    seconds: float
    faults: Mapping[int, ProcessorFault] = NO_FAULTS
    row_by_row: bool = False
    charged: float = 0.0
    occupied: float = 0.0
    logits_use: LogitsUse = "given"
    printed: str = ""


class CollectEdits(Protocol):
    """Takes edits that a call recorded, instead of their being applied to its logits."""

    def __call__(self, rows: Sequence[int], edits: GroupEdits) -> None:
        """Take the edits of some rows.

        Args:
            rows: rows of the call, ascending.
            edits: edits of these rows.
        """
        ...


class Run(Protocol):
    """A call that has begun. Its states: `call_state`."""

    def needs_logits(self) -> bool:
        """Return whether a call that was begun by `promise` still needs its logits. Never blocks.

        If not, the call has ended, and its edits can be collected with `finish` without a call of `provide`.
        """
        ...

    def provide(self, logits: torch.Tensor) -> None:
        """Give a call that was begun by `promise` its logits, once. Never blocks.

        Args:
            logits: see `ExecutorGroup.begin`.
        """
        ...

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the call to end. Return whether `finish` would not block."""
        ...

    def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
        """Wait for the call to end. The rows then hold the processor's logits, except for rows with a fault.

        Args:
            collect: takes the edits that have to be applied to the rows, so that those of many calls are applied at
                once; None: they are applied here.
        """
        ...

    def lower_priority(self) -> None:
        """Continue the call at the lowest priority, because it is likely to take long. Called right after its start."""
        ...

    def defer(self, logits: torch.Tensor) -> None:
        """Continue the call after its step, which no longer waits for it.

        `finish` then edits another tensor, because the next step overwrites that of `begin`.

        Args:
            logits: float32 [rows, vocab], a copy of the tensor that `begin` was given.
        """
        ...


class ExecutorGroup(Protocol):
    """The rows of one processor at its executor, which runs elsewhere while this process goes on.

    Valid until the batch changes.
    """

    def promise(self) -> Run | None:
        """Begin a call before its logits exist, see `promised_logits`. `Run.provide` must follow if it needs them.

        Returns:
            None if nothing would be gained: `begin` is then called once there are logits.
        """
        ...

    def begin(self, logits: torch.Tensor, seconds_used: float = 0.0) -> Run:
        """Begin a call of the processor. Several groups may begin before the first one finishes.

        The processor sees all output tokens of its rows.

        Args:
            seconds_used: seconds of the step's deadline that earlier stages of the tenant have used.
            logits: float32 [rows, vocab], contiguous; edited in place until the call finishes. The author's code never
                gets this tensor object, though its tensor may share the memory.
        """
        ...

    def call(self, logits: torch.Tensor) -> RunOutcome:
        """Call the processor, and wait until the call has ended.

        Args:
            logits: see `begin`.
        """
        ...


class LocalGroup(ABC):
    """The rows of a processor that runs in this process. Like an `ExecutorGroup`, but with nothing to wait for.

    No call begins before its logits exist: on the threads of this process, the model computes first.
    """

    @abstractmethod
    def call(self, logits: torch.Tensor) -> RunOutcome:
        """Call the processor. There is no deadline.

        Args:
            logits: see `ExecutorGroup.begin`.
        """


class ExecutorUnavailable(Exception):
    """The executor cannot load anything now, whatever the processor. The message is for the client: try again later."""


def failed_before(reason: str, seconds: float) -> ProcessorLoadError:
    """Return the error of a load that is not tried again yet.

    Args:
        reason: the message of the failure: one line, and perhaps a traceback.
        seconds: time until the next attempt is possible.
    """
    first_line, line_end, traceback = reason.partition("\n")
    state = f"(from an earlier attempt; the next one is possible in {seconds:.0f} s)"
    return ProcessorLoadError(f"{first_line} {state}{line_end}{traceback}")


class ProcessorExecutor(Protocol):
    """Loads processors and runs them."""

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """Load a processor. May be slow; never called on the step path.

        Raises:
            ProcessorLoadError: the processor cannot be loaded; the message is for the client.
            ExecutorUnavailable: no processor can be loaded now.
        """
        ...

    def ensure(self, processor: LoadedProcessor) -> None:
        """Reload a processor if the process that ran it is gone. May be slow; never called on the step path.

        Raises:
            ProcessorLoadError: the processor can no longer be loaded.
            ExecutorUnavailable: no processor can be loaded now.
        """
        ...

    def is_ready(self, processor: LoadedProcessor) -> bool:
        """Return whether a processor can run: False if `ensure` would reload it. Never blocks."""
        ...

    def cancel_load(self, digest: str, tenant: str) -> bool:
        """Make a load that another thread waits for fail soon with a `ProcessorLoadError`.

        Args:
            digest: the processor that is loaded or reloaded.
            tenant: its owner.

        Returns:
            False if loads cannot be cancelled.
        """
        ...

    def unload(self, processor: LoadedProcessor) -> None:
        """Release a processor that is no longer in use."""
        ...

    def restrict(
        self, processor: LoadedProcessor, rows: Sequence[ExecutorRow], allowed: Sequence[AllowedTokens]
    ) -> None:
        """Forbid what the next call of a processor will set to -inf, as far as the history alone decides it.

        Rows whose logits the processor may use, or that it may set to something else than -inf or a finite number, are
        left open.

        Args:
            processor: the processor of all rows.
            rows: results of `attach`.
            allowed: the tokens of each row, to be restricted.
        """
        ...

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> ExecutorRow:
        """Register a sequence that was given a row of the batch."""
        ...

    def group(self, processor: LoadedProcessor, rows: Sequence[ExecutorRow]) -> ExecutorGroup | LocalGroup:
        """Group the rows that the processor is called for until the batch changes.

        Args:
            processor: the processor of all rows.
            rows: results of `attach`, in row order.

        Returns:
            A `LocalGroup` if the processor runs in this process.
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

    def is_ready(self, processor: LoadedProcessor) -> NoReturn:
        """Never called."""
        raise AssertionError("no processor was loaded")

    def cancel_load(self, digest: str, tenant: str) -> NoReturn:
        """Never called."""
        raise AssertionError("no processor is loaded")

    def unload(self, processor: LoadedProcessor) -> NoReturn:
        """Never called."""
        raise AssertionError("no processor was loaded")

    def restrict(
        self, processor: LoadedProcessor, rows: Sequence[ExecutorRow], allowed: Sequence[AllowedTokens]
    ) -> NoReturn:
        """Never called."""
        raise AssertionError("no processor was loaded")

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> NoReturn:
        """Never called."""
        raise AssertionError("no processor was loaded")

    def group(self, processor: LoadedProcessor, rows: Sequence[ExecutorRow]) -> NoReturn:
        """Never called."""
        raise AssertionError("no processor was loaded")
