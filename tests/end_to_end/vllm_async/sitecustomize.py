"""Enables asynchronous scheduling in vLLM on a CPU, where vLLM disables it because it is not faster.

Python imports this module at startup if it is on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
from typing import Any

with contextlib.suppress(ImportError):  # a process without vLLM, such as logitship's own
    from vllm.platforms.cpu import CpuPlatform

    _check_and_update_config = CpuPlatform.check_and_update_config.__func__

    def _with_async_scheduling(cls: type[CpuPlatform], vllm_config: Any) -> None:
        _check_and_update_config(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(_with_async_scheduling)
