"""Puts an engine together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from logitship.builtin_processors.batch_processors import check_mode, make_logits_processors
from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.builtin_processors.registry import Registry, installed_processors
from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.builtin_processors.thinking_token_budget import ReasoningMarkers
from logitship.builtin_processors.tree import TreeLogitsProcessor
from logitship.builtin_processors.trees.token_tree import TokenTree
from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.guarded_processor import GuardedProcessor
from logitship.sampler.batch_processors.plugins import Plugin, PluginLoadError, load_plugins
from logitship.sampler.batch_processors.vllm_config import ReasoningConfig, VllmConfig, vllm_config
from logitship.sampler.processors.executor import DisabledExecutor, ProcessorExecutor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_cache import ProcessorCache
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampler import Sampler
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits
from logitship.sampler.sandbox.spare_sandboxes import NUM_SPARES
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess
from logitship.server.config import ServerConfig
from logitship.server.metrics.engine_stats import ModelInfo
from logitship.server.model.capacity import max_model_len, prefix_cache_blocks
from logitship.server.model.core_binding import CoreBinding
from logitship.server.model.deterministic_check import check_determinism
from logitship.server.model.model_loader import LoadedModel, load_model
from logitship.server.model.model_runner import ModelRunner
from logitship.server.model.prefix_cache import PrefixCache
from logitship.server.model.reasoning_markers import resolve_reasoning_config
from logitship.server.processors.callable_library import CallableLibrary
from logitship.server.processors.processor_library import ProcessorLibrary
from logitship.server.processors.registered_processors import RegisteredProcessors
from logitship.server.processors.tree_files import attached_to_all, load_trees
from logitship.server.refusals import SHIPPING_IS_OFF, StartError
from logitship.server.speculation.speculation import NGramSpeculation
from logitship.server.speculation.step_cost import measure_step_cost
from logitship.server.vllm_names import enable_vllm_names

from .async_engine import AsyncEngine
from .engine import Engine
from .engine_thread import EngineThread
from .scheduler import Scheduler
from .timed_processors import TimedProcessors

logger = logging.getLogger(__name__)

_NAMES_IN_SANDBOXES = "logitship.builtin_processors.sglang_names:SGLANG_NAMES"
"""Where another process finds what `SGLANG_NAMES` is here."""


def build_engine(config: ServerConfig, loaded: LoadedModel | None = None) -> AsyncEngine:
    """Load the model and start an engine on it.

    Args:
        loaded: a model that is loaded already, instead of the one that `config` names.

    Raises:
        StartError: the model cannot be loaded or served; the message says what to do.
    """
    plugins = _load_plugins(config)
    registry = _registry(plugins, load_trees(config))
    zygote = _start_zygote(config)  # beside the loading of the model: both take seconds
    thread = EngineThread()
    try:
        cores = thread.call(CoreBinding)  # before anything else: it finds its workers when they come into being
        model = loaded or thread.call(lambda: load_model(config))
        shipped_executor = _shipped_executor(config, model, zygote)
        return thread.call(lambda: _built(config, model, plugins, registry, shipped_executor, thread, cores))
    except BaseException:
        thread.stop(timeout=0)
        if zygote is not None:
            zygote.close()
        raise


def _built(
    config: ServerConfig,
    loaded: LoadedModel,
    plugins: list[Plugin],
    registry: Registry,
    shipped_executor: ProcessorExecutor,
    thread: EngineThread,
    cores: CoreBinding,
) -> AsyncEngine:
    reasoning = _reasoning_config(config, loaded)
    if reasoning is not None:
        registry.add(GrammarProcessor.name, GrammarProcessor, partial(GrammarProcessor, ReasoningMarkers.of(reasoning)))
    async_engine = AsyncEngine(
        config,
        _model_info(config, loaded),
        loaded.tokenizer,
        _library(config, loaded, registry, shipped_executor),
        plugins,
        attached_to_all(config),
    )
    max_len = async_engine.model.max_model_len
    runner = _model_runner(config, loaded, max_len, cores)
    prefixes = PrefixCache(runner.cache, prefix_cache_blocks(config, loaded.model, max_len))
    async_engine.start(
        Engine(
            runner,
            _sampler(_vllm_config(config, async_engine.model, loaded), loaded, plugins, async_engine),
            Scheduler(
                runner.cache,
                config.chunked_prefill_size,
                prefixes,
                _speculation(config, runner),
                on_start=async_engine.sequence_started,
            ),
            PersistentBatch(config.max_num_seqs),
            on_finished=async_engine.sequence_finished,
            clock=async_engine.clock,
        ),
        thread,
        sandboxes=shipped_executor if isinstance(shipped_executor, SandboxExecutor) else None,
    )
    return async_engine


def _model_runner(config: ServerConfig, loaded: LoadedModel, max_len: int, cores: CoreBinding) -> ModelRunner:
    deterministic = config.enable_deterministic_inference
    runner = ModelRunner(
        loaded.model,
        config.max_num_seqs,
        max_len,
        deterministic=deterministic,
        fused=config.model_impl == "auto",
        cores=cores,
    )
    if deterministic:
        check_determinism(runner)
    return runner


def _load_plugins(config: ServerConfig) -> list[Plugin]:
    # First: an operator who misspelt a name should not wait for the model to learn of it.
    enable_vllm_names()
    try:
        plugins = load_plugins(config.logits_processors)
        check_mode(plugins, pooling=False, speculative=config.speculative_algorithm is not None)
    except (PluginLoadError, ValueError) as error:
        raise StartError(str(error)) from error
    return plugins


def _speculation(config: ServerConfig, runner: ModelRunner) -> NGramSpeculation | None:
    if config.speculative_algorithm is None:
        return None
    most_tokens = config.max_num_seqs * (1 + config.speculative_num_draft_tokens)
    return NGramSpeculation(config.speculative_num_draft_tokens, measure_step_cost(runner, most_tokens))


def _registry(plugins: list[Plugin], trees: Mapping[str, TokenTree]) -> Registry:
    registry = installed_processors()
    registry.add(TreeLogitsProcessor.name, TreeLogitsProcessor, partial(TreeLogitsProcessor, trees))
    for plugin in plugins:
        if plugin.is_row_level:
            registry.add(plugin.name, plugin.target)
    return registry


def _library(
    config: ServerConfig, loaded: LoadedModel, registry: Registry, shipped_executor: ProcessorExecutor
) -> ProcessorLibrary:
    return ProcessorLibrary(
        registry,
        ProcessorCache(shipped_executor, **_cache_bounds(config)),
        InProcessExecutor(SGLANG_NAMES),
        _model_view(loaded),
        RegisteredProcessors(max_entries=config.processor_cache_entries, max_bytes=config.processor_cache_bytes),
        CallableLibrary(config.logits_processor_pattern, loaded.tokenizer.hf_tokenizer),
        config.allowed_digests,
    )


def _cache_bounds(config: ServerConfig) -> dict[str, int]:
    """A loaded processor has a sandbox of its own."""
    entries = config.processor_cache_entries
    if config.processor_isolation == "sandbox":
        entries = min(entries, config.max_sandboxes)
    return {"max_entries": entries, "max_bytes": config.processor_cache_bytes}


def _start_zygote(config: ServerConfig) -> ZygoteProcess | None:
    if not config.enable_custom_logit_processor or config.processor_isolation == "none":
        return None
    zygote = ZygoteProcess(names=_NAMES_IN_SANDBOXES, max_rows=config.max_num_seqs, memory_limit=config.sandbox_memory)
    zygote.start()
    return zygote


def _shipped_executor(config: ServerConfig, loaded: LoadedModel, zygote: ZygoteProcess | None) -> ProcessorExecutor:
    if not config.enable_custom_logit_processor:
        return DisabledExecutor(SHIPPING_IS_OFF)
    if zygote is None:
        return InProcessExecutor(SGLANG_NAMES)
    try:
        protections = zygote.set_up(_model_view(loaded))
    except ZygoteError as error:
        raise StartError(str(error)) from error
    logger.info("shipped processors run in sandboxes, protected by: %s", protections.describe())
    limits = SandboxLimits(
        cpu_time=config.sandbox_cpu_time,
        step_timeout=config.sandbox_step_timeout,
        load_timeout=config.sandbox_load_timeout,
    )
    return SandboxExecutor(zygote, limits, config.max_num_seqs, loaded.vocab_size, NUM_SPARES)


def _model_view(loaded: LoadedModel) -> ModelView:
    return ModelView(loaded.vocab_size, loaded.eos_token_ids, loaded.tokenizer.hf_tokenizer)


def _model_info(config: ServerConfig, loaded: LoadedModel) -> ModelInfo:
    model = loaded.model
    return ModelInfo(
        name=config.model_name,
        path=config.model_path,
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len(config, model, loaded.max_len),
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        architecture=type(model).__name__,
    )


def _vllm_config(config: ServerConfig, model: ModelInfo, loaded: LoadedModel) -> VllmConfig:
    return vllm_config(
        # Where they really lie: plugins load their own tokenizer from there.
        model=loaded.model.name_or_path or model.path,
        tokenizer=loaded.tokenizer.hf_tokenizer.name_or_path or config.tokenizer_path,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_seqs + config.chunked_prefill_size,
        device=loaded.model.device,
        dtype=loaded.model.dtype,
        hf_config=loaded.model.config,
        hf_tokenizer=loaded.tokenizer.hf_tokenizer,
        trust_remote_code=config.trust_remote_code,
        served_model_name=model.name,
        seed=config.random_seed,
        max_logprobs=config.max_logprobs,
        logprobs_mode=config.logprobs_mode,
        logits_processors=config.logits_processors,
        reasoning_config=_reasoning_config(config, loaded),
        num_speculative_tokens=config.speculative_num_draft_tokens if config.speculative_algorithm else None,
    )


def _reasoning_config(config: ServerConfig, loaded: LoadedModel) -> ReasoningConfig | None:
    strings = config.reasoning_strings
    return None if strings is None else resolve_reasoning_config(strings, loaded.tokenizer, loaded.vocab_size)


def _sampler(config: VllmConfig, loaded: LoadedModel, plugins: list[Plugin], engine: AsyncEngine) -> Sampler:
    device = loaded.model.device
    pinned = device.type == "cuda"
    tokenizer = loaded.tokenizer.hf_tokenizer
    try:
        processors = make_logits_processors(plugins, config, device, pinned, tokenizer=tokenizer, wrap=GuardedProcessor)
    except PluginLoadError as error:
        raise StartError(str(error)) from error
    shipped = TimedProcessors(
        config,
        device,
        pinned,
        model=_model_view(loaded),
        on_call=engine.metrics.observer_of_calls,
        check_last=False,  # the sampler looks at all rows
        clock=engine.clock,
    )
    return Sampler(loaded.vocab_size, device, processors, shipped)
