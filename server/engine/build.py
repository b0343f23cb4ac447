"""Puts an engine together."""

from __future__ import annotations

import logging

from logitship.builtin_processors.logit_bias import LogitBiasLogitsProcessor
from logitship.builtin_processors.min_p import MinPLogitsProcessor
from logitship.builtin_processors.min_tokens import MinTokensLogitsProcessor
from logitship.builtin_processors.registry import installed_processors
from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.sampler.in_process_host import InProcessHost
from logitship.sampler.logits_processors import LogitsProcessors
from logitship.sampler.persistent_batch import PersistentBatch
from logitship.sampler.processor_cache import ProcessorCache
from logitship.sampler.processor_host import NoHost, ProcessorHost
from logitship.sampler.sampler import Sampler
from logitship.sampler.shipped_processors import ModelView, ShippedProcessors
from logitship.sampler.vllm_config import SchedulerConfig, VllmConfig
from logitship.server.config import ServerConfig
from logitship.server.errors import SHIPPING_IS_OFF

from .async_engine import AsyncEngine
from .capacity import max_model_len
from .engine import Engine
from .info import ModelInfo
from .model_loader import LoadedModel, load_model
from .model_runner import ModelRunner
from .processor_library import ProcessorLibrary
from .registered_processors import RegisteredProcessors
from .scheduler import Scheduler

logger = logging.getLogger(__name__)


def build_engine(config: ServerConfig, loaded: LoadedModel | None = None) -> AsyncEngine:
    """Load the model and start an engine on it.

    Args:
        loaded: a model that is loaded already, instead of the one that `config` names.

    Raises:
        StartError: the model cannot be loaded or served; the message says what to do.
    """
    loaded = loaded or load_model(config)
    async_engine = AsyncEngine(config, _model_info(config, loaded), loaded.tokenizer, _library(config, loaded))
    runner = ModelRunner(loaded.model, config.max_num_seqs, async_engine.model.max_model_len)
    async_engine.start(
        Engine(
            runner,
            _sampler(config, loaded),
            Scheduler(runner.cache, config.chunked_prefill_size),
            PersistentBatch(config.max_num_seqs),
            on_finished=async_engine.sequence_finished,
        )
    )
    return async_engine


def _library(config: ServerConfig, loaded: LoadedModel) -> ProcessorLibrary:
    bounds = {"max_entries": config.processor_cache_entries, "max_bytes": config.processor_cache_bytes}
    return ProcessorLibrary(
        installed_processors(),
        ProcessorCache(_shipped_host(config), **bounds),
        InProcessHost(SGLANG_NAMES),
        loaded.vocab_size,
        RegisteredProcessors(**bounds),
    )


def _shipped_host(config: ServerConfig) -> ProcessorHost:
    if not config.enable_custom_logit_processor:
        return NoHost(SHIPPING_IS_OFF)
    logger.warning(
        "shipped processors run inside this process, with all its rights (--processor-isolation none): "
        "serve only people whose code you would run yourself"
    )
    return InProcessHost(SGLANG_NAMES)


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


def _sampler(config: ServerConfig, loaded: LoadedModel) -> Sampler:
    device = loaded.model.device
    vllm_config = VllmConfig(SchedulerConfig(max_num_seqs=config.max_num_seqs))
    pinned = device.type == "cuda"
    builtin = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    shipped = ShippedProcessors(
        vllm_config,
        device,
        pinned,
        model=ModelView(loaded.vocab_size, loaded.eos_token_ids, loaded.tokenizer.hf_tokenizer),
    )
    processors = LogitsProcessors(processor(vllm_config, device, pinned) for processor in builtin)
    return Sampler(loaded.vocab_size, device, processors, shipped)
