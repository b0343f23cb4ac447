"""The batch processors of an engine: those that every request may use by its parameters, then the operator's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from logitship.sampler.batch_processors.interface import LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.batch_processors.plugins import LOGITSPROCS_GROUP, Plugin, PluginSpec, load_plugins

from .logit_bias import LogitBiasLogitsProcessor
from .min_p import MinPLogitsProcessor
from .min_tokens import MinTokensLogitsProcessor
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

# vLLM's sentences, and its names for them: plugins and their tests look for both.
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
    """Load the operator's processors and make every batch processor; vLLM's function.

    Args:
        custom_logitsprocs: what the operator named, see `logitship.sampler.batch_processors.plugins`. Entry points
            come before them.

    Raises:
        ValueError: the mode cannot run the operator's, see `check_mode`.
        PluginLoadError: one of them cannot be loaded or made.
    """
    plugins = load_plugins(custom_logitsprocs)
    check_mode(plugins, pooling=is_pooling_model, speculative=bool(vllm_config.speculative_config))
    if is_pooling_model:
        return LogitsProcessors()
    return make_logits_processors(plugins, vllm_config, device, is_pin_memory)


def check_mode(plugins: Sequence[Plugin], *, pooling: bool, speculative: bool) -> None:
    """Refuse the operator's batch processors where they cannot run.

    With pooling none can; with speculative decoding those that cannot be asked for some of the rows, see
    `SpeculativeLogitsProcessor`. vLLM refuses all that are named to it in both modes, and drops those of entry points
    without a word.

    Raises:
        ValueError: in vLLM's words; names them.
    """
    at_batch_level = [plugin for plugin in plugins if not plugin.is_row_level]
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
    """Make the built-in batch processors, then the operator's, in order.

    The thinking budget is made where `vllm_config` has a `reasoning_config`; requests with one are refused elsewhere.

    Args:
        plugins: what `load_plugins` gave; row-level ones wait for requests that ask for them.
        tokenizer: for request-level classes that want one and were not given it.
        wrap: put around each of the operator's, with its name.

    Raises:
        PluginLoadError: one of them cannot be made.
    """
    return LogitsProcessors(
        [
            *(cls(vllm_config, device, is_pin_memory) for cls in _builtin(vllm_config)),
            *(
                wrap(plugin.make(vllm_config, device, is_pin_memory, tokenizer), plugin.name)
                for plugin in plugins
                if not plugin.is_row_level
            ),
        ]
    )


def _builtin(vllm_config: Any) -> list[type[LogitsProcessor]]:
    if vllm_config.reasoning_config is None:
        return BUILTIN_LOGITS_PROCESSORS
    return [*BUILTIN_LOGITS_PROCESSORS, ThinkingTokenBudgetLogitsProcessor]
