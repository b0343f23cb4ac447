"""Responses of OpenAI's routes."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from .documented import documented, example_of
from .response_schemas import DIGEST, ReceiptObject, SamplingMaskFields, TokenTraceObject

_RECEIPT = {"digest": DIGEST, "name": "Lipogram", "steps": 4, "milliseconds": 0.869, "forced_steps": 0}
_USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 4,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_TOKEN = {"token": " Paris", "logprob": -0.105, "bytes": [32, 80, 97, 114, 105, 115]}
_PROMPT_LOGPROBS = [None, {"2040": {"logprob": -1.2, "rank": 1, "decoded_token": " capital"}}]
_TRACE = [example_of(TokenTraceObject)]


@documented({"cached_tokens": 0})
class PromptTokensDetails(TypedDict):
    """Cached tokens of the prompts."""

    cached_tokens: int
    """Tokens whose KV cache was reused."""


@documented(_USAGE)
class UsageInfo(TypedDict):
    """Token counts. A prompt counts once, regardless of the number of continuations."""

    prompt_tokens: int
    """Tokens of the prompts."""
    completion_tokens: int
    """Generated tokens."""
    total_tokens: int
    """Sum of both."""
    prompt_tokens_details: PromptTokensDetails
    """Breakdown of the prompt tokens."""


@documented({"logprob": -1.2, "rank": 1, "decoded_token": " capital"})
class PromptLogprob(TypedDict):
    """A token at a position of a prompt, in vLLM's format."""

    logprob: float
    """Log-probability."""
    rank: int
    """1 for the most likely token of the position."""
    decoded_token: str
    """Text."""


@documented(
    {
        "finish_reason": "stop",
        "stop_reason": "\n",
        "receipts": [_RECEIPT],
        "token_ids": [7042],
        **example_of(SamplingMaskFields),
        "trace": _TRACE,
    }
)
class ChoiceEnding(SamplingMaskFields):
    """Fields common to all choices."""

    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    """Reason for the end of the generation; null while it runs. `tool_calls`: as `stop`, and the model calls a tool."""
    stop_reason: NotRequired[str | int | None]
    """The request's stop string, stop pattern or stop token that ended it; null for the model's own EOS token."""
    receipts: NotRequired[list[ReceiptObject]]
    """At the end, if the request had processors: one per processor."""
    token_ids: NotRequired[list[int]]
    """With `return_token_ids`: the output's tokens, or the new tokens of a stream event."""
    trace: NotRequired[list[TokenTraceObject]]
    """With `trace`: one entry per token of the output, or per new token of a stream event."""


@documented(
    {
        "id": "SmolLM2-135M-Instruct",
        "object": "model",
        "created": 1793500000,
        "owned_by": "logitship",
        "root": "SmolLM2-135M-Instruct",
        "parent": None,
        "max_model_len": 8192,
    }
)
class ModelCard(TypedDict):
    """A model."""

    id: str
    """Name of the model in requests."""
    object: Literal["model"]
    """Object type."""
    created: int
    """Start time of the server, as a Unix timestamp."""
    owned_by: Literal["logitship"]
    """The owner."""
    root: str
    """Path that the model was loaded from."""
    parent: None
    """Always null."""
    max_model_len: int
    """Maximum length of prompt plus output, in tokens."""


@documented({"object": "list", "data": [example_of(ModelCard)]})
class ModelList(TypedDict):
    """The models."""

    object: Literal["list"]
    """Object type."""
    data: list[ModelCard]
    """The models: there is one."""


@documented(
    {
        "created": 1793500000,
        "model": "SmolLM2-135M-Instruct",
        "system_fingerprint": None,
    }
)
class _Head(TypedDict):
    """Fields common to all responses and stream events."""

    id: str
    """Request id."""
    created: int
    """Arrival time of the request, as a Unix timestamp."""
    model: str
    """The model's name."""
    system_fingerprint: None
    """Always null."""


@documented(
    {
        "tokens": [" Paris"],
        "token_logprobs": [-0.105],
        "top_logprobs": [{" Paris": -0.105, " a": -3.2}],
        "text_offset": [0],
    }
)
class CompletionLogprobs(TypedDict):
    """Log-probabilities of a choice's tokens."""

    tokens: list[str]
    """Texts of the tokens."""
    token_logprobs: list[float | None]
    """Log-probabilities of the tokens; null for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """Per position, the most likely tokens and the actual one, by text. Of two with the same text, such as
    parts of characters, one is `token_id:` and its id; the actual token never is."""
    text_offset: list[int]
    """Offset of each token in the text, in characters. One that continues a character has the character's."""


@documented(
    {
        "index": 0,
        "text": " Paris.",
        "logprobs": example_of(CompletionLogprobs),
        "prompt_token_ids": [504, 3575, 282, 4649, 314],
        "prompt_logprobs": _PROMPT_LOGPROBS,
    }
)
class CompletionChoice(ChoiceEnding):
    """A continuation, or the new part of one in a stream event."""

    index: int
    """`i * n + j` for continuation `j` of prompt `i`."""
    text: str
    """The text, or the new text of a stream event."""
    logprobs: CompletionLogprobs | None
    """With `logprobs`: log-probabilities of the tokens."""
    prompt_token_ids: NotRequired[list[int]]
    """With `return_token_ids`: the prompt; in a stream, only in its first event."""
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    """With `prompt_logprobs`: one entry a position, with tokens by their ids."""


@documented(
    {
        "id": "cmpl-6f2c",
        "object": "text_completion",
        "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": _USAGE,
    }
)
class CompletionResponse(_Head):
    """A response of `/v1/completions`."""

    object: Literal["text_completion"]
    """The type."""
    choices: list[CompletionChoice]
    """The continuations."""
    usage: UsageInfo
    """Token counts of all of them."""


@documented(
    {
        "id": "cmpl-6f2c",
        "object": "text_completion",
        "choices": [{"index": 0, "text": " Paris", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        "usage": _USAGE,
    }
)
class CompletionStreamResponse(_Head):
    """A stream event of `/v1/completions`: the new part of one continuation."""

    object: Literal["text_completion"]
    """The type."""
    choices: list[CompletionChoice]
    """One; none in the event with the usage."""
    usage: NotRequired[UsageInfo | None]
    """With `include_usage`: token counts in the last event, null in others; with `continuous_usage_stats`: in each."""


@documented(_TOKEN)
class ChatTokenLogprob(TypedDict):
    """A token with its log-probability."""

    token: str
    """Text."""
    logprob: float
    """Log-probability; -9999.0 means minus infinity."""
    bytes: list[int]
    """UTF-8 bytes, possibly of only a part of a character."""


@documented({"top_logprobs": [_TOKEN]})
class ChatLogprobsContent(ChatTokenLogprob):
    """A position of an output."""

    top_logprobs: list[ChatTokenLogprob]
    """The most likely tokens at this position, most likely first."""


@documented({"content": [{**_TOKEN, "top_logprobs": [_TOKEN]}], "refusal": None})
class ChatLogprobs(TypedDict):
    """Log-probabilities of a choice's message."""

    content: list[ChatLogprobsContent]
    """One entry per token."""
    refusal: None
    """Always null."""


@documented({"name": "get_weather", "arguments": '{"city": "Paris"}'})
class CalledFunctionObject(TypedDict):
    """The function that a tool call calls."""

    name: NotRequired[str]
    """Its name; in a stream only in the first part of the call."""
    arguments: str
    """Its arguments, as JSON text, or the new part of that text in a stream event."""


@documented({"id": "call_6f2c", "type": "function", "function": example_of(CalledFunctionObject)})
class ToolCallObject(TypedDict):
    """A tool call."""

    id: str
    """Its id, which the message with the result repeats."""
    type: Literal["function"]
    """The type."""
    function: CalledFunctionObject
    """The function and its arguments."""


@documented({"index": 0, "id": "call_6f2c", "type": "function", "function": example_of(CalledFunctionObject)})
class ToolCallDelta(TypedDict):
    """The new part of a tool call."""

    index: int
    """Index of the call in the message."""
    id: NotRequired[str]
    """Id of the call; only in its first part."""
    type: NotRequired[Literal["function"]]
    """The type; only in its first part."""
    function: CalledFunctionObject
    """The function and the new part of its arguments."""


@documented(
    {
        "role": "assistant",
        "content": "The moon is a satellite.",
        "refusal": None,
        "tool_calls": [example_of(ToolCallObject)],
    }
)
class ChatMessage(TypedDict):
    """A message generated by the model."""

    role: Literal["assistant"]
    """Author of the message."""
    content: str | None
    """The text; null if there are only tool calls."""
    refusal: None
    """Always null."""
    tool_calls: NotRequired[list[ToolCallObject]]
    """The tool calls, if there are any."""


@documented({"index": 0, "message": example_of(ChatMessage), "logprobs": example_of(ChatLogprobs)})
class ChatChoice(ChoiceEnding):
    """A generated message."""

    index: int
    """Index among the `n` choices."""
    message: ChatMessage
    """The message."""
    logprobs: ChatLogprobs | None
    """With `logprobs`: log-probabilities of the tokens."""


@documented(
    {
        "id": "chatcmpl-6f2c",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": example_of(ChatMessage),
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": _USAGE,
        "prompt_token_ids": [504, 3575],
        "prompt_logprobs": _PROMPT_LOGPROBS,
    }
)
class ChatCompletionResponse(_Head):
    """A response of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    """The type."""
    choices: list[ChatChoice]
    """The continuations."""
    usage: UsageInfo
    """Token counts of all of them."""
    prompt_token_ids: NotRequired[list[int]]
    """With `return_token_ids`: the prompt, as rendered by the chat template."""
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    """With `prompt_logprobs`: one entry a position, with tokens by their ids."""


@documented({"role": "assistant", "content": "The", "tool_calls": [example_of(ToolCallDelta)]})
class DeltaMessage(TypedDict):
    """The new part of a message."""

    role: NotRequired[Literal["assistant"]]
    """Only in the first event."""
    content: NotRequired[str | None]
    """The new text."""
    tool_calls: NotRequired[list[ToolCallDelta]]
    """New parts of tool calls."""


@documented({"index": 0, "delta": {"content": "The"}, "logprobs": example_of(ChatLogprobs)})
class ChatStreamChoice(ChoiceEnding):
    """The new part of a generated message."""

    index: int
    """Index among the `n` choices."""
    delta: DeltaMessage
    """The new part of the message."""
    logprobs: ChatLogprobs | None
    """With `logprobs`: log-probabilities of the new tokens."""


@documented(
    {
        "id": "chatcmpl-6f2c",
        "object": "chat.completion.chunk",
        "choices": [
            {"index": 0, "delta": {"content": "The"}, "logprobs": None, "finish_reason": None, "stop_reason": None}
        ],
        "usage": _USAGE,
    }
)
class ChatCompletionStreamResponse(_Head):
    """A stream event of `/v1/chat/completions`."""

    object: Literal["chat.completion.chunk"]
    """The type."""
    choices: list[ChatStreamChoice]
    """One; none in the event with the usage."""
    usage: NotRequired[UsageInfo | None]
    """With `include_usage`: token counts in the last event, null in others; with `continuous_usage_stats`: in each."""
