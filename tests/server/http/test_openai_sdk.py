"""The official SDK, unmodified: through a socket, and through transports without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
import uvicorn

from logitship.server.http.app import create_app

MESSAGES: list[Any] = [{"role": "user", "content": "a"}]


@pytest.fixture
def base_url(engine: Any) -> Iterator[str]:
    """A real server on a free port."""
    server = uvicorn.Server(uvicorn.Config(create_app(engine), host="127.0.0.1", port=0, log_level="error"))
    started = threading.Event()
    startup = server.startup

    async def startup_and_tell(*args: Any, **kwargs: Any) -> None:
        await startup(*args, **kwargs)
        started.set()

    server.startup = startup_and_tell  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    assert started.wait(30)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


def test_sync_client_through_a_socket(base_url: str, engine: Any, failing: Any) -> None:
    with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "logitship"
        completion = client.completions.create(model="tiny", prompt="a", logprobs=1, extra_body={"top_k": 5})
        assert completion.choices[0].text == "Hi!"
        assert completion.choices[0].logprobs.tokens[0] == "H"
        assert completion.usage.completion_tokens == 4
        chat = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1)
        assert chat.choices[0].message.content == "Hi!"
        assert chat.choices[0].logprobs.content[0].top_logprobs[0].token == "H"
        again: list[Any] = [*MESSAGES, chat.choices[0].message, *MESSAGES]
        assert client.chat.completions.create(model="tiny", messages=again).choices[0].finish_reason == "stop"
        stream = client.completions.create(model="tiny", prompt="a", stream=True)
        assert "".join(event.choices[0].text for event in stream) == "Hi!"
        with client.chat.completions.stream(model="tiny", messages=MESSAGES) as helper:
            assert helper.get_final_completion().choices[0].message.content == "Hi!"
        with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
            client.completions.create(model="gpt-4", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="temperature") as refused:
            client.completions.create(model="tiny", prompt="a", temperature=-1)
        assert refused.value.param == "temperature"
        engine.script = failing
        with pytest.raises(openai.BadRequestError, match="ZeroDivisionError"):
            client.completions.create(model="tiny", prompt="a")
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            list(client.completions.create(model="tiny", prompt="a", stream=True))


def test_disconnect_through_a_socket(base_url: str, engine: Any) -> None:
    engine.hangs = True
    with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt="a", stream=True)
        assert next(iter(stream)).choices[0].text == "H"
        assert engine.hung.wait(30)
        stream.close()
        assert engine.stream_closed.wait(30)


async def test_async_client(engine: Any) -> None:
    transport = httpx2.ASGITransport(create_app(engine))
    http = httpx2.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="any", http_client=http) as client:
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=2)
        assert chat.choices[0].message.content == "Hi"
        assert chat.choices[0].finish_reason == "length"
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options=options
        )
        events = [event async for event in stream]
        assert "".join(event.choices[0].delta.content for event in events if event.choices) == "Hi!"
        assert events[-1].usage.completion_tokens == 4


async def test_concurrent_requests(engine: Any) -> None:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(create_app(engine)))
    async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="any", http_client=http) as client:
        answers = await asyncio.gather(
            *(client.completions.create(model="tiny", prompt="a", max_tokens=1 + i % 3) for i in range(12))
        )
    assert [answer.choices[0].text for answer in answers] == ["H", "Hi", "Hi!"] * 4
