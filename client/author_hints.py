"""Advice on code that was written for a process without a sandbox."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from .author_errors import chain_of, frames_of

_NO_FILES = (
    "the sandbox has no files. Read the file at the top of your module, into a constant: it is serialized with the "
    "class. Or send what differs from request to request as custom_params"
)
_NO_NETWORK = "the sandbox has no network. Fetch the data before you send the class, or send it as custom_params"
_NO_GPU = (
    "there is no GPU in the sandbox: make tensors with device=logits.device, and call neither .cuda() nor .to('cuda')"
)
_NO_THREADS = "the sandbox has no threads of its own: compute in __call__"
_NO_PROCESSES = "the sandbox cannot start processes"
_NO_MEMORY = (
    "the sandbox's memory is limited by the server's sandbox_memory: make large tables once, in "
    "prepare(self, tokenizer, vocab_size), and of a small dtype"
)

_NETWORK_MODULES = frozenset(
    {"aiohttp", "ftplib", "http", "httpcore", "httpx", "requests", "socket", "urllib", "urllib3"}
)
_REFUSED = frozenset({errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENOSYS, errno.EROFS})
_NO_CUDA = ("cuda", "nvidia driver")
_MAX_FRAMES = 200

# The slots of `type`, which a metaclass cannot override.
_mro_of = type.__dict__["__mro__"].__get__
_members_of = type.__dict__["__dict__"].__get__
_arguments_of = BaseException.__dict__["args"].__get__


def sandbox_hint(error: BaseException) -> str:
    """Return advice on an exception that the sandbox caused; "" if it did not."""
    try:
        hints = (hint for each in chain_of(error) for is_cause, hint in _HINTS if is_cause(each))
        return next(hints, "")
    # Reading an exception may run the author's code despite all precautions.
    except BaseException:  # noqa: BLE001  # boundary: author code
        return ""


def _modules_of(error: BaseException) -> set[str]:
    """Return the top-level modules that the exception passed through."""
    names = (dict.get(frame.f_globals, "__name__") for frame in frames_of(error, _MAX_FRAMES))
    return {name.partition(".")[0] for name in names if type(name) is str}


def _is_refused(error: BaseException) -> bool:
    """Return whether a system call was refused, or its file does not exist."""
    if not issubclass(type(error), OSError):
        return False
    number = OSError.__dict__["errno"].__get__(error)
    return type(number) is int and number in _REFUSED


def _is_network(error: BaseException) -> bool:
    if not _NETWORK_MODULES.isdisjoint(map(_module_of, _mro_of(type(error)))):
        return True
    return _is_refused(error) and not _NETWORK_MODULES.isdisjoint(_modules_of(error))


def _module_of(cls: type) -> str:
    """Return the top-level module that the class names as its own."""
    module = _members_of(cls).get("__module__")
    return module.partition(".")[0] if type(module) is str else ""


def _is_process(error: BaseException) -> bool:
    return _is_refused(error) and "subprocess" in _modules_of(error)


def _is_file(error: BaseException) -> bool:
    return _is_refused(error) and type(OSError.__dict__["filename"].__get__(error)) is str


def _message(error: BaseException) -> str:
    """Return the message of an exception of a built-in class with a plain text, whose `str` is not the author's."""
    if not any(type(error) is each for each in (AssertionError, RuntimeError)):  # `in` compares with `==`
        return ""
    arguments = _arguments_of(error)
    return arguments[0].lower() if len(arguments) == 1 and type(arguments[0]) is str else ""


def _is_gpu(error: BaseException) -> bool:
    return any(words in _message(error) for words in _NO_CUDA)


def _is_thread(error: BaseException) -> bool:
    return "can't start new thread" in _message(error)


def _is_memory(error: BaseException) -> bool:
    return type(error) is MemoryError or "can't allocate memory" in _message(error)


_HINTS: Sequence[tuple[Callable[[BaseException], bool], str]] = (
    (_is_process, _NO_PROCESSES),
    (_is_network, _NO_NETWORK),
    (_is_file, _NO_FILES),
    (_is_gpu, _NO_GPU),
    (_is_thread, _NO_THREADS),
    (_is_memory, _NO_MEMORY),
)
