"""Error messages and tracebacks for clients, also for hostile exceptions and code objects."""

from __future__ import annotations

import linecache
import re
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import dill
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import logitship.builtin_processors
import logitship.client
import logitship.sampler
import logitship.server
from logitship.client.author_errors import (
    MAX_TEXT_LENGTH,
    author_line,
    author_traceback,
    class_name,
    error_message,
    error_text,
)
from logitship.client.errors import ProcessorLoadError
from logitship.client.scrub import known_folders
from logitship.client.serialization.loading import load_class
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor


def raised_by(body: str, filename: str = "author.py") -> BaseException:
    """Return the exception raised by a function with this body, with the traceback from its frame on."""
    scope: dict[str, Callable[[], object]] = {}
    exec(compile(f"def call():\n{textwrap.indent(body, '    ')}", filename, "exec"), scope)
    try:
        scope["call"]()
    except BaseException as error:  # noqa: BLE001
        # Bypass the class, whose attributes may raise.
        own: TracebackType = BaseException.__dict__["__traceback__"].__get__(error)
        return BaseException.with_traceback(error, own.tb_next)
    raise AssertionError("nothing was raised")


def traceback_of(body: str, filename: str = "author.py") -> str:
    return author_traceback(raised_by(body, filename))


# --- ordinary exceptions ---


def test_traceback_looks_like_python() -> None:
    assert traceback_of("x = 1\nx / 0") == (
        'Traceback (most recent call last):\n  File "author.py", line 3, in call\nZeroDivisionError: division by zero\n'
    )


def test_library_paths_are_relative_to_install_folder() -> None:
    text = traceback_of("import json\njson.loads('{')")
    assert '  File "json/__init__.py", line ' in text
    assert '  File "json/decoder.py", line ' in text
    text = traceback_of("import torch\ntorch.einsum('ij,k', torch.ones(1))")
    assert re.search(r'  File "torch/functional\.py", line \d+, in einsum\n', text)


CHAIN = """
try:
    {}['key']
except KeyError as error:
    raise ValueError('second')"""


@pytest.mark.parametrize("end", ["", " from error", " from None", " from OSError('third')"])
def test_causes_are_formatted_like_python(end: str) -> None:
    error = raised_by(CHAIN + end)
    expected = "".join(traceback.format_exception(error)).replace(str(Path.cwd()) + "/", "")
    assert author_traceback(error) == expected


def test_recursion_is_collapsed() -> None:
    text = traceback_of("return call()")
    assert re.fullmatch(
        r'Traceback \(most recent call last\):\n  File "author\.py", line 2, in call\n'
        r"  \[Previous line repeated \d+ more times\]\nRecursionError: maximum recursion depth exceeded.*\n",
        text,
    )


def test_only_last_frames_are_shown() -> None:
    functions = "\n".join(f"def f{i}(): f{i + 1}()" for i in range(50))
    text = traceback_of(f"global {', '.join(f'f{i}' for i in range(51))}\n{functions}\ndef f50(): 1 / 0\nf0()")
    assert "(32 outer frames are left out)" in text
    assert ", in f30\n" not in text
    assert re.search(r", in f31\n.*, in f50\nZeroDivisionError", text, re.DOTALL)


def test_exception_group_members_are_shown() -> None:
    text = traceback_of("raise ExceptionGroup('two', [ValueError('a'), ExceptionGroup('one', [KeyError('b')])])")
    assert text.endswith(
        "ExceptionGroup: two (2 sub-exceptions)\n"
        "  + exception 1 of 2\n  | ValueError: a\n"
        "  + exception 2 of 2\n  | ExceptionGroup: one (1 sub-exception)\n"
        "  |   + exception 1 of 1\n  |   | KeyError: 'b'\n"
    )


def test_notes_are_shown() -> None:
    assert traceback_of("e = ValueError('no')\ne.add_note('a hint')\nraise e").endswith("ValueError: no\na hint\n")


def test_exception_without_frames_has_no_traceback() -> None:
    assert author_traceback(ValueError("no")) == ""


# --- quoted lines ---


def test_shipped_source_lines_are_quoted() -> None:
    with pytest.raises(ProcessorLoadError) as raised:
        load_class(SourceProcessor("def fail():\n    raise ValueError('no')\n\nfail()\n", "Ban"))
    assert re.search(
        r'  File "<logitship_processor_\d+>", line 4, in <module>\n    fail\(\)\n'
        r'  File "<logitship_processor_\d+>", line 2, in fail\n    raise ValueError\(\'no\'\)\nValueError: no$',
        str(raised.value),
    )


def test_claimed_file_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "passwd"
    secret.write_text("one secret\n" * 9)
    error = raised_by("1 / 0", str(secret))
    assert "secret" in "".join(traceback.format_exception(error))  # Python's own traceback quotes it
    linecache.checkcache()
    text = author_traceback(error)
    assert f'File "{secret}", line 2, in call\nZeroDivisionError' in text.replace("…", str(Path.cwd()))
    assert "one secret" not in text


class FromElsewhere:
    """Pickled as a call of code with the given file name."""

    def __init__(self, filename: str) -> None:
        self._code = compile("1 / 0", filename, "exec")

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._code, {})


def test_processor_string_cannot_quote_files(tmp_path: Path) -> None:
    secret = tmp_path / "passwd"
    secret.write_text("one secret\n")
    with pytest.raises(ProcessorLoadError, match="ZeroDivisionError") as raised:
        load_class(PickledProcessor(dill.dumps(FromElsewhere(str(secret)))))
    assert "passwd" in str(raised.value)
    assert "one secret" not in str(raised.value)


@pytest.mark.parametrize("filename", ["<logitship_processor_0> ", "a<logitship_processor_0>", "<logitship_processor>"])
def test_similar_file_names_are_not_quoted(filename: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, filename, (9, None, ["a secret\n"] * 9, filename))
    assert "secret" not in traceback_of("1 / 0", filename)


# --- frames ---


@pytest.mark.parametrize(
    "module", [logitship.builtin_processors, logitship.client, logitship.sampler, logitship.server]
)
@pytest.mark.parametrize("real", [True, False])
def test_logitship_frames_are_omitted(module: object, real: bool) -> None:
    folder = Path(str(module.__file__)).parent  # type: ignore[attr-defined]
    folder = folder.resolve() if real else folder
    scope: dict[str, Callable[[object], object]] = {}
    exec(compile("def ours(f): return f()", str(folder / "http" / "machinery.py"), "exec"), scope)
    inner = raised_by("1 / 0", "inner.py")

    def outer() -> None:
        raise inner

    try:
        scope["ours"](lambda: scope["ours"](outer))
    except ZeroDivisionError as error:
        text = author_traceback(error)
    assert "machinery" not in text
    assert '  File "tests/client/test_author_errors.py"' in text
    assert text.endswith('  File "inner.py", line 2, in call\nZeroDivisionError: division by zero\n')


def test_pickle_frames_are_omitted() -> None:
    with pytest.raises(ProcessorLoadError) as raised:
        load_class(PickledProcessor(dill.dumps(FromElsewhere("author.py"))))
    frames = [line for line in str(raised.value).splitlines() if line.startswith("  File ")]
    assert frames == ['  File "author.py", line 1, in <module>']


def test_import_error_has_no_folder() -> None:
    error = raised_by("from torch import no_such_thing")
    assert error_text(error).startswith(
        "ImportError: cannot import name 'no_such_thing' from 'torch' (torch/__init__.py)"
    )
    with pytest.raises(ProcessorLoadError) as raised:
        load_class(SourceProcessor("from torch import no_such_thing", "Ban"))
    assert "(torch/__init__.py)" in str(raised.value)
    assert not any(f"{folder}/" in str(raised.value) for folder in known_folders())


# --- hostile exceptions ---

FOLDER = known_folders()[0]
ESCAPE = "\x1b[31m"
FAIL = "def fail(*args): raise GeneratorExit\n"
HOSTILE = {
    "str raises": FAIL + "class Odd(Exception): __str__ = fail\nraise Odd",
    "str exits": "class Odd(Exception):\n    def __str__(self): raise SystemExit(1)\nraise Odd",
    "str raises itself": "class Odd(Exception):\n    def __str__(self): raise self\nraise Odd",
    "str recurses": "class Odd(Exception):\n    def __str__(self): return str(self)\nraise Odd",
    "str gives no text": "class Odd(Exception):\n    def __str__(self): return 5\nraise Odd",
    "endless text": "class Odd(Exception):\n    def __str__(self): return 'x' * 10_000_000\nraise Odd",
    "endless lines": "raise ValueError('\\n' * 1_000_000)",
    "odd text": FAIL + "class Text(str): __len__ = __getitem__ = encode = __format__ = __str__ = __eq__ = fail\n"
    "class Odd(Exception):\n    def __str__(self): return Text('hello' * 9999)\nraise Odd",
    "surrogates": "raise ValueError('\\ud800' * 9999)",
    "control characters": "raise ValueError('\\x1b[2J\\x00\\x9b')",
    "a folder": f"raise ValueError({FOLDER + '/a'!r} * 999)",
    "an address": "raise ValueError(object())",
    "traceback property": FAIL + "class Odd(Exception): __traceback__ = property(fail)\nraise Odd",
    "cause property": FAIL + "class Odd(Exception): __cause__ = property(fail)\nraise Odd",
    "context property": FAIL + "class Odd(Exception): __context__ = property(fail)\nraise Odd",
    "context flag": FAIL + "class Odd(Exception): __suppress_context__ = property(fail)\nraise Odd",
    "lying cause": "class Odd(Exception): __cause__ = property(lambda self: 5)\nraise Odd",
    "class property": FAIL + "class Odd(Exception): __class__ = property(fail)\nraise Odd",
    "lying class": "class Odd(Exception): __class__ = ExceptionGroup\nraise Odd",
    "dict property": FAIL + "class Odd(Exception): __dict__ = property(fail)\nraise Odd",
    "odd dict": FAIL + "class Odd(Exception): pass\nclass Dict(dict): get = __getitem__ = fail\n"
    "e = Odd()\ne.__dict__ = Dict(__notes__=['n'])\nraise e",
    "no attributes": FAIL + "class Odd(Exception): __getattribute__ = fail\nraise Odd",
    "metaclass": FAIL + "class Meta(type):\n    __name__ = __module__ = property(fail)\n"
    "    __getattribute__ = __hash__ = __eq__ = __repr__ = fail\nclass Odd(Exception, metaclass=Meta): pass\nraise Odd",
    "class checks": FAIL + "class Meta(type): __instancecheck__ = __subclasscheck__ = fail\n"
    "class Odd(Exception, metaclass=Meta): pass\nraise Odd()",
    "endless name": "raise type('N' * 1_000_000, (Exception,), {})",
    "name of surrogates": "raise type('\\ud800\\x1b', (Exception,), {})",
    "odd name": FAIL + "class Text(str): __len__ = __getitem__ = encode = __format__ = __str__ = fail\n"
    "class Odd(Exception): pass\nOdd.__name__ = Text('Odd')\nraise Odd",
    "its own cause": "e = ValueError('loop')\ne.__cause__ = e\nraise e",
    "causes in a circle": "a, b, c = ValueError('a'), ValueError('b'), ValueError('c')\n"
    "a.__cause__, b.__context__, c.__cause__ = b, c, a\nraise a",
    "endless causes": "e = ValueError(0)\nfor i in range(100_000):\n    e, last = ValueError(i), e\n"
    "    e.__cause__ = last\nraise e",
    "endless group": "raise ExceptionGroup('many', [ValueError(i) for i in range(100_000)])",
    "deep group": "e = ValueError('deep')\nfor i in range(900): e = ExceptionGroup('g', [e])\nraise e",
    "wide and deep group": "e = ValueError('x')\nfor i in range(20): e = ExceptionGroup('g', [e] * 20)\nraise e",
    "group in its cause": "g = ExceptionGroup('g', [ValueError('a')])\ng.__cause__ = g.exceptions[0]\n"
    "g.exceptions[0].__cause__ = g\nraise g",
    "lying group": FAIL
    + "class Odd(ExceptionGroup):\n    exceptions = property(fail)\n    derive = split = subgroup = fail\n"
    "raise Odd('g', [ValueError('a')])",
    "endless notes": "e = ValueError('no')\nfor i in range(9999): e.add_note('n' * 9999)\nraise e",
    "odd notes": FAIL + "class List(list): __getitem__ = __iter__ = __len__ = fail\n"
    "e = ValueError('no')\ne.__notes__ = List('ab')\nraise e",
    "notes of odd text": FAIL + "class Text(str): __len__ = __getitem__ = encode = __format__ = __str__ = fail\n"
    "e = ValueError('no')\ne.__notes__ = [Text('note'), 5, None, []]\nraise e",
    "notes property": FAIL + "class Odd(Exception): __notes__ = property(fail)\nraise Odd",
    "no traceback": "import sys\ne = ValueError('no')\ntry: raise e\nexcept ValueError: pass\n"
    "raise e.with_traceback(None)",
    "another's traceback": "import json\ntry: json.loads('{')\nexcept ValueError as error: tb = error.__traceback__\n"
    "raise TypeError('mine').with_traceback(tb)",
    "endless traceback": "import sys, types\ntb = None\nfor i in range(200_000):\n"
    "    tb = types.TracebackType(tb, sys._getframe(), i, i)\nraise ValueError('long').with_traceback(tb)",
    "absurd lines": "import sys, types\ntb = types.TracebackType(None, sys._getframe(), 10**9 - 1, -7)\n"
    "raise ValueError('odd').with_traceback(tb)",
    "odd code": FAIL + "class Text(str): __len__ = __getitem__ = encode = startswith = endswith = __eq__ = fail\n"
    "Text.__hash__ = str.__hash__\ndef f(): 1 / 0\n"
    "f.__code__ = f.__code__.replace(co_filename=Text('f' * 9999), co_name=Text('n' * 9999))\nf()",
    "code of surrogates": "def f(): 1 / 0\n"
    "f.__code__ = f.__code__.replace(co_filename='\\ud800\\n\\x1b', co_name='\\ud800\\x1b')\nf()",
    "syntax error": FAIL
    + "class Odd(SyntaxError):\n    lineno = filename = text = offset = msg = property(fail)\nraise Odd('odd')",
    "odd syntax error": "raise SyntaxError('m', ('/etc/passwd', 1, 10**9, 'x' * 9999, -5, -5))",
    "unicode error": "'\\ud800'.encode()",
    "odd unicode error": "raise UnicodeDecodeError('utf-8', b'x' * 99999, 10**9, -10**9, '\\ud800')",
    "os error": f"open({FOLDER!r} + str() + '/no/such/file')",
    "odd error number": FAIL + "class Odd:\n    __format__ = fail\n    def __str__(self): return '2'\n"
    "raise FileNotFoundError(Odd(), 'x', 'p')",
    "endless error number": "class Odd:\n    def __str__(self): return 'no'\n"
    f"    def __format__(self, how): return {ESCAPE + FOLDER + '/a'!r} * 99_999\n"
    "raise FileNotFoundError(Odd(), 'x', 'p')",
    "odd problem": "texts = iter(['no'])\nclass Odd:\n    def __str__(self): return next(texts)\n"
    "raise FileNotFoundError(2, Odd(), 'p')",
    "key error": FAIL + "class Key: __repr__ = fail\nraise KeyError(Key())",
    "no arguments": "e = ValueError('a')\ne.args = ('x' * 9999,) * 99\nraise e",
    "base exception": "raise type('Odd', (BaseException,), {})('odd')",
    "generator exit": "raise GeneratorExit",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_exceptions_are_bounded(name: str) -> None:
    error = raised_by(HOSTILE[name])
    for text in (error_message(error), error_text(error), author_traceback(error)):
        assert type(text) is str
        assert len(text) <= MAX_TEXT_LENGTH + 300
        assert orjson.loads(orjson.dumps(text)) == text
        assert not any(f"{folder}/" in text for folder in known_folders())
        assert not re.search(r"0x[0-9a-f]{6}|[\x00-\x08\x0b-\x1f]", text)
    assert re.match(r"[\w\\]+(: |$)", error_text(error))


SHOWN = {
    "str raises": "GeneratorExit)\n",
    "traceback property": "\nOdd\n",
    "no attributes": "\nOdd\n",
    "dict property": "\nOdd\n",
    "metaclass": "\nOdd\n",
    "lying group": "\n  | ValueError: a\n",
    "odd dict": "\nOdd\nn\n",
    "notes of odd text": "\nValueError: no\nnote\n",
    "endless traceback": "\n  (further frames are left out)\nValueError: long\n",
    "another's traceback": "\nTypeError: mine\n",
    "syntax error": "\nOdd: ",
    "its own cause": "\nValueError: loop\n",
    "odd text": "hellohello\n",
}


@pytest.mark.parametrize("name", SHOWN)
def test_hostile_exceptions_are_formatted(name: str) -> None:
    text = author_traceback(raised_by(HOSTILE[name]))
    assert text.startswith(("Traceback (most recent call last):\n", "…"))
    assert SHOWN[name] in text[-300:]


def test_cyclic_causes_are_shown_once() -> None:
    text = author_traceback(raised_by(HOSTILE["causes in a circle"]))
    assert [text.count(f"ValueError: {name}\n") for name in "abc"] == [1, 1, 1]


@pytest.mark.parametrize("name", ["endless causes", "endless group", "deep group", "wide and deep group"])
def test_omissions_are_noted(name: str) -> None:
    text = author_traceback(raised_by(HOSTILE[name]))
    assert text.count("Error: ") + text.count("Group: ") <= 8
    assert "(further exceptions are left out)" in text


@given(st.recursive(st.text(max_size=9), lambda inner: st.lists(inner, min_size=1, max_size=4), max_leaves=30))
def test_exception_groups_of_any_shape(shape: object) -> None:
    def group(part: object) -> Exception:
        return ValueError(part) if isinstance(part, str) else ExceptionGroup("g", [group(one) for one in part])  # type: ignore[attr-defined]

    text = author_traceback(group(shape))
    assert len(text) <= MAX_TEXT_LENGTH + 1
    assert text.count("ValueError") <= 8


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=20), st.integers(0, 6))
def test_causes_and_contexts_of_any_shape(links: list[tuple[int, int, bool]], first: int) -> None:
    errors = [ValueError(f"<{i}>") for i in range(7)]
    for one, other, cause in links:
        if cause:
            errors[one].__cause__ = errors[other]
        elif one != other:
            errors[one].__context__ = errors[other]
    text = author_traceback(errors[first])
    assert all(text.count(f"<{i}>") <= 1 for i in range(7))
    assert text.endswith(f"ValueError: <{first}>\n") or text == ""


def test_long_message_is_truncated() -> None:
    error = raised_by("raise ValueError('start' + 'x' * 100_000 + 'end')")
    assert author_traceback(error).startswith("…")
    assert author_traceback(error).endswith("xxxend\n")
    assert len(author_traceback(error)) <= MAX_TEXT_LENGTH + 1
    assert error_message(error).startswith("startxxx")
    assert error_message(error).endswith("… (100008 characters)")


def test_truncation_does_not_expose_folders() -> None:
    path = f"{FOLDER}/a"
    for shift in range(len(path)):
        filling = "x" * (MAX_TEXT_LENGTH - shift)
        message = error_message(ValueError(filling + path + "y" * 9999))
        assert message.startswith(filling)
        assert "/" not in message
        text = author_traceback(raised_by(f"raise ValueError({'y' * 9999 + path + filling!r})"))
        assert text.endswith(f"{filling[1:]}\n")
        assert "/" not in text


def test_class_name_bypasses_metaclass() -> None:
    class Meta(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise KeyboardInterrupt

    assert class_name(Meta("Odd", (), {})) == "Odd"


@pytest.mark.parametrize(
    ("traceback", "line"),
    [
        ("", ""),
        ('Traceback (most recent call last):\n  File "a.py", line 3, in f\nValueError: no\n', ""),
        (
            '  File "a.py", line 3, in f\n    g(x)\n  File "b.py", line 7, in g\n    raise E\n  File "torch/x.py", '
            'line 1, in h\nE: no\nIt printed:\n  File "c.py", line 9, in fake\n    fake()\n',
            "b.py, line 7, in g: raise E",
        ),
        ('  File "<logitship_processor_12>", line 2, in g\n    raise E\nE: no\n', "line 2, in g: raise E"),
    ],
)
def test_author_line(traceback: str, line: str) -> None:
    assert author_line(traceback) == line
