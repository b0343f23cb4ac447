"""Requests of the soak with processors, installed and shipped: they must succeed."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing

from soak_processors import FIRST_TOKEN, counting, forced_token, forcing, forcing_class
from soak_requests import GREEDY, MAX_TOKENS, RequestContext, expect, kind

from logitship import NotFoundError
from logitship.client.records import Generation

_CHOICES = ("yes", "no", "perhaps")


def regex(number: int) -> str:
    """Return a regular expression, different for each number."""
    return rf"{number}-[a-c]{{2}}"


def json_schema(number: int) -> str:
    """Return a JSON schema, different for each number."""
    value = {"enum": [number, "none"]}
    return json.dumps(
        {"type": "object", "properties": {"value": value}, "required": ["value"], "additionalProperties": False}
    )


def _one_step_a_token(result: Generation, tokens: int, processors: int = 1) -> None:
    expect([receipt.steps for receipt in result.receipts] == [tokens] * processors, result)


@kind(15)
async def grammar_regex(at: RequestContext) -> None:
    """Send a regular expression, different for each request."""
    pattern = regex(at.number)
    result = await at.client.generate(at.known().prompt, regex=pattern, max_new_tokens=40, temperature=0)
    expect(re.fullmatch(pattern, result.text) is not None, result)


@kind(15)
async def grammar_json(at: RequestContext) -> None:
    """Send a JSON schema, different for each request."""
    result = await at.client.generate(
        at.known().prompt, json_schema=json_schema(at.number), max_new_tokens=120, temperature=0
    )
    if result.finish_reason is not None and result.finish_reason.kind == "stop":
        expect(json.loads(result.text)["value"] in (at.number, "none"), result)
    else:  # white space may go on for ever
        expect(result.usage.completion_tokens == 120, result)


@kind(15)
async def grammar_choice(at: RequestContext) -> None:
    """Send a choice of texts, with the built-in processor by its name."""
    result = await at.client.generate(
        at.known().prompt, processor="grammar", params={"choice": list(_CHOICES)}, max_new_tokens=20, temperature=0
    )
    expect(result.text in _CHOICES, result)


@kind(30)
async def disallowed_tokens(at: RequestContext) -> None:
    """Use a built-in processor that forbids the greedy tokens."""
    known = at.known()
    result = await at.client.generate(
        known.prompt,
        **GREEDY,
        max_new_tokens=known.tokens,
        processor="disallowed_tokens",
        params={"token_ids": list(known.output_ids)},
    )
    expect(not set(result.output_ids) & set(known.output_ids), (known, result))
    _one_step_a_token(result, known.tokens)


@kind(20)
async def no_repeat_ngram(at: RequestContext) -> None:
    """Use a built-in processor that stores the tokens it has seen."""
    result = await at.client.generate(
        at.new_prompt(),
        **GREEDY,
        max_new_tokens=MAX_TOKENS,
        processor="no_repeat_ngram",
        params={"ngram_size": 1, "window_size": 90},
    )
    expect(len(set(result.output_ids)) == MAX_TOKENS, result)


@kind(90)
async def shipped_source(at: RequestContext) -> None:
    """Ship a class as source; classes are loaded and evicted."""
    number, tokens = at.class_number(), at.random.randint(1, 6)
    result = await at.client.generate(at.known().prompt, processor=forcing(number), max_new_tokens=tokens)
    expect(result.output_ids == (forced_token(number),) * tokens, (number, result))
    _one_step_a_token(result, tokens)


@kind(30)
async def shipped_pickle(at: RequestContext) -> None:
    """Ship a class as a pickle."""
    number, tokens = at.class_number(), at.random.randint(1, 6)
    result = await at.client.generate(at.known().prompt, processor=forcing_class(number), max_new_tokens=tokens)
    expect(result.output_ids == (forced_token(number),) * tokens, (number, result))


@kind(60)
async def shipped_with_state(at: RequestContext) -> None:
    """Stream with classes that are always in use and keep state of each sequence."""
    first, tokens = FIRST_TOKEN + at.random.randrange(40_000), at.random.randint(1, 8)
    ids: list[int] = []
    stream = at.client.generate_stream(
        at.known().prompt,
        processor=counting(at.number % 4),
        params={"first": first},
        max_new_tokens=tokens,
        ignore_eos=True,
    )
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            ids += chunk.output_ids
    expect(ids == list(range(first, first + tokens)), (first, ids))


@kind(20)
async def shipped_several_continuations(at: RequestContext) -> None:
    """Check that each continuation has its own state."""
    first = FIRST_TOKEN + at.random.randrange(40_000)
    results = await at.client.completions(
        at.known().prompt,
        n=3,
        processor=counting(),
        params={"first": first},
        max_tokens=4,
        extra_body={"return_token_ids": True},
    )
    for result in results:
        expect(result.output_ids == tuple(range(first, first + 4)), (first, result))


@kind(20)
async def two_processors(at: RequestContext) -> None:
    """Use a shipped class and a built-in processor in one request."""
    number = at.class_number()
    result = await at.client.generate(
        at.known().prompt,
        logits_processors=[
            {"processor": "disallowed_tokens", "params": {"token_ids": [forced_token(number) + 1]}},
            {"processor": forcing(number)},
        ],
        max_new_tokens=3,
    )
    expect(result.output_ids == (forced_token(number),) * 3, (number, result))
    _one_step_a_token(result, 3, processors=2)


@kind(25)
async def registered(at: RequestContext) -> None:
    """Register a class, use it by its digest and by its name, delete it, and ask for it once more."""
    name, prompt = f"soak{at.number}", at.known().prompt
    uploaded = await at.client.register(forcing(1_000_000 + at.number), name=name)
    by_digest, by_name = await asyncio.gather(
        at.client.generate(prompt, processor=uploaded, max_new_tokens=2),
        at.client.generate(prompt, processor=name, max_new_tokens=2),
    )
    token = forced_token(1_000_000 + at.number)
    expect(by_digest.output_ids == by_name.output_ids == (token, token), (by_digest, by_name))
    await at.client.delete_processor(name)
    try:
        await at.client.processor(name)
    except NotFoundError:
        return
    expect(False, f"{name} was deleted, and is there")
