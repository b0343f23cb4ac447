from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from logitship.server.blocked_processors import CHECK_INTERVAL, BlockedProcessors
from logitship.server.refusals import StartError

A, B, C = ("sha256:" + digit * 64 for digit in "abc")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "blocked"
    path.write_text(f"# hostile\n{A}\n")
    return path


def test_file_is_read_again_when_it_changes(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = BlockedProcessors(str(file))
    assert blocked.digests == {A}
    assert blocked.refresh() == frozenset()
    file.write_text(f"{A}\n{B}  # seen on Monday\n{C}\n")
    with caplog.at_level(logging.WARNING):
        assert blocked.refresh() == {B, C}
    assert blocked.digests == {A, B, C}
    assert f"processor {B} is blocked" in caplog.text
    file.write_text(f"{C}\n")
    with caplog.at_level(logging.WARNING):
        assert blocked.refresh() == frozenset()
    assert blocked.digests == {C}
    assert f"processor {A} is not blocked any more" in caplog.text


def test_file_of_the_same_size_that_takes_its_place(file: Path) -> None:
    blocked = BlockedProcessors(str(file))
    status = file.stat()
    other = file.with_name("other")
    other.write_text(file.read_text().replace(A, B))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, file)
    assert blocked.refresh() == {B}


@pytest.mark.parametrize("text", [f"{B}\nnonsense\n", None, "\udcff"])
def test_what_is_blocked_stays_blocked(text: str | None, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = BlockedProcessors(str(file))
    if text is None:
        file.unlink()
    else:
        file.write_text(text, errors="surrogateescape")
    assert blocked.refresh() == frozenset()
    assert blocked.digests == {A}
    assert "blocked_digests: " in caplog.text
    assert "what was blocked before stays blocked" in caplog.text
    caplog.clear()
    assert blocked.refresh() == frozenset()
    assert not caplog.text  # once
    file.write_text(f"{B}\n")
    assert blocked.refresh() == {B}


def test_errors_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"blocked_digests: .*nowhere cannot be read"):
        BlockedProcessors(str(tmp_path / "nowhere"))
    (tmp_path / "bad").write_text("sha256:1\n")
    with pytest.raises(ValueError, match=r"blocked_digests: .*bad, line 1: 'sha256:1' is not"):
        BlockedProcessors(str(tmp_path / "bad"))


def test_changes_are_seen_while_watching(file: Path) -> None:
    blocked = BlockedProcessors(str(file))
    seen: list[tuple[frozenset[str], frozenset[str]]] = []
    changed = threading.Event()

    def on_blocked(added: frozenset[str]) -> None:
        seen.append((added, blocked.digests))
        changed.set()

    blocked.watch(on_blocked)
    file.write_text(f"{A}\n{B}\n")
    assert changed.wait(50 * CHECK_INTERVAL)
    blocked.close()
    blocked.close()
    assert seen == [({B}, {A, B})]
    file.write_text(f"{C}\n")
    assert not any(thread.name == "logitship-blocked-digests" for thread in threading.enumerate())


def test_watching_goes_on_after_an_error(file: Path) -> None:
    blocked = BlockedProcessors(str(file))
    failed, worked = threading.Event(), threading.Event()

    def on_blocked(added: frozenset[str]) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("no sandbox can be killed now")
        worked.set()

    blocked.watch(on_blocked)
    file.write_text(f"{A}\n{B}\n")
    assert failed.wait(50 * CHECK_INTERVAL)
    file.write_text(f"{A}\n{B}\n{C}\n")
    assert worked.wait(50 * CHECK_INTERVAL)
    blocked.close()


def test_no_thread(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    blocked = BlockedProcessors(str(file))
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(StartError, match="no thread can be started that reads --blocked-digests"):
        blocked.watch(lambda _: None)
