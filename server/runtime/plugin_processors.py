"""Loads the processors of requests to another engine, with the loader and the executors of logitship's own server.

Two processes load them: the front end once at admission, to refuse a request before the engine admits it, and the
process that runs the model, to run them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial

from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.builtin_processors.params import PreparationUnavailable
from logitship.builtin_processors.registry import BUILTIN_PROCESSORS, Registry
from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.builtin_processors.tree import TreeLogitsProcessor
from logitship.builtin_processors.trees.token_tree import TokenTree
from logitship.builtin_processors.trees.token_tree_format import TreeFormatError, load_tree
from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.sampler.processors.executor import DisabledExecutor, ExecutorUnavailable, ProcessorExecutor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_cache import ProcessorCache, ProcessorCacheFull
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor
from logitship.sampler.sandbox.zygote_process import ZygoteError
from logitship.server.config import ServerConfig
from logitship.server.processors.processor_library import InvalidParams, ProcessorLoader, ProcessorNotAllowed
from logitship.server.processors.sandboxes import new_zygote, sandbox_executor
from logitship.server.requests.messages import ProcessorRequest

from .admission_executor import MAX_VERDICTS, AdmissionExecutor
from .plugin_settings import PluginSettings
from .request_fields import PROCESSORS

_LOAD_ERRORS = (ValueError, ProcessorLoadError, ExecutorUnavailable, ProcessorCacheFull, PreparationUnavailable)


class PluginProcessors:
    """Loads and releases the processors of requests.

    Args:
        registry: the installed processors.
        executor: runs the shipped processors.
        max_entries: most shipped processors that are kept loaded.

    Attributes:
        in_use: number of uses that were loaded and not released.
    """

    def __init__(
        self,
        settings: PluginSettings,
        model: ModelView,
        registry: Registry,
        executor: ProcessorExecutor,
        *,
        max_entries: int,
    ) -> None:
        self.in_use = 0
        self._settings = settings
        self._executor = executor
        self._loader = ProcessorLoader(
            registry,
            ProcessorCache(executor, max_entries=max_entries, max_bytes=ServerConfig.processor_cache_bytes),
            InProcessExecutor(SGLANG_NAMES, model),
            model,
            settings.allowed_digests,
        )

    def load(self, requested: Sequence[ProcessorRequest], rid: str) -> tuple[ProcessorUse, ...]:
        """Load the processors of a request. Give them back with `release`.

        Args:
            requested: the processors, in the order in which they run.
            rid: the request id.

        Returns:
            The processors, ready to run.

        Raises:
            ValueError: a processor cannot be loaded or rejects its parameters; the message is for the client.
        """
        uses: list[ProcessorUse] = []
        try:
            for index, request in enumerate(requested):
                try:
                    uses.append(self._use(request, rid))
                    self.in_use += 1
                except _LOAD_ERRORS as error:
                    raise ValueError(f"{PROCESSORS}[{index}]: {error}" if len(requested) > 1 else str(error)) from None
        except BaseException:  # cleanup, then re-raised
            self.release(uses)
            raise
        return tuple(uses)

    def are_loaded(self, requested: Sequence[ProcessorRequest]) -> bool:
        """Return whether `load` loads no class, and so takes no time. True if it raises at once."""
        for request in requested:
            try:
                found = self._loader.find(request.string, tenant="")
                if isinstance(found, InstalledProcessor):
                    continue
                ready = self._loader.cache.acquire_ready(found)
            except (ProcessorLoadError, ProcessorNotAllowed):
                continue
            if ready is None:
                return False
            self._loader.cache.release(ready)
        return True

    def release(self, uses: Iterable[ProcessorUse]) -> None:
        """Give back the processors that `load` returned."""
        for use in uses:
            self._loader.release(use.processor)
            self.in_use -= 1

    def close(self) -> None:
        """End the sandboxes."""
        self._loader.close()
        if isinstance(self._executor, SandboxExecutor):
            self._executor.close()

    def _use(self, request: ProcessorRequest, rid: str) -> ProcessorUse:
        try:
            processor = self._loader.acquire(request.string, tenant="")
        except ProcessorNotAllowed as refused:
            variable = f"{self._settings.prefix}ALLOW_PROCESSOR"
            raise ValueError(str(refused).replace("--allow-processor", variable)) from None
        try:
            prepared = self._loader.prepare(processor, request.params, own=request.own)
        except InvalidParams as error:
            self._loader.release(processor)
            raise ValueError(f"parameters of {processor.name}: {error}") from None
        except BaseException:  # cleanup, then re-raised
            self._loader.release(processor)
            raise
        return ProcessorUse(processor, dict(request.params or {}), rid, prepared)


def for_admission(settings: PluginSettings, model: ModelView, logger: logging.Logger) -> PluginProcessors:
    """Return the processors of a front end: each class is loaded once, and its verdict remembered. None runs.

    Raises:
        ValueError: a tree in the settings cannot be read, or the kernel lacks a feature that the sandbox needs.
    """
    registry = _registry(settings)  # first: it may raise, and the executor starts processes
    executor = shipped_executor(settings, model, 1, logger)
    return PluginProcessors(settings, model, registry, AdmissionExecutor(executor), max_entries=MAX_VERDICTS)


def for_execution(
    settings: PluginSettings, model: ModelView, max_rows: int, logger: logging.Logger
) -> PluginProcessors:
    """Return the processors of a process that runs the model. It keeps them loaded, for up to `max_rows` rows.

    Raises:
        ValueError: as `for_admission`.
    """
    registry = _registry(settings)  # first: it may raise, and the executor starts processes
    executor = shipped_executor(settings, model, max_rows, logger)
    return PluginProcessors(settings, model, registry, executor, max_entries=settings.max_sandboxes)


def shipped_executor(
    settings: PluginSettings, model: ModelView, max_rows: int, logger: logging.Logger
) -> ProcessorExecutor:
    """Return the executor of shipped processors. Starts the zygote of the sandboxes, which takes seconds.

    Raises:
        ValueError: the kernel lacks a feature that the sandbox needs, or no process or thread can be started.
    """
    if settings.shipping_is_off is not None:
        return DisabledExecutor(settings.shipping_is_off)
    if settings.processor_isolation == "none":
        logger.warning("%sPROCESSOR_ISOLATION=none: shipped code runs in this process", settings.prefix)
        return InProcessExecutor(SGLANG_NAMES, model)
    zygote = new_zygote(settings, max_rows)
    try:
        zygote.start()
        return sandbox_executor(settings, zygote, model, max_rows, logger)
    # `OSError`, `RuntimeError`: no process, no thread can be started.
    except (ZygoteError, OSError, RuntimeError) as error:
        zygote.close()
        raise ValueError(f"shipped processors cannot run in sandboxes: {error}") from error


def _registry(settings: PluginSettings) -> Registry:
    """Return the processors that requests can name: all but grammars, which engines have themselves.

    Raises:
        ValueError: a tree in the settings cannot be read.
    """
    registry = Registry(processor for processor in BUILTIN_PROCESSORS if processor is not GrammarProcessor)
    trees = {name: _tree(file, settings.prefix) for name, file in (settings.tree or {}).items()}
    registry.add(TreeLogitsProcessor.name, TreeLogitsProcessor, partial(TreeLogitsProcessor, trees))
    return registry


def _tree(file: str, prefix: str) -> TokenTree:
    try:
        return load_tree(file)
    except OSError as error:
        raise ValueError(f"{prefix}TREE: {file} cannot be read: {error.strerror}") from error
    except TreeFormatError as error:
        raise ValueError(f"{prefix}TREE: {file} holds no tree: {error}") from error
