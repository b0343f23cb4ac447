"""The command `logitship dev`: one run of it from start to end, and its arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from logitship.server import cli
from logitship.server.dev import dev_command, session, watching
from logitship.server.model.model_loader import LoadedModel
from logitship.server.offline import llm as llm_module

COMMAND = "import sys; from logitship.server.cli import main; sys.exit(main())"
FILE = """\
from logitship import CustomLogitProcessor


class Mine(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        value = 40
        {}
        return logits
"""


class Dev:
    """A running `logitship dev`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "dev", *arguments],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONBREAKPOINT": ""},
        )

    def read_until(self, text: str) -> str:
        """Return what it prints, up to and including a text."""
        assert self.process.stdout is not None
        printed = b""
        while not printed.endswith(text.encode()):
            byte = self.process.stdout.read(1)
            assert byte, printed.decode()
            printed += byte
        return printed.decode()

    def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_saves_breakpoints_and_a_loop_that_never_ends(tmp_path: Path, model_folder: Path) -> None:
    author = tmp_path / "author"
    author.mkdir()
    path = author / "mine.py"
    path.write_text(FILE.format("print('first')"))
    # Not from the author's folder: the debugger has to find the file.
    dev = Dev(tmp_path, "author/mine.py", "--model-path", str(model_folder), "--max-tokens", "1", "--completion")
    try:
        start = dev.read_until("(Ctrl-C ends)\n")
        assert "processor_isolation is none" in start
        assert "\nfirst\n" in start
        assert "Mine: 1 steps" in start

        path.write_text(FILE.format("breakpoint()"))
        stopped = dev.read_until("(Pdb) ")
        assert f"> {path}(" in stopped
        dev.type("p value + 2")
        assert "42\n" in dev.read_until("(Pdb) ")
        dev.type("l")
        assert "class Mine" in dev.read_until("(Pdb) ")
        dev.type("c")
        assert "Mine: 1 steps" in dev.read_until("(Ctrl-C ends)\n")

        # On one line: the signal may come before `print` has returned.
        path.write_text(FILE.format("print('looping', flush=True); all(True for _ in iter(int, 1))"))
        dev.read_until("looping\n")
        dev.process.send_signal(signal.SIGINT)
        dev.read_until("interrupted at mine.py:7\n")
        assert dev.process.wait(60) == 130
    finally:
        dev.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded_model: LoadedModel) -> Path:
    """The author's folder, with the tiny model instead of any other."""
    from logitship.server.engine import build

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(build, "load_model", lambda config: loaded_model)
    (tmp_path / "mine.py").write_text(FILE.format("print('called')"))
    return tmp_path


ONCE = ["--once", "--completion", "--max-tokens", "2"]


def test_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dev", "mine.py", *ONCE]) == 0
    assert capfd.readouterr().out.count("called") == 2
    (folder / "mine.py").write_text(FILE.format("1 / 0"))
    assert cli.main(["dev", "mine.py:Mine", *ONCE]) == 1
    assert "    1 / 0\nZeroDivisionError: division by zero" in capfd.readouterr().out


def test_breakpoint_without_anyone_to_ask(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine.py").write_text(FILE.format("breakpoint()"))
    monkeypatch.setattr(sys, "stdin", Path("/dev/null").open())  # noqa: SIM115  # closed with the test
    assert cli.main(["dev", "mine.py", *ONCE]) == 1
    sys.stdin.close()
    assert capfd.readouterr().out.endswith("left in the debugger\n")


def test_ctrl_c_while_waiting_ends_quietly(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching, "wait_for_change", interrupted)
    before = sys.breakpointhook
    assert cli.main(["dev", "mine.py", *ONCE[1:]]) == 0
    assert sys.breakpointhook is before
    printed = capfd.readouterr()
    assert "waiting for a change of mine.py" in printed.out
    assert printed.err == ""


def test_ctrl_c_before_the_only_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.DevSession, "run", interrupted)
    assert cli.main(["dev", "mine.py", *ONCE]) == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.py"], "there is no file 'absent.py'"),
        (["mine"], "mine: must be a Python file, file.py or file.py:Class"),
        (["mine.py", "--params", "{"], "params: '{' is not JSON"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    folder: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(llm_module, "LLM")
    assert cli.main(["dev", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"logitship dev: {message}")


def test_options_reach_the_session(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[session.DevOptions] = []

    class Session:
        def __init__(self, llm: object, file: object, options: session.DevOptions, write: object) -> None:
            seen.append(options)

        def run(self) -> bool:
            return True

    monkeypatch.setattr(session, "DevSession", Session)
    arguments = ["--prompt", "a", "--prompt", "b", "--params", '{"x": 1}', "--max-tokens", "5", "--temperature", "0.5"]
    arguments += ["--seed", "9", "--completion", "--trace", "tables", "--once"]
    assert cli.main(["dev", "mine.py", *arguments]) == dev_command.OK
    assert seen == [
        session.DevOptions(
            prompts=["a", "b"],
            params='{"x": 1}',
            max_tokens=5,
            temperature=0.5,
            seed=9,
            is_chat=False,
            trace="tables",
        )
    ]
