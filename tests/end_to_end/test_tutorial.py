"""The tutorial, followed like a reader: in an empty folder, file by file and command by command."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
IN_THE_TUTORIAL = "http://127.0.0.1:30000"
BLOCK = re.compile(r"^```(?P<language>\w+)(?: (?P<word>[^\n]+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (?P<command>.*)\n(?P<output>(?:(?!\$ ).*\n)*)", re.MULTILINE)


class Reader:
    """Follows the page.

    Args:
        folder: an empty folder.
        is_shown: returns whether the text on the page matches an output.
    """

    def __init__(self, folder: Path, is_shown: Callable[[str, str], bool]) -> None:
        self.folder = folder
        self._is_shown = is_shown
        self.servers: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as unused:
            self._port = unused.getsockname()[1]
        commands = Path(sys.executable).parent  # `python` and `logitship`, as in the activated environment
        self._environment = os.environ | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
        self._environment["PYTHONIOENCODING"] = "utf-8"

    def follow(self, language: str, word: str, text: str) -> None:
        """Execute a block of the page."""
        if (language, word) == ("bash", "no-run"):
            return  # installation; `tests/test_documentation.py` lists these blocks
        if language == "python":
            self._save(word.removeprefix('title="').removesuffix('"'), text)
        elif (language, word) == ("console", "background"):
            self._start(text.removeprefix("$ ").strip())
        elif (language, word) == ("console", ""):
            for found in COMMAND.finditer(text):
                self._run(found["command"], found["output"])
        else:
            raise AssertionError(f"the tutorial has a block of an unknown kind: ```{language} {word}")

    def stop(self) -> None:
        """End the servers."""
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait(timeout=60)

    def _save(self, name: str, text: str) -> None:
        assert re.fullmatch(r"\w+\.py", name), name
        (self.folder / name).write_text(text.replace(IN_THE_TUTORIAL, f"http://127.0.0.1:{self._port}"))

    def _start(self, command: str) -> None:
        with (self.folder / "server.log").open("wb") as log:
            server = subprocess.Popen(
                [*command.split(), "--port", str(self._port)],
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.servers.append(server)
        while server.poll() is None and not self._is_up():
            time.sleep(0.2)
        assert server.poll() is None, (self.folder / "server.log").read_text()

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._port}/health").is_success
        except httpx.ConnectError:
            return False

    def _run(self, command: str, shown: str) -> None:
        # A file may be saved twice within a second, and Python would then run the bytecode of the first version.
        environment = self._environment | {"PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=400
        )
        printed = done.stdout + done.stderr
        assert done.returncode == 0, printed
        assert self._is_shown(shown, printed), f"$ {command}\n{printed}\nis not\n\n{shown}"


@pytest.fixture
def reader(tmp_path: Path, is_shown: Callable[[str, str], bool]) -> Iterator[Reader]:
    reader = Reader(tmp_path, is_shown)
    yield reader
    reader.stop()


@pytest.mark.timeout(900)
def test_tutorial(reader: Reader) -> None:
    for block in BLOCK.finditer(TUTORIAL.read_text()):
        reader.follow(block["language"], block["word"] or "", block["text"])
    assert reader.servers
