"""The end of a request whose processor failed: SGLang's `FINISH_ABORT`, with the fault in its message."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from logitship.server.runtime.fault_message import FAULT_TYPE

STATUS = HTTPStatus.BAD_REQUEST
"""Status of the request. SGLang's OpenAI routes end a stream with an error only if it is an `HTTPStatus`."""


def abort(request: Any, message: str, num_output_tokens: int) -> None:
    """Let SGLang end a request after its current output.

    Args:
        request: SGLang's `Req`.
        message: the reason, with its type.
        num_output_tokens: number of its output tokens. The one that SGLang samples in this step is not one.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # pyright: ignore[reportMissingImports]

    request.finished_len = num_output_tokens
    request.to_finish = FINISH_ABORT(message, STATUS, FAULT_TYPE)


def reject(scheduler: Any, request: Any, message: str) -> None:
    """Let SGLang answer a request that has not been in its waiting queue.

    Args:
        scheduler: SGLang's `Scheduler`.
        request: SGLang's `Req`.
        message: the reason, with its type.
    """
    from sglang.srt.disaggregation.utils import prepare_abort  # pyright: ignore[reportMissingImports]

    prepare_abort(request, message, STATUS)
    request.finished_reason.err_type = FAULT_TYPE
    scheduler.retire_unadmitted_request(request)
