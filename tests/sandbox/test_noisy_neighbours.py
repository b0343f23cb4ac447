"""The hostile clients of `benchmarks/noisy_neighbours.py` in short form: what happens is tested, not how long it takes.

While a hostile client is at work, an honest one gets its tokens, without an error. Afterwards nothing is left over.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from logitship.builtin_processors.grammars import compiler
from logitship.builtin_processors.grammars.checker import GrammarChecker
from logitship.server.config import ServerConfig
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.build import build_engine
from logitship.server.http_server import running_server
from logitship.server.model.model_loader import LoadedModel
from tests.helpers.descriptors import open_files

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import hostile_clients

SECONDS = 2.0
"""Duration of each attack."""
LONGEST = 60.0
"""Seconds for an honest request, and until nothing is left over: the machine may be busy, and minutes are too long."""
CHECKER_IDLE = 1.0
"""Seconds after which the idle process of a grammar checker ends, instead of half a minute."""
SOUND = {
    "registry_flood",
    "slow_loads",
    "slow_processor",
    "slow_stages",
    "spinners",
    "spinning_loads",
    "twelve_spinners",
}
"""Attacks with classes that can be loaded: if the server refused them, it would have nothing to do."""


@dataclass(frozen=True)
class Served:
    """A server in a thread of this process.

    Attributes:
        url: where it listens.
        engine: its engine.
    """

    url: str
    engine: AsyncEngine

    @property
    def threads(self) -> int:
        """Number of threads of this process, except for the pools that are kept."""
        names = [thread.name for thread in threading.enumerate()]
        return sum(not name.startswith(("asyncio_", "AnyIO", "logitship-work")) for name in names)

    @property
    def descriptors(self) -> int:
        """Number of open descriptors of this process, except for the pipes of the grammar checkers, which are kept."""
        checkers = [each for each in gc.get_objects() if type(each) is GrammarChecker]
        return len(os.listdir("/proc/self/fd")) - 2 * sum(checker._process is not None for checker in checkers)

    def unload(self) -> bool:
        """End the sandboxes of all classes. Returns False while there are requests, or a spare sandbox is missing."""
        sandboxes = self.engine._sandboxes
        assert sandboxes is not None
        spares = sandboxes._spares
        return asyncio.run(self.engine.flush_cache()) and len(spares._spares) == spares._count


@pytest.fixture(scope="module")
def served(long_model: LoadedModel) -> Iterator[Served]:
    config = ServerConfig(
        model_path="tiny",
        port=0,
        log_level="error",
        max_num_seqs=16,
        random_seed=0,
        enable_custom_logit_processor=True,
        api_key=("honest", "hostile"),
        shipping_api_key=("hostile-ships",),
    )
    with pytest.MonkeyPatch.context() as patch:
        # Their processes, and the threads that end them, are waited for.
        patch.setattr(compiler, "GrammarChecker", partial(GrammarChecker, idle_timeout=CHECKER_IDLE))
        engine = build_engine(config, long_model)
        with running_server(config, engine) as url:
            yield Served(url, engine)


async def honest(http: httpx.AsyncClient) -> list[int]:
    """Return the tokens of an honest request."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}}
    response = await http.post("/generate", json=body, headers={"Authorization": "Bearer honest"})
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["output_ids"]
    return tokens


async def health(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200


def until(condition: Callable[[], bool], what: Callable[[], Any]) -> None:
    """Wait until something is as it was."""
    end = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < end, what()
        gc.collect()
        time.sleep(0.05)


@pytest.mark.parametrize("name", hostile_clients.ATTACKS)
def test_honest_client_notices_nothing(served: Served, name: str) -> None:
    async def attack(seconds: float) -> None:
        attacker = await hostile_clients.run(name, served.url, "hostile", "hostile-ships", seconds)
        assert not (name in SOUND and "400" in attacker.statuses)
        if not attacker.sent:  # on a busy machine, it makes its bodies for longer than that
            await attack(2 * seconds)

    async def beside() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=LONGEST) as http:
            expected = await honest(http)
            attacking = asyncio.create_task(attack(SECONDS))
            await asyncio.sleep(0)
            while not attacking.done():
                assert await honest(http) == expected
                await health(http)
            await attacking

    until(served.unload, served.engine.stats)
    threads, descriptors = served.threads, served.descriptors
    asyncio.run(beside())
    until(served.unload, served.engine.stats)
    assert (served.engine.stats().running, served.engine.stats().waiting) == (0, 0)
    until(lambda: served.threads <= threads, lambda: [thread.name for thread in threading.enumerate()])
    # A load that was under way when its client left may have put its sandbox into the cache since.
    until(lambda: served.unload() and served.descriptors <= descriptors, open_files)
