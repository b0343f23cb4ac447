"""What a processor sends to the server itself, past the worker: none of it is believed, and none of it is unpickled.

A processor runs in the worker's process, so it can do with the connection and with the shared memory whatever it likes.
"""

from __future__ import annotations

import pickle
import re
import time
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch

from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.processors.processor_use import ProcessorUse
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampling_params import SamplingParams

VOCAB = 8192
DONE = "answer(3, number)"

LIES = {
    # what is sent in the call `number`
    "another call's number": "answer(3, number + 1)",
    "the number of the call before": "answer(3, number - 1)",
    "no number": "answer(3, 0)",
    "an unknown kind": "answer(99, number)",
    "a kind without a number": "answer(0, number)",
    "that it is loaded": "answer(1, number, b'Name')",
    "that it is refused": "answer(2, number, b'why')",
    "that it wants the rows for ever": "answer(5, number); os.read(sockets()[0], 16); answer(5, number + 1)",
    "more than an answer holds": "answer(4, number, b'x' * 65537)",
    "that it will send much": "send(struct.pack('<IIQ', 3, number, 1 << 62))",
    "that it will send a negative length": "send(struct.pack('<IIq', 3, number, -1))",
    "one byte too many": "send(struct.pack('<IIQ', 3, number, 0) + b'x')",
    "two answers at once": "send(2 * struct.pack('<IIQ', 3, number, 0))",
    "garbage": "send(bytes(range(256)) * 10)",
    "a pickle": "send(PICKLE)",
    "a pickle as faults": "answer(4, number, PICKLE)",
    "an endless stream": "send(b'x' * (64 << 20))",
    "an endless stream of answers": "send(struct.pack('<IIQ', 3, number, 0) * (1 << 20))",
    "no faults": "answer(4, number, b'[]')",
    "faults that are no list": "answer(4, number, b'{}')",
    "no JSON": "answer(4, number, b'[')",
    "text that is not UTF-8": 'answer(4, number, b\'[[[0],"exception","\\xff",""]]\')',
    "deep lists": "answer(4, number, b'[' * 30000 + b']' * 30000)",
    "a fault of another row": 'answer(4, number, b\'[[[1],"exception","",""]]\')',
    "a fault of row -1": 'answer(4, number, b\'[[[-1],"exception","",""]]\')',
    "a fault of row true": 'answer(4, number, b\'[[[true],"exception","",""]]\')',
    "a fault of half a row": 'answer(4, number, b\'[[[0.0],"exception","",""]]\')',
    "a fault of a large row": 'answer(4, number, b\'[[[1e999],"exception","",""]]\')',
    "that it was killed": 'answer(4, number, b\'[[[0],"deadline","",""]]\')',
    "a kind of fault of its own": 'answer(4, number, b\'[[[0],"admin","",""]]\')',
    "a message that is a number": 'answer(4, number, b\'[[[0],"exception",1,""]]\')',
    "a message that is an object": 'answer(4, number, b\'[[[0],"exception",{"a":1},""]]\')',
    "what a replaced function of the worker makes": "worker()['pack'] = lambda *_: PICKLE; return logits",
    "what a replaced `os.write` makes": "os.write = lambda fd, data: genuine(fd, PICKLE[: len(data)]); return logits",
    "a fault with too much in it": 'answer(4, number, b\'[[[0],"exception","","",""]]\')',
}

LIAR = """
import os, struct
from attacker import answer, call_number, region, send, sockets
PICKLE = bytes.fromhex({pickle!r})
genuine = os.write
def worker():
    frame = sys._getframe()
    while frame.f_code.co_name != "serve":
        frame = frame.f_back
    return frame.f_globals
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        number = call_number()
        {send}
        while True:
            os.read(sockets()[0], 1000)
"""


def nothing(w: SimpleNamespace) -> None: ...


class Canary:
    """Reading its pickle creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "x")


def liar(sent: str, world: Any) -> str:
    return LIAR.format(send=sent, pickle=pickle.dumps(Canary(str(world.folder / "new"))).hex())


@pytest.mark.parametrize("what", LIES)
def test_a_lie_ends_the_sandbox(what: str, world: Any, sandboxed: Any) -> None:
    processor = sandboxed.load(sandboxed.source(nothing, liar(LIES[what], world)))
    report = sandboxed.call(processor)
    assert report.kinds == ["protocol"]
    assert report.faults == ["processor P answered what no worker answers: its process was killed\n"]
    assert sandboxed.has_ended(processor)
    assert world.changes(report) == []


def test_the_pickle_does_something_when_it_is_read(world: Any) -> None:
    pickle.loads(pickle.dumps(Canary(str(world.folder / "new")))).close()
    assert (world.folder / "new").exists()


def test_the_same_program_with_the_truth_is_believed(world: Any, sandboxed: Any) -> None:
    report = sandboxed(nothing, frame=liar(DONE, world))
    assert (report.kinds, report.load_error) == ([], "")


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param("pass", id="nothing"),
        pytest.param("send(struct.pack('<IIQ', 3, number, 0)[:15])", id="half a header"),
        pytest.param("send(struct.pack('<IIQ', 4, number, 100) + b'x' * 99)", id="half a body"),
        pytest.param("while True: pass", id="nothing, and computes"),
    ],
)
def test_an_answer_that_does_not_come_is_waited_for_until_the_deadline(sent: str, world: Any, hastily: Any) -> None:
    processor = hastily.load(hastily.source(nothing, liar(sent, world)))
    assert hastily.call(processor).kinds == ["deadline"]
    assert hastily.has_ended(processor)


def test_an_answer_that_trickles_is_waited_for_until_the_deadline(world: Any, hastily: Any) -> None:
    trickle = "import time; [(send(b'[' if i > 15 else struct.pack('<IIQ', 4, number, 60000)[i:i+1]), time.sleep(0.05))"
    frame = liar(f"{trickle} for i in range(60000)]", world)
    began = time.monotonic()
    assert hastily(nothing, frame=frame).kinds == ["deadline"]
    assert time.monotonic() - began < 60  # all of it takes 50 minutes


@pytest.mark.parametrize(
    "end",
    ["os.close(sockets()[0])", "os.closerange(0, 100)"],
)
def test_a_closed_connection_ends_the_sandbox(end: str, world: Any, sandboxed: Any) -> None:
    frame = f"""
import os, time
from attacker import sockets
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        {end}
        while True:
            time.sleep(1)
"""
    processor = sandboxed.load(sandboxed.source(nothing, frame))
    report = sandboxed.call(processor)
    assert report.kinds == ["crash"]
    assert "closed its connection: its process was killed" in report.faults[0]
    assert sandboxed.has_ended(processor)


def test_a_connection_that_is_never_read_ends_the_sandbox(world: Any, hastily: Any) -> None:
    """More is sent to it than the kernel holds."""
    frame = """
import time
from attacker import answer, call_number
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        answer(3, call_number())
        time.sleep(1000)
"""
    processor = hastily.load(hastily.source(nothing, frame))
    assert hastily.call(processor).kinds == []
    rows = [hastily.attach(processor, text="x" * (4 << 20))]
    assert [fault.kind for fault in hastily.step(processor, torch.zeros(1, VOCAB), rows).values()] == ["deadline"]


LIES_WHILE_LOADED = {
    # what is sent instead of an answer to the first call, and what the client is told
    "answer(2, 1, b'<script>' * 8000)": "(<script>)+",
    "answer(3, 1)": "the processor answered what no worker answers.*",
    "answer(4, 1, b'[]')": "the processor answered what no worker answers.*",
    "answer(5, 1)": "the processor answered what no worker answers.*",
    "answer(1, 2, b'Name')": "the processor answered what no worker answers.*",
    "answer(1, 1, b'Name')": "the processor answered what no worker answers.*",
    "answer(1, 1, b'[' * 60000)": "the processor answered what no worker answers.*",
    'answer(1, 1, b\'["Name", "", []]\')': "the processor answered what no worker answers.*",
    r"""answer(1, 1, b'["\ud800", "", null]')""": "the processor answered what no worker answers.*",
    "answer(1, 1, b'x' * 65537)": "the processor answered what no worker answers.*",
    "send(b'x' * 1000)": "the processor answered what no worker answers.*",
    "send(PICKLE)": "the processor answered what no worker answers.*",
    "send(struct.pack('<IIQ', 1, 1, 1000))": "the processor gave no answer within 3 s.*",
    "os.close(sockets()[0]); time.sleep(100)": "the processor closed its connection.*",
}


def while_loaded(sent: str, world: Any) -> str:
    body = f"import time\n{sent}\nwhile True: os.read(sockets()[0], 1)\nclass P"
    return liar("pass", world).replace("class P", body, 1)


@pytest.mark.parametrize("sent", LIES_WHILE_LOADED)
def test_a_lie_while_it_is_loaded_ends_the_sandbox(sent: str, world: Any, hastily: Any) -> None:
    report = hastily(nothing, frame=while_loaded(sent, world))
    assert re.match(LIES_WHILE_LOADED[sent], report.load_error)
    assert len(report.load_error) <= 8192
    assert world.changes(report) == []


@pytest.mark.parametrize("name", ["x" * 30000 + "\x1b[31m", "\x00\r\n Set-Cookie: a=b", "  ", ""])
def test_a_name_that_lies_is_tame(name: str, world: Any, sandboxed: Any) -> None:
    sent = f"answer(1, 1, {orjson.dumps([name, name, None])!r})"
    processor = sandboxed.load(sandboxed.source(nothing, while_loaded(sent, world)))
    assert processor.name.isprintable()
    assert 1 <= len(processor.name) <= 200
    processor.name.encode()
    assert processor.description.isprintable()
    assert len(processor.description) <= 1000


def test_a_fault_may_say_anything_but_is_tame(world: Any, sandboxed: Any) -> None:
    text = "\x1b[31m\x00\r " + "</script>" * 3000
    sent = f"answer(4, number, {orjson.dumps([[[0], 'exception', text, text]])!r})"
    report = sandboxed(nothing, frame=liar(sent, world))
    assert report.kinds == ["exception"]
    assert not {"\x1b", "\x00", "\r"} & set(report.faults[0])
    assert len(report.faults[0]) < 100_000


def test_an_answer_before_the_call_gives_nothing_but_its_own_rows(world: Any, sandboxed: Any) -> None:
    """It comes together with the answer before it, and is found out; or later, and stands for the rows as they are."""
    frame = liar("logits.fill_(1.0); answer(3, number); answer(3, number + 1)", world)
    processor = sandboxed.load(sandboxed.source(nothing, frame))
    row = sandboxed.attach(processor)
    for expected in (1.0, 7.0):
        logits = torch.full((1, VOCAB), 7.0)
        faults = sandboxed.step(processor, logits, [row])
        assert [fault.kind for fault in faults.values()] == ["protocol"] or logits.eq(expected).all()


TAMPERER = """
import os, select
from attacker import answer, call_number, region, sockets
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        number, memory = call_number(), region()
        poll = select.poll()
        poll.register(sockets()[0], select.POLLIN)
        answer(3, number)
        while True:
            memory.fill_(float("nan"))
            memory.fill_(float("inf"))
            memory.fill_(2.0)
            if poll.poll(0):
                os.read(sockets()[0], 1 << 16)
                number += 1
                answer(3, number)
"""


def test_changes_after_the_answer_change_nothing(sandboxed: Any) -> None:
    """The server copies the rows, and checks the copy. Else it would draw from something that it never checked."""
    shipped = ShippedProcessors(None, torch.device("cpu"), False, model=sandboxed.model)
    use = ProcessorUse(sandboxed.load(sandboxed.source(nothing, TAMPERER)), {}, "rid")
    shipped.update_state(BatchUpdate(1, [], [(0, SamplingParams(processors=(use,)), [5], [])], []))
    faults = []
    for _ in range(300):
        logits = torch.zeros(1, sandboxed.model.vocab_size)
        shipped.apply(logits)
        assert logits.isfinite().all()
        faults += shipped.take_faults()
    # It did tamper, and was caught when that was in time.
    assert {fault.kind for _, fault in faults} == {"non_finite"}


SIZES = {
    # what is returned, and whether that is a fault
    "a view beyond the end": ("torch.as_strided(logits, (1, 8192), (1, 1), 8192 * 4)", "exception"),
    "a view of the other rows": ("torch.as_strided(logits, (1, 8192), (8192, 1), 8192)", None),
    "a view of one number": ("logits[:, :1].expand(1, 8192)", None),
    "fewer numbers": ("logits[:, :100]", "bad_result"),
    "more rows": ("region()", "bad_result"),
    "a row less": ("logits[:0]", "bad_result"),
    "a resized tensor": ("logits.resize_(1, 100)", "bad_result"),
    "another storage": ("logits.set_(torch.ones(1, 8192))", None),
    "a storage without memory": ("torch.empty(1, 8192, device='meta')", "bad_result"),
    "a sparse tensor": ("logits.to_sparse()", "bad_result"),
    "another type": ("logits.to(torch.int64)", "bad_result"),
    "complex numbers": ("logits.to(torch.complex64)", "bad_result"),
    "a class that lies about its shape": ("Liar(logits)", "bad_result"),
    "a tensor that lies about its shape": ("logits[:, :10].as_subclass(LyingTensor)", "bad_result"),
    "a quantized tensor": ("torch.quantize_per_tensor(logits, 0.1, 0, torch.qint8)", "bad_result"),
    "a nested tensor": ("torch.nested.nested_tensor([logits[0]])", "exception"),
    "freed memory": ("(storage := torch.ones(1, 8192), storage.untyped_storage().resize_(0))[0]", "crash"),
}

RETURNS = """
from attacker import region
class Liar:
    shape = torch.Size([1, 8192])
    dtype, device, layout = torch.float32, torch.device("cpu"), torch.strided
    __class__ = torch.Tensor
    def __init__(self, logits): ...
class LyingTensor(torch.Tensor):
    shape = torch.Size([1, 8192])
    @classmethod
    def __torch_function__(cls, *_, **__):
        return torch.Size([1, 8192])
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return {returned}
"""


@pytest.mark.parametrize("what", SIZES)
def test_results_that_lie_about_their_size(what: str, world: Any, sandboxed: Any) -> None:
    returned, kind = SIZES[what]
    processor = sandboxed.load(sandboxed.source(nothing, RETURNS.format(returned=returned)))
    logits = torch.full((3, VOCAB), 7.0)  # of which the middle row is the processor's
    faults = sandboxed.step(processor, logits[1:2], [sandboxed.attach(processor)])
    if kind is None:
        assert faults == {}
    else:
        assert [fault.kind for fault in faults.values()] == [kind]
    assert logits.shape == (3, VOCAB)
    assert logits[[0, 2]].eq(7.0).all()
