"""Standard output of a sandbox, as it is sent to the server."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.sandbox.printed_text import PrintedText
from logitship.sampler.sandbox.protocol import HEADER

ROOM = 400


class Server:
    """Receives messages, in calls or outside of them."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.in_call = True

    def send(self, body: bytes) -> bool:
        if self.in_call:
            self.messages.append(body)
        return self.in_call

    @property
    def text(self) -> str:
        return b"".join(self.messages).decode()


def test_line_is_sent_when_it_ends() -> None:
    server = Server()
    printed = PrintedText(server.send)
    printed.begin(ROOM)
    print("one", 2, end=" ", file=printed)
    assert server.messages == []
    print("three", file=printed)
    assert server.messages == [b"one 2 three\n"]
    print("four", end="", file=printed)
    printed.flush()
    assert server.text == "one 2 three\nfour"


def test_text_printed_outside_calls_is_sent_with_the_next_one() -> None:
    server = Server()
    server.in_call = False
    printed = PrintedText(server.send)
    printed.begin(ROOM)
    print("early", file=printed)
    assert server.messages == []
    server.in_call = True
    printed.begin(ROOM)
    printed.flush()
    assert server.text == "early\n"


def test_output_that_fills_the_limit_exactly_is_cut() -> None:
    server = Server()
    printed = PrintedText(server.send)
    printed.begin(ROOM)
    line = "x" * (printed._room - HEADER.size - 1) + "\n"
    printed.write(line)
    assert server.text == line
    printed.write("more\n")
    printed.write("and more\n")
    printed.flush()
    assert server.text == f"{line}… (the rest of this call's output is dropped)\n"


@given(st.lists(st.lists(st.text(max_size=300), max_size=12), min_size=1, max_size=4))
def test_a_call_sends_at_most_what_it_may(calls: list[list[str]]) -> None:
    server = Server()
    printed = PrintedText(server.send)
    for texts in calls:
        server.messages.clear()
        printed.begin(ROOM)
        for text in texts:
            printed.write(text)
        printed.flush()
        assert sum(HEADER.size + len(body) for body in server.messages) <= ROOM
        whole = "".join(texts).encode(errors="replace").decode()
        kept, cut, rest = server.text.partition("… (the rest")
        assert not rest or cut
        assert whole.startswith(kept.rstrip("\ufffd"))
        assert cut or kept == whole
