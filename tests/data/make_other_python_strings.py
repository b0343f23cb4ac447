"""Records processor strings made by another Python version. See README.md beside this file.

Run under the Python to record, which has dill, orjson and httpx, with the repository's `src` on `PYTHONPATH`.
"""

from __future__ import annotations

import json
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
    ours = {"Offset": Offset.to_str()} if sys.version_info >= (3, 11) else {}
    print(json.dumps({"python": platform.python_version(), "dill": dill.__version__, "bare": bare, "ours": ours}))
