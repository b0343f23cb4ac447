"""Check that captured source recreates the author's objects.

The statement `HEAD = Head()` creates a different object if `Head` starts from random weights, or if the author has
loaded weights into it since. So the source is run once where it was captured, and the result is compared with the
original: the values of modules, classes and defaults in full, functions by name.

This module imports dill; `source_capture.py` imports it only when it has captured a class.
"""

from __future__ import annotations

import io
import random
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from logitship.client.errors import ProcessorLoadError, ProcessorSerializationError
from logitship.client.serialization.loading import run_source
from logitship.client.serialization.pickling.class_pickler import ClassPickler
from logitship.client.serialization.pickling.pickled_classes import pickled_attributes
from logitship.client.serialization.processor_string import SourceProcessor

# Derived from the annotations, which are text in the source.
_FROM_ANNOTATIONS = frozenset({"__doc__", "__dataclass_fields__"})


def is_equivalent(source: SourceProcessor, originals: Mapping[str, Any], own_packages: frozenset[str]) -> bool:
    """Run the source and return whether its values equal the author's.

    Args:
        source: the captured source.
        originals: the author's values of the names in it.
        own_packages: see `ClassPickler`.
    """
    try:
        with _preserved_random_state():
            variables = run_source(source)
        return all(
            _fingerprint(original, own_packages) == _fingerprint(variables[name], own_packages)
            for name, original in originals.items()
            if name in variables
        )
    except (ProcessorLoadError, ProcessorSerializationError):
        return False


@contextmanager
def _preserved_random_state() -> Iterator[None]:
    """Restore all global random states: serializing must not change the author's next random numbers."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy.random")
    state, numpy_state = random.getstate(), None if numpy is None else numpy.get_state(legacy=False)
    try:
        with nullcontext() if torch is None else torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.set_state(numpy_state)


def _fingerprint(value: Any, own_packages: frozenset[str]) -> bytes:
    file = io.BytesIO()
    _Fingerprinter(file, own_packages).dump_value(value)
    return file.getvalue()


class _Fingerprinter(ClassPickler):
    """Pickler of the contents of a value without the code in it. The output is only compared."""

    def __init__(self, file: io.BytesIO, own_packages: frozenset[str]) -> None:
        super().__init__(file, own_packages)
        self._seen: set[int] = set()

    def dump_value(self, value: Any) -> None:
        """Write any value."""
        self._dump(value)

    def persistent_id(self, obj: Any) -> Any:
        """Return the fingerprint of a function, class or module; None for all other objects."""
        if isinstance(obj, types.ModuleType):
            return obj.__name__
        if not isinstance(obj, type | types.FunctionType) or "_pickles_as" in vars(obj) or self.is_by_name(obj):
            return None
        if id(obj) in self._seen:
            return obj.__name__
        self._seen.add(id(obj))
        if isinstance(obj, types.FunctionType):
            return obj.__name__, obj.__defaults__, obj.__kwdefaults__
        attributes = pickled_attributes(obj)
        return obj.__name__, sorted((n, v) for n, v in attributes.items() if n not in _FROM_ANNOTATIONS)
