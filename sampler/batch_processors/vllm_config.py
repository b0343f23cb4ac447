"""The engine's configuration for batch processors: a subset of vLLM's `VllmConfig`.

Names are vLLM's, and so are values that exist in both engines. Reading a setting that is not here raises an
`AttributeError` that lists the available ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch


class _Config:
    """Lists the available attributes when a plugin reads one that does not exist."""

    if not TYPE_CHECKING:  # with __getattr__, type checkers would accept any name

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
        max_num_batched_tokens: maximum number of tokens that a step computes.
        max_model_len: maximum number of tokens of a prompt and its output together.
        async_scheduling: True if a step is scheduled before the previous step's tokens are known. Always False here:
            output token ids are never placeholders.
    """

    max_num_seqs: int
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    async_scheduling: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelConfig(_Config):
    """The served model.

    Attributes:
        model: folder, GGUF file or hub name.
        tokenizer: folder, GGUF file or hub name of the tokenizer.
        max_model_len: maximum number of tokens of a prompt and its output together.
        vocab_size: number of columns of the logits.
        dtype: dtype of the weights. Logits are float32.
        hf_config: Hugging Face configuration.
        hf_text_config: its text part; the same object if it has no other part.
        hf_tokenizer: the tokenizer object. vLLM has `cached_tokenizer_from_config` for it.
        logits_processors: the installed processors as the operator specified them.
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
        """Return the number of columns of the logits."""
        return self.vocab_size


@dataclass(frozen=True, eq=False)
class DeviceConfig(_Config):
    """Device of the logits."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable

    @property
    def device_type(self) -> str:
        """Device type, "cpu" or "cuda"."""
        return self.device.type


@dataclass(frozen=True, eq=False)
class ParallelConfig(_Config):
    """Parallelism: a single process computes the whole model."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    world_size: int = 1
    rank: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class ReasoningConfig(_Config):
    """The model's markers for the start and the end of its thinking.

    Attributes:
        reasoning_start_str: start marker.
        reasoning_end_str: text that is forced when a thinking budget is spent.
        reasoning_start_token_ids: tokens of the start marker.
        reasoning_end_token_ids: tokens of the forced text.
        natural_reasoning_end_token_ids: tokens of the end marker that the model itself writes.
        reasoning_parser: vLLM's name for the markers; "" if they were given explicitly.
    """

    reasoning_start_str: str
    reasoning_end_str: str
    reasoning_start_token_ids: list[int]
    reasoning_end_token_ids: list[int]
    natural_reasoning_end_token_ids: list[int]
    reasoning_parser: str = ""

    @property
    def enabled(self) -> bool:
        """Always True: the tokens are known."""
        return True


@dataclass(frozen=True, eq=False)
class SpeculativeConfig(_Config):
    """Speculative decoding.

    Attributes:
        num_speculative_tokens: maximum number of draft tokens per sequence and step.
        method: "ngram": drafts continue earlier occurrences of the last n-gram.
    """

    num_speculative_tokens: int
    method: str = "ngram"


@dataclass(frozen=True, eq=False)
class VllmConfig(_Config):
    """The first argument of a batch processor's constructor.

    Attributes:
        scheduler_config: limits of the batch.
        model_config: the served model; None only if the processor is created without one.
        device_config: device of the logits.
        parallel_config: parallelism.
        speculative_config: speculative decoding; None if it is off.
        reasoning_config: thinking markers; None if they are unknown.
        lora_config: always None: no adapters.
        quant_config: always None: quantization is determined by the model's file.
        additional_config: always empty.
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
    """Build the configuration of an engine in vLLM's form.

    Args:
        model: argument for `AutoTokenizer.from_pretrained` and the like: a folder, a GGUF file or a hub name.
        vocab_size: number of columns of the logits.
        max_model_len: maximum number of tokens of a prompt and its output together.
        max_num_seqs: number of rows of the persistent batch.
        device: device of the logits.
        dtype: dtype of the weights.
        tokenizer: the same as `model` by default.
        hf_config: a Hugging Face `PreTrainedConfig`.
        hf_tokenizer: a Hugging Face tokenizer, for plugins that need the engine's.
        max_num_batched_tokens: maximum number of tokens that a step computes.
        trust_remote_code: True if code from the model's repository may run.
        served_model_name: `model` by default.
        seed: None is vLLM's default, 0.
        max_logprobs: maximum `logprobs` of a request.
        logprobs_mode: see `SamplingParams`.
        logits_processors: the installed processors as the operator specified them.
        reasoning_config: thinking markers, if known.
        num_speculative_tokens: maximum number of draft tokens per sequence and step; None without speculative decoding.
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
