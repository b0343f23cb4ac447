"""Every kind of fault of shipped code, while sixteen other streams run.

The faulty requests end with the right error, in time. The other streams get the same tokens as without faults. Half of
them use shipped processors; two of them use the faulty class with harmless parameters: one for another tenant, and one
in the same sandbox, if the fault only affects a row and not the process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
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
from logitship.sampler.sandbox.cpu_time import BACKSTOP, DEFERRED_BACKSTOP
from logitship.sampler.sandbox.sandbox import Sandbox
from logitship.server.config import ServerConfig
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.build import build_engine
from logitship.server.http.app import create_app
from logitship.server.model.model_loader import LoadedModel
from logitship.server.refusals import BadRequest
from logitship.server.requests.messages import FinishReason, GenerationRequest
from tests.helpers.coroutines import run
from tests.helpers.engine_requests import generate, request
from tests.helpers.processors import BAN, shipped

STEP_TIMEOUT = 1.0
LOAD_TIMEOUT = 6.0
"""Seconds: as few as may be, since tests wait for them, and enough for who does no harm on a busy machine."""
NUMBERS = itertools.count()
GRACE = 30.0 + DEFERRED_BACKSTOP * STEP_TIMEOUT
"""Seconds beyond its deadline after which a faulty request must have ended: the machine may be busy, and a deferred
call only gets what others leave of the cores."""
LENGTH = 120
OFFENDER_LENGTH = 40

NO_REPEAT = shipped(
    "NoRepeat",
    """
    # Ban the last tokens. Keep them in the sequence's state, and fail if the history is not exact.
    result = logits.clone()
    for row, params in enumerate(custom_param_list):
        req = params["__req__"]
        seen = req.state.setdefault("seen", [])
        assert seen == req.output_ids[:-1]
        seen += req.output_ids[len(seen):]
        result[row, seen[-params.get("last", 20):]] = -torch.inf
    return result
    """,
)
CLOSED = "(closed its connection: its process was killed|ended its process: SIGSEGV)"
"""Message about a process without its connection. Python 3.13 crashes when it is to dump its stack to a closed file."""
OFFENDER = """
import ctypes, os, signal, struct, sys, time
import torch
from logitship import CustomLogitProcessor

def answer_frame():
    '''Return the connection and the number of the call, from the worker's frame.'''
    frame = sys._getframe()
    while not {{"connection", "server"}} <= {{*frame.f_locals}}:
        frame = frame.f_back
    return frame.f_locals["connection"], frame.f_locals["server"]._number

class Offender(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            row[params["token_ids"]] = -float("inf")
            if len(params["__req__"].output_ids) >= params.get("from_step", 1000):
{body}
        return logits
"""


def offender(body: str) -> SourceProcessor:
    """Return a class that bans tokens, and executes `body` for a request that has reached its `from_step`."""
    indented = "".join(f"{' ' * 16}{line}\n" for line in body.splitlines())
    return SourceProcessor(OFFENDER.format(body=indented), "Offender")


@dataclass(frozen=True)
class Stream:
    """A stream without faults."""

    name: str
    tenant: str = "other"
    processors: tuple[tuple[ProcessorString, dict[str, Any]], ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)

    def request(self, length: int = LENGTH) -> GenerationRequest:
        rid, prompt = f"{self.name} {next(NUMBERS)}", f"a prompt for {self.name}"
        return request(rid, prompt, self.processors, tenant=self.tenant, **{"max_tokens": length, **self.sampling})


GREEDY: dict[str, Any] = {"temperature": 0}
HARMLESS = {"token_ids": [40, 41, 42]}


def seeded(seed: int, **more: Any) -> dict[str, Any]:
    return {"seed": seed, "temperature": 0.9, **more}


def sixteen_streams(offending: SourceProcessor, share_sandbox: bool) -> list[Stream]:
    """Return the other streams.

    Args:
        offending: the faulty class.
        share_sandbox: put one of them into the sandbox of the faulty requests.
    """
    disallowed = InstalledProcessor("disallowed_tokens")
    ngram = InstalledProcessor("no_repeat_ngram")
    sharing = ("", offending) if share_sandbox else ("other", BAN)
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
        Stream("same sandbox", sharing[0], ((sharing[1], HARMLESS),), seeded(10)),
    ]


async def run_through(engine: AsyncEngine, wanted: GenerationRequest) -> tuple[list[int], FinishReason]:
    """Return a request's tokens and finish reason."""
    output = await generate(engine, wanted)
    return output.token_ids, output.finish_reason


class OtherStreams:
    """Runs the sixteen other streams repeatedly, and checks their tokens."""

    def __init__(self, engine: AsyncEngine, streams: list[Stream], expected: dict[str, list[int]]) -> None:
        self._engine = engine
        self._streams = streams
        self._expected = expected
        self._stopping = False
        self._gained = {stream.name: asyncio.Event() for stream in streams}

    async def wait_for_a_token_each(self) -> None:
        for event in self._gained.values():
            event.clear()
        for event in self._gained.values():
            await event.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for stream in self._streams:
                group.create_task(self._run(stream))
            await self.wait_for_a_token_each()
            yield
            await self.wait_for_a_token_each()
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
    """An engine, its HTTP app, and the tokens of each stream without faults."""

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
        sandbox_first_step_timeout=STEP_TIMEOUT,
        sandbox_load_timeout=LOAD_TIMEOUT,
        sandbox_cpu_time=0.5,
        sandbox_memory=64 << 20,
        max_request_bytes=4 << 20,
    )
    engine = build_engine(config, loaded_model)

    async def undisturbed() -> dict[str, list[int]]:
        streams = sixteen_streams(offender("pass"), share_sandbox=True)
        results = await asyncio.gather(*(run_through(engine, stream.request()) for stream in streams))
        assert all(reason.kind == "length" for _, reason in results)
        return {stream.name: tokens for stream, (tokens, _) in zip(streams, results, strict=True)}

    yield Loaded(engine, create_app(engine), run(undisturbed(), timeout=240))
    engine.stop()


@dataclass(frozen=True)
class FaultCase:
    """A fault.

    Attributes:
        name: the test id.
        body: code of the class, see `offender`.
        fault: expected kind of the fault.
        message: regular expression for the error's message.
        traceback: expected part of the traceback; "" if there is none.
        ends_sandbox: it kills the sandbox, and so affects all its rows.
    """

    name: str
    body: str
    fault: str
    message: str
    traceback: str = ""
    ends_sandbox: bool = False


def raising(name: str, body: str, message: str) -> FaultCase:
    return FaultCase(name, body, "exception", f"processor Offender raised {message}", body.splitlines()[-1].strip())


def bad_result(name: str, value: str, message: str) -> FaultCase:
    return FaultCase(name, f"return {value}", "bad_result", f"processor Offender returned {message}")


def ending(name: str, body: str, fault: str, message: str) -> FaultCase:
    return FaultCase(name, body, fault, f"processor Offender {message}", ends_sandbox=True)


OVERFLOW = """class Deep: pass
Deep.__add__ = lambda one, other: one + other
sys.setrecursionlimit(1 << 30)
Deep() + Deep()"""

LIMIT = r"({0:g} s( of CPU time)?|({1:g}|{2:g}) s, in which it got [\d.]+ s of CPU time)"


def no_answer(timeout: float) -> str:
    limit = LIMIT.format(timeout, BACKSTOP * timeout, DEFERRED_BACKSTOP * timeout)
    return f"gave no answer within {limit}: its process was killed"


NO_ANSWER = no_answer(STEP_TIMEOUT)
INVALID_ANSWER = "sent an invalid answer: its process was killed"
WRITE_FRAME = (
    "connection, number = answer_frame()\nos.write(connection, struct.pack('<IIQ', {kind}, number, {size}){more})"
)

EMPTY_ANSWER = "struct.pack('<IIQ', 3, number, 0)"
"""Makes a frame of a class the answer to the next call: one without edits."""

FAULT_CASES = [
    raising("raises", "raise ValueError('no such luck')", "ValueError: no such luck"),
    raising("raises in torch", "torch.zeros(2) @ torch.zeros(3)", "RuntimeError: "),
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
    raising("reveals paths of the server", "raise ValueError(f'{torch.__file__} {sys.path}')", "ValueError"),
    FaultCase(
        "an exception with an endless message",
        "class Long(Exception):\n    def __str__(self): return 'x' * 3_000_000\nraise Long",
        "exception",
        # Shorter if several requests of a call fail.
        r"processor Offender raised Long: x{1000,4096}(… \(3000000 characters\))?$",
        "xxx",
    ),
    FaultCase(
        "an exception whose __str__ raises",
        "class Shy(Exception):\n    def __str__(self): raise SystemExit\nraise Shy",
        "exception",
        r"raised Shy: \(its message cannot be shown",
        "raise Shy",
    ),
    FaultCase(
        "a traceback that claims another file",
        "exec(compile('\\n' * 2 + '1 / 0', '/etc/passwd', 'exec'))",
        "exception",
        "raised ZeroDivisionError",
        'File "/etc/passwd", line 3',
    ),
    FaultCase(
        "deletes its parameters",
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
    FaultCase("leaves NaN", "row[7] = float('nan')", "non_finite", "returned NaN"),
    FaultCase("leaves +inf", "row[7] = float('inf')", "non_finite", r"returned \+inf"),
    FaultCase("leaves no token", "row[:] = -float('inf')", "non_finite", "left no token"),
    ending("loops", "while True: pass", "deadline", NO_ANSWER),
    ending("sleeps", "time.sleep(60)", "deadline", NO_ANSWER),
    ending("loops in C", "__import__('re').fullmatch('(a+)+b', 'a' * 60)", "deadline", NO_ANSWER),
    ending(
        "an exception whose __str__ loops",
        "class Slow(Exception):\n    def __str__(self):\n        while True: pass\nraise Slow",
        "deadline",
        NO_ANSWER,
    ),
    raising("takes all memory", "hoard = []\nwhile True: hoard.append(bytearray(1 << 22))", "MemoryError"),
    raising("asks torch for all memory", "torch.ones(1 << 30)", "RuntimeError: "),
    ending("exits", "os._exit(3)", "crash", "ended its process with exit status 3"),
    ending("reads at address 0", "ctypes.string_at(0)", "crash", "ended its process: SIGSEGV"),
    ending("aborts", "os.abort()", "crash", r"ended its process: SIG(ABRT|SEGV|ILL)"),
    # Since 3.12, Python counts calls in C by themselves.
    raising("overflows the stack of C", OVERFLOW, "RecursionError")
    if sys.version_info >= (3, 12)
    else ending("overflows the stack of C", OVERFLOW, "crash", "ended its process: SIGSEGV"),
    ending(
        "makes a system call that kills", "ctypes.CDLL(None).syscall(0x40000027)", "crash", "ended its process: SIG"
    ),
    ending(
        "closes its connection",
        "os.closerange(3, 64)",
        "crash",
        # On a busy machine it may get so little of the cores that it is killed before it ends by itself.
        f"(ended its process with exit status 1|{CLOSED})",
    ),
    ending(
        "closes its connection and continues",
        "os.closerange(3, 64)\ntime.sleep(60)",
        "crash",
        CLOSED,
    ),
    ending("answers garbage", "os.write(answer_frame()[0], b'\\xff' * 64)", "protocol", INVALID_ANSWER),
    ending(
        "answers a pickle",
        WRITE_FRAME.format(kind=4, size=9, more=" + b'\\x80\\x04K\\x01.....'"),
        "protocol",
        INVALID_ANSWER,
    ),
    ending(
        "answers for other rows",
        WRITE_FRAME.format(kind=4, size=33, more=' + b\'[[[31],"exception","sorry","here"]]\'[:33]'),
        "protocol",
        INVALID_ANSWER,
    ),
    ending("answers as if it were loaded", WRITE_FRAME.format(kind=1, size=0, more=""), "protocol", INVALID_ANSWER),
    ending("claims an endless answer", WRITE_FRAME.format(kind=3, size="1 << 60", more=""), "protocol", INVALID_ANSWER),
    ending(
        "answers more than it claims", WRITE_FRAME.format(kind=3, size=0, more=" + b'!'"), "protocol", INVALID_ANSWER
    ),
    ending(
        "answers partly and stops",
        "os.write(answer_frame()[0], b'\\x03\\0\\0')\ntime.sleep(60)",
        "deadline",
        NO_ANSWER,
    ),
    ending("answers twice", WRITE_FRAME.format(kind=3, size=0, more=""), "protocol", INVALID_ANSWER),
    ending(
        "answers, then loops",
        WRITE_FRAME.format(kind=3, size=0, more="") + "\nwhile True: pass",
        "deadline",
        NO_ANSWER,
    ),
]


@dataclass(frozen=True)
class Ended:
    """The end of a faulty request.

    Attributes:
        tokens: its tokens.
        reason: its finish reason.
        seconds: time from its last token, or from its admission, to its end.
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
    error = last.finish_reason.error
    if error is not None and error.kind == "load":  # another request ended the sandbox before this one began
        assert not tokens
        return await offend(engine, replace(request, rid=f"{request.rid} again"))
    return Ended(tokens, last.finish_reason, time.monotonic() - moment)


async def post(app: FastAPI, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=120
    ) as client:
        while True:
            answer = await client.post("/generate", json=body)
            if answer.json().get("error", {}).get("kind") != "load":
                return answer


def offender_stream(string: ProcessorString, from_step: int) -> Stream:
    """Return the stream in the same sandbox, but with a fault from `from_step` on."""
    return Stream("same sandbox", "", ((string, HARMLESS | {"from_step": from_step}),), seeded(10))


def assert_no_server_paths(text: str) -> None:
    folders = {sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), str(Path.home()), os.getcwd()}
    for folder in folders | {"site-packages", "/sampler/", "/client/", "root:x:0"}:
        assert folder not in text


@pytest.mark.parametrize("case", FAULT_CASES, ids=lambda case: case.name)
def test_fault_ends_only_the_faulty_requests(loaded: Loaded, case: FaultCase) -> None:
    engine, string = loaded.engine, offender(case.body)
    others = OtherStreams(engine, sixteen_streams(string, share_sandbox=not case.ends_sandbox), loaded.expected)
    http_body = {
        "input_ids": offender_stream(string, 2).request().prompt_token_ids,
        "custom_logit_processor": {"source": string.source, "class_name": string.class_name},
        "sampling_params": {
            "max_new_tokens": OFFENDER_LENGTH,
            "ignore_eos": True,
            "custom_params": HARMLESS | {"from_step": 2},
        },
    }

    async def scene() -> tuple[list[Ended], httpx.Response, list[int]]:
        async with others.running():
            first, second, answer = await asyncio.gather(
                offend(engine, offender_stream(string, 0).request(OFFENDER_LENGTH)),
                offend(engine, offender_stream(string, 5).request(OFFENDER_LENGTH)),
                post(loaded.app, http_body),
            )
            # The same class again, with harmless parameters.
            again = Stream("same sandbox", "", ((string, HARMLESS),), seeded(10)).request(OFFENDER_LENGTH)
            tokens, reason = await run_through(engine, again)
            assert reason.kind == "length"
        return [first, second], answer, tokens

    ends, answer, tokens = run(scene(), timeout=240)
    expected = loaded.expected["same sandbox"]
    assert tokens == expected[:OFFENDER_LENGTH]
    for ended, from_step in zip(ends, (0, 5), strict=True):
        # A class that answers by itself decides a token more: for rows that it has not edited yet, too. The other row
        # of its sandbox may not have come to its own fault then.
        ends_early = EMPTY_ANSWER in case.body and len(ended.tokens) < from_step
        fine = ended.tokens[: len(ended.tokens) - 1 if ends_early else from_step]
        assert fine == expected[: len(fine)]
        assert len(ended.tokens) == from_step or (case.ends_sandbox and len(ended.tokens) <= from_step + 1)
        assert ended.seconds < STEP_TIMEOUT + GRACE
        error = ended.reason.error
        assert ended.reason.kind == "abort"
        assert error is not None
        assert (error.type, error.status_code, error.kind) == ("ProcessorFault", 400, case.fault), error
        assert (error.digest, error.name) == (string.digest, "Offender")
        assert re.search(case.message, error.message), error.message
        assert case.traceback in error.traceback
        if case.fault == "deadline":
            # The process was asked where it was, and on a busy machine it may not answer in time.
            assert not error.traceback or "TimeoutError: it was here" in error.traceback
        else:
            assert bool(error.traceback) == bool(case.traceback)
        assert len(error.message) + len(error.traceback) < 10_000
        assert_no_server_paths(error.message + error.traceback)
    assert answer.status_code == 400
    reported = answer.json()["error"]
    assert (reported["type"], reported["digest"], reported["name"]) == ("ProcessorFault", string.digest, "Offender")
    assert re.search(case.message, reported["message"])
    assert case.traceback in reported["traceback"]
    assert_no_server_paths(answer.text)


def load_source(body: str) -> SourceProcessor:
    return SourceProcessor(
        f"import ctypes, os, struct, sys, time\nfrom logitship import CustomLogitProcessor\n{body}", "P"
    )


@dataclass(frozen=True)
class LoadCase:
    """A processor that cannot be loaded.

    Attributes:
        name: the test id.
        string: the processor.
        message: regular expression for the error's message.
    """

    name: str
    string: SourceProcessor | PickledProcessor
    message: str


UNABLE_TO_INIT = """
class P(CustomLogitProcessor):
    def __init__(self):
        1 / 0

    def __call__(self, logits, custom_param_list=None):
        return logits
"""
ANSWERS_DONE = """
frame = sys._getframe()
while "connection" not in frame.f_locals:
    frame = frame.f_back
os.write(frame.f_locals["connection"], struct.pack("<IIQ", 3, 1, 0))
time.sleep(60)
"""
KILLED = r"was killed \(while it was loaded\)"
TOO_SLOW = rf"{no_answer(LOAD_TIMEOUT)} \(while it was loaded\)"
LOAD_CASES = [
    LoadCase("loops", load_source("while True: pass"), TOO_SLOW),
    LoadCase("sleeps", load_source("time.sleep(60)"), TOO_SLOW),
    LoadCase("exits", load_source("os._exit(0)"), "ended its process with exit status 0"),
    LoadCase("crashes", load_source("ctypes.string_at(0)"), "ended its process: SIGSEGV"),
    LoadCase("raises", load_source("1 / 0"), "ZeroDivisionError"),
    LoadCase("raises SystemExit", load_source("sys.exit(3)"), "SystemExit: 3"),
    LoadCase("raises KeyboardInterrupt", load_source("raise KeyboardInterrupt"), "KeyboardInterrupt"),
    LoadCase("takes all memory", load_source("hoard = [bytearray(1 << 20) for _ in range(1 << 20)]"), "MemoryError"),
    LoadCase(
        "closes its connection", load_source("os.closerange(3, 64)"), "ended its process(: SIGSEGV| with exit status 1)"
    ),
    LoadCase("answers DONE", load_source(ANSWERS_DONE), rf"sent an invalid answer.* {KILLED}"),
    LoadCase("is not a subclass", load_source("class P: pass"), "CustomLogitProcessor"),
    LoadCase("is abstract", load_source("class P(CustomLogitProcessor): pass"), "abstract"),
    LoadCase("is missing", load_source("class Q(CustomLogitProcessor): pass"), "P"),
    LoadCase("does not parse", load_source("class P(:"), "syntax"),
    LoadCase("raises in __init__", load_source(UNABLE_TO_INIT), "ZeroDivisionError"),
    LoadCase("reveals paths of the server", load_source("raise ValueError(sys.path, os.__file__)"), "ValueError"),
    LoadCase("is not a pickle", PickledProcessor(b"not a pickle"), "."),
    LoadCase("exits when it is unpickled", PickledProcessor(b"cos\n_exit\n(I5\ntR."), "exit status 5"),
    LoadCase(
        "is from another Python version", PickledProcessor(b"\x80\x04N.", python="3.9"), r"serialized by Python 3\.9"
    ),
]


def string_json(string: SourceProcessor | PickledProcessor) -> dict[str, Any]:
    if isinstance(string, SourceProcessor):
        return {"source": string.source, "class_name": string.class_name}
    about = {"logitship": {"v": 1, "python": string.python}} if string.python else {}
    return {"callable": string.payload.hex(), **about}


@pytest.mark.parametrize("case", LOAD_CASES, ids=lambda case: case.name)
def test_processor_that_cannot_be_loaded_is_refused(loaded: Loaded, case: LoadCase) -> None:
    engine = loaded.engine
    others = OtherStreams(engine, sixteen_streams(offender("pass"), share_sandbox=True), loaded.expected)
    stream = Stream("refused", "", ((case.string, {}),))

    async def scene() -> httpx.Response:
        async with others.running():
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(BadRequest, match=case.message) as caught:
                    await engine.submit(stream.request())
                assert time.monotonic() - began < LOAD_TIMEOUT + GRACE
                assert caught.value.param == "processors[0]"
                assert_no_server_paths(caught.value.message)
            return await post(loaded.app, {"input_ids": [5], "custom_logit_processor": string_json(case.string)})

    answer = run(scene(), timeout=240)
    assert answer.status_code == 400
    assert re.search(case.message, answer.json()["error"]["message"])
    assert_no_server_paths(answer.text)


PRINTS = """
import sys
from logitship import CustomLogitProcessor

class P(CustomLogitProcessor):
    def __init__(self):
        print("created", end="; ")
    def __call__(self, logits, custom_param_list=None):
        for params in custom_param_list:
            length = len(params["__req__"].output_ids)
            print("step", length, file=sys.stderr if length % 2 else sys.stdout)
            if length == params.get("fails_at"):
                {fault}
        return logits
"""


@pytest.mark.parametrize("fault", ["raise ValueError('no more')", "while True: pass", "sys.exit()"])
def test_what_is_printed_is_in_the_receipt_and_in_the_error(loaded: Loaded, fault: str) -> None:
    string = {"source": PRINTS.format(fault=fault), "class_name": "P"}
    sampling: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True}
    body = {"input_ids": [5], "custom_logit_processor": string, "sampling_params": sampling}

    async def scene() -> tuple[httpx.Response, httpx.Response]:
        fine = await post(loaded.app, body)
        failing = sampling | {"custom_params": {"fails_at": 2}}
        return fine, await post(loaded.app, body | {"sampling_params": failing})

    fine, failed = run(scene(), timeout=240)
    (receipt,) = fine.json()["meta_info"]["receipts"]
    assert receipt["printed"] == "created; step 0\nstep 1\nstep 2\n"
    # A call that raises is repeated, and prints again.
    assert re.search(r"It printed:\n(step 2\n)+$", failed.json()["error"]["traceback"])


def test_what_is_printed_is_in_the_load_error(loaded: Loaded) -> None:
    source = "print('here')\nprint('and there')\n1 / 0"
    string = {"source": source, "class_name": "P"}
    answer = run(post(loaded.app, {"input_ids": [5], "custom_logit_processor": string}), timeout=240)
    assert "ZeroDivisionError" in answer.json()["error"]["message"]
    assert answer.json()["error"]["message"].endswith("It printed:\nhere\nand there\n")


def test_processor_over_size_limit_is_refused(loaded: Loaded) -> None:
    others = OtherStreams(loaded.engine, sixteen_streams(offender("pass"), share_sandbox=True), loaded.expected)
    source = {"source": "#" * ((1 << 20) + 1), "class_name": "P"}

    async def scene() -> httpx.Response:
        async with others.running():
            return await post(loaded.app, {"input_ids": [5], "custom_logit_processor": source})

    answer = run(scene(), timeout=240)
    assert answer.status_code in (400, 413)
    assert "1048576" in answer.json()["error"]["message"]


async def assert_sandbox_ends(loaded: Loaded, request: GenerationRequest, kind: str) -> None:
    ended = await offend(loaded.engine, request)
    assert ended.reason.error is not None
    assert (ended.reason.error.type, ended.reason.error.kind) == ("ProcessorFault", kind)
    assert ended.seconds < STEP_TIMEOUT + GRACE


def test_parameters_over_the_memory_limit(loaded: Loaded) -> None:
    string = offender("pass")
    others = OtherStreams(loaded.engine, sixteen_streams(string, share_sandbox=False), loaded.expected)
    too_much = Stream("too much", "", ((string, {"token_ids": [], "text": "x" * (70 << 20)}),))
    fitting = offender_stream(string, 1000)

    async def scene() -> list[int]:
        async with others.running():
            await assert_sandbox_ends(loaded, too_much.request(OFFENDER_LENGTH), "crash")
            tokens, _ = await run_through(loaded.engine, fitting.request(OFFENDER_LENGTH))
        return tokens

    assert run(scene(), timeout=240) == loaded.expected["same sandbox"][:OFFENDER_LENGTH]


def sandboxes_in_use(engine: AsyncEngine) -> set[Sandbox]:
    """Return the sandboxes that have a processor, without spares."""
    assert engine._sandboxes is not None
    return set(engine._sandboxes._sandboxes)


async def end_of(sandbox: Sandbox) -> None:
    """Wait for its process to exit."""
    ended = asyncio.Event()
    pidfd = os.dup(sandbox._process.pidfd)
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)


def test_computing_after_the_last_answer_is_limited(loaded: Loaded) -> None:
    """No call is in flight, so no deadline applies."""
    string = offender("# alone\n{}\nwhile True: pass".format(WRITE_FRAME.format(kind=3, size=0, more="")))
    others = OtherStreams(loaded.engine, sixteen_streams(string, share_sandbox=False), loaded.expected)

    async def scene() -> list[int]:
        async with others.running():
            before = sandboxes_in_use(loaded.engine)
            _, reason = await run_through(loaded.engine, offender_stream(string, 0).request(1))
            assert reason.kind == "length"
            (sandbox,) = sandboxes_in_use(loaded.engine) - before
            await end_of(sandbox)
            again, _ = await run_through(loaded.engine, offender_stream(string, 1000).request(OFFENDER_LENGTH))
        return again

    assert run(scene(), timeout=240) == loaded.expected["same sandbox"][:OFFENDER_LENGTH]
