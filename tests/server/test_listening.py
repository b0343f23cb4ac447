from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from logitship.server.listening import base_url, open_sockets
from logitship.server.refusals import StartError


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=f"^--port {port}: already in use: .*0: any free one"):
            open_sockets("127.0.0.1", port)


def test_all_addresses_of_a_name_get_the_same_port() -> None:
    with ExitStack() as opened:
        sockets = [opened.enter_context(each) for each in open_sockets("localhost", 0)]
        assert len({each.getsockname()[1] for each in sockets}) == 1
        assert "127.0.0.1" in {each.getsockname()[0] for each in sockets}


def test_addresses_of_other_machines() -> None:
    with pytest.raises(StartError, match=r"^cannot listen on 192\.0\.2\.1:0: "):
        open_sockets("192.0.2.1", 0)  # an address for documentation
    with pytest.raises(StartError, match=r"^--host nobody\.invalid: "):
        open_sockets("nobody.invalid", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::1", "http://[::1]:1"),
        ("::", "http://[::1]:1"),
        ("localhost", "http://localhost:1"),
    ],
)
def test_url(host: str, url: str) -> None:
    assert base_url(host, 1) == url
