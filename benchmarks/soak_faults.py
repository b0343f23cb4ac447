"""Requests of the soak test that must fail, each in its own way, and those whose clients disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing, suppress
from typing import Any

from soak_processors import FAULTS, FIRST_TOKEN, counting, failing, forcing, unloadable
from soak_requests import GREEDY, RequestContext, expect, kind

from logitship import GenerationError

_LONG = 60
"""Output tokens of a request that is not to reach its end."""

_MALFORMED: tuple[tuple[str, str, bytes, int], ...] = (
    ("POST", "/generate", b"{", 400),
    ("POST", "/generate", b"[]", 400),
    ("POST", "/generate", b"{}", 400),
    ("POST", "/generate", b'{"text": "a", "unknown": 1}', 400),
    ("POST", "/generate", b'{"text": "a", "sampling_params": {"temperature": -1}}', 400),
    ("POST", "/generate", b'{"text": "a", "sampling_params": {"max_new_tokens": 100000}}', 400),
    ("POST", "/generate", b'{"text": "a", "sampling_params": {"regex": "("}}', 400),
    ("POST", "/generate", b'{"input_ids": [99999999]}', 400),
    ("POST", "/generate", b'{"text": "a", "custom_logit_processor": "not JSON"}', 400),
    ("POST", "/generate", b'{"text": "a", "custom_logit_processor": {"name": "nobody"}}', 400),
    ("POST", "/generate", b'{"text": "a", "custom_logit_processor": {"callable": "80"}}', 400),
    ("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": "5"}', 400),
    ("POST", "/v1/completions", b'{"prompt": "a", "model": "another"}', 404),
    ("POST", "/v1/chat/completions", b'{"messages": []}', 400),
    ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": 5}]}', 400),
    ("POST", "/v1/processors", b"{}", 400),
    ("DELETE", "/v1/processors/nobody", b"", 404),
    ("GET", "/generate", b"", 405),
    ("GET", "/nowhere", b"", 404),
)


@kind(45)
async def malformed(at: RequestContext) -> None:
    """Send malformed requests, which are refused before anything runs."""
    method, path, body, status = at.random.choice(_MALFORMED)
    response = await at.http.request(method, path, content=body)
    expect(response.status_code == status and "error" in response.json(), (path, body, response.text))


@kind(10)
async def unloadable_class(at: RequestContext) -> None:
    """Ship a class that does not load, which is refused with the reason."""
    body = {"text": at.known().prompt, "custom_logit_processor": unloadable(at.number)}
    response = await at.post("/generate", body)
    expect(response.status_code == 400 and f"never loads {at.number}" in response.text, response.text)


async def _fault(at: RequestContext, what: str) -> None:
    processor = failing(what, at.random.choice([0, 2]), at.class_number())
    body = {
        "text": at.known().prompt,
        "sampling_params": {"max_new_tokens": 5, "ignore_eos": True},
        "custom_logit_processor": processor,
    }
    response = await at.post("/generate", body)
    error = response.json().get("error", {})
    expect(response.status_code == 400 and error.get("type") == "ProcessorFault", response.text)
    expect(error["kind"] in FAULTS[what][1], (what, error))


@kind(30)
async def fault(at: RequestContext) -> None:
    """Ship a class that breaks the contract but leaves its process alive."""
    await _fault(at, at.random.choice(["raises", "leaves NaN", "another shape", "no tensor"]))


@kind(6)
async def exiting_class(at: RequestContext) -> None:
    """Ship a class that ends its process."""
    await _fault(at, "exits")


@kind(3)
async def endless_loop(at: RequestContext) -> None:
    """Ship a class that never answers. All requests wait until its process is killed at the deadline."""
    await _fault(at, "loops")


@kind(3)
async def memory_hog(at: RequestContext) -> None:
    """Ship a class that allocates without end."""
    await _fault(at, "takes all memory")


@kind(15)
async def fault_beside_others(at: RequestContext) -> None:
    """Let one row raise: it ends alone, and another of the same class continues."""
    first = FIRST_TOKEN + at.random.randrange(40_000)
    options: dict[str, Any] = {"processor": counting(at.number % 4), "max_new_tokens": 6, "ignore_eos": True}
    prompt = at.known().prompt
    failed, went_on = await asyncio.gather(
        at.client.generate(prompt, params={"first": first, "fail_at": at.random.randrange(5)}, **options),
        at.client.generate(prompt, params={"first": first}, **options),
        return_exceptions=True,
    )
    expect(isinstance(failed, GenerationError) and failed.type == "ProcessorFault", failed)
    expect(not isinstance(went_on, BaseException), went_on)
    assert not isinstance(went_on, BaseException)
    expect(went_on.output_ids == tuple(range(first, first + 6)), went_on)


@kind(8)
async def fault_in_a_stream(at: RequestContext) -> None:
    """Expect the sampled tokens in the stream, and then the error."""
    first, ids = FIRST_TOKEN + at.random.randrange(40_000), list[int]()
    stream = at.client.generate_stream(
        at.known().prompt, processor=counting(), params={"first": first, "fail_at": 2}, max_new_tokens=6
    )
    try:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                ids += chunk.output_ids
    except GenerationError as error:
        expect(error.type == "ProcessorFault" and ids == [first, first + 1], (error, ids))
    else:
        expect(False, ids)


async def _cancelled(at: RequestContext, request: Awaitable[Any], longest: float) -> None:
    """Disconnect after a while, at whatever stage the request is."""
    task = asyncio.ensure_future(request)
    await asyncio.sleep(at.random.uniform(0, longest))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@kind(30)
async def gone_early(at: RequestContext) -> None:
    """Close the connection, mostly before the first token."""
    await _cancelled(at, at.client.generate(at.new_prompt(), **GREEDY, max_new_tokens=_LONG), 0.1)


@kind(15)
async def gone_while_loading(at: RequestContext) -> None:
    """Disconnect while a new class is loaded, or after that."""
    request = at.client.generate(at.known().prompt, processor=forcing(2_000_000 + at.number), max_new_tokens=_LONG)
    await _cancelled(at, request, 0.2)


@kind(10)
async def several_gone(at: RequestContext) -> None:
    """Disconnect during several continuations of several prompts."""
    prompts = [at.new_prompt(), at.known().prompt]
    await _cancelled(at, at.client.generate(prompts, n=2, **GREEDY, max_new_tokens=_LONG), 0.3)


@kind(30)
async def gone_in_the_middle(at: RequestContext) -> None:
    """Close a stream after a few chunks."""
    known, wanted, ids = at.known(), at.random.randint(1, 5), list[int]()
    stream = at.client.generate_stream(known.prompt, **GREEDY, max_new_tokens=_LONG)
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            ids += chunk.output_ids
            if len(ids) >= wanted:
                break
    both = min(len(ids), known.tokens)
    expect(tuple(ids[:both]) == known.output_ids[:both], (known, ids))


@kind(20)
async def aborted(at: RequestContext) -> None:
    """Cancel the request by its id; with a processor, or without."""
    options: dict[str, Any] = {"processor": counting(), "params": {"first": FIRST_TOKEN}} if at.number % 2 else {}
    request = asyncio.ensure_future(
        at.client.generate(at.known().prompt, rid=at.rid, **GREEDY, max_new_tokens=_LONG, **options)
    )
    while not request.done():  # it may not have got there yet
        await asyncio.sleep(at.random.uniform(0, 0.1))
        await at.client.abort(at.rid)
    try:
        result = await request
    except GenerationError as error:
        expect(error.type == "AbortError", error)
    else:  # the end was faster
        expect(len(result.output_ids) == _LONG, result)
