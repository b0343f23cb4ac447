"""Order of the statements of a captured module.

Python runs a module from top to bottom: the names that a statement uses when it is executed must be defined above it,
and so must everything that these may then call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType

from logitship.client.serialization.processor_string import LineRange

HEADER = "from __future__ import annotations\n"


class NoSource(Exception):
    """The class has no source form. The reason is not reported: the pickle is sent without source."""


@dataclass
class Part:
    """One statement of the module.

    Attributes:
        text: the statement.
        eager: names it uses when it is executed.
        lazy: names it uses later.
        origin: file and line that the text is from, if its lines are those of the file.
    """

    text: str
    eager: set[str] = field(default_factory=set)
    lazy: set[str] = field(default_factory=set)
    origin: tuple[str, int] | None = None


def module_text(parts: Mapping[str, Part], imports: Iterable[str]) -> tuple[str, tuple[LineRange, ...]]:
    """Return the text of the module: imports, constants, then definitions.

    Args:
        parts: the statements, by the name they bind.
        imports: the import statements.

    Returns:
        The text, and where its lines are from.

    Raises:
        NoSource: it is not valid Python.
    """
    constants = [part for part in parts.values() if _is_constant(part)]
    definitions = [part for part in _in_order(parts) if not _is_constant(part)]
    blocks = [HEADER.strip(), "\n".join(sorted(imports)), "\n".join(part.text for part in constants)]
    text = "\n\n".join(block for block in blocks if block)
    text, ranges = _with_definitions(text, definitions)
    compile_source(text)
    return text, ranges


def listing(parts: Mapping[str, Part]) -> tuple[str, tuple[LineRange, ...]]:
    """Return the text of the statements that are from a file, and where its lines are from. It need not run."""
    return _with_definitions("", [part for part in parts.values() if part.origin is not None])


def _with_definitions(text: str, definitions: Iterable[Part]) -> tuple[str, tuple[LineRange, ...]]:
    ranges: list[LineRange] = []
    for part in definitions:
        text += "\n\n\n"
        if part.origin is not None:
            first = text.count("\n") + 1
            ranges.append(LineRange(*part.origin, first, part.text.count("\n") + 1))
        text += part.text
    return text + "\n", tuple(ranges)


def compile_source(text: str) -> CodeType:
    """Compile a module's text.

    Raises:
        NoSource: it is not valid Python.
    """
    try:
        return compile(text, "<source>", "exec", dont_inherit=True)
    except SyntaxError:
        raise NoSource from None


def _is_constant(part: Part) -> bool:
    return not part.eager and not part.lazy and part.origin is None


def _in_order(parts: Mapping[str, Part]) -> Iterator[Part]:
    """Yield each part after those it uses when it is executed, and after everything these may then call."""
    begun: set[str] = set()

    def visit(name: str) -> Iterator[Part]:
        if name in begun or name not in parts:
            return
        begun.add(name)
        for used in sorted(parts[name].eager):
            yield from visit(used)
            for reachable in _reachable(parts, used):
                yield from visit(reachable)
        yield parts[name]

    for name in list(parts):
        yield from visit(name)


def _reachable(parts: Mapping[str, Part], name: str) -> list[str]:
    found: dict[str, None] = {}
    waiting = [name]
    while waiting:
        part = parts.get(waiting.pop())
        new = sorted((part.eager | part.lazy) - found.keys()) if part else []
        found.update(dict.fromkeys(new))
        waiting.extend(new)
    return list(found)
