"""The answers of OpenAI's routes, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from .documented import documented, example_of
from .response_schemas import DIGEST, ReceiptObject, TokenTraceObject

_RECEIPT = {"digest": DIGEST, "name": "Lipogram", "steps": 4, "milliseconds": 0.869}
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
    """Where a prompt's tokens came from."""

    cached_tokens: int
    """Those whose keys and values were copied from another continuation."""


@documented(_USAGE)
class UsageInfo(TypedDict):
    """Token counts. A prompt counts once, however many continuations it has."""

    prompt_tokens: int
    """Tokens of the prompts."""
    completion_tokens: int
    """Tokens that were generated."""
    total_tokens: int
    """Both together."""
    prompt_tokens_details: PromptTokensDetails
    """Where the prompts' tokens came from."""


@documented({"logprob": -1.2, "rank": 1, "decoded_token": " capital"})
class PromptLogprob(TypedDict):
    """A token at a position of a prompt, as vLLM has it."""

    logprob: float
    """Its log-probability."""
    rank: int
    """1 for the most likely token there."""
    decoded_token: str
    """Its text."""


@documented(
    {
        "finish_reason": "stop",
        "stop_reason": "\n",
        "receipts": [_RECEIPT],
        "token_ids": [7042],
        "trace": _TRACE,
    }
)
class ChoiceEnding(TypedDict):
    """Why a choice ended, and what belongs to its tokens."""

    finish_reason: Literal["stop", "length", "abort"] | None
    """Why it ended; null while it runs."""
    stop_reason: NotRequired[str | int | None]
    """The stop string or token of the request that ended it; null for the model's own end."""
    receipts: NotRequired[list[ReceiptObject]]
    """At the end, if the request carried processors: one each."""
    token_ids: NotRequired[list[int]]
    """With `return_token_ids`: the output, or the event's new tokens."""
    trace: NotRequired[list[TokenTraceObject]]
    """With `trace`: one entry a token of the output, or a new token of the event."""


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
    """The name to ask for it by."""
    object: Literal["model"]
    """The type."""
    created: int
    """When the server started, in seconds since 1970."""
    owned_by: Literal["logitship"]
    """Who serves it."""
    root: str
    """Where it was loaded from."""
    parent: None
    """Always null."""
    max_model_len: int
    """Longest prompt and output together, in tokens."""


@documented({"object": "list", "data": [example_of(ModelCard)]})
class ModelList(TypedDict):
    """The models."""

    object: Literal["list"]
    """The type."""
    data: list[ModelCard]
    """There is one."""


@documented(
    {
        "created": 1793500000,
        "model": "SmolLM2-135M-Instruct",
        "system_fingerprint": None,
    }
)
class _Head(TypedDict):
    """What every answer and every event begins with."""

    id: str
    """Id of the request."""
    created: int
    """When the request came, in seconds since 1970."""
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
    """Log-probabilities of a text's tokens."""

    tokens: list[str]
    """The tokens' texts."""
    token_logprobs: list[float | None]
    """Their log-probabilities; null for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """Of each position, the most likely tokens and the one that stands there."""
    text_offset: list[int]
    """Where each token begins in the text, in characters."""


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
    """A continuation, or what an event adds to it."""

    index: int
    """Continuation `j` of prompt `i` has `i * n + j`."""
    text: str
    """The text, or what is new of it."""
    logprobs: CompletionLogprobs | None
    """With `logprobs`: those of the tokens."""
    prompt_token_ids: NotRequired[list[int]]
    """With `return_token_ids`: the prompt, once."""
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
    """An answer of `/v1/completions`."""

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
    """An event of a stream of `/v1/completions`: what is new of one continuation."""

    object: Literal["text_completion"]
    """The type."""
    choices: list[CompletionChoice]
    """One; none in the event with the usage."""
    usage: NotRequired[UsageInfo | None]
    """With `stream_options`: token counts; null in the events before the last."""


@documented(_TOKEN)
class ChatTokenLogprob(TypedDict):
    """A token and its log-probability."""

    token: str
    """Its text."""
    logprob: float
    """Its log-probability; -9999.0 stands for minus infinity."""
    bytes: list[int]
    """Its text in UTF-8, which may be a part of a character."""


@documented({"top_logprobs": [_TOKEN]})
class ChatLogprobsContent(ChatTokenLogprob):
    """A token of an output."""

    top_logprobs: list[ChatTokenLogprob]
    """The most likely tokens of this position, most likely first."""


@documented({"content": [{**_TOKEN, "top_logprobs": [_TOKEN]}], "refusal": None})
class ChatLogprobs(TypedDict):
    """Log-probabilities of a message's tokens."""

    content: list[ChatLogprobsContent]
    """One entry a token."""
    refusal: None
    """Always null."""


@documented({"role": "assistant", "content": "The moon is a satellite.", "refusal": None})
class ChatMessage(TypedDict):
    """A message of the model."""

    role: Literal["assistant"]
    """Who speaks."""
    content: str
    """The text."""
    refusal: None
    """Always null."""


@documented({"index": 0, "message": example_of(ChatMessage), "logprobs": example_of(ChatLogprobs)})
class ChatChoice(ChoiceEnding):
    """A continuation of a conversation."""

    index: int
    """Which of the `n`."""
    message: ChatMessage
    """The message."""
    logprobs: ChatLogprobs | None
    """With `logprobs`: those of the tokens."""


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
    """An answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    """The type."""
    choices: list[ChatChoice]
    """The continuations."""
    usage: UsageInfo
    """Token counts of all of them."""
    prompt_token_ids: NotRequired[list[int]]
    """With `return_token_ids`: the prompt that the chat template made."""
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    """With `prompt_logprobs`: one entry a position, with tokens by their ids."""


@documented({"role": "assistant", "content": "The"})
class DeltaMessage(TypedDict):
    """What is new of a message."""

    role: NotRequired[Literal["assistant"]]
    """In the first event."""
    content: str
    """The new text."""


@documented({"index": 0, "delta": {"content": "The"}, "logprobs": example_of(ChatLogprobs)})
class ChatStreamChoice(ChoiceEnding):
    """What is new of a continuation of a conversation."""

    index: int
    """Which of the `n`."""
    delta: DeltaMessage
    """What is new of the message."""
    logprobs: ChatLogprobs | None
    """With `logprobs`: those of the new tokens."""


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
    """An event of a stream of `/v1/chat/completions`."""

    object: Literal["chat.completion.chunk"]
    """The type."""
    choices: list[ChatStreamChoice]
    """One; none in the event with the usage."""
    usage: NotRequired[UsageInfo | None]
    """With `stream_options`: token counts; null in the events before the last."""
