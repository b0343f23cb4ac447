"""Stands in for vLLM's `tests/utils.py` in `test_vllm_tests.py`: what its tests of logits processors import."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any, Self

import httpx
import numpy as np
import openai
import torch

_FORK = multiprocessing.get_context("fork")
_START_TIMEOUT = 120
"""Seconds."""


def requires_spawn_multiprocessing() -> bool:
    """Return False: a CPU or an NVIDIA GPU does not require it before CUDA is in use."""
    return False


def set_random_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def create_new_process_for_each_test() -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs a test in a fork of this process."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def in_a_fork(*args: Any, **kwargs: Any) -> None:
            process = _FORK.Process(target=test, args=args, kwargs=kwargs)
            process.start()
            process.join()
            assert process.exitcode == 0, "the test failed in its own process; see its traceback above"

        return in_a_fork

    return decorate


class RemoteOpenAIServerCustom:
    """Runs a server in a fork of this process, with a function that starts it from vLLM's command line.

    Args:
        model: the model's name.
        vllm_serve_args: options of `vllm serve`.
        child_process_fxn: called with changes of the environment, the model and the options.
    """

    def __init__(self, model: str, vllm_serve_args: list[str], child_process_fxn: Callable[..., None]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        arguments = [*vllm_serve_args, "--port", str(port)]
        self._process = _FORK.Process(target=_in_session, args=(child_process_fxn, model, arguments))

    def __enter__(self) -> Self:
        self._process.start()
        deadline = time.monotonic() + _START_TIMEOUT
        while not self._is_ready():
            assert self._process.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server is not ready"
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def get_async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._url}/health").is_success
        except httpx.TransportError:
            return False


def _in_session(start: Callable[..., None], model: str, arguments: list[str]) -> None:
    os.setsid()
    start(None, model, arguments)
