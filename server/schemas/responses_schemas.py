"""The request body of `/v1/responses`, OpenAI's newer route for conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, model_validator

from .field_rules import REASONING_RULES, RESPONSES_INPUT_RULES, RESPONSES_RULES, TEXT_FORMAT_RULES
from .openai_schemas import (
    MAX_MESSAGES,
    MAX_TEMPLATE_VARIABLES,
    TEMPLATE_VARIABLES,
    ChatCompletionRequest,
    Message,
    OpenAIFields,
    check_template_variables,
    text_content,
)
from .request_schema import FieldError, Id, RequestModel
from .structured_outputs import Constraint, Schema

_TEXT_PARTS = ("input_text", "output_text")
_PART_KEYS = ("annotations", "logprobs", "prompt_cache_breakpoint")
"""Keys of text parts without effect: clients send the parts of an earlier response back whole."""
_WITH_LOGPROBS = "message.output_text.logprobs"


class InputMessage(RequestModel):
    """A message in `input`."""

    examples: ClassVar = {"role": "user", "content": "What is the moon?", "type": "message"}
    rules: ClassVar = RESPONSES_INPUT_RULES

    role: Literal["system", "developer", "user", "assistant"]
    """Author of the message."""
    content: Annotated[
        str,
        PlainValidator(
            text_content(_TEXT_PARTS, _PART_KEYS),
            json_schema_input_type=str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)],
        ),
    ]
    """Text, or a list of text parts: `{"type": "input_text", "text": …}`, or `output_text` of an earlier response."""
    type: Literal["message"] = "message"
    """The only type of item that this server takes."""


class TextFormat(RequestModel):
    """`text.format`."""

    examples: ClassVar = {
        "type": "json_schema",
        "name": "capital",
        "schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    rules: ClassVar = TEXT_FORMAT_RULES

    type: Literal["text", "json_object", "json_schema"]
    """`text`: no constraint. `json_object`: any JSON object. `json_schema`: JSON that matches the schema."""
    name: Id | None = None
    """Has no effect."""
    json_schema: Schema | None = Field(default=None, alias="schema")
    """Only with type `json_schema`."""

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError("schema", 'is required with type "json_schema", and only allowed with it')
        return self


class TextOptions(RequestModel):
    """`text`."""

    examples: ClassVar = {"format": TextFormat.examples, "verbosity": "low"}

    format: TextFormat | None = None
    """Structured output."""
    verbosity: Id | None = None
    """A variable for the chat template; without effect if the template does not use it."""


class ReasoningOptions(RequestModel):
    """`reasoning`."""

    examples: ClassVar = {"effort": "low"}
    rules: ClassVar = REASONING_RULES

    effort: Id | None = None
    """As `reasoning_effort` of `/v1/chat/completions`."""


class ResponsesChat(ChatCompletionRequest):
    """The conversation of a `ResponsesRequest`. Refusals name the fields of that request."""

    def constraints(self, at: str = "") -> Iterator[Constraint]:
        """Yield the constraints in these fields, and in `text.format`."""
        yield from super().constraints(at)
        if self.text_format is not None and self.text_format.type == "json_schema":
            yield Constraint({"json_schema": self.text_format.json_schema}, "text.format.schema")
        elif self.text_format is not None and self.text_format.type == "json_object":
            yield Constraint({"json_object": True}, "text.format")

    text_format: TextFormat | None = None
    """Structured output."""


def _messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Input = str | Annotated[list[InputMessage], Field(max_length=MAX_MESSAGES)]


class ResponsesRequest(OpenAIFields):
    """Body of `/v1/responses`."""

    examples: ClassVar = {
        "input": "What is the moon?",
        "instructions": "Answer in one sentence.",
        "max_output_tokens": 64,
        "text": TextOptions.examples,
        "reasoning": ReasoningOptions.examples,
        "include": [_WITH_LOGPROBS],
        "top_logprobs": 5,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    rules: ClassVar = RESPONSES_RULES
    elsewhere: ClassVar = TEMPLATE_VARIABLES

    input: Annotated[
        list[InputMessage],
        FailFast(),
        Field(max_length=MAX_MESSAGES),
        BeforeValidator(_messages, json_schema_input_type=_Input),
    ]
    """The user's message, or the conversation."""
    instructions: str | None = None
    """A system message before the conversation."""
    max_output_tokens: int | None = None
    """Maximum number of output tokens. Default: up to the model's length."""
    text: TextOptions | None = None
    """Format of the text."""
    reasoning: ReasoningOptions | None = None
    """Options of reasoning models."""
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=1)] = Field(default=[])
    """`message.output_text.logprobs`: return log-probabilities."""
    top_logprobs: int | None = None
    """Number of most likely tokens to return per position. Only with `include`."""
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=MAX_TEMPLATE_VARIABLES)
    """Variables for the chat template."""

    @model_validator(mode="after")
    def _check_response_fields_together(self) -> Self:
        for name in ("num_beams", "best_of", self.n_field):
            if getattr(self, name) not in (None, 1):
                raise FieldError(name, "must be 1: this route generates one output, /v1/chat/completions several")
        if self.usage_in_each_event:
            raise FieldError(
                "stream_options.continuous_usage_stats",
                "only the last event has token counts: use /v1/chat/completions",
            )
        if self.prompt_logprobs is not None:
            raise FieldError("prompt_logprobs", "is not in responses: use /v1/completions")
        if self.top_logprobs is not None and not self.include:
            raise FieldError("top_logprobs", f"requires include: [{_WITH_LOGPROBS!r}]")
        if not self.input:
            raise FieldError("input", "must not be empty")
        check_template_variables(self.chat_template_kwargs)
        return self

    @property
    def messages(self) -> list[Message]:
        """The conversation."""
        messages = [Message(role=each.role, content=each.content) for each in self.input]
        return messages if self.instructions is None else [Message(role="system", content=self.instructions), *messages]

    @property
    def chat(self) -> ResponsesChat:
        """The same request in the form of `/v1/chat/completions`. Its fields are valid already."""
        shared = {name: getattr(self, name) for name in OpenAIFields.model_fields}
        return ResponsesChat.model_construct(
            self.model_fields_set | {"messages"},
            **shared,
            messages=self.messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=bool(self.include),
            top_logprobs=self.top_logprobs,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            verbosity=None if self.text is None else self.text.verbosity,
            text_format=None if self.text is None else self.text.format,
        )
