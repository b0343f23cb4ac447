"""Write `docs/compatibility.md` from the marks of tests: `python scripts/compatibility.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from logitship.server.doctor.doctor_command import TESTED
from logitship.server.sglang.unsupported import UNSUPPORTED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"

HEAD = """# Compatibility

In which modes of SGLang and vLLM processors run, and which tests show it. `python scripts/compatibility.py` writes this
page from the marks of these tests.

- Made for SGLang {sglang} and vLLM {vllm} (0.33.0 in its model runner V2). With another version, the plugins look
  whether the engine's functions are those that they know, and refuse to run otherwise. [Inside SGLang](sglang.md) and
  [Inside vLLM](vllm.md) say what that means, and `logitship doctor` tells the version of a running server. To try
  another version yourself, install it beside logitship and run the tests of the tables.
- Python 3.11, 3.12 and 3.13, in the engine and in the client, whose versions may differ. The engines' tests run on
  3.11.
- "The real engine" is the engine's own server, on a CPU. None of this has been run on a GPU.
- A mode that is not in the tables has not been tried.
"""


def modes() -> Iterator[tuple[str, str, str, str]]:
    """Return the engine, the mode, how it is seen, and the test of each mark `mode`."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "pytest.mark.mode(" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.mode":
                    engine, mode, seen = map(ast.literal_eval, mark.args)
                    yield engine, mode, seen, f"{path.relative_to(ROOT)}::{function.name}"


def page() -> str:
    """Return the page."""
    sglang, vllm = (" and ".join(TESTED[engine]) for engine in ("SGLang", "vLLM"))
    lines = [HEAD.format(sglang=sglang, vllm=vllm)]
    for engine in TESTED:
        lines += [f"## {engine}", "", "| mode | seen in | test |", "|---|---|---|"]
        lines += [f"| {mode} | {seen} | `{test}` |" for of, mode, seen, test in modes() if of == engine]
        lines.append("")
        if engine == "SGLang":
            lines += ["If it accepts processors, SGLang does not start with:", "", "| flag | because |", "|---|---|"]
            lines += [f"| `{flag}` | {reason} |" for flag, (_, _, reason) in UNSUPPORTED.items()]
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
