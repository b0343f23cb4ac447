"""Requests of the soak without processors, on all routes: they must succeed."""

from __future__ import annotations

import math
from contextlib import aclosing
from typing import Any

from soak_requests import GREEDY, MAX_TOKENS, RequestContext, conversation, expect, kind, same


@kind(110)
async def generate(at: RequestContext) -> None:
    """Send a plain request to SGLang's route."""
    known = at.known()
    same(await at.client.generate(known.prompt, **GREEDY, max_new_tokens=known.tokens), known)


@kind(80)
async def generate_stream(at: RequestContext) -> None:
    """The same, streamed."""
    known, text, ids = at.known(), "", list[int]()
    stream = at.client.generate_stream(known.prompt, **GREEDY, max_new_tokens=known.tokens)
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            text, ids = text + chunk.text, [*ids, *chunk.output_ids]
    expect(text == known.text and tuple(ids) == known.output_ids, (known, text, ids))


@kind(50)
async def completions(at: RequestContext) -> None:
    """Send a request to OpenAI's completions."""
    known = at.known()
    same(await at.client.completions(known.prompt, **GREEDY, max_tokens=known.tokens), known)


@kind(40)
async def completions_stream(at: RequestContext) -> None:
    """The same, streamed."""
    known, text = at.known(), ""
    async with aclosing(at.client.completions_stream(known.prompt, **GREEDY, max_tokens=known.tokens)) as chunks:
        async for chunk in chunks:
            text += chunk.text
    expect(text == known.text, (known, text))


@kind(50)
async def chat(at: RequestContext) -> None:
    """Send a request to OpenAI's chat completions."""
    known = at.known_chat()
    same(await at.client.chat(conversation(known.prompt), **GREEDY, max_tokens=known.tokens), known)


@kind(40)
async def chat_stream(at: RequestContext) -> None:
    """The same, streamed."""
    known, text = at.known_chat(), ""
    async with aclosing(at.client.chat_stream(conversation(known.prompt), **GREEDY, max_tokens=known.tokens)) as chunks:
        async for chunk in chunks:
            text += chunk.text
    expect(text == known.text, (known, text))


@kind(30)
async def several_continuations(at: RequestContext) -> None:
    """Request several greedy continuations, which are all the same."""
    known, n = at.known(), at.random.randint(2, 4)
    results = await at.client.generate(known.prompt, n=n, **GREEDY, max_new_tokens=known.tokens)
    expect(len(results) == n, results)
    for result in results:
        same(result, known)


@kind(15)
async def batch(at: RequestContext) -> None:
    """Send several prompts in one request."""
    knowns = [at.known() for _ in range(3)]
    tokens = min(known.tokens for known in knowns)
    results = await at.client.generate([known.prompt for known in knowns], **GREEDY, max_new_tokens=tokens)
    for result, known in zip(results, knowns, strict=True):
        expect(result.output_ids == known.output_ids[:tokens], (known, result))


@kind(100)
async def sampled(at: RequestContext) -> None:
    """Sample from random new prompts, with all sampling parameters."""
    tokens = at.random.randint(1, MAX_TOKENS)
    options: dict[str, Any] = {"temperature": at.random.uniform(0.5, 1.5), "ignore_eos": True, "seed": at.number}
    options |= {"top_p": at.random.choice([1.0, 0.95, 0.7]), "top_k": at.random.choice([-1, 50, 5])}
    options |= at.random.choice(
        [{}, {"min_p": 0.05}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"logit_bias": {"300": 5}}]
    )
    result = await at.client.generate(at.new_prompt(), **options, max_new_tokens=tokens)
    expect(len(result.output_ids) == tokens and result.usage.completion_tokens == tokens, result)


@kind(25)
async def logprobs(at: RequestContext) -> None:
    """Request log-probabilities of the output and of the prompt."""
    known = at.known()
    result = await at.client.generate(
        known.prompt,
        **GREEDY,
        max_new_tokens=known.tokens,
        return_logprob=True,
        top_logprobs_num=5,
        logprob_start_len=0,
    )
    same(result, known)
    expect(result.logprobs is not None and len(result.logprobs) == known.tokens, result)
    for token in result.logprobs or ():
        expect(len(token.top) == 5 and token.token_id == token.top[0].token_id, token)
    expect(len(result.prompt_logprobs or ()) == result.usage.prompt_tokens, result)


@kind(15)
async def chat_logprobs(at: RequestContext) -> None:
    """Do the same with OpenAI's fields."""
    known = at.known_chat()
    result = await at.client.chat(
        conversation(known.prompt), **GREEDY, max_tokens=known.tokens, logprobs=True, top_logprobs=3
    )
    same(result, known)
    expect(all(each.logprob is not None and -math.inf < each.logprob <= 0 for each in result.logprobs or ()), result)


@kind(10)
async def beam_search(at: RequestContext) -> None:
    """Run a beam search, in which beams fork and are dropped."""
    extra = {"num_beams": 3, "n": 2, "max_new_tokens": 6, "ignore_eos": True}
    response = await at.post("/generate", {"text": at.known().prompt, "sampling_params": extra})
    expect(response.status_code == 200 and len(response.json()) == 2, response.text)


@kind(10)
async def trace(at: RequestContext) -> None:
    """Request a trace of each token."""
    known = at.known()
    result = await at.client.generate(known.prompt, **GREEDY, max_new_tokens=known.tokens, trace={"top": 5})
    same(result, known)
    expect(len(result.trace or ()) == known.tokens, result)
