"""The real server on the real model, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from logitship.server.config import ServerConfig
from logitship.server.http_server import running_server


@pytest.fixture(scope="session")
def real_server() -> Iterator[str]:
    """Base URL of a server on the default model that takes shipped processors; 32 sequences of up to 1,024 tokens."""
    config = ServerConfig(
        port=0,
        enable_custom_logit_processor=True,
        processor_isolation="none",
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
        max_model_len=1024,
        random_seed=0,
        log_level="warning",
    )
    with running_server(config) as base_url:
        yield base_url
