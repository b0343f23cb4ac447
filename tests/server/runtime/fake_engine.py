"""The common part of the fakes of all engines: requests, and a policy that schedules them at random."""

from __future__ import annotations

import json
import logging
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch

from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.processors.executor import ProcessorExecutor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime import plugin_setup
from logitship.server.runtime.audit_log import AuditLog
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.plugin_settings import PluginSettings
from logitship.server.runtime.plugin_setup import for_execution
from logitship.server.runtime.ranks import GroupRanks
from logitship.server.runtime.request_runtime import RequestRuntime
from logitship.server.runtime.seat import EngineWorker
from logitship.server.runtime.tracked_request import INTERNAL_ERROR
from tests.helpers.processors import CHECKS_HISTORY, shipped_by_row

VOCAB_SIZE = 64
EOS = 1
CHOICE = 5
"""The model's token."""
FAULT_TOKEN = 63
"""vLLM's: requests whose processor failed end with it."""
MAX_ROWS = 6
NUM_DRAFTS = 7

FOLLOWS = shipped_by_row(
    "Follows",
    """
    # Choose a token that depends on the history and on the number of calls. No token is forbidden.
    calls = req.state["calls"] = req.state.get("calls", 0) + 1
    row[2 + (7 * calls + 3 * sum(req.output_ids) + len(req.origin_input_ids)) % 40] += 1000.0
    """,
)

Logger: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any]"


@dataclass(frozen=True)
class Job:
    """The fields of a request, for any engine.

    Attributes:
        rid: its id.
        first: the token that its processor `ChecksHistory` forces first; None: it has no processor.
        prompt: length of its prompt.
        tokens: most output tokens.
        fails_at: the call that fails.
        stop: tokens that end it.
        stops_at: number of output tokens after which the engine ends it, for a reason that processors cannot know.
        own: another value for another class.
        source: another class.
        processor: another processor string.
        others: the logits of other tokens than the forced one; None: they are forbidden.
    """

    rid: str
    first: int | None = 2
    prompt: int = 3
    tokens: int = 8
    fails_at: int | None = None
    stop: tuple[int, ...] = ()
    stops_at: int | None = None
    own: int = 0
    source: SourceProcessor = CHECKS_HISTORY
    processor: str | None = None
    others: float | None = None

    @cached_property
    def string(self) -> str:
        """The processor string.

        A request that fails gets its own class, because without a sandbox a fault fails the whole call.
        """
        if self.processor is not None:
            return self.processor
        source = self.source.source + (f"# {self.rid}" if self.fails_at is not None else "#" * self.own)
        return json.dumps({"source": source, "class_name": self.source.class_name})

    @property
    def custom_params(self) -> dict[str, Any]:
        """The parameters of the processor."""
        params = {"first": self.first, "prompt": self.prompt, "fails_at": self.fails_at}
        return params if self.others is None else params | {"others": self.others}

    @cached_property
    def expected(self) -> list[int]:
        """Its output, if its processor is called once for each token, with the exact history."""
        found: list[int] = []
        while len(found) < self.tokens:
            if self.source is FOLLOWS:
                found.append(2 + (7 * (len(found) + 1) + 3 * sum(found) + self.prompt) % 40)
            else:
                found.append(CHOICE if self.first is None else self.first + len(found))
        return found[: self.fails_at][: self.stops_at]


@dataclass(eq=False)
class FakeRequest:
    """A request of a fake engine.

    Attributes:
        job: its fields.
        sampling_params: the engine's record of its parameters.
        output: tokens that the engine's scheduler has processed.
        in_flight: tokens that were sampled after them.
        computed: number of tokens that the model has read.
    """

    job: Job
    sampling_params: Any
    output: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def rid(self) -> str:
        return self.job.rid

    @property
    def prompt(self) -> list[int]:
        return [7] * self.job.prompt

    @property
    def sampled(self) -> list[int]:
        return self.output + self.in_flight

    @property
    def missing(self) -> int:
        """Number of tokens that the model has to read before the next one is sampled."""
        return self.job.prompt + len(self.sampled) - self.computed

    @property
    def visible(self) -> list[int]:
        """The output that the client gets."""
        return self.output[:-1] if self.output[-1:] == [FAULT_TOKEN] else self.output

    @property
    def has_ended(self) -> bool:
        """True if the scheduler knows that it has ended."""
        length, job = len(self.output), self.job
        ends = {EOS, FAULT_TOKEN, *job.stop}
        return length in {job.tokens, job.stops_at} or (length > 0 and self.output[-1] in ends)

    def take(self, count: int) -> None:
        """Process tokens that were in flight."""
        for token in self.in_flight[:count]:
            if not self.has_ended:
                self.output.append(token)
        del self.in_flight[:count]


class FakeGroup:
    """Fake of an engine's `GroupCoordinator`: its ranks are threads.

    Args:
        rank: this one.
        size: number of ranks.
        sent: the last message, shared by all ranks.
        barrier: of the ranks that are there.
    """

    def __init__(self, rank: int, size: int, sent: list[Any], barrier: threading.Barrier) -> None:
        self.rank_in_group = rank
        self.world_size = size
        self._sent = sent
        self._barrier = barrier

    @classmethod
    def of(cls, size: int, present: int | None = None) -> list[FakeGroup]:
        """Return all ranks of a group, or the first ones, which do not wait for the others."""
        sent: list[Any] = []
        barrier = threading.Barrier(present or size)
        return [cls(rank, size, sent, barrier) for rank in range(present or size)]

    def broadcast_object(self, obj: Any, src: int) -> Any:
        if self.rank_in_group == src:
            self._sent[:] = [obj]
        self._barrier.wait(30)
        received = self._sent[0]
        self._barrier.wait(30)
        return received

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        received: torch.Tensor = self.broadcast_object(tensor, src)
        return received.clone()


class FakeEngine(ABC):
    """An engine with logitship.

    Args:
        executor: runs shipped processors; None: that of the settings.
        settings: other settings than that processors run in this process.

    Attributes:
        ends: the reasons of the requests that were ended, by request id.
        possible_ends: the reasons of those that were to be ended if the engine accepted a draft token.
        receipts: calls of the processors of requests, by request id.
        draft_tokens: the draft tokens of each step, one behind the other; None: random ones.
        num_accepted: accepted draft tokens.
        begins_early: calls begin before their logits exist.
        defers: requests whose calls are late sit out.
        internal_error: the reason of a request that ends because of an error of the server.
        fails_alone: an error of the server in a step ends no requests without processors.
    """

    begins_early: ClassVar[bool] = True
    defers: ClassVar[bool] = False
    fails_alone: ClassVar[bool] = True
    internal_error: ClassVar[str] = INTERNAL_ERROR
    vocab_size: ClassVar[int] = VOCAB_SIZE
    draft_trees: ClassVar[bool] = False

    def __init__(self, executor: ProcessorExecutor | None = None, **settings: Any) -> None:
        self.ends: dict[str, str] = {}
        self.possible_ends: dict[str, str] = {}
        self.receipts: dict[str, int] = {}
        self.draft_tokens: tuple[int, ...] | None = None
        self.num_accepted = 0
        self.random = random.Random(0)
        self._executor = executor
        self._make({"processor_isolation": "none"} | settings)

    def run(self, seed: int, *jobs: Job) -> dict[str, list[int]]:
        """Run requests to their ends, and return their outputs by id."""
        self.random.seed(seed)
        with self._logged():
            return self._run(jobs)

    def expected(self, job: Job) -> list[int]:
        """Return the output of a request."""
        return job.expected

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Collect the messages about requests that end, from this rank."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = self._keep  # type: ignore[method-assign]
        rank = threading.get_ident()
        handler.addFilter(lambda record: record.thread == rank)
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
            rid, message = str(record.args[0]), record.getMessage()
            if "if vLLM accepts" in message:
                self.possible_ends[rid] = message
                return
            assert rid not in self.ends, "a fault is logged once"
            self.ends[rid] = message

    def _draft(self, job: Job, output: Sequence[int], most: int = NUM_DRAFTS) -> tuple[list[int], list[int]]:
        """Return draft tokens, of which some are right and some repeat others, and the parent of each.

        The first is the last output token, and has parent -1.
        """
        if self.draft_tokens is not None:
            return [output[-1], *self.draft_tokens[:most]], [*range(-1, len(self.draft_tokens[:most]))]
        expected = self.expected(job)
        tokens, parents, depths = [output[-1]], [-1], [0]
        for node in range(1, most + 1):
            parent = self.random.randrange(node) if self.draft_trees else node - 1
            place = len(output) + depths[parent]
            right = expected[place] if place < len(expected) else CHOICE
            tokens.append(right if self.random.random() < 0.6 else self.random.randint(2, 8))
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return tokens, parents

    @property
    @abstractmethod
    def held(self) -> list[Any]:
        """Objects of requests that have not been released; empty after a run."""

    @abstractmethod
    def _make(self, settings: dict[str, Any]) -> None: ...

    @abstractmethod
    def _run(self, jobs: Sequence[Job]) -> dict[str, list[int]]: ...


class PluginEngine(FakeEngine):
    """An engine with a seat.

    Args:
        executor: see `FakeEngine`.
        group: the rank and its group.
        settings: see `FakeEngine`.

    Attributes:
        processors: loads the processors.
        seat: the seat.
    """

    settings_class: ClassVar[type[PluginSettings]]
    logger: ClassVar[Logger] = logging.getLogger("logitship.tests.engine")
    processors: PluginProcessors
    seat: Any

    def __init__(
        self, executor: ProcessorExecutor | None = None, group: FakeGroup | None = None, **settings: Any
    ) -> None:
        self.group = group or FakeGroup.of(1)[0]
        super().__init__(executor, **settings)

    def _make(self, settings: dict[str, Any]) -> None:
        self.settings = self.settings_class(**settings)
        self.model = ModelView(VOCAB_SIZE, frozenset({EOS}), None)
        with self._own_executor():
            self.processors = for_execution(self.settings, self.model, MAX_ROWS, self.logger)  # type: ignore[arg-type]
        release = self.processors.release

        def counted(uses: Collection[ProcessorUse]) -> None:
            uses = list(uses)
            self.receipts |= {use.rid: use.receipt.steps for use in uses}
            release(uses)

        self.processors.release = counted  # type: ignore[method-assign, assignment]

    @contextmanager
    def _own_executor(self) -> Iterator[None]:
        """Let processors that are made meanwhile run in the engine's own executor, if it has one."""
        make = plugin_setup.shipped_executor
        try:
            if self._executor is not None:
                executor = self._executor
                plugin_setup.shipped_executor = lambda *_: executor
            yield
        finally:
            plugin_setup.shipped_executor = make

    @property
    def runtime(self) -> RequestRuntime:
        runtime: RequestRuntime = self.seat._runtime
        return runtime

    def close_audit_log(self) -> None:
        """Write what is not written yet."""
        if self.runtime._audit_log is not None:
            self.runtime._audit_log.close()

    @property
    def held(self) -> list[Any]:
        return [*range(self.processors.in_use), *self.runtime._kept, *self.runtime._shipped._members]


class BatchedEngine(PluginEngine):
    """An engine that runs several requests in a step, at random as the engine may schedule them.

    Covers chunks of prompts, requests that sit out a step, and preempted ones. Tests may also compute single steps.

    Attributes:
        is_async: a step is computed before the tokens of the one before are processed.
        is_delayed: its tokens are sampled after that.
        drops_tokens: a preempted request loses its tokens in flight.
        num_dropped: the number of these tokens.
    """

    is_async: ClassVar[bool] = False
    is_delayed: ClassVar[bool] = False
    drops_tokens: ClassVar[bool] = False
    ranks_class: ClassVar[type[GroupRanks]] = GroupRanks

    def _make(self, settings: dict[str, Any]) -> None:
        super()._make(settings)
        ranks = self.ranks_class(self.group)
        runs = self.processors if ranks.is_first else None
        self.num_dropped = 0
        log = None if self.settings.audit_log is None else AuditLog(self.settings.audit_log)
        self._start(EngineWorker(self.settings, self.model, ranks, MAX_ROWS, runs, self.logger, log))  # type: ignore[arg-type]

    def _run(self, jobs: Sequence[Job]) -> dict[str, list[int]]:
        requests = [self.request(job) for job in jobs]
        waiting, running = [*requests], list[FakeRequest]()
        results = deque[dict[FakeRequest, int]]()
        while waiting or running or results:
            self._finish_ended(waiting, running)
            preempted = [each for each in running if self.random.random() < 0.1]
            for request in preempted:
                running.remove(request)
                self._preempt(request)
            while waiting and len(running) < MAX_ROWS and self.random.random() < 0.7:
                running.append(waiting.pop(0))
                self.add(running[-1])
            waiting += preempted
            chosen = [each for each in running if self.random.random() < 0.8 and self.may_run(each)]
            self.random.shuffle(chosen)
            plan = {each: self.random.randint(1, max(1, each.missing)) for each in chosen}
            self.begin(plan)
            self._process(results, int(bool(plan) and not self.is_delayed))
            if plan:
                results.append(self._append(self.sample(*plan)))
                self._process(results, int(self.is_async))
        self.end()
        self.close_audit_log()
        for request in requests:
            if self.is_failed(request) and request.rid in self.possible_ends:
                self.ends.setdefault(request.rid, self.possible_ends[request.rid])
        return {each.rid: each.visible for each in requests}

    def _finish_ended(self, *queues: list[FakeRequest]) -> None:
        for queue in queues:
            for request in [each for each in queue if each.has_ended]:
                queue.remove(request)
                self.finish(request)

    def _process(self, results: deque[dict[FakeRequest, int]], most: int) -> None:
        """Process the results of steps but for the last `most`."""
        while len(results) > most:
            for request, count in results.popleft().items():
                request.take(count)

    def _append(self, tokens: Mapping[FakeRequest, list[int]]) -> dict[FakeRequest, int]:
        for request, new in tokens.items():
            self.commit(request, new)
            request.computed += len(new) - 1
            self.num_accepted += len(new) - 1
        return {request: len(new) for request, new in tokens.items()}

    def _preempt(self, request: FakeRequest) -> None:
        self.num_dropped += len(request.in_flight) * self.drops_tokens
        if self.drops_tokens:
            request.in_flight.clear()
        request.computed = 0
        self.remove(request)

    def start(self, *jobs: Job) -> Any:
        """Add new requests, and return them, or the one."""
        requests = [self.request(job) for job in jobs]
        for request in requests:
            self.add(request)
        return requests if len(requests) > 1 else requests[0]

    def begin(self, plan: Mapping[FakeRequest, int]) -> None:
        """Begin a step that computes so many tokens of each request."""
        for request, count in plan.items():
            request.computed += count
        self._begin(plan)

    def sample(self, *rows: FakeRequest) -> dict[FakeRequest, list[int]]:
        """Run the processors, and return the sampled tokens of the rows that have one."""
        logits = torch.zeros(len(rows), VOCAB_SIZE)
        logits[:, CHOICE] = 1.0
        before = logits.clone()
        self._apply(logits, rows)
        plain = [row for row, each in enumerate(rows) if each.job.first is None]
        assert torch.equal(logits[plain], before[plain])
        tokens = zip(rows, logits.argmax(-1).tolist(), strict=True)
        return {request: [token] for request, token in tokens if request.missing == 0}

    def sampled(self, *rows: FakeRequest) -> list[int | None]:
        """Sample the next tokens of rows and process them; None for a request that ends, or sits out."""
        with self._logged():
            tokens = self.sample(*rows)
        for request, count in self._append(tokens).items():
            request.take(count)
        return [None if self.is_failed(each) or each not in tokens else each.output[-1] for each in rows]

    def step(self, *rows: FakeRequest) -> list[int | None]:
        """Compute a step of some requests, and return their tokens as `sampled`."""
        self.begin({each: each.missing for each in rows})
        return self.sampled(*rows)

    def is_failed(self, request: FakeRequest) -> bool:
        """Return whether the plugin has ended a request."""
        return request.output[-1:] == [FAULT_TOKEN]

    def commit(self, request: FakeRequest, tokens: list[int]) -> None:
        """Append sampled tokens."""
        request.in_flight += tokens

    @abstractmethod
    def _start(self, worker: EngineWorker[Any]) -> None: ...

    @abstractmethod
    def request(self, job: Job) -> FakeRequest:
        """Return a new request."""

    def may_run(self, request: Any) -> bool:
        """Return whether a running request may take part in the next step."""
        return True

    def add(self, request: Any) -> None:
        """Let a request, new or preempted, be computed from the next step on."""

    def remove(self, request: Any) -> None:
        """Take a request out of the batch: it is finished, or preempted."""

    def finish(self, request: Any) -> None:
        """Drop a request that has ended."""
        self.remove(request)

    def end(self) -> None:
        """Let the plugin know that all requests have finished."""
        self.begin({})

    @abstractmethod
    def _begin(self, plan: Any) -> None: ...

    @abstractmethod
    def _apply(self, logits: torch.Tensor, rows: Any) -> None: ...
