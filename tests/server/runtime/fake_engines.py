"""Fakes of all engines with a seat, which run the same requests: for the scenarios of `test_conformance.py`."""

from __future__ import annotations

import json
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.processors.executor import ProcessorExecutor
from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime import plugin_processors
from logitship.server.runtime.plugin_processors import for_execution
from logitship.server.runtime.plugin_settings import PluginSettings
from logitship.server.runtime.request_runtime import RequestRuntime
from logitship.server.runtime.seat import EngineWorker
from logitship.server.sglang.generate_fields import ADMITTED
from logitship.server.sglang.sglang_seat import SglangSeat
from logitship.server.sglang.sglang_settings import SglangSettings
from logitship.server.transformers.generate_seat import ShippedLogitsProcessor, TransformersSettings
from logitship.server.vllm.batch_requests import BatchRequests
from logitship.server.vllm.batch_seat import BatchSeat
from logitship.server.vllm.settings import VllmSettings
from tests.helpers.processors import CHECKS_HISTORY
from tests.server.sglang.conftest import make_fake_req, one_rank
from tests.server.sglang.fake_scheduler import FakeReq, FakeScheduler
from tests.server.vllm import fake_runner, fake_slots
from tests.server.vllm.conftest import fake_params
from tests.server.vllm.fake_runner import FAULT_TOKEN, MAX_ROWS, VOCAB_SIZE, OneRank, Record, Runner

LOGGER = logging.getLogger("logitship.tests.engine")


@dataclass(frozen=True)
class Job:
    """A request.

    Attributes:
        rid: its id.
        first: the token that its processor `ChecksHistory` forces first; None: it has no processor.
        prompt: length of its prompt.
        tokens: most output tokens.
        fails_at: the call that fails.
        stop: tokens that end it.
        own: another value for another class.
        source: another class, with its name.
        processor: another processor string.
    """

    rid: str
    first: int | None = 2
    prompt: int = 3
    tokens: int = 8
    fails_at: int | None = None
    stop: tuple[int, ...] = ()
    own: int = 0
    source: tuple[str, str] | None = None
    processor: str | None = None

    @property
    def string(self) -> str:
        """The processor string.

        A request that fails gets its own class, because without a sandbox a fault fails the whole call.
        """
        if self.processor is not None:
            return self.processor
        source, name = self.source or (CHECKS_HISTORY.source, CHECKS_HISTORY.class_name)
        source += f"# {self.rid}" if self.fails_at is not None else "#" * self.own
        return json.dumps({"source": source, "class_name": name})

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the processor."""
        return {"first": self.first, "prompt": self.prompt, "fails_at": self.fails_at}

    @property
    def forced(self) -> list[int]:
        """The tokens that the processor forces, until it fails."""
        assert self.first is not None
        return list(range(self.first, self.first + self.tokens))[: self.fails_at]


class FakeEngine(ABC):
    """An engine with logitship.

    Args:
        executor: runs shipped processors; None: that of the settings.
        settings: other settings than that processors run in this process.

    Attributes:
        processors: loads the processors.
        ends: the log of the requests that were ended, by request id.
        begins_early: calls begin before their logits exist.
    """

    begins_early = True

    def __init__(self, executor: ProcessorExecutor | None = None, **settings: Any) -> None:
        self.ends: dict[str, str] = {}
        self._executor = executor
        self.settings = self._settings(**{"processor_isolation": "none"} | settings)
        with self._own_executor():
            self.processors = for_execution(self.settings, self.model, MAX_ROWS, LOGGER)

    @contextmanager
    def _own_executor(self) -> Iterator[None]:
        """Let processors that are made meanwhile run in the engine's own executor, if it has one."""
        make = plugin_processors.shipped_executor
        try:
            if self._executor is not None:
                plugin_processors.shipped_executor = lambda *_: self._executor
            yield
        finally:
            plugin_processors.shipped_executor = make

    @property
    def model(self) -> ModelView:
        return ModelView(VOCAB_SIZE, frozenset({fake_runner.EOS}), None)

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Collect the messages about requests that end."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = self._keep  # type: ignore[method-assign]
        loggers = [logging.getLogger(name) for name in ("sglang.logitship", "vllm.logitship")]
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)

    def _keep(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("request %s ends") and isinstance(record.args, tuple):
            assert str(record.args[0]) not in self.ends, "a fault is logged once"
            self.ends[str(record.args[0])] = record.getMessage()

    def run(self, seed: int, *jobs: Job) -> dict[str, list[int]]:
        """Run requests to their ends, and return their outputs by id."""
        with self._logged():
            return self._run(seed, *jobs)

    def plain(self, job: Job) -> list[int]:
        """Return the output of a request without a processor."""
        return [5] * job.tokens

    @abstractmethod
    def _settings(self, **settings: Any) -> PluginSettings: ...

    @property
    @abstractmethod
    def runtime(self) -> RequestRuntime: ...

    @abstractmethod
    def _run(self, seed: int, *jobs: Job) -> dict[str, list[int]]: ...


class Sglang(FakeEngine):
    """SGLang's scheduler."""

    overlap = False

    def _settings(self, **settings: Any) -> SglangSettings:
        return SglangSettings(**settings)

    @property
    def runtime(self) -> RequestRuntime:
        return self._seat._runtime

    def _run(self, seed: int, *jobs: Job) -> dict[str, list[int]]:
        assert isinstance(self.settings, SglangSettings)
        self._seat = SglangSeat(EngineWorker(self.settings, self.model, one_rank(), self.processors, LOGGER))
        reqs = {job.rid: self._req(job) for job in jobs}
        FakeScheduler(seed, self._seat, overlap=self.overlap).run(*reqs.values())
        self._seat.drop_finished()
        return {rid: req.visible for rid, req in reqs.items()}

    def _req(self, job: Job) -> FakeReq:
        req = make_fake_req(job.rid, prompt=job.prompt, tokens=job.tokens, first=job.first, fails_at=job.fails_at)
        if job.first is not None:
            req.custom_logit_processor = ADMITTED + job.string
        req.sampling_params.stop_token_ids = set(job.stop)
        return req


class SglangOverlap(Sglang):
    """SGLang's scheduler with overlap scheduling."""

    overlap = True
    begins_early = False


class VllmV1(FakeEngine):
    """vLLM's model runner V1."""

    is_async = False

    def _settings(self, **settings: Any) -> VllmSettings:
        return VllmSettings(enable_custom_logit_processor=True, **settings)

    @property
    def runtime(self) -> RequestRuntime:
        return self._seat._runtime

    def plain(self, job: Job) -> list[int]:
        return _without_fault_token(fake_runner.alone(self._record(job)))

    def _run(self, seed: int, *jobs: Job) -> dict[str, list[int]]:
        assert isinstance(self.settings, VllmSettings)
        runner = Runner(seed, self.is_async)
        worker = EngineWorker(self.settings, self.model, OneRank(), self.processors, LOGGER)
        self._seat = BatchSeat(worker, BatchRequests(runner))
        outputs = fake_runner.run(runner, self._seat, *map(self._record, jobs))
        return {rid: _without_fault_token(output) for rid, output in outputs.items()}

    def _record(self, job: Job) -> Record:
        params = fake_params(_extra_args(job), max_tokens=job.tokens, stop_token_ids=[FAULT_TOKEN, *job.stop])
        return Record(job.rid, params, [7] * job.prompt)


class VllmV1Async(VllmV1):
    """vLLM's model runner V1 with asynchronous scheduling."""

    is_async = True
    begins_early = False


class VllmV2(FakeEngine):
    """vLLM's model runner V2."""

    def _settings(self, **settings: Any) -> VllmSettings:
        return VllmSettings(enable_custom_logit_processor=True, **settings)

    @property
    def runtime(self) -> RequestRuntime:
        return self._runner.seat._runtime

    def _run(self, seed: int, *jobs: Job) -> dict[str, list[int]]:
        self._runner = fake_slots.Runner(self.processors, self.settings, begins_early=self.begins_early)
        requests = [self._request(job) for job in jobs]
        return _SlotScheduler(self._runner, seed).run(requests)

    def _request(self, job: Job) -> fake_slots.Request:
        params = fake_params(_extra_args(job), max_tokens=job.tokens, stop_token_ids=[FAULT_TOKEN, *job.stop])
        return fake_slots.Request(job.rid, params, [7] * job.prompt)


class VllmV2Async(VllmV2):
    """vLLM's model runner V2 with asynchronous scheduling."""

    begins_early = False


class Transformers(FakeEngine):
    """Hugging Face `generate()`, which runs one request after the other."""

    begins_early = False

    def _settings(self, **settings: Any) -> TransformersSettings:
        return TransformersSettings(**settings)

    @property
    def runtime(self) -> RequestRuntime:
        return self._seat._runtime

    def _run(self, seed: int, *jobs: Job) -> dict[str, list[int]]:
        return {job.rid: self.plain(job) if job.first is None else self._generate(job) for job in jobs}

    def _generate(self, job: Job) -> list[int]:
        assert isinstance(self.settings, TransformersSettings)
        ends = [fake_runner.EOS, *job.stop]
        model = SimpleNamespace(
            generation_config=SimpleNamespace(eos_token_id=ends, pad_token_id=None),
            get_output_embeddings=lambda: SimpleNamespace(weight=torch.empty(VOCAB_SIZE, 1)),
        )
        entry = {"processor": json.loads(job.string), "params": job.params}
        with self._own_executor():
            self._seat = ShippedLogitsProcessor(model, None, [entry], settings=self.settings)
        self._seat._processors = self._seat._runtime._processors = self.processors
        tokens = [7] * job.prompt
        try:
            while len(tokens) < job.prompt + job.tokens and tokens[job.prompt :][-1:] not in [[end] for end in ends]:
                tokens.append(int(self._seat(torch.tensor([tokens]), torch.zeros(1, VOCAB_SIZE)).argmax()))
        except ProcessorFault as fault:
            self.ends[job.rid] = f"{fault}\n{fault.traceback}"
        self._seat._release()
        return tokens[job.prompt :]


@dataclass
class _SlotScheduler:
    """Schedules requests at random, as vLLM may: chunks of prompts, requests that sit out a step, and preemption."""

    runner: fake_slots.Runner
    seed: int
    outputs: dict[str, list[int]] = field(default_factory=dict)

    def run(self, requests: list[fake_slots.Request]) -> dict[str, list[int]]:
        """Run requests to their ends."""
        rng, waiting, running = random.Random(self.seed), list(requests), []
        while waiting or running:
            finished = [each for each in running if self._has_ended(each)]
            preempted = [each for each in running if each not in finished and rng.random() < 0.1]
            for request in finished + preempted:
                running.remove(request)
                self.runner.remove(request)
            waiting += preempted
            while waiting and self.runner.free and rng.random() < 0.7:
                running.append(waiting.pop(0))
                self.runner.add(running[-1])
            self.runner.seat.remove_finished({each.req_id for each in finished})
            self._step([each for each in running if rng.random() < 0.8], rng)
        return self.outputs

    def _step(self, chosen: list[fake_slots.Request], rng: random.Random) -> None:
        scheduled = [(each, rng.randint(1, max(1, each.prefill_len - each.computed))) for each in chosen]
        if not scheduled:
            self.runner.plan([])
            return
        logits = torch.zeros(len(scheduled), VOCAB_SIZE)
        logits[:, 5] = 1.0
        before = logits.clone()
        tokens = self.runner.step(scheduled, logits).argmax(-1).tolist()
        for row, (request, _) in enumerate(scheduled):
            if request.params.extra_args is None:
                assert torch.equal(logits[row], before[row])
            if request.computed >= request.prefill_len:
                self.runner.commit(request, tokens[row])

    def _has_ended(self, request: fake_slots.Request) -> bool:
        output, params = request.output, request.params
        if not output or not (len(output) >= params.max_tokens or output[-1] in params.stop_token_ids):
            return False
        self.outputs[request.req_id] = _without_fault_token(output)
        return True


def _without_fault_token(output: list[int]) -> list[int]:
    return output[:-1] if output[-1:] == [FAULT_TOKEN] else output


def _extra_args(job: Job) -> dict[str, Any] | None:
    if job.first is None:
        return None
    return {"custom_logit_processor": job.string, "custom_params": job.params}


BATCHED: tuple[type[FakeEngine], ...] = (Sglang, SglangOverlap, VllmV1, VllmV1Async, VllmV2, VllmV2Async)
ENGINES = (*BATCHED, Transformers)
