from __future__ import annotations

import os
from pathlib import Path

from logitship.server.dev.watching import wait_for_change


def test_returns_when_a_file_is_replaced(tmp_path: Path) -> None:
    """As editors do that write a new file and rename it."""
    path = tmp_path / "mine.py"
    path.write_text("before")
    asked: list[bool] = []

    def has_changed() -> bool:
        if not asked:  # the watch runs: at its first timeout
            (tmp_path / "new").write_text("after")
            os.replace(tmp_path / "new", path)
        asked.append(path.read_text() == "after" and len(asked) > 0)
        return asked[-1]

    wait_for_change([path], has_changed)
    assert asked == [False, True]
