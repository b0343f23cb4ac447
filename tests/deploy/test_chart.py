"""The Helm chart: rendered by Helm, valid for Kubernetes, and with commands that the servers accept."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logitship.server import cli
from logitship.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/chart"
DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
ENGINES = ("logitship", "sglang", "vllm")
KINDS = ["ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"]
ALL_OPTIONS: dict[str, Any] = {
    "keysSecret": "keys",
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "hostUsers": False,
    "processors": {"allowedDigests": [DIGEST], "blockedDigests": [OTHER]},
    "extraEnv": [{"name": "HF_TOKEN", "value": "x"}],
    "modelCache": {"existingClaim": "models"},
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "imagePullSecrets": [{"name": "registry"}],
    "podAnnotations": {"note": "x"},
    "replicaCount": 3,
}

Render = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def helm() -> Path:
    """A Python interpreter with Helm's library."""
    cache = Path(os.environ.get("LOGITSHIP_PEER_CACHE", Path.home() / ".cache" / "logitship-peers"))
    cache.mkdir(parents=True, exist_ok=True)
    script = ROOT / "tests/peers/helm.sh"
    subprocess.run(["flock", str(cache / "helm.lock"), str(script), str(cache / "helm")], check=True)
    return cache / "helm/bin/python"


@pytest.fixture(scope="session")
def render(helm: Path) -> Render:
    """A function that renders the chart for an engine with some values, and returns the documents by kind."""

    def run(engine: str, **values: Any) -> dict[str, Any]:
        values = {"keysSecret": "keys"} | values
        files = [] if engine == "logitship" else [str(CHART / f"values-{engine}.yaml")]
        script = str(Path(__file__).with_name("render_chart.py"))
        environment = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(helm), script, str(CHART), *files],
            input=json.dumps(values),
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        documents = json.loads(done.stdout)
        found = {document["kind"]: document for document in documents}
        assert len(found) == len(documents)
        return found

    return run


def pod_of(documents: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = documents["Deployment"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("engine", ENGINES)
def test_defaults_are_restricted(render: Render, engine: str) -> None:
    """As Kubernetes' restricted pod security standard demands, and with a root directory that is read-only."""
    documents = render(engine)
    assert sorted(documents) == KINDS
    pod = pod_of(documents)
    [server] = pod["containers"]
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod)
    assert server["resources"]["limits"]["memory"] == server["resources"]["requests"]["memory"]
    written = {mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"/tmp", "/dev/shm", "/models"}
    assert [port["name"] for port in server["ports"]] == ["http"]


@pytest.mark.parametrize("engine", ENGINES)
def test_all_options(render: Render, engine: str) -> None:
    documents = render(engine, **ALL_OPTIONS)
    assert sorted(documents) == sorted([*KINDS, "ServiceMonitor"])
    pod = pod_of(documents)
    assert pod["hostUsers"] is False
    assert documents["Deployment"]["spec"]["replicas"] == 3
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]
    environment = pod["containers"][0]["env"]
    assert {"name": "HF_TOKEN", "value": "x"} in environment
    secret = [each["valueFrom"]["secretKeyRef"] for each in environment if "valueFrom" in each]
    assert {"name": "keys", "key": "api-keys", "optional": False} in secret
    assert {each["name"] for each in secret} == {"keys"}
    assert DIGEST in documents["ConfigMap"]["data"]["allowed-digests"].splitlines()
    assert OTHER in documents["ConfigMap"]["data"]["blocked-digests"].splitlines()
    words = json.dumps(pod["containers"])
    assert "/etc/logitship/allowed-digests" in words


def test_command_is_one_that_logitship_accepts(render: Render, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configs: list[ServerConfig] = []
    monkeypatch.setitem(cli._COMMANDS, "serve", lambda config: configs.append(config) or 0)
    monkeypatch.setenv("LOGITSHIP_API_KEY", "key")
    for options in ({}, ALL_OPTIONS, {"keysSecret": "", "allowAnonymousCode": True}):
        if not options.get("keysSecret", True):
            monkeypatch.delenv("LOGITSHIP_API_KEY")
        documents = render("logitship", **options)
        program, *arguments = pod_of(documents)["containers"][0]["command"]
        assert program == "logitship"
        for name, text in documents["ConfigMap"]["data"].items():
            (tmp_path / name).write_text(text)
        assert cli.main([each.replace("/etc/logitship", str(tmp_path)) for each in arguments]) == 0
    default, full, anonymous = configs
    assert default.enable_custom_logit_processor
    assert default.host == "0.0.0.0"
    assert "demo.llm.svc" in default.allowed_host
    assert default.allow_processor is None
    assert full.allow_processor is not None
    assert anonymous.api_key == ()


def test_shipping_can_be_off(render: Render) -> None:
    for engine in ENGINES:
        words = json.dumps(pod_of(render(engine, processors={"shipping": False})))
        assert "--enable-custom-logit-processor" not in words
    assert '{"name": "LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR", "value": "0"}' in words


def test_grace_period_is_longer_than_the_drain(render: Render) -> None:
    pod = pod_of(render("logitship"))
    pause = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > ServerConfig(model_path="").shutdown_timeout + 8 + pause


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ('{"engine": "x", "keysSecret": "keys"}', "engine must be logitship, sglang or vllm"),
        ("{}", "clients may ship code, and none needs a key: set keysSecret, or allowAnonymousCode: true"),
    ],
)
def test_mistakes_are_refused(helm: Path, values: str, message: str) -> None:
    script = str(Path(__file__).with_name("render_chart.py"))
    run = subprocess.run([str(helm), script, str(CHART)], input=values, capture_output=True, text=True)
    assert run.returncode != 0
    assert message in run.stderr
