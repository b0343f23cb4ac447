from __future__ import annotations

from pathlib import Path

import pytest

from logitship.builtin_processors import WatermarkKey


def test_file_is_read_without_white_space(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b" a secret of the operator \n")
    assert WatermarkKey.read(str(file)) == WatermarkKey(b"a secret of the operator")


def test_unusable_files(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ValueError, match=f"^watermark_key_file: {file} cannot be read: No such file or directory$"):
        WatermarkKey.read(str(file))
    file.write_bytes(b"0123456789abcde\n")
    with pytest.raises(
        ValueError, match=f"^watermark_key_file: {file}: a watermark key has at least 16 bytes, not 15$"
    ):
        WatermarkKey.read(str(file))


def test_secret_is_not_shown() -> None:
    assert "operator" not in repr(WatermarkKey(b"a secret of the operator"))


def test_what_is_derived_depends_on_the_secret_and_the_purpose() -> None:
    keys = [WatermarkKey(b"a secret of the operator"), WatermarkKey(b"a secret of the operators")]
    derived = [
        number
        for key in keys
        for number in (key.hashing_key, key.sampling_table_seed, *key.synthid_keys(30), key.integer("other", b"1"))
    ]
    assert len({*derived}) == len(derived)
    assert keys[0].synthid_keys(30)[:5] == keys[0].synthid_keys(5)
    assert all(0 <= number < 2**62 for number in derived)
    assert WatermarkKey(b"a secret of the operator").hashing_key == keys[0].hashing_key
