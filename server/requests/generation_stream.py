"""The output of a request: the stream of its chunks, from the engine's thread to a coroutine, and its continuations."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeVar

from logitship.client.records import Receipt
from logitship.sampler.trace import RowTrace

from .messages import ABSENT, FinishReason, GenerationChunk, TokenLogprobs

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
            prompt_logprobs=self.prompt_logprobs.copy(),
        )

    def add(self, chunk: GenerationChunk) -> None:
        """Append a chunk."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.traces += chunk.traces
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
