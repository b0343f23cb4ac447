"""The engine's requests of one HTTP request, submitted, read and cancelled together, and their responses.

Responses are streamed or whole. Both cancel the requests when the client disconnects.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace

import orjson
from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from logitship.client.serialization.processor_string import ProcessorString
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import RequestRefused
from logitship.server.requests.body_limits import QueuedBody
from logitship.server.requests.messages import (
    Continuation,
    GenerationChunk,
    GenerationRequest,
    GenerationStream,
    merge_chunks,
)
from logitship.server.requests.request_validation import in_client_words
from logitship.server.uploads.refusal_responses import JSONResponse
from logitship.server.uploads.request_bodies import while_connected

from .json_responses import GenerationFailed, failure_body, internal_error_body
from .request_log import follow

logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Submission:
    """A request for the engine.

    Attributes:
        request: what to submit.
        names: the client's names of the fields in the engine's refusals, where they differ.
        stream_interval: tokens of a stream's event.
    """

    request: GenerationRequest
    names: Mapping[str, str]
    stream_interval: int = 1


async def submit_all(engine: AsyncEngine, submissions: Sequence[Submission], body: QueuedBody) -> RunningRequests:
    """Submit all or none: if one is refused, those before it are cancelled.

    Args:
        engine: the engine.
        submissions: one per prompt, all with the same number of continuations.
        body: the body that they come from: its bytes are counted until all of them have started.

    Raises:
        RequestRefused: the engine's refusal, with the client's field names.
    """
    streams: list[GenerationStream] = []
    pins: dict[ProcessorString, ProcessorString] = {}  # a name resolves to the same version for all prompts
    async with AsyncExitStack() as submitted:
        for submission in submissions:
            stream = await _submit(engine, submission, body, pins)
            submitted.push_async_callback(stream.aclose)
            streams.append(stream)
            await asyncio.sleep(0)  # a batch may have a thousand: let others run in between
        submitted.pop_all()
    intervals = [submission.stream_interval for submission in submissions]
    running = RunningRequests(streams, submissions[0].request.num_sequences, intervals)
    ids = {submission.request.batch_rid or submission.request.rid for submission in submissions}
    follow(running, ids.pop() if len(ids) == 1 else None)
    return running


async def _submit(
    engine: AsyncEngine, submission: Submission, body: QueuedBody, pins: dict[ProcessorString, ProcessorString]
) -> GenerationStream:
    try:
        return await engine.submit(engine.processors.pin(submission.request, pins), body)
    except RequestRefused as refused:
        raise in_client_words(refused, submission.names) from None


class RunningRequests:
    """The running requests of one HTTP request. Iterates over pairs of continuation and new chunk, in order of arrival.

    Attributes:
        continuations: those of all prompts, as far as they have been generated.
        first_token_at: when the first token arrived, on the clock of `time.perf_counter`; None before that.
        digests: those of all processors that are applied.
    """

    def __init__(self, streams: Sequence[GenerationStream], n: int, stream_intervals: Sequence[int]) -> None:
        self._streams = streams
        self._n = n
        self._stream_intervals = stream_intervals
        self._pumps: list[asyncio.Task[None]] = []
        self.digests: Sequence[str] = tuple(dict.fromkeys(digest for stream in streams for digest in stream.digests))
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

    async def at_intervals(self) -> AsyncIterator[tuple[Continuation, GenerationChunk]]:
        """Yield chunks merged by `stream_interval`. The first token and the end are yielded at once, as in vLLM.

        An error may end the whole stream. So the pending chunks of all continuations are yielded before it.
        """
        waiting: dict[int, list[GenerationChunk]] = {}
        async for continuation, chunk in self:
            if chunk.finish_reason is not None and chunk.finish_reason.error is not None:
                for index, chunks in waiting.items():
                    if chunks:
                        yield replace(self.continuations[index], finish_reason=None), merge_chunks(chunks)
                waiting.clear()
            chunks = waiting.setdefault(continuation.index, [])
            chunks.append(chunk)
            interval = self._stream_intervals[continuation.prompt]
            has_first = len(chunks) == continuation.completion_tokens
            if has_first or len(chunks) >= interval or chunk.finish_reason is not None:
                waiting[continuation.index] = []
                yield continuation, merge_chunks(chunks)

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


def event(data: object) -> bytes:
    """Encode a server-sent event with JSON data."""
    return b"data: " + orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"


async def respond_when_finished(running: RunningRequests, build: Callable[[list[Continuation]], object]) -> Response:
    """Wait for all continuations, and respond with one JSON body.

    Args:
        running: the requests that the HTTP request submitted; always closed.
        build: builds the body.

    Raises:
        GenerationFailed: an error ended one of the continuations.
    """
    try:
        continuations = await running.finish()
    finally:
        await running.aclose()
    return JSONResponse(build(continuations))


class EventStream(Response):
    """Streams server-sent events, with `[DONE]` at the end.

    The status is sent before the outcome is known, so an error becomes an event: `{"error": {…}}`.

    Args:
        running: the requests that the HTTP request submitted; always closed.
        events: the encoded events, generated from `running`.
    """

    media_type = "text/event-stream"

    def __init__(self, running: RunningRequests, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._running = running
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            with suppress(ClientDisconnect):
                async with while_connected(receive):
                    await self._send_all(send)
        finally:
            await self._running.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._until_error()) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _until_error(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    yield data
            except GenerationFailed as failed:
                yield event(failure_body(failed))
            # A bug must end this stream with an error event, not cut the connection.
            except Exception:  # boundary: event loop
                logger.exception("unexpected error in a stream")
                yield event(internal_error_body())
