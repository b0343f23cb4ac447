"""The escape tests again with an unprivileged server, which has fewer ways to confine shipped code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FILES = ("files", "network", "pickles", "processes", "secrets", "tenants")
NO_CONTROLS = "not test_control"


def test_escapes_as_ordinary_user() -> None:
    """Run in another process, because dropping root is irrevocable."""
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
