"""Builds the sampler, with the installed batch processors and the processors of requests."""

from __future__ import annotations

from logitship.builtin_processors.batch_processors import make_logits_processors
from logitship.sampler.batch_processors.guarded_processor import GuardedProcessor
from logitship.sampler.batch_processors.plugins import Plugin, PluginLoadError
from logitship.sampler.batch_processors.vllm_config import ReasoningConfig, VllmConfig, vllm_config
from logitship.sampler.processors.deferred_calls import DeferredCalls
from logitship.sampler.sampler import Sampler
from logitship.server.config import ServerConfig
from logitship.server.metrics.engine_stats import ModelInfo
from logitship.server.metrics.observed_metrics import EngineMetrics
from logitship.server.metrics.step_clock import StepClock, TimedProcessors
from logitship.server.model.model_loader import LoadedModel
from logitship.server.refusals import StartError

from .processor_setup import model_view


def make_sampler(
    config: VllmConfig,
    loaded: LoadedModel,
    plugins: list[Plugin],
    metrics: EngineMetrics,
    clock: StepClock,
    deferred: DeferredCalls,
) -> Sampler:
    """Build the sampler.

    Raises:
        StartError: a batch processor cannot be constructed.
    """
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
        model=model_view(loaded),
        on_call=metrics.call_observer,
        is_kept=deferred.is_kept,
        check_last=False,  # the sampler checks all rows
        deferred=deferred,
        clock=clock,
    )
    return Sampler(loaded.vocab_size, device, processors, shipped)


def plugin_config(
    config: ServerConfig, model: ModelInfo, loaded: LoadedModel, reasoning: ReasoningConfig | None
) -> VllmConfig:
    """Return the configuration that batch processors get, in vLLM's form."""
    return vllm_config(
        # The real paths: plugins load their own tokenizer from there.
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
        reasoning_config=reasoning,
        num_speculative_tokens=config.speculative_num_draft_tokens if config.speculative_algorithm else None,
    )
