from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from logitship.server.runtime.shared_directory import SHARED_DIRECTORY

MAKE = f"""
import os, sys
from logitship.server.runtime.shared_directory import make_shared_directory
make_shared_directory()
print(os.environ["{SHARED_DIRECTORY}"], flush=True)
sys.stdin.read()
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start the first process of an engine. Returns it with its folder."""
    environment = {name: value for name, value in os.environ.items() if name != SHARED_DIRECTORY}
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE],
        env=environment | {"TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folders_of_killed_engines_are_removed(tmp_path: Path) -> None:
    (killed, left), (alive, used) = start(tmp_path), start(tmp_path)
    (left / "artifact").write_text("large")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.exists()
    third, own = start(tmp_path)
    assert {*tmp_path.iterdir()} == {used, own}
    assert own.stat().st_mode & 0o77 == 0
    for process in (alive, third):
        process.communicate("")
    assert not list(tmp_path.iterdir())
