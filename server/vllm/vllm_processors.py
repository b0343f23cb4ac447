"""The processors of a request to vLLM: parsed from its extra arguments, then loaded."""

from __future__ import annotations

from typing import Any

from logitship.sampler.processors.processor_groups import uses_of
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.plugins import plugin_processors
from logitship.server.plugins.plugin_processors import PluginProcessors

from .extra_args import read_processors, sampling_params
from .log import logger
from .settings import VllmSettings


class VllmProcessors:
    """Loads and releases the processors of vLLM's requests.

    Args:
        settings: the plugin's.
        model: the model.
        processors: loads them.
    """

    def __init__(self, settings: VllmSettings, model: ModelView, processors: PluginProcessors) -> None:
        self._max_size = settings.max_processor_size
        self._eos_token_ids = model.eos_token_ids
        self._processors = processors

    @property
    def in_use(self) -> int:
        """Number of uses that were loaded and not released."""
        return self._processors.in_use

    def load(self, params: Any, rid: str) -> SamplingParams:
        """Load the processors of a request. Give them back with `release`.

        Args:
            params: vLLM's `SamplingParams`, of a request with processors.
            rid: the request id.

        Returns:
            The request's parameters as processors see them, with `processors` ready to run.

        Raises:
            ValueError: a processor cannot be loaded or rejects its parameters; the message is for the client.
        """
        uses = self._processors.load(read_processors(params.extra_args, self._max_size), rid)
        try:
            return sampling_params(params, uses, self._eos_token_ids)
        except BaseException:  # cleanup, then re-raised
            self._processors.release(uses)
            raise

    def release(self, params: SamplingParams) -> None:
        """Give back the processors that `load` returned."""
        self._processors.release(uses_of(params))


def for_admission(settings: VllmSettings, model: ModelView) -> VllmProcessors:
    """Return the processors of the front end: each class is loaded once, and its verdict remembered. None runs."""
    return VllmProcessors(settings, model, plugin_processors.for_admission(settings, model, logger))


def for_execution(settings: VllmSettings, model: ModelView, max_rows: int) -> VllmProcessors:
    """Return the processors of the engine core, which keeps them loaded and runs them in up to `max_rows` rows."""
    return VllmProcessors(settings, model, plugin_processors.for_execution(settings, model, max_rows, logger))
