"""Runs requests on an engine: no more at a time than it takes, and none longer than somebody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import QueueFull
from logitship.server.requests.generation_stream import GenerationStream

from .error_translation import error_of_failure
from .output_builder import OutputBuilder
from .outputs import RequestOutput
from .queue_semaphore import QueueSemaphore
from .request_builder import OfflineRequest, refusals_translated

_RETRY_INTERVAL = 0.01


class RunningRequest:
    """A request in the engine, until `aclose()`."""

    def __init__(self, stream: GenerationStream, builder: OutputBuilder, leave: Callable[[], None]) -> None:
        self._stream = stream
        self._builder = builder
        self._leave: Callable[[], None] | None = leave

    async def chunks(self) -> AsyncGenerator[OutputBuilder, None]:
        """What there is so far, each time that it has grown; the same object every time.

        Raises:
            ProcessorFault, GenerationError: an error ended a continuation; the others are cancelled.
        """
        async for chunk in self._stream:
            reason = self._builder.add(chunk)
            if reason is not None and reason.error is not None:
                raise error_of_failure(reason.error, self._builder.output())
            yield self._builder

    async def finish(self) -> RequestOutput:
        """Wait for the end of all continuations.

        Raises:
            ProcessorFault, GenerationError: as `chunks`.
        """
        async with aclosing(self.chunks()) as chunks:
            async for _ in chunks:
                pass
        return self._builder.output()

    async def aclose(self) -> None:
        """Cancel what still runs. Harmless at the end, and a second time."""
        leave, self._leave = self._leave, None
        if leave is not None:
            await self._stream.aclose()
            leave()


class Runner:
    """Runs the requests of one engine's owner."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._room = QueueSemaphore(engine.config.max_num_seqs + engine.config.max_queued_requests)

    async def stream(self, request: OfflineRequest) -> AsyncGenerator[RequestOutput, None]:
        """The output of a request, each time that it has grown. Closing the generator cancels the request.

        Raises:
            InvalidRequest, RuntimeError: it was not admitted.
            ProcessorFault, GenerationError: an error ended it.
        """
        running = await self._start(request)
        try:
            async with aclosing(running.chunks()) as chunks:
                async for builder in chunks:
                    if builder.finished or not request.request.is_known_at_end:
                        yield builder.output()
        finally:
            await running.aclose()

    async def run_all(self, requests: Sequence[OfflineRequest], finished: Callable[[int, RequestOutput], None]) -> None:
        """Run requests to their ends.

        Args:
            requests: submitted in this order; more of them than the engine takes wait here.
            finished: told of each output with its request's index, as they end.

        Raises:
            InvalidRequest, RuntimeError, ProcessorFault, GenerationError: the first that failed; the others are
                cancelled.
        """
        started: list[RunningRequest] = []
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    running = await self._start(request)
                    started.append(running)
                    group.create_task(_finish(index, running, finished))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            # Not each in its own task: one that is cancelled before it starts never gets to its `finally`.
            for running in started:
                await running.aclose()

    async def _start(self, request: OfflineRequest) -> RunningRequest:
        n = request.request.num_slots
        await self._room.enter(n)
        try:
            stream = await self._submit(request)
        except BaseException:
            self._room.leave(n)
            raise
        builder = OutputBuilder(request, self._engine.model, self._engine.tokenizer)
        return RunningRequest(stream, builder, lambda: self._room.leave(n))

    async def _submit(self, request: OfflineRequest) -> GenerationStream:
        with refusals_translated(request.names):
            while True:
                try:
                    return await self._engine.submit(request.request)
                except QueueFull:
                    # What was cancelled has left its place here, but stays in the engine's books until its step ends.
                    await asyncio.sleep(_RETRY_INTERVAL)


async def _finish(index: int, running: RunningRequest, finished: Callable[[int, RequestOutput], None]) -> None:
    output = await running.finish()
    await running.aclose()
    finished(index, output)
