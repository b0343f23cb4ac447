from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from logitship.server.runtime import ranks
from logitship.server.runtime.ranks import check_ranks


def meet(versions: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let ranks with these versions meet, of which the last never comes if it has none. Return their errors."""
    store = HashStore()
    local = threading.local()
    monkeypatch.setattr(ranks, "version", lambda name: local.version)
    errors: list[str] = []

    def start(rank: int) -> None:
        local.version = versions[rank]
        try:
            check_ranks(store, rank, range(len(versions)), timedelta(seconds=30 if all(versions) else 0.2), "SGLang")
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=start, args=[rank]) for rank, each in enumerate(versions) if each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_ranks_that_all_run_the_plugin_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meet(["1.0", "1.0", "1.0"], monkeypatch) == []


def test_no_rank_starts_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without the plugin would unpickle processors, and would not call `share`."""
    errors = meet(["1.0", "1.0", ""], monkeypatch)
    assert len(errors) == 2
    assert all("does not run in ranks [2]" in error for error in errors)


def test_no_rank_starts_with_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = sorted(meet(["1.0", "1.1"], monkeypatch))
    assert "is 1.0 in rank 0, and 1.1 in rank 1" in errors[0]
    assert "is 1.1 in rank 1, and 1.0 in rank 0" in errors[1]
