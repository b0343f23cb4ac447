"""The engine as a coroutine sees it: submit a request, iterate over its chunks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from logitship.client.processor_info import ProcessorInfo
from logitship.client.serialization.processor_string import ProcessorString
from logitship.sampler.batch_processors.plugins import Plugin
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.processor_use import ProcessorUse
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxStats
from logitship.server.config import ServerConfig
from logitship.server.metrics.engine_metrics import EngineMetrics
from logitship.server.metrics.engine_stats import EngineStats, ModelInfo
from logitship.server.metrics.request_metrics import RequestMeter
from logitship.server.metrics.step_clock import StepClock
from logitship.server.processors.processor_library import ProcessorLibrary
from logitship.server.processors.request_processors import RequestProcessors
from logitship.server.refusals import BadRequest, QueueFull, ServiceUnavailable
from logitship.server.requests.generation_stream import GenerationStream
from logitship.server.requests.messages import (
    AttachedProcessor,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
)
from logitship.server.requests.request_validation import Limits, check, check_sandboxed, check_with_plugins
from logitship.server.requests.sequence import Sequence
from logitship.server.tokenizer import Tokenizer

from .beam_group import BeamGroup
from .daemon_thread import in_daemon_thread
from .engine import INTERNAL_ERROR, Engine
from .engine_thread import EngineThread

_SHUTDOWN_INTERVAL = 0.05
_STOP_TIMEOUT = 5.0
"""Seconds that the current step gets to end. It takes far less, unless shipped code hangs in it."""

_NO_SANDBOXES = SandboxStats(alive=0, started=0, ended={})

_SEEDS = 1 << 64
_SEED_STEP = 0x9E3779B97F4A7C15
"""Sets the seeds of a request's continuations apart: 2^64 divided by the golden ratio, as in SplitMix64."""


@dataclass
class _ActiveRequest:
    """What a request holds until its last sequence ends."""

    request: GenerationRequest
    stream: GenerationStream
    meter: RequestMeter
    unfinished: int
    """Slots that its sequences have or wait for."""
    processors: list[LoadedProcessor] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    cancelled: bool = False
    """Perhaps before its sequences were made."""
    undelivered: list[GenerationChunk] = field(default_factory=list)
    """Filled on the engine's thread during a step, handed over after it."""


class AsyncEngine:
    """Admits requests, hands them to the engine's thread, and their chunks back to coroutines."""

    def __init__(
        self,
        config: ServerConfig,
        model: ModelInfo,
        tokenizer: Tokenizer,
        library: ProcessorLibrary,
        plugins: Iterable[Plugin] = (),
        attached_to_all: Iterable[AttachedProcessor] = (),
    ) -> None:
        """Make an engine that is not running yet.

        Args:
            plugins: the installed batch processors.
            attached_to_all: what every request carries beside its own processors.
        """
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self._library = library
        self._plugins = tuple(plugins)
        self._carried_by_all = tuple(attached_to_all)
        self._limits = Limits(
            model.vocab_size,
            model.max_model_len,
            config.max_logprobs,
            config.max_num_seqs,
            knows_thinking=config.reasoning_strings is not None,
        )
        self._random = random.Random(config.random_seed)
        # By tenant and id: what one calls its requests is no other's business.
        self._active: dict[tuple[str, str], _ActiveRequest] = {}
        self._touched: list[_ActiveRequest] = []
        self.clock = StepClock()
        self.metrics = EngineMetrics(model, library.installed_digests, self.stats)
        self.processors = RequestProcessors(library, self.metrics.processor_load)
        """To list, name, pin and delete processors; `register` and `submit` are here."""
        self._lock = threading.Lock()
        self._accepting = True

    def start(
        self,
        engine: Engine,
        thread: EngineThread,
        *,
        sandboxes: SandboxExecutor | None = None,
    ) -> None:
        """Begin to run requests on `engine`.

        Args:
            engine: its `on_finished` is `sequence_finished`, its scheduler's `on_start` is `sequence_started`, and its
                clock is `clock`.
            thread: where it was made.
            sandboxes: closed at the end, after the engine's last step.
        """
        self._engine = engine
        self._sandboxes = sandboxes
        self._thread = thread
        thread.start(engine, after_step=self._hand_over, on_death=self._fail_all)

    def check(self, request: GenerationRequest) -> None:
        """Refuse what cannot run on this model, without submitting it or loading its processors.

        Raises:
            BadRequest: as `submit`.
        """
        check(request, self._limits)
        check_with_plugins(request.sampling_params, self._plugins)
        if self.config.processor_isolation == "sandbox":
            check_sandboxed(request, lambda string: self.processors.ships_code(string, request.tenant))

    async def submit(self, request: GenerationRequest) -> GenerationStream:
        """Admit a request.

        Raises:
            RequestRefused: it was not admitted. `param` is a field of `SamplingParams`, `prompt`, `rid`, `n`,
                `processors`, `processors[i]` or `processors[i].params`; None where a batch processor refused.
        """
        self.check(request)
        # At the end: a refusal names the request's own ones by their places.
        request = dataclasses.replace(request, processors=(*request.processors, *self._carried_by_all))
        stream = GenerationStream(request.num_sequences, lambda: self._cancel(active))
        active = _ActiveRequest(request, stream, RequestMeter(self.metrics.requests), request.num_slots)
        self._reserve(active)
        processors = await self._loaded(active) if request.processors else [[] for _ in range(request.num_started)]
        active.sequences += [self._sequence(active, index, uses) for index, uses in enumerate(processors)]
        active.meter.admitted()
        self._thread.add(active.sequences)
        if active.cancelled:
            self._cancel(active)
        return active.stream

    async def register(self, string: ProcessorString, tenant: str = "", name: str | None = None) -> ProcessorInfo:
        """Keep a processor, for requests that name it. Loads it, so that its mistakes show now.

        Args:
            tenant: who is asking. Requests of others may name the digest as well.
            name: what it goes by; None: its class's name. Another under the same name becomes its next version.

        Raises:
            RequestRefused: it cannot be loaded or go by that name, is too large to be kept, or there is no room for it
                now. `param` is `name`, or None.
        """
        with self._lock:
            self._check_accepting()
        return await in_daemon_thread(self.processors.register, string, tenant, name)

    def abort(self, rid: str | None, tenant: str = "") -> None:
        """Cancel a request, the requests of a batch, or a continuation, by the id that its client knows; all: `None`.

        Only those of this tenant, that is; other tenants may use the same ids.

        Their streams end with an `abort` chunk. Other ids that only begin in the same way are not meant, as they are
        with SGLang: they may be another client's.
        """
        with self._lock:
            for active in self._active.values():
                if active.request.tenant == tenant:
                    active.cancelled |= rid is None or rid in (active.request.rid, active.request.batch_rid)
        self._thread.abort(lambda sequence: sequence.tenant == tenant and (rid is None or rid in sequence.names))

    def _cancel(self, active: _ActiveRequest) -> None:
        """Cancel this very request: by now, another may run under its id."""
        self._thread.abort(
            lambda sequence: (sequence if sequence.beams is None else sequence.beams.lead) in active.sequences
        )

    async def flush_cache(self) -> bool:
        """Drop what is cached between requests. False, and nothing happens, while requests run or wait."""
        with self._lock:
            if self._active:
                return False
        self._library.clear()
        self._thread.clear_prefixes()
        return True

    def stats(self) -> EngineStats:
        """What the engine is doing now."""
        cache = self._library.cache_stats()
        prefixes = self._engine.prefix_stats
        sandboxes = _NO_SANDBOXES if self._sandboxes is None else self._sandboxes.stats()
        return EngineStats(
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            steps=self._engine.num_steps,
            accepting=self._accepting,
            processor_cache_hits=cache.hits,
            processor_cache_misses=cache.misses,
            processor_cache_evictions=cache.evictions,
            processor_cache_entries=cache.entries,
            processor_cache_bytes=cache.bytes,
            prefix_tokens_asked=prefixes.tokens_asked,
            prefix_tokens_found=prefixes.tokens_found,
            prefix_blocks=prefixes.blocks,
            prefix_blocks_capacity=prefixes.capacity,
            registered_processors=self._library.num_registered,
            drafted=self._engine.num_drafted,
            accepted=self._engine.num_accepted,
            sandboxes=sandboxes.alive,
            sandboxes_started=sandboxes.started,
            sandboxes_ended=sandboxes.ended,
        )

    @property
    def healthy(self) -> bool:
        """False once the engine's thread has died."""
        return self._thread.alive

    async def shutdown(self, timeout: float) -> None:
        """Refuse new requests, let the running ones finish for at most `timeout` seconds, stop."""
        with self._lock:
            self._accepting = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                # Looked at now and then: who cancels this leaves no thread behind that waits.
                while self._active and self.healthy:
                    await asyncio.sleep(_SHUTDOWN_INTERVAL)
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Stop now: what runs ends as aborted."""
        with self._lock:
            self._accepting = False
        self._thread.stop(_STOP_TIMEOUT)
        if self._sandboxes is not None:
            self._sandboxes.close()

    def _reserve(self, active: _ActiveRequest) -> None:
        """Enter a request into the books, before anything is loaded for it."""
        with self._lock:
            self._check_accepting()
            if _key(active.request) in self._active:
                raise BadRequest(f"a request {active.request.rid!r} is running already", param="rid")
            queued = sum(other.unfinished for other in self._active.values()) - self.config.max_num_seqs
            if queued + active.unfinished > self.config.max_queued_requests:
                raise QueueFull(f"the queue is full: {self.config.max_queued_requests} requests wait, try again later")
            self._active[_key(active.request)] = active

    def _check_accepting(self) -> None:
        if not self._accepting or not self.healthy:
            raise ServiceUnavailable("the engine has died" if self._accepting else "the server is shutting down")

    async def _loaded(self, active: _ActiveRequest) -> list[list[ProcessorUse]]:
        loading = in_daemon_thread(self.processors.load, active.request, active.processors)
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            # That does not stop the thread: what it still loads is given back when it is done.
            loading.add_done_callback(lambda _: self._forget(active))
            raise
        except BaseException:
            self._forget(active)
            raise

    def _sequence(self, active: _ActiveRequest, index: int, uses: list[ProcessorUse]) -> Sequence:
        request = active.request
        params = request.sampling_params
        room = self.model.max_model_len - len(request.prompt_token_ids)

        def sink(chunk: GenerationChunk) -> None:
            if not active.undelivered:
                self._touched.append(active)
            active.undelivered.append(chunk)

        sequence = Sequence(
            rid=request.rid,
            index=index,
            names=_names(request, index),
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=dataclasses.replace(
                params,
                seed=continuation_seed(self._seed_of(params), index),
                logprobs=0 if request.ranks and params.logprobs is None else params.logprobs,
                eos_token_ids=self.model.eos_token_ids,
                processors=tuple(uses),
            ),
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            tokenizer=self.tokenizer,
            sink=sink,
            tenant=request.tenant,
        )
        if request.beam_search is None:
            return sequence
        return BeamGroup(
            request.beam_search, sequence, request.n, self.model.vocab_size, shown_logprobs=params.logprobs, sink=sink
        ).lead

    def _seed_of(self, params: SamplingParams) -> int:
        return self._random.getrandbits(64) if params.seed is None else params.seed

    def _hand_over(self) -> None:
        """After each step, on the engine's thread: one wake-up of the event loop, not one a chunk."""
        with self.clock.deliver:
            touched, self._touched = self._touched, []
            for active in touched:  # first: who has got an answer may look at the metrics
                active.meter.delivered(active.undelivered)
            GenerationStream.deliver((active.stream, active.undelivered) for active in touched)
            for active in touched:
                active.undelivered = []
        self.metrics.step_ended(self.clock)

    def sequence_started(self, sequence: Sequence) -> None:
        """Called by the scheduler, on the engine's thread."""
        self._active[sequence.request_key].meter.started()

    def sequence_finished(self, sequence: Sequence) -> None:
        """Called by the engine, on its thread."""
        with self._lock:
            active = self._active[sequence.request_key]
            active.unfinished -= sequence.num_slots
            last = active.unfinished == 0
        if last:
            self._forget(active)

    def _forget(self, active: _ActiveRequest) -> None:
        self.processors.release(active.processors)
        with self._lock:
            del self._active[_key(active.request)]

    def _fail_all(self) -> None:
        """The engine's thread has died: nobody may wait for it."""
        with self._lock:
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


def continuation_seed(seed: int, index: int) -> int:
    """The seed of a request's continuation `index`, however many it has: that of the first is the request's own.

    Args:
        seed: the request's.

    Returns:
        From 0 to 2^64 - 1.
    """
    return (seed + index * _SEED_STEP) % _SEEDS


def _key(request: GenerationRequest) -> tuple[str, str]:
    return request.tenant, request.rid


def _names(request: GenerationRequest, index: int) -> frozenset[str]:
    """The ids by which a client may cancel a continuation: its request's, its batch's, and of several its own."""
    names = {request.rid, request.batch_rid or request.rid}
    return frozenset(names | {f"{request.rid}_{index}"} if request.num_started > 1 else names)
