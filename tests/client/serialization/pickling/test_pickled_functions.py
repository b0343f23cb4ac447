"""Pickling of objects that the standard library makes of the author's functions."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor, ProcessorSerializationError
from logitship.client.serialization.loading import load_class
from logitship.client.serialization.serialize import dump_class, serialize


class Token:
    """A class of the author, with an implementation of its own."""


@functools.singledispatch
def weight_of(value: Any) -> float:
    """Return the weight of a value."""
    return 0.5


@weight_of.register
def _(value: int) -> float:
    return float(value)


@weight_of.register(list)
def _of_list(value: list[Any]) -> float:
    return sum(weight_of(each) for each in value)


@weight_of.register(Token)
def _of_token(value: Token) -> float:
    return 7.0


@functools.singledispatch
def endless(value: Any) -> float:
    return endless([value])


@endless.register(list)
def _(value: list[Any]) -> float:
    return float(len(value))


weight_of.author = "me"  # type: ignore[attr-defined]
TOKENS = [Token(), Token()]
BY_TOKEN = weakref.WeakKeyDictionary({TOKENS[0]: 1.0, TOKENS[1]: 2.0})
BY_NAME = weakref.WeakValueDictionary({"a": TOKENS[0]})
SEEN = weakref.WeakSet(TOKENS)


class Dispatches(CustomLogitProcessor):
    @functools.singledispatchmethod
    def scale(self, value: Any) -> float:
        return 1.0

    @scale.register
    def _(self, value: str) -> float:
        return 10.0

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        values = [weight_of("x"), weight_of(True), weight_of([2, [3], "x"]), weight_of(Token()), endless(1)]
        return logits + torch.tensor([*values, self.scale("x"), self.scale(1)])


class UsesWeakContainers(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        return logits + BY_TOKEN[TOKENS[0]] + BY_TOKEN[TOKENS[1]] + (BY_NAME["a"] is TOKENS[0]) + len(SEEN)


def _loaded(cls: type[CustomLogitProcessor]) -> Any:
    return load_class(serialize(cls))


def test_single_dispatch_is_sent() -> None:
    assert _loaded(Dispatches)()(torch.zeros(7)).tolist() == [0.5, 1.0, 5.5, 7.0, 1.0, 10.0, 1.0]
    sent = _loaded(Dispatches).__call__.__globals__["weight_of"]
    assert sent is not weight_of
    assert (sent.__name__, sent.__doc__, sent.author) == ("weight_of", "Return the weight of a value.", "me")
    assert sent.__wrapped__("x") == 0.5
    with pytest.raises(TypeError, match="weight_of requires at least 1 positional argument"):
        sent()


def test_single_dispatch_is_sent_as_the_same_bytes_after_calls() -> None:
    before = dump_class(Dispatches)
    Dispatches()(torch.zeros(7))
    assert dump_class(Dispatches) == before


def test_weak_containers_are_sent_with_what_is_alive() -> None:
    assert _loaded(UsesWeakContainers)()(torch.zeros(1)).tolist() == [6.0]


@pytest.mark.slow
def test_single_dispatch_loads_where_the_author_is_unknown() -> None:
    code = (
        "import sys, types, dill, torch\n"
        "sys.modules.update({name: types.ModuleType(name) for name in ('sglang', 'sglang.srt')})\n"
        "name = 'sglang.srt.sampling.custom_logit_processor'\n"
        "sys.modules['sglang.srt.sampling'] = types.ModuleType('sglang.srt.sampling')\n"
        "module = sys.modules[name] = types.ModuleType(name)\n"
        "module.CustomLogitProcessor = type('CustomLogitProcessor', (), {})\n"
        "cls = dill.loads(bytes.fromhex(sys.stdin.read()))\n"
        "print(cls()(torch.zeros(7)).tolist())\n"
    )
    answer = subprocess.run(
        [sys.executable, "-I", "-c", code],
        input=dump_class(Dispatches).hex(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stdout.strip() == "[0.5, 1.0, 5.5, 7.0, 1.0, 10.0, 1.0]", answer.stderr


@contextmanager
def _locked(lock: Any = threading.Lock()) -> Iterator[None]:  # noqa: B008
    with lock:
        yield


def _cached(function: Callable[[], Any]) -> Callable[[], Any]:
    memory = {"lock": threading.Lock()}

    @functools.wraps(function)
    def wrapper() -> Any:
        return memory, function()

    return wrapper


@_cached
def _of_the_author() -> None:
    pass


@functools.singledispatch
def _of_anything(value: Any) -> Any:
    return value


@_of_anything.register(Decimal)
def _decimal(value: Decimal, lock: Any = threading.Lock()) -> Any:  # noqa: B008
    return value, lock


HOOKED = weakref.WeakKeyDictionary({Token: threading.Lock()})


class _Subclass(weakref.WeakValueDictionary[str, Any]):
    pass


SUBCLASS = _Subclass()
USED: dict[str, tuple[Any, str]] = {
    "a function in a decorator of the standard library": (
        _locked,
        "a default argument of _locked holds a lock",
    ),
    "a decorator of the author": (_of_the_author, "variable 'memory' captured by _of_the_author holds a lock"),
    "an implementation": (_of_anything, "a default argument of _decimal holds a lock"),
    "a value in a weak container": (HOOKED, "global 'used' used by .*__call__ holds a lock"),
    "a subclass of a weak container": (SUBCLASS, "global 'used' used by .*__call__ holds a weak reference"),
}


@pytest.mark.parametrize("name", USED)
def test_errors_name_the_authors_object(name: str) -> None:
    used, message = USED[name]
    scope: dict[str, Any] = {"__name__": "author", "used": used, "CustomLogitProcessor": CustomLogitProcessor}
    exec(
        "class Uses(CustomLogitProcessor):\n"
        "    def __call__(self, logits, custom_param_list=None):\n"
        "        used\n"
        "        return logits\n",
        scope,
    )
    with pytest.raises(ProcessorSerializationError, match=message) as caught:
        dump_class(scope["Uses"])
    assert "<locals>.remove" not in str(caught.value)
