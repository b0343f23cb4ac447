"""What batch processors may read of the engine's configuration: the part of vLLM's `VllmConfig` that they use.

The names are vLLM's, and so are the values where both engines have the thing. A setting of vLLM that is not here is an
`AttributeError` that lists what is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch


class _Config:
    """Says what there is when a plugin reads something else."""

    if not TYPE_CHECKING:  # type checkers know the fields, and would believe that every name is one

        def __getattr__(self, name: str) -> Any:
            methods = (method for method in dir(type(self)) if not method.startswith("_"))
            known = ", ".join(sorted({*methods, *(each.name for each in fields(self))}))
            message = f"logitship's {type(self).__name__} has no {name!r}, only: {known}"
            raise AttributeError(message, name=name, obj=self)


@dataclass(frozen=True, eq=False)
class SchedulerConfig(_Config):
    """Limits of the batch.

    Attributes:
        max_num_seqs: rows of the persistent batch.
        max_num_batched_tokens: most tokens that one step computes.
        max_model_len: most tokens of a prompt and its output together.
        async_scheduling: True if a step is planned before the tokens of the step before are known. Never here, so
            output token ids are always real ones.
    """

    max_num_seqs: int
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    async_scheduling: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelConfig(_Config):
    """The model that is served.

    Attributes:
        model: a folder, a GGUF file or a hub name.
        tokenizer: the same, of the tokenizer.
        max_model_len: most tokens of a prompt and its output together.
        vocab_size: columns of the logits.
        dtype: of the weights. Logits are float32.
        hf_config: the Hugging Face configuration.
        hf_text_config: its part for text; the same object if there is nothing else in it.
        hf_tokenizer: the tokenizer itself. vLLM has `cached_tokenizer_from_config` for it.
        logits_processors: what the operator named, as named.
    """

    model: str
    tokenizer: str
    max_model_len: int
    vocab_size: int
    dtype: torch.dtype
    hf_config: Any = None
    hf_text_config: Any = None
    hf_tokenizer: Any = None
    tokenizer_mode: str = "auto"
    tokenizer_revision: str | None = None
    revision: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    served_model_name: str | None = None
    runner_type: Literal["generate"] = "generate"
    is_multimodal_model: bool = False
    is_encoder_decoder: bool = False
    quantization: str | None = None
    seed: int = 0
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    logits_processors: Sequence[Any] | None = None

    def get_vocab_size(self) -> int:
        """Columns of the logits."""
        return self.vocab_size


@dataclass(frozen=True, eq=False)
class DeviceConfig(_Config):
    """Where the logits are."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        return self.device.type


@dataclass(frozen=True, eq=False)
class ParallelConfig(_Config):
    """One process computes the whole model."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    world_size: int = 1
    rank: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class ReasoningConfig(_Config):
    """How the model writes the start and the end of its thinking.

    Attributes:
        reasoning_parser: vLLM's name for the two; "" if they were given.
        reasoning_end_str: what is forced where a thinking budget is spent.
        reasoning_end_token_ids: the same as tokens.
        natural_reasoning_end_token_ids: what ends the thinking besides: what the model writes by itself.
    """

    reasoning_start_str: str
    reasoning_end_str: str
    reasoning_start_token_ids: list[int]
    reasoning_end_token_ids: list[int]
    natural_reasoning_end_token_ids: list[int]
    reasoning_parser: str = ""

    @property
    def enabled(self) -> bool:
        """True: the tokens are known."""
        return True


@dataclass(frozen=True, eq=False)
class SpeculativeConfig(_Config):
    """How tokens are drafted.

    Attributes:
        num_speculative_tokens: most of a sequence that a step checks ahead.
        method: by n-grams: what followed them before.
    """

    num_speculative_tokens: int
    method: str = "ngram"


@dataclass(frozen=True, eq=False)
class VllmConfig(_Config):
    """The first argument of a batch processor's constructor.

    Attributes:
        model_config: None only where a processor is made without a model.
        speculative_config: None: no drafts.
        reasoning_config: None: nobody said how the model writes its thinking.
        lora_config: None: no adapters.
        quant_config: None: what the model's file says.
        additional_config: empty.
    """

    scheduler_config: SchedulerConfig
    model_config: ModelConfig | None = None
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    speculative_config: SpeculativeConfig | None = None
    reasoning_config: ReasoningConfig | None = None
    lora_config: Any = None
    quant_config: Any = None
    additional_config: Mapping[str, Any] = field(default_factory=dict)


def vllm_config(
    *,
    model: str,
    vocab_size: int,
    max_model_len: int,
    max_num_seqs: int,
    device: torch.device,
    dtype: torch.dtype,
    tokenizer: str | None = None,
    hf_config: Any = None,
    hf_tokenizer: Any = None,
    max_num_batched_tokens: int | None = None,
    trust_remote_code: bool = False,
    served_model_name: str | None = None,
    seed: int | None = None,
    max_logprobs: int = 20,
    logprobs_mode: str = "raw_logprobs",
    logits_processors: Sequence[Any] = (),
    reasoning_config: ReasoningConfig | None = None,
    num_speculative_tokens: int | None = None,
) -> VllmConfig:
    """The configuration of an engine, in vLLM's form.

    Args:
        model: what `AutoTokenizer.from_pretrained` and its like can load: a folder, a GGUF file or a hub name.
        vocab_size: columns of the logits.
        tokenizer: the same as `model` if there is no other.
        hf_config: a Hugging Face `PreTrainedConfig`.
        hf_tokenizer: a Hugging Face tokenizer, for plugins that want the engine's.
        seed: None is vLLM's default, 0.
        logits_processors: what the operator named.
        num_speculative_tokens: most tokens of a sequence that a step checks ahead. None: it checks none.
    """
    model_config = ModelConfig(
        model=model,
        tokenizer=tokenizer or model,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        dtype=dtype,
        hf_config=hf_config,
        hf_text_config=None if hf_config is None else hf_config.get_text_config(),
        hf_tokenizer=hf_tokenizer,
        trust_remote_code=trust_remote_code,
        served_model_name=served_model_name or model,
        seed=seed or 0,
        max_logprobs=max_logprobs,
        logprobs_mode=logprobs_mode,
        logits_processors=list(logits_processors) or None,
    )
    return VllmConfig(
        scheduler_config=SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len),
        model_config=model_config,
        device_config=DeviceConfig(device),
        speculative_config=None if num_speculative_tokens is None else SpeculativeConfig(num_speculative_tokens),
        reasoning_config=reasoning_config,
    )
