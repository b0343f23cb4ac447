"""The registry of active requests: from reservation until their last sequence has finished."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from logitship.sampler.processors.executor import LoadedProcessor
from logitship.server.metrics.request_metrics import RequestMeter
from logitship.server.refusals import BadRequest, QueueFull, ServiceUnavailable
from logitship.server.requests.generation_stream import GenerationStream
from logitship.server.requests.messages import FinishReason, GenerationChunk, GenerationRequest
from logitship.server.requests.sequence import Sequence

from .failures import INTERNAL_ERROR


@dataclass(eq=False)
class ActiveRequest:
    """A request that is loading, waiting or running.

    Attributes:
        unfinished: slots that its sequences have or wait for.
        processors: the processors that were loaded for it.
        sequences: empty until they are queued.
        cancelled: the client has cancelled it, possibly before its sequences were made.
        undelivered: chunks of the current step. Engine thread only.
    """

    request: GenerationRequest
    stream: GenerationStream
    meter: RequestMeter
    unfinished: int
    processors: list[LoadedProcessor] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    cancelled: bool = False
    undelivered: list[GenerationChunk] = field(default_factory=list)


class ActiveRequests:
    """Active requests by tenant and request id, and the delivery of their chunks.

    `sequence_started`, `sequence_finished`, `deliver`, `fail_all` and the sinks are for the engine thread; all other
    methods may be called from any thread.

    Guarantees:
    * A request's processors are released once, after its last sequence has finished.
    * After `close` or `fail_all`, nothing is reserved.

    Args:
        max_running: sequences that run at a time.
        max_queued: sequences that may wait beyond those.
        release: called with the processors of a request that is over.
    """

    def __init__(self, max_running: int, max_queued: int, release: Callable[[list[LoadedProcessor]], None]) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._release = release
        # By tenant and id: tenants may use the same ids.
        self._active: dict[tuple[str, str], ActiveRequest] = {}
        self._touched: list[ActiveRequest] = []
        self._lock = threading.Lock()
        self._accepting = True
        self._failed = False

    def __len__(self) -> int:
        return len(self._active)

    @property
    def accepting(self) -> bool:
        """False once closed."""
        return self._accepting

    def close(self) -> None:
        """Refuse new requests from now on."""
        with self._lock:
            self._accepting = False

    def check_accepting(self) -> None:
        """Raise `ServiceUnavailable` if closed or failed."""
        with self._lock:
            self._check_accepting()

    def reserve(self, active: ActiveRequest) -> None:
        """Enter a request, before anything is loaded for it.

        Raises:
            RequestRefused: shutting down, failed, the queue is full, or the tenant's request id is in use.
        """
        with self._lock:
            self._check_accepting()
            if _key(active) in self._active:
                raise BadRequest(f"a request {active.request.rid!r} is running already", param="rid")
            queued = sum(other.unfinished for other in self._active.values()) - self._max_running
            if queued + active.unfinished > self._max_queued:
                raise QueueFull(f"the queue is full: {self._max_queued} requests wait, try again later")
            self._active[_key(active)] = active

    def release(self, active: ActiveRequest) -> None:
        """Remove a request and release its processors."""
        self._release(active.processors)
        with self._lock:
            del self._active[_key(active)]

    def cancel(self, rid: str | None, tenant: str) -> None:
        """Mark a tenant's requests as cancelled, by request or batch id; None: all of them."""
        with self._lock:
            for active in self._active.values():
                if active.request.tenant == tenant:
                    active.cancelled |= rid is None or rid in (active.request.rid, active.request.batch_rid)

    def sink(self, active: ActiveRequest) -> Callable[[GenerationChunk], None]:
        """Return the function that takes the request's chunks until the next `deliver`."""

        def sink(chunk: GenerationChunk) -> None:
            if not active.undelivered:
                self._touched.append(active)
            active.undelivered.append(chunk)

        return sink

    def sequence_started(self, sequence: Sequence) -> None:
        """Observe that a sequence got its slot."""
        self._active[sequence.request_key].meter.started()

    def sequence_finished(self, sequence: Sequence) -> None:
        """Count a finished sequence; release its request with the last one."""
        with self._lock:
            active = self._active[sequence.request_key]
            active.unfinished -= sequence.num_slots
            last = active.unfinished == 0
        if last:
            self.release(active)

    def deliver(self) -> None:
        """Hand over the chunks of a step, with one wake-up of the event loop for all of them."""
        touched, self._touched = self._touched, []
        for active in touched:  # first: a client that has its answer may read the metrics
            active.meter.delivered(active.undelivered)
        GenerationStream.deliver((active.stream, active.undelivered) for active in touched)
        for active in touched:
            active.undelivered = []

    def fail_all(self) -> None:
        """End every stream with an internal error: the engine thread has died."""
        with self._lock:
            self._failed = True
            orphans = list(self._active.values())
        for active in orphans:
            reason = FinishReason("abort", error=INTERNAL_ERROR)
            prompt_tokens = len(active.request.prompt_token_ids)
            chunks = [
                GenerationChunk(
                    index=index,
                    text="",
                    token_ids=[],
                    finish_reason=reason,
                    prompt_tokens=prompt_tokens,
                    completion_tokens=0,
                )
                for index in range(active.request.num_sequences)
            ]
            active.meter.delivered(chunks)
            GenerationStream.deliver([(active.stream, chunks)])

    def _check_accepting(self) -> None:
        if not self._accepting:
            raise ServiceUnavailable("the server is shutting down")
        if self._failed:
            raise ServiceUnavailable("the engine has died")


def _key(active: ActiveRequest) -> tuple[str, str]:
    return active.request.tenant, active.request.rid
