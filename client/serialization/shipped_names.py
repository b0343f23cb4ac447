"""Names of SGLang, vLLM and logitship as shipped code sees them.

Shipped code says `from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor`, and must get
logitship's class. This table resolves its imports, in a pickle and in running code, without touching `sys.modules`:
shipped functions have their own builtins, with another `__import__`. The table is used even if the real package
is installed, so that a processor behaves the same everywhere.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from .processor_base import processor_class

SGLANG_MODULE = "sglang.srt.sampling.custom_logit_processor"
_OUR_MODULES = ("logitship", "logitship.client", "logitship.client.processor")


class ShippedNames:
    """Table (module, name) → object, and the `__import__` that uses it.

    Attributes:
        builtins: the `__builtins__` of shipped functions.
    """

    def __init__(self, names: Mapping[tuple[str, str], Any]) -> None:
        base = {(module, "CustomLogitProcessor"): processor_class() for module in (SGLANG_MODULE, *_OUR_MODULES)}
        self._names = base | dict(names)
        self._modules = {module for module, _ in self._names}
        self.builtins = {**vars(builtins), "__import__": self._import}

    def find(self, module: str, name: str) -> Any:
        """Return the object for `module.name`.

        Raises:
            KeyError: the table does not replace the module, so import it normally.
            ImportError: the table replaces the module and does not have the name.
        """
        if (module, name) in self._names:
            return self._names[module, name]
        if module in self._modules and module not in _OUR_MODULES:
            known = sorted(n for m, n in self._names if m == module)
            raise ImportError(f"{module} has no {name!r} here, only {', '.join(known)}", name=module)
        raise KeyError(module, name)

    def find_module(self, module: str) -> ModuleType | None:
        """Return a module with the names that the table has for it, or None."""
        if module not in self._modules or module in _OUR_MODULES:
            return None
        return _module(module, self._variables(module))

    def _variables(self, module: str) -> dict[str, Any]:
        return {n: value for (m, n), value in self._names.items() if m == module}

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Implement `__import__` for shipped code."""
        submodules = {} if level else {wanted: self.find_module(f"{name}.{wanted}") for wanted in fromlist or ()}
        if submodules and None not in submodules.values():
            return _module(name, submodules)
        if level or name not in self._modules:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        if name in _OUR_MODULES:
            return self._import_ours(name, globals, locals, fromlist or ())
        module = _module(name, self._variables(name))
        if fromlist:
            for wanted in fromlist:
                if wanted != "*":
                    self.find(name, wanted)
            return module
        return _package_of(name, module)

    def _import_ours(
        self, name: str, globals: Mapping[str, Any] | None, locals: Mapping[str, Any] | None, fromlist: Sequence[str]
    ) -> Any:
        ours = {wanted: self._names[name, wanted] for wanted in fromlist if (name, wanted) in self._names}
        if ours and len(ours) == len(fromlist):
            return _module(name, ours)
        return builtins.__import__(name, globals, locals, fromlist, 0)


def _module(name: str, variables: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(variables)
    return module


def _package_of(name: str, module: ModuleType) -> ModuleType:
    """Return the top-level package of a dotted name, as `import a.b.c` needs it."""
    parent, _, child = name.rpartition(".")
    top = module
    while parent:
        top = _module(parent, {child: top})
        parent, _, child = parent.rpartition(".")
    return top
