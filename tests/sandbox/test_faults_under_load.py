"""Every kind of fault that shipped code can have, while sixteen other streams run.

The offender's requests end with the right error, in time. The others get the tokens that they get without an offender.
Half of the others carry shipped processors; two of them the offender's own class, with parameters that do no harm: one
for another tenant, one in the offender's own sandbox, where the fault is one that ends a row and not the process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    ProcessorString,
    SourceProcessor,
)
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.sandbox import Sandbox
from logitship.server.config import ServerConfig
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.build import build_engine
from logitship.server.http.app import create_app
from logitship.server.model.model_loader import LoadedModel
from logitship.server.refusals import BadRequest
from logitship.server.requests.messages import FinishReason, GenerationRequest, ProcessorRequest

STEP_TIMEOUT = 2.0
LOAD_TIMEOUT = 6.0
"""Seconds: as few as may be, since tests wait for them, and enough for who does no harm on a busy machine."""
NUMBERS = itertools.count()
GRACE = 30.0
"""Seconds beyond its deadline after which an offender's request must have ended: the machine may be busy. Without a
deadline, an offender takes a minute or more."""
LENGTH = 120
OFFENDER_LENGTH = 40

BAN = SourceProcessor(
    """
from logitship import CustomLogitProcessor

class Ban(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            row[params["token_ids"]] = -float("inf")
        return logits
""",
    "Ban",
)
NO_REPEAT = SourceProcessor(
    """
import torch
from logitship import CustomLogitProcessor

class NoRepeat(CustomLogitProcessor):
    '''None of the last tokens once more. Keeps them in the sequence's state, and fails if the history is not exact.'''
    def __call__(self, logits, custom_param_list=None):
        result = logits.clone()
        for row, params in enumerate(custom_param_list):
            req = params["__req__"]
            seen = req.state.setdefault("seen", [])
            assert seen == req.output_ids[:-1]
            seen += req.output_ids[len(seen):]
            result[row, seen[-params.get("last", 20):]] = -torch.inf
        return result
""",
    "NoRepeat",
)
OFFENDER = """
import ctypes, os, signal, struct, sys, time
import torch
from logitship import CustomLogitProcessor

def answer_frame():
    '''The connection, and the number of the call: those of the worker that called.'''
    frame = sys._getframe()
    while not {{"connection", "number"}} <= frame.f_locals.keys():
        frame = frame.f_back
    return frame.f_locals["connection"], frame.f_locals["number"]

class Offender(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            row[params["token_ids"]] = -float("inf")
            if len(params["__req__"].output_ids) >= params.get("from_step", 1000):
{body}
        return logits
"""


def offender(body: str) -> SourceProcessor:
    """A class that bans tokens, and executes `body` for a request that has come to its `from_step`."""
    indented = "".join(f"{' ' * 16}{line}\n" for line in body.splitlines())
    return SourceProcessor(OFFENDER.format(body=indented), "Offender")


@dataclass(frozen=True)
class Stream:
    """One of the others."""

    name: str
    tenant: str = "other"
    processors: tuple[tuple[ProcessorString, dict[str, Any]], ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)

    def request(self, length: int = LENGTH) -> GenerationRequest:
        prompt = [4 + byte for byte in f"a prompt for {self.name}".encode()]
        sampling = {"max_tokens": length, "ignore_eos": True, **self.sampling}
        return GenerationRequest(
            rid=f"{self.name} {next(NUMBERS)}",
            tenant=self.tenant,
            prompt_token_ids=prompt,
            processors=tuple(ProcessorRequest(string, params) for string, params in self.processors),
            sampling_params=SamplingParams(**sampling),
        )


GREEDY: dict[str, Any] = {"temperature": 0}
HARMLESS = {"token_ids": [40, 41, 42]}


def seeded(seed: int, **more: Any) -> dict[str, Any]:
    return {"seed": seed, "temperature": 0.9, **more}


def sixteen_streams(offending: SourceProcessor, own_company: bool) -> list[Stream]:
    """The others.

    Args:
        own_company: one of them is in the offender's sandbox.
    """
    disallowed = InstalledProcessor("disallowed_tokens")
    ngram = InstalledProcessor("no_repeat_ngram")
    neighbour = ("", offending) if own_company else ("other", BAN)
    return [
        Stream("greedy", sampling=GREEDY),
        Stream("greedy with penalties", sampling=GREEDY | {"repetition_penalty": 1.2, "presence_penalty": 0.3}),
        Stream("seeded", sampling=seeded(1)),
        Stream("seeded among few", sampling=seeded(2, top_k=12, top_p=0.9)),
        Stream("seeded with a bias", sampling=seeded(3, logit_bias={70: 1.5}, min_p=0.01)),
        Stream("greedy, installed", "", ((disallowed, {"token_ids": [50, 60]}),), GREEDY),
        Stream("seeded, installed", "", ((ngram, {"ngram_size": 2, "window_size": 50}),), seeded(4)),
        Stream(
            "two installed",
            processors=((disallowed, HARMLESS), (ngram, {"ngram_size": 3, "window_size": 9})),
            sampling=seeded(5),
        ),
        Stream("greedy, ban", processors=((BAN, {"token_ids": [45, 46]}),), sampling=GREEDY),
        Stream("seeded, ban", processors=((BAN, {"token_ids": [47]}),), sampling=seeded(6)),
        Stream("greedy, ban, another tenant", "third", ((BAN, {"token_ids": [45]}),), GREEDY),
        Stream("greedy, no repeat", processors=((NO_REPEAT, {"last": 10}),), sampling=GREEDY),
        Stream("seeded, no repeat", processors=((NO_REPEAT, {}),), sampling=seeded(7)),
        Stream("two shipped", processors=((NO_REPEAT, {}), (BAN, {"token_ids": [80]})), sampling=seeded(8)),
        Stream("the same class, another tenant", processors=((offending, HARMLESS),), sampling=seeded(9)),
        Stream("beside the offender", neighbour[0], ((neighbour[1], HARMLESS),), seeded(10)),
    ]


async def run_through(engine: AsyncEngine, request: GenerationRequest) -> tuple[list[int], FinishReason]:
    """A request's tokens, and why it ended."""
    tokens: list[int] = []
    async for chunk in await engine.submit(request):
        tokens += chunk.token_ids
        last = chunk
    assert last.finish_reason is not None
    return tokens, last.finish_reason


class Company:
    """The sixteen others, each the same request again and again, until they are told to stop."""

    def __init__(self, engine: AsyncEngine, streams: list[Stream], expected: dict[str, list[int]]) -> None:
        self._engine = engine
        self._streams = streams
        self._expected = expected
        self._stopping = False
        self._gained = {stream.name: asyncio.Event() for stream in streams}

    async def each_gains_a_token(self) -> None:
        for event in self._gained.values():
            event.clear()
        for event in self._gained.values():
            await event.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for stream in self._streams:
                group.create_task(self._run(stream))
            await self.each_gains_a_token()
            yield
            await self.each_gains_a_token()
            self._stopping = True

    async def _run(self, wanted: Stream) -> None:
        while not self._stopping:
            stream = await self._engine.submit(wanted.request())
            tokens: list[int] = []
            async for chunk in stream:
                tokens += chunk.token_ids
                last = chunk
                if chunk.token_ids:
                    self._gained[wanted.name].set()
                if self._stopping:
                    await stream.aclose()
            assert last.finish_reason is not None
            assert last.finish_reason.error is None, (wanted.name, last.finish_reason.error)
            assert tokens == self._expected[wanted.name][: len(tokens)], wanted.name
            assert self._stopping or len(tokens) == LENGTH


@dataclass(frozen=True)
class Loaded:
    """An engine, its HTTP front, and what each stream generates where nobody offends."""

    engine: AsyncEngine
    app: FastAPI
    expected: dict[str, list[int]]


@pytest.fixture(scope="module")
def loaded(loaded_model: LoadedModel, sandbox_processes: Any) -> Iterator[Loaded]:
    config = ServerConfig(
        model_path="tiny",
        max_num_seqs=24,
        random_seed=0,
        enable_custom_logit_processor=True,
        processor_isolation="sandbox",
        sandbox_step_timeout=STEP_TIMEOUT,
        sandbox_load_timeout=LOAD_TIMEOUT,
        sandbox_cpu_time=0.5,
        sandbox_memory=64 << 20,
        max_request_bytes=4 << 20,
    )
    engine = build_engine(config, loaded_model)

    async def undisturbed() -> dict[str, list[int]]:
        streams = sixteen_streams(offender("pass"), own_company=True)
        results = await asyncio.gather(*(run_through(engine, stream.request()) for stream in streams))
        assert all(reason.kind == "length" for _, reason in results)
        return {stream.name: tokens for stream, (tokens, _) in zip(streams, results, strict=True)}

    yield Loaded(engine, create_app(engine), run(undisturbed()))
    engine.stop()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(240):
            return await coroutine

    return asyncio.run(bounded())


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        body: what the class does, see `offender`.
        fault: what the error says of its kind.
        says: a regular expression that the error's message matches.
        traceback: what stands in the traceback; "" if there is none.
        ends_sandbox: it ends all that runs in the offender's sandbox, not only the offender's own rows.
    """

    name: str
    body: str
    fault: str
    says: str
    traceback: str = ""
    ends_sandbox: bool = False


def raising(name: str, body: str, says: str) -> Kind:
    return Kind(name, body, "exception", f"processor Offender raised {says}", body.splitlines()[-1].strip())


def bad_result(name: str, value: str, says: str) -> Kind:
    return Kind(name, f"return {value}", "bad_result", f"processor Offender returned {says}")


def ending(name: str, body: str, fault: str, says: str) -> Kind:
    return Kind(name, body, fault, f"processor Offender {says}", ends_sandbox=True)


NO_ANSWER = rf"gave no answer within {STEP_TIMEOUT:g} s: its process was killed"
NO_WORKER = "answered what no worker answers: its process was killed"
WRITE_FRAME = (
    "connection, number = answer_frame()\nos.write(connection, struct.pack('<IIQ', {kind}, number, {size}){more})"
)

KINDS = [
    raising("raises", "raise ValueError('no such luck')", "ValueError: no such luck"),
    raising("raises from a helper's depth", "torch.zeros(2) @ torch.zeros(3)", "RuntimeError: "),
    raising("raises KeyboardInterrupt", "raise KeyboardInterrupt", "KeyboardInterrupt"),
    raising("raises GeneratorExit", "raise GeneratorExit('enough')", "GeneratorExit: enough"),
    raising("raises SystemExit", "sys.exit(7)", "SystemExit: 7"),
    raising(
        "raises its own BaseException", "class Mine(BaseException): pass\nraise Mine('all mine')", "Mine: all mine"
    ),
    raising(
        "raises a group",
        "raise BaseExceptionGroup('two', [ValueError('one'), KeyboardInterrupt()])",
        "BaseExceptionGroup: two",
    ),
    raising("recurses without end", "def again(): again()\nagain()", "RecursionError"),
    raising("makes a forbidden system call", "__import__('socket').socket()", "PermissionError"),
    raising("tells where the server lives", "raise ValueError(f'{torch.__file__} {sys.path}')", "ValueError"),
    Kind(
        "an exception whose text has no end",
        "class Long(Exception):\n    def __str__(self): return 'x' * 3_000_000\nraise Long",
        "exception",
        r"processor Offender raised Long: x{1000,4096}… \(3000000 characters\)",
        "xxx",
    ),
    Kind(
        "an exception that raises when it is told",
        "class Shy(Exception):\n    def __str__(self): raise SystemExit\nraise Shy",
        "exception",
        r"raised Shy: \(its message cannot be shown",
        "raise Shy",
    ),
    Kind(
        "a traceback that claims another file",
        "exec(compile('\\n' * 2 + '1 / 0', '/etc/passwd', 'exec'))",
        "exception",
        "raised ZeroDivisionError",
        'File "/etc/passwd", line 3',
    ),
    Kind(
        "its own attributes are gone",
        "del params['__req__']\ncustom_param_list.clear()\nparams.clear()\nraise KeyError('gone')",
        "exception",
        "raised KeyError: 'gone'",
        "raise KeyError('gone')",
    ),
    bad_result("returns nothing", "None", "NoneType, not a tensor"),
    bad_result("returns a number", "1", "int, not a tensor"),
    bad_result("returns another shape", "logits[:, :-1]", r"shape \[\d, 259\], expected \[\d, 260\]"),
    bad_result("returns integers", "logits.nan_to_num().long()", "dtype torch.int64"),
    bad_result("returns another device", "logits.to('meta')", "a tensor on meta"),
    bad_result("returns a sparse tensor", "logits.to_sparse()", "a tensor of layout torch.sparse_coo"),
    Kind("leaves NaN", "row[7] = float('nan')", "non_finite", "returned NaN"),
    Kind("leaves +inf", "row[7] = float('inf')", "non_finite", r"returned \+inf"),
    Kind("leaves no token", "row[:] = -float('inf')", "non_finite", "left no token"),
    ending("loops", "while True: pass", "deadline", NO_ANSWER),
    ending("sleeps", "time.sleep(60)", "deadline", NO_ANSWER),
    ending("loops in C", "__import__('re').fullmatch('(a+)+b', 'a' * 60)", "deadline", NO_ANSWER),
    ending(
        "an exception that loops when it is told",
        "class Slow(Exception):\n    def __str__(self):\n        while True: pass\nraise Slow",
        "deadline",
        NO_ANSWER,
    ),
    raising("takes all memory", "hoard = []\nwhile True: hoard.append(bytearray(1 << 22))", "MemoryError"),
    raising("asks torch for all memory", "torch.ones(1 << 30)", "RuntimeError: "),
    ending("exits", "os._exit(3)", "crash", "ended its process with exit status 3"),
    ending("reads at address 0", "ctypes.string_at(0)", "crash", "ended its process: SIGSEGV"),
    ending("aborts", "os.abort()", "crash", r"ended its process: SIG(ABRT|SEGV|ILL)"),
    ending(
        "overflows the stack of C",
        "class Deep: pass\nDeep.__add__ = lambda one, other: one + other\n"
        "sys.setrecursionlimit(1 << 30)\nDeep() + Deep()",
        "crash",
        "ended its process: SIGSEGV",
    ),
    ending(
        "makes a system call that kills", "ctypes.CDLL(None).syscall(0x40000027)", "crash", "ended its process: SIG"
    ),
    ending("closes its connection", "os.closerange(3, 64)", "crash", "ended its process with exit status 1"),
    ending(
        "closes its connection and goes on",
        "os.closerange(3, 64)\ntime.sleep(60)",
        "crash",
        "closed its connection: its process was killed",
    ),
    ending("answers garbage", "os.write(answer_frame()[0], b'\\xff' * 64)", "protocol", NO_WORKER),
    ending(
        "answers a pickle",
        WRITE_FRAME.format(kind=4, size=9, more=" + b'\\x80\\x04K\\x01.....'"),
        "protocol",
        NO_WORKER,
    ),
    ending(
        "answers of other rows",
        WRITE_FRAME.format(kind=4, size=33, more=' + b\'[[[31],"exception","sorry","here"]]\'[:33]'),
        "protocol",
        NO_WORKER,
    ),
    ending("answers as if it were loaded", WRITE_FRAME.format(kind=1, size=0, more=""), "protocol", NO_WORKER),
    ending("claims an endless answer", WRITE_FRAME.format(kind=3, size="1 << 60", more=""), "protocol", NO_WORKER),
    ending("answers more than it claims", WRITE_FRAME.format(kind=3, size=0, more=" + b'!'"), "protocol", NO_WORKER),
    ending(
        "answers half and falls silent",
        "os.write(answer_frame()[0], b'\\x03\\0\\0')\ntime.sleep(60)",
        "deadline",
        NO_ANSWER,
    ),
    ending("answers twice", WRITE_FRAME.format(kind=3, size=0, more=""), "protocol", NO_WORKER),
    ending(
        "answers, then computes on",
        WRITE_FRAME.format(kind=3, size=0, more="") + "\nwhile True: pass",
        "deadline",
        NO_ANSWER,
    ),
]


@dataclass(frozen=True)
class Ended:
    """How an offender's request ended.

    Attributes:
        seconds: from its last token, or else from its admission, to its end.
    """

    tokens: list[int]
    reason: FinishReason
    seconds: float


async def offend(engine: AsyncEngine, request: GenerationRequest) -> Ended:
    stream = await engine.submit(request)
    tokens: list[int] = []
    moment = time.monotonic()
    async for chunk in stream:
        last = chunk
        if chunk.finish_reason is None:
            tokens += chunk.token_ids
            moment = time.monotonic()
    assert last.finish_reason is not None
    return Ended(tokens, last.finish_reason, time.monotonic() - moment)


async def post(app: FastAPI, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=120) as client:
        return await client.post("/generate", json=body)


def offender_stream(string: ProcessorString, from_step: int) -> Stream:
    """The same request as that of the stream beside the offender, but for the parameter that says when."""
    return Stream("beside the offender", "", ((string, HARMLESS | {"from_step": from_step}),), seeded(10))


def assert_tells_nothing_of_the_server(text: str) -> None:
    folders = {sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), str(Path.home()), os.getcwd()}
    for folder in folders | {"site-packages", "/sampler/", "/client/", "root:x:0"}:
        assert folder not in text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_fault_ends_the_offender_and_nobody_else(loaded: Loaded, kind: Kind) -> None:
    engine, string = loaded.engine, offender(kind.body)
    company = Company(engine, sixteen_streams(string, own_company=not kind.ends_sandbox), loaded.expected)
    http_body = {
        "input_ids": offender_stream(string, 2).request().prompt_token_ids,
        "custom_logit_processor": {"source": string.source, "class_name": string.class_name},
        "sampling_params": {"max_new_tokens": OFFENDER_LENGTH, "custom_params": HARMLESS | {"from_step": 2}},
    }

    async def scene() -> tuple[list[Ended], httpx.Response, list[int]]:
        async with company.running():
            first, second, answer = await asyncio.gather(
                offend(engine, offender_stream(string, 0).request(OFFENDER_LENGTH)),
                offend(engine, offender_stream(string, 5).request(OFFENDER_LENGTH)),
                post(loaded.app, http_body),
            )
            # Once more, by somebody who does no harm.
            again = Stream("beside the offender", "", ((string, HARMLESS),), seeded(10)).request(OFFENDER_LENGTH)
            tokens, reason = await run_through(engine, again)
            assert reason.kind == "length"
        return [first, second], answer, tokens

    ends, answer, tokens = run(scene())
    expected = loaded.expected["beside the offender"]
    assert tokens == expected[:OFFENDER_LENGTH]
    for ended, from_step in zip(ends, (0, 5), strict=True):
        assert ended.tokens == expected[: len(ended.tokens)]
        assert len(ended.tokens) == from_step or (kind.ends_sandbox and len(ended.tokens) <= from_step + 1)
        assert ended.seconds < STEP_TIMEOUT + GRACE
        error = ended.reason.error
        assert ended.reason.kind == "abort"
        assert error is not None
        assert (error.type, error.status_code, error.kind) == ("ProcessorFault", 400, kind.fault), error
        assert (error.digest, error.name) == (string.digest, "Offender")
        assert re.search(kind.says, error.message), error.message
        assert kind.traceback in error.traceback
        assert bool(error.traceback) == bool(kind.traceback)
        assert len(error.message) + len(error.traceback) < 10_000
        assert_tells_nothing_of_the_server(error.message + error.traceback)
    assert answer.status_code == 400
    told = answer.json()["error"]
    assert (told["type"], told["digest"], told["name"]) == ("ProcessorFault", string.digest, "Offender")
    assert re.search(kind.says, told["message"])
    assert kind.traceback in told["traceback"]
    assert_tells_nothing_of_the_server(answer.text)


def load_source(body: str) -> SourceProcessor:
    return SourceProcessor(
        f"import ctypes, os, struct, sys, time\nfrom logitship import CustomLogitProcessor\n{body}", "P"
    )


@dataclass(frozen=True)
class LoadKind:
    """A kind of processor that cannot be loaded.

    Attributes:
        says: a regular expression that the refusal matches.
    """

    name: str
    string: SourceProcessor | PickledProcessor
    says: str


UNABLE_TO_INIT = """
class P(CustomLogitProcessor):
    def __init__(self):
        1 / 0

    def __call__(self, logits, custom_param_list=None):
        return logits
"""
ANSWERS_THAT_IT_IS_DONE = """
frame = sys._getframe()
while "connection" not in frame.f_locals:
    frame = frame.f_back
os.write(frame.f_locals["connection"], struct.pack("<IIQ", 3, 1, 0))
time.sleep(60)
"""
KILLED = r"was killed \(while it was loaded\)"
LOAD_KINDS = [
    LoadKind(
        "loops", load_source("while True: pass"), rf"gave no answer within {LOAD_TIMEOUT:g} s: its process {KILLED}"
    ),
    LoadKind(
        "sleeps", load_source("time.sleep(60)"), rf"gave no answer within {LOAD_TIMEOUT:g} s: its process {KILLED}"
    ),
    LoadKind("exits", load_source("os._exit(0)"), "ended its process with exit status 0"),
    LoadKind("crashes", load_source("ctypes.string_at(0)"), "ended its process: SIGSEGV"),
    LoadKind("raises", load_source("1 / 0"), "ZeroDivisionError"),
    LoadKind("raises SystemExit", load_source("sys.exit(3)"), "SystemExit: 3"),
    LoadKind("raises KeyboardInterrupt", load_source("raise KeyboardInterrupt"), "KeyboardInterrupt"),
    LoadKind("takes all memory", load_source("hoard = [bytearray(1 << 20) for _ in range(1 << 20)]"), "MemoryError"),
    LoadKind("closes its connection", load_source("os.closerange(3, 64)"), "ended its process with exit status 1"),
    LoadKind("answers that it is done", load_source(ANSWERS_THAT_IT_IS_DONE), rf"answered what no worker.* {KILLED}"),
    LoadKind("is no subclass", load_source("class P: pass"), "CustomLogitProcessor"),
    LoadKind("is abstract", load_source("class P(CustomLogitProcessor): pass"), "abstract"),
    LoadKind("is not there", load_source("class Q(CustomLogitProcessor): pass"), "P"),
    LoadKind("does not parse", load_source("class P(:"), "syntax"),
    LoadKind("raises in __init__", load_source(UNABLE_TO_INIT), "ZeroDivisionError"),
    LoadKind("tells where the server lives", load_source("raise ValueError(sys.path, os.__file__)"), "ValueError"),
    LoadKind("is no pickle", PickledProcessor(b"not a pickle"), "."),
    LoadKind("exits when it is unpickled", PickledProcessor(b"cos\n_exit\n(I5\ntR."), "exit status 5"),
    LoadKind("is another Python's", PickledProcessor(b"\x80\x04N.", python="3.9"), r"serialized by Python 3\.9"),
]


def string_json(string: SourceProcessor | PickledProcessor) -> dict[str, Any]:
    if isinstance(string, SourceProcessor):
        return {"source": string.source, "class_name": string.class_name}
    about = {"logitship": {"v": 1, "python": string.python}} if string.python else {}
    return {"callable": string.payload.hex(), **about}


@pytest.mark.parametrize("kind", LOAD_KINDS, ids=lambda kind: kind.name)
def test_what_cannot_be_loaded_is_refused(loaded: Loaded, kind: LoadKind) -> None:
    engine = loaded.engine
    company = Company(engine, sixteen_streams(offender("pass"), own_company=True), loaded.expected)
    stream = Stream("refused", "", ((kind.string, {}),))

    async def scene() -> httpx.Response:
        async with company.running():
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(BadRequest, match=kind.says) as caught:
                    await engine.submit(stream.request())
                assert time.monotonic() - began < LOAD_TIMEOUT + GRACE
                assert caught.value.param == "processors[0]"
                assert_tells_nothing_of_the_server(caught.value.message)
            return await post(loaded.app, {"input_ids": [5], "custom_logit_processor": string_json(kind.string)})

    answer = run(scene())
    assert answer.status_code == 400
    assert re.search(kind.says, answer.json()["error"]["message"])
    assert_tells_nothing_of_the_server(answer.text)


def test_a_string_over_the_size_limit_is_refused(loaded: Loaded) -> None:
    company = Company(loaded.engine, sixteen_streams(offender("pass"), own_company=True), loaded.expected)
    source = {"source": "#" * ((1 << 20) + 1), "class_name": "P"}

    async def scene() -> httpx.Response:
        async with company.running():
            return await post(loaded.app, {"input_ids": [5], "custom_logit_processor": source})

    answer = run(scene())
    assert answer.status_code in (400, 413)
    assert "1048576" in answer.json()["error"]["message"]


async def ends_its_sandbox(loaded: Loaded, request: GenerationRequest, kind: str) -> None:
    ended = await offend(loaded.engine, request)
    assert ended.reason.error is not None
    assert (ended.reason.error.type, ended.reason.error.kind) == ("ProcessorFault", kind)
    assert ended.seconds < STEP_TIMEOUT + GRACE


def test_parameters_that_do_not_fit_into_a_sandbox(loaded: Loaded) -> None:
    string = offender("pass")
    company = Company(loaded.engine, sixteen_streams(string, own_company=False), loaded.expected)
    too_much = Stream("too much", "", ((string, {"token_ids": [], "text": "x" * (70 << 20)}),))
    fitting = offender_stream(string, 1000)

    async def scene() -> list[int]:
        async with company.running():
            await ends_its_sandbox(loaded, too_much.request(OFFENDER_LENGTH), "crash")
            tokens, _ = await run_through(loaded.engine, fitting.request(OFFENDER_LENGTH))
        return tokens

    assert run(scene()) == loaded.expected["beside the offender"][:OFFENDER_LENGTH]


def sandboxes_in_use(engine: AsyncEngine) -> set[Sandbox]:
    """Those that have a processor, and not those that wait for one."""
    assert engine._sandboxes is not None
    return set(engine._sandboxes._sandboxes)


async def end_of(sandbox: Sandbox) -> None:
    """Wait for the end of its process."""
    ended = asyncio.Event()
    pidfd = os.dup(sandbox._process.pidfd)
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)


def test_one_that_computes_after_its_last_answer_is_killed(loaded: Loaded) -> None:
    """Nobody asks it for anything any more, so that no deadline ends it."""
    string = offender("# alone\n{}\nwhile True: pass".format(WRITE_FRAME.format(kind=3, size=0, more="")))
    company = Company(loaded.engine, sixteen_streams(string, own_company=False), loaded.expected)

    async def scene() -> list[int]:
        async with company.running():
            others = sandboxes_in_use(loaded.engine)
            _, reason = await run_through(loaded.engine, offender_stream(string, 0).request(1))
            assert reason.kind == "length"
            (sandbox,) = sandboxes_in_use(loaded.engine) - others
            await end_of(sandbox)
            again, _ = await run_through(loaded.engine, offender_stream(string, 1000).request(OFFENDER_LENGTH))
        return again

    assert run(scene()) == loaded.expected["beside the offender"][:OFFENDER_LENGTH]
