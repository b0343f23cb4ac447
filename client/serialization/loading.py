"""Loading of a processor string into this process. The one place that unpickles processors.

Loading runs the code in the string. The server process must not do this with a client's string unless the operator
trusts the clients.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import pickle
import pickletools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any, TypeVar

from logitship.client.author_errors import author_traceback, class_name, error_message, error_text
from logitship.client.errors import ProcessorLoadError
from logitship.client.scrub import scrub
from logitship.client.shipped_lines import set_lines

from .artifact import Artifact, bytes_of
from .call_signature import signature_mistake
from .code_names import missing_globals
from .preparation import has_prepare, without_preparing
from .processor_base import processor_class
from .processor_string import PYTHON, Listing, PickledProcessor, SourceProcessor, source_lines
from .shipped_names import ShippedNames
from .syntax import signature_of

T = TypeVar("T")

_MAX_NAME_LENGTH = 200
_NOT_INSTALLED = (
    "the processor needs the module {}, which is not installed here. If it is your own, serialize the class with "
    "logitship's to_str(), which includes it"
)
_counter = itertools.count()
_NO_NAMES: Mapping[tuple[str, str], Any] = {}


def load_class(
    string: PickledProcessor | SourceProcessor, names: Mapping[tuple[str, str], Any] = _NO_NAMES
) -> type[Any]:
    """Rebuild the class in a processor string. Runs the code in it.

    Args:
        string: a pickle of this Python version, or source. For a pickle of another version, its source is used.
        names: (module, name) → the object that shipped code gets: SGLang's built-in processors, vLLM's batch processor
            interface. SGLang's and our `CustomLogitProcessor` are always included. The table is used even if the real
            package is installed: the behavior of a processor must not depend on that.

    Raises:
        ProcessorLoadError: it cannot be rebuilt here; the message says why, with the traceback if the author's code
            raised.
    """
    runnable = string.runnable if isinstance(string, PickledProcessor) else string
    table = ShippedNames(names)
    if isinstance(runnable, PickledProcessor):
        cls = _check_class(_unpickle(runnable.payload, table, runnable.artifacts, runnable.listing))
    else:
        cls = _check_class(_pick_class(_run_source(runnable, table, string.python), runnable.class_name))
    without_preparing(cls)
    return cls


def instantiate(cls: type[T]) -> T:
    """Create the one instance of a loaded class.

    Raises:
        ProcessorLoadError: `__init__` needs arguments or raises.
    """
    name = class_name(cls)
    with _explained(f"{name} raised when it was created"):
        try:
            # Of a class without either, `inspect` copies the table of all modules: in a new sandbox, it would copy
            # the page of each.
            with contextlib.suppress(ValueError):  # as in `serialize`
                if cls.__init__ is not object.__init__ or cls.__new__ is not object.__new__:
                    signature_of(cls).bind()
        except TypeError as error:
            raise ProcessorLoadError(
                f"{name} cannot be created without arguments: {error_message(error)}. Take the values from "
                "custom_params, or give the arguments of __init__ defaults"
            ) from None
        return cls()


def instantiate_prepared(cls: type[T], tokenizer: Any, vocab_size: int) -> T:
    """Create the one instance of a loaded class, and call its `prepare` if it has one.

    Args:
        cls: what `load_class` returned.
        tokenizer: the model's; None if it has none.
        vocab_size: number of columns of the logits.

    Raises:
        ProcessorLoadError: `__init__` needs arguments or raises, or `prepare` raises.
    """
    instance = instantiate(cls)
    if has_prepare(cls):
        with _explained(f"{class_name(cls)} raised in prepare"):
            instance.prepare(tokenizer, vocab_size)  # type: ignore[attr-defined]
    return instance


def check_payload(payload: bytes, artifacts: Iterable[Artifact] = ()) -> None:
    """Check that a class that was just pickled in this process loads.

    Raises:
        ProcessorLoadError: it does not.
    """
    _check_class(_unpickle(payload, ShippedNames(names_in_use()), artifacts))


def run_source(string: SourceProcessor) -> dict[str, Any]:
    """Run source that was just captured in this process, and return its globals.

    Raises:
        ProcessorLoadError: it raises, or does not define the class.
    """
    module = _run_source(string, ShippedNames(names_in_use()))
    _check_class(_pick_class(module, string.class_name))
    return vars(module)


def names_in_use() -> dict[tuple[str, str], Any]:
    """Return the processors imported in this process that have a counterpart in SGLang, by its module and name."""
    found: dict[tuple[str, str], Any] = {}
    waiting: list[type] = [processor_class()]
    while waiting:
        cls = waiting.pop()
        waiting.extend(cls.__subclasses__())
        ours = cls.__module__.partition(".")[0] == "logitship" and cls.__module__ in sys.modules
        if ours and "_pickles_as" in cls.__dict__:
            found[cls.__dict__["_pickles_as"]] = cls
    return found


def explain_name_error(error: NameError, cls: type) -> str | None:
    """Return a hint for the author of a class whose method raised NameError, or None if there is nothing to add."""
    name = getattr(error, "name", None)
    if isinstance(error, UnboundLocalError) or name not in missing_globals(cls):
        return None
    return (
        f"{name!r} was a global of the author's module and was not serialized: SGLang's to_str() omits module globals. "
        "Import or define it inside the method, or serialize the class with logitship's to_str(), which includes "
        "the globals that the class uses"
    )


def _unpickle(
    payload: bytes, names: ShippedNames, artifacts: Iterable[Artifact] = (), listing: Listing | None = None
) -> Any:
    _check_pickle(payload)
    from logitship.client.serialization.pickling.class_unpickler import ClassUnpickler

    with _explained("the processor raised while it was loaded"):
        unpickler = ClassUnpickler(payload, names, bytes_of(artifacts))
        try:
            return unpickler.load()
        finally:
            if listing is not None:
                set_lines(unpickler.codes, listing)
            # It refers to the unpickler's own methods. Python 3.11.2's collector does not look into it.
            unpickler.memo.clear()


def _check_pickle(payload: bytes) -> None:
    """Refuse damaged data, to tell it from code that fails."""
    try:
        for _ in pickletools.genops(payload):
            pass
    except (ValueError, UnicodeDecodeError) as error:
        what = "is truncated or damaged" if payload[:1] == pickle.PROTO else "is not a pickle"
        raise ProcessorLoadError(f"the processor's data {what}: {error}") from None


def _run_source(string: SourceProcessor, names: ShippedNames, python: str | None = PYTHON) -> ModuleType:
    """Execute the source as a module of its own.

    Args:
        string: the source.
        names: what it gets for the names of other packages.
        python: minor version that serialized it; None if unknown.
    """
    module = ModuleType(f"logitship_processor_{next(_counter)}")
    vars(module).update(_captured(string, names), __builtins__=names.builtins)
    filename = f"<{module.__name__}>"
    code = _compile(string.source, filename, python)
    # linecache lets tracebacks quote the source. The entry must not outlive the class.
    linecache.cache[filename] = (len(string.source), None, source_lines(string.source), filename)
    evict = weakref.finalize(module, linecache.cache.pop, filename, None)
    # dataclasses and typing look up a class's module in sys.modules while the class is created.
    sys.modules[module.__name__] = module
    try:
        with _explained("the source raised while it was loaded"):
            exec(code, vars(module))
    finally:
        sys.modules.pop(module.__name__, None)
    cls = vars(module).get(string.class_name)
    if isinstance(cls, type):
        evict.detach()
        weakref.finalize(cls, linecache.cache.pop, filename, None)
    return module


def _compile(source: str, filename: str, python: str | None) -> CodeType:
    try:
        return compile(source, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        reason = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        if python not in (None, PYTHON):
            reason += f". Python {python} serialized it: use no newer syntax than that of {PYTHON}"
        raise ProcessorLoadError(f"the source is not valid Python {PYTHON}: {reason}") from None


def _pick_class(module: ModuleType, name: str) -> Any:
    if name not in vars(module):
        classes = sorted(n for n, value in vars(module).items() if _is_defined_in(value, module))
        raise ProcessorLoadError(
            f"the source does not define {name!r}; its classes are: {', '.join(classes) or 'none'}"
        )
    return vars(module)[name]


def _is_defined_in(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


def _captured(string: SourceProcessor, names: ShippedNames) -> dict[str, Any]:
    if not string.captured:
        return {}
    captured = _unpickle(string.captured, names, string.artifacts)
    if not isinstance(captured, dict):
        raise ProcessorLoadError(f"'captured' is not a dict of values but {class_name(type(captured))}")
    return captured


def _check_class(cls: Any) -> type[Any]:
    if not isinstance(cls, type):
        raise ProcessorLoadError(f"the processor is not a class but {class_name(type(cls))}")
    if not issubclass(cls, processor_class()):
        raise ProcessorLoadError(f"class {class_name(cls)} is not a subclass of CustomLogitProcessor")
    abstract = sorted(getattr(cls, "__abstractmethods__", ()))
    if abstract:
        raise ProcessorLoadError(f"class {class_name(cls)} is abstract: it lacks {', '.join(abstract)}")
    if mistake := signature_mistake(cls):
        raise ProcessorLoadError(f"class {class_name(cls)} cannot be called: {mistake}")
    return cls


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn any exception of the author's code into a ProcessorLoadError."""
    try:
        yield
    except ProcessorLoadError:
        raise
    except (Exception, SystemExit) as error:  # boundary: author code
        module = _missing_module(error)
        message = f"{what}: {error_text(error)}" if module is None else _NOT_INSTALLED.format(module)
        raise ProcessorLoadError(f"{message}\n{author_traceback(error, with_causes=False)}".rstrip()) from error


def _missing_module(error: BaseException) -> str | None:
    """Return the name of the missing module, or None if the error is another one."""
    # The attributes of a subclass may run the author's code, and so may the name.
    if type(error) is not ModuleNotFoundError or type(error.name) is not str:
        return None
    return repr(scrub(error.name[:_MAX_NAME_LENGTH]))
