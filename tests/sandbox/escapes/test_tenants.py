"""Tenants are isolated from each other in processes, memory and class state, even with the same class."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampling_params import SamplingParams

VOCAB = 8192


def nothing(w: SimpleNamespace) -> None: ...


KEEPER = """
import builtins, os, sys
class P(CustomLogitProcessor):
    kept = {}
    def __call__(self, logits, custom_param_list=None):
        mine = custom_param_list[0]["mine"]
        attacker.OUTCOMES[:] = [{"returned": repr(sorted({
            *P.kept, *vars(self), *vars(P).get("more", []),
            *getattr(torch, "left_there", []), *getattr(builtins, "left_there", []), *getattr(sys, "left_there", []),
            *[key for key in os.environ if key.startswith("LEFT")],
            *[name for name in sys.modules if name.startswith("left")],
            *custom_param_list[0].get("left", []), *custom_param_list[0]["__req__"].state,
        }))}]
        P.kept[mine] = P.more = [mine]
        setattr(self, mine, 1)
        torch.left_there = builtins.left_there = sys.left_there = [mine]
        os.environ["LEFT" + mine] = "1"
        sys.modules["left" + mine] = sys
        custom_param_list[0]["left"] = [mine]
        custom_param_list[0]["__req__"].state[mine] = 1
        torch.set_default_dtype(torch.float64)
        return attacker.report(logits)
"""


def test_same_class_of_two_tenants_shares_no_state(sandboxed: Any) -> None:
    source = sandboxed.source(nothing, KEEPER)
    found = {}
    for tenant in ("alice", "bob"):
        processor = sandboxed.load(source, tenant)
        for call in (1, 2):
            logits = torch.zeros(1, VOCAB)
            assert sandboxed.step(processor, logits, [sandboxed.attach(processor, mine=tenant)]) == {}
            found[tenant, call] = bytes(logits[0, 1 : 1 + int(logits[0, 0])].to(torch.uint8).tolist()).decode()
    for tenant, other in (("alice", "bob"), ("bob", "alice")):
        assert found[tenant, 1] == '[{"returned": "[]"}]'
        assert f"LEFT{tenant}" in found[tenant, 2]  # the test detects leftovers
        assert other not in found[tenant, 2]


def test_tenants_have_different_processes_and_users(sandboxed: Any) -> None:
    source = sandboxed.source(nothing)
    pids = [sandboxed.pid_of(sandboxed.load(source, tenant)) for tenant in ("alice", "bob")]
    assert len(set(pids)) == 2
    if os.geteuid() == 0:
        users = [re.search(r"Uid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
        assert len({user and user[1] for user in users}) == 2


NEIGHBOR = """
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        P.secret = custom_param_list[0]["secret"]
        torch.held = torch.tensor(list(P.secret.encode()), dtype=torch.float32)
        logits[0, : len(torch.held)] = torch.held
        return logits
"""


def inner_pid(pid: int) -> int:
    """Return the PID of a process in its innermost PID namespace."""
    found = re.search(r"NSpid:(.*)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1].split()[-1])


def kill(w: SimpleNamespace) -> None:
    import os

    os.kill(w.neighbor, 9)


def kill_all(w: SimpleNamespace) -> None:
    import os

    os.kill(-1, 9)


def kill_the_zygote(w: SimpleNamespace) -> None:
    import os

    os.kill(os.getppid(), 9)


def kill_by_the_connection(w: SimpleNamespace) -> None:
    import fcntl

    from attacker import sockets

    fcntl.fcntl(sockets()[0], fcntl.F_SETOWN, w.neighbor)


def trace(w: SimpleNamespace) -> None:
    from attacker import kernel

    kernel({"x86_64": 101, "aarch64": 117}, 16, w.neighbor, 0, 0)


def read_memory(w: SimpleNamespace) -> bytes:
    import ctypes

    from attacker import kernel

    mine = ctypes.create_string_buffer(60)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(mine), 60)
    there = (ctypes.c_size_t * 2)(id(mine), 60)
    kernel({"x86_64": 310, "aarch64": 270}, w.neighbor, here, 1, there, 1, 0)
    return mine.value


def read_memory_as_a_file(w: SimpleNamespace) -> bytes:
    return open(f"/proc/{w.neighbor}/mem", "rb").read(1)


def take_its_connection(w: SimpleNamespace) -> None:
    import os

    from attacker import kernel

    kernel(438, os.pidfd_open(w.neighbor), 3, 0)


def limit(w: SimpleNamespace) -> None:
    import resource

    resource.prlimit(w.neighbor, resource.RLIMIT_AS, (0, 0))


def search_own_memory(w: SimpleNamespace) -> list[str]:
    import ctypes
    import gc
    import re

    from attacker import is_mapped, shared_memory

    gc.unfreeze()
    start = shared_memory().data_ptr()
    data = ctypes.string_at(start, shared_memory().nbytes)
    pages = [page for page in range(start // 4096 - 512, start // 4096 + 512) if is_mapped(page * 4096)]
    data += b"".join(ctypes.string_at(page * 4096, 4096) for page in pages)
    data += repr([each for each in gc.get_objects() if type(each) is dict and "secret" in each]).encode()
    assert len(data) > 1 << 16
    return re.findall("[S]ECRET-[0-9a-f]{32}", data.decode("latin-1"))


@pytest.mark.parametrize(
    ("attempt", "refusal"),
    [
        (kill, "EPERM"),
        (kill_all, "EPERM"),
        (kill_the_zygote, "EPERM"),
        (kill_by_the_connection, "EPERM"),
        (trace, "EPERM"),
        (read_memory, "EPERM"),
        (read_memory_as_a_file, "ENOENT|EACCES|EPERM"),
        (take_its_connection, "EPERM"),
        (limit, "EPERM"),
        (search_own_memory, r"returned \[\]"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_neighbor_is_unreachable(attempt: Any, refusal: str, target: Any, sandboxed: Any) -> None:
    neighbor = sandboxed.load(sandboxed.source(nothing, NEIGHBOR), "alice")
    row = sandboxed.attach(neighbor, secret=sandboxed.secret)
    logits = torch.zeros(1, VOCAB)
    assert sandboxed.step(neighbor, logits, [row]) == {}
    report = sandboxed(attempt, neighbor=inner_pid(sandboxed.pid_of(neighbor)))
    assert re.fullmatch(refusal, report.answer)
    assert target.changes(report) == []
    # The neighbor still works.
    again = torch.zeros(1, VOCAB)
    assert sandboxed.step(neighbor, again, [row]) == {}
    assert torch.equal(logits, again)
    assert bytes(again[0, : len(sandboxed.secret)].to(torch.uint8).tolist()).decode() == sandboxed.secret


GREEDY = """
import os
from attacker import answer, call_number, shared_memory
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        logits.sum()  # not before then is there anything in the shared memory
        attacker.OUTCOMES[:] = [{"returned": repr([tuple(logits.shape), sorted(shared_memory().unique().tolist())])}]
        shared_memory().fill_(99.0)
        return attacker.report(logits)
"""


def test_only_own_rows_are_visible_and_changed(sandboxed: Any) -> None:
    """Rows 1 and 3 belong to an attacker, row 2 to a neighbor, and the others have no processor."""
    attack = sandboxed.load(sandboxed.source(nothing, GREEDY))
    neighbor = sandboxed.load(sandboxed.source(nothing, NEIGHBOR), "alice")
    uses = [
        (),
        (ProcessorUse(attack, {}, "b"),),
        (ProcessorUse(neighbor, {"secret": "abc"}, "c"),),
        (ProcessorUse(attack, {}, "d"),),
        (),
    ]
    shipped = ShippedProcessors(None, torch.device("cpu"), False, model=sandboxed.model)
    added = [(row, SamplingParams(processors=use), [5], []) for row, use in enumerate(uses)]
    shipped.update_state(BatchUpdate(5, [], added, []))
    for step in range(3):
        logits = torch.arange(1.0, 6.0).unsqueeze(1).repeat(1, VOCAB) + 10 * step
        before = logits.clone()
        shipped.apply(logits)
        assert shipped.take_faults() == []
        assert torch.equal(logits[[0, 4]], before[[0, 4]])
        assert logits[2, :3].tolist() == [97.0, 98.0, 99.0]
        assert torch.equal(logits[2, 3:], before[2, 3:])
        reported = bytes(logits[1, 1 : 1 + int(logits[1, 0])].to(torch.uint8).tolist()).decode()
        unused = {0.0} if step == 0 else {99.0}  # values of the other rows of the shared memory
        assert f"(2, 8192), {sorted(unused | {2.0 + 10 * step, 4.0 + 10 * step})}" in reported
