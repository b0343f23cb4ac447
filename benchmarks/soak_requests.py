"""Requests of the soak test: their context, their expected results, and the registry of kinds."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx

from logitship import AsyncClient
from logitship.client.http.request_options import Message
from logitship.client.records import Generation

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "Water boils at a temperature of",
    "The largest planet in the solar system is",
    "A short list of colours: red,",
    "def fibonacci(n):",
    "The opposite of hot is",
    "In the morning the baker",
    "Bees make honey because they",
    "Two and two make",
    "The moon goes round the",
    "Dear sir or madam, I am writing to",
)
MAX_TOKENS = 10
"""Output tokens of most requests. Short ones, because leaks are in the start and the end of requests."""
NEAR_TIE = 0.01
"""Two tokens whose log-probabilities are closer may swap ranks in another batch, due to rounding."""
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


_WORDS = ("sun", "rain", "tree", "river", "stone", "bird", "light", "road")


class Unexpected(Exception):
    """A request did not end as expected of its kind."""


def expect(condition: bool, outcome: object) -> None:
    """Require a condition of an outcome.

    Raises:
        Unexpected: the condition is false.
    """
    if not condition:
        raise Unexpected(str(outcome)[:1000])


@dataclass(frozen=True)
class Known:
    """A prompt and its greedy continuation.

    Attributes:
        tokens: number of known tokens; the first near-tie comes after them.
    """

    prompt: str
    text: str
    tokens: int
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answers:
    """Expected answers to each of the `PROMPTS`, as a text and as a message of a conversation."""

    texts: Sequence[Known]
    chats: Sequence[Known]


@dataclass
class RequestContext:
    """Random numbers, known answers and clients for one request.

    Attributes:
        number: number of the request.
        random: generator of this request, so that the mix does not depend on the order in which requests end.
        client: retries requests that were refused because all sandboxes are in use.
        http: sends requests that the client would refuse or wrap.
        answers: the expected greedy answers.
    """

    number: int
    random: random.Random
    client: AsyncClient
    http: httpx.AsyncClient
    answers: Answers
    rid: str = field(init=False)

    def __post_init__(self) -> None:
        self.rid = f"soak-{self.number}"

    def known(self) -> Known:
        """Return one of the prompts."""
        return self.random.choice(self.answers.texts)

    def known_chat(self) -> Known:
        """Return one of the conversations."""
        return self.random.choice(self.answers.chats)

    def new_prompt(self) -> str:
        """Return a prompt that no other request has."""
        words = " ".join(self.random.choices(_WORDS, k=12))
        return f"Story {self.number}: {words}"

    def class_number(self) -> int:
        """Return the number of a shipped class. New classes appear over time; old ones are requested less and less."""
        age = min(int(self.random.expovariate(0.4)), 10)
        return max(0, self.number // 12 - age)

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send JSON. Retry while the server has no capacity for the processor."""
        while True:
            response = await self.http.post(path, json=body)
            if response.status_code != 503:
                return response
            await asyncio.sleep(0.2)


Kind: TypeAlias = Callable[[RequestContext], Awaitable[None]]
"""Sends a request, or a few that belong together, and raises on an unexpected outcome."""

KINDS: dict[Kind, float] = {}
"""Relative frequencies of all kinds."""


def kind(weight: float) -> Callable[[Kind], Kind]:
    """Add a kind to `KINDS`."""

    def enter(function: Kind) -> Kind:
        KINDS[function] = weight
        return function

    return enter


def name_of(one: Kind) -> str:
    """Return the name of a kind in the report."""
    return getattr(one, "__name__", "?").replace("_", " ")


def conversation(prompt: str) -> list[Message]:
    """Return a prompt as a conversation."""
    return [{"role": "user", "content": prompt}]


def same(result: Generation, known: Known) -> None:
    """Require the greedy continuation."""
    expect(result.text == known.text, f"{known.prompt!r} gave {result.text!r}, not {known.text!r}")


async def learn(client: AsyncClient) -> Answers:
    """Ask for the greedy continuations, one after the other. Prompts that begin with a near-tie are left out."""
    texts, chats = [], []
    for prompt in PROMPTS:
        text = await client.generate(
            prompt, **GREEDY, max_new_tokens=MAX_TOKENS, return_logprob=True, top_logprobs_num=2
        )
        if tokens := _tokens_before_near_tie(text):
            text = await client.generate(prompt, **GREEDY, max_new_tokens=tokens)
            texts.append(Known(prompt, text.text, tokens, text.output_ids))
        messages = conversation(prompt)
        chat = await client.chat(messages, **GREEDY, max_tokens=MAX_TOKENS, logprobs=True, top_logprobs=2)
        if tokens := _tokens_before_near_tie(chat):
            chat = await client.chat(messages, **GREEDY, max_tokens=tokens)
            chats.append(Known(prompt, chat.text, tokens))
    return Answers(texts, chats)


def _tokens_before_near_tie(result: Generation) -> int:
    for count, token in enumerate(result.logprobs or ()):
        best, second = (-math.inf if top.logprob is None else top.logprob for top in token.top[:2])
        if best - second < NEAR_TIE:
            return count
    return MAX_TOKENS
