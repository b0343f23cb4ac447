"""Repeat the tests that failed in the last run, alone and once, if `repeatable.txt` lists all of them.

Used by `scripts/test --all`: `python tests/repeat_failed.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
REPEATABLE = ROOT / "tests" / "repeatable.txt"


def is_repeatable(test: str, listed: list[str]) -> bool:
    """Return whether a line of `repeatable.txt` is the test or a path above it.

    Args:
        test: the id that pytest prints, such as `tests/test_a.py::test_b[c]`.
        listed: the lines.
    """
    return any(test == line or test.startswith((f"{line}/", f"{line}::", f"{line}[")) for line in listed)


def main() -> int:
    """Return the exit status of the whole run."""
    failed = list(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    listed = [line for line in REPEATABLE.read_text().splitlines() if line and not line.startswith("#")]
    if not failed or not all(is_repeatable(test, listed) for test in failed):
        return 1
    print(f"\nRepeating alone, because tests/repeatable.txt lists them: {', '.join(failed)}", flush=True)
    repeated = subprocess.run([sys.executable, "-m", "pytest", "--all", *failed], cwd=ROOT, check=False)
    print(f"All tests passed but for {len(failed)}, which were repeated: {', '.join(failed)}")
    return repeated.returncode


if __name__ == "__main__":
    sys.exit(main())
