"""Records processor strings made by another Python version. See README.md beside this file.

Run under the Python to record, which has dill, orjson and httpx, with the repository's `src` on `PYTHONPATH`.
"""

from __future__ import annotations

import json
import linecache
import platform
import sys
import types
from abc import ABC, abstractmethod
from typing import Any

import dill

try:
    from logitship import CustomLogitProcessor
except (ImportError, SyntaxError):  # Python 3.10 records only the bare form
    CustomLogitProcessor = object  # type: ignore[assignment, misc]

OFFSETS = {"a": 1.0, "b": 2.0}
ALLOWED = frozenset({"a", "b"})


def total(names: list[str]) -> float:
    return sum(OFFSETS[name] for name in names if name in ALLOWED)


class Offset(CustomLogitProcessor):
    """Adds 3 and the row's `custom_params["amount"]`."""

    def __init__(self) -> None:
        super().__init__()
        self.base = total(["a", "b", "c"])

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, params in enumerate(custom_param_list):
            try:
                logits[row] += self.base + params["amount"]
            except KeyError:
                logits[row] += self.base
        return logits


NEWER_SYNTAX = {
    "Compiled": (
        (3, 11),
        """
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

class Compiled(CustomLogitProcessor):
    'Adds 6 to each logit, through statements that each version compiles in its own way.'

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row in logits:
            row[:] = [value + self.amount(len(row)) for value in row]
        return logits

    def amount(self, size: int) -> float:
        squares = {n: [n * m for m in range(n + 1)][-1] for n in range(3)}  # comprehensions: inlined since 3.12
        try:
            with self.opened() as opened:
                match opened:
                    case {"base": float(base)} if total := base + sum(squares.values()):
                        raise ExceptionGroup("both", [ValueError(total - size), KeyError(size)])
        except* ValueError as group:
            found = [float(str(error)) for error in group.exceptions]
        except* KeyError as group:
            found += [each.args[0] for each in group.exceptions]
        return sum(found)

    @contextmanager
    def opened(self) -> Iterator[dict[str, float]]:
        def nested() -> float:
            return sum((yield_ for yield_ in self.counted()), start=offset)

        offset = -2.0
        yield {"base": nested()}

    def counted(self) -> Iterator[float]:
        yield from (1.0, 2.0)
""",
    ),
    "TypeParameters": (
        (3, 12),
        """
class TypeParameters[T: float](CustomLogitProcessor):
    type Names = dict[str, T]

    def added[N](self, number: N) -> N:
        names: TypeParameters.Names = {"a": number}
        return float(f"{names["a"]}")

    def __call__(self, logits, custom_param_list=None):
        for row in logits:
            row[:] = [value + self.added(6.0) for value in row]
        return logits
""",
    ),
    "TypeDefaults": (
        (3, 13),
        """
class TypeDefaults[T = int](CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row in logits:
            row[:] = [value + 6.0 for value in row]
        return logits
""",
    ),
}
"""Classes that older versions cannot parse, with the first that can."""


def newer_classes() -> list[Any]:
    """Return the classes of `NEWER_SYNTAX` that this version can parse, as if each was in a file of its own."""
    found = []
    for name, (first, text) in NEWER_SYNTAX.items():
        if sys.version_info[:2] >= first:
            filename = f"{name}.py"
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
            module = types.ModuleType(name)
            module.__file__ = filename
            sys.modules[name] = module
            vars(module)["CustomLogitProcessor"] = CustomLogitProcessor
            exec(compile(text, filename, "exec"), vars(module))
            found.append(getattr(module, name))
    return found


def stand_in() -> type:
    """SGLang's base class, as far as its `to_str` is concerned: it imports torch, which need not be there."""

    class Base(ABC):
        @abstractmethod
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any: ...

    name = "sglang.srt.sampling.custom_logit_processor"
    module: Any = types.ModuleType(name)
    for part in ("sglang", "sglang.srt", "sglang.srt.sampling"):
        sys.modules[part] = types.ModuleType(part)
    sys.modules[name] = module
    sys.modules["sglang.srt.sampling"].custom_logit_processor = module  # type: ignore[attr-defined]
    Base.__module__, Base.__qualname__, Base.__name__ = name, "CustomLogitProcessor", "CustomLogitProcessor"
    module.CustomLogitProcessor = Base
    return Base


BASE: Any = stand_in()


class ForceToken(BASE):  # type: ignore[misc]
    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        assert logits.shape[0] == len(custom_param_list)
        for i, p in enumerate(custom_param_list):
            logits[i, :] = -float("inf")
            logits[i, p["token_id"]] = 0.0
        return logits


class Identity(BASE):  # type: ignore[misc]
    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        return logits


class Looping(BASE):  # type: ignore[misc]
    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        while True:
            try:
                if logits is not None and custom_param_list:
                    return [x for x in custom_param_list if x]
                return {k: v * 2 for k, v in zip("ab", "cd", strict=True)}
            finally:
                pass


if __name__ == "__main__":
    bare = {cls.__name__: json.dumps({"callable": dill.dumps(cls).hex()}) for cls in (ForceToken, Identity, Looping)}
    classes = [Offset, *newer_classes()] if CustomLogitProcessor is not object else []
    ours = {cls.__name__: cls.to_str() for cls in classes}
    print(json.dumps({"python": platform.python_version(), "dill": dill.__version__, "bare": bare, "ours": ours}))
