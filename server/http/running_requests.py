"""The engine's requests of one HTTP request: submitted, read and cancelled together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from logitship.client.serialization.processor_string import ProcessorString
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import RequestRefused
from logitship.server.requests.generation_stream import Continuation, GenerationStream
from logitship.server.requests.messages import GenerationChunk, GenerationRequest, RequestError
from logitship.server.requests.request_validation import in_client_words

from .request_log import follow


class GenerationFailed(Exception):
    """An admitted request was ended by an error.

    Attributes:
        error: what went wrong.
        index: index in the response of the first continuation that failed.
    """

    def __init__(self, error: RequestError, index: int) -> None:
        super().__init__(error.message)
        self.error = error
        self.index = index


@dataclass(frozen=True)
class Submission:
    """A request for the engine.

    Attributes:
        request: what to submit.
        names: the client's names of the fields in the engine's refusals, where they differ.
    """

    request: GenerationRequest
    names: Mapping[str, str]


async def submit_all(engine: AsyncEngine, submissions: Sequence[Submission]) -> RunningRequests:
    """Submit all or none: if one is refused, those before it are cancelled.

    Args:
        engine: the engine.
        submissions: one per prompt, all with the same number of continuations.

    Raises:
        RequestRefused: the engine's refusal, with the client's field names.
    """
    streams: list[GenerationStream] = []
    pins: dict[ProcessorString, ProcessorString] = {}  # a name resolves to the same version for all prompts
    async with AsyncExitStack() as submitted:
        for submission in submissions:
            stream = await _submit(engine, submission, pins)
            submitted.push_async_callback(stream.aclose)
            streams.append(stream)
        submitted.pop_all()
    running = RunningRequests(streams, submissions[0].request.num_sequences)
    ids = {submission.request.batch_rid or submission.request.rid for submission in submissions}
    follow(running, ids.pop() if len(ids) == 1 else None)
    return running


async def _submit(
    engine: AsyncEngine, submission: Submission, pins: dict[ProcessorString, ProcessorString]
) -> GenerationStream:
    try:
        return await engine.submit(engine.processors.pin(submission.request, pins))
    except RequestRefused as refused:
        raise in_client_words(refused, submission.names) from None


class RunningRequests:
    """The running requests of one HTTP request. Iterates over pairs of continuation and new chunk, in order of arrival.

    Attributes:
        continuations: those of all prompts, as far as they have been generated.
        first_token_at: when the first token arrived, on the clock of `time.perf_counter`; None before that.
    """

    def __init__(self, streams: Sequence[GenerationStream], n: int) -> None:
        self._streams = streams
        self._n = n
        self._pumps: list[asyncio.Task[None]] = []
        self.first_token_at: float | None = None
        self.continuations: Sequence[Continuation] = [
            Continuation(index, index // n) for index in range(len(streams) * n)
        ]

    async def __aiter__(self) -> AsyncIterator[tuple[Continuation, GenerationChunk]]:
        """Yield chunks until every continuation has ended."""
        async for prompt, chunk in self._merged():
            continuation = self.continuations[prompt * self._n + chunk.index]
            continuation.add(chunk)
            if self.first_token_at is None and chunk.token_ids:
                self.first_token_at = time.perf_counter()
            yield continuation, chunk

    async def finish(self) -> list[Continuation]:
        """Wait for the end of all continuations.

        Returns:
            All continuations, except those that a beam search did not find.

        Raises:
            GenerationFailed: an error ended one of them; the others are not awaited.
        """
        async for continuation, _ in self:
            raise_if_failed(continuation)
        return [continuation for continuation in self.continuations if not continuation.is_absent]

    async def aclose(self) -> None:
        """Cancel the requests that still run. A no-op after the end."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await asyncio.gather(*(stream.aclose() for stream in self._streams))

    async def _merged(self) -> AsyncIterator[tuple[int, GenerationChunk]]:
        if len(self._streams) == 1:
            async for chunk in self._streams[0]:
                yield 0, chunk
            return
        arrived: asyncio.Queue[tuple[int, GenerationChunk] | asyncio.Task[None]] = asyncio.Queue()

        async def pump(prompt: int, stream: GenerationStream) -> None:
            async for chunk in stream:
                arrived.put_nowait((prompt, chunk))

        self._pumps = [asyncio.ensure_future(pump(*each)) for each in enumerate(self._streams)]
        for task in self._pumps:
            task.add_done_callback(arrived.put_nowait)
        unfinished = len(self._pumps)
        while unfinished:
            item = await arrived.get()
            if isinstance(item, tuple):
                yield item
            else:
                item.result()  # raises what the stream raised
                unfinished -= 1


def raise_if_failed(continuation: Continuation) -> None:
    """Raise `GenerationFailed` if an error ended `continuation`."""
    reason = continuation.finish_reason
    if reason is not None and reason.error is not None:
        raise GenerationFailed(reason.error, continuation.index)
