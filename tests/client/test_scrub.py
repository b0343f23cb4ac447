from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import logitship
from logitship.client.scrub import MAX_TEXT_LENGTH, known_folders, scrub

SITE_PACKAGES = str(Path(torch.__file__).parent.parent)


def contains_known_folder(text: str) -> bool:
    """Return whether a known folder is in the text, and not only as the prefix of another name."""
    for folder in known_folders():
        at = text.find(folder)
        while at >= 0:
            following = text[at + len(folder) : at + len(folder) + 1]
            if not (following.isalnum() or following in {"_", "-"}) or not following:
                return True
            at = text.find(folder, at + 1)
    return False


def test_known_folders() -> None:
    package = Path(logitship.__file__).parent
    expected = [sys.prefix, sys.base_prefix, SITE_PACKAGES, str(package), str((package / "client").resolve().parent)]
    expected += [os.path.expanduser("~"), os.path.dirname(os.__file__)]
    assert {os.path.realpath(folder) for folder in expected} <= set(known_folders())
    assert all(os.path.isabs(folder) and folder.strip("/") for folder in known_folders())


def test_symlinked_folder_is_known(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    program = "import sys; from logitship.client.scrub import scrub; print(*map(scrub, sys.argv[1:]))"
    ran = subprocess.run(
        [sys.executable, "-c", program, f"{link}/a.py", f"{real}/b.py", f"{tmp_path}/c.py"],
        env={**os.environ, "PYTHONPATH": str(link)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == f"a.py b.py {tmp_path}/c.py\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, 3/4 and a/b", "plain text, 3/4 and a/b"),
        (f"from 'torch' ({torch.__file__})", "from 'torch' (torch/__init__.py)"),
        (f"{SITE_PACKAGES}//torch/x.py", "torch/x.py"),
        (f"[{SITE_PACKAGES!r}, '/elsewhere']", "['…', '/elsewhere']"),
        (f"no such folder: {SITE_PACKAGES}/", "no such folder: …/"),
        (f"{SITE_PACKAGES}.", "…."),
        (f"file://{SITE_PACKAGES}/a\\n{SITE_PACKAGES}/b", "file://a\\nb"),
        (f"{SITE_PACKAGES}2/a", None),
        ("/etc/passwd", "/etc/passwd"),
        ("<object at 0x7f12ab>, <object at 0x5>", "<object at 0x…>, <object at 0x…>"),
        ("pointer 0x00007f12ab34cd56", "pointer 0x…"),
        ("colour 0xff8800, flag 0x1", "colour 0xff8800, flag 0x1"),
        ("a\tb\nc\x1b[31m\r\x9b\ud800", "a\tb\nc\\x1b[31m\\r\\x9b\\ud800"),
        ("", ""),
    ],
)
def test_scrub(text: str, expected: str | None) -> None:
    if expected is None:
        assert not contains_known_folder(scrub(text))
    else:
        assert scrub(text) == expected


def test_removal_cannot_form_another_folder() -> None:
    folder = SITE_PACKAGES
    middle = len(folder) // 2
    assert not contains_known_folder(scrub(f"{folder[:middle]}{folder}/{folder[middle:]}"))
    assert not contains_known_folder(scrub(f"{folder[:1]}{folder}/{folder[1:]}"))


folders = st.sampled_from(known_folders())
pieces = st.one_of(
    folders,
    st.tuples(folders, st.integers(0, 40)).map(lambda cut: cut[0][: cut[1]]),
    st.tuples(folders, st.integers(0, 40)).map(lambda cut: cut[0][cut[1] :]),
    st.sampled_from(["/", "//", ".", "-", " ", "'", "\n", "…", "at 0x", "0x7f0000000000", "\ud800", "\x00"]),
    st.text(max_size=5),
)


@given(st.lists(pieces, max_size=12).map("".join))
def test_no_known_folder_remains(text: str) -> None:
    result = scrub(text)
    assert not contains_known_folder(result)
    assert result.encode().decode() == result
    assert not any(ord(character) < 32 and character not in "\t\n" for character in result)


@given(st.text())
def test_text_without_folders_is_unchanged(text: str) -> None:
    printable = "".join(c for c in text if c not in "/\x7f" and c.isprintable()).replace("0x", "")
    assert scrub(printable) == printable


@pytest.mark.parametrize(
    "piece",
    [
        "/",
        "0",
        "0x",
        "at 0x",
        "at ",
        "\x1b",
        "\ud800",
        "é",
        SITE_PACKAGES,
        SITE_PACKAGES + "/",
        SITE_PACKAGES[:-1],
        "…..",
    ],
)
def test_size_and_time_are_bounded(piece: str) -> None:
    began = time.process_time()
    result = scrub(piece * (20 * MAX_TEXT_LENGTH))
    assert len(result) <= MAX_TEXT_LENGTH
    assert not contains_known_folder(result[:-100])
    # Far more than it needs, and far less than quadratic time in 65,536 characters.
    assert time.process_time() - began < 5


def test_str_subclass_becomes_plain_str() -> None:
    class Text(str):
        __slots__ = ()

        def _fail(self, *args: object) -> str:
            raise KeyboardInterrupt

        __len__ = __getitem__ = encode = __str__ = __format__ = __hash__ = __add__ = _fail  # type: ignore[assignment]

    result = scrub(Text(f"{SITE_PACKAGES}/a"))
    assert type(result) is str
    assert result == "a"
