from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from logitship.server.offline.llm import LLM
from logitship.server.offline.outputs import RequestOutput
from tests.helpers.offline import GREEDY, quiet, tokens

CONVERSATION = [{"role": "user", "content": "hi"}]


def chat(llm: LLM, messages: Any, params: Any = GREEDY, **options: Any) -> list[RequestOutput]:
    return llm.chat(messages, params, use_tqdm=False, **options)


def test_chat_renders_the_template(llm: LLM) -> None:
    (output,) = chat(llm, CONVERSATION)
    assert output.prompt == "user: hi\nassistant: "
    assert tokens([output]) == tokens(quiet(llm, "user: hi\nassistant: ", GREEDY))


def test_chat_with_several_conversations(llm: LLM) -> None:
    other: list[Mapping[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
    ]
    outputs = chat(llm, [CONVERSATION, other], [GREEDY, GREEDY])
    assert [output.prompt for output in outputs] == ["user: hi\nassistant: ", "system: a\nb\nassistant: c\nassistant: "]


def test_chat_options(llm: LLM) -> None:
    assert chat(llm, CONVERSATION, add_generation_prompt=False)[0].prompt == "user: hi\n"
    template = "{{ greeting }} {{ messages[0]['content'] }}"
    (output,) = chat(llm, CONVERSATION, chat_template=template, chat_template_kwargs={"greeting": "oh"})
    assert output.prompt == "oh hi"


@pytest.mark.parametrize("name", ["add_generation_prompt", "max_characters", "chat_template", "tokenize"])
def test_reserved_template_variables(llm: LLM, name: str) -> None:
    with pytest.raises(ValueError, match=f"chat_template_kwargs: must not set '{name}'"):
        chat(llm, CONVERSATION, chat_template_kwargs={name: False})


def test_tools_are_a_template_variable(llm: LLM) -> None:
    template = "{{ tools[0]['name'] }}"
    (output,) = chat(llm, CONVERSATION, chat_template=template, chat_template_kwargs={"tools": [{"name": "oh"}]})
    assert output.prompt == "oh"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: must not be an empty list"),
        ([CONVERSATION, []], r"messages\[1\]: must not be an empty list"),
        ([CONVERSATION, [{"role": "user"}]], r"messages\[1\]\[0\].content: is missing"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content: part 0 .* not a text part"),
        ([{"role": "user", "content": "x" * 600}], "messages: has 6.. tokens"),
    ],
)
def test_invalid_conversations(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat(llm, messages)
