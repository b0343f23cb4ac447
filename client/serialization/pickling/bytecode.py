"""Check that bytecode was made by this minor version of Python.

SGLang's strings do not say which Python made them, and the interpreter crashes on bytecode of another minor version
instead of refusing it. Each version has its own opcodes and its own number of inline cache entries, so bytecode of
another version is malformed when it is decoded by the rules of this one.

This finds mistakes. It does not protect against crafted bytecode.
"""

from __future__ import annotations

import dis
import opcode
import sys
from collections.abc import Sequence
from typing import Any

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import PYTHON

ARGUMENTS = 18
"""Number of fields of a code object in a pickle, from Python 3.11 on."""

# Opcode of RESUME, which is in every function, by Python version.
_RESUME = {"3.11": 151, "3.12": 151, "3.13": 149, "3.14": 128}

_PROLOGUE = frozenset({"COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR", "POP_TOP", "NOP", "EXTENDED_ARG"})


def check_code(args: Sequence[Any]) -> None:
    """Check the arguments of dill's `_create_code` before the code object is made.

    Raises:
        ProcessorLoadError: it is not bytecode of this Python version; the message names both versions if it can.
    """
    fields = args[1:] if args and not isinstance(args[0], int) else args  # dill may write co_lnotab in front
    if len(fields) != ARGUMENTS:
        raise _foreign("Python 3.10 or older" if len(fields) < ARGUMENTS else "another Python version")
    code, consts, names, varnames = fields[6:10]
    code = code.encode("latin-1") if isinstance(code, str) else bytes(code)
    limits = {
        "const": len(consts),
        "name": len(names),
        "local": len(set(varnames) | set(fields[16]) | set(fields[17])),
    }
    if not _is_valid(code, limits):
        raise _foreign(_guess(code))


def _foreign(made_by: str) -> ProcessorLoadError:
    return ProcessorLoadError(
        f"the processor contains bytecode of {made_by}, this server runs Python {PYTHON}: serialize it with Python "
        f"{PYTHON}, or with logitship's to_str(), which sends the source as well"
    )


def _guess(code: bytes) -> str:
    first = {code[i] for i in range(0, min(len(code), 16), 2)}
    versions = [version for version, resume in _RESUME.items() if resume in first and version != PYTHON]
    return f"another Python version (it looks like {' or '.join(versions)})" if versions else "another Python version"


def _is_valid(code: bytes, limits: dict[str, int]) -> bool:
    """Decode the instructions; return whether opcodes, cache entries, operands and jump targets are all valid."""
    starts: set[int] = set()
    targets: set[int] = set()
    extended = 0
    resumed = False
    index = 0
    while index + 1 < len(code):
        number, operand = code[index], code[index + 1] | extended
        name = opcode.opname[number]
        caches = _cache_entries(name)
        after = index + 2 + 2 * caches
        if name.startswith("<") or name == "CACHE" or after > len(code) or any(code[index + 2 : after]):
            return False
        resumed = resumed or name == "RESUME"
        if not resumed and name not in _PROLOGUE:
            return False
        if not _operand_fits(number, name, operand, limits):
            return False
        if name != "EXTENDED_ARG":
            starts.add(index - 2 * _prefixes(code, index))
            targets |= _targets(number, name, operand, after)
        extended = operand << 8 if name == "EXTENDED_ARG" else 0
        index = after
    return index == len(code) and resumed and targets <= starts


def _prefixes(code: bytes, index: int) -> int:
    """Count the EXTENDED_ARG before the instruction: a jump goes to the first of them."""
    count = 0
    while index >= 2 * (count + 1) and code[index - 2 * (count + 1)] == dis.EXTENDED_ARG:
        count += 1
    return count


def _cache_entries(name: str) -> int:
    if sys.version_info >= (3, 13):
        return int(opcode._inline_cache_entries.get(name, 0))  # type: ignore[attr-defined]
    return int(opcode._inline_cache_entries[opcode.opmap[name]]) if name in opcode.opmap else 0  # type: ignore[attr-defined]


def _operand_fits(number: int, name: str, operand: int, limits: dict[str, int]) -> bool:
    if number in dis.hasconst:
        return operand < limits["const"]
    if number in dis.hasname:
        return _name_index(name, operand) < limits["name"]
    if number in dis.hasfree or (number in dis.haslocal and name.count("FAST") == 1):
        return operand < limits["local"]
    return True


def _name_index(name: str, operand: int) -> int:
    """Return the index of the name; some instructions keep flags in the low bits of their operand."""
    if name == "LOAD_GLOBAL" or (name == "LOAD_ATTR" and sys.version_info >= (3, 12)):
        return operand >> 1
    if name == "LOAD_SUPER_ATTR":
        return operand >> 2
    return operand


def _targets(number: int, name: str, operand: int, after: int) -> set[int]:
    if number in dis.hasjrel:
        return {after - 2 * operand if "BACKWARD" in name else after + 2 * operand}
    return set()
