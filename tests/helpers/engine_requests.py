"""Requests for an engine in the test's process, and their outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from logitship.client.records import Receipt
from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.requests.messages import (
    AttachedProcessor,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    ProcessorRequest,
    RequestError,
    TokenLogprobs,
)

BuildEngine = Callable[..., AsyncEngine]
"""Type of the fixtures `make_engine` and `make_module_engine`: settings of `ServerConfig` to an engine."""

REQUEST_FIELDS = {each.name for each in fields(GenerationRequest)}


def byte_tokens(text: str) -> list[int]:
    """Return the tokens of a text. The tiny model has one for each byte."""
    return [4 + byte for byte in text.encode()]


def request(
    rid: str = "r",
    prompt: str | Sequence[int] = "hello",
    processors: Iterable[AttachedProcessor | tuple[ProcessorString, Mapping[str, Any] | None]] = (),
    **params: Any,
) -> GenerationRequest:
    """Return a request for 8 tokens, unless `params` has `max_tokens`.

    Args:
        rid: its id.
        prompt: text or tokens.
        processors: processors, or pairs of a processor string and its parameters.
        params: other fields of `GenerationRequest` and of `SamplingParams`.
    """
    params = {"max_tokens": 8, "ignore_eos": True} | params
    others = {name: params.pop(name) for name in REQUEST_FIELDS & params.keys()}
    return GenerationRequest(
        rid=rid,
        prompt_token_ids=byte_tokens(prompt) if isinstance(prompt, str) else list(prompt),
        processors=tuple(ProcessorRequest(*each) if isinstance(each, tuple) else each for each in processors),
        sampling_params=SamplingParams(**params),
        **others,
    )


def installed(name: str, **params: Any) -> ProcessorRequest:
    """Return an installed processor with parameters."""
    return ProcessorRequest(InstalledProcessor(name), params)


@dataclass
class Output:
    """One output of a request."""

    chunks: list[GenerationChunk]

    @property
    def last(self) -> GenerationChunk:
        return self.chunks[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [each for chunk in self.chunks for each in chunk.logprobs]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        return [each for chunk in self.chunks for each in chunk.prompt_logprobs]

    @property
    def finish_reason(self) -> FinishReason:
        assert self.last.finish_reason is not None
        return self.last.finish_reason

    @property
    def error(self) -> RequestError:
        """The error that ended it. Fails if none did."""
        assert self.finish_reason.error is not None
        return self.finish_reason.error

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        return self.last.receipts


async def chunks_of(engine: AsyncEngine, wanted: GenerationRequest) -> list[GenerationChunk]:
    """Return all chunks of a request, in the order in which they arrive."""
    return [chunk async for chunk in await engine.submit(wanted)]


async def generate(engine: AsyncEngine, wanted: GenerationRequest) -> Output:
    """Return the output of a request that has one."""
    (output,) = await generate_all(engine, wanted)
    return output


async def generate_all(engine: AsyncEngine, wanted: GenerationRequest) -> list[Output]:
    """Return all outputs of a request."""
    outputs = [Output([]) for _ in range(wanted.num_sequences)]
    for chunk in await chunks_of(engine, wanted):
        outputs[chunk.index].chunks.append(chunk)
    return outputs


async def generate_together(engine: AsyncEngine, wanted: Iterable[GenerationRequest]) -> list[Output]:
    """Run requests with one output each at the same time."""
    return await asyncio.gather(*(generate(engine, each) for each in wanted))
