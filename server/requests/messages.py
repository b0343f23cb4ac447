"""The records that the engine and its callers exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from logitship.client.records import Receipt
from logitship.client.serialization.processor_string import ProcessorString
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.trace import RowTrace

from .beam_search import BeamSearch


@dataclass(frozen=True)
class ProcessorRequest:
    """A processor of a request, not loaded yet, and its parameters.

    Attributes:
        string: the processor.
        params: its parameters. Read only: processors may share them.
        own: True if the parameters are this processor's; False if they are the `custom_params` that all processors see.
    """

    string: ProcessorString
    params: Mapping[str, Any] | None = None
    own: bool = False


@dataclass(frozen=True)
class CallableRequest:
    """A callable logits processor of a request: an importable name, or, offline, the object itself.

    Attributes:
        target: `module:name` or `module.name`; or a callable.
        args: positional arguments for the factory that `target` names.
        kwargs: keyword arguments for the factory.
    """

    target: str | Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


AttachedProcessor: TypeAlias = ProcessorRequest | CallableRequest
"""An entry in a request's list of processors."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue, `num_sequences` times.

    The engine admits it or raises a `RequestRefused`. An admitted request always ends with a `FinishReason`.
    """

    rid: str
    """Request id, unique among the tenant's running requests."""
    tenant: str = ""
    """The client that sent it. Tenants share no loaded processors, and cannot abort each other's requests."""
    batch_rid: str | None = None
    """The client's id of the batch of prompts that this request belongs to."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    processors: tuple[AttachedProcessor, ...] = ()
    """In the order they run. The engine loads them at admission and fills `sampling_params.processors`."""
    n: int = 1
    """Number of continuations in the answer. Each has a seed of its own, see `continuation_seed`."""
    best_of: int | None = None
    """Number of continuations to generate, of which the `best_continuations` are answered; None: `n`."""

    beam_search: BeamSearch | None = None
    """Search for the most likely continuations instead of sampling; the answer has `n` of the beams."""

    @property
    def num_started(self) -> int:
        """Sequences that the engine starts with. A beam search starts with one, from which other beams branch off."""
        return self.num_sequences if self.beam_search is None else 1

    @property
    def num_slots(self) -> int:
        """Most sequences of the request that run at a time."""
        return self.num_sequences if self.beam_search is None else self.beam_search.width

    @property
    def num_sequences(self) -> int:
        """Number of continuations that the engine generates, each with chunks of its own."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks(self) -> bool:
        """True if more continuations are generated than answered. Their tokens then always have log-probabilities."""
        return self.num_sequences > self.n

    @property
    def is_known_at_end(self) -> bool:
        """True if the answer is unknown until all continuations have finished."""
        return self.ranks or self.beam_search is not None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        token_id: the token at this position.
        logprob: its log-probability (natural logarithm); None for the first token of a prompt.
        rank: 1 for the most likely token; None if `logprob` is None.
        top: (token id, log-probability) of the most likely tokens, most likely first.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestError:
    """The error that ended a running request.

    Attributes:
        type: name of the error class, such as `ProcessorFault`.
        message: one sentence for the client.
        status_code: the corresponding HTTP status.
        traceback: traceback of the processor's own code, or "".
        digest: digest of the processor at fault, if there is one.
        name: its name.
        kind: kind of the fault, see `ProcessorFault`.
    """

    type: str
    message: str
    status_code: int
    traceback: str = ""
    digest: str | None = None
    name: str | None = None
    kind: str | None = None


@dataclass(frozen=True)
class FinishReason:
    """The reason why a continuation ended. The client's counterpart is `logitship.client.records.FinishReason`.

    Attributes:
        kind: `stop` (end token, stop token or stop string), `length`, `abort` (cancelled, or failed with `error`), or
            `absent`, see `ABSENT`.
        matched: for `stop`: the token id or the string that ended it.
        error: for `abort`: the error; None if it was cancelled.
    """

    kind: Literal["stop", "length", "abort", "absent"]
    matched: int | str | None = None
    error: RequestError | None = None


ABSENT = FinishReason("absent")
"""Finish reason of an output that a beam search did not find: it is left out of the answer."""


@dataclass(frozen=True, kw_only=True)
class GenerationChunk:
    """New output of one continuation since its previous chunk. Chunks concatenate to the whole output.

    The client's counterpart is `logitship.client.records.GenerationChunk`.
    """

    index: int
    """Index of the continuation in the request."""
    text: str
    """New text. A possible start of a stop string is held back until that is decided."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per new token, if requested."""
    traces: list[RowTrace] = field(default_factory=list)
    """One per new token, if requested."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """On the first chunk, if requested: from `prompt_logprobs_start` on."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk of the continuation only."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were copied from another sequence instead of computed."""
    completion_tokens: int
    """Output tokens so far, including this chunk's."""
    receipts: tuple[Receipt, ...] = ()
    """On the last chunk: one per processor of the request."""
    cumulative_logprob: float | None = None
    """Beam search only: sum of the log-probabilities of the output's tokens, after all edits of the logits."""
    beam_score: float | None = None
    """Beam search only: the score of the output, see `BeamSearch.score`."""
