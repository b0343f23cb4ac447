from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

HELLO = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "a"}}


def test_tokenize_text(client: Any) -> None:
    answer = client.ok("/tokenize", {"prompt": "aé"})
    assert answer == {"tokens": [97, 195, 169], "count": 3, "max_model_len": 64}
    assert client.ok("/v1/tokenize", {"prompt": "a", "model": "tiny"})["tokens"] == [97]
    assert client.ok("/tokenize", {"prompt": ""})["tokens"] == []


def test_tokenize_several_texts(client: Any) -> None:
    answer = client.ok("/tokenize", {"prompt": ["ab", "c"], "return_token_strs": True})
    assert (answer["tokens"], answer["count"]) == ([[97, 98], [99]], [2, 1])
    assert answer["token_strs"] == [["a", "b"], ["c"]]
    nothing = client.ok("/tokenize", {"prompt": [], "return_token_strs": True})
    assert (nothing["tokens"], nothing["count"], nothing["token_strs"]) == ([], [], [])


def test_tokenize_conversation(client: Any) -> None:
    def rendered(**options: Any) -> bytes:
        return bytes(client.ok("/tokenize", {"messages": HELLO, **options})["tokens"])

    assert rendered() == b"<user>a<assistant>"
    assert rendered(add_generation_prompt=False) == b"<user>a"
    assert rendered(continue_final_message=True) == b"<user>a"
    assert rendered(chat_template_kwargs={"think": 1}) == b"<user>a|think=1<assistant>"


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [TOOL]},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"think": 1}},
        {"reasoning_effort": "low"},
    ],
)
def test_fields_of_the_template_require_messages(client: Any, field: dict[str, Any]) -> None:
    [name] = field
    error = client.post("/tokenize", {"prompt": "a", **field}).json()["error"]
    assert (error["param"], error["message"]) == (name, f"{name}: requires messages")


def test_template_without_the_fields(client: Any, engine: Any) -> None:
    answer = client.post("/tokenize", {"messages": HELLO, "reasoning_effort": "low"})
    assert "x-logitship-ignored" not in answer.headers
    assert bytes(answer.json()["tokens"]) == b"<user>a|reasoning_effort=low<assistant>"
    engine.tokenizer.template_uses = lambda variable: False
    answer = client.post("/tokenize", {"messages": HELLO, "reasoning_effort": "low"})
    assert answer.headers["x-logitship-ignored"] == "reasoning_effort"
    assert bytes(answer.json()["tokens"]) == b"<user>a<assistant>"
    for path in ("/tokenize", "/v1/chat/completions"):
        error = client.post(path, {"messages": HELLO, "tools": [TOOL]}).json()["error"]
        assert (error["param"], "does not support tools" in error["message"]) == ("tools", True)
    client.ok("/tokenize", {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"})


def test_detokenize(client: Any) -> None:
    assert client.ok("/detokenize", {"tokens": [97, 98]}) == {"text": "ab", "prompt": "ab"}
    assert client.ok("/v1/detokenize", {"tokens": [[97], [98]]}) == {"text": ["a", "b"], "prompt": ["a", "b"]}
    assert client.ok("/detokenize", {"tokens": []})["text"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt", 400),
        ("/tokenize", {"messages": []}, "messages", 400),
        ("/tokenize", {"prompt": "x" * 513}, "prompt", 400),
        ("/tokenize", {"prompt": ["a", "x" * 513]}, "prompt[1]", 400),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, "model", 404),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", 400),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template", 400),
        ("/detokenize", {}, "tokens", 400),
        ("/detokenize", {"tokens": [256]}, "tokens", 400),
        ("/detokenize", {"tokens": [[1], [0, -1]]}, "tokens[1]", 400),
        ("/detokenize", {"tokens": ["a"]}, "tokens", 400),
    ],
)
def test_refusals(client: Any, path: str, body: Any, param: str, status: int) -> None:
    answer = client.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_probes(client: Any, engine: Any) -> None:
    assert client.http.get("/version").json() == {"version": version("logitship")}
    assert client.http.get("/load").json() == {"server_load": 3}
    assert client.http.get("/ping").status_code == client.http.post("/ping").status_code == 200
    engine.alive = False
    assert client.http.get("/ping").status_code == 503
