from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from logitship.sampler.sandbox.kernel import landlock
from tests.helpers.descriptors import no_file_stays_open
from tests.sampler.sandbox.kernel.conftest import Run

ABIS = range(1, landlock.abi() + 1)


def test_this_kernel_has_landlock() -> None:
    assert landlock.abi() >= 1


@pytest.mark.parametrize("abi", ABIS)
def test_rulesets_of_all_abi_versions(abi: int, tmp_path: Path) -> None:
    ruleset = landlock.create_ruleset([tmp_path, tmp_path / "missing"], abi)
    assert not os.get_inheritable(ruleset)
    os.close(ruleset)


@pytest.mark.parametrize("abi", ABIS)
def test_only_listed_directories_can_be_read(run_plan: Run, tmp_path: Path, abi: int) -> None:
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for folder in (shown, hidden):
        folder.mkdir()
        (folder / "file").write_text("text")
    (shown / "way out").symlink_to(hidden / "file")
    paths = [
        str(path) for path in (shown, shown / "file", hidden, hidden / "file", shown / "way out", "/proc/self/maps")
    ]
    outcome = run_plan("look_at_paths", paths, landlock_abi=abi, readable=[str(shown)])
    assert outcome.error == ""
    assert list(outcome.result.values()) == [["file", "way out"], "text", *[errno.EACCES] * 4]


def test_single_file_can_be_listed(run_plan: Run, tmp_path: Path) -> None:
    for name in ("shown", "hidden"):
        (tmp_path / name).write_text("text")
    paths = [str(tmp_path / name) for name in ("shown", "hidden")]
    outcome = run_plan("look_at_paths", paths, readable=paths[:1])
    assert list(outcome.result.values()) == ["text", errno.EACCES]


def test_refused_rule_closes_the_ruleset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(landlock, "_RULE_PATH_BENEATH", 99)
    with no_file_stays_open(), pytest.raises(OSError, match="landlock_add_rule"):
        landlock.create_ruleset([tmp_path], 1)
