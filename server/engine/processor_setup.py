"""Builds what requests' processors need: the registry, the library, and the executors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from logitship.builtin_processors.batch_processors import check_mode
from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.builtin_processors.registry import Registry, installed_processors
from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.builtin_processors.thinking_token_budget import ReasoningMarkers
from logitship.builtin_processors.tree import TreeLogitsProcessor
from logitship.builtin_processors.trees.token_tree import TokenTree
from logitship.builtin_processors.watermarks.watermark_key import WatermarkKey
from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.sampler.batch_processors.plugins import Plugin, PluginLoadError, load_plugins
from logitship.sampler.batch_processors.vllm_config import ReasoningConfig
from logitship.sampler.processors.executor import DisabledExecutor, ProcessorExecutor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_cache import ProcessorCache
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.cpu_time import background_cores
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess
from logitship.server.blocked_processors import BlockedProcessors
from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel
from logitship.server.processors.artifact_store import ArtifactStore
from logitship.server.processors.callable_library import CallableLibrary
from logitship.server.processors.load_queue import LoadBudget, LoadQueue, load_rate
from logitship.server.processors.params_checker import ParamsChecker
from logitship.server.processors.processor_library import ProcessorLibrary
from logitship.server.processors.processor_policies import digests_of_defaults
from logitship.server.processors.registered_processors import RegisteredProcessors
from logitship.server.processors.sandboxes import new_zygote, sandbox_executor
from logitship.server.rate_limits import RateLimit
from logitship.server.refusals import SHIPPING_IS_OFF, StartError
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.vllm_names import enable_vllm_names

logger = logging.getLogger(__name__)

MAX_UNISOLATED = 64
"""Loads at a time without sandboxes."""


def load_batch_processors(config: ServerConfig) -> list[Plugin]:
    """Import the installed batch processors.

    Raises:
        StartError: one cannot be imported, or does not fit the configuration.
    """
    enable_vllm_names()
    try:
        plugins = load_plugins(config.logits_processors)
        check_mode(plugins, pooling=False, speculative=config.speculative_algorithm is not None)
    except (PluginLoadError, ValueError) as error:
        raise StartError(str(error)) from error
    return plugins


def make_registry(
    plugins: list[Plugin], trees: Mapping[str, TokenTree], watermark_key: WatermarkKey | None = None
) -> Registry:
    """Return the installed processors: the built-in ones, and the `CustomLogitProcessor`s among the plugins."""
    registry = installed_processors(watermark_key)
    registry.add(TreeLogitsProcessor.name, TreeLogitsProcessor, partial(TreeLogitsProcessor, trees))
    for plugin in plugins:
        if plugin.is_custom_logit_processor:
            registry.add(plugin.name, plugin.target)
    return registry


def add_grammar(
    registry: Registry, reasoning: ReasoningConfig | None, json_whitespace: str, loaded: LoadedModel
) -> GrammarProcessor:
    """Add a grammar processor that is aware of the model's reasoning markers, and create its tokenizer early."""
    processor = GrammarProcessor(None if reasoning is None else ReasoningMarkers.of(reasoning), json_whitespace)
    with contextlib.suppress(ValueError):  # each request with a grammar is refused with this error
        processor.load_tokenizer(model_view(loaded))
    registry.add(GrammarProcessor.name, GrammarProcessor, lambda: processor)
    return processor


def start_zygote(config: ServerConfig) -> ZygoteProcess | None:
    """Start the zygote of the sandboxes; None if the configuration has none."""
    if not config.runs_shipped_code or config.processor_isolation == "none":
        return None
    zygote = new_zygote(config, config.max_num_seqs, background_cores(torch.get_num_threads()))
    zygote.start()
    return zygote


def make_executor(config: ServerConfig, loaded: LoadedModel, zygote: ZygoteProcess | None) -> ProcessorExecutor:
    """Return the executor of shipped processors.

    Raises:
        StartError: the system cannot protect sandboxes.
    """
    if not config.runs_shipped_code:
        return DisabledExecutor(SHIPPING_IS_OFF)
    if zygote is None:
        return InProcessExecutor(SGLANG_NAMES, model_view(loaded))
    try:
        return sandbox_executor(config, zygote, model_view(loaded), config.max_num_seqs, logger)
    except ZygoteError as error:
        raise StartError(str(error)) from error


def make_library(
    config: ServerConfig,
    loaded: LoadedModel,
    registry: Registry,
    executor: ProcessorExecutor,
    blocked: BlockedProcessors | None,
    attached: Sequence[ProcessorRequest] = (),
) -> ProcessorLibrary:
    """Return the library that loads requests' processors; `executor` runs the shipped ones.

    Those that are attached to every request are allowed, too.
    """
    max_used = config.sandbox_memory if config.processor_isolation == "sandbox" else None
    artifacts = ArtifactStore(max_bytes=config.artifact_cache_bytes, max_used=max_used)
    params_checker = ParamsChecker()
    return ProcessorLibrary(
        registry,
        ProcessorCache(
            executor,
            **_cache_bounds(config),
            before_load=RateLimit("processor_loads", config.processor_loads_per_minute).check,
            resolve=lambda string, tenant: replace(string, artifacts=artifacts.resolve(string.artifacts, tenant)),
            check_loaded=params_checker.check_schema,
        ),
        InProcessExecutor(SGLANG_NAMES, model_view(loaded)),
        model_view(loaded),
        RegisteredProcessors(max_entries=config.processor_cache_entries, max_bytes=config.processor_cache_bytes),
        CallableLibrary(config.logits_processor_pattern, loaded.tokenizer.hf_tokenizer),
        params_checker,
        _allowed_digests(config, attached),
        artifacts,
        frozenset if blocked is None else lambda: blocked.digests,
    )


def _allowed_digests(config: ServerConfig, attached: Sequence[ProcessorRequest]) -> frozenset[str] | None:
    """Return the only classes that may run; None: any. Where clients may ship none, only the operator's own."""
    own = digests_of_defaults(attached)
    if own and not config.enable_custom_logit_processor:
        return own
    return None if config.allowed_digests is None else config.allowed_digests | own


def create_installed(plugins: list[Plugin], library: ProcessorLibrary) -> None:
    """Create the `CustomLogitProcessor`s among the plugins, so that errors show now instead of at each request.

    Raises:
        StartError: a constructor failed.
    """
    for plugin in plugins:
        if plugin.is_custom_logit_processor:
            try:
                library.acquire(InstalledProcessor(plugin.name), tenant="")
            except Exception as error:  # boundary: third-party code
                raise StartError(f"logits processor {plugin.name}: {type(error).__name__}: {error}") from error


def make_load_queue(config: ServerConfig, library: ProcessorLibrary) -> LoadQueue:
    """Return the queue in which the library's shipped processors are loaded."""
    if config.processor_isolation == "sandbox":
        return LoadQueue(library.cache, budget=LoadBudget(load_rate(torch.get_num_threads())))
    # In this process, a load that never returns keeps its thread: trusted code, that shares the GIL with all else.
    return LoadQueue(library.cache, max_loads=MAX_UNISOLATED)


def model_view(loaded: LoadedModel) -> ModelView:
    """Return the processors' view of the model."""
    return ModelView(loaded.vocab_size, loaded.eos_token_ids, loaded.tokenizer.hf_tokenizer)


def _cache_bounds(config: ServerConfig) -> dict[str, Any]:
    """Return the limits of the processor cache. In sandboxes, every entry has a process, so those are limited too."""
    num_tenants = len({*config.api_key, *config.shipping_api_key}) or 1
    bounds = {"max_bytes": config.processor_cache_bytes, "num_tenants": num_tenants}
    if config.processor_isolation == "sandbox":
        entries = min(config.processor_cache_entries, config.max_sandboxes)
        return {**bounds, "max_entries": entries, "idle_timeout": config.sandbox_idle_timeout}
    return {**bounds, "max_entries": config.processor_cache_entries}
