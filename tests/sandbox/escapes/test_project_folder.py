"""A processor cannot see the directory that the server is started from, even if it is in `sys.path`."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SERVER = '''
from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits
from logitship.sampler.sandbox.zygote_process import ZygoteProcess

SOURCE = """
import os
def outcome(attempt, *arguments):
    try:
        return attempt(*arguments)
    except OSError as error:
        return f"error {error.errno}"
def read(path):
    with open(path) as file:
        return file.read()
folder = FOLDER
found = [outcome(os.listdir, folder), outcome(read, folder + "/.env"), outcome(read, ".env"), outcome(os.getcwd)]
raise ValueError(repr(found))
"""

if __name__ == "__main__":
    zygote = ZygoteProcess(
        names="logitship.builtin_processors.sglang_names:SGLANG_NAMES", max_rows=1, memory_limit=1 << 28
    )
    zygote.start()
    zygote.set_up(ModelView(64, frozenset({1}), None))
    limits = SandboxLimits(cpu_time=2.0, step_timeout=1.0, first_step_timeout=1.0, load_timeout=10.0)
    executor = SandboxExecutor(zygote, limits, 1, 64)
    try:
        executor.load(SourceProcessor(SOURCE, "P"))
    except ProcessorLoadError as error:
        print(error)
    executor.close()
'''


@pytest.fixture
def project() -> Iterator[Path]:
    """A world-readable directory with a server's script; the test adds a secret."""
    folder = Path(tempfile.mkdtemp(prefix="project-", dir="/var/tmp"))
    folder.chmod(0o755)
    (folder / "serve.py").write_text(SERVER.replace("FOLDER", repr(str(folder))))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("arguments", "inside"),
    [
        pytest.param(["{}/serve.py"], False, id="a script", marks=pytest.mark.thorough),
        pytest.param(["-m", "serve"], True, id="a module, in the current folder"),
    ],
)
def test_server_directory_is_hidden(arguments: list[str], inside: bool, project: Path) -> None:
    secret = f"SECRET-{secrets.token_hex(16)}"
    (project / ".env").write_text(f"API_KEY={secret}")
    arguments = [each.format(project) for each in arguments]
    path = os.pathsep.join([str(project), str(ROOT / "src")])
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=project if inside else "/usr",
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert secret not in run.stdout
    assert "ValueError: ['error " in run.stdout, run.stderr  # it ran, and could not even list the directory
    assert "serve.py" not in run.stdout
    assert run.stdout.count("error 2'") + run.stdout.count("error 13'") >= 3
