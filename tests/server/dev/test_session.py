"""Runs of `logitship dev` on the tiny model, whose tokens are single bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

HEAD = "import torch\nfrom logitship import CustomLogitProcessor\n\n\n"


def source(body: str, head: str = HEAD) -> str:
    """Return a file with a class `Mine` that runs `body` in each call."""
    indented = "".join(f"        {line}\n" for line in body.splitlines())
    signature = "    def __call__(self, logits, custom_param_list=None):\n"
    return f"{head}class Mine(CustomLogitProcessor):\n{signature}{indented}        return logits\n"


MakeTerminal = Callable[..., Any]


def forced(letter: str) -> str:
    """Return the body of a processor that forces a letter."""
    return (
        f"token = custom_param_list[0]['__req__'].tokenizer.convert_tokens_to_ids({letter!r})\n"
        "logits[:] = -torch.inf\nlogits[:, token] = 0.0"
    )


def test_answer_and_prints(folder: Path, make_terminal: MakeTerminal, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(source(forced("A") + "\nprint('seen', len(custom_param_list))"))
    is_answered, text = make_terminal().run()
    assert is_answered
    lines = text.splitlines()
    assert lines[0] == "AAA"
    assert lines[2].startswith("Mine: 3 steps, ")
    assert lines[2].endswith("ended by --max-tokens")
    assert capfd.readouterr().out == "seen 1\n" * 3


def test_prompts_are_rows_of_one_batch(
    folder: Path, make_terminal: MakeTerminal, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.py").write_text(source("print(len(custom_param_list))"))
    is_answered, text = make_terminal(prompts=["one", "two"]).run()
    assert is_answered
    assert [line for line in text.splitlines() if line.startswith("prompt")] == ["prompt: one", "prompt: two"]
    assert "2" in capfd.readouterr().out.splitlines()


@pytest.mark.parametrize(("is_chat", "prompt"), [(True, "user: hi\nassistant: "), (False, "hi")])
def test_chat_template(
    is_chat: bool, prompt: str, folder: Path, make_terminal: MakeTerminal, capfd: pytest.CaptureFixture[str]
) -> None:
    request = "custom_param_list[0]['__req__']"
    (folder / "mine.py").write_text(source(f"print([{request}.tokenizer.decode({request}.origin_input_ids)])"))
    assert make_terminal(is_chat=is_chat).run()[0]
    assert set(capfd.readouterr().out.splitlines()) == {f"[{prompt!r}]"}


def test_every_save_runs_the_class(folder: Path, make_terminal: MakeTerminal) -> None:
    path = folder / "mine.py"
    path.write_text(source(forced("A")))
    answers: list[str] = []
    terminal = make_terminal()
    changes = iter([source(forced("B")), "def broken(:\n", source(forced("C"))])

    def wait(paths: Iterable[Path], has_changed: Callable[[], bool]) -> None:
        answers.append(terminal.text)
        assert list(paths) == [path]
        assert not has_changed()
        following = next(changes, None)
        if following is None:
            raise KeyboardInterrupt
        path.write_text(following)
        assert has_changed()

    with pytest.raises(KeyboardInterrupt):
        terminal.session.run_on_every_save(wait)
    written = [after.removeprefix(before) for before, after in zip(["", *answers], answers, strict=False)]
    for text, expected in zip(written, ["AAA", "BBB", "SyntaxError", "CCC"], strict=True):
        assert expected in text
        assert "waiting for a change of mine.py" in text


def test_save_during_a_run_is_not_missed(folder: Path, make_terminal: MakeTerminal) -> None:
    path = folder / "mine.py"
    later = source(forced("B"))
    head = "from pathlib import Path\n" + HEAD
    path.write_text(source(f"Path({str(path)!r}).write_text({later!r})\n" + forced("A"), head))
    terminal = make_terminal(max_tokens=1)

    def wait(paths: Iterable[Path], has_changed: Callable[[], bool]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        terminal.session.run_on_every_save(wait)
    assert terminal.text.index("\nA\n") < terminal.text.index("\nB\n")


def test_modules_of_the_author_are_imported_anew(folder: Path, make_terminal: MakeTerminal) -> None:
    (folder / "letters_of_mine.py").write_text("LETTER = 'A'\n")
    head = HEAD + "from letters_of_mine import LETTER\n\n\n"
    body = forced("A").replace("'A'", "LETTER")
    (folder / "mine.py").write_text(source(body, head))
    terminal = make_terminal()
    assert terminal.run()[1].startswith("AAA")
    (folder / "letters_of_mine.py").write_text("LETTER = 'B'\n")
    assert terminal.session._file.has_changed
    assert terminal.run()[1].startswith("BBB")


def test_params_file_is_read_and_watched(folder: Path, make_terminal: MakeTerminal) -> None:
    (folder / "mine.py").write_text(source(forced("A").replace("'A'", "custom_param_list[0]['letter']")))
    (folder / "params.json").write_text('{"letter": "A"}')
    terminal = make_terminal(params="@params.json")
    assert terminal.run()[1].startswith("AAA")
    (folder / "params.json").write_text('{"letter": "C"}')
    assert terminal.session._file.has_changed
    assert terminal.run()[1].startswith("CCC")


def test_error_shows_the_authors_line(folder: Path, make_terminal: MakeTerminal) -> None:
    (folder / "mine.py").write_text(source("logits[0] += custom_param_list[0]['bias']"))
    is_answered, text = make_terminal(params='{"bia": 1}').run()
    assert not is_answered
    assert text.splitlines() == [
        "Traceback (most recent call last):",
        '  File "mine.py", line 7, in __call__',
        "    logits[0] += custom_param_list[0]['bias']",
        "KeyError: 'bias'",
        "",
        "processor Mine raised KeyError: 'bias' "
        "(mine.py, line 7, in __call__: logits[0] += custom_param_list[0]['bias'])",
        'params: {"bia": 1}',
    ]


def test_params_file_that_is_edited_during_a_fault(folder: Path, make_terminal: MakeTerminal) -> None:
    head = "from pathlib import Path\n" + HEAD
    (folder / "mine.py").write_text(source("Path('params.json').write_text('{')\nraise ValueError('no')", head))
    (folder / "params.json").write_text('{"letter": "A"}')
    is_answered, text = make_terminal(params="@params.json").run()
    assert not is_answered
    assert text.splitlines()[-1] == 'params: {"letter": "A"}'


def test_error_in_prepare_shows_the_authors_line(folder: Path, make_terminal: MakeTerminal) -> None:
    method = "\n    def prepare(self, tokenizer, vocab_size):\n        self.table = vocab_size / 0\n"
    (folder / "mine.py").write_text(source("pass") + method)
    is_answered, text = make_terminal().run()
    assert not is_answered
    assert "ZeroDivisionError" in text
    assert "    self.table = vocab_size / 0" in text.splitlines()


def test_import_error_shows_only_the_authors_frames(folder: Path, make_terminal: MakeTerminal) -> None:
    (folder / "mine.py").write_text("def table():\n    return {}['word']\n\n\nTABLE = table()\n")
    is_answered, text = make_terminal().run()
    assert not is_answered
    assert text.splitlines()[0] == "Traceback (most recent call last):"
    assert [line.rpartition("/")[2] for line in text.splitlines() if line.startswith("  File")] == [
        'mine.py", line 5, in <module>',
        'mine.py", line 2, in table',
    ]
    assert text.endswith("KeyError: 'word'")


def test_several_classes(folder: Path, make_terminal: MakeTerminal) -> None:
    other = source(forced("B"), head="\n\n").replace("Mine", "Other")
    (folder / "mine.py").write_text(source(forced("A")) + other)
    assert make_terminal().run() == (False, "mine.py defines 2 processors (Mine, Other): use mine.py:Class")
    assert make_terminal("mine.py:Other").run()[1].startswith("BBB")


def test_class_that_cannot_be_serialized(folder: Path, make_terminal: MakeTerminal) -> None:
    head = HEAD + "import threading\n\nlock = threading.Lock()\n\n\n"
    (folder / "mine.py").write_text(source("lock.locked()", head))
    is_answered, text = make_terminal().run()
    assert not is_answered
    assert text == "global 'lock' used by Mine.__call__ is a lock, which cannot be serialized"


@pytest.mark.parametrize(("params", "message"), [("{", "is not JSON"), ("[]", "must be a JSON object")])
def test_params_that_are_no_object(folder: Path, make_terminal: MakeTerminal, params: str, message: str) -> None:
    (folder / "mine.py").write_text(source("pass"))
    is_answered, text = make_terminal(params=params).run()
    assert not is_answered
    assert message in text


def test_trace_has_a_line_for_each_token(folder: Path, make_terminal: MakeTerminal) -> None:
    (folder / "mine.py").write_text(
        source("if len(custom_param_list[0]['__req__'].output_ids) == 1:\n    " + forced("A").replace("\n", "\n    "))
    )
    _, text = make_terminal(trace="lines").run()
    head, first, second, third = text.splitlines()[4:]
    assert head.split() == ["token", "model", "processor", "allowed"]
    assert first.startswith("   1 ")
    assert second.startswith("*  2 'A' ")
    assert "100.00%           1   instead of " in second
    assert third.startswith("   3 ")
    _, text = make_terminal(trace="tables").run()
    assert text.count("sampling") == 3
    assert text.count("\ntoken ") == 3
