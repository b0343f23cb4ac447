"""The order of events in a step."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.sampler import Sampler
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.engine import Engine
from logitship.server.engine.scheduler import Scheduler
from logitship.server.model.model_loader import LoadedModel
from logitship.server.model.model_runner import Chunk, ModelRunner, OutputLogits
from logitship.server.requests.messages import GenerationChunk
from logitship.server.requests.sequence import Sequence

Events = list[str]


class RecordedRunner(ModelRunner):
    def __init__(self, loaded: LoadedModel, events: Events) -> None:
        self._events = events
        super().__init__(loaded.model, 2, max_len=64)

    def forward(
        self, decode: list[Chunk], prefill: list[Chunk], keep: list[int], num_complete: int
    ) -> tuple[torch.Tensor, OutputLogits]:
        self._events.append("forward")
        return super().forward(decode, prefill, keep, num_complete)


class RecordedSampler(Sampler):
    events: Events

    def begin(self) -> None:
        self.events.append("begin")
        super().begin()


class RecordedEngine(Engine):
    """An engine of one request at a time, and its events."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.events: Events = []
        runner = RecordedRunner(loaded, self.events)
        sampler = RecordedSampler(loaded.vocab_size, runner.device, LogitsProcessors())
        sampler.events = self.events
        super().__init__(
            runner,
            sampler,
            Scheduler(runner.cache, chunked_prefill_size=12),
            PersistentBatch(2),
            on_finished=lambda sequence: self.events.append("finished"),
            on_emitted=partial(self.events.append, "emitted"),
        )
        self._loaded = loaded

    def start(self, max_tokens: int, **params: object) -> None:
        """Add a request."""
        self.events.clear()
        values = SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]
        self.add([Sequence("r", 0, frozenset("r"), [5, 6], values, max_tokens, self._loaded.tokenizer, self._take)])

    def _take(self, chunk: GenerationChunk) -> None:
        self.events.append("last chunk" if chunk.finish_reason else "chunk")


@pytest.fixture
def engine(loaded_model: LoadedModel) -> RecordedEngine:
    return RecordedEngine(loaded_model)


def test_chunks_are_emitted_while_sandboxes_work(engine: RecordedEngine) -> None:
    engine.start(max_tokens=3)
    while engine.step():
        pass
    first = ["begin", "forward"]
    second = ["begin", "chunk", "emitted", "forward"]
    assert engine.events == [*first, *second, *second, "last chunk", "finished"]


def test_text_that_may_end_the_request_is_made_at_once(engine: RecordedEngine) -> None:
    engine.start(max_tokens=2, stop=["\x00 never"])
    engine.step()
    assert engine.events == ["begin", "forward", "chunk"]


def test_abort_does_not_lose_tokens(engine: RecordedEngine) -> None:
    engine.start(max_tokens=3)
    engine.step()
    engine.abort(lambda sequence: True)
    assert engine.events == ["begin", "forward", "chunk", "last chunk", "finished"]
    assert not engine.step()
