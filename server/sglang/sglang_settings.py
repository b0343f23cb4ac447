"""The settings of the plugin for SGLang."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from logitship.server.runtime.plugin_settings import SHARED_READERS, PluginSettings


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(","))
    if not all(keys):
        raise ValueError("must be keys, separated by commas")
    return keys


@dataclass(frozen=True, kw_only=True)
class SglangSettings(PluginSettings):
    """Settings of the plugin. Each is read from the variable `LOGITSHIP_SGLANG_` and its name in capitals."""

    prefix = "LOGITSHIP_SGLANG_"
    readers = {"shipping_api_key": _keys, "tenant_header": str, **SHARED_READERS}  # noqa: RUF012  # declared in the base
    secrets = frozenset({"shipping_api_key"})

    shipping_api_key: Sequence[str] = field(default=(), repr=False)
    """Keys that may ship code. Empty: every client that may generate may also ship code."""
    tenant_header: str | None = None
    """Header in which a trusted gateway names the tenant of a request. None: each key is a tenant."""

    @property
    def metrics_directory(self) -> str | None:
        """See `PluginSettings.metrics_directory`. SGLang makes it with `--enable-metrics`."""
        return os.environ.get("PROMETHEUS_MULTIPROC_DIR")

    @property
    def names_in_metrics(self) -> bool:
        """See `PluginSettings.names_in_metrics`."""
        return super().names_in_metrics and self.tenant_header is None

    @property
    def num_keys(self) -> int:
        """Number of keys that may ship code."""
        return len({*self.shipping_api_key})
