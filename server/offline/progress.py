"""The progress bar of `LLM.generate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeAlias

from .outputs import RequestOutput

UseTqdm: TypeAlias = bool | Callable[..., Any]
"""True: show a bar. False: none. A callable that makes the bar, called like `tqdm`."""


class Progress:
    """A progress bar that counts finished requests and shows tokens per second.

    Args:
        use_tqdm: whether to show a bar, or the callable that makes it.
        total: number of requests.
    """

    def __init__(self, use_tqdm: UseTqdm, total: int) -> None:
        self._bar = _make_bar(use_tqdm, total)
        self._started = time.perf_counter()
        self._input_tokens = 0
        self._output_tokens = 0

    def tick(self, output: RequestOutput) -> None:
        """Count a finished request."""
        if self._bar is None:
            return
        self._input_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(each.token_ids) for each in output.outputs)
        seconds = max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._input_tokens / seconds:.2f} tokens/s, output: {self._output_tokens / seconds:.2f} tokens/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _make_bar(use_tqdm: UseTqdm, total: int) -> Any:
    if use_tqdm is False:
        return None
    make_bar = _tqdm() if use_tqdm is True else use_tqdm
    return make_bar(total=total, desc="Prompts", dynamic_ncols=True)


def _tqdm() -> Any:
    # Imported late: tqdm.auto looks for a notebook, and warns if its widgets are missing.
    from tqdm.auto import tqdm

    return tqdm
