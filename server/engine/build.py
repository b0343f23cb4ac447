"""The composition root: builds an engine and everything in it."""

from __future__ import annotations

import os
from functools import partial

import torch

from logitship.builtin_processors.registry import Registry
from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.plugins import Plugin
from logitship.sampler.batch_processors.vllm_config import ReasoningConfig
from logitship.sampler.cgroup_limits import num_cores
from logitship.sampler.processors.deferred_calls import DeferredCalls
from logitship.sampler.processors.executor import ProcessorExecutor
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor
from logitship.server.blocked_processors import BlockedProcessors
from logitship.server.config import ServerConfig
from logitship.server.metrics.engine_stats import ModelInfo
from logitship.server.metrics.observed_metrics import MAX_NAMES, EngineMetrics
from logitship.server.metrics.step_clock import StepClock, StepTime
from logitship.server.model.capacity import free_bytes, max_model_len, prefix_cache_blocks
from logitship.server.model.deterministic_check import check_determinism
from logitship.server.model.kv_cache import PrefixCache
from logitship.server.model.memory_check import require_memory_to_start
from logitship.server.model.model_loader import LoadedModel, load_model
from logitship.server.model.model_runner import CoreBinding, ModelRunner
from logitship.server.model.reasoning_markers import resolve_reasoning_config
from logitship.server.model.step_cost import measure_passes, measure_step_cost
from logitship.server.processors.processor_policies import attached_to_all, check_attached
from logitship.server.processors.request_processors import RequestProcessors
from logitship.server.processors.tree_files import load_trees
from logitship.server.requests.body_limits import QueuedBytes
from logitship.server.requests.fair_pool import FairPool, pool_threads
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.requests.sequence import Sequence
from logitship.server.speculation.forced_runs import ForcedRuns
from logitship.server.speculation.ngram_speculation import NGramSpeculation

from .active_requests import ActiveRequests
from .async_engine import AsyncEngine, finish_step
from .decode_shares import DecodeShares
from .engine import Engine
from .engine_thread import EngineThread
from .forward_pass import SEQUENCE_COST
from .processor_setup import (
    add_grammar,
    create_installed,
    load_batch_processors,
    make_executor,
    make_library,
    make_load_queue,
    make_registry,
    start_zygote,
)
from .sampler_setup import make_sampler, plugin_config
from .scheduler import Scheduler
from .tenant_shares import StepSelection, TenantShares

_MEASURED_SEQUENCES = 17
"""Sequences of a step whose time is measured at the start: not a multiple of 16, which matrix libraries may be fast
for."""

_OUTSIDE_PASS = 1.0
"""Time that a further sequence adds to a step outside the forward pass, by sampling, detokenizing and sending, as a
multiple of what it adds to the pass."""


def build_engine(config: ServerConfig, loaded: LoadedModel | None = None) -> AsyncEngine:
    """Load the model and start an engine on it.

    Args:
        config: the server's configuration.
        loaded: a loaded model, instead of the one that `config` names.

    Raises:
        StartError: the model cannot be loaded or served; the message tells the operator what to do.
    """
    require_memory_to_start()
    _limit_threads()
    # Before the model, which takes long: a misspelled name should fail at once.
    plugins = load_batch_processors(config)
    registry = make_registry(plugins, load_trees(config), config.watermark_key)
    attached = attached_to_all(config)
    thread, zygote = EngineThread(), None
    try:
        zygote = start_zygote(config)  # starts while the model is loaded: both take seconds
        cores = thread.call(CoreBinding)  # before anything else: it observes the worker threads as they are created
        model = loaded or thread.call(lambda: load_model(config))
        executor = make_executor(config, model, zygote)
        return thread.call(lambda: _build(config, model, plugins, registry, attached, executor, thread, cores))
    except BaseException:  # cleanup, then re-raised
        thread.stop(timeout=0)
        if zygote is not None:
            zygote.close()
        raise


def _limit_threads() -> None:
    """Compute with no more threads than the CPU quota has cores, unless the operator chose their number.

    PyTorch counts the cores of the machine. Under a quota of some of them, all threads would use it up together, and
    then stand still together until the next period.
    """
    if "OMP_NUM_THREADS" not in os.environ and num_cores() < torch.get_num_threads():
        torch.set_num_threads(num_cores())


def _build(
    config: ServerConfig,
    loaded: LoadedModel,
    plugins: list[Plugin],
    registry: Registry,
    attached: tuple[ProcessorRequest, ...],
    executor: ProcessorExecutor,
    thread: EngineThread,
    cores: CoreBinding,
) -> AsyncEngine:
    """Build the engine on its thread, and start it."""
    reasoning = _reasoning_config(config, loaded)
    grammar = add_grammar(registry, reasoning, config.constrained_json_whitespace_pattern, loaded)
    free = free_bytes(config, loaded.model)  # once: the slots' cache must not reduce the prefix cache
    model = _model_info(config, loaded, free)
    blocked = None if config.blocked_digests is None else BlockedProcessors(config.blocked_digests)
    library = make_library(config, loaded, registry, executor, blocked, attached)
    create_installed(plugins, library)
    check_attached(attached, library)
    metrics = EngineMetrics(model, library.installed_digests, MAX_NAMES if config.names_in_metrics else 0)
    clock = StepClock()
    pool = FairPool(pool_threads(), config.max_sequences_per_tenant, "logitship-work")
    processors = RequestProcessors(library, make_load_queue(config, library), metrics.processor_load, pool)
    active = ActiveRequests(
        config.max_num_seqs, config.max_queued_requests, processors.release, config.max_sequences_per_tenant
    )
    runner = _model_runner(config, loaded, model.max_model_len, cores)
    decode = DecodeShares(_measured_step_time(runner, config.max_num_seqs))
    shares = TenantShares(config.tenant_step_share, processor_wait=config.processor_wait, decode=decode)
    deferred = DeferredCalls(shares)
    scheduler = Scheduler(
        runner.cache,
        config.chunked_prefill_size,
        PrefixCache(runner.cache, prefix_cache_blocks(config, loaded.model, model.max_model_len, free)),
        _speculation(config, runner),
        on_start=active.sequence_started,
        select=StepSelection(deferred, shares),
        shares=shares,
        reserved_slots=config.reserved_slots,
        most_forced=config.max_forced_run,
    )
    sampler = make_sampler(plugin_config(config, model, loaded, reasoning), loaded, plugins, metrics, clock, deferred)
    batch: PersistentBatch[Sequence] = PersistentBatch(config.max_num_seqs)
    engine = Engine(
        runner,
        sampler,
        scheduler,
        batch,
        on_finished=active.sequence_finished,
        clock=clock,
        deferred=deferred,
        shares=shares,
        forced=ForcedRuns(sampler.drafter, config.max_forced_run),
        on_emitted=active.deliver,
    )
    async_engine = AsyncEngine(
        config,
        model,
        loaded.tokenizer,
        metrics,
        processors,
        engine=engine,
        thread=thread,
        active=active,
        pool=pool,
        queued_bytes=QueuedBytes(config.max_queued_bytes, config.max_queued_bytes_per_tenant),
        library=library,
        shares=shares,
        grammar=grammar,
        plugins=plugins,
        attached_to_all=attached,
        sandboxes=executor if isinstance(executor, SandboxExecutor) else None,
        blocked=blocked,
    )
    thread.start(engine, after_step=partial(finish_step, active, metrics, clock), on_death=active.fail_all)
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


def _measured_step_time(runner: ModelRunner, max_num_seqs: int) -> StepTime:
    """Measure how much longer a step with more sequences takes: a burst of them may be the first steps of a server."""
    time = StepTime()
    passes = measure_passes(runner, {1, min(_MEASURED_SEQUENCES, max_num_seqs)})
    for number, seconds in passes.items():
        time.observe(number * SEQUENCE_COST, seconds + _OUTSIDE_PASS * max(0.0, seconds - passes[1]))
    return time


def _speculation(config: ServerConfig, runner: ModelRunner) -> NGramSpeculation | None:
    if config.speculative_algorithm is None:
        return None
    most_tokens = config.max_num_seqs * (1 + config.speculative_num_draft_tokens)
    return NGramSpeculation(config.speculative_num_draft_tokens, measure_step_cost(runner, most_tokens))


def _reasoning_config(config: ServerConfig, loaded: LoadedModel) -> ReasoningConfig | None:
    strings = config.reasoning_strings
    return None if strings is None else resolve_reasoning_config(strings, loaded.tokenizer, loaded.vocab_size)


def _model_info(config: ServerConfig, loaded: LoadedModel, free: float) -> ModelInfo:
    model = loaded.model
    return ModelInfo(
        name=config.model_name,
        path=config.model_path,
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len(config, model, loaded.max_len, free),
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        architecture=type(model).__name__,
    )
