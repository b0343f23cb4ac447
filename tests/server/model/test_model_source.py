from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from huggingface_hub import constants

from logitship.server.model import model_source
from logitship.server.model.model_source import ModelLoadError, find_device, find_model


class Hub(BaseHTTPRequestHandler):
    """A hub without models, which counts the requests."""

    paths: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:  # http.server's
        self.paths.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that were asked for."""
    Hub.paths = []
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        use_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield Hub.paths
        server.shutdown()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(model_source, "hf_hub_url", lambda name, file: f"{url}/{name}/resolve/main/{file}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ModelLoadError, match=f"is a file: --model-path takes a model's folder, such as '{tmp_path}'"):
        find_model(str(tmp_path / "config.json"), False)


def test_name_that_the_hub_does_not_know(hub: list[str]) -> None:
    with pytest.raises(ModelLoadError, match="no such folder, and no such name on the hub"):
        find_model("nobody/nothing", False)
    assert len(hub) == 1


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(ModelLoadError, match=r"no such folder, and http://127\.0\.0\.1:1 cannot be reached"):
        find_model("nobody/nothing", False)


def test_impossible_name() -> None:
    with pytest.raises(ModelLoadError, match="cannot be a hub name either"):
        find_model("a/b/c", False)


def test_devices() -> None:
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(ModelLoadError, match=r"^cannot use --device gpu: .* \(usable here: auto, cpu"):
        find_device("gpu")
    with pytest.raises(ModelLoadError, match=r"^cannot use --device cuda:99: .* \(usable here: auto, cpu"):
        find_device("cuda:99")
