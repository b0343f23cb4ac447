"""The sandbox confines shipped code whenever it runs: on loading, in a call, after it, and on destruction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


def break_out(w: SimpleNamespace) -> str:
    """Try several attacks. Return the outcome of each."""
    import errno
    import os
    import socket

    def connect() -> None:
        socket.create_connection(("127.0.0.1", w.tcp_port), timeout=2)

    def create() -> None:
        open(f"{w.folder}/new", "w").close()

    def read() -> str:
        return open(w.secret_file).read()

    def kill() -> None:
        os.kill(w.victim, 15)

    results = []
    for each in (connect, create, read, kill):
        try:
            results.append(str(each()))
        except OSError as error:
            results.append(errno.errorcode[error.errno])
    return " ".join(results)


EXITED = "changed: the victim exited"
REPORT = """
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return attacker.report(logits)
"""

# The attempt is made in the first of two calls at the latest. The second call reports it.
FRAMES = {
    "module body": "attacker.run(attempt, W)" + REPORT,
    "class body": REPORT + "    attacker.run(attempt, W)\n",
    "decorator": """
def decorate(cls):
    attacker.run(attempt, W)
    return cls
@decorate"""
    + REPORT,
    "metaclass": """
class Meta(type(CustomLogitProcessor)):
    def __init__(cls, *args):
        super().__init__(*args)
        attacker.run(attempt, W)
"""
    + REPORT.replace("P(CustomLogitProcessor)", "P(CustomLogitProcessor, metaclass=Meta)"),
    "name of a class": """
class Meta(type(CustomLogitProcessor)):
    def __getattribute__(cls, name):
        attacker.run(attempt, W)
        return super().__getattribute__(name)
"""
    + REPORT.replace("P(CustomLogitProcessor)", "P(CustomLogitProcessor, metaclass=Meta)"),
    "__init_subclass__": """
class Base(CustomLogitProcessor):
    def __init_subclass__(cls):
        attacker.run(attempt, W)
"""
    + REPORT.replace("P(CustomLogitProcessor)", "P(Base)"),
    "__set_name__": """
class Field:
    def __set_name__(self, owner, name):
        attacker.run(attempt, W)
"""
    + REPORT
    + "    field = Field()\n",
    "signature": REPORT  # of a class with its own `__init__`
    + """
    def __init__(self):
        pass

class Signature:
    def __get__(self, *_):
        attacker.run(attempt, W)
P.__signature__ = Signature()
""",
    "__new__": REPORT
    + """
    def __new__(cls):
        attacker.run(attempt, W)
        return super().__new__(cls)
""",
    "__init__": REPORT
    + """
    def __init__(self):
        attacker.run(attempt, W)
""",
    "__call__": """
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        attacker.run(attempt, W)
        return attacker.report(logits)
""",
    "__del__": """
class Gone:
    def __del__(self):
        attacker.run(attempt, W)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        Gone()
        return attacker.report(logits)
""",
    "__del__ of what was returned": """
class Returned(torch.Tensor):
    def __del__(self):
        attacker.run(attempt, W)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return attacker.report(logits).clone().as_subclass(Returned)
""",
    "operations of what was returned": """
class Returned(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args, **kwargs):
        attacker.run(attempt, W)
        return super().__torch_function__(*args, **kwargs)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        returned = logits.clone().as_subclass(Returned)
        returned + 1
        return attacker.report(logits)
""",
    "operations on any tensor": """
from torch.overrides import TorchFunctionMode
class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if not attacker.OUTCOMES:
            attacker.run(attempt, W)
        return function(*args, **(kwargs or {}))
mode = Mode()
mode.__enter__()
"""
    + REPORT,
    "garbage collection": """
gc.callbacks.append(lambda *_: attacker.run(attempt, W) if len(attacker.OUTCOMES) < 3 else None)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        gc.collect()
        return attacker.report(logits)
""",
    "a cycle that is collected": """
class Gone:
    def __init__(self):
        self.me = self
    def __del__(self):
        attacker.run(attempt, W)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        Gone()
        gc.collect()
        return attacker.report(logits)
""",
    "finalizer": """
import weakref
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        weakref.finalize(type("Gone", (), {}), attacker.run, attempt, W)
        gc.collect()
        return attacker.report(logits)
""",
    "exit functions": """
import atexit
atexit.register(attacker.run, attempt, W)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        atexit._run_exitfuncs()
        return attacker.report(logits)
""",
    "an exit that is caught": """
import atexit
atexit.register(attacker.run, attempt, W)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        if attacker.OUTCOMES:
            return attacker.report(logits)
        try:
            sys.exit(0)
        finally:
            attacker.run(attempt, W)
""",
    "text of an exception": """
class Error(Exception):
    def __str__(self):
        attacker.run(attempt, W)
        return "text"
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        if not attacker.OUTCOMES:
            raise Error
        return attacker.report(logits)
""",
    "codec": """
import codecs
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        codecs.register(lambda name: attacker.run(attempt, W))
        try:
            "text".encode("nowhere")
        except LookupError:
            pass
        return attacker.report(logits)
""",
    "error handler of a codec": """
import codecs
def handler(error):
    attacker.run(attempt, W)
    return "?", error.end
codecs.register_error("mine", handler)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        "ü".encode("ascii", "mine")
        return attacker.report(logits)
""",
    "import hook": """
class Hook:
    @staticmethod
    def find_spec(*_):
        sys.meta_path.remove(Hook)
        attacker.run(attempt, W)
sys.meta_path.insert(0, Hook)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        try:
            import nowhere_to_be_found
        except ImportError:
            pass
        return attacker.report(logits)
""",
    "audit hook": """
once = []
def hook(*_):
    if not once:
        once.append(1)
        attacker.run(attempt, W)
sys.addaudithook(hook)
"""
    + REPORT,
    "profiler": """
def profile(*_):
    sys.setprofile(None)
    attacker.run(attempt, W)
sys.setprofile(profile)
"""
    + REPORT,
    "tracer of the caller": """
def trace(frame, *_):
    sys.settrace(None)
    attacker.run(attempt, W)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        if attacker.OUTCOMES:
            return attacker.report(logits)
        sys.settrace(trace)
        return logits
""",
    "hook of unraisable errors": """
sys.unraisablehook = lambda _: attacker.run(attempt, W)
class Gone:
    def __del__(self):
        raise ValueError
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        Gone()
        return attacker.report(logits)
""",
    "replaced builtin": """
import builtins, random
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        def tampered(*args):
            builtins.len = genuine
            attacker.run(attempt, W)
            return genuine(*args)
        genuine, builtins.len = len, tampered
        random.choice([1])
        return attacker.report(logits)
""",
    "a backward pass": """
class Function(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2
    @staticmethod
    def backward(context, gradient):
        attacker.run(attempt, W)
        return gradient
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        with torch.enable_grad():
            Function.apply(torch.ones(3, requires_grad=True)).sum().backward()
        return attacker.report(logits)
""",
}


@pytest.mark.parametrize("moment", FRAMES)
def test_attacks_fail_at_every_moment(moment: str, target: Any, sandboxed: Any) -> None:
    report = sandboxed(break_out, frame=FRAMES[moment], calls=2)
    assert report.answer in {f"returned 'EPERM EPERM {hidden} EPERM'" for hidden in ("ENOENT", "EACCES", "EPERM")}
    assert target.changes(report) == []


@pytest.mark.parametrize("moment", FRAMES)
def test_control_attacks_succeed(moment: str, target: Any, unsandboxed: Any) -> None:
    changes = target.changes_until(EXITED, unsandboxed(break_out, frame=FRAMES[moment], calls=2))
    assert {"TCP connection", "changed: new", "the secret leaked", EXITED} <= set(changes)


# After the last call, when nothing can be reported.

AFTERWARDS = {
    "the processor is destroyed": """
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits
    def __del__(self):
        attempt(W)
""",
    "the sequence is destroyed": """
class Gone:
    def __del__(self):
        attempt(W)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        custom_param_list[0]["mine"] = Gone()
        return logits
""",
    "the process ends": """
import atexit
atexit.register(attempt, W)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits
""",
    "a signal handler": """
import signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    try:
        signal.signal(number, lambda *_: attempt(W))
    except OSError:
        pass
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits
""",
}


@pytest.mark.parametrize("moment", AFTERWARDS)
def test_control_attacks_succeed_at_the_end(moment: str, target: Any, unsandboxed: Any) -> None:
    changes = target.changes_until(EXITED, unsandboxed(break_out, frame=AFTERWARDS[moment], end=True))
    assert {"TCP connection", "changed: new", EXITED} <= set(changes)


@pytest.mark.parametrize("moment", AFTERWARDS)
def test_attacks_fail_at_the_end(moment: str, target: Any, sandboxed: Any) -> None:
    report = sandboxed(break_out, frame=AFTERWARDS[moment])
    assert report.faults == []
    sandboxed.clear()
    report.pid = 0
    assert target.changes(report) == []
