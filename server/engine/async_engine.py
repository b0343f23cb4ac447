"""The asynchronous interface of the engine: submit a request, iterate over its chunks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable
from functools import partial

from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.client.processor_info import ProcessorInfo
from logitship.client.serialization.processor_string import ProcessorString
from logitship.sampler.batch_processors.plugins import Plugin
from logitship.sampler.client_context import Disconnect, current_disconnect
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.processor_groups import ProcessorUse, uses_of
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxStats
from logitship.server.blocked_processors import BlockedProcessors
from logitship.server.config import ServerConfig
from logitship.server.metrics.engine_stats import MAX_TENANTS, EngineStats, ModelInfo
from logitship.server.metrics.observed_metrics import EngineMetrics, RequestMeter
from logitship.server.metrics.step_clock import StepClock
from logitship.server.processors.processor_library import ProcessorLibrary
from logitship.server.processors.request_processors import RequestProcessors
from logitship.server.refusals import SHIPPING_IS_OFF, ServiceUnavailable, ShareExceeded, ThreadUnavailable
from logitship.server.requests.body_limits import QueuedBody, QueuedBytes
from logitship.server.requests.fair_pool import REST, FairPool, in_daemon_thread, run_behind_the_engine
from logitship.server.requests.messages import (
    AttachedProcessor,
    GenerationRequest,
    GenerationStream,
    ProcessorRequest,
    RequestError,
)
from logitship.server.requests.request_validation import Limits, check, check_sandboxed, check_with_plugins
from logitship.server.requests.sequence import Sequence
from logitship.server.tokenizer import Tokenizer

from .active_requests import ActiveRequest, ActiveRequests, SequenceFactory
from .engine import Engine
from .engine_thread import EngineThread
from .failures import STOPPED, blocked_error
from .readiness import Readiness
from .tenant_shares import TenantShares

_SHUTDOWN_INTERVAL = 0.05
_STOP_TIMEOUT = 3.0
"""Seconds that the current step gets to end. It takes far less, unless shipped code hangs in it."""

_LARGE_BODY_MEMORY = 1 << 20
"""Bytes of memory of a body beyond which its requests are not checked on the event loop."""

_MANY_SEQUENCES = 32
"""Sequences beyond which they are not made on the event loop. Each takes some 40 µs."""

_NO_SANDBOXES = SandboxStats(alive=0, started=0, ended={})


class AsyncEngine:
    """Admits requests, queues their sequences on the engine's thread, and streams their chunks to coroutines.

    Args:
        engine: reports to `active`, and is only called on `thread`.
        active: the registry of requests.
        pool: see the attribute.
        queued_bytes: see the attribute.
        library: where `processors` come from.
        shares: how much of the engine's time each tenant has used.
        blocked: the shipped processors that may not run; None: any may.
        grammar: the processor of grammars, whose counters `stats` reads.
        plugins: the installed batch processors.
        attached_to_all: processors of every request, which run after its own.
        sandboxes: closed after the engine's last step.

    Attributes:
        config: the server's configuration.
        model: facts about the model.
        tokenizer: the model's tokenizer.
        metrics: the Prometheus metrics.
        processors: lists, names, pins and deletes processors.
        pool: threads for the CPU work of requests before their first step.
        queued_bytes: memory of the bodies of requests that have not started.
    """

    def __init__(
        self,
        config: ServerConfig,
        model: ModelInfo,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        processors: RequestProcessors,
        *,
        engine: Engine,
        thread: EngineThread,
        active: ActiveRequests,
        pool: FairPool,
        queued_bytes: QueuedBytes,
        library: ProcessorLibrary,
        shares: TenantShares,
        grammar: GrammarProcessor,
        plugins: Iterable[Plugin] = (),
        attached_to_all: Iterable[AttachedProcessor] = (),
        sandboxes: SandboxExecutor | None = None,
        blocked: BlockedProcessors | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.processors = processors
        self.pool = pool
        self.queued_bytes = queued_bytes
        self._engine = engine
        self._thread = thread
        self._active = active
        self._library = library
        self._shares = shares
        self._grammar = grammar
        self._plugins = tuple(plugins)
        self._attached_to_all = tuple(attached_to_all)
        self._sandboxes = sandboxes
        self._blocked = blocked
        self._limits = Limits.of(config, model.vocab_size, model.max_model_len)
        self._sequences = SequenceFactory(model, tokenizer, config.random_seed)
        self._large_loads: weakref.WeakValueDictionary[tuple[str, asyncio.AbstractEventLoop], asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        """Held while a tenant loads a large body. Each event loop has its own."""
        self._readiness = Readiness(active, thread, sandboxes)
        metrics.watch(self.stats)
        if blocked is not None:
            blocked.watch(self._block)

    def check(self, request: GenerationRequest, body: QueuedBody | None = None) -> None:
        """Refuse a request that cannot run on this model, without submitting it or loading its processors.

        Args:
            request: the request.
            body: the HTTP body that it came from, if any.

        Raises:
            BadRequest: as `submit`.
        """
        check(request, self._limits, None if body is None else body.depth)
        check_with_plugins(request.sampling_params, self._plugins)
        if self.config.processor_isolation == "sandbox":
            check_sandboxed(request, lambda string: self.processors.ships_code(string, request.tenant))

    async def submit(self, request: GenerationRequest, body: QueuedBody | None = None) -> GenerationStream:
        """Admit a request.

        Args:
            request: the request.
            body: the HTTP body that it came from, if any. Held until the request starts or ends.

        Raises:
            RequestRefused: it was not admitted. `param` is a field of `SamplingParams`, `prompt`, `rid`, `n`,
                `processors`, `processors[i]` or `processors[i].params`; None where a batch processor refused.
        """
        if _is_large(body):
            await self.pool.run(request.tenant, self.check, request, body)
        else:
            self.check(request, body)
        self._check_share(request)
        # Last in the list: a refusal names the request's own processors by their index.
        request = dataclasses.replace(request, processors=(*request.processors, *self._attached_to_all))
        stream = GenerationStream(request.num_sequences, lambda: self._cancel(reference()))
        active = ActiveRequest(request, stream, RequestMeter(self.metrics.requests), request.num_slots, body=body)
        reference = weakref.ref(active)  # otherwise a cycle would keep the memory of a request that is over
        self._active.reserve(active)
        uses = await self._load_processors(active)
        stream.digests = [use.processor.digest for use in uses[0]]
        active.sequences += await self._make_sequences(active, uses)
        active.meter.admitted()
        self._thread.post(lambda: self._engine.add(active.sequences))
        if self._blocked is not None and not self._blocked.digests.isdisjoint(stream.digests):
            self._block(self._blocked.digests)  # while it was loaded
        if active.aborted:
            self._abort_where(
                lambda sequence: sequence.lead in active.sequences and not active.aborted.isdisjoint(sequence.names)
            )
        return stream

    def _check_share(self, request: GenerationRequest) -> None:
        """Refuse shipped processors of a tenant that is over its share. Requests without any are not affected.

        Raises:
            ShareExceeded: says when to try again.
        """
        seconds = self._shares.retry_after(request.tenant)
        if seconds is None:
            return
        ships = partial(self.processors.ships_code, tenant=request.tenant)
        if any(isinstance(each, ProcessorRequest) and ships(each.string) for each in request.processors):
            raise ShareExceeded(
                f"the shipped processors of this API key have used over {self.config.tenant_step_share:g} of the "
                f"server's time, its share while others wait (--tenant-step-share): try again in {seconds} s",
                retry_after=seconds,
            )

    async def register(self, string: ProcessorString, tenant: str = "", name: str | None = None) -> ProcessorInfo:
        """Keep a processor, for requests that name it. It is loaded now, so that its errors show now.

        Args:
            string: the processor.
            tenant: the owner. Requests of other tenants may name the digest as well.
            name: its name; None: its class's name. Another processor of the same name becomes its next version.

        Raises:
            RequestRefused: it cannot be loaded, cannot have that name, is too large to keep, or the registry is full.
                `param` is `name`, or None.
        """
        self._active.check_accepting()
        return await self.processors.register(string, tenant, name)

    def abort(self, rid: str | None, tenant: str = "") -> None:
        """Abort requests of a tenant by id: a request, the requests of a batch, or one continuation; None: all.

        Their streams end with an `abort` chunk. The whole id must match: SGLang also aborts ids that begin with it,
        which may be another client's.
        """
        self._active.abort(rid, tenant)
        self._abort_where(lambda sequence: sequence.tenant == tenant and (rid is None or rid in sequence.names))

    def _block(self, digests: frozenset[str]) -> None:
        """End the sequences with one of these shipped processors, and their sandboxes."""

        def found(sequence: Sequence) -> LoadedProcessor | None:
            used = (use.processor for use in uses_of(sequence.sampling_params))
            return next((each for each in used if each.digest in digests), None)

        def error(sequence: Sequence) -> RequestError | None:
            processor = found(sequence)
            return None if processor is None else blocked_error(processor)

        self._thread.post(lambda: self._engine.abort(lambda sequence: found(sequence) is not None, error))
        # After that: where the engine waits for a call of theirs, this ends it.
        if self._sandboxes is not None:
            self._sandboxes.block(digests)

    def _cancel(self, active: ActiveRequest | None) -> None:
        """Abort this very request, unless it is over: another one may have its id by now."""
        if active is not None:
            self._abort_where(lambda sequence: sequence.lead in active.sequences)

    async def flush_cache(self) -> bool:
        """Drop cached processors and prefixes. Does nothing and returns False while there are requests."""
        if self._active:
            return False
        self._library.clear()
        self._thread.post(self._engine.clear_prefixes)
        return True

    def stats(self) -> EngineStats:
        """Return the engine's current state and counters."""
        cache = self._library.cache_stats()
        prefixes = self._engine.prefix_stats
        loads = self.processors.load_stats()
        grammars = self._grammar.stats()
        sandboxes = _NO_SANDBOXES if self._sandboxes is None else self._sandboxes.stats()
        return EngineStats(
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            steps=self._engine.num_steps,
            accepting=self._active.accepting,
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
            artifact_bytes=self._library.artifacts.num_bytes,
            drafted=self._engine.num_drafted,
            deferred_calls=self._engine.num_deferred,
            tenant_step_seconds=self._shares.totals(MAX_TENANTS),
            accepted=self._engine.num_accepted,
            forced=self._engine.num_forced,
            loads_running=loads.running,
            loads_waiting=loads.waiting,
            grammar_checks_running=grammars.checks_running,
            grammar_checks_waiting=grammars.checks_waiting,
            grammar_failures=grammars.failures,
            sandboxes=sandboxes.alive,
            sandboxes_started=sandboxes.started,
            sandboxes_ended=sandboxes.ended,
            pool_jobs_running=self.pool.num_running,
            pool_jobs_waiting=self.pool.num_waiting,
            queued_bytes=self.queued_bytes.total,
        )

    @property
    def shipping_is_off(self) -> str | None:
        """Reason why requests may not ship code; None: they may."""
        return None if self.config.enable_custom_logit_processor else SHIPPING_IS_OFF

    @property
    def healthy(self) -> bool:
        """False once the engine's thread has died."""
        return self._thread.alive

    @property
    def accepting(self) -> bool:
        """False once the shutdown has begun."""
        return self._active.accepting

    async def check_ready(self) -> None:
        """Check that a request could be admitted now, and that the engine begins its next step within a second.

        Raises:
            ServiceUnavailable: it could not; the message lists the reasons.
        """
        if reasons := await self._readiness.reasons():
            raise ServiceUnavailable(f"not ready: {'; '.join(reasons)}")

    async def shutdown(self, timeout: float) -> None:
        """Refuse new requests, let the running ones finish for at most `timeout` seconds, stop."""
        self._active.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                # Polled: cancelling this leaves no waiting thread behind.
                while self._active and self.healthy:
                    await asyncio.sleep(_SHUTDOWN_INTERVAL)
        # Not in the pool of `asyncio.to_thread`: jobs of requests may occupy all of its threads.
        try:
            stopped = in_daemon_thread(self.stop)
        except ThreadUnavailable:
            self.stop()  # blocks the event loop for some seconds, but ends the sandboxes
        else:
            await stopped

    def interrupt(self) -> None:
        """End every stream with an error at once, even if a step hangs. For a process that is about to end."""
        self._active.close()
        self._active.fail_all(STOPPED)

    def others_run(self, tenant: str) -> bool:
        """Return whether sequences of other tenants run."""
        return self._shares.others_run(tenant)

    def take_over_garbage_collection(self) -> None:
        """Let the engine's thread make all full garbage collections of this process from now on."""
        self._thread.take_over_garbage_collection()

    def stop(self) -> None:
        """Stop now: running requests are aborted."""
        self._active.close()
        if self._blocked is not None:
            self._blocked.close()
        self._abort_where(lambda sequence: True)
        self._thread.stop(_STOP_TIMEOUT)
        # Those that still load their processors have no sequences to abort, and those of a hanging step do not end.
        self._active.fail_all(STOPPED)
        self._library.close()
        if self._sandboxes is not None:
            self._sandboxes.close()

    def _abort_where(self, matches: Callable[[Sequence], bool]) -> None:
        self._thread.post(lambda: self._engine.abort(matches))

    async def _make_sequences(self, active: ActiveRequest, uses: list[list[ProcessorUse]]) -> list[Sequence]:
        """Make the sequences that a request starts with: many, or large ones, on the pool."""
        request, sink = active.request, self._active.sink(active)

        def make() -> list[Sequence]:
            return [self._sequences.make(request, index, each, sink) for index, each in enumerate(uses)]

        try:
            if len(uses) <= _MANY_SEQUENCES and not _is_large(active.body):
                return make()
            return await self.pool.run(request.tenant, make)
        except BaseException:  # cleanup, then re-raised
            self._active.release(active)
            raise

    async def _load_processors(self, active: ActiveRequest) -> list[list[ProcessorUse]]:
        """Load the request's processors. Returns the uses of each sequence that it starts with."""
        request, held = active.request, active.processors
        if not request.processors:
            return [[] for _ in range(request.num_started)]
        try:
            shipped = await self.processors.load_shipped(request, held)
            if len(shipped) == len(request.processors) and all(each.params_schema is None for each in shipped.values()):
                return self.processors.load(request, held, shipped)
            turn = None
            if _is_large(active.body):
                turn = self._large_loads.setdefault((request.tenant, asyncio.get_running_loop()), asyncio.Lock())
                await turn.acquire()
            current_disconnect.set(disconnect := Disconnect())
            loading = self._start_load(active, shipped, turn)
        except BaseException:  # cleanup, then re-raised
            self._active.release(active)
            raise
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            disconnect.notify()
            # Cancelling does not stop the thread: release what it still loads when it is done.
            loading.add_done_callback(partial(self._release_late, active))
            raise
        except BaseException:  # cleanup, then re-raised
            self._active.release(active)
            raise

    def _start_load(
        self, active: ActiveRequest, shipped: dict[int, LoadedProcessor], turn: asyncio.Lock | None
    ) -> asyncio.Future[list[list[ProcessorUse]]]:
        """Load what is not shipped, and check parameters, in a thread of its own. A large load has its turn.

        Raises:
            ThreadUnavailable: no thread can be started.
        """

        def load() -> list[list[ProcessorUse]]:
            run_behind_the_engine()
            return self.processors.load(active.request, active.processors, shipped)

        try:
            loading = in_daemon_thread(load)
        except BaseException:  # cleanup, then re-raised
            if turn is not None:
                turn.release()
            raise
        if turn is not None:
            _release_after(loading, turn)
        return loading

    def _release_late(self, active: ActiveRequest, loading: asyncio.Future[list[list[ProcessorUse]]]) -> None:
        loading.exception()  # nobody awaits it any more, and asyncio would log that as an error
        self._active.release(active)


def _release_after(loading: asyncio.Future[list[list[ProcessorUse]]], turn: asyncio.Lock) -> None:
    """Let the tenant's next load of a large body begin after this one and a rest: it takes the GIL and a core."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    loading.add_done_callback(lambda _: loop.call_later(REST * (loop.time() - began), turn.release))


def _is_large(body: QueuedBody | None) -> bool:
    return body is not None and body.size > _LARGE_BODY_MEMORY


def finish_step(active: ActiveRequests, metrics: EngineMetrics, clock: StepClock) -> None:
    """Deliver the chunks of a step, and record the times of its phases. Engine thread only."""
    with clock.deliver:
        active.deliver()
    metrics.step_ended(clock)
