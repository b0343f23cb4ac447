"""Pickling of the author's classes: created bare, then their attributes are set.

So a class may refer to itself anywhere. The effects of `__init_subclass__`, `__set_name__` and the author's metaclasses
are already in its attributes, and none of them runs again. `save_class` is a handler of `ClassPickler`.
"""

from __future__ import annotations

import abc
import enum
import functools
import types
from typing import Any

import dill._dill

from logitship.client.serialization.preparation import PREPARED, prepares_first
from logitship.client.serialization.provenance import is_own_extension, top_level

from .base_pickler import BasePickler
from .reductions import annotations_as_text, is_written_in_enum, slot_names

# Attributes that creating or calling the class makes again, or that only describe where it was written.
_NOT_PICKLED = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__module__",
        "__qualname__",
        "__slots__",
        "__slotnames__",  # made when the first object of the class is copied or pickled
        "__orig_bases__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__classdictcell__",
        "__static_attributes__",
        "__firstlineno__",
        "__abstractmethods__",
        "_abc_impl",
        PREPARED,
    }
)


def save_class(pickler: BasePickler, cls: type) -> None:
    """Write a class: by name if it is installed, else by value."""
    if "_pickles_as" in cls.__dict__ and top_level(cls.__module__) == "logitship":
        module, qualname = cls.__dict__["_pickles_as"]
        pickler.save_name(cls, module, qualname)
    elif pickler.is_by_name(cls) and not pickler.is_root(cls):
        pickler.save_global(cls)
    elif cls in dill._dill._typemap:
        pickler.save_reduce(dill._dill._load_type, (dill._dill._typemap[cls],), obj=cls)
    elif is_own_extension(cls.__module__):
        raise pickler.refuse(cls, f"class {cls.__qualname__} of your compiled module {cls.__module__}")
    else:
        pickler.check_code_allowed(cls)
        if isinstance(cls, enum.EnumMeta):
            _save_enum(pickler, cls)
        else:
            _save_plain_class(pickler, cls)


def pickled_attributes(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that must be set after it is created."""
    recreated = _NOT_PICKLED | slot_names(cls)
    return {name: value for name, value in cls.__dict__.items() if name not in recreated}


def _save_plain_class(pickler: BasePickler, cls: type) -> None:
    meta = type(cls)
    bare = {name: cls.__dict__[name] for name in ("__slots__", "__orig_bases__") if name in cls.__dict__}
    bare["__module__"] = cls.__module__
    bare["__qualname__"] = cls.__qualname__
    if pickler.is_by_name(meta):
        pickler.save_reduce(dill._dill._create_type, (meta, cls.__name__, cls.__bases__, bare), obj=cls)
    else:
        installed = next(base for base in type.mro(meta) if pickler.is_by_name(base))
        pickler.save_reduce(installed.__new__, (meta, cls.__name__, cls.__bases__, bare), obj=cls)
    attributes = pickled_attributes(cls)
    if call := prepares_first(cls):
        attributes["__call__"] = call
    _set_attributes(pickler, cls, attributes)
    if isinstance(cls, abc.ABCMeta):
        _restore_abc(pickler, cls)


def _set_attributes(pickler: BasePickler, cls: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        is_method = isinstance(getattr(value, "__func__", value), types.FunctionType)
        label = f"{cls.__qualname__}.{name}" if is_method else f"attribute {name!r} of class {cls.__qualname__}"
        with pickler.at(label, value):
            if name == "__init_subclass__":
                # Its subclasses are created later and must not run it.
                pickler.call_last(type.__setattr__, cls, name, value)
            else:
                pickler.call(type.__setattr__, cls, name, value)
    annotations = annotations_as_text(cls)
    if annotations:
        pickler.call(type.__setattr__, cls, "__annotations__", annotations)


def _restore_abc(pickler: BasePickler, cls: abc.ABCMeta) -> None:
    pickler.call(setattr, cls, "__abstractmethods__", cls.__abstractmethods__)
    get_dump = dill._dill.abc._get_dump  # pyright: ignore[reportAttributeAccessIssue]
    registered = [ref() for ref in get_dump(cls)[0]]
    for other in sorted(filter(None, registered), key=lambda other: (other.__module__, other.__qualname__)):
        pickler.call(abc.ABCMeta.register, cls, other)


def _save_enum(pickler: BasePickler, cls: enum.EnumMeta) -> None:
    """Let `enum` rebuild the class from the values of its members, then add the methods."""
    new = getattr(cls.__dict__.get("__new_member__"), "__func__", cls.__dict__.get("__new_member__"))
    if isinstance(new, types.FunctionType) and new.__module__ != "enum":
        raise pickler.refuse(cls, f"enum {cls.__qualname__} with a __new__ of its own", "give it plain values")
    own = {n: v for n, v in cls.__dict__.items() if is_written_in_enum(n, v)}
    members: dict[str, Any] = {name: member.value for name, member in dict[str, Any](cls.__members__).items()}
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    body |= {name: own.pop(name) for name in ("__init__", "_missing_", "_ignore_") if name in own}
    fill = functools.partial(dill._dill._setitems, source=body | members)
    pickler.save_reduce(types.new_class, (cls.__name__, cls.__bases__, {"metaclass": type(cls)}, fill), obj=cls)
    _set_attributes(pickler, cls, own)
