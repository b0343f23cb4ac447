"""All of it once more with a server that is no root: it has fewer ways to lock shipped code in, and must do as well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FILES = ("files", "network", "pickles", "processes", "secrets", "tenants")
NO_CONTROLS = "not without and not a_process_of_the_server"


def test_nothing_escapes_from_an_ordinary_user() -> None:
    """In a process of its own: who has given up being root cannot go back."""
    script, *files = (str(HERE / name) for name in ("as_ordinary_user.py", *(f"test_{name}.py" for name in FILES)))
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={HERE}", "-k", NO_CONTROLS]
    run = subprocess.run(
        [sys.executable, script, *options, *files], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    users = re.search(r"user \((\d+), (\d+), (\d+)\), capabilities 0\n", output)
    assert users is not None
    assert {*users.groups()} == ({str(os.geteuid())} if os.geteuid() else {"65534"})
    passed = re.search(r"^(\d+) passed(, \d+ deselected)? in", output, re.MULTILINE)
    assert passed is not None, output
    assert int(passed[1]) > 150
