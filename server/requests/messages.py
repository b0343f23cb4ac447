"""What travels between the engine and those who ask it: frozen records, nothing else."""

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
    """A processor that a request carries, not loaded yet, and its parameters.

    Attributes:
        params: not to be changed: several may share them.
        own: the parameters are for it alone; otherwise they are the `custom_params` that all processors see.
    """

    string: ProcessorString
    params: Mapping[str, Any] | None = None
    own: bool = False


@dataclass(frozen=True)
class CallableRequest:
    """A request-level callable that a request asks for: one that the server can import, or, offline, the object itself.

    Attributes:
        target: `module:name` or `module.name`; or a callable.
        args: positional arguments that make the callable out of what `target` names.
        kwargs: keyword arguments for the same.
    """

    target: str | Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


AttachedProcessor: TypeAlias = ProcessorRequest | CallableRequest
"""One entry of the list of processors that a request carries."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue, `num_sequences` times.

    The engine admits it or refuses it with a `RequestRefused`; after that it always ends with a `FinishReason`.
    """

    rid: str
    """Request id, unique among the tenant's running requests."""
    tenant: str = ""
    """Who sent it. Tenants share no loaded processor, and cannot abort each other's requests."""
    batch_rid: str | None = None
    """The id by which the client knows the batch of prompts that this request is a part of."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    processors: tuple[AttachedProcessor, ...] = ()
    """In the order in which they run. The engine loads them at admission and fills `sampling_params.processors`."""
    n: int = 1
    """Number of continuations in the answer. They are independent: the seed of each is a `continuation_seed`."""
    best_of: int | None = None
    """Number of continuations to generate, of which the `best_continuations` are answered; None: `n`."""

    beam_search: BeamSearch | None = None
    """Search for the most likely continuations instead of drawing them; `n` of the beams are answered."""

    @property
    def num_started(self) -> int:
        """Number of sequences that the engine begins with: of a search, one, from which the other beams branch off."""
        return self.num_sequences if self.beam_search is None else 1

    @property
    def num_slots(self) -> int:
        """Most sequences of it that run at a time."""
        return self.num_sequences if self.beam_search is None else self.beam_search.width

    @property
    def num_sequences(self) -> int:
        """Number of continuations that the engine makes, each with chunks of its own."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks(self) -> bool:
        """True if there are more than are answered: their tokens have log-probabilities, asked for or not."""
        return self.num_sequences > self.n

    @property
    def is_known_at_end(self) -> bool:
        """True if nothing of the answer is certain before all continuations have ended."""
        return self.ranks or self.beam_search is not None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        token_id: the token that stands there.
        logprob: its log-probability (natural logarithm); None for the first token of a prompt.
        rank: 1 for the most likely token; None where `logprob` is.
        top: (token id, log-probability) of the most likely tokens, most likely first.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestError:
    """Why a running request ended early.

    Attributes:
        type: name of the error class, such as `ProcessorFault`.
        message: one sentence for the client.
        status_code: the HTTP status that fits.
        traceback: traceback of the processor's own code, or "".
        digest: the processor at fault, where one is.
        name: its name.
        kind: in which way it broke its contract, see `ProcessorFault`.
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
    """Why a continuation ended.

    Attributes:
        kind: `stop` (end token, stop token or stop string), `length`, `abort` (cancelled, or `error` says why), or
            `absent`, see `ABSENT`.
        matched: for `stop`: the token id or the string that ended it.
        error: for `abort`: what went wrong; None if somebody cancelled it.
    """

    kind: Literal["stop", "length", "abort", "absent"]
    matched: int | str | None = None
    error: RequestError | None = None


ABSENT = FinishReason("absent")
"""Of a beam search that found fewer sequences than were asked for: this one is left out of the answer."""


@dataclass(frozen=True, kw_only=True)
class GenerationChunk:
    """What one continuation gained since its previous chunk. Chunks concatenate to the whole."""

    index: int
    """Which of the request's continuations."""
    text: str
    """New text. A possible beginning of a stop string is held back until it is decided."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One a new token, if the request asked for them."""
    traces: list[RowTrace] = field(default_factory=list)
    """One a new token, if the request asked for them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """On the first chunk, if the request asked for them: from `prompt_logprobs_start` on."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk of this continuation, and only there."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were not computed for this continuation but copied from another's."""
    completion_tokens: int
    """Output tokens so far, this chunk's included."""
    receipts: tuple[Receipt, ...] = ()
    """On the last chunk: one a processor that the request carried."""
    cumulative_logprob: float | None = None
    """Of a beam search: sum of the log-probabilities of the output's tokens, after all edits of the logits."""
    beam_score: float | None = None
    """Of a beam search: what the sequences were compared by, see `BeamSearch.score`."""
