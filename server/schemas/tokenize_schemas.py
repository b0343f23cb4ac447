"""Bodies and responses of `/tokenize` and `/detokenize`, with SGLang's and vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NotRequired, Self

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from .documented import documented
from .field_rules import TOKENIZE_RULES
from .openai_schemas import MAX_MESSAGES, MAX_TEMPLATE_VARIABLES, TEMPLATE_VARIABLES, Message, check_template_variables
from .request_schema import FieldError, Id, RequestModel
from .sglang_schemas import InputIds, OneOrMoreTexts
from .tool_schemas import ToolFields

_WITH_MESSAGES = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
)
"""Fields about the chat template."""


class TokenizeRequest(ToolFields):
    """Body of `/tokenize`."""

    examples: ClassVar = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": "The capital of France is",
        "messages": [{"role": "user", "content": "What is the moon?"}],
        "add_special_tokens": False,
        "add_generation_prompt": True,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "return_token_strs": True,
    }
    rules: ClassVar = TOKENIZE_RULES
    elsewhere: ClassVar = TEMPLATE_VARIABLES

    model: Id | None = None
    """Name of the model; optional, since there is only one."""
    prompt: OneOrMoreTexts | None = None
    """The text, or a list of texts."""
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] | None = None
    """A conversation, which the chat template renders. Alternative to `prompt`."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as BOS, to `prompt`. The chat template has its own."""
    add_generation_prompt: bool | None = None
    """With `messages`: end with the start of an assistant message. Default: true, unless `continue_final_message`."""
    continue_final_message: bool = False
    """With `messages`: continue the last message."""
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=MAX_TEMPLATE_VARIABLES)
    """With `messages`: variables for the chat template."""
    reasoning_effort: Id | None = None
    """With `messages`: a variable for the chat template; without effect if the template does not use it."""
    return_token_strs: bool = False
    """Return the tokens as they are in the vocabulary, too."""

    @property
    def template_options(self) -> dict[str, str]:
        """Fields that are variables for those chat templates that use them."""
        return {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        if self.messages == []:
            raise FieldError("messages", "must not be an empty list")
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError("continue_final_message", "contradicts add_generation_prompt")
        for name in _WITH_MESSAGES if self.messages is None else ():
            if getattr(self, name):
                raise FieldError(name, "requires messages")
        check_template_variables(self.chat_template_kwargs)
        return self


class DetokenizeRequest(RequestModel):
    """Body of `/detokenize`."""

    examples: ClassVar = {"model": "SmolLM2-135M-Instruct", "tokens": [504, 3575], "skip_special_tokens": True}

    model: Id | None = None
    """Name of the model; optional, since there is only one."""
    tokens: InputIds
    """Token ids, or a list of lists of them."""
    skip_special_tokens: bool = True
    """Leave special tokens out of `text`."""


@documented({"tokens": [504, 3575], "count": 2, "max_model_len": 8192, "token_strs": ["The", "Ġcapital"]})
class TokenizeResponse(TypedDict):
    """The tokens of a text. For a list of texts, each but `max_model_len` is a list with one entry per text."""

    tokens: list[int] | list[list[int]]
    """Token ids."""
    count: int | list[int]
    """Their number."""
    max_model_len: int
    """Maximum length of prompt plus output, in tokens."""
    token_strs: NotRequired[list[str] | list[list[str]]]
    """The tokens as they are in the vocabulary, if requested."""


@documented({"text": "The capital", "prompt": "The capital"})
class DetokenizeResponse(TypedDict):
    """The text of tokens. For a list of lists, each is a list with one text per entry."""

    text: str | list[str]
    """The text (SGLang), by `skip_special_tokens`."""
    prompt: str | list[str]
    """The text with special tokens (vLLM)."""
