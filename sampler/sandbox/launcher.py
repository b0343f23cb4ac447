"""The process that zygotes are forked from: it imports everything once, so that a new zygote takes milliseconds.

It is exec'ed with an environment of its own, so that nothing of the server's memory is in it. It never runs a client's
code, and starts another zygote when the server asks for one because the last was killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

# What is imported here is there in every sandbox without being read again. dill looks for a folder for temporary files
# when it is imported, which it would not find later.
import dill  # noqa: F401
import numpy
import torch

from logitship.client.scrub import known_folders
from logitship.client.serialization import class_unpickler  # noqa: F401
from logitship.sampler.processors.request_view import ModelView

from .channel import Channel, ChannelClosed, ControlMessage
from .kernel import limits, namespaces, privileges
from .zygote import SandboxSetup, Zygote


def main(descriptor: int) -> NoReturn:
    """Serve the server on a channel until it closes it."""
    channel = Channel(socket.socket(fileno=descriptor))
    limits.die_first_when_memory_is_short()
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how the processes around the zygotes ended
    setup: SandboxSetup | None = None
    try:
        while True:
            note, values, descriptors = channel.receive()
            if note is ControlMessage.SETUP:
                setup = _read_setup(*values)
            elif note is ControlMessage.START:
                assert setup is not None
                start_zygote(setup, channel, *descriptors)
    except ChannelClosed:
        with contextlib.suppress(ChildProcessError):
            os.wait()  # ends with the last child, because of what SIGCHLD is set to
        os._exit(0)


def warm_up() -> None:
    """Do once what the first use of torch does: under the locks of a sandbox it could not."""
    torch.set_num_threads(1)
    torch.backends.cpu.get_cpu_capability()
    logits = torch.rand(2, 64)
    logits.softmax(-1).topk(4)
    logits.index_fill_(1, torch.tensor([1, 2]), -float("inf")).amax(-1).isfinite()
    numpy.random.default_rng().random()
    known_folders()  # looks at the file system


def start_zygote(setup: SandboxSetup, channel: Channel, descriptor: int) -> None:
    """Fork a zygote, which speaks with the server on the channel of this descriptor."""
    if os.fork():
        os.close(descriptor)
        return
    # In between, a process enters the zygote's namespaces: only its children are in a new process namespace.
    try:
        privileges.die_with_parent(signal.SIGKILL)  # and the zygote with this one
        channel.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        entered = namespaces.enter()
        zygote = os.fork()
        if zygote == 0:
            Zygote(Channel(socket.socket(fileno=descriptor)), setup, entered).run()
        os.close(descriptor)
        os.waitpid(zygote, 0)
    finally:
        os._exit(0)


def _read_setup(
    names: str, tokenizer: bytes, eos_token_ids: tuple[int, ...], vocab_size: int, max_rows: int, memory_limit: int
) -> SandboxSetup:
    module, _, attribute = names.partition(":")
    table: Mapping[tuple[str, str], Any] = getattr(importlib.import_module(module), attribute)
    # The server's own object, sent before any client's code exists.
    model = ModelView(vocab_size, frozenset(eos_token_ids), pickle.loads(tokenizer))
    assert threading.active_count() == 1, "namespaces can only be entered by a process without threads"
    gc.collect()
    gc.freeze()  # else the collector would touch, and so copy, every object in every sandbox
    return SandboxSetup(table, model, max_rows, memory_limit)


if __name__ == "__main__":
    main(int(sys.argv[1]))
