"""The worker, run in this process without a lockdown."""

from __future__ import annotations

import gc
import marshal
import os
import socket
import sys
import threading
import weakref
from array import array
from typing import Any

import dill
import orjson
import pytest
import torch

from logitship.client.serialization.processor_string import PYTHON, PickledProcessor, SourceProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.protocol import HEADER, MAX_ANSWER, Answer, Command, load_message, pack
from logitship.sampler.sandbox.worker import ServerConnection, Worker, serve

ROWS, VOCAB = 4, 6
LOADED = b'["P","",null,""]'
"""The description of the class of `source`."""
MODEL = ModelView(VOCAB, frozenset({1}), "the tokenizer")
HEADER_LINES = "import torch\nfrom logitship import CustomLogitProcessor\n\nclass P(CustomLogitProcessor):\n"


def source(body: str) -> bytes:
    """Return the body of LOAD for a class whose `__call__` has this body."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    text = f"{HEADER_LINES}    def __call__(self, logits, custom_param_list=None):\n{lines}"
    return load_message(SourceProcessor(text, "P"))


def attach(handle: int, output: tuple[int, ...] = (), **params: Any) -> bytes:
    values = (handle, f"r{handle}", params, array("q", [7, 8]).tobytes(), array("q", output).tobytes(), {"top_k": 3})
    return marshal.dumps(values)


def loaded(body: str) -> tuple[Worker, torch.Tensor]:
    logits = torch.zeros(ROWS, VOCAB)
    worker = Worker(logits, MODEL, {})
    assert worker.handle(Command.LOAD, source(body)) == (Answer.LOADED, LOADED)
    return worker, logits


def step(worker: Worker, *rows: tuple[int, list[int]]) -> tuple[Answer, bytes]:
    """Call the processor on rows: pairs of a sequence's handle and its new tokens."""
    handles, tokens = zip(*rows, strict=True)
    worker.handle(Command.GROUP, marshal.dumps(handles))
    answer = worker.handle(Command.STEP, marshal.dumps(tokens))
    assert answer is not None
    return answer


def test_only_rows_of_the_call_are_edited() -> None:
    worker, logits = loaded("return logits + torch.tensor([[p['by']] for p in custom_param_list])")
    for handle in range(3):
        assert worker.handle(Command.ATTACH, attach(handle, by=10.0 * handle)) is None
    assert step(worker, (2, []), (1, [])) == (Answer.DONE, b"")
    assert logits[:, 0].tolist() == [20, 10, 0, 0]


def test_view_follows_its_sequence() -> None:
    worker, logits = loaded(
        "req = custom_param_list[0]['__req__']\n"
        "assert (req.rid, req.origin_input_ids, req.sampling_params.top_k) == ('r5', [7, 8], 3)\n"
        "assert (req.eos_token_ids, req.vocab_size, req.tokenizer) == ({1}, 6, 'the tokenizer')\n"
        "req.state['calls'] = req.state.get('calls', 0) + 1\n"
        "logits[0, :3] = torch.tensor([len(req.output_ids), req.output_ids[-1], req.state['calls']])\n"
        "return logits"
    )
    worker.handle(Command.ATTACH, attach(5, (4,)))
    seen = []
    for new in ([], [9], [], [10, 11]):
        assert step(worker, (5, new)) == (Answer.DONE, b"")
        seen.append(logits[0, :3].tolist())
    assert seen == [[1, 4, 1], [2, 9, 2], [2, 9, 3], [4, 11, 4]]


def test_detached_sequence_of_the_group_is_freed_at_once() -> None:
    worker, _ = loaded("return logits")
    for handle in (5, 6, 7):
        worker.handle(Command.ATTACH, attach(handle))
    worker.handle(Command.GROUP, marshal.dumps([5, 6]))
    member = weakref.ref(worker._members[5])
    worker.handle(Command.DETACH, marshal.dumps(7))  # not in the group
    assert worker.handle(Command.STEP, marshal.dumps([[1], [2]])) == (Answer.DONE, b"")
    worker.handle(Command.DETACH, marshal.dumps(5))
    gc.collect()
    assert member() is None
    assert step(worker, (6, [])) == (Answer.DONE, b"")


def test_changes_of_the_view_are_undone_by_the_next_token() -> None:
    worker, _ = loaded(
        "req = custom_param_list[0]['__req__']\nassert req.output_ids == req.state.get('expected', [4])\n"
        "req.state['expected'] = [*req.output_ids, 5]\ndel req.output_ids\nreturn logits"
    )
    worker.handle(Command.ATTACH, attach(5, (4,)))
    for new in ([], [5], [5], [5]):
        assert step(worker, (5, new))[0] is Answer.DONE


def test_detached_sequence_is_unknown() -> None:
    worker, _ = loaded("return logits")
    worker.handle(Command.ATTACH, attach(5))
    worker.handle(Command.DETACH, marshal.dumps(5))
    worker.handle(Command.DETACH, marshal.dumps(6))
    with pytest.raises(KeyError):
        step(worker, (5, []))


def test_fault_of_a_single_row_is_reported_at_once() -> None:
    worker, _ = loaded("raise ValueError('no such luck')")
    worker.handle(Command.ATTACH, attach(5))
    answer, body = step(worker, (5, []))
    assert answer is Answer.FAULTS
    (((rows, kind, message, traceback)),) = orjson.loads(body)
    assert (rows, kind, message) == ([0], "exception", "processor P raised ValueError: no such luck")
    assert "raise ValueError('no such luck')" in traceback


def test_rows_of_a_failed_group_are_retried() -> None:
    worker, logits = loaded(
        "logits += 1\nfor params in custom_param_list:\n    if params['bad']:\n        return None\nreturn logits"
    )
    for handle in range(3):
        worker.handle(Command.ATTACH, attach(handle, bad=handle == 1))
    rows = [(handle, [handle]) for handle in range(3)]
    assert step(worker, *rows) == (Answer.AGAIN, b"")
    logits.zero_()
    answer = worker.handle(Command.RETRY, b"")
    assert answer is not None
    assert answer[0] is Answer.FAULTS
    (((told, kind, message, traceback)),) = orjson.loads(answer[1])
    assert (told, kind, traceback) == ([1], "bad_result", "")
    assert message.startswith("processor P returned NoneType")
    assert logits[0, 0] == logits[2, 0] == 1


@pytest.mark.parametrize(("first", "reason"), [("", "it fails before its logits exist"), ("logits.sum()", "")])
def test_dense_only_if_it_failed_before_it_used_its_logits(first: str, reason: str) -> None:
    worker, logits = loaded(f"{first}\nassert len(custom_param_list) == 1\nlogits += 1\nreturn logits")
    worker.receive_rows = lambda body: None
    for handle in range(2):
        worker.handle(Command.ATTACH, attach(handle))
    worker.handle(Command.GROUP, marshal.dumps((0, 1)))
    answer = worker.handle(Command.PROMISE, marshal.dumps(([], [])))
    if answer == (Answer.AGAIN, b""):
        answer = worker.handle(Command.RETRY, b"")
    assert answer == (Answer.DONE, b"")
    assert logits[:, 0].tolist() == [1, 1, 0, 0]
    assert worker._dense_reason == reason


@pytest.mark.parametrize("num_rows", [2, 30, 600])
def test_faults_fit_into_an_answer(num_rows: int) -> None:
    worker = Worker(torch.zeros(num_rows, VOCAB), MODEL, {})
    worker.handle(
        Command.LOAD, source("raise ValueError(str(custom_param_list[0]['number']) + '\\U0001d54f' * 100_000)")
    )
    for handle in range(num_rows):
        worker.handle(Command.ATTACH, attach(handle, number=handle))
    assert step(worker, *((handle, []) for handle in range(num_rows)))[0] is Answer.AGAIN
    answer = worker.handle(Command.RETRY, b"")
    assert answer is not None
    assert answer[0] is Answer.FAULTS
    assert len(answer[1]) <= MAX_ANSWER
    assert [rows for rows, *_ in orjson.loads(answer[1])] == [[row] for row in range(num_rows)]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (load_message(SourceProcessor("1 / 0", "P")), "ZeroDivisionError"),
        (load_message(SourceProcessor("raise SystemExit(3)", "P")), "SystemExit: 3"),
        (load_message(SourceProcessor("raise KeyboardInterrupt", "P")), "KeyboardInterrupt"),
        (load_message(SourceProcessor("P = 1", "P")), "not a class"),
        (load_message(PickledProcessor(b"no pickle", PYTHON)), "."),
        (load_message(PickledProcessor(dill.dumps(dict), PYTHON)), "CustomLogitProcessor"),
    ],
)
def test_load_errors(body: bytes, says: str) -> None:
    answer = Worker(torch.zeros(ROWS, VOCAB), MODEL, {}).handle(Command.LOAD, body)
    assert answer is not None
    assert answer[0] is Answer.REFUSED
    assert says == "." or says in answer[1].decode()


def test_load_error_whose_number_is_not_one() -> None:
    methods = "    def __init__(self): raise OSError([], 'x')\n    def __call__(self, logits, params): return logits\n"
    worker = Worker(torch.zeros(ROWS, VOCAB), MODEL, {})
    answer = worker.handle(Command.LOAD, load_message(SourceProcessor(HEADER_LINES + methods, "P")))
    assert answer is not None
    assert answer[0] is Answer.REFUSED
    assert "P raised when it was created: OSError: [Errno []] x\n" in answer[1].decode()


def test_serve_until_the_connection_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def end(status: int) -> None:
        assert status == 0
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "stdout", None)  # which `serve` replaces, as standard error
    monkeypatch.setattr(sys, "stderr", None)
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    ended = threading.Event()

    def run() -> None:
        with pytest.raises(Ended):
            serve(theirs.fileno(), Worker(torch.zeros(ROWS, VOCAB), MODEL, {}))
        ended.set()

    serving = threading.Thread(target=run)
    serving.start()
    ours.sendall(pack(Command.LOAD, 1, source("return logits")) + pack(Command.ATTACH, 0, attach(5)))
    ours.sendall(pack(Command.GROUP, 0, marshal.dumps([5])) + pack(Command.STEP, 2, marshal.dumps([[4]])))
    answers = b""
    while len(answers) < 2 * HEADER.size + len(LOADED):
        answers += ours.recv(100)
    assert answers == pack(Answer.LOADED, 1, LOADED) + pack(Answer.DONE, 2)
    ours.close()
    serving.join(30)
    assert ended.is_set()
    theirs.close()


def test_text_printed_after_the_answer_belongs_to_the_next_call() -> None:
    """As if a profile function of the author printed. The call that was answered has ended."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(theirs.fileno(), "rb", closefd=False) as stream:
        server = ServerConnection(theirs.fileno(), stream)
        ours.sendall(pack(Command.STEP, 1) + pack(Command.STEP, 2))
        server.next()
        server.answer(Answer.DONE, b"")
        print("late", file=server.printed)
        server.next()
        server.answer(Answer.DONE, b"")
        answers = ours.recv(1000)
    assert answers == pack(Answer.DONE, 1) + pack(Answer.PRINTED, 2, b"late\n") + pack(Answer.DONE, 2)


def fork(worker: Worker, of: int, to: int) -> None:
    assert worker.handle(Command.FORK, marshal.dumps((of, to))) is None


COUNTS = """
for row, params in zip(logits, custom_param_list):
    req = params['__req__']
    state = req.state.setdefault('log', params['log'])
    state.append(len(req.output_ids))
    row[:3] = torch.tensor([len(state), sum(state), float(params['log'] is state)])
return logits
"""


def test_fork_continues_from_its_source_state() -> None:
    worker, logits = loaded(COUNTS.strip())
    worker.handle(Command.ATTACH, attach(5, (4,), log=[]))
    assert step(worker, (5, []))[0] is Answer.DONE
    fork(worker, 5, 6)
    assert step(worker, (5, [9]), (6, [8, 7]))[0] is Answer.DONE
    assert logits[:2, :3].tolist() == [[2, 3, 1], [2, 4, 1]]
    fork(worker, 6, 7)
    worker.handle(Command.DETACH, marshal.dumps(6))
    assert step(worker, (7, []), (5, []))[0] is Answer.DONE
    assert logits[:2, :3].tolist() == [[3, 7, 1], [3, 5, 1]]


KEEPS = """
logits += 1
for params in custom_param_list:
    req = params['__req__']
    req.state.setdefault('outputs', []).append(req.output_ids[:])
    req.state['kept'] = (each for each in ()) if params.get('keeps') else None
    assert not (params.get('fails') and len(req.output_ids) > 1), 'as told'
return logits
"""


def test_failed_copy_is_a_fault_of_the_fork_only() -> None:
    worker, logits = loaded(KEEPS.strip())
    worker.handle(Command.ATTACH, attach(5, keeps=True))
    worker.handle(Command.ATTACH, attach(6))
    assert step(worker, (5, []), (6, []))[0] is Answer.DONE
    fork(worker, 5, 7)
    fork(worker, 6, 8)
    fork(worker, 7, 9)  # before the fault of 7 was reported
    for _ in range(2):  # the fault is repeated in every step
        logits.zero_()
        answer, body = step(worker, (7, [1]), (5, [2]), (8, [3]), (9, [4]))
        assert answer is Answer.FAULTS
        (((rows, kind, message, _)),) = orjson.loads(body)
        assert (rows, kind) == ([0, 3], "uncopyable")
        assert message.startswith("processor P keeps state of a sequence that cannot be copied")
        assert logits[:, 0].tolist() == [0, 1, 1, 0]
    assert step(worker, (9, []))[0] is Answer.FAULTS
    for handle in (7, 9):
        worker.handle(Command.DETACH, marshal.dumps(handle))
    assert step(worker, (5, []), (8, []))[0] is Answer.DONE


def test_failed_copy_among_failing_rows() -> None:
    worker, logits = loaded(KEEPS.strip())
    worker.handle(Command.ATTACH, attach(4))
    worker.handle(Command.ATTACH, attach(5, keeps=True))
    worker.handle(Command.ATTACH, attach(6, fails=True))
    assert step(worker, (4, []), (5, []), (6, []))[0] is Answer.DONE
    fork(worker, 5, 7)
    logits.zero_()
    assert step(worker, (7, [1]), (4, [1]), (6, [1, 2])) == (Answer.AGAIN, b"")
    logits.zero_()
    answer = worker.handle(Command.RETRY, b"")
    assert answer is not None
    told = {kind: rows for rows, kind, *_ in orjson.loads(answer[1])}
    assert told == {"uncopyable": [0], "exception": [2]}
    assert logits[:, 0].tolist()[1] == 1
