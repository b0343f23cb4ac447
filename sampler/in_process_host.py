"""Runs shipped processors in this process: no isolation at all."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from logitship.client.errors import ProcessorFault, ProcessorLoadError
from logitship.client.loading import explain_name_error, instantiate, load_class
from logitship.client.processor_string import PickledProcessor, ProcessorString, SourceProcessor

from .processor_host import LoadedProcessor

_LONGEST_TEXT = 4096
"""Characters of an exception's message, or of its traceback, that are kept."""


class InProcessHost:
    """Loads and calls processors right here. Only for code that the operator would run anyway.

    Args:
        names: what shipped classes may refer to by name, `(module, qualified name)` to object: SGLang's built-ins.
    """

    def __init__(self, names: Mapping[tuple[str, str], Any]) -> None:
        self._names = names

    def load(self, string: ProcessorString) -> LoadedProcessor:
        """See `ProcessorHost.load`."""
        if not isinstance(string, PickledProcessor | SourceProcessor):
            raise ProcessorLoadError(f"{type(string).__name__} ships no code")
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        try:
            cls = load_class(runnable, self._names)
            instance = instantiate(cls)
        except ProcessorLoadError:
            raise
        # `load_class` lets KeyboardInterrupt and its like pass. Raised by the author's code, they must not end us.
        except BaseException as error:  # noqa: BLE001
            raise ProcessorLoadError(f"the processor could not be loaded: {_error_text(error)}") from None
        return LoadedProcessor(runnable.digest, cls.__name__, _size(runnable), self, instance)

    def run(
        self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """See `ProcessorHost.run`."""
        try:
            result = processor.instance(logits, list(param_list))
            # In here too: what it returned may be a subclass of Tensor, whose attributes are the author's code.
            return _checked(result, logits)
        except _BadResult as bad:
            message = f"processor {processor.name} returned {bad}"
            fault = ProcessorFault(message, digest=processor.digest, name=processor.name, kind="bad_result")
        # Whatever it raises, `SystemExit` included, must not end the engine's thread.
        except BaseException as error:  # noqa: BLE001
            fault = _exception_fault(processor, error)
        # Out here, so that the fault does not keep the author's exception, and with it the tensors in its frames.
        raise fault


def _size(string: PickledProcessor | SourceProcessor) -> int:
    if isinstance(string, PickledProcessor):
        return len(string.payload)
    return len(string.source.encode()) + len(string.captured)


def _exception_fault(processor: LoadedProcessor, error: BaseException) -> ProcessorFault:
    message = f"processor {processor.name} raised {_error_text(error)}"
    hint = explain_name_error(error, type(processor.instance)) if type(error) is NameError else None
    return ProcessorFault(
        f"{message} ({hint})" if hint else message,
        digest=processor.digest,
        name=processor.name,
        kind="exception",
        traceback=_authors_traceback(error),
    )


def _error_text(error: BaseException) -> str:
    """The exception's type and message. The message is the author's code, which may fail or be endless."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as second:  # noqa: BLE001
        return f"{name} (its message cannot be shown: str() raised {type(second).__name__})"
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}… ({len(text)} characters)"
    return f"{name}: {_as_utf8(text)}" if text else name


def _authors_traceback(error: BaseException) -> str:
    """The traceback without the frame of this module: the author's own code, and what that called."""
    frames = error.__traceback__
    if frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames, limit=-20))
    # It reads attributes of the exception, which are the author's code too.
    except BaseException as second:  # noqa: BLE001
        return f"(the traceback cannot be shown: {type(second).__name__})"
    if len(text) > _LONGEST_TEXT:  # its end says most
        text = f"…{text[-_LONGEST_TEXT:]}"
    return _as_utf8(text)


def _as_utf8(text: str) -> str:
    """The text with lone surrogates written as escapes: no answer could carry them."""
    return text.encode("utf-8", "backslashreplace").decode()


class _BadResult(Exception):
    """What a processor returned is not what it must return; the message says what it is."""


def _checked(result: object, logits: torch.Tensor) -> torch.Tensor:
    """What a processor returned, in the dtype of `logits`; it must be a dense float tensor of their shape.

    Returns:
        `logits` itself if that is what it returned, so that the caller sees that nothing is to be copied.

    Raises:
        _BadResult: it is not.
    """
    if result is logits and not logits.requires_grad:
        return logits
    if result is None:
        raise _BadResult("NoneType, not a tensor (a processor that edits in place must return the logits too)")
    if not isinstance(result, torch.Tensor):
        raise _BadResult(f"{type(result).__name__}, not a tensor")
    if result.shape != logits.shape:
        raise _BadResult(f"shape {list(result.shape)}, expected {list(logits.shape)}")
    if result.device != logits.device:
        raise _BadResult(f"a tensor on {result.device}, expected {logits.device}")
    if not result.is_floating_point():
        raise _BadResult(f"dtype {result.dtype}, expected a floating-point type")
    if result.layout is not torch.strided:
        raise _BadResult(f"a tensor of layout {result.layout}, expected a dense one")
    # A view that the processor made of `logits` may overlap the place where the result goes: copied in time.
    plain = result.detach().as_subclass(torch.Tensor).to(logits.dtype)
    shared = plain.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    return plain.clone() if shared else plain
