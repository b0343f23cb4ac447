"""A server under the limits of a container: it follows them, refuses what does not fit with a reason, and lives."""

from __future__ import annotations

import re

import pytest

from tests.containers.conftest import Podman
from tests.containers.server_in_container import EXPECTED
from tests.containers.test_protections import ORDINARY_USER

FEW_SEQUENCES = ("--max-num-seqs", "4", "--max-sandboxes", "4")


def test_memory(podman: Podman) -> None:
    """The cache is sized by the container's memory, and a processor that allocates more than there is ends alone."""
    report = podman.serve(*FEW_SEQUENCES, options=(*ORDINARY_USER, "--memory", "1g", "--memory-swap", "1g"))
    assert report["faults"] == EXPECTED
    assert report["alive"], report["log"]


def test_too_little_memory_is_an_error_at_start(podman: Podman) -> None:
    report = podman.serve(*FEW_SEQUENCES, options=(*ORDINARY_USER, "--memory", "450m", "--memory-swap", "450m"))
    assert report["status"] == 1, report["log"]
    found = re.search(r"logitship: 0\.\d\d GiB of memory are free of the 0\.44 GiB that the container", report["log"])
    assert found, report["log"]
    assert re.search(r"at least 0\.\d\d GiB more are needed", report["log"])


@pytest.mark.parametrize("limit", [24, 64, 256])
def test_processes(podman: Podman, limit: int) -> None:
    """With too few, requests are refused with 503, or the server with a reason; it never ends by itself."""
    report = podman.serve(*FEW_SEQUENCES, options=(*ORDINARY_USER, "--pids-limit", str(limit)))
    if report["faults"]:
        assert report["alive"], report["log"]
        others = {name: found for name, found in report["faults"].items() if found != EXPECTED[name]}
        assert all("'type'" in found for found in others.values()), others
        assert limit < 256 or not others
    else:
        assert limit < 256
        assert "logitship: " in report["log"], report["log"]
    assert report["status"] >= 0, report["log"]


def test_full_folder_of_temporary_files(podman: Podman) -> None:
    read_only = ("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:size=4k,notmpcopyup")
    report = podman.serve(*FEW_SEQUENCES, options=(*ORDINARY_USER, *read_only))
    assert report["faults"] == EXPECTED
    assert report["alive"], report["log"]


def test_quota_of_cores(podman: Podman) -> None:
    report = podman.serve(*FEW_SEQUENCES, options=(*ORDINARY_USER, "--cpus", "1"))
    assert report["faults"] == EXPECTED
    assert report["alive"], report["log"]
