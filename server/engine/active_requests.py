"""The sequences of admitted requests, and the registry of active requests until their last sequence has finished."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.metrics.engine_stats import ModelInfo
from logitship.server.metrics.observed_metrics import RequestMeter
from logitship.server.refusals import BadRequest, QueueFull, ServiceUnavailable
from logitship.server.requests.body_limits import QueuedBody
from logitship.server.requests.messages import (
    GenerationChunk,
    GenerationRequest,
    GenerationStream,
    RequestError,
    aborted_chunks,
)
from logitship.server.requests.sequence import Sequence, Sink
from logitship.server.tokenizer import Tokenizer

from .beam_group import BeamGroup
from .failures import INTERNAL_ERROR

_SEEDS = 1 << 64
_SEED_STEP = 0x9E3779B97F4A7C15
"""Distance between the seeds of a request's continuations: 2^64 divided by the golden ratio, as in SplitMix64."""


@dataclass(eq=False)
class ActiveRequest:
    """A request that is loading, waiting or running.

    Attributes:
        unfinished: slots that its sequences have or wait for.
        processors: the processors that were loaded for it.
        sequences: empty until they are queued.
        body: counts the bytes of the body that it came from, until it starts.
        aborted: the ids by which the client has aborted it or its continuations, possibly before these were made.
        undelivered: chunks of the current step. Engine thread only.
    """

    request: GenerationRequest
    stream: GenerationStream
    meter: RequestMeter
    unfinished: int
    processors: list[LoadedProcessor] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    body: QueuedBody | None = None
    aborted: set[str] = field(default_factory=set)
    undelivered: list[GenerationChunk] = field(default_factory=list)

    def release_body(self) -> None:
        """Stop counting the bytes of its body. A no-op after the first call."""
        body, self.body = self.body, None
        if body is not None:
            body.release()


class ActiveRequests:
    """Active requests by tenant and request id, and the delivery of their chunks.

    `sequence_started`, `sequence_finished`, `deliver` and the sinks are for the engine thread; all other methods may be
    called from any thread.

    Guarantees:
    * A request's processors are released once, after its last sequence has finished.
    * After `close` or `fail_all`, `reserve` raises `ServiceUnavailable`.

    Args:
        max_running: sequences that run at a time.
        max_queued: sequences that may wait beyond those.
        max_per_tenant: sequences of one tenant that may run or wait; None: all.
        release: called with the processors of a request that is over.
    """

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        release: Callable[[list[LoadedProcessor]], None],
        max_per_tenant: int | None = None,
    ) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._max_per_tenant = max_running + max_queued if max_per_tenant is None else max_per_tenant
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

    def check_capacity(self) -> None:
        """Raise what `reserve` would raise now for a request with one sequence."""
        with self._lock:
            self._check_accepting()
            self._check_capacity(1)

    def reserve(self, active: ActiveRequest) -> None:
        """Enter a request, before anything is loaded for it.

        Raises:
            RequestRefused: shutting down, failed, the queue is full, or the tenant's request id is in use.
        """
        with self._lock:
            self._check_accepting()
            if _key(active) in self._active:
                raise BadRequest(f"a request {active.request.rid!r} is running already", param="rid")
            self._check_capacity(active.unfinished)
            tenant = active.request.tenant
            own = sum(other.unfinished for other in self._active.values() if other.request.tenant == tenant)
            if own + active.unfinished > self._max_per_tenant:
                raise QueueFull(
                    f"{own} of your sequences run or wait, and a client may have {self._max_per_tenant}"
                    f"{_and_has(active.unfinished)}: try again later"
                )
            self._active[_key(active)] = active
        if active.body is not None:
            active.body.hold()

    def release(self, active: ActiveRequest) -> None:
        """Remove a request, and release its processors and the bytes of its body."""
        self._release(active.processors)
        active.release_body()
        active.sequences.clear()  # they hold the request through their sink
        with self._lock:
            del self._active[_key(active)]

    def abort(self, rid: str | None, tenant: str) -> None:
        """Mark a tenant's requests and continuations as aborted, by an id that aborts them; None: all of them."""
        with self._lock:
            for active in self._active.values():
                request = active.request
                if request.tenant == tenant and (rid is None or rid in _all_names(request)):
                    active.aborted.add(request.rid if rid is None else rid)

    def sink(self, active: ActiveRequest) -> Callable[[GenerationChunk], None]:
        """Return the function that takes the request's chunks until the next `deliver`."""

        def sink(chunk: GenerationChunk) -> None:
            if not active.undelivered:
                self._touched.append(active)
            active.undelivered.append(chunk)

        return sink

    def sequence_started(self, sequence: Sequence) -> None:
        """Observe that a sequence got its slot."""
        active = self._active[sequence.request_key]
        active.meter.started()
        active.release_body()

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

    def fail_all(self, error: RequestError = INTERNAL_ERROR) -> None:
        """End every stream with an error: the engine thread has died, or nothing waits for it any more.

        A no-op after the first call.
        """
        with self._lock:
            orphans = [] if self._failed else list(self._active.values())
            self._failed = True
        for active in orphans:
            chunks = aborted_chunks(active.request, error)
            active.meter.delivered(chunks)
            GenerationStream.deliver([(active.stream, chunks)])

    def _check_accepting(self) -> None:
        if not self._accepting:
            raise ServiceUnavailable("the server is shutting down")
        if self._failed:
            raise ServiceUnavailable("the engine has died")

    def _check_capacity(self, num_slots: int) -> None:
        active = sum(other.unfinished for other in self._active.values())
        limit = self._max_running + self._max_queued
        if active + num_slots > limit:
            raise QueueFull(
                f"the queue is full: {active} sequences run or wait, at most {limit} may{_and_has(num_slots)}: "
                "try again later"
            )


def _and_has(num_slots: int) -> str:
    return "" if num_slots == 1 else f", and this request has {num_slots}"


def _key(active: ActiveRequest) -> tuple[str, str]:
    return active.request.tenant, active.request.rid


class SequenceFactory:
    """Makes the sequences of requests.

    Args:
        random_seed: seed of the seeds of requests that have none.
    """

    def __init__(self, model: ModelInfo, tokenizer: Tokenizer, random_seed: int | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._random = random.Random(random_seed)

    def make(self, request: GenerationRequest, index: int, uses: list[ProcessorUse], sink: Sink) -> Sequence:
        """Make one of the sequences that a request starts with; for a beam search, its lead beam.

        Args:
            request: the request.
            index: which continuation.
            uses: its processors.
            sink: takes its chunks.
        """
        params = request.sampling_params
        capacity = self._model.max_model_len - len(request.prompt_token_ids)
        sequence = Sequence(
            rid=request.rid,
            index=index,
            names=_names(request, index),
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=params.with_checked(
                seed=continuation_seed(self._seed_of(params), index),
                logprobs=0 if request.ranks and params.logprobs is None else params.logprobs,
                eos_token_ids=self._model.eos_token_ids,
                processors=tuple(uses),
            ),
            max_tokens=capacity if params.max_tokens is None else params.max_tokens,
            tokenizer=self._tokenizer,
            sink=sink,
            tenant=request.tenant,
        )
        if request.beam_search is None:
            return sequence
        return BeamGroup(
            request.beam_search, sequence, request.n, self._model.vocab_size, shown_logprobs=params.logprobs, sink=sink
        ).lead

    def _seed_of(self, params: SamplingParams) -> int:
        return self._random.getrandbits(64) if params.seed is None else params.seed


def continuation_seed(seed: int, index: int) -> int:
    """Return the seed of a continuation, from 0 to 2^64 - 1. It does not depend on how many continuations there are.

    Args:
        seed: the request's seed, which is also that of continuation 0.
        index: which continuation.
    """
    return (seed + index * _SEED_STEP) % _SEEDS


def _all_names(request: GenerationRequest) -> Iterator[str]:
    return chain.from_iterable(_names(request, index) for index in range(request.num_started))


def _names(request: GenerationRequest, index: int) -> frozenset[str]:
    """Return the ids that abort a continuation: its request's, its batch's, and its own if there are several."""
    names = {request.rid, request.batch_rid or request.rid}
    return frozenset(names | {f"{request.rid}_{index}"} if request.num_started > 1 else names)
