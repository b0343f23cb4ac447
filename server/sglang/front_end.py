"""Admission of requests in SGLang's front end, where an error is a 400, before they reach the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from logitship.builtin_processors.sglang_names import INSTALLED_BY_REFERENCE
from logitship.client.http.sglang_handshake import PROBE, SglangPlugin
from logitship.client.serialization.processor_string import InstalledProcessor, PickledProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime.plugin_processors import PluginProcessors, for_admission
from logitship_sglang import logger

from .generate_fields import (
    BEAM_SEARCH,
    add_sent,
    mark_admitted,
    processors_of,
    read_processors,
    uses_beam_search,
    with_params,
)
from .sglang_settings import SglangSettings

NUM_LOADS = 4
"""Most requests whose processors are loaded at once."""
SHIPPING_KEY_HEADER = "x-logitship-shipping-key"
"""Header of a shipping key, for servers whose `Authorization` is SGLang's own API key."""
_SPECULATION = (
    "custom_logit_processor: this server decodes speculatively, and SGLang does not call processors for drafts; it has "
    "to be started without --speculative-algorithm, or with NGRAM and --disable-overlap-schedule"
)


class FrontEnd:
    """Checks the processors of requests by loading them once.

    Args:
        settings: the plugin's.
        model: the model.
        skips_processors: SGLang decodes speculatively in a way that processors cannot follow.
    """

    def __init__(self, settings: SglangSettings, model: ModelView, *, skips_processors: bool) -> None:
        self._settings = settings
        self._model = model
        self._skips_processors = skips_processors
        self._threads = ThreadPoolExecutor(NUM_LOADS, "logitship-load")
        self._lock = threading.Lock()
        self._processors: PluginProcessors | None = None

    def prepare(self) -> None:
        """Start the sandboxes in a thread. The first request with a processor waits for them."""
        with contextlib.suppress(RuntimeError):  # no thread can be started now: the first request tries again
            self._threads.submit(self._prepared)

    async def admit(self, generate: Any, http_request: Any) -> None:
        """Check the processors of a request. Adds those that SGLang has dropped.

        Args:
            generate: SGLang's `GenerateReqInput`.
            http_request: the HTTP request; None if it came from this process.

        Raises:
            ValueError: a processor cannot run; the message is for the client.
        """
        add_sent(generate, getattr(http_request, "scope", {}))
        pairs = processors_of(generate)
        if not pairs:
            return
        if any(string == PROBE for string, _ in pairs):
            raise ValueError(SglangPlugin(speculates=self._skips_processors).to_message())
        if self._skips_processors:
            raise ValueError(_SPECULATION)
        if uses_beam_search(generate):
            raise ValueError(BEAM_SEARCH)
        # In a thread: a request may have thousands of prompts, each with parameters of its own.
        try:
            checked = asyncio.get_running_loop().run_in_executor(self._threads, self._check, pairs, http_request)
        except RuntimeError:
            raise ValueError(
                "custom_logit_processor: the server cannot start a thread to check it now: try again later"
            ) from None
        await checked
        mark_admitted(generate)

    def _check(self, pairs: Sequence[tuple[str, Any]], http_request: Any) -> None:
        """Parse the processors, and load them."""
        strings = dict.fromkeys(string for string, _ in pairs)
        parsed = {string: read_processors(string, self._settings.max_processor_size) for string in strings}
        self._check_key([each for some in parsed.values() for each in some], http_request)
        requested = [with_params(parsed[string], params) for string, params in pairs]
        processors = self._prepared()
        for each in requested:
            processors.release(processors.load(each, "admission"))

    def _check_key(self, requested: Sequence[ProcessorRequest], http_request: Any) -> None:
        keys = self._settings.shipping_api_key
        if not keys or http_request is None or not any(map(_ships_code, requested)):
            return
        headers = http_request.headers
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get(SHIPPING_KEY_HEADER, ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        # All are compared, so that the time does not reveal which key is nearly right.
        matches = [hmac.compare_digest(key.encode(), each.encode()) for key in keys for each in given]
        if not any(matches):
            raise ValueError(
                "custom_logit_processor: this key may generate, but not ship processors: send a key of "
                f"{self._settings.prefix}SHIPPING_API_KEY as '{SHIPPING_KEY_HEADER}', or name a built-in processor"
            )

    def _prepared(self) -> PluginProcessors:
        with self._lock:
            if self._processors is None:
                self._processors = for_admission(self._settings, self._model, logger)
            return self._processors


def _ships_code(request: ProcessorRequest) -> bool:
    string = request.string
    if isinstance(string, InstalledProcessor):
        return False
    return not (isinstance(string, PickledProcessor) and string.reference in INSTALLED_BY_REFERENCE)
