"""Makes the processors of an engine's processes out of the plugin's settings."""

from __future__ import annotations

import logging
from functools import partial

import torch

from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.builtin_processors.registry import BUILTIN_PROCESSORS, Registry, add_watermarks
from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.builtin_processors.tree import TreeLogitsProcessor
from logitship.builtin_processors.trees.token_tree import TokenTree
from logitship.builtin_processors.trees.token_tree_format import TreeFormatError, load_tree
from logitship.sampler.processors.executor import DisabledExecutor, ProcessorExecutor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.cpu_time import background_cores
from logitship.sampler.sandbox.zygote_process import ZygoteError
from logitship.server.config import ServerConfig
from logitship.server.processors.artifact_store import ArtifactStore
from logitship.server.processors.params_checker import ParamsChecker
from logitship.server.processors.registered_processors import RegisteredProcessors
from logitship.server.processors.sandboxes import new_zygote, sandbox_executor
from logitship.server.processors.shared_uploads import SharedArtifacts, SharedRegistrations

from .admission_executor import MAX_VERDICTS, AdmissionExecutor
from .plugin_processors import ARTIFACTS, PluginProcessors, Uploads
from .plugin_settings import PluginSettings


def for_admission(settings: PluginSettings, model: ModelView, logger: logging.Logger) -> PluginProcessors:
    """Return the processors of a front end: each class is loaded once, and its verdict remembered. None runs.

    Raises:
        ValueError: a tree in the settings cannot be read, or the kernel lacks a feature that the sandbox needs.
    """
    registry = _registry(settings)  # first: it may raise, and the executor starts processes
    executor = shipped_executor(settings, model, 1, logger, True)
    processors = PluginProcessors(
        settings,
        model,
        registry,
        AdmissionExecutor(executor),
        max_entries=MAX_VERDICTS,
        params_checker=ParamsChecker(),
        uploads=_uploads(settings),
    )
    processors.start_metrics(logger)
    return processors


def for_execution(
    settings: PluginSettings,
    model: ModelView,
    max_rows: int,
    logger: logging.Logger,
    in_background: bool = False,
    *,
    params_checker: ParamsChecker | None = None,
) -> PluginProcessors:
    """Return the processors of a process that runs the model. It keeps them loaded, for up to `max_rows` rows.

    Args:
        settings: the plugin's.
        model: the model.
        max_rows: most rows of a step.
        logger: gets warnings and the sandboxes' protections.
        in_background: no step waits for a load, see `PluginProcessors.is_loading`.
        params_checker: see `PluginProcessors`.

    Raises:
        ValueError: as `for_admission`.
    """
    registry = _registry(settings)  # first: it may raise, and the executor starts processes
    executor = shipped_executor(settings, model, max_rows, logger, in_background)
    return PluginProcessors(
        settings,
        model,
        registry,
        executor,
        max_entries=settings.max_sandboxes,
        params_checker=params_checker,
    )


def shipped_executor(
    settings: PluginSettings, model: ModelView, max_rows: int, logger: logging.Logger, in_background: bool
) -> ProcessorExecutor:
    """Return the executor of shipped processors. Starts the zygote of the sandboxes, which takes seconds.

    Args:
        settings: the plugin's.
        model: the model.
        max_rows: most rows of a step.
        logger: gets warnings and the sandboxes' protections.
        in_background: load classes at a low priority.

    Raises:
        ValueError: the kernel lacks a feature that the sandbox needs, or no process or thread can be started.
    """
    if settings.shipping_is_off is not None:
        return DisabledExecutor(settings.shipping_is_off)
    if settings.processor_isolation == "none":
        logger.warning("%sPROCESSOR_ISOLATION=none: shipped code runs in this process", settings.prefix)
        return InProcessExecutor(SGLANG_NAMES, model)
    zygote = new_zygote(settings, max_rows, background_cores(torch.get_num_threads()) if in_background else None)
    try:
        zygote.start()
        return sandbox_executor(settings, zygote, model, max_rows, logger)
    # `OSError`, `RuntimeError`: no process, no thread can be started.
    except (ZygoteError, OSError, RuntimeError) as error:
        zygote.close()
        raise ValueError(f"shipped processors cannot run in sandboxes: {error}") from error


def _uploads(settings: PluginSettings) -> Uploads:
    """Return what clients uploaded to this engine, to any front end on this host."""
    directory = settings.shared_directory
    entries, nbytes = ServerConfig.processor_cache_entries, ServerConfig.processor_cache_bytes
    max_used = settings.sandbox_memory if settings.processor_isolation == "sandbox" else None
    max_bytes = settings.artifact_cache_bytes
    if directory is None or not directory.is_dir():  # it could not be made, or is on another host
        return Uploads(
            RegisteredProcessors(max_entries=entries, max_bytes=nbytes),
            ArtifactStore(max_bytes=max_bytes, max_used=max_used),
        )
    return Uploads(
        SharedRegistrations(directory / "processors", max_entries=entries, max_bytes=nbytes),
        SharedArtifacts(directory / ARTIFACTS, max_bytes=max_bytes, max_used=max_used),
    )


def _registry(settings: PluginSettings) -> Registry:
    """Return the processors that requests can name: all but grammars, which engines have themselves.

    Raises:
        ValueError: a tree in the settings cannot be read.
    """
    registry = Registry(processor for processor in BUILTIN_PROCESSORS if processor is not GrammarProcessor)
    add_watermarks(registry, settings.watermark_key)
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
