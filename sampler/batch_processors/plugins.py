"""Loader of the processors that the operator installs at startup.

They are specified as in vLLM: a class object, `module:Class`, a constructor `{"qualname", "args", "kwargs"}`
(vllm-project/vllm#17799), or an installed package's entry point in the group `vllm.logits_processors`. vLLM accepts
batch processors only. logitship also accepts a request-level callable, which runs on every request, and a
`CustomLogitProcessor` class, which requests ask for by the name that the operator wrote.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.author_code.callable_factory import CallableFactory
from logitship.sampler.sampling_params import SamplingParams

from .adapter import CallablesAdapter
from .interface import LogitsProcessor
from .slot_adapter import SlotAdapter
from .slot_interface import SlotLogitsProcessor

LOGITSPROCS_GROUP = "vllm.logits_processors"
"""The entry-point group. The constant's name is vLLM's."""

PluginSpec: TypeAlias = Any
"""A class, an object, `module:Class`, or `{"qualname", "args", "kwargs"}`; the last two also as text."""


class PluginLoadError(RuntimeError):
    """An installed processor cannot be loaded or created. The message names it and says why."""


@dataclass(frozen=True)
class Plugin:
    """An imported processor of the operator.

    Attributes:
        name: name as the operator wrote it, or the entry point.
        target: the class or object.
        args: additional positional arguments of its constructor.
        kwargs: additional keyword arguments.
    """

    name: str
    target: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_custom_logit_processor(self) -> bool:
        """True for a `CustomLogitProcessor` class, which only runs for requests that ask for it."""
        return isinstance(self.target, type) and issubclass(self.target, CustomLogitProcessor)

    @property
    def _is_batch_level(self) -> bool:
        return isinstance(self.target, type) and issubclass(self.target, LogitsProcessor)

    @property
    def _is_slot_level(self) -> bool:
        return isinstance(self.target, type) and issubclass(self.target, SlotLogitsProcessor)

    @property
    def is_speculative(self) -> bool:
        """True if the result of `make` can run on some of the rows, as speculative decoding requires."""
        return not self._is_batch_level or callable(getattr(self.target, "apply_with_spec_decode", None))

    def validate_params(self, params: SamplingParams) -> None:
        """Validate a request's parameters with the batch processor at admission.

        Raises:
            ValueError: the processor refuses them.
        """
        if self._is_batch_level or self._is_slot_level:
            self.target.validate_params(params)

    def make(self, vllm_config: Any, device: torch.device, is_pin_memory: bool, tokenizer: Any) -> LogitsProcessor:
        """Create the batch processor.

        A request-level callable is wrapped in one that runs it on every request, and a processor of vLLM's model runner
        V2 in one that gives each request a slot.

        Args:
            vllm_config: see `LogitsProcessor`.
            device: see `LogitsProcessor`.
            is_pin_memory: see `LogitsProcessor`.
            tokenizer: for a request-level class whose constructor has a parameter `tokenizer` that was not given.

        Raises:
            PluginLoadError: its constructor failed.
        """
        try:
            if self._is_batch_level:
                made: LogitsProcessor = self.target(vllm_config, device, is_pin_memory, *self.args, **self.kwargs)
                return made
            if self._is_slot_level:
                return SlotAdapter(self.target, vllm_config, device, *self.args, **self.kwargs)
            factory = CallableFactory(self.target, self.args, self.kwargs, tokenizer=tokenizer)
            factory()  # errors show now instead of at the first request
            return CallablesAdapter(factory, self.name)
        except Exception as error:  # boundary: third-party code
            raise PluginLoadError(f"logits processor {self.name}: {_reason(error)}") from error


def load_plugins(specs: Iterable[PluginSpec] = ()) -> list[Plugin]:
    """Load the plugins of installed packages, then those in `specs`: vLLM's order.

    Raises:
        PluginLoadError: a plugin cannot be loaded.
    """
    return [*_from_entry_points(), *map(load_plugin, specs)]


def load_plugin(spec: PluginSpec) -> Plugin:
    """Load one processor of the operator.

    Raises:
        PluginLoadError: it cannot be found, or does not edit logits.
    """
    if isinstance(spec, str):
        spec = _parsed(spec)
    if isinstance(spec, Mapping):
        return _from_constructor(spec)
    name = spec if isinstance(spec, str) else _name_of(spec)
    return _checked(Plugin(name, _resolved(spec) if isinstance(spec, str) else spec))


def resolve(name: str) -> Any:
    """Import the object that `module:name` or `module.name` names.

    Raises:
        ImportError: the module does not exist, has no such name, or fails on import.
    """
    module_name, colon, attributes = name.partition(":")
    if not colon:
        module_name, _, attributes = name.rpartition(".")
    if not module_name or not attributes:
        raise ImportError(f"{name[:200]!r} is not of the form 'module:Class' or 'module.Class'")
    try:
        found = importlib.import_module(module_name)
    except Exception as error:  # boundary: third-party code
        raise ImportError(f"cannot import {module_name!r}: {_reason(error)}") from error
    for attribute in attributes.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError as error:
            raise ImportError(f"{_reason(error)}") from error
    return found


def _from_entry_points() -> list[Plugin]:
    plugins = []
    for entry_point in importlib.metadata.entry_points(group=LOGITSPROCS_GROUP):
        name = f"{entry_point.name} = {entry_point.value}"
        try:
            target = entry_point.load()
        except Exception as error:  # boundary: third-party code
            raise PluginLoadError(
                f"logits processor {name}, of the installed package {_package(entry_point)}: {_reason(error)}"
            ) from error
        plugins.append(_checked(Plugin(name, target)))
    return plugins


def _package(entry_point: Any) -> str:
    return entry_point.dist.name if entry_point.dist is not None else "(unknown)"


def _parsed(text: str) -> Any:
    """Parse a constructor written as JSON; return any other text unchanged."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise PluginLoadError(f"logits processor {text[:200]}: not valid JSON: {error}") from error


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
            f"logits processor {plugin.name}: derives from the LogitsProcessor of the installed vLLM. It runs in that "
            "vLLM; to run it in logitship, use an environment without vLLM"
        )
    if plugin.is_custom_logit_processor and (plugin.args or plugin.kwargs):
        raise PluginLoadError(
            f"logits processor {plugin.name}: a CustomLogitProcessor takes no constructor arguments; "
            "requests send params"
        )
    if isinstance(target, LogitsProcessor | SlotLogitsProcessor):
        raise PluginLoadError(f"logits processor {plugin.name}: give its class, not an object")
    if not callable(target):
        found = type(target).__name__
        raise PluginLoadError(f"logits processor {plugin.name}: an object of type {found} is not a logits processor")
    return plugin


def _is_of_the_real_vllm(target: Any) -> bool:
    """Return whether a class derives from the real vLLM package and not from logitship's replacement for it."""
    bases = target.__mro__ if isinstance(target, type) else ()
    return any(base.__module__.partition(".")[0] == "vllm" and base.__name__ == "LogitsProcessor" for base in bases)


def _name_of(spec: Any) -> str:
    cls = spec if isinstance(spec, type) or hasattr(spec, "__qualname__") else type(spec)
    return f"{cls.__module__}:{cls.__qualname__}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
