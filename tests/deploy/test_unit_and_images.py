"""The systemd unit, the Containerfiles and the compose file."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from logitship.server import cli
from logitship.server.config import ServerConfig
from logitship.server.doctor.doctor_command import TESTED

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "logitship.service").read_text()
DISABLE_LAYERS = (
    *("RestrictNamespaces", "ProtectProc", "ProcSubset", "ProtectHostname", "ProtectKernelTunables", "PrivateUsers"),
    *("MemoryDenyWriteExecute", "PrivateDevices"),
)
"""Settings that take something from the sandboxes or from the server, which the unit explains."""


def settings_of(unit: str) -> list[str]:
    return [line for line in unit.splitlines() if line and line[0] not in "#["]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd-analyze")
def test_unit_is_valid(tmp_path: Path) -> None:
    program = tmp_path / "logitship"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "logitship.service"
    unit.write_text(UNIT.replace("/opt/logitship/bin/logitship", str(program)))
    run = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    rated = subprocess.run(["systemd-analyze", "security", "--offline=true", str(unit)], capture_output=True, text=True)
    exposure = re.search(r"exposure level for logitship.service: ([\d.]+)", rated.stdout)
    assert exposure is not None, rated.stdout + rated.stderr
    assert float(exposure[1]) < 4


def test_unit_keeps_the_layers() -> None:
    names = {line.partition("=")[0] for line in settings_of(UNIT)}
    assert names.isdisjoint(DISABLE_LAYERS)
    for name in DISABLE_LAYERS:
        assert re.search(rf"^# .*\b{name}=", UNIT, re.MULTILINE), f"the unit does not explain why {name} is absent"
    [calls] = [line for line in settings_of(UNIT) if line.startswith("SystemCallFilter=")]
    assert calls.startswith("SystemCallFilter=~")
    assert {"@mount", "@sandbox", "@privileged", "@resources"}.isdisjoint(calls.split())


def test_command_of_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    [start] = [line for line in settings_of(UNIT) if line.startswith("ExecStart=")]
    assert serve(start.split()[1:], monkeypatch).enable_custom_logit_processor
    [stop] = [line for line in settings_of(UNIT) if line.startswith("TimeoutStopSec=")]
    assert int(stop.partition("=")[2]) > ServerConfig(model_path="").shutdown_timeout + 8


def test_command_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DEPLOY / "Containerfile").read_text()
    command = re.search(r"^CMD (\[\"serve.*\])$", text, re.MULTILINE)
    assert command is not None
    monkeypatch.setenv("LOGITSHIP_API_KEY", "key")
    assert serve(re.findall(r'"([^"]*)"', command[1]), monkeypatch).host == "0.0.0.0"
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1000:1000"]


def test_images_are_pinned_to_tested_versions() -> None:
    for engine, versions in TESTED.items():
        text = (DEPLOY / f"{engine.lower()}.Containerfile").read_text()
        assert len(text.splitlines()) == 3
        found = re.search(r"^FROM \S+:v([\d.]+)$", text, re.MULTILINE)
        assert found is not None
        assert found[1] in versions
        assert f'[{engine.lower()}]"' in text
    own = (DEPLOY / "Containerfile").read_text()
    assert re.search(r"^ARG PYTHON=3\.1\d\.\d+-slim-\w+$", own, re.MULTILINE)
    assert "-c /source/constraints.txt" in own


def serve(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    configs: list[ServerConfig] = []
    monkeypatch.setitem(cli._COMMANDS, "serve", lambda config: configs.append(config) or 0)
    assert cli.main(arguments) == 0
    return configs[0]
