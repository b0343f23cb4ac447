"""Keyword arguments of the client's generating methods, shared by the sync and the async client.

Every key is optional. Omitted keys are not sent, so that the server's defaults apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from logitship.client.serialization.processor_string import InstalledProcessor, RegisteredProcessor

TokenIds: TypeAlias = list[int]
Prompt: TypeAlias = str | TokenIds
Batch: TypeAlias = list[str] | list[TokenIds]
Message: TypeAlias = Mapping[str, Any]
Params: TypeAlias = Mapping[str, Any]

ProcessorLike: TypeAlias = (
    type | str | Mapping[str, Any] | RegisteredProcessor | InstalledProcessor | Callable[[Any, Any], Any]
)
"""A processor class; a `LogitsProcessor` of Hugging Face transformers, or its class; a processor string; one of its
forms as a dict; a digest; the name of an installed or registered processor; the result of `register`."""


class ProcessorOptions(TypedDict, total=False):
    """Options of every generating method."""

    processor: ProcessorLike | Sequence[ProcessorLike | Sequence[ProcessorLike] | None] | None
    """The request's processor, or a list of several that run in this order (on SGLang only with the plugin).
    For a batch of prompts, a list has one entry per prompt, each as for a single prompt; None for no processor."""
    params: Params | Sequence[Params | None] | None
    """The processor's parameters, `custom_params` on the wire. For a batch also a list, one per prompt."""
    logits_processors: Sequence[Mapping[str, Any] | str | Sequence[Mapping[str, Any] | str]]
    """Several processors, each with its own parameters, run in this order (on SGLang only with the plugin): dicts with
    `processor`, given as above, and `params`. Also the server's own callables, by `qualname`, `args` and `kwargs`, if
    its operator allows their names. For a batch also a list of such lists, one per prompt."""
    vllm_xargs: Mapping[str, Any]
    """Parameters of batch processors that are installed on the server."""
    trace: Mapping[str, int]
    """`{"top": 20}`: trace the most likely candidates for each token, see `TokenTrace` (only on logitship servers)."""
    return_sampling_mask: bool | list[bool]
    """Return for each output token the tokens that could be sampled in its place, and its log-probability (not on
    vLLM). For a batch also a list, one per prompt."""
    sampling_mask_format: Literal["lists", "packed"]
    """`packed`: as `sampling_record` of the answer, for `logitship.replay` (in other engines with logitship's plugin).
    `lists`: in `raw`, as the server sends them."""
    return_sampling_edits: bool
    """With `packed`: add what was done to the model's logits of the tokens that could be sampled."""
    sampling_logprobs_mode: Literal["selected", "support"]
    """With lists: the log-probability of the output token, or those of all tokens of its mask."""
    extra_body: Mapping[str, Any]
    """Additional fields of the request body, for options that this client does not know."""


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters with the same name in SGLang's and OpenAI's APIs, where logitship adds vLLM's to both."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    """`sampling_seed` on the wire of SGLang's API."""
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    skip_special_tokens: bool
    logit_bias: Mapping[int, float] | Mapping[str, float]
    allowed_token_ids: list[int]
    bad_words: list[str]
    thinking_token_budget: int
    """Maximum number of thinking tokens before the end of the thinking is forced."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]
    """Log-probabilities before any edit of the logits, or after all of them."""


class SGLangSamplingOptions(SamplingOptions, total=False):
    """SGLang's `sampling_params`."""

    max_new_tokens: int
    min_new_tokens: int
    stop_regex: str | list[str]
    no_stop_trim: bool
    spaces_between_special_tokens: bool
    json_schema: str
    regex: str
    ebnf: str
    whitespace_pattern: str
    """Regular expression for the white space between the parts of JSON."""
    structural_tag: str
    """JSON text of a structural tag. The OpenAI routes take it in `response_format`."""


class GenerateOptions(ProcessorOptions, SGLangSamplingOptions, total=False):
    """Options of `generate` and `generate_stream`."""

    max_tokens: int
    """OpenAI's name for `max_new_tokens`."""
    min_tokens: int
    """OpenAI's name for `min_new_tokens`."""
    rid: str | list[str]
    """Request id of your choice, for `abort`. For a batch a list, or one id to which `_0`, `_1`, … are appended."""
    max_thinking_tokens: int
    """SGLang's name for `thinking_token_budget`."""
    return_logprob: bool
    logprob_start_len: int
    """First prompt token whose log-probability is returned; -1: none of the prompt."""
    top_logprobs_num: int
    token_ids_logprob: list[int] | list[list[int]]
    """Tokens whose log-probabilities are returned as well; for a batch also a list of such lists."""
    return_text_in_logprobs: bool


class _OpenAIOptions(ProcessorOptions, SamplingOptions, total=False):
    model: str
    """Default: the server's only or first model."""
    max_tokens: int
    min_tokens: int
    max_new_tokens: int
    """SGLang's name for `max_tokens`."""
    min_new_tokens: int
    """SGLang's name for `min_tokens`."""
    response_format: Mapping[str, Any]
    user: str


class CompletionOptions(_OpenAIOptions, total=False):
    """Options of `completions` and `completions_stream`, in OpenAI's names and those that SGLang and vLLM add."""

    echo: bool
    logprobs: int
    suffix: str


class ChatOptions(_OpenAIOptions, total=False):
    """Options of `chat` and `chat_stream`, in OpenAI's names and those that SGLang and vLLM add."""

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    tools: list[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
