"""The records that the engine and its callers exchange, and the stream of a request's chunks to a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from logitship.client.records import Receipt
from logitship.client.serialization.processor_string import ProcessorString
from logitship.sampler.ops.sampling_masks import RowMask
from logitship.sampler.sampling_params import InvalidSamplingParams, SamplingParams
from logitship.sampler.trace import RowTrace

EarlyStopping: TypeAlias = bool | Literal["never"]

_MAX_PENALTY = 10
"""Largest absolute length penalty: far beyond useful values, and no length to that power overflows."""


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


@dataclass(frozen=True)
class BeamSearch:
    """Parameters of a beam search. Errors use the names of the request's fields.

    Attributes:
        width: number of beams.
        length_penalty: exponent of the length by which a sum of log-probabilities is divided. Values above 0 favor
            longer outputs, since the sums are negative.
        early_stopping: when the search stops, once there are `width` hypotheses. True: at once. False: when the best
            beam, if it ended now, would not be better than the worst of them. "never": when it could not become better
            at any length that it can still reach.

    Raises:
        InvalidSamplingParams: a value is out of range.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        if not _is_count(self.width):
            raise InvalidSamplingParams("num_beams", "must be an integer, 1 or greater")
        # In this form, it also refuses NaN.
        if not -_MAX_PENALTY <= self.length_penalty <= _MAX_PENALTY:
            raise InvalidSamplingParams("length_penalty", f"must be a number from -{_MAX_PENALTY} to {_MAX_PENALTY}")
        if self.early_stopping not in (True, False, "never"):
            raise InvalidSamplingParams("early_stopping", 'must be true, false or "never"')

    def num_candidates(self, num_end_tokens: int) -> int:
        """Return how many candidates a step considers: at least `width` of them do not end in an EOS token."""
        return max(2, 1 + num_end_tokens) * self.width

    def score(self, cumulative_logprob: float, length: int) -> float:
        """Return the score that hypotheses are ranked by.

        Args:
            cumulative_logprob: sum of the log-probabilities of the output.
            length: tokens of the output, 1 or more.
        """
        return float(cumulative_logprob / length**self.length_penalty)


class BeamFields(Protocol):
    """The fields of a request that select beam search, in all APIs; `n` is the number of outputs in the answer."""

    @property
    def n(self) -> int:  # noqa: D102
        ...

    @property
    def num_beams(self) -> int | None:  # noqa: D102
        ...

    @property
    def use_beam_search(self) -> bool:  # noqa: D102
        ...

    @property
    def length_penalty(self) -> float:  # noqa: D102
        ...

    @property
    def early_stopping(self) -> EarlyStopping:  # noqa: D102
        ...


def beam_search_of(fields: BeamFields) -> BeamSearch | None:
    """Return the search that a request asks for, or None.

    With `num_beams` above 1, as in Hugging Face, the answer has `n` of the beams. With `use_beam_search` alone, as in
    vLLM, `n` is the number of beams.

    Raises:
        InvalidSamplingParams: a field is out of range, or contradicts another one.
    """
    if not fields.use_beam_search and fields.num_beams in (None, 1):
        for name, default in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(fields, name) != default:
                raise InvalidSamplingParams(name, "needs beam search: set num_beams above 1, or use_beam_search")
        return None
    search = BeamSearch(
        fields.n if fields.num_beams is None else fields.num_beams, fields.length_penalty, fields.early_stopping
    )
    if fields.n > search.width:
        raise InvalidSamplingParams("n", f"must not be greater than num_beams, which is {search.width}")
    return search


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
        requested: the same of the tokens that the request names, in its order.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple[tuple[int, float], ...] = ()
    requested: tuple[tuple[int, float], ...] = ()


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
        kind: `stop` (EOS token, stop token, stop string or pattern), `length`, `abort` (cancelled, or failed with
            `error`), or `absent`, see `ABSENT`.
        matched: for `stop`: the token id, the string or the pattern that ended it.
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
    masks: list[RowMask] = field(default_factory=list)
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


def merge_chunks(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """Return one chunk with the output of several that follow each other, of the same continuation."""
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=[logprobs for chunk in chunks for logprobs in chunk.logprobs],
        traces=[trace for chunk in chunks for trace in chunk.traces],
        masks=[mask for chunk in chunks for mask in chunk.masks],
        prompt_logprobs=[logprobs for chunk in chunks for logprobs in chunk.prompt_logprobs],
    )


def aborted_chunks(request: GenerationRequest, error: RequestError | None = None) -> list[GenerationChunk]:
    """Return a chunk for each continuation that ends it as aborted, without further output.

    Args:
        request: the request.
        error: the reason, unless it is the client that aborts.
    """
    return [
        GenerationChunk(
            index=index,
            text="",
            token_ids=[],
            finish_reason=FinishReason("abort", error=error),
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=0,
        )
        for index in range(request.num_sequences)
    ]


AnyContinuation = TypeVar("AnyContinuation", bound="Continuation")


@dataclass
class Continuation:
    """The output of one continuation so far.

    Attributes:
        index: its index in the answer: continuation `j` of prompt `i` has index `i * n + j`.
        prompt: index of the prompt that it continues.
    """

    index: int
    prompt: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    traces: list[RowTrace] = field(default_factory=list)
    masks: list[RowMask] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    receipts: tuple[Receipt, ...] = ()
    cumulative_logprob: float | None = None
    beam_score: float | None = None

    @property
    def is_absent(self) -> bool:
        """True if a beam search found no output for this index, see `ABSENT`."""
        return self.finish_reason is ABSENT

    def copy(self) -> Continuation:
        """Return an independent copy."""
        return replace(
            self,
            token_ids=self.token_ids.copy(),
            logprobs=self.logprobs.copy(),
            traces=self.traces.copy(),
            masks=self.masks.copy(),
            prompt_logprobs=self.prompt_logprobs.copy(),
        )

    def add(self, chunk: GenerationChunk) -> None:
        """Append a chunk."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.traces += chunk.traces
        self.masks += chunk.masks
        self.prompt_logprobs += chunk.prompt_logprobs
        self.finish_reason = chunk.finish_reason
        self.prompt_tokens = chunk.prompt_tokens
        self.cached_tokens = chunk.cached_tokens
        self.completion_tokens = chunk.completion_tokens
        self.receipts = chunk.receipts
        self.cumulative_logprob = chunk.cumulative_logprob
        self.beam_score = chunk.beam_score


def best_continuations(continuations: Iterable[AnyContinuation], n: int) -> list[AnyContinuation]:
    """Return the `n` continuations with the highest log-probability per token, the highest first: `best_of`.

    The mean is OpenAI's measure: a sum would prefer short outputs. It counts every sampled token, with the one that
    ended the output. Of equals the earlier comes first; aborted continuations come last.

    Args:
        continuations: with the log-probabilities of their tokens.
        n: how many to keep.
    """
    return sorted(continuations, key=_rank)[:n]


def _rank(continuation: Continuation) -> tuple[bool, float]:
    """Return the sort key of a continuation: smaller is better."""
    reason = continuation.finish_reason
    known = [position.logprob for position in continuation.logprobs if position.logprob is not None]
    return reason is not None and reason.kind == "abort", -sum(known) / len(known) if known else inf


class GenerationStream:
    """An asynchronous iterator over the chunks of a request, with its `n` continuations interleaved.

    It ends when each continuation has its finish reason. To stop earlier, call `aclose()`: that cancels the request,
    which frees its rows within a step.

    Args:
        n: number of continuations.
        cancel: cancels the request.

    Attributes:
        digests: those of the processors that are applied, in the order in which they run.
    """

    digests: Sequence[str] = ()

    def __init__(self, n: int, cancel: Callable[[], None]) -> None:
        self._unfinished = n
        self._cancel = cancel
        self._chunks: asyncio.Queue[GenerationChunk] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        while self._unfinished:
            chunk = await self._chunks.get()
            if chunk.finish_reason is not None:
                self._unfinished -= 1
            yield chunk

    async def aclose(self) -> None:
        """Cancel the request, unless it has finished."""
        if self._unfinished:
            self._cancel()

    def _put(self, chunks: list[GenerationChunk]) -> None:
        for chunk in chunks:
            self._chunks.put_nowait(chunk)

    @staticmethod
    def deliver(delivery: Iterable[tuple[GenerationStream, list[GenerationChunk]]]) -> None:
        """Give streams their chunks, on any thread. Each event loop is woken up once for all of its streams."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[GenerationStream, list[GenerationChunk]]]] = {}
        for stream, chunks in delivery:
            by_loop.setdefault(stream._loop, []).append((stream, chunks))
        for loop, part in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_put_all, part)


def _put_all(delivery: list[tuple[GenerationStream, list[GenerationChunk]]]) -> None:
    for stream, chunks in delivery:
        stream._put(chunks)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
