"""Execution of requests on an engine, within the limits of its queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import QueueFull
from logitship.server.requests.messages import GenerationStream, aborted_chunks

from .error_translation import error_of_failure
from .output_builder import OutputBuilder
from .outputs import RequestOutput
from .queue_semaphore import QueueSemaphore
from .request_builder import OfflineRequest, refusals_translated

_RETRY_INTERVAL = 0.01


@dataclass(eq=False)
class AbortSignal:
    """A mark on a request that is aborted before the engine knows its id.

    Attributes:
        rid: the request's id.
        aborted: True once `Runner.abort` was called with it.
    """

    rid: str
    aborted: bool = False


class RunningRequest:
    """A request in the engine, until `aclose()`."""

    def __init__(self, stream: GenerationStream, builder: OutputBuilder, release: Callable[[], None]) -> None:
        self._stream = stream
        self._builder = builder
        self._release: Callable[[], None] | None = release

    async def chunks(self) -> AsyncGenerator[OutputBuilder, None]:
        """Yield the builder after each chunk; the same object every time.

        Raises:
            ProcessorFault, GenerationError: an error ended a continuation; the others are cancelled.
        """
        async for chunk in self._stream:
            reason = self._builder.add(chunk)
            if reason is not None and reason.error is not None:
                raise error_of_failure(reason.error, self._builder.output())
            yield self._builder

    async def finish(self) -> RequestOutput:
        """Wait until all continuations have ended.

        Raises:
            ProcessorFault, GenerationError: as `chunks`.
        """
        async with aclosing(self.chunks()) as chunks:
            async for _ in chunks:
                pass
        return self._builder.output()

    async def aclose(self) -> None:
        """Cancel the request if it still runs. Safe to call more than once."""
        release, self._release = self._release, None
        if release is not None:
            await self._stream.aclose()
            release()


class Runner:
    """Runs the requests of an `LLM` or `AsyncLLM`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._semaphore = QueueSemaphore(engine.config.max_num_seqs + engine.config.max_queued_requests)
        self._signals: list[AbortSignal] = []

    @contextmanager
    def abort_signal(self, rid: str) -> Iterator[AbortSignal]:
        """Let `abort` find a request that is not submitted yet."""
        signal = AbortSignal(rid)
        self._signals.append(signal)
        try:
            yield signal
        finally:
            self._signals.remove(signal)

    def abort(self, rid: str) -> None:
        """Abort the requests with this id, also those that wait for the engine's queue. Thread-safe."""
        for signal in self._signals.copy():
            if signal.rid == rid:
                signal.aborted = True
                self._semaphore.withdraw(signal)
        self._engine.abort(rid)

    async def stream(self, request: OfflineRequest, signal: AbortSignal) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, and yield its output each time it grows. Closing the generator cancels the request.

        Args:
            request: the request.
            signal: that of its id.

        Raises:
            InvalidRequest, RuntimeError: the request was not admitted.
            ProcessorFault, GenerationError: an error ended the request.
        """
        running = await self._start(request, signal)
        try:
            async with aclosing(running.chunks()) as chunks:
                async for builder in chunks:
                    if builder.finished or not request.request.is_known_at_end:
                        yield builder.output()
        finally:
            await running.aclose()

    async def run_all(self, requests: Sequence[OfflineRequest], finished: Callable[[int, RequestOutput], None]) -> None:
        """Run requests until all have ended.

        Args:
            requests: submitted in this order, as far as the engine's queue allows; the others wait.
            finished: called with the index and the output of each request when it ends.

        Raises:
            InvalidRequest, RuntimeError, ProcessorFault, GenerationError: the error of the first request that failed;
                the others are cancelled.
        """
        started: list[RunningRequest] = []
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    running = await self._start(request)
                    started.append(running)
                    group.create_task(_finish(index, running, finished))
        except BaseExceptionGroup as failures:  # cleanup, then re-raised
            raise failures.exceptions[0] from None
        finally:
            # Not in each task: a task that is cancelled before it starts never runs its `finally`.
            for running in started:
                await running.aclose()

    async def _start(self, request: OfflineRequest, signal: AbortSignal | None = None) -> RunningRequest:
        n = request.request.num_slots
        builder = OutputBuilder(request, self._engine.model, self._engine.tokenizer)
        if (signal and signal.aborted) or not await self._semaphore.acquire(n, signal):
            return RunningRequest(_aborted_stream(request), builder, _noop)
        try:
            stream = await self._submit(request)
        except BaseException:  # cleanup, then re-raised
            self._semaphore.release(n)
            raise
        if signal and signal.aborted:  # maybe when the engine did not know it yet
            self._engine.abort(signal.rid)
        return RunningRequest(stream, builder, lambda: self._semaphore.release(n))

    async def _submit(self, request: OfflineRequest) -> GenerationStream:
        with refusals_translated(request.names):
            while True:
                try:
                    return await self._engine.submit(request.request)
                except QueueFull:
                    # A cancelled request has released its slots here, but the engine counts it until its step ends.
                    await asyncio.sleep(_RETRY_INTERVAL)


async def _finish(index: int, running: RunningRequest, finished: Callable[[int, RequestOutput], None]) -> None:
    output = await running.finish()
    await running.aclose()
    finished(index, output)


def _aborted_stream(request: OfflineRequest) -> GenerationStream:
    """Return the stream of a request that was aborted before it was submitted."""
    stream = GenerationStream(request.request.num_sequences, _noop)
    GenerationStream.deliver([(stream, aborted_chunks(request.request))])
    return stream


def _noop() -> None:
    pass
