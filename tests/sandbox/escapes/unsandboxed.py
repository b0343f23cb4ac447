"""Runs hostile processors without a sandbox, as with `--processor-isolation none`: the controls of the tests.

Reads a plan per line, as JSON: `{"source", "pickle", "calls", "end"}`; `end` releases the processor. A forked child
executes it, and stays alive until the next line; an empty plan `{}` only kills the last child. The answer is a line of
JSON: `{"pid", "load_error", "faults", "logits"}`, or the `"status"` of a child that exited.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

from logitship.client.author_errors import author_traceback, error_text
from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.loading import instantiate, load_class
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor
from logitship.sampler.sandbox.kernel.syscalls import prctl

PR_SET_CHILD_SUBREAPER = 36
SECRET = os.environ.get("SECRET_OF_THE_SERVER", "")


def main() -> None:
    torch.set_num_threads(1)
    numpy.random.default_rng().random()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for line in sys.stdin.buffer:
        end()
        plan = json.loads(line)
        print(json.dumps(run(plan) if plan else {}), flush=True)
    end()


def run(plan: dict[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()
        try:
            done = do(plan)
            os.write(writing, json.dumps(done).encode() + b"\n")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.readline()  # not `read`: a process that the child started may keep the pipe open
    if answer:
        return {"pid": child, **json.loads(answer)}
    # It exited, or executed another program.
    return {"pid": 0, "status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}


def do(plan: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = socket.socketpair()  # in place of a sandbox's connection
    string: SourceProcessor | PickledProcessor = PickledProcessor(bytes.fromhex(plan["pickle"]))
    if plan["source"] is not None:
        string = SourceProcessor(plan["source"], "P", bytes.fromhex(plan["pickle"]))
    done: dict[str, Any] = {"load_error": "", "faults": [], "logits": ""}
    try:
        processor = instantiate(load_class(string))
    except ProcessorLoadError as error:
        done["load_error"] = str(error)
        return done
    logits, params = torch.zeros(1, plan["vocab"]), {}
    for _ in range(plan["calls"]):
        logits.zero_()
        try:
            processor(logits, [params])
        except BaseException as error:  # noqa: BLE001  # a sandbox continues, too
            done["faults"].append(f"{error_text(error)}\n{author_traceback(error)}")
    done["logits"] = logits.numpy().tobytes().hex()
    if plan["end"]:
        params.clear()
        del processor
        gc.collect()
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)
        atexit._run_exitfuncs()
    ours.close()
    theirs.close()
    return done


def end() -> None:
    """Kill the last child and all its descendants, which this process adopted as a subreaper."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


main()
