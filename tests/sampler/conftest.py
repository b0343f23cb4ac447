"""Fakes for the sampler's tests: requests with rows, and processors without a processor string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
import torch

from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams

MODEL = ModelView(4, frozenset(), None)

Call = Callable[[torch.Tensor, list[dict[str, Any]]], Any]


@dataclass(eq=False)
class Request:
    """A minimal request for the persistent batch."""

    name: str = ""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.name


Load = Callable[..., LoadedProcessor]
NewRequest = Callable[..., Any]


@pytest.fixture
def new_request() -> Callable[..., Request]:
    """Factory of requests; takes the fields of `Request`."""
    return Request


@pytest.fixture
def load() -> Callable[..., LoadedProcessor]:
    """Factory of loaded processors from functions: `load(call, "Name")`."""
    executor = InProcessExecutor({}, MODEL)

    def loaded(call: Call, name: str) -> LoadedProcessor:
        return LoadedProcessor(f"sha256:{sha256(name.encode()).hexdigest()}", name, executor, call)

    return loaded


@pytest.fixture
def shipping(new_request: Callable[..., Request]) -> Callable[..., Request]:
    """Factory of requests with processors: `shipping("name", (processor, params), …)`."""

    def make(name: str, *uses: tuple[LoadedProcessor, dict[str, Any]], prompt: Sequence[int] = ()) -> Request:
        processors = tuple(ProcessorUse(processor, params, name) for processor, params in uses)
        return new_request(name, SamplingParams(processors=processors), list(prompt))

    return make
