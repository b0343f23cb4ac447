"""The batch processors of an engine: the built-in ones, which sampling parameters control, then the operator's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from logitship.sampler.batch_processors.interface import LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.batch_processors.plugins import LOGITSPROCS_GROUP, Plugin, PluginSpec, load_plugins

from .parameter_processors import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
from .thinking_token_budget import ThinkingTokenBudgetLogitsProcessor

__all__ = [
    "BUILTIN_LOGITS_PROCESSORS",
    "LOGITSPROCS_GROUP",
    "STR_POOLING_REJECTS_LOGITSPROCS",
    "STR_SPEC_DEC_REJECTS_LOGITSPROCS",
    "build_logitsprocs",
    "check_mode",
    "make_logits_processors",
]

# vLLM's messages and constants: plugins and their tests use both.
STR_POOLING_REJECTS_LOGITSPROCS = "Pooling models do not support custom logits processors."
STR_SPEC_DEC_REJECTS_LOGITSPROCS = "Custom logits processors are not supported when speculative decoding is enabled."

BUILTIN_LOGITS_PROCESSORS: list[type[LogitsProcessor]] = [
    MinTokensLogitsProcessor,
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
]


def build_logitsprocs(
    vllm_config: Any,
    device: torch.device,
    is_pin_memory: bool,
    is_pooling_model: bool,
    custom_logitsprocs: Sequence[PluginSpec] = (),
) -> LogitsProcessors:
    """Load the operator's processors and create all batch processors. Same signature as in vLLM.

    Args:
        vllm_config: vLLM's configuration.
        device: the device of the logits.
        is_pin_memory: whether to use pinned memory.
        is_pooling_model: whether the model is a pooling model.
        custom_logitsprocs: the operator's plugins, see `logitship.sampler.batch_processors.plugins`. Entry points come
            before them.

    Raises:
        ValueError: the mode does not support the operator's processors, see `check_mode`.
        PluginLoadError: a processor cannot be loaded or created.
    """
    plugins = load_plugins(custom_logitsprocs)
    check_mode(plugins, pooling=is_pooling_model, speculative=bool(vllm_config.speculative_config))
    if is_pooling_model:
        return LogitsProcessors()
    return make_logits_processors(plugins, vllm_config, device, is_pin_memory)


def check_mode(plugins: Sequence[Plugin], *, pooling: bool, speculative: bool) -> None:
    """Refuse the operator's batch processors that the mode does not support.

    Pooling supports none; speculative decoding supports those that implement `SpeculativeLogitsProcessor`. vLLM refuses
    all plugins given by name in both modes, and silently ignores those of entry points.

    Raises:
        ValueError: a processor is not supported. vLLM's message, with the names.
    """
    at_batch_level = [plugin for plugin in plugins if not plugin.is_custom_logit_processor]
    if at_batch_level and pooling:
        raise ValueError(f"{STR_POOLING_REJECTS_LOGITSPROCS} ({_names(at_batch_level)})")
    unable = [plugin for plugin in at_batch_level if not plugin.is_speculative]
    if unable and speculative:
        raise ValueError(f"{STR_SPEC_DEC_REJECTS_LOGITSPROCS} ({_names(unable)}: no apply_with_spec_decode)")


def _names(plugins: Sequence[Plugin]) -> str:
    return ", ".join(plugin.name for plugin in plugins)


def make_logits_processors(
    plugins: Sequence[Plugin],
    vllm_config: Any,
    device: torch.device,
    is_pin_memory: bool,
    *,
    tokenizer: Any = None,
    wrap: Callable[[LogitsProcessor, str], LogitsProcessor] = lambda made, name: made,
) -> LogitsProcessors:
    """Create the built-in batch processors, then the operator's, in order.

    The thinking-budget processor is only created if `vllm_config` has a `reasoning_config`; otherwise, requests with a
    budget are refused.

    Args:
        plugins: result of `load_plugins`; `CustomLogitProcessor`s are created when a request uses them.
        vllm_config: vLLM's configuration.
        device: the device of the logits.
        is_pin_memory: whether to use pinned memory.
        tokenizer: for request-level classes that need one.
        wrap: wraps each of the operator's processors, given its name.

    Raises:
        PluginLoadError: a processor cannot be created.
    """
    return LogitsProcessors(
        [
            *(cls(vllm_config, device, is_pin_memory) for cls in _builtin(vllm_config)),
            *(
                wrap(plugin.make(vllm_config, device, is_pin_memory, tokenizer), plugin.name)
                for plugin in plugins
                if not plugin.is_custom_logit_processor
            ),
        ]
    )


def _builtin(vllm_config: Any) -> list[type[LogitsProcessor]]:
    if vllm_config.reasoning_config is None:
        return BUILTIN_LOGITS_PROCESSORS
    return [*BUILTIN_LOGITS_PROCESSORS, ThinkingTokenBudgetLogitsProcessor]
