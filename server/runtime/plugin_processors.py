"""Loads the processors of requests to another engine, with the loader and the executors of logitship's own server.

Two processes load them: the front end once at admission, to refuse a request before the engine admits it, and the
process that runs the model, to run them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from logitship.builtin_processors.params import PreparationUnavailable
from logitship.builtin_processors.registry import Registry
from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.sampler.processors.executor import (
    ExecutorUnavailable,
    LoadedProcessor,
    ProcessorExecutor,
    group_name,
)
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_cache import CacheStats, ProcessorCache, ProcessorCacheFull
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxStats
from logitship.server.config import ServerConfig
from logitship.server.metrics.engine_stats import ProcessorStats
from logitship.server.processors.artifact_store import ArtifactStore
from logitship.server.processors.callable_library import CallableLibrary
from logitship.server.processors.load_queue import LoadBudget, LoadQueue, LoadQueueFull, Outcome, Runnable, load_rate
from logitship.server.processors.params_checker import InvalidParams, ParamsChecker
from logitship.server.processors.processor_library import ProcessorLibrary, ProcessorLoader, ProcessorNotAllowed
from logitship.server.processors.registered_processors import NotRegistered, RegisteredProcessors
from logitship.server.processors.shared_uploads import ArtifactFiles
from logitship.server.processors.uploaded_processors import UploadedProcessors
from logitship.server.refusals import ThreadUnavailable
from logitship.server.requests.fair_pool import FairPool, in_daemon_thread
from logitship.server.requests.messages import ProcessorRequest

from .admission_executor import AdmissionExecutor
from .allowances import Allowances
from .plugin_settings import PluginSettings
from .request_fields import PROCESSORS

if TYPE_CHECKING:
    from .plugin_metrics import PluginMetrics

_LOAD_ERRORS = (
    ValueError,
    ProcessorLoadError,
    ExecutorUnavailable,
    ProcessorCacheFull,
    PreparationUnavailable,
    LoadQueueFull,
    ThreadUnavailable,
)
ARTIFACTS = "artifacts"
"""Folder of the artifacts, in the one that the engine's processes share."""
_REMEMBERED = 10.0
"""Seconds for which the error of a load that `is_loading` began waits for `load`."""


@dataclass(eq=False)
class _BegunLoad:
    """A load that `is_loading` began.

    Attributes:
        ended_at: when it ended; None while it goes on.
        error: why the processor cannot run; None if it is loaded.
    """

    ended_at: float | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Uploads:
    """Uploads of clients to a front end.

    Attributes:
        registered: the registered processors.
        artifacts: the artifacts.
    """

    registered: RegisteredProcessors
    artifacts: ArtifactStore


class PluginProcessors:
    """Loads and releases the processors of requests.

    A front end calls `check`. A process that runs a model calls `is_loading` and `load`, in one thread.

    Args:
        registry: the installed processors.
        executor: runs the shipped processors.
        max_entries: most shipped processors that are kept loaded.
        params_checker: checks parameters against the `params_schema` of a class; None: a front end has done it.
        uploads: what clients uploaded, in a front end; None: the artifacts are in its folder, and it resolves names.
        clock: returns seconds.

    Attributes:
        in_use: number of uses that were loaded and not released.
        metrics: the metrics of this process; None before `start_metrics`, or if the engine has none.
    """

    def __init__(
        self,
        settings: PluginSettings,
        model: ModelView,
        registry: Registry,
        executor: ProcessorExecutor,
        *,
        max_entries: int,
        params_checker: ParamsChecker | None,
        uploads: Uploads | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_use = 0
        self.metrics: PluginMetrics | None = None
        self._settings = settings
        self._executor = executor
        self._clock = clock
        self._begun: dict[str, _BegunLoad] = {}
        directory = settings.shared_directory
        files = ArtifactFiles(None if directory is None else directory / ARTIFACTS)
        find_artifacts = files.resolve if uploads is None else uploads.artifacts.resolve
        cache = ProcessorCache(
            executor,
            max_entries=max_entries,
            max_bytes=ServerConfig.processor_cache_bytes,
            num_tenants=max(settings.num_tenants, settings.num_keys),
            resolve=lambda string, tenant: replace(string, artifacts=find_artifacts(string.artifacts, tenant)),
            check_loaded=None if params_checker is None else params_checker.check_schema,
        )
        installed, allowed = InProcessExecutor(SGLANG_NAMES, model), settings.allowed_digests
        self._library: ProcessorLibrary | None = None
        if uploads is None:
            # Their artifacts are looked for once they are loaded.
            self._loader = ProcessorLoader(registry, cache, installed, model, params_checker, allowed, _noop)
        else:
            self._loader = self._library = ProcessorLibrary(
                registry,
                cache,
                installed,
                model,
                uploads.registered,
                CallableLibrary(None, None),
                params_checker,
                allowed,
                uploads.artifacts,
            )
        self._queue = LoadQueue(self._loader.cache, budget=LoadBudget(load_rate(torch.get_num_threads())))

    def resolve(self, requested: tuple[ProcessorRequest, ...], tenant: str) -> tuple[ProcessorRequest, ...]:
        """Return the processors of a request with the strings of registered ones in place of their names and digests.

        Returns:
            The same object if none is registered.

        Raises:
            ValueError: no such processor is registered; the message is for the client.
        """
        if self._library is None:
            return requested
        resolved: list[ProcessorRequest] = []
        for index, request in enumerate(requested):
            try:
                string = self._library.names.resolve(request.string, tenant)
            except NotRegistered as error:
                raise ValueError(_at(index, requested) + str(error)) from None
            resolved.append(replace(request, string=string))
        is_same = all(new.string is old.string for new, old in zip(resolved, requested, strict=True))
        return requested if is_same else tuple(resolved)

    def uploaded(self, pool: FairPool) -> UploadedProcessors:
        """Return what clients uploaded, for the routes of a front end.

        Args:
            pool: runs the CPU work of uploads.
        """
        assert self._library is not None
        return UploadedProcessors(self._library, self._queue, pool)

    async def check(self, requested: Sequence[ProcessorRequest], tenant: str = "") -> None:
        """Load the processors of a request, check their parameters, and release them. Blocks no event loop.

        Raises:
            ValueError: as `load`.
        """
        held: list[LoadedProcessor] = []
        try:
            for string in self._to_load(requested, tenant):
                with self._timed_load():
                    held.append(await self._queue.acquire(string, tenant))
            # A schema takes up to seconds to check, and would hold one of the few threads of the shared pool.
            has_schema = any(processor.params_schema is not None for processor in held)
            run_in_thread = in_daemon_thread if has_schema else asyncio.to_thread
            await run_in_thread(lambda: self.release(self.load(requested, "admission", tenant)))
        except _LOAD_ERRORS as error:
            raise ValueError(str(error)) from None
        finally:
            for processor in held:
                self._loader.release(processor)

    def is_loading(self, requested: Sequence[ProcessorRequest], tenant: str = "") -> bool:
        """Begin to load the processors of a request in the background, and return whether `load` would have to wait.

        To be asked again until it returns False. Then `load` returns or raises at once.
        """
        self._drop_ended_loads()
        loading = [self._is_loading(string, tenant) for string in self._to_load(requested, tenant)]  # begin all
        return any(loading)

    def has_begun(self, names: Iterable[str]) -> bool:
        """Return whether a load that `is_loading` began for one of these processors goes on.

        Args:
            names: as `group_names` returns them.
        """
        loads = [self._begun[name] for name in names if name in self._begun]
        return any(load.ended_at is None for load in loads)

    def group_names(self, requested: Sequence[ProcessorRequest], tenant: str = "") -> list[str]:
        """Return the `LoadedProcessor.group_name` that each shipped processor of a request will have."""
        return [group_name(tenant, string.digest) for string in self._to_load(requested, tenant)]

    def load(self, requested: Sequence[ProcessorRequest], rid: str, tenant: str = "") -> tuple[ProcessorUse, ...]:
        """Load the processors of a request. Give them back with `release`.

        Args:
            requested: the processors, in the order in which they run.
            rid: the request id.
            tenant: who sent it. Tenants share no processor.

        Returns:
            The processors, ready to run.

        Raises:
            ValueError: a processor cannot be loaded or rejects its parameters; the message is for the client.
        """
        uses: list[ProcessorUse] = []
        try:
            for index, request in enumerate(requested):
                try:
                    uses.append(self._use(request, rid, tenant))
                    self.in_use += 1
                except _LOAD_ERRORS as error:
                    raise ValueError(_at(index, requested) + str(error)) from None
        except BaseException:  # cleanup, then re-raised
            self.release(uses)
            raise
        return tuple(uses)

    def release(self, uses: Iterable[ProcessorUse]) -> None:
        """Give back the processors that `load` returned."""
        for use in uses:
            self._loader.release(use.processor)
            self.in_use -= 1

    def unload(self, processors: Iterable[LoadedProcessor]) -> None:
        """End processors now that nobody uses."""
        for processor in processors:
            self._loader.cache.unload(processor)

    def start_metrics(self, logger: logging.Logger, allowances: Allowances | None = None) -> None:
        """Let the engine's `/metrics` have those of this process, if it has one.

        Args:
            logger: gets errors of the thread that writes them.
            allowances: those of the steps, in a process that runs a model.
        """
        directory = self._settings.metrics_directory
        if directory is None:
            return
        try:
            from logitship.server.metrics.observed_metrics import MAX_NAMES

            from .plugin_metrics import MetricsFile, PluginMetrics
        except ImportError as error:
            logger.warning("the metrics of processors in this process are missing: %s", error)
            return
        most_names = MAX_NAMES if self._settings.names_in_metrics else 0
        self.metrics = PluginMetrics(self._loader.installed_digests, most_names, partial(self._stats, allowances))
        MetricsFile(directory, self.metrics, logger).start()

    def _stats(self, allowances: Allowances | None) -> ProcessorStats:
        """Return the current stats. Those of the cache, which holds verdicts in a front end, only with `allowances`."""
        sandboxes = SandboxStats(0, 0, {}) if self._sandboxes is None else self._sandboxes.stats()
        cache = CacheStats(0, 0, 0, 0, 0) if allowances is None else self._loader.cache_stats()
        loads = self._queue.stats()
        return ProcessorStats(
            processor_cache_hits=cache.hits,
            processor_cache_misses=cache.misses,
            processor_cache_evictions=cache.evictions,
            processor_cache_entries=cache.entries,
            processor_cache_bytes=cache.bytes,
            sandboxes=sandboxes.alive,
            sandboxes_started=sandboxes.started,
            sandboxes_ended=sandboxes.ended,
            deferred_calls=0 if allowances is None else allowances.num_deferred,
            tenant_step_seconds={} if allowances is None else allowances.tenant_seconds.copy(),
            loads_running=loads.running,
            loads_waiting=loads.waiting,
        )

    def close(self) -> None:
        """End the sandboxes."""
        self._loader.close()
        if self._sandboxes is not None:
            self._sandboxes.close()

    @property
    def _sandboxes(self) -> SandboxExecutor | None:
        """The executor of shipped processors, if it runs them in sandboxes."""
        executor = self._executor.executor if isinstance(self._executor, AdmissionExecutor) else self._executor
        return executor if isinstance(executor, SandboxExecutor) else None

    @contextlib.contextmanager
    def _timed_load(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            if self.metrics is not None:
                self.metrics.loaded(self._clock() - began)

    def _to_load(self, requested: Sequence[ProcessorRequest], tenant: str) -> Iterator[Runnable]:
        """Return the shipped processors. Those that `load` refuses at once are left out."""
        for request in requested:
            with contextlib.suppress(ProcessorLoadError, ProcessorNotAllowed):
                found = self._loader.find(request.string, tenant)
                if not isinstance(found, InstalledProcessor):
                    yield found

    def _is_loading(self, string: Runnable, tenant: str) -> bool:
        name = group_name(tenant, string.digest)
        load = self._begun.get(name)
        if load is not None:
            return load.ended_at is None
        ready = self._loader.cache.acquire_ready(string, tenant)
        if ready is not None:
            self._loader.release(ready)
            return False
        load = _BegunLoad()
        try:
            self._queue.begin(string, tenant, partial(self._end, load))
        except LoadQueueFull:
            return True
        except ProcessorLoadError as error:
            self._end(load, error)
        self._begun[name] = load
        return load.ended_at is None

    def _end(self, load: _BegunLoad, outcome: Outcome) -> None:
        """Record the end of a load, in any thread. The cache keeps the processor; its request may have been aborted."""
        if isinstance(outcome, LoadedProcessor):
            self._loader.release(outcome)
        else:
            load.error = outcome
        load.ended_at = self._clock()

    def _drop_ended_loads(self) -> None:
        """Drop the loads that have ended, but errors only after a while."""
        oldest = self._clock() - _REMEMBERED
        self._begun = {
            name: load
            for name, load in self._begun.items()
            if load.ended_at is None or (load.error is not None and load.ended_at > oldest)
        }

    def _acquire(self, request: ProcessorRequest, tenant: str) -> LoadedProcessor:
        """Return a processor, loaded if necessary.

        Raises:
            BaseException: a load that `is_loading` began has failed.
        """
        for string in self._to_load([request], tenant):
            name = group_name(tenant, string.digest)
            load = self._begun.get(name)
            if load is not None and load.error is not None:
                del self._begun[name]
                raise load.error
            ready = self._loader.cache.acquire_ready(string, tenant)
            if ready is not None:
                return ready
        return self._loader.acquire(request.string, tenant)

    def _use(self, request: ProcessorRequest, rid: str, tenant: str) -> ProcessorUse:
        try:
            processor = self._acquire(request, tenant)
        except ProcessorNotAllowed as refused:
            raise ValueError(self._settings.in_own_words(str(refused))) from None
        try:
            prepared = self._loader.prepare(processor, request.params, own=request.own, tenant=tenant)
        except InvalidParams as error:
            self._loader.release(processor)
            raise ValueError(f"parameters of {processor.name}: {self._settings.in_own_words(str(error))}") from None
        except BaseException:  # cleanup, then re-raised
            self._loader.release(processor)
            raise
        return ProcessorUse(processor, dict(request.params or {}), rid, prepared)


def _at(index: int, requested: Sequence[ProcessorRequest]) -> str:
    """Return the start of an error message: the place of a processor among several."""
    return f"{PROCESSORS}[{index}]: " if len(requested) > 1 else ""


def _noop(*_: object) -> None:
    pass
