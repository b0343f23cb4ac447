"""Reductions of single objects for a pickle, and the objects that cannot be pickled.

This module imports dill.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import inspect
import io
import socket
import subprocess
import sys
import threading
import types
import typing
import weakref
from collections.abc import Iterable
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import dill._dill

from logitship.client.serialization.artifact import raw_bytes

# dataclasses compares these by identity.
_SENTINELS = {
    id(getattr(dataclasses, name)): name
    for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY", "_FIELD", "_FIELD_CLASSVAR", "_FIELD_INITVAR")
}

_UNSERIALIZABLE: tuple[tuple[Any, str], ...] = (
    ((type(threading.Lock()), type(threading.RLock())), "a lock"),
    ((threading.Condition, threading.Event, threading.Semaphore, threading.Barrier), "a thread synchronization object"),
    (threading.Thread, "a thread"),
    (threading.local, "thread-local storage"),
    (socket.socket, "a socket"),
    (subprocess.Popen, "a process"),
    ((types.GeneratorType, types.AsyncGeneratorType), "a generator"),
    (types.CoroutineType, "a coroutine"),
    ((types.FrameType, types.TracebackType), "a stack frame"),
    ((weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType), "a weak reference"),
    (memoryview, "a memoryview"),
)


def unserializable_kind(obj: Any) -> str | None:
    """Return the kind of an object that is bound to this process, such as "a lock"; None for all others."""
    if isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO):
        return "a closed file" if obj.closed else "an open file"
    return next((what for kinds, what in _UNSERIALIZABLE if isinstance(obj, kinds)), None)


def sentinel_name(obj: Any) -> str | None:
    """Return the name of an object that `dataclasses` compares by identity; None for all others."""
    return _SENTINELS.get(id(obj)) if type(obj).__module__ == "dataclasses" else None


TypeAliasType: Any = getattr(typing, "TypeAliasType", ())
"""The type of `type X = ...`; before Python 3.12, an empty tuple of types."""
TYPE_PARAMETERS = (TypeVar, ParamSpec, TypeVarTuple)


def reduce_type_parameter(parameter: Any) -> Any:
    """Recreate a type variable or the like: pickle would send it as a name in the author's module."""
    constraints = getattr(parameter, "__constraints__", ())
    options: dict[str, Any] = {}
    if hasattr(parameter, "has_default") and parameter.has_default():  # since Python 3.13
        options["default"] = parameter.__default__
    if not isinstance(parameter, TypeVarTuple):
        options["bound"] = parameter.__bound__
        # Those in brackets, since Python 3.12, infer their variance.
        for name in ("covariant", "contravariant", "infer_variance"):
            if getattr(parameter, f"__{name}__", False):
                options[name] = True
    kind: Any = type(parameter)
    return functools.partial(kind, parameter.__name__, *constraints, **options), ()


def reduce_type_alias(alias: Any) -> Any:
    """Recreate what `type X = ...` made, which pickle would send as a name in the author's module."""
    options = {"type_params": alias.__type_params__}
    return functools.partial(TypeAliasType, alias.__name__, alias.__value__, **options), ()


def reduce_value(obj: Any) -> Any:
    """Return a reduction that loads in every process, or NotImplemented to leave it to pickle."""
    if type(obj) is functools.cached_property:  # holds a lock, up to Python 3.11
        return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
    if type(obj) is functools.partial:
        # Reading the __dict__ of a partial creates it, which would change the bytes.
        return functools.partial, (obj.func,), (obj.func, obj.args, obj.keywords, obj.__dict__ or None)
    if type(obj) is functools.singledispatchmethod:
        # Python 3.13 keeps methods by their objects, which may be the class's own. None: it keeps none.
        state = {name: None if name == "_method_cache" else value for name, value in vars(obj).items()}
        return copyreg.__newobj__, (functools.singledispatchmethod,), state  # type: ignore[attr-defined]
    if type(obj) in (weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
        return type(obj), (), None, None, iter(dict(obj).items())
    if type(obj) is weakref.WeakSet:
        return weakref.WeakSet, (ordered(obj),)
    if isinstance(obj, types.WrapperDescriptorType | types.MethodDescriptorType):
        return getattr, (obj.__objclass__, obj.__name__)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and type(obj) is torch.Tensor:
        return _reduce_tensor(torch, obj)
    if numpy is not None and type(obj) is numpy.ndarray:
        return _reduce_array(numpy, obj)
    return NotImplemented


class RawBytes:
    """The bytes of a tensor or an array, which are loaded as a bytearray."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _reduce_tensor(torch: types.ModuleType, tensor: Any) -> Any:
    """Rebuild a tensor from its bytes: torch's own pickle of a storage holds its address."""
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.is_conj() or tensor.is_neg():
        return NotImplemented
    if tensor.requires_grad:
        return torch.Tensor.requires_grad_, (tensor.detach(),)
    if tensor.numel() == 0:
        return functools.partial(torch.empty, dtype=tensor.dtype), (tuple(tensor.shape),)
    data = RawBytes(raw_bytes(tensor))
    flat = dill._dill.Reduce(functools.partial(torch.frombuffer, dtype=tensor.dtype), (data,))
    return torch.reshape, (flat, tuple(tensor.shape))


def _reduce_array(numpy: types.ModuleType, array: Any) -> Any:
    """Rebuild an array from its bytes: NumPy's own pickle names a module that NumPy 1 and 2 call differently."""
    if array.dtype.hasobject or array.size == 0 or not array.flags.writeable:
        return NotImplemented
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = dill._dill.Reduce(numpy.frombuffer, (RawBytes(array.tobytes(order)), array.dtype))
    return numpy.reshape, (flat, array.shape, order)


def annotations_as_text(obj: Any) -> dict[str, str]:
    """Return the annotations of a function or class, each as a string."""
    annotations = inspect.get_annotations(obj)
    return {n: v if isinstance(v, str) else inspect.formatannotation(v) for n, v in annotations.items()}


def slot_names(cls: type) -> set[str]:
    """Return the names of the attributes that `__slots__` makes, mangled as in the class."""
    slots = cls.__dict__.get("__slots__", ())
    names = {slots} if isinstance(slots, str) else set(slots)
    return {f"_{cls.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names}


def is_written_in_enum(name: str, value: Any) -> bool:
    """Return whether the author wrote this attribute, not a member, in the enum's body; `enum` makes the others."""
    function = getattr(value, "__func__", getattr(value, "fget", value))
    if name == "__new_member__" or not isinstance(function, types.FunctionType):
        return name == "__doc__" and value is not None
    return function.__module__ != "enum"


def ordered(items: Iterable[Any]) -> list[Any]:
    """Sort the items of a set independently of their hashes; `<` between sets is not a total order."""
    items = list(items)
    if all(type(item) is str for item in items) or all(type(item) in (int, float) for item in items):
        return sorted(items)
    return sorted(items, key=lambda item: (type(item).__qualname__, repr(item)))
