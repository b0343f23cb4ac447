from __future__ import annotations

import dataclasses
import errno
import json
import os
from typing import Any

import pytest

from logitship.sampler.sandbox.kernel import landlock
from logitship.sampler.sandbox.kernel.protections import Protections
from logitship.server import cli
from logitship.server.doctor import host_report
from logitship.server.doctor.host_report import Host, HostLimits, HostReport, make_report, missing_layers, read_host

ALL = Protections(True, 7, ("pid", "net"), jail_root=True, uid_drop=True)
HOST = Host(versions={"Python": "3.12.1", "logitship": "0.1.0"}, kernel="Linux 6.1 x86_64", capabilities=1 << 31)
PLENTY = HostLimits(None, None, 8, None, 8, None, 1 << 40, 1 << 40)


def remedies(host: Host, protections: Protections | None) -> dict[str, str]:
    return {each.layer: each.remedy for each in missing_layers(host, protections)}


def host(**fields: Any) -> Host:
    return dataclasses.replace(HOST, **fields)


def test_nothing_is_missing() -> None:
    assert missing_layers(HOST, ALL) == ()


def test_each_layer_is_named() -> None:
    nothing = Protections(True)
    layers = ["Landlock", "namespaces", "root directory of its own", "change of user"]
    assert list(remedies(HOST, nothing)) == list(remedies(HOST, None)) == layers
    assert all(each.meaning and each.remedy for each in missing_layers(HOST, nothing))


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"landlock_errno": errno.EOPNOTSUPP}, "boot with lsm=landlock"),
        ({"landlock_errno": errno.EPERM}, "the seccomp profile of the container refuses it"),
        ({"landlock_errno": errno.ENOSYS}, "use Linux 5.13 or later"),
        ({"landlock_errno": errno.ENOSYS, "container": "gVisor"}, "gVisor has none"),
    ],
)
def test_remedy_for_landlock(fields: dict[str, Any], remedy: str) -> None:
    assert remedy in remedies(host(**fields), dataclasses.replace(ALL, landlock_abi=0))["Landlock"]


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"is_filtered": True, "user_namespace_errno": errno.EPERM}, "the seccomp profile refuses unshare"),
        ({"sysctls": {"kernel/unprivileged_userns_clone": "0"}}, "sysctl kernel.unprivileged_userns_clone=1"),
        ({"sysctls": {"user/max_user_namespaces": "0"}}, "sysctl user.max_user_namespaces=10000"),
        ({}, "allow user namespaces"),
    ],
)
def test_remedy_for_namespaces(fields: dict[str, Any], remedy: str) -> None:
    found = remedies(host(**fields), Protections(True, 7))
    assert remedy in found["namespaces"]
    assert found["root directory of its own"] == "as for namespaces"


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"sysctls": {"kernel/apparmor_restrict_unprivileged_userns": "1"}}, "an AppArmor profile with userns"),
        ({"uid": 0, "capabilities": 0}, "run as an ordinary user (USER, runAsNonRoot)"),
        ({"uid": 0}, "allow mount, umount2 and pivot_root"),
        ({"uid": 1000, "capabilities": 0, "apparmor": "docker-default (enforce)"}, "instead of docker-default"),
        ({"uid": 1000, "apparmor": "unconfined"}, "allow mount, umount2 and pivot_root"),
    ],
)
def test_remedy_for_the_root_directory(fields: dict[str, Any], remedy: str) -> None:
    found = dataclasses.replace(ALL, jail_root=False)
    assert remedy in remedies(host(**fields), found)["root directory of its own"]


@pytest.mark.parametrize(
    ("fields", "remark"),
    [
        ({"memory": 1e9, "free_memory": 5e8}, "0.47 GiB of memory are free"),
        ({"processes": 64}, "64 processes and threads are allowed"),
        ({"cpu_quota": 1.5}, "1.5 cores' time is allowed"),
        ({"tmp": 5 << 20}, "5 MiB are free in the folder of temporary files"),
    ],
)
def test_low_limits_are_remarked(fields: dict[str, Any], remark: str) -> None:
    [found] = dataclasses.replace(PLENTY, **fields).remarks()
    assert found.startswith(remark)
    assert PLENTY.remarks() == []


def test_report_as_text() -> None:
    protections = dataclasses.replace(ALL, uid_drop=False)
    limits = dataclasses.replace(PLENTY, cpu_quota=2.0, compute_threads=2)
    report = HostReport(HOST, limits, protections, "", missing_layers(HOST, protections))
    assert "versions:        Python 3.12.1, logitship 0.1.0\n" in report.text
    assert "cores:           8, time of 2 of them: 2 threads compute\n" in report.text
    assert f"sandboxes:       {protections.describe()}\n" in report.text
    assert "without change of user: " in report.text
    assert report.text.endswith("OK: shipped processors can be sandboxed here.")
    refused = HostReport(HOST, PLENTY, None, "the kernel has none", ())
    assert "sandboxes:       the kernel has none\n" in refused.text
    assert refused.text.endswith("Shipped processors are refused here.")


def test_report_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_ok"] is True
    assert report["protections"]["landlock_abi"] == landlock.abi()
    assert report["host"]["uid"] == os.geteuid()
    assert report["host"]["kernel"].split()[1] == os.uname().release
    assert report["host"]["landlock_errno"] == (0 if landlock.abi() else report["host"]["landlock_errno"])
    assert {"Python", "logitship", "torch"} <= report["host"]["versions"].keys()
    assert 1 <= report["limits"]["compute_threads"] <= report["limits"]["cores"]
    missing = {each["layer"] for each in report["missing"]}
    assert ("change of user" in missing) != report["protections"]["uid_drop"]


def test_sandboxes_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(host_report, "_try_sandboxes", lambda: (None, "this kernel cannot sandbox shipped code"))
    assert not make_report().is_ok
    assert cli.main(["doctor"]) == 1
    assert "sandboxes:       this kernel cannot sandbox" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "files", "name"),
    [
        ({}, {}, ""),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"/.dockerenv": ""}, "Kubernetes"),
        ({}, {"/.dockerenv": ""}, "Docker"),
        ({}, {"/run/.containerenv": ""}, "podman"),
        ({"container": "lxc"}, {}, "lxc"),
        ({}, {"/proc/version": "Linux version 4.19.0-gvisor #1 SMP"}, "gVisor"),
    ],
)
def test_container_runtime(
    environment: dict[str, str], files: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_report, "_read", lambda file: files.get(str(file), ""))
    monkeypatch.setattr(host_report.os.path, "exists", lambda path: str(path) in files)
    assert host_report._container(environment) == name


def test_url_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "sglang"])
    assert ended.value.code == 2
    assert "which sglang server? Give its URL" in capsys.readouterr().err


def test_host_of_this_process() -> None:
    found = read_host()
    assert found.versions["Python"]
    assert found.capabilities >= 0
    assert found.user_namespace_errno >= 0
