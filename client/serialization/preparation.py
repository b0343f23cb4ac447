"""A processor's optional `prepare(tokenizer, vocab_size)`: who calls it, and when.

logitship's executors call it once after they have created the instance: `prepare`. A server that does not know it, such
as SGLang, only calls `__call__`, so in a pickle `__call__` is `preparing(__call__)`, which prepares first.
`without_preparing` takes that away where `prepare` is called.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from .syntax import signature_of

PREPARED = "_prepared_attributes"
"""Attribute of a class in which `preparing` keeps the attributes of the prepared instance."""
_MARK = "_calls_prepare_first"


def has_prepare(cls: type) -> bool:
    """Return whether a class has a method `prepare(self, tokenizer, vocab_size)`.

    By the names of its parameters: a class may have another method of this name, as our installed processors do.
    """
    method = inspect.getattr_static(cls, "prepare", None)
    return isinstance(method, FunctionType) and [*signature_of(method).parameters][1:] == ["tokenizer", "vocab_size"]


def preparing(call: FunctionType) -> FunctionType:
    """Return `__call__` of a class whose `prepare` nobody else calls.

    The first call prepares, with the tokenizer in `__req__`. Later instances of the class share the attributes of the
    prepared one: SGLang makes a new instance whenever its batch changes.

    The function is pickled by value, as one of the author's: it uses nothing but its arguments and `call`.
    """

    def __call__(self: Any, logits: Any, custom_param_list: Any = None) -> Any:  # noqa: N807
        cls = type(self)
        if "_prepared_attributes" not in cls.__dict__:
            self.prepare(custom_param_list[0]["__req__"].tokenizer, logits.shape[-1])
            cls._prepared_attributes = self.__dict__
        elif self.__dict__ is not cls._prepared_attributes:
            self.__dict__ = cls._prepared_attributes
        return call(self, logits, custom_param_list)

    first = FunctionType(__call__.__code__, call.__globals__, call.__name__, (None,), __call__.__closure__)
    first.__module__, first.__qualname__, first.__doc__ = call.__module__, call.__qualname__, call.__doc__
    setattr(first, _MARK, call)
    return first


def prepares_first(cls: type) -> FunctionType | None:
    """Return the `__call__` that a pickle of a class needs instead of its own; None if its own will do."""
    if not has_prepare(cls) or cls.__dict__.keys().isdisjoint(("__call__", "prepare")):
        return None
    call = inspect.getattr_static(cls, "__call__")
    if not isinstance(call, FunctionType):
        return None
    return preparing(vars(call).get(_MARK, call))  # that of a loaded class prepares first already


def let_prepare_first(cls: type) -> None:
    """Let the first call of a loaded class prepare, in place."""
    if call := prepares_first(cls):
        type.__setattr__(cls, "__call__", call)


def without_preparing(cls: type) -> None:
    """Let a loaded class have its own `__call__` again, in place: `prepare` will be called once for the instance."""
    for base in cls.__mro__:
        call = base.__dict__.get("__call__")
        if isinstance(call, FunctionType) and _MARK in vars(call):
            type.__setattr__(base, "__call__", vars(call)[_MARK])
