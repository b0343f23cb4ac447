"""Registered processors and artifacts of several processes: each has objects of its own on the same folder."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.artifact import Artifact, digest_of
from logitship.client.serialization.processor_string import (
    PYTHON,
    InstalledProcessor,
    PickledProcessor,
    ProcessorString,
    SourceProcessor,
    parse,
    to_text,
)
from logitship.server.processors.registered_processors import NotRegistered
from logitship.server.processors.registration import Upload, sendable
from logitship.server.processors.shared_uploads import ArtifactFiles, SharedArtifacts, SharedRegistrations

DATA = bytes(range(256))
DIGEST = digest_of(DATA)
CAPTURES = SourceProcessor("class A: ...", "A", b"values", "3.1", (Artifact.of(b"shared"), Artifact(DIGEST)))


def source(number: int) -> SourceProcessor:
    return SourceProcessor(f"class A: number = {number}", "A")


def upload(string: ProcessorString, name: str = "A") -> Upload:
    digest = "sha256:" + "0" * 64 if isinstance(string, InstalledProcessor) else string.digest
    return Upload(name, digest, string, "A class.", {"type": "object"})


@pytest.fixture
def registrations(tmp_path: Path) -> Callable[[], SharedRegistrations]:
    """Makes the registry of another process."""
    return lambda: SharedRegistrations(tmp_path / "processors", max_entries=3, max_bytes=10_000)


@pytest.fixture
def artifacts(tmp_path: Path) -> Callable[[], SharedArtifacts]:
    """Makes the store of another process."""
    return lambda: SharedArtifacts(tmp_path / "artifacts", max_bytes=100_000)


@pytest.mark.parametrize(
    "string",
    [
        source(1),
        CAPTURES,
        PickledProcessor(b"pickle", PYTHON, "0.4", params_schema={"type": "object"}, artifacts=(Artifact(DIGEST),)),
        InstalledProcessor("min_p"),
    ],
)
def test_other_processes_find_the_same_code(
    string: ProcessorString, registrations: Callable[[], SharedRegistrations]
) -> None:
    first, second = registrations(), registrations()
    added = first.add(upload(string), "a")
    for found in (second.use_name("A", "a"), second.use_name("A@1", "a"), registrations().find("A", "a")):
        assert found == added
    assert second.find("A", "b") is None


def test_captured_values_survive_as_text() -> None:
    parsed = parse(to_text(sendable(CAPTURES)))
    assert isinstance(parsed, PickledProcessor)
    assert parsed.runnable == CAPTURES
    assert isinstance(parsed.runnable, SourceProcessor)
    assert [each.content and each.content.data for each in parsed.runnable.artifacts] == [b"shared", None]


def test_versions_are_numbered_across_processes(registrations: Callable[[], SharedRegistrations]) -> None:
    first, second = registrations(), registrations()
    assert [each.add(upload(source(i))).version for i, each in enumerate((first, second, first))] == [1, 2, 3]
    assert second.add(upload(source(0))).version == 1
    second.remove("A@3")
    assert first.add(upload(source(3))).version == 4
    assert [each.id for each in second.list_own()] == ["A@1", "A@2", "A@4"]
    newest = second.use_name("A")
    assert newest is not None
    assert newest.version == 4


def test_least_recently_used_registration_of_all_processes_is_evicted(
    registrations: Callable[[], SharedRegistrations], tmp_path: Path
) -> None:
    first, second = registrations(), registrations()
    for number in range(3):
        first.add(upload(source(number)))
    second.use_name("A@1")
    first.use_digest(source(2).digest)
    second.add(upload(source(3)))
    assert [each.version for each in first.list_own()] == [1, 3, 4]
    with pytest.raises(NotRegistered):
        first.use_digest(source(1).digest)
    files = {path.name for path in (tmp_path / "processors").iterdir()}
    assert len(files - {"index", "index.lock"}) == 3


def test_artifacts_of_all_processes(artifacts: Callable[[], SharedArtifacts], tmp_path: Path) -> None:
    first, second = artifacts(), artifacts()
    stored = first.add(DATA, "a")
    assert second.find(DIGEST, "a") == stored
    assert second.find(DIGEST, "b") is None
    second.add(DATA, "b")
    files = ArtifactFiles(tmp_path / "artifacts")
    for store in (first, second, artifacts(), files):
        (found,) = store.resolve([Artifact(DIGEST)], "c")
        assert found.content is not None
        assert found.content.data == DATA
    assert first.remove(DIGEST, "a")
    assert second.find(DIGEST, "a") is None
    assert second.remove(DIGEST, "b")
    assert not list((tmp_path / "artifacts").glob("sha256:*"))
    for without in (artifacts(), files, ArtifactFiles(None)):
        with pytest.raises(ProcessorLoadError, match="is missing"):
            without.resolve([Artifact(DIGEST)])


def test_artifacts_are_evicted_across_processes(artifacts: Callable[[], SharedArtifacts], tmp_path: Path) -> None:
    first, second = artifacts(), artifacts()
    kept = [first.add(bytes([number]) * 10_000).digest for number in range(3)]
    second.resolve([Artifact(kept[0])])
    second.add(b"x" * 30_000)
    assert first.find(kept[1]) is None
    assert first.find(kept[0]) is not None
    assert not (tmp_path / "artifacts" / kept[1]).exists()


def test_files_that_a_cleaner_removed_are_written_again(
    artifacts: Callable[[], SharedArtifacts], registrations: Callable[[], SharedRegistrations], tmp_path: Path
) -> None:
    store, registered = artifacts(), registrations()
    store.add(DATA)
    registered.add(upload(source(1)))
    for path in [*(tmp_path / "artifacts").iterdir(), *(tmp_path / "processors").iterdir()]:
        path.unlink()
    assert registered.use_name("A") is not None
    store.resolve([Artifact(DIGEST)])
    assert artifacts().find(DIGEST) is not None


def test_processes_add_at_the_same_time(tmp_path: Path) -> None:
    """No version is lost, and none is given twice."""
    script = f"""
import sys
from pathlib import Path
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.server.processors.registration import Upload
from logitship.server.processors.shared_uploads import SharedRegistrations
registered = SharedRegistrations(Path({str(tmp_path)!r}), max_entries=1000, max_bytes=1 << 20)
for number in range(50):
    string = SourceProcessor(f"class A: number = {{number}} {{sys.argv[1]}}", "A")
    print(registered.add(Upload("A", string.digest, string)).version)
"""
    outputs: list[str] = []

    def run(name: str) -> None:
        ran = subprocess.run([sys.executable, "-c", script, name], stdout=subprocess.PIPE, text=True, check=True)
        outputs.append(ran.stdout)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(line) for output in outputs for line in output.split()) == list(range(1, 101))
