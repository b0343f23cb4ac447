"""The processors that the operator names when the engine starts.

They are named as in vLLM: a class object, `module:Class`, a constructor `{"qualname", "args", "kwargs"}`
(vllm-project/vllm#17799), or an installed package's entry point in the group `vllm.logits_processors`. Beside batch
processors, which is all that vLLM takes, a request-level callable may be named, which then sees every request, and a
row-level class, which requests ask for by the name that the operator wrote.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, TypeAlias

import torch

from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.author_code.callable_factory import CallableFactory
from logitship.sampler.sampling_params import SamplingParams

from .adapter import CallablesAdapter
from .interface import LogitsProcessor

LOGITSPROCS_GROUP = "vllm.logits_processors"
"""The entry-point group, and its name in vLLM."""

PluginSpec: TypeAlias = Any
"""A class, an object, `module:Class`, or `{"qualname", "args", "kwargs"}`; the last two also as text."""


class PluginLoadError(RuntimeError):
    """A processor that the operator named cannot be loaded or made. The message names it, and says why."""


@dataclass(frozen=True)
class Plugin:
    """What the operator named, imported.

    Attributes:
        name: as the operator wrote it, or where it was found.
        target: the class or the object.
        args: further positional arguments of its constructor.
        kwargs: further keyword arguments.
    """

    name: str
    target: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_row_level(self) -> bool:
        """True for a class of contract 2: nothing runs until a request asks for it."""
        return isinstance(self.target, type) and issubclass(self.target, CustomLogitProcessor)

    @property
    def _is_batch_level(self) -> bool:
        return isinstance(self.target, type) and issubclass(self.target, LogitsProcessor)

    @property
    def is_speculative(self) -> bool:
        """True if what `make` gives can be asked for some of the rows, as speculative decoding needs it."""
        return not self._is_batch_level or callable(getattr(self.target, "apply_with_spec_decode", None))

    def validate_params(self, params: SamplingParams) -> None:
        """Let a batch processor check a request's parameters at admission.

        Raises:
            ValueError: it refuses them.
        """
        if self._is_batch_level:
            self.target.validate_params(params)

    def make(self, vllm_config: Any, device: torch.device, is_pin_memory: bool, tokenizer: Any) -> LogitsProcessor:
        """The batch processor. A request-level callable becomes one that runs it on every request.

        Args:
            tokenizer: for a request-level class whose constructor has a `tokenizer` that was not given.

        Raises:
            PluginLoadError: its constructor failed.
        """
        try:
            if self._is_batch_level:
                made: LogitsProcessor = self.target(vllm_config, device, is_pin_memory, *self.args, **self.kwargs)
                return made
            factory = CallableFactory(self.target, self.args, self.kwargs, tokenizer=tokenizer)
            factory()  # its mistakes show now, and not at the first request
            return CallablesAdapter(factory, self.name)
        except Exception as error:
            raise PluginLoadError(f"logits processor {self.name}: {_reason(error)}") from error


def load_plugins(specs: Iterable[PluginSpec] = ()) -> list[Plugin]:
    """What installed packages bring, then what the operator named: vLLM's order.

    Raises:
        PluginLoadError: one of them cannot be loaded.
    """
    return [*_from_entry_points(), *map(load_plugin, specs)]


def load_plugin(spec: PluginSpec) -> Plugin:
    """One processor that the operator named.

    Raises:
        PluginLoadError: it cannot be found, or is nothing that edits logits.
    """
    if isinstance(spec, str):
        spec = _parsed(spec)
    if isinstance(spec, Mapping):
        return _from_constructor(spec)
    name = spec if isinstance(spec, str) else _name_of(spec)
    return _checked(Plugin(name, _resolved(spec) if isinstance(spec, str) else spec))


def resolve(name: str) -> Any:
    """The object that `module:name` or `module.name` names.

    Raises:
        ImportError: there is no such module, or it has no such name, or it fails when it is imported.
    """
    module_name, colon, attributes = name.partition(":")
    if not colon:
        module_name, _, attributes = name.rpartition(".")
    if not module_name or not attributes:
        raise ImportError(f"{name[:200]!r} is not of the form 'module:Class' or 'module.Class'")
    try:
        found = importlib.import_module(module_name)
    except Exception as error:
        raise ImportError(f"cannot import {module_name!r}: {_reason(error)}") from error
    for attribute in attributes.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError as error:
            raise ImportError(f"{_reason(error)}") from error
    return found


def _from_entry_points() -> list[Plugin]:
    plugins = []
    for entry_point in entry_points(group=LOGITSPROCS_GROUP):
        name = f"{entry_point.name} = {entry_point.value}"
        try:
            target = entry_point.load()
        except Exception as error:
            raise PluginLoadError(
                f"logits processor {name}, of the installed package {_package(entry_point)}: {_reason(error)}"
            ) from error
        plugins.append(_checked(Plugin(name, target)))
    return plugins


def _package(entry_point: Any) -> str:
    return entry_point.dist.name if entry_point.dist is not None else "(unknown)"


def _parsed(text: str) -> Any:
    """A constructor that is written as JSON; any other text as it is."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise PluginLoadError(f"logits processor {text[:200]}: is not JSON: {error}") from error


def _from_constructor(spec: Mapping[str, Any]) -> Plugin:
    qualname, args, kwargs = spec.get("qualname"), spec.get("args") or (), spec.get("kwargs") or {}
    unknown = sorted(set(map(str, spec)) - {"qualname", "args", "kwargs"})
    if unknown or not isinstance(qualname, str) or not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise PluginLoadError(
            f"logits processor {dict(spec)!r}: expected 'qualname' (text), 'args' (a list) and 'kwargs' (an object), "
            "the last two optional"
        )
    return _checked(Plugin(qualname, _resolved(qualname), tuple(args), dict(kwargs)))


def _resolved(name: str) -> Any:
    try:
        return resolve(name)
    except ImportError as error:
        raise PluginLoadError(f"logits processor {name}: {error}") from error


def _checked(plugin: Plugin) -> Plugin:
    target = plugin.target
    if _is_of_the_real_vllm(target):
        raise PluginLoadError(
            f"logits processor {plugin.name}: derives from the class of the vLLM that is installed beside logitship. "
            "It runs in that vLLM; here it runs where vLLM is not installed"
        )
    if plugin.is_row_level and (plugin.args or plugin.kwargs):
        raise PluginLoadError(
            f"logits processor {plugin.name}: a row-level processor is made without arguments; requests send params"
        )
    if isinstance(target, LogitsProcessor):
        raise PluginLoadError(f"logits processor {plugin.name}: name the class, the engine makes the object")
    if not callable(target):
        found = type(target).__name__
        raise PluginLoadError(f"logits processor {plugin.name}: an object of type {found} edits no logits")
    return plugin


def _is_of_the_real_vllm(target: Any) -> bool:
    """True for a class of the real package. The names that stand for it here resolve to ours."""
    bases = target.__mro__ if isinstance(target, type) else ()
    return any(base.__module__.partition(".")[0] == "vllm" and base.__name__ == "LogitsProcessor" for base in bases)


def _name_of(spec: Any) -> str:
    cls = spec if isinstance(spec, type) or hasattr(spec, "__qualname__") else type(spec)
    return f"{cls.__module__}:{cls.__qualname__}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
