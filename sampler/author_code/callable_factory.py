"""Factory of request-level callables: one per sequence, so that sequences never share state."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from logitship.client.author_errors import author_traceback, error_text
from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.syntax import signature_of

from .calls import call
from .request_callable import RequestLogitsProcessor, accepts, convention_of, name_of


class CallableFactory:
    """Creates the callable of one sequence when called without arguments.

    | target | the callable |
    |---|---|
    | a class | a new object for each sequence, created with `args` and `kwargs` |
    | a function with `args` or `kwargs`, or one that cannot be a callable itself | the function's return value |
    | any other function | the function itself, shared, including its global state |
    | an object | a copy for each sequence: `clone()` if it has that, as in vLLM V0, else a deep copy |

    Copies share tokenizers and `torch.nn.Module`s, which are large and have no per-sequence state. If the constructor
    has a parameter `tokenizer` that was not given, it gets `tokenizer`; a required `batch_size` that was not given is
    1. The classes of logits-processor-zoo need both.

    Args:
        target: see above.
        args: positional arguments of the constructor. Each sequence gets copies.
        kwargs: keyword arguments of the constructor. Each sequence gets copies.
        tokenizer: tokenizer for constructors that need one.

    Raises:
        TypeError: the target is not callable, does not take these arguments, or cannot be copied.
    """

    def __init__(
        self, target: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, tokenizer: Any = None
    ) -> None:
        self.name = name_of(target)
        if _is_class(target) or (_is_function(target) and (args or kwargs or _is_factory(target, tokenizer))):
            self._make = _constructor(target, tuple(args), dict(kwargs or {}), tokenizer)
        elif args or kwargs:
            raise TypeError(f"{self.name} is an object already: arguments are for a class or a function that makes one")
        else:
            convention_of(target)
            self._make = _duplicator(target)

    def __call__(self) -> RequestLogitsProcessor:
        """Create the callable of one sequence. Runs the author's constructor, which may be slow.

        Raises:
            ProcessorLoadError: the constructor raised. The message names it and includes its traceback.
            TypeError: the result follows none of the conventions of `request_callable.py`.
        """
        try:
            made: RequestLogitsProcessor = call(self._make)
        # An author's code may raise anything, which must not end the engine's thread.
        except BaseException as error:  # noqa: BLE001  # boundary: author code
            message = f"{self.name} cannot be created: {error_text(error)}\n{author_traceback(error)}"
            raise ProcessorLoadError(message.rstrip()) from None
        convention_of(made)
        return made


def duplicate_callable(target: Any) -> Any:
    """Copy a sequence's callable with its current state. A function is its own copy.

    A deep copy: `clone()` makes a callable for a new sequence, and logits-processor-zoo's leave the state out. Only an
    object that cannot be copied is cloned.
    """
    try:
        return _copier(target)()
    except Exception:  # boundary: author code
        clone = getattr(target, "clone", None)
        if callable(clone):
            return clone()
        raise


def _is_class(target: Any) -> bool:
    return isinstance(_without_partial(target), type)


def _is_function(target: Any) -> bool:
    return inspect.isroutine(_without_partial(target))


def _without_partial(target: Any) -> Any:
    return _without_partial(target.func) if isinstance(target, partial) else target


def _is_factory(function: Callable[..., Any], tokenizer: Any) -> bool:
    """Return whether a function cannot be a request-level callable itself, but can be called without arguments."""
    try:
        signature = signature_of(function)
    except ValueError:
        return False
    if accepts(signature, 2) or accepts(signature, 3):
        return False
    try:
        signature.bind(**_defaults(signature, {}, tokenizer))
    except TypeError:
        return False
    return True


def _constructor(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tokenizer: Any
) -> Callable[[], Any]:
    """Return a function that calls `target` with copies of the arguments.

    Raises:
        TypeError: the arguments do not match its signature.
    """
    with contextlib.suppress(ValueError):  # some classes written in C have no signature
        signature = signature_of(target)
        try:
            kwargs = kwargs | _defaults(signature, signature.bind_partial(*args, **kwargs).arguments, tokenizer)
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{name_of(target)}{signature} cannot create a request-level callable with the given arguments: {error}"
            ) from None
    copied = _copier((target, args, kwargs), tokenizer)

    def construct() -> Any:
        function, own_args, own_kwargs = copied()
        return function(*own_args, **own_kwargs)

    return construct


def _duplicator(target: Any) -> Callable[[], Any]:
    """Return a function that copies an object. A function is its own copy.

    Raises:
        TypeError: the object cannot be copied.
    """
    duplicate = _copier_of(target)
    try:
        duplicate()
    except Exception as error:  # boundary: author code
        raise TypeError(
            f"{name_of(target)} cannot be copied, and each sequence needs its own copy: {error_text(error)}. Give the "
            "class and its arguments instead, or add a method clone()"
        ) from error
    return duplicate


def _copier_of(target: Any) -> Callable[[], Any]:
    clone = getattr(target, "clone", None)
    return clone if callable(clone) else _copier(target)


def _defaults(signature: inspect.Signature, given: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the arguments to fill in for parameters that were not given."""
    open_parameters = {name: value.default for name, value in signature.parameters.items() if name not in given}
    required = {name for name, default in open_parameters.items() if default is inspect.Parameter.empty}
    defaults: dict[str, Any] = {}
    if tokenizer is not None and ("tokenizer" in required or open_parameters.get("tokenizer", ...) is None):
        defaults["tokenizer"] = tokenizer
    if "batch_size" in required:
        defaults["batch_size"] = 1
    return defaults


def _copier(value: Any, *shared: Any) -> Callable[[], Any]:
    """Return a function that deep-copies `value`, but shares its tokenizers, its modules and `shared`."""
    kept = {id(part): part for part in (*shared, *_shared_parts(value))}
    # deepcopy() uses the memo's entry for an object's id as its copy.
    return lambda: copy.deepcopy(value, dict(kept))


def _shared_parts(value: Any) -> list[Any]:
    """Return the tokenizers and modules within a value, without the value itself."""
    found: list[Any] = []
    seen: dict[int, Any] = {}  # keeps the objects alive: an id is only unique during an object's lifetime
    waiting = list(_parts(value))
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if _is_shared(part):
            found.append(part)
        else:
            waiting.extend(_parts(part))
    return found


def _is_shared(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) or all(
        callable(getattr(value, method, None)) for method in ("encode", "decode", "get_vocab")
    )


def _parts(value: Any) -> Iterable[Any]:
    """Return the objects that an object refers to, as far as deepcopy() follows them in practice."""
    if isinstance(value, str | bytes | int | float | torch.Tensor | type | ModuleType | FunctionType):
        return ()
    if isinstance(value, MethodType):
        return (value.__self__,)
    parts = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict):
        parts += value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts += value
    return parts
