"""Only tests that `repeatable.txt` lists may be repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import repeat_failed

LISTED = ["tests/a", "tests/b.py", "tests/c.py::test_one"]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/a/test_x.py::test_y", True),
        ("tests/ab/test_x.py::test_y", False),
        ("tests/b.py::test_y[1]", True),
        ("tests/c.py::test_one", True),
        ("tests/c.py::test_one[2]", True),
        ("tests/c.py::test_one_more", False),
    ],
)
def test_a_line_stands_for_all_tests_below_it(test: str, expected: bool) -> None:
    assert repeat_failed.is_repeatable(test, LISTED) is expected


@pytest.mark.parametrize(
    ("failed", "is_repeated"),
    [(["tests/a/t.py::test"], True), (["tests/a/t.py::test", "tests/d.py::test"], False), ([], False)],
)
def test_nothing_is_repeated_if_another_test_failed(
    failed: list[str],
    is_repeated: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    (tmp_path / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
    (tmp_path / "listed").write_text("# a comment\n" + "\n".join(LISTED))
    monkeypatch.setattr(repeat_failed, "LAST_FAILED", tmp_path / "lastfailed")
    monkeypatch.setattr(repeat_failed, "REPEATABLE", tmp_path / "listed")
    monkeypatch.setattr(subprocess, "run", run)
    assert repeat_failed.main() == (not is_repeated)
    assert commands == [[sys.executable, "-m", "pytest", "--all", *failed]] * is_repeated
    assert all((test in capsys.readouterr().out) for test in failed[:1] if is_repeated)


def test_listed_paths_exist() -> None:
    lines = repeat_failed.REPEATABLE.read_text().splitlines()
    paths = [line.split("::")[0] for line in lines if line and line[0] != "#"]
    assert paths
    assert all((repeat_failed.ROOT / path).exists() for path in paths)
