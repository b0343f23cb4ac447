from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.sandbox.protocol import HEADER, Answer, Command, pack


@given(st.sampled_from([*Command, *Answer]), st.integers(0, (1 << 32) - 1), st.binary())
def test_message_has_16_byte_header(kind: Command | Answer, number: int, body: bytes) -> None:
    message = pack(kind, number, body)
    assert HEADER.unpack(message[:16]) == (kind, number, len(body))
    assert message[16:] == body
