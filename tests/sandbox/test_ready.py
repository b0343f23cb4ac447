"""`/health/ready` on an engine whose sandbox processes were killed."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from logitship.server.config import ServerConfig
from logitship.server.engine.build import build_engine
from logitship.server.model.model_loader import LoadedModel
from logitship.server.refusals import ServiceUnavailable

PATIENCE = 120.0


@pytest.mark.parametrize("role", ["zygote", "launcher"])
def test_ready_again_without_a_request(role: str, loaded_model: LoadedModel, sandbox_processes: Any) -> None:
    config = ServerConfig(model_path="tiny", device="cpu", max_num_seqs=2, enable_custom_logit_processor=True)
    engine = build_engine(config, loaded_model)

    async def until_ready() -> None:
        while True:
            try:
                return await engine.check_ready()
            except ServiceUnavailable:
                await asyncio.sleep(0.05)

    async def kill_and_ask() -> None:
        async with asyncio.timeout(PATIENCE):
            await until_ready()
            (killed,) = sandbox_processes.of(role)
            os.kill(killed, signal.SIGKILL)
            while engine._sandboxes is not None and engine._sandboxes.can_start:
                await asyncio.sleep(0.01)
            with pytest.raises(ServiceUnavailable, match="the process that sandboxes are forked from has ended"):
                await engine.check_ready()
            await until_ready()
            assert len(sandbox_processes.of(role) - {killed}) == 1

    try:
        asyncio.run(kill_and_ask())
    finally:
        engine.stop()
