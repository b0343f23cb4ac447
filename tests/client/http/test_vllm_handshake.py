"""The plugin's reply in the error message that refuses the probe."""

from __future__ import annotations

import pytest

from logitship.client.http.vllm_handshake import PluginInfo


def test_message_round_trip() -> None:
    message = PluginInfo(fault_token=49151).to_message()
    assert PluginInfo.from_message(message) == PluginInfo(49151)
    assert PluginInfo.from_message(f"Invalid request: {message} (parameter=None)") == PluginInfo(49151)


@pytest.mark.parametrize(
    "message",
    [
        "the model is not there",
        "logitship plugin: ",
        "logitship plugin: {",
        "logitship plugin: {}",
        'logitship plugin: {"fault_token": "5"}',
        'logitship plugin: {"fault_token": 5',
    ],
)
def test_unrelated_messages(message: str) -> None:
    assert PluginInfo.from_message(message) is None
