"""Serialization in several threads at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from logitship import CustomLogitProcessor


class Deep(CustomLogitProcessor):
    """Processor whose syntax tree is slow to build."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        """Add a little."""
        for number in range(3):
            if number:
                logits = logits + (number * (1 + (2 * (3 + number))))
        return logits


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Switch threads often enough that they meet in a parser, and not so often that they do nothing else."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_concurrent_serialization_at_different_depths() -> None:
    expected = Deep.to_str()
    strings: list[str] = []

    def serialize(depth: int) -> None:
        if depth:
            serialize(depth - 1)
        else:
            strings.append(Deep.to_str())

    def repeat(depth: int) -> None:
        for _ in range(5):
            serialize(depth)

    threads = [threading.Thread(target=repeat, args=(20 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert strings == [expected] * 40
