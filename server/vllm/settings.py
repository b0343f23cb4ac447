"""The settings and the logger of the plugin for vLLM."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from logitship.server.runtime.plugin_settings import SHARED_READERS, PluginSettings, read_switch
from logitship.server.runtime.shared_directory import SHARED_DIRECTORY

logger = logging.getLogger("vllm.logitship")
"""A child of vLLM's logger, the only one that `vllm serve` prints."""


@dataclass(frozen=True, kw_only=True)
class VllmSettings(PluginSettings):
    """Settings of the plugin. Each is read from the variable of the same name in capitals, after `LOGITSHIP_VLLM_`."""

    prefix = "LOGITSHIP_VLLM_"
    readers = {  # noqa: RUF012  # declared in the base
        "enable_custom_logit_processor": read_switch,
        "tenant_header": str,
        **SHARED_READERS,
    }

    enable_custom_logit_processor: bool = False
    """Requests may ship code. Otherwise only the built-in processors run, by name."""
    tenant_header: str | None = None
    """Header in which a trusted gateway names the tenant of a request. None: each of vLLM's API keys is a tenant."""

    @property
    def metrics_directory(self) -> str | None:
        """See `PluginSettings.metrics_directory`."""
        return os.environ.get(SHARED_DIRECTORY)

    @property
    def names_in_metrics(self) -> bool:
        """See `PluginSettings.names_in_metrics`."""
        return super().names_in_metrics and self.tenant_header is None

    @property
    def shipping_is_off(self) -> str | None:
        """Reason why requests may not ship code; None: they may."""
        if self.enable_custom_logit_processor:
            return None
        variable = f"{self.prefix}ENABLE_CUSTOM_LOGIT_PROCESSOR"
        return f"this server does not accept shipped processors: its operator has to set {variable}=1"
