"""OpenAI's request bodies, with SGLang's and vLLM's extra fields."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import FailFast, Field, PlainValidator, model_validator

from .field_rules import BODY_RULES, CHAT_RULES, MESSAGE_RULES, STREAM_OPTIONS_RULES
from .request_schema import (
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    Count,
    FieldError,
    Id,
    RecordFields,
    RequestModel,
    SamplingFields,
    Seed,
    check_length,
    is_list_of_prompts,
    is_token_ids,
)
from .structured_outputs import OpenAIGrammarFields
from .tool_schemas import MAX_TOOLS, MessageToolCall, ToolFields


class StreamOptions(RequestModel):
    """`stream_options`."""

    examples: ClassVar = {"include_usage": True, "continuous_usage_stats": True}
    rules: ClassVar = STREAM_OPTIONS_RULES

    include_usage: bool = False
    """Send the token counts in an extra event at the end."""
    continuous_usage_stats: bool = False
    """Send the token counts so far in every event."""


class OpenAIFields(SamplingFields, RecordFields, OpenAIGrammarFields):
    """Fields of both routes."""

    examples: ClassVar = {
        "model": "SmolLM2-135M-Instruct",
        "best_of": 4,
        "seed": 42,
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 4,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 5,
        "return_token_ids": True,
        "custom_logit_processor": {"name": "disallowed_tokens"},
        "logits_processors": [{"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [30]}}],
        "vllm_xargs": {"target_token": 30},
        "request_id": "first",
        "rid": "first",
    }
    rules: ClassVar = BODY_RULES

    model: Id | None = None
    """Name of the model; optional, since there is only one."""
    best_of: Count | None = None
    """Generate this many continuations per prompt, and return the `n` with the highest log-probability per token, best
    first. With `stream` it must equal `n`."""
    seed: Seed | None = None
    """Seed: the same seed, prompt and parameters give the same tokens."""
    stream: bool = False
    """Stream server-sent events, each with the new text."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    min_tokens: int = 0
    """Minimum number of output tokens before an EOS token."""
    include_stop_str_in_output: bool = False
    """Alias of `no_stop_trim` (vLLM)."""
    prompt_logprobs: int | None = None
    """Return the prompt's log-probabilities, with this many most likely tokens per position."""
    return_token_ids: bool = False
    """Return the token ids of the prompt and the output."""
    custom_logit_processor: Any = None
    """The processor: a processor string or its JSON object, or a list of processors, which run in this order. For a
    list of prompts, a list has one entry per prompt."""
    logits_processors: Annotated[list[Any], Field(max_length=MAX_PROMPTS)] | None = None
    """Processors with parameters of their own, and callables by name; see "Processors in a request". For a list of
    prompts also a list of such lists."""
    vllm_xargs: dict[str, Any] | None = None
    """Parameters of installed batch processors, as in vLLM."""
    request_id: Id | None = None
    """Id of the request and the response."""
    rid: Id | None = None
    """Alias of `request_id` (SGLang)."""

    @property
    def usage_at_end(self) -> bool:
        """The stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_each_event(self) -> bool:
        """Every event has the token counts so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def num_continuations(self) -> int:
        """Number of continuations generated per prompt."""
        return self.n if self.best_of is None else self.best_of

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        if self.num_continuations < self.n:
            raise FieldError("best_of", f"must not be smaller than n, which is {self.n}")
        if self.num_continuations > self.n and self.stream:
            raise FieldError("best_of", "is not available with stream: the best are only known at the end")
        if self.stream and (self.use_beam_search or (self.num_beams or 1) > 1):
            raise FieldError("stream", "is not available with beam search: the output is only known at the end")
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "requires stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "is not available with stream: true")
        if None not in (self.rid, self.request_id) and self.rid != self.request_id:
            raise FieldError("rid", "differs from request_id")
        if "" in (self.rid, self.request_id):
            raise FieldError("request_id" if self.rid is None else "rid", "must not be empty")
        return self


def _prompt(value: Any) -> Any:
    if (
        isinstance(value, str)
        or is_token_ids(value)
        or is_list_of_prompts(value, lambda each: isinstance(each, str))
        or is_list_of_prompts(value, is_token_ids)
    ):
        return value
    raise ValueError("must be a string, a list of token ids (integers), or a list of one of these")


_TokenIds = Annotated[list[int], Field(max_length=MAX_PROMPT_TOKENS)]
_PromptTypes = (
    str
    | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
    | _TokenIds
    | Annotated[list[_TokenIds], Field(max_length=MAX_PROMPTS)]
)
MAX_MESSAGES = 1 << 14
"""Most messages of a conversation, and text parts of a message. Each message is several tokens of the prompt."""
MAX_TEMPLATE_VARIABLES = 256
"""Most variables for the chat template."""


class CompletionRequest(OpenAIFields):
    """Body of `/v1/completions`."""

    examples: ClassVar = {
        "prompt": "The capital of France is",
        "max_tokens": 4,
        "logprobs": 5,
        "echo": True,
        "add_special_tokens": False,
    }

    prompt: Annotated[str | list[Any], PlainValidator(_prompt, json_schema_input_type=_PromptTypes)]
    """Text or token ids, or a list of texts or of lists of token ids."""
    max_tokens: int = 16
    """Maximum number of output tokens. 0 with `echo`: return only the prompt, with log-probabilities if requested."""
    logprobs: int | None = None
    """Return log-probabilities, with this many most likely tokens per position."""
    echo: bool = False
    """Prepend the prompt to the text."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as BOS, to the prompt."""


def text_content(types: Collection[str], more_keys: Collection[str] = ()) -> Callable[[Any], str]:
    """Create a validator for text, or a list of text parts, which it joins with newlines.

    Args:
        types: of the parts.
        more_keys: keys without effect that parts may have besides `type` and `text`.
    """
    known = {"type", "text", *more_keys}

    def check(value: Any) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of text parts")
        check_length(value, MAX_MESSAGES)
        for index, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") not in types or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else None
                shown = f" ({kind[:40]!r})" if isinstance(kind, str) else ""
                raise ValueError(
                    f"part {index}{shown} is not a text part, of type {' or '.join(types)}: this server takes only text"
                )
            if unknown := sorted(part.keys() - known):
                raise ValueError(f"part {index} has an unknown field {unknown[0][:40]!r}")
        return "\n".join(part["text"] for part in value)

    return check


_TextParts = Annotated[list[dict[str, str]], Field(max_length=MAX_MESSAGES)]


class Message(RequestModel):
    """A message of a conversation."""

    examples: ClassVar = {
        "role": "user",
        "content": "What is the moon?",
        "name": "Ada",
        "tool_call_id": "call_1",
        "tool_calls": [MessageToolCall.examples],
    }
    rules: ClassVar = MESSAGE_RULES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Author of the message. `developer`, OpenAI's newer name of `system`, is rendered as `system`."""
    content: Annotated[str | None, PlainValidator(text_content(["text"]), json_schema_input_type=str | _TextParts)] = (
        None
    )
    """Text, or a list of text parts, which are joined with newlines."""
    name: Id | None = None
    """Passed to the chat template."""
    tool_call_id: Id | None = None
    """With role `tool`: id of the call whose result this is. Passed to the chat template."""
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS)] = Field(default=[])
    """With role `assistant`: the calls that the message made."""

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise FieldError("content", "is missing")
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", 'requires role "assistant"')
        return self

    @property
    def num_characters(self) -> int:
        """Characters of its texts."""
        texts = sum(len(text or "") for text in (self.content, self.name, self.tool_call_id))
        return texts + sum(call.num_characters for call in self.tool_calls)

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates expect."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.role == "developer":
            message["role"] = "system"
        if self.tool_calls:
            message["tool_calls"] = [call.for_template for call in self.tool_calls]
        extra = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in extra.items() if value is not None}


_TEMPLATE_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_characters",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of the rendering function, which template variables must not override."""


TEMPLATE_VARIABLES = {"enable_thinking": "in chat_template_kwargs"}
"""Variables of chat templates that clients write into the body, as of some other servers."""


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Refuse variables that would override arguments of the rendering function.

    Raises:
        FieldError: names the variable.
    """
    if reserved := sorted(variables.keys() & _TEMPLATE_ARGUMENTS):
        raise FieldError("chat_template_kwargs", f"must not set {reserved[0]!r}")


class ChatCompletionRequest(OpenAIFields, ToolFields):
    """Body of `/v1/chat/completions`."""

    examples: ClassVar = {
        "messages": [{"role": "user", "content": "What is the moon?"}],
        "max_completion_tokens": 64,
        "max_tokens": 64,
        "logprobs": True,
        "top_logprobs": 5,
        "add_generation_prompt": True,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "verbosity": "low",
        "parallel_tool_calls": False,
    }
    rules: ClassVar = CHAT_RULES
    elsewhere: ClassVar = TEMPLATE_VARIABLES

    messages: Annotated[list[Message], FailFast(), Field(max_length=MAX_MESSAGES)]
    """The conversation."""
    max_completion_tokens: int | None = None
    """Maximum number of output tokens. Default: up to the model's length."""
    max_tokens: int | None = None
    """Deprecated alias of `max_completion_tokens` (OpenAI)."""
    logprobs: bool = False
    """Return log-probabilities."""
    top_logprobs: int | None = None
    """Number of most likely tokens to return per position. Only with `logprobs`."""
    add_generation_prompt: bool | None = None
    """End the prompt with the start of an assistant message. Default: true, unless `continue_final_message` is set."""
    continue_final_message: bool = False
    """Continue the last message instead of starting a new one."""
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=MAX_TEMPLATE_VARIABLES)
    """Variables for the chat template."""
    reasoning_effort: Id | None = None
    """A variable for the chat template; without effect if the template does not use it."""
    verbosity: Id | None = None
    """A variable for the chat template; without effect if the template does not use it."""

    parallel_tool_calls: bool = True
    """False: at most one tool call in an answer."""

    @property
    def template_options(self) -> dict[str, str]:
        """Fields that are variables for those chat templates that use them."""
        given = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {name: value for name, value in given.items() if value is not None}

    @model_validator(mode="after")
    def _check_chat_fields_together(self) -> Self:
        if not self.messages:
            raise FieldError("messages", "must not be an empty list")
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "requires logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise FieldError("max_tokens", "differs from max_completion_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError("continue_final_message", "contradicts add_generation_prompt")
        check_template_variables(self.chat_template_kwargs)
        return self
