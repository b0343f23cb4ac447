from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.sandbox.protocol import HEADER, Answer, Kind, StepRow, pack, pack_step, unpack_step

NUMBERS = st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1)


@given(st.lists(st.builds(StepRow, NUMBERS, st.lists(NUMBERS))))
def test_a_step_arrives_as_it_was_sent(rows: list[StepRow]) -> None:
    assert unpack_step(pack_step(rows)) == rows


@given(st.sampled_from([*Kind, *Answer]), st.integers(0, (1 << 32) - 1), st.binary())
def test_a_message_has_a_header_of_16_bytes(kind: Kind | Answer, number: int, body: bytes) -> None:
    message = pack(kind, number, body)
    assert HEADER.unpack(message[:16]) == (kind, number, len(body))
    assert message[16:] == body
