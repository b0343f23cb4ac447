"""Chat conversations, rendered to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.requests.request_validation import Prompt, check_text_length
from logitship.server.schemas.openai_schemas import Message, check_template_variables
from logitship.server.schemas.request_schema import parse_model

from .request_builder import refusals_translated

_TEMPLATE_DATA = frozenset({"documents", "tools"})
"""Arguments of the rendering function that may be given as variables: `LLM.chat` has no parameters for them."""


def render_conversation(
    engine: AsyncEngine,
    conversation: Sequence[Mapping[str, Any]],
    at: str,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template: str | None,
    template_kwargs: Mapping[str, Any],
) -> Prompt:
    """Render a conversation with the chat template.

    Args:
        engine: its tokenizer has the template.
        conversation: the messages, in the format of `/v1/chat/completions`.
        at: name of the conversation in error messages.
        add_generation_prompt: append the start of an assistant message.
        continue_final_message: leave the last message open.
        chat_template: a template to use instead of the model's.
        template_kwargs: variables for the template.

    Raises:
        InvalidRequest: a message is malformed or too long.
        ValueError: a variable has a reserved name; or the template rejects the messages, or renders an empty prompt.
    """
    if not conversation:
        raise ValueError(f"{at}: must not be an empty list")
    check_template_variables({name: value for name, value in template_kwargs.items() if name not in _TEMPLATE_DATA})
    template: dict[str, Any] = {} if chat_template is None else {"chat_template": chat_template}
    with refusals_translated():
        messages = [parse_model(Message, message, f"{at}[{index}]") for index, message in enumerate(conversation)]
        characters = sum(len(message.content or "") for message in messages)
        check_text_length(engine.tokenizer, engine.model.max_model_len, characters, at)
    token_ids = engine.tokenizer.apply_chat_template(
        [message.for_template() for message in messages],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **template,
        **template_kwargs,
    )
    if not token_ids:
        raise ValueError(f"{at}: the chat template renders an empty prompt")
    return Prompt(token_ids, engine.tokenizer.decode(token_ids))
