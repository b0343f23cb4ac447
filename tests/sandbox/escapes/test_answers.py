"""Invalid answers that a processor sends to the server, bypassing the worker, are rejected and never unpickled.

A processor runs in the worker's process, so it can use the connection and the shared memory directly.
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
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampling_params import SamplingParams

VOCAB = 8192
DONE = "answer(3, number)"

INVALID_ANSWERS = {
    # description: code that sends it, in the call `number`
    "another call's number": "answer(3, number + 1)",
    "the number of the call before": "answer(3, number - 1)",
    "no number": "answer(3, 0)",
    "an unknown kind": "answer(99, number)",
    "a kind without a number": "answer(0, number)",
    "LOADED": "answer(1, number, b'Name')",
    "REFUSED": "answer(2, number, b'why')",
    "AGAIN, endlessly": "answer(5, number); os.read(sockets()[0], 16); answer(5, number + 1)",
    "a body over the limit": "answer(4, number, b'x' * 65537)",
    "a huge length": "send(struct.pack('<IIQ', 3, number, 1 << 62))",
    "a negative length": "send(struct.pack('<IIq', 3, number, -1))",
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
    "a fault that only the server reports": 'answer(4, number, b\'[[[0],"deadline","",""]]\')',
    "an unknown kind of fault": 'answer(4, number, b\'[[[0],"admin","",""]]\')',
    "a message that is a number": 'answer(4, number, b\'[[[0],"exception",1,""]]\')',
    "a message that is an object": 'answer(4, number, b\'[[[0],"exception",{"a":1},""]]\')',
    "a message of a replaced `pack`": "worker()['pack'] = lambda *_: PICKLE; return logits",
    "a message of a replaced write": "os.write = lambda fd, data: genuine(fd, PICKLE[: len(data)]); return logits",
    "a fault with too many fields": 'answer(4, number, b\'[[[0],"exception","","",""]]\')',
}

SENDER = """
import os, struct
from attacker import answer, call_number, shared_memory, send, sockets
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
    """Unpickling it creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "x")


def sender(sent: str, target: Any) -> str:
    return SENDER.format(send=sent, pickle=pickle.dumps(Canary(str(target.folder / "new"))).hex())


@pytest.mark.parametrize("what", INVALID_ANSWERS)
def test_invalid_answer_kills_the_sandbox(what: str, target: Any, sandboxed: Any) -> None:
    processor = sandboxed.load(sandboxed.source(nothing, sender(INVALID_ANSWERS[what], target)))
    report = sandboxed.call(processor)
    assert report.kinds == ["protocol"]
    assert report.faults == ["processor P sent an invalid answer: its process was killed\n"]
    assert sandboxed.has_ended(processor)
    assert target.changes(report) == []


def test_control_unpickling_creates_a_file(target: Any) -> None:
    pickle.loads(pickle.dumps(Canary(str(target.folder / "new")))).close()
    assert (target.folder / "new").exists()


def test_valid_answer_from_same_code_is_accepted(target: Any, sandboxed: Any) -> None:
    report = sandboxed(nothing, frame=sender(DONE, target))
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
def test_deadline_without_answer(sent: str, target: Any, short_deadlines: Any) -> None:
    processor = short_deadlines.load(short_deadlines.source(nothing, sender(sent, target)))
    assert short_deadlines.call(processor).kinds == ["deadline"]
    assert short_deadlines.has_ended(processor)


def test_deadline_with_slow_answer(target: Any, short_deadlines: Any) -> None:
    trickle = "import time; [(send(b'[' if i > 15 else struct.pack('<IIQ', 4, number, 60000)[i:i+1]), time.sleep(0.05))"
    frame = sender(f"{trickle} for i in range(60000)]", target)
    began = time.monotonic()
    assert short_deadlines(nothing, frame=frame).kinds == ["deadline"]
    assert time.monotonic() - began < 60  # all of it takes 50 minutes


@pytest.mark.parametrize(
    "end",
    ["os.close(sockets()[0])", "os.closerange(0, 100)"],
)
def test_closed_connection_kills_the_sandbox(end: str, target: Any, sandboxed: Any) -> None:
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
    # Python 3.13 crashes without its files, before it can be killed.
    assert re.search("closed its connection: its process was killed|ended its process: SIGSEGV", report.faults[0])
    assert sandboxed.has_ended(processor)


def test_connection_that_is_never_read_kills_the_sandbox(target: Any, short_deadlines: Any) -> None:
    """The server sends more than the socket buffer holds."""
    frame = """
import time
from attacker import answer, call_number
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        answer(3, call_number())
        time.sleep(1000)
"""
    processor = short_deadlines.load(short_deadlines.source(nothing, frame))
    assert short_deadlines.call(processor).kinds == []
    rows = [short_deadlines.attach(processor, text="x" * (4 << 20))]
    assert [fault.kind for fault in short_deadlines.step(processor, torch.zeros(1, VOCAB), rows).values()] == [
        "deadline"
    ]


INVALID_LOAD_ANSWERS = {
    # code that sends an answer to LOAD, and the client's error message
    "answer(2, 1, b'<script>' * 8000)": "(<script>)+",
    "answer(3, 1)": "the processor sent an invalid answer.*",
    "answer(4, 1, b'[]')": "the processor sent an invalid answer.*",
    "answer(5, 1)": "the processor sent an invalid answer.*",
    "answer(1, 2, b'Name')": "the processor sent an invalid answer.*",
    "answer(1, 1, b'Name')": "the processor sent an invalid answer.*",
    "answer(1, 1, b'[' * 60000)": "the processor sent an invalid answer.*",
    'answer(1, 1, b\'["Name", "", []]\')': "the processor sent an invalid answer.*",
    r"""answer(1, 1, b'["\ud800", "", null]')""": "the processor sent an invalid answer.*",
    "answer(1, 1, b'x' * 65537)": "the processor sent an invalid answer.*",
    "send(b'x' * 1000)": "the processor sent an invalid answer.*",
    "send(PICKLE)": "the processor sent an invalid answer.*",
    "send(struct.pack('<IIQ', 1, 1, 1000))": "the processor gave no answer within 3 s.*",
    "os.close(sockets()[0]); time.sleep(100)": "the processor closed its connection.*",
}


def while_loading(sent: str, target: Any) -> str:
    body = f"import time\n{sent}\nwhile True: os.read(sockets()[0], 1)\nclass P"
    return sender("pass", target).replace("class P", body, 1)


@pytest.mark.parametrize("sent", INVALID_LOAD_ANSWERS)
def test_invalid_answer_to_load(sent: str, target: Any, short_deadlines: Any) -> None:
    report = short_deadlines(nothing, frame=while_loading(sent, target))
    assert re.match(INVALID_LOAD_ANSWERS[sent], report.load_error)
    assert len(report.load_error) <= 8192
    assert target.changes(report) == []


@pytest.mark.parametrize("name", ["x" * 30000 + "\x1b[31m", "\x00\r\n Set-Cookie: a=b", "  ", ""])
def test_class_name_is_sanitized(name: str, target: Any, sandboxed: Any) -> None:
    sent = f"answer(1, 1, {orjson.dumps([name, name, None, name[:100]])!r})"
    processor = sandboxed.load(sandboxed.source(nothing, while_loading(sent, target)))
    assert processor.name.isprintable()
    assert 1 <= len(processor.name) <= 200
    processor.name.encode()
    assert processor.description.isprintable()
    assert len(processor.description) <= 1000


def test_fault_messages_are_sanitized(target: Any, sandboxed: Any) -> None:
    text = "\x1b[31m\x00\r " + "</script>" * 3000
    sent = f"answer(4, number, {orjson.dumps([[[0], 'exception', text, text]])!r})"
    report = sandboxed(nothing, frame=sender(sent, target))
    assert report.kinds == ["exception"]
    assert not {"\x1b", "\x00", "\r"} & set(report.faults[0])
    assert len(report.faults[0]) < 100_000


def test_answer_sent_before_the_call(target: Any, sandboxed: Any) -> None:
    """It either arrives with the previous answer, which is detected, or later: the shared memory is used as it is."""
    frame = sender("logits.fill_(1.0); answer(3, number); answer(3, number + 1)", target)
    processor = sandboxed.load(sandboxed.source(nothing, frame))
    row = sandboxed.attach(processor)
    for _ in range(2):
        logits = torch.full((1, VOCAB), 7.0)
        faults = sandboxed.step(processor, logits, [row])
        assert [fault.kind for fault in faults.values()] == ["protocol"] or not logits.eq(2.0).any()


TAMPERER = """
import os, select
from attacker import answer, call_number, shared_memory, sockets
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        number, memory = call_number(), shared_memory()
        poll = select.poll()
        poll.register(sockets()[0], select.POLLIN)
        answer(3, number)
        while True:
            for value in (float("nan"), float("inf"), 2.0):
                memory.fill_(value)
                if poll.poll(0):
                    os.read(sockets()[0], 1 << 16)
                    number += 1
                    answer(3, number)
"""


def test_writes_after_the_answer_have_no_effect(sandboxed: Any) -> None:
    """The server copies the rows and checks the copy. Otherwise it would sample from logits that were not checked."""
    shipped = ShippedProcessors(None, torch.device("cpu"), False, model=sandboxed.model)
    use = ProcessorUse(sandboxed.load(sandboxed.source(nothing, TAMPERER)), {}, "rid")
    shipped.update_state(BatchUpdate(1, [], [(0, SamplingParams(processors=(use,)), [5], [])], []))
    faults = []
    for _ in range(300):
        logits = torch.zeros(1, sandboxed.model.vocab_size)
        shipped.apply(logits)
        assert logits.isfinite().all()
        faults += shipped.take_faults()
    # In some steps, NaN or infinity was in the copy, and was detected.
    assert {fault.kind for _, fault in faults} == {"non_finite"}


RESULTS = {
    # description: the returned value, and the kind of fault
    "a view beyond the end": ("torch.as_strided(logits, (1, 8192), (1, 1), 8192 * 4)", "exception"),
    "a view of the other rows": ("torch.as_strided(logits, (1, 8192), (8192, 1), 8192)", None),
    "a view of one number": ("logits[:, :1].expand(1, 8192)", None),
    "fewer numbers": ("logits[:, :100]", "bad_result"),
    "more rows": ("shared_memory()", "bad_result"),
    "one row less": ("logits[:0]", "bad_result"),
    "a resized tensor": ("logits.resize_(1, 100)", "bad_result"),
    "another storage": ("logits.set_(torch.ones(1, 8192))", None),
    "a storage without memory": ("torch.empty(1, 8192, device='meta')", "bad_result"),
    "a sparse tensor": ("logits.to_sparse()", "bad_result"),
    "another type": ("logits.to(torch.int64)", "bad_result"),
    "complex numbers": ("logits.to(torch.complex64)", "bad_result"),
    "a class that lies about its shape": ("FakeTensor(logits)", "bad_result"),
    "a tensor that lies about its shape": ("logits[:, :10].as_subclass(LyingTensor)", "bad_result"),
    "a quantized tensor": ("torch.quantize_per_tensor(logits, 0.1, 0, torch.qint8)", "bad_result"),
    "a nested tensor": ("torch.nested.nested_tensor([logits[0]])", "exception"),
    "freed memory": ("(storage := torch.ones(1, 8192), storage.untyped_storage().resize_(0))[0]", "crash"),
}

RETURNS = """
from attacker import shared_memory
class FakeTensor:
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


@pytest.mark.parametrize("what", RESULTS)
def test_results_with_wrong_size_or_type(what: str, target: Any, sandboxed: Any) -> None:
    returned, kind = RESULTS[what]
    processor = sandboxed.load(sandboxed.source(nothing, RETURNS.format(returned=returned)))
    logits = torch.full((3, VOCAB), 7.0)  # the processor gets the middle row
    faults = sandboxed.step(processor, logits[1:2], [sandboxed.attach(processor)])
    if kind is None:
        assert faults == {}
    else:
        assert [fault.kind for fault in faults.values()] == [kind]
    assert logits.shape == (3, VOCAB)
    assert logits[[0, 2]].eq(7.0).all()
