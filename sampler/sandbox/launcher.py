"""The launcher: imports everything once and forks the zygote, so that a new zygote takes milliseconds.

It is exec'ed with its own environment, so it holds none of the server's memory. It never runs client code. It forks
another zygote when the server requests one because the last was killed.
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
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

# Imported here, modules are available in every sandbox. dill looks for a directory for temporary files when it is
# imported, which would fail in a sandbox.
import dill  # noqa: F401
import numpy
import torch

from logitship.client.scrub import known_folders
from logitship.client.serialization.pickling import class_unpickler  # noqa: F401
from logitship.sampler.huge_pages import collapse_own_memory
from logitship.sampler.processors.request_view import ModelView

from .kernel import limits, namespaces, privileges
from .protocol import Channel, ChannelClosed, ControlMessage
from .zygote import SandboxSetup, Zygote


def main(descriptor: int) -> NoReturn:
    """Serve the channel until the server closes it."""
    channel = Channel(socket.socket(fileno=descriptor))
    limits.die_first_when_memory_is_short()
    initialize_libraries()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap children automatically; their status is not needed
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
            os.wait()  # blocks until the last child ends, because SIGCHLD is ignored
        os._exit(0)


def initialize_libraries() -> None:
    """Run the lazy initialization of torch and numpy, which would fail in a sandbox."""
    torch.set_num_threads(1)
    torch.backends.cpu.get_cpu_capability()
    logits = torch.rand(2, 64)
    logits.softmax(-1).topk(4)
    logits.index_fill_(1, torch.tensor([1, 2]), -float("inf")).amax(-1).isfinite()
    numpy.random.default_rng().random()
    known_folders()  # reads the file system


def start_zygote(setup: SandboxSetup, channel: Channel, descriptor: int) -> None:
    """Fork a zygote that serves the channel on this descriptor."""
    if os.fork():
        os.close(descriptor)
        return
    # An intermediate process enters the zygote's namespaces: a new PID namespace only applies to its children.
    try:
        privileges.die_with_parent(signal.SIGKILL)  # the zygote does the same
        channel.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        entered = namespaces.enter()
        zygote = os.fork()
        if zygote == 0:
            Zygote(Channel(socket.socket(fileno=descriptor)), setup, entered).run()
        os.close(descriptor)
        os.waitpid(zygote, 0)
    except Exception:  # noqa: BLE001  # boundary: process death
        traceback.print_exc()
    finally:
        os._exit(0)


def _read_setup(
    names: str, tokenizer: bytes, eos_token_ids: tuple[int, ...], vocab_size: int, max_rows: int, memory_limit: int
) -> SandboxSetup:
    module, _, attribute = names.partition(":")
    table: Mapping[tuple[str, str], Any] = getattr(importlib.import_module(module), attribute)
    # Trusted: the server sends it before any client code arrives.
    model = ModelView(vocab_size, frozenset(eos_token_ids), pickle.loads(tokenizer))
    assert threading.active_count() == 1, "namespaces can only be entered by a process without threads"
    gc.collect()
    gc.freeze()  # otherwise the collector would write to, and so copy, every object in every sandbox
    gc.enable()  # off since the process began: looking for garbage in the imports takes a tenth of the start
    collapse_own_memory()  # half of a sandbox's time was that of page tables
    return SandboxSetup(table, model, max_rows, memory_limit)


if __name__ == "__main__":
    main(int(sys.argv[1]))
