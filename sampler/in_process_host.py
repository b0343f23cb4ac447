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
        cls = load_class(runnable, self._names)
        size = len(runnable.payload) if isinstance(runnable, PickledProcessor) else len(runnable.source)
        return LoadedProcessor(runnable.digest, cls.__name__, size, self, instantiate(cls))

    def run(
        self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """See `ProcessorHost.run`."""
        try:
            result = processor.instance(logits, list(param_list))
        # Whatever it raises, `SystemExit` included, must not end the engine's thread.
        except BaseException as error:
            raise _exception_fault(processor, error) from error
        return checked_result(processor, result, logits)


def _exception_fault(processor: LoadedProcessor, error: BaseException) -> ProcessorFault:
    message = f"processor {processor.name} raised {type(error).__name__}: {error}"
    hint = explain_name_error(error, type(processor.instance)) if isinstance(error, NameError) else None
    return ProcessorFault(
        f"{message} ({hint})" if hint else message,
        digest=processor.digest,
        name=processor.name,
        kind="exception",
        traceback=_authors_traceback(error),
    )


def _authors_traceback(error: BaseException) -> str:
    """The traceback without the frame of this module: the author's own code, and what that called."""
    frames = error.__traceback__
    if frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames, limit=-20))


def checked_result(processor: LoadedProcessor, result: object, logits: torch.Tensor) -> torch.Tensor:
    """What a processor returned, as float32; it must be a float tensor like `logits`.

    Raises:
        ProcessorFault: it is not.
    """
    if not isinstance(result, torch.Tensor):
        found = f"returned {type(result).__name__}, not a tensor"
    elif result.shape != logits.shape:
        found = f"returned shape {list(result.shape)}, expected {list(logits.shape)}"
    elif result.device != logits.device:
        found = f"returned a tensor on {result.device}, expected {logits.device}"
    elif not result.is_floating_point():
        found = f"returned dtype {result.dtype}, expected a floating-point type"
    else:
        return result.detach().to(logits.dtype)
    if result is None:
        found += " (a processor that edits in place must return the logits too)"
    raise ProcessorFault(
        f"processor {processor.name} {found}", digest=processor.digest, name=processor.name, kind="bad_result"
    )
