from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Run = Callable[..., SimpleNamespace]


@pytest.fixture
def library(open_folder: Path) -> Path:
    """A directory with a file, a subdirectory, and links; and beside it, what is not to be seen."""
    folder = open_folder / "library"
    (folder / "package").mkdir(parents=True)
    (folder / "package/file").write_text("text")
    (folder / "inside").symlink_to(folder / "package/file")
    (folder / "outside").symlink_to(open_folder / "secret")
    (open_folder / "secret").write_text("secret")
    (open_folder / "link").symlink_to(folder)
    return folder


def jailed(run: Run, attempt: str, argument: Any, library: Path, **plan: Any) -> SimpleNamespace:
    return run(attempt, argument, where="jailed", namespaces=True, jail_root=True, readable=[str(library)], **plan)


def test_there_is_nothing_but_the_libraries_and_a_null_device(run_plan: Run, nobody: bool, library: Path) -> None:
    paths = ["/dev", "/proc", "/etc/passwd", "/sys", str(library.parent), str(library), "/dev/null"]
    outcome = jailed(run_plan, "look_at_paths", paths, library, nobody=nobody)
    assert outcome.jailed
    assert outcome.result == {
        "/dev": ["null"],
        "/proc": errno.ENOENT,
        "/etc/passwd": errno.ENOENT,
        "/sys": errno.ENOENT,
        str(library.parent): ["library"],
        str(library): ["inside", "outside", "package"],
        "/dev/null": "",
    }


def test_links_lead_where_they_did_if_that_is_there(run_plan: Run, nobody: bool, library: Path) -> None:
    paths = [str(library / name) for name in ("inside", "outside")]
    outcome = jailed(run_plan, "look_at_paths", paths, library, nobody=nobody)
    assert list(outcome.result.values()) == ["text", errno.ENOENT]


def test_a_directory_is_there_at_its_path_as_written_and_at_its_real_one(run_plan: Run, library: Path) -> None:
    link = library.parent / "link"
    paths = [str(folder / "package/file") for folder in (link, library)]
    outcome = jailed(run_plan, "look_at_paths", paths, link)
    assert list(outcome.result.values()) == ["text", "text"]


def test_nothing_can_be_written(run_plan: Run, nobody: bool, library: Path) -> None:
    library.chmod(0o777)
    paths = ["/", "/dev", str(library.parent), str(library), "/usr/lib"]
    outcome = jailed(run_plan, "write_to_paths", paths, library, nobody=nobody)
    assert set(outcome.result.values()) == {errno.EROFS}
    assert not (library / "written").exists()


def test_nothing_can_be_written_on_a_kernel_without_mount_setattr(run_plan: Run, nobody: bool, library: Path) -> None:
    library.chmod(0o777)
    plan = {"nobody": nobody, "deny": {"mount_setattr": errno.ENOSYS}}
    outcome = jailed(run_plan, "write_to_paths", ["/", str(library), "/usr/lib"], library, **plan)
    assert outcome.jailed
    assert set(outcome.result.values()) == {errno.EROFS}


def test_imports_work(run_plan: Run, library: Path) -> None:
    names = ["wave", "sqlite3", "sympy"]
    assert jailed(run_plan, "import_modules", names, library).result == names


def test_a_library_below_a_private_folder_is_reached_by_another_user(run_plan: Run, tmp_path: Path) -> None:
    private = tmp_path / "private"
    (private / "library").mkdir(parents=True)
    (private / "library/file").write_text("text")
    private.chmod(0o700)
    path = str(private / "library/file")
    outcome = jailed(run_plan, "as_another_user", path, private / "library")
    # Who is not root cannot become another user, and is the owner still.
    assert outcome.result == "text"


def test_without_a_private_root_another_user_does_not_reach_it(run_plan: Run, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "file").write_text("text")
    outcome = run_plan("as_another_user", str(private / "file"), where="jailed", namespaces=True)
    assert outcome.result == (errno.EACCES if os.geteuid() == 0 else "text")


@pytest.mark.parametrize("call", ["mount", "mount_setattr", "pivot_root", "unshare"])
def test_where_the_kernel_refuses_the_old_root_is_untouched(
    run_plan: Run, nobody: bool, library: Path, call: str
) -> None:
    plan = {"nobody": nobody, "jail_root": True, "where": "jailed", "readable": [str(library)]}
    outcome = run_plan("root_and_mounts", **plan, namespaces=call != "unshare", deny={call: errno.EPERM})
    assert not outcome.jailed
    names, _, mounts = run_plan("root_and_mounts", where="plain").result
    assert outcome.result == [names, "/", mounts]


def test_the_mounts_of_the_machine_are_not_meant(run_plan: Run, library: Path) -> None:
    """Even for root, and in the mount namespace of all."""
    before = Path("/proc/self/mountinfo").read_text()
    plan = {"where": "jailed", "jail_root": True, "readable": [str(library)]}
    outcome = run_plan("look_at_paths", ["/etc/passwd"], **plan)
    assert outcome.jailed == (outcome.result == {"/etc/passwd": errno.ENOENT})
    assert outcome.jailed == (os.geteuid() == 0)
    assert Path("/proc/self/mountinfo").read_text() == before
