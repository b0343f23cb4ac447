"""Unpickler that isolates a class from this process.

This module imports dill; `loading.py` imports it only when it loads a class.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

import dill._dill

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.artifact import missing_artifact
from logitship.client.serialization.shipped_names import ShippedNames

from .bytecode import check_code

_DILL_MODULES = frozenset({"dill._dill", "dill.dill"})


class ClassUnpickler(dill._dill.Unpickler):  # type: ignore[misc]
    """Unpickler for the output of `dill.dumps(cls)`, from logitship or SGLang.

    - SGLang's and vLLM's names are looked up in `names`, never in an installed package.
    - Bytecode is checked to be this Python's before a code object is made of it.
    - Functions tied to `__main__` get a separate dict, so that the classes of two clients share nothing and cannot
      see this process's `__main__`.

    Attributes:
        codes: the code objects that were made.
    """

    def __init__(self, payload: bytes, names: ShippedNames, artifacts: Mapping[str, bytes] | None = None) -> None:
        # ignore=True: don't look for the class of the result in our __main__.
        super().__init__(io.BytesIO(payload), ignore=True)
        self.codes: list[CodeType] = []
        self._artifacts = artifacts or {}
        self._names = names
        self._main_globals: dict[str, Any] = {"__name__": "__main__", "__builtins__": names.builtins}

    def persistent_load(self, pid: Any) -> bytearray:
        """Return the bytes of an artifact."""
        if not isinstance(pid, str) or pid not in self._artifacts:
            raise missing_artifact(str(pid)[:80])
        return bytearray(self._artifacts[pid])

    def find_class(self, module: str, name: str) -> Any:
        """Return the object for a global name in the pickle."""
        if (module, name) in {("__builtin__", "__main__"), ("__main__", "__dict__")}:
            return self._main_globals
        if module == "__main__":
            raise ProcessorLoadError(
                f"the pickle refers to {name!r} of the author's script by name and does not contain it: serialize "
                "the class with logitship's to_str()"
            )
        if module in _DILL_MODULES:
            return self._dill_function(name) or super().find_class(module, name)
        try:
            return self._names.find(module, name)
        except KeyError:
            return super().find_class(module, name)
        except ImportError as error:
            raise ProcessorLoadError(str(error)) from None

    def _dill_function(self, name: str) -> Callable[..., Any] | None:
        replaced: dict[str, Callable[..., Any]] = {
            "_create_code": self._create_checked_code,
            "_create_function": self._create_function,
            "_import_module": self._import_module,
        }
        return replaced.get(name)

    def _create_function(self, code: Any, variables: dict[str, Any] | None, *args: Any, **kwargs: Any) -> FunctionType:
        variables = {"__name__": "__main__"} if variables is None else variables
        # A function takes its builtins from its globals when it is made.
        variables.setdefault("__builtins__", self._names.builtins)
        function: FunctionType = dill._dill._create_function(code, variables, *args, **kwargs)
        return function

    def _import_module(self, name: str, safe: bool = False) -> Any:
        return self._names.find_module(name) or dill._dill._import_module(name, safe)

    def _create_checked_code(self, *args: Any) -> CodeType:
        check_code(args)
        code: CodeType = dill._dill._create_code(*args)
        self.codes.append(code)
        return code
