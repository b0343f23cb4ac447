from __future__ import annotations

import struct

import pytest

from logitship.sampler.sandbox.kernel import bpf


def test_instruction_encoding() -> None:
    program = [
        bpf.load(4),
        bpf.jump_if_equal(0xC000003E, 0, 1),
        bpf.return_value(0x7FFF0000),
        bpf.return_value(0x80000000),
    ]
    # linux/bpf_common.h: BPF_LD+BPF_W+BPF_ABS, BPF_JMP+BPF_JEQ+BPF_K, BPF_RET+BPF_K
    assert [struct.unpack("=HBBI", each) for each in pieces(bpf.assemble(program))] == [
        (0x20, 0, 0, 4),
        (0x15, 0, 1, 0xC000003E),
        (0x06, 0, 0, 0x7FFF0000),
        (0x06, 0, 0, 0x80000000),
    ]


def test_jump_codes() -> None:
    jumps = [bpf.jump_if_equal(1, 2, 3), bpf.jump_if_at_least(1, 2, 3), bpf.jump_if_any_bit(1, 2, 3)]
    assert [each.code for each in jumps] == [0x15, 0x35, 0x45]
    assert {each[1:] for each in jumps} == {(2, 3, 1)}


@pytest.mark.parametrize("distance", [-1, 256])
def test_jump_offset_limits(distance: int) -> None:
    with pytest.raises(ValueError, match="0 to 255"):
        bpf.jump_if_equal(0, distance, 0)
    with pytest.raises(ValueError, match="0 to 255"):
        bpf.jump_if_equal(0, 0, distance)


def test_jump_past_the_end_is_refused() -> None:
    bpf.assemble([bpf.jump_if_equal(0, 0, 1), bpf.return_value(0), bpf.return_value(1)])
    with pytest.raises(ValueError, match="instruction 0 of the BPF program jumps past its end"):
        bpf.assemble([bpf.jump_if_equal(0, 0, 2), bpf.return_value(0), bpf.return_value(1)])


@pytest.mark.parametrize(
    "program", [[], [bpf.load(0)], [bpf.return_value(0)] * 4097], ids=["empty", "no answer", "long"]
)
def test_invalid_program_is_refused(program: list[bpf.Instruction]) -> None:
    with pytest.raises(ValueError, match="1 to 4096 instructions"):
        bpf.assemble(program)


def pieces(program: bytes) -> list[bytes]:
    return [program[start : start + 8] for start in range(0, len(program), 8)]
