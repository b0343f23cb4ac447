from __future__ import annotations

import json
from pathlib import Path

import pytest

from logitship.server.default_processors import DefaultProcessor, read_default_processors


def test_entries(tmp_path: Path) -> None:
    string = {"source": "class A: …", "class_name": "A"}
    bare, text, whole, without = (tmp_path / name for name in ("bare", "text", "whole", "without"))
    without.write_text(json.dumps({"processor": string}))  # and not those of a request
    bare.write_text(json.dumps(string))
    text.write_text(json.dumps(json.dumps(string)))
    whole.write_text(json.dumps({"processor": string, "params": {"by": 2}}))
    found = read_default_processors(
        ["watermark_kgw", ' tree = {"tree": "a=b"} ', f"A=@{bare}", f"B=@{text}", f"C=@{whole}", f"D=@{without}"]
    )
    assert found == (
        DefaultProcessor("watermark_kgw", {"processor": {"name": "watermark_kgw"}, "params": {}}),
        DefaultProcessor("tree", {"processor": {"name": "tree"}, "params": {"tree": "a=b"}}),
        DefaultProcessor("A", {"processor": string, "params": {}}, is_shipped=True),
        DefaultProcessor("B", {"processor": json.dumps(string), "params": {}}, is_shipped=True),
        DefaultProcessor("C", {"processor": string, "params": {"by": 2}}, is_shipped=True),
        DefaultProcessor("D", {"processor": string, "params": {}}, is_shipped=True),
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("", "expected NAME, NAME="),
        ("={}", "expected NAME, NAME="),
        ("tree=", "expected NAME, NAME="),
        ("tree={", "tree: expected NAME, NAME=.*: Expecting property name"),
        ("tree=7", "tree: expected NAME, NAME=.*, got '7'"),
        ("mine=@/does/not/exist", "mine: /does/not/exist cannot be read: No such file or directory"),
    ],
)
def test_malformed_entries(entry: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^default_processor: {message}"):
        read_default_processors([entry])


def test_file_that_is_not_json(tmp_path: Path) -> None:
    file = tmp_path / "class.py"
    file.write_text("class A: …")
    with pytest.raises(ValueError, match=f"^default_processor: mine: {file} is not JSON: "):
        read_default_processors([f"mine=@{file}"])
