"""The settings and the logger of the plugin for vLLM."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass

from logitship.server.runtime.plugin_settings import SHARED_READERS, PluginSettings, read_switch

logger = logging.getLogger("vllm.logitship")
"""A child of vLLM's logger, the only one that `vllm serve` prints."""

METRICS_DIRECTORY = "LOGITSHIP_METRICS_DIRECTORY"
"""Variable that vLLM's processes inherit from the first one, see `make_metrics_directory`."""


def make_metrics_directory() -> None:
    """Make the folder in which vLLM's processes share the metrics of processors, before the first one starts others."""
    if METRICS_DIRECTORY not in os.environ:
        os.environ[METRICS_DIRECTORY] = path = tempfile.mkdtemp(prefix="logitship-metrics-")
        atexit.register(shutil.rmtree, path, ignore_errors=True)


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
        return os.environ.get(METRICS_DIRECTORY)

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
