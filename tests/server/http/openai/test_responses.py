"""`/v1/responses`, through OpenAI's SDK and raw."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest

from logitship.server.http.app import create_app
from tests.helpers.answers import error_of

CONVERSATION: list[Any] = [
    {"role": "user", "content": "a"},
    {
        "type": "message",
        "id": "msg_0",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
    },
    {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
]


def talk(engine: Any, conversation: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
    async def run() -> None:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(create_app(engine)))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="any", http_client=http, max_retries=0
        ) as client:
            await conversation(client)

    asyncio.run(run())


def test_whole_response(engine: Any) -> None:
    async def conversation(client: openai.AsyncOpenAI) -> None:
        response = await client.responses.create(
            model="tiny", input=CONVERSATION, instructions="b", include=["message.output_text.logprobs"]
        )
        assert (response.output_text, response.status) == ("Hi!", "completed")
        (message,) = response.output
        assert message.type == "message"
        (part,) = message.content
        assert part.type == "output_text"
        assert part.logprobs
        assert part.logprobs[0].token == "H"
        assert response.usage
        assert response.usage.output_tokens == 4
        again = await client.responses.create(model="tiny", input=[*CONVERSATION[:1], message])
        assert again.id != response.id
        cut = await client.responses.create(model="tiny", input="a", max_output_tokens=2)
        assert (cut.output_text, cut.status) == ("Hi", "incomplete")
        assert cut.incomplete_details
        assert cut.incomplete_details.reason == "max_output_tokens"

    talk(engine, conversation)


def test_stream(engine: Any) -> None:
    async def conversation(client: openai.AsyncOpenAI) -> None:
        events = [event async for event in await client.responses.create(model="tiny", input="a", stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        names = [event.type for event in events]
        assert names[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert names[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hi!"
        async with client.responses.stream(model="tiny", input="a") as helper:
            assert (await helper.get_final_response()).output_text == "Hi!"

    talk(engine, conversation)


def test_failure(engine: Any, failing: Any) -> None:
    engine.script = failing

    async def conversation(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="ZeroDivisionError"):
            await client.responses.create(model="tiny", input="a")
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            _ = [event async for event in await client.responses.create(model="tiny", input="a", stream=True)]

    talk(engine, conversation)


def test_same_prompt_as_the_chat(client: Any, engine: Any) -> None:
    shared = {"top_k": 5, "seed": 3}
    client.post("/v1/responses", {"input": CONVERSATION, "instructions": "b", "max_output_tokens": 3, **shared})
    messages = [
        {"role": "system", "content": "b"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 3, **shared})
    ours, chats = engine.requests[-2:]
    assert ours.prompt_token_ids == chats.prompt_token_ids
    assert ours.sampling_params == chats.sampling_params


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "is missing"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"input": "a", "conversation": "conv_1"}, "conversation", "send the whole conversation"),
        ({"input": "a", "background": True}, "background", "not stored"),
        ({"input": "a", "truncation": "auto"}, "truncation", "never cut"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", "use /v1/chat/completions"),
        ({"input": "a", "n": 2}, "n", "one output"),
        ({"input": "a", "num_return_sequences": 2}, "num_return_sequences", "one output"),
        ({"input": "a", "best_of": 2}, "best_of", "must be 1"),
        ({"input": "a", "num_beams": 4}, "num_beams", "must be 1"),
        (
            {"input": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "only the last event",
        ),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs", "requires include"),
        ({"input": "a", "include": ["reasoning.encrypted_content"]}, "include[0]", "logprobs"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens", "max_output_tokens"),
        ({"input": "a" * 600}, "input", "input: has 600 characters"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
        ({"input": [{"type": "reasoning", "role": "user", "content": "a"}]}, "input[0].type", "message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "only text"),
        (
            {"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            "input[0].content",
            "part 0 ('text') is not a text part, of type input_text or output_text",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "colour": "red"}]}]},
            "input[0].content",
            "part 0 has an unknown field 'colour'",
        ),
    ],
)
def test_refusals_name_the_field(client: Any, body: dict[str, Any], param: str, message: str) -> None:
    error = error_of(client.post("/v1/responses", body))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert message in error["message"]
