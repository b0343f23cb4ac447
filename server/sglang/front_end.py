"""Admission of requests in SGLang's front end, where an error is a 400, before they reach the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from logitship.builtin_processors.sglang_names import INSTALLED_BY_REFERENCE
from logitship.client.http.sglang_handshake import PROBE, SglangPlugin
from logitship.client.serialization.processor_string import InstalledProcessor, PickledProcessor, RegisteredProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.server.api_keys import ApiKeys, Caller, tenant_of
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.plugin_setup import for_admission
from logitship.server.runtime.request_fields import EDITS, PROCESSOR, with_strings
from logitship_sglang import logger

from .generate_fields import (
    BEAM_SEARCH,
    add_defaults,
    add_sent,
    mark_admitted,
    processors_of,
    read_processors,
    uses_beam_search,
    with_params,
)
from .packed_masks import asks_for_edits, requested_masks
from .sglang_settings import SglangSettings

NUM_PARSED = 4
"""Most requests that are parsed at once."""
SHIPPING_KEY_HEADER = "x-logitship-shipping-key"
"""Header of a shipping key, for servers whose `Authorization` is SGLang's own API key."""
_SPECULATION = (
    "custom_logit_processor: this server decodes speculatively, with an algorithm whose drafts processors cannot "
    "follow; they can follow NGRAM, EAGLE, EAGLE3, NEXTN and STANDALONE"
)


class FrontEnd:
    """Checks the processors of requests by loading them once.

    Args:
        settings: the plugin's.
        model: the model.
        api_key: SGLang's own key; None: it requires none.
        skips_processors: SGLang decodes speculatively in a way that processors cannot follow.
        speculates: SGLang decodes speculatively.
    """

    def __init__(
        self,
        settings: SglangSettings,
        model: ModelView,
        api_key: str | None = None,
        *,
        skips_processors: bool,
        speculates: bool = False,
    ) -> None:
        self._settings = settings
        self._model = model
        self._keys = ApiKeys([api_key] if api_key else [], settings.shipping_api_key)
        self._skips_processors = skips_processors
        self._speculates = speculates
        self._threads = ThreadPoolExecutor(NUM_PARSED, "logitship-parse")
        self._lock = threading.Lock()
        self._processors: PluginProcessors | None = None

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""
        return self._model.vocab_size

    def prepare(self) -> None:
        """Start the sandboxes in a thread. The first request with a processor waits for them."""
        with contextlib.suppress(RuntimeError):  # no thread can be started now: the first request tries again
            self._threads.submit(self.prepared)

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
        defaults = self._settings.default_processors if hasattr(generate, PROCESSOR) else ()
        has_any = bool(pairs or defaults)
        with_edits = asks_for_edits(requested_masks(getattr(http_request, "scope", {})))
        if with_edits and (not has_any or self._speculates):
            reason = "is not supported with speculative decoding" if has_any else "needs a processor"
            raise ValueError(f"{EDITS}: inside SGLang, it {reason}")
        if not has_any:
            return
        if any(string == PROBE for string, _ in pairs):
            raise ValueError(SglangPlugin(speculates=self._skips_processors).to_message())
        if defaults:
            add_defaults(generate, defaults)
            pairs = processors_of(generate)
        if self._skips_processors:
            raise ValueError(_SPECULATION)
        if uses_beam_search(generate):
            raise ValueError(BEAM_SEARCH)
        caller = self.caller(http_request)
        try:
            # In a thread: a request may have thousands of prompts, each with parameters of its own.
            parsed, texts = await asyncio.get_running_loop().run_in_executor(self._threads, self._parse, pairs, caller)
            processors = await asyncio.get_running_loop().run_in_executor(self._threads, self.prepared)
            for requested in parsed:
                await processors.check(requested, caller.tenant)
        except RuntimeError:
            raise ValueError(
                "custom_logit_processor: the server cannot start a thread to check it now: try again later"
            ) from None
        mark_admitted(generate, caller.tenant, texts, records_edits=with_edits)

    def _parse(
        self, pairs: Sequence[tuple[str, Any]], caller: Caller
    ) -> tuple[list[tuple[ProcessorRequest, ...]], dict[str, str]]:
        """Parse the processors of a request.

        Returns:
            The processors of each pair, and the strings that name registered ones with those that have their code.
        """
        strings = dict.fromkeys(string for string, _ in pairs)
        defaults = self._settings.default_processors
        parsed = {string: read_processors(string, self._settings.max_processor_size) for string in strings}
        own = [each for some in parsed.values() for each in some[: len(some) - len(defaults)]]
        if not caller.may_ship and any(map(_ships_code, own)):
            raise ValueError(
                "custom_logit_processor: this key may generate, but not ship processors: send a key of "
                f"{self._settings.prefix}SHIPPING_API_KEY as '{SHIPPING_KEY_HEADER}', or name a built-in processor"
            )
        texts: dict[str, str] = {}
        for string, requested in parsed.items():
            if any(isinstance(each.string, RegisteredProcessor | InstalledProcessor) for each in requested):
                resolved = self.prepared().resolve(requested, caller.tenant)
                if resolved is not requested:
                    parsed[string], texts[string] = resolved, with_strings(string, resolved)
        return [with_params(parsed[string], params) for string, params in pairs], texts

    def caller(self, http_request: Any) -> Caller:
        """Return the client that sent a request. SGLang has checked its own key already."""
        if http_request is None:
            return Caller("", may_ship=True)
        headers = http_request.headers
        shipping = f"Bearer {headers.get(SHIPPING_KEY_HEADER, '')}"
        caller = self._keys.caller(shipping) or self._keys.caller(headers.get("authorization", ""))
        caller = caller or Caller("", may_ship=False)
        header = self._settings.tenant_header
        name = headers.get(header, "") if header else ""
        return replace(caller, tenant=tenant_of(name)) if name else caller

    def prepared(self) -> PluginProcessors:
        """Return the processors. The first call waits until the sandboxes have started.

        Raises:
            ValueError: they cannot start.
        """
        with self._lock:
            if self._processors is None:
                self._processors = for_admission(self._settings, self._model, logger)
            return self._processors


def _ships_code(request: ProcessorRequest) -> bool:
    string = request.string
    if isinstance(string, InstalledProcessor | RegisteredProcessor):
        return False
    return not (isinstance(string, PickledProcessor) and string.reference in INSTALLED_BY_REFERENCE)
