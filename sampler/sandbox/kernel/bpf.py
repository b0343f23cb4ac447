"""An assembler for classic BPF programs, as used by seccomp filters.

A program is a list of instructions. All jumps here go a few instructions forward, so that the 8-bit offset of a
conditional jump suffices and no labels are needed. See the kernel's `Documentation/userspace-api/seccomp_filter.rst`
and `linux/bpf_common.h`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_LOAD_WORD = 0x20
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_AT_LEAST = 0x35
_JUMP_IF_ANY_BIT = 0x45
_RETURN = 0x06

_MAX_JUMP = 255
_MAX_PROGRAM = 4096


class Instruction(NamedTuple):
    """A `struct sock_filter`."""

    code: int
    if_true: int
    if_false: int
    value: int


def load(offset: int) -> Instruction:
    """Load the 32-bit word at `offset` of `struct seccomp_data` into the accumulator."""
    return Instruction(_LOAD_WORD, 0, 0, offset)


def jump_if_equal(value: int, if_true: int, if_false: int) -> Instruction:
    """Skip `if_true` instructions if the accumulator is `value`, else `if_false`."""
    return _jump(_JUMP_IF_EQUAL, value, if_true, if_false)


def jump_if_at_least(value: int, if_true: int, if_false: int) -> Instruction:
    """Skip `if_true` instructions if the accumulator is `value` or more, unsigned, else `if_false`."""
    return _jump(_JUMP_IF_AT_LEAST, value, if_true, if_false)


def jump_if_any_bit(mask: int, if_true: int, if_false: int) -> Instruction:
    """Skip `if_true` instructions if the accumulator has any bit of `mask` set, else `if_false`."""
    return _jump(_JUMP_IF_ANY_BIT, mask, if_true, if_false)


def return_value(action: int) -> Instruction:
    """Return a `SECCOMP_RET_…` value."""
    return Instruction(_RETURN, 0, 0, action)


def assemble(instructions: Iterable[Instruction]) -> bytes:
    """Encode a program as an array of `struct sock_filter`.

    Raises:
        ValueError: the program is empty, longer than the kernel allows, does not end with a return, or jumps past its
            end.
    """
    program: Sequence[Instruction] = list(instructions)
    if not 0 < len(program) <= _MAX_PROGRAM or program[-1].code != _RETURN:
        raise ValueError(f"a BPF program must end with a return and have 1 to {_MAX_PROGRAM} instructions")
    for index, each in enumerate(program):
        if index + 1 + max(each.if_true, each.if_false) >= len(program) and each.code != _RETURN:
            raise ValueError(f"instruction {index} of the BPF program jumps past its end")
    return b"".join(struct.pack("=HBBI", *each) for each in program)


def _jump(code: int, value: int, if_true: int, if_false: int) -> Instruction:
    if not (0 <= if_true <= _MAX_JUMP and 0 <= if_false <= _MAX_JUMP):
        raise ValueError(f"the offset of a BPF jump must be 0 to {_MAX_JUMP}")
    return Instruction(code, if_true, if_false, value)
