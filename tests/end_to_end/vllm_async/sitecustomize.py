"""Turns asynchronous scheduling on in a vLLM on a CPU: vLLM turns it off there, because nothing is gained by it.

Python imports this at the start of each process that finds it in PYTHONPATH.
"""

from __future__ import annotations

import contextlib
from typing import Any

with contextlib.suppress(ImportError):  # a process without vLLM, such as one of logitship's own
    from vllm.platforms.cpu import CpuPlatform

    _check_and_update_config = CpuPlatform.check_and_update_config.__func__

    def _with_async_scheduling(cls: type[CpuPlatform], vllm_config: Any) -> None:
        _check_and_update_config(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(_with_async_scheduling)
