from __future__ import annotations

from pathlib import Path

import pytest

from logitship.server.allowed_processors import read_allowed_digests

DIGESTS = ["sha256:" + digit * 64 for digit in "ab"]


def test_digests_with_blank_lines_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "allowed"
    file.write_text(f"# allowed\n\n{DIGESTS[0]}\n  {DIGESTS[1]}  # what it does\r\n   # end\n{DIGESTS[0]}")
    assert read_allowed_digests(str(file)) == set(DIGESTS)


@pytest.mark.parametrize("text", ["", "\n", "# none\n", "\ufeff"])
def test_empty_file_allows_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "allowed").write_text(text, encoding="utf-8")
    assert read_allowed_digests(str(tmp_path / "allowed")) == frozenset()


@pytest.mark.parametrize(
    "line",
    [
        "a" * 64,
        "sha256:" + "a" * 63,
        "sha256:" + "a" * 65,
        "sha256:" + "A" * 64,
        "sha512:" + "a" * 64,
        "Mine " + DIGESTS[0],
        f"{DIGESTS[0]} {DIGESTS[1]}",
        f"{DIGESTS[0]},",
    ],
)
def test_invalid_line_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "allowed"
    file.write_text(f"{DIGESTS[0]}\n\n{line}\n{DIGESTS[1]}\n")
    with pytest.raises(ValueError, match=r"allow_processor: .*allowed, line 3: '.*' is not 'sha256:'"):
        read_allowed_digests(str(file))


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "binary"):
        with pytest.raises(ValueError, match=rf"allow_processor: {path} cannot be read"):
            read_allowed_digests(str(path))
