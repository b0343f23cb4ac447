"""Conversations as prompts: what the chat template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest
from logitship.server.requests.request_validation import check_text_length
from logitship.server.schemas.openai_schemas import Message
from logitship.server.schemas.request_schema import IgnoredFields
from logitship.server.uploads.request_bodies import RequestWork


async def render_chat(
    engine: AsyncEngine,
    work: RequestWork,
    messages: Sequence[Message],
    *,
    at: str = "messages",
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any],
) -> list[int]:
    """Render a conversation with the model's chat template, and tokenize it.

    Args:
        engine: has the tokenizer.
        work: runs the template.
        messages: the conversation.
        at: its field in the request body.
        add_generation_prompt: end with the start of an assistant message; None: unless the last one is continued.
        continue_final_message: end within the last message.
        tools: functions that the template shows to the model.
        variables: variables for the template.

    Raises:
        BadRequest: the template refuses it, or it is too long.
    """
    tokenizer, max_model_len = engine.tokenizer, engine.model.max_model_len
    length = await work.run_if_large(_num_characters, messages)
    check_text_length(tokenizer, max_model_len, length, at)
    if tools:
        check_text_length(tokenizer, max_model_len, length + len(orjson.dumps(tools)), "tools")
        variables = {**variables, "tools": tools}
    try:
        return await work.run(
            tokenizer.apply_chat_template,
            await work.run_if_large(_for_template, messages),
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=continue_final_message,
            max_characters=max_model_len * tokenizer.longest_token,
            **variables,
        )
    except ValueError as error:
        raise BadRequest(f"{at}: {error}", param=at) from None


def used_options(
    engine: AsyncEngine,
    options: Mapping[str, str],
    ignored: IgnoredFields,
    names: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the fields that the chat template uses as variables.

    Args:
        engine: has the tokenizer.
        options: the fields, by the template's names.
        ignored: receives the client's names of the others.
        names: the client's names, where they differ.
    """
    used = {name: value for name, value in options.items() if engine.tokenizer.template_uses(name)}
    ignored.update(names.get(name, name) for name in options.keys() - used.keys())
    return used


def _num_characters(messages: Sequence[Message]) -> int:
    return sum(message.num_characters for message in messages)


def _for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.for_template() for message in messages]
