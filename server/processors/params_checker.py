"""The server's client of the processes that check parameters, see `check_params`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logitship.builtin_processors.params import PreparationUnavailable
from logitship.builtin_processors.parts.checker_process import CheckerProcess
from logitship.client.errors import ProcessorLoadError
from logitship.sampler.fair_slots import FairSlots
from logitship.sampler.processors.executor import ExecutorUnavailable, LoadedProcessor
from logitship.sampler.round_robin_queue import TenantQueueFull

_SCRIPT = str(Path(__file__).with_name("check_params.py"))
"""Not imported here: the server needs no jsonschema itself."""
_NUM_PROCESSES = 2
"""Processes; the second one starts when another tenant's check is late."""
_MAX_WAITING = 128
"""Checks of a tenant that may wait."""
_TIMEOUT = 60.0
"""Seconds that a check may wait, and that it may take."""
_IDLE_TIMEOUT = 300.0


class InvalidParams(ValueError):
    """A processor rejects a request's parameters."""


class ParamsChecker:
    """Checks parameters against the `params_schema` of a class, in separate processes. Tenants take turns. Thread-safe.

    Args:
        cpu_limit: maximum CPU seconds of a check.
    """

    def __init__(self, cpu_limit: float = 2.0) -> None:
        self._processes = [
            CheckerProcess(_SCRIPT, None, "the parameters", cpu_limit, _TIMEOUT, _IDLE_TIMEOUT)
            for _ in range(_NUM_PROCESSES)
        ]
        self._slots = FairSlots(self._processes, _MAX_WAITING)

    def check_schema(self, processor: LoadedProcessor) -> None:
        """Check the `params_schema` of a class, if it has one. Blocks.

        Raises:
            ProcessorLoadError: it is invalid, or has a keyword that JSON Schema does not have.
            ExecutorUnavailable: it cannot be checked now.
        """
        try:
            self.check(processor, None, processor.tenant)
        except InvalidParams as error:
            raise ProcessorLoadError(str(error)) from None
        except PreparationUnavailable as error:
            raise ExecutorUnavailable(str(error)) from None

    def check(self, processor: LoadedProcessor, params: Mapping[str, Any] | None, tenant: str) -> None:
        """Check parameters against the `params_schema` of a class, if it has one. Blocks.

        Args:
            processor: the loaded class.
            params: None: check the schema alone.
            tenant: who sent the request.

        Raises:
            ProcessorLoadError: the schema is invalid.
            InvalidParams: the parameters do not match, or not within the limits of time and memory.
            PreparationUnavailable: they cannot be checked now.
        """
        if processor.params_schema is None:
            return
        try:
            question = _question(processor.params_schema, params)
            with self._slots.use(tenant, _TIMEOUT) as process:
                answer = process.ask(question)
        except (TenantQueueFull, TimeoutError):
            raise PreparationUnavailable("the server is checking other parameters: try again later") from None
        except ValueError as error:
            checked = "params_schema" if params is None else "params: checking them against params_schema"
            raise InvalidParams(f"{checked}: {error}") from None
        if answer is not None:
            wrong, message = answer
            raise ProcessorLoadError(message) if wrong == "params_schema" else InvalidParams(message)

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.close()


def _question(schema: Mapping[str, Any], params: Mapping[str, Any] | None) -> str:
    """Return the question for `check_params`.

    Raises:
        ValueError: something nests too deeply, or cannot be written.
    """
    try:
        # In Python, not at once in C: other threads go on meanwhile.
        encoder = json.JSONEncoder(default=_as_json, skipkeys=True)
        return "".join(encoder.iterencode((json.dumps(schema), params)))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _as_json(value: object) -> object:
    """Convert a value that JSON does not have. No schema describes those that become text."""
    return dict(value) if isinstance(value, Mapping) else repr(value)
