"""All routes through a real socket, with the real engine on the tiny model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import orjson
import pytest
import torch

from logitship import (
    LLM,
    BadRequestError,
    Client,
    CustomLogitProcessor,
    GenerationError,
    NotFoundError,
    PermissionDeniedError,
    ProcessorFault,
    RegisteredProcessor,
    SamplingParams,
)
from logitship.client.serialization.processor_string import parse, to_text
from logitship.client.serialization.serialize import serialize
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http_server import running_server
from tests.helpers.answers import error_of

PROMPT = "hello"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
DEADLINE = 60.0
LENGTH = 200
"""Output tokens of a request under the gate."""
SHIPPING = {"enable_custom_logit_processor": True}

PERMITS = {
    "class_name": "Permits",
    "source": """
import time
from pathlib import Path
from logitship import CustomLogitProcessor

class Permits(CustomLogitProcessor):
    '''Holds a step back until the test permits that many tokens.'''
    def __call__(self, logits, custom_param_list=None):
        for params in custom_param_list:
            while len(params["__req__"].output_ids) >= int(Path(params["permits"]).read_text() or 0):
                time.sleep(0.002)
        return logits
""",
}


class Force(CustomLogitProcessor):
    """Forces one token."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, params in zip(logits, custom_param_list, strict=True):
            row[params["token_id"]] += 1000.0
        return logits


class Served:
    """A running server, and helpers to send requests to it."""

    def __init__(self, url: str, engine: AsyncEngine) -> None:
        self.url = url
        self.engine = engine
        self.http = httpx.Client(base_url=url, timeout=DEADLINE)

    def ok(self, path: str, body: Any) -> Any:
        """Post a request that must succeed. Returns the JSON body."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, body: Any) -> Any:
        """Post a request that must be refused. Returns the error."""
        return error_of(self.http.post(path, json=body))

    def events(self, path: str, body: Any) -> list[Any]:
        """Post a request with `stream`. Returns the data of the events, without [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            *events, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert done == "[DONE]"
        return [orjson.loads(event) for event in events]

    def abort(self, body: Any) -> None:
        """Abort a request. The response is empty."""
        answer = self.http.post("/abort_request", json=body)
        assert (answer.status_code, answer.content) == (200, b"")

    def tokens(self, text: str) -> list[int]:
        """Tokenize a text: one token per byte."""
        return self.engine.tokenizer.encode(text)

    def state(self) -> Any:
        """Return the engine's state, from `/server_info`."""
        return self.http.get("/server_info").json()["internal_states"][0]

    def wait_for(self, **values: int) -> None:
        """Wait until the engine's state has these values."""
        deadline = time.monotonic() + DEADLINE
        while {name: self.state()[name] for name in values} != values:
            assert time.monotonic() < deadline, f"not {values} but {self.state()}"


@pytest.fixture
def serve(make_engine: Callable[..., AsyncEngine]) -> Iterator[Callable[..., Served]]:
    """Starts servers with these settings; they stop after the test."""
    with ExitStack() as stack:

        def start(**settings: Any) -> Served:
            engine = make_engine(port=0, log_level="error", shutdown_timeout=1.0, **settings)
            served = Served(stack.enter_context(running_server(engine.config, engine)), engine)
            stack.callback(served.http.close)
            return served

        yield start


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()


@pytest.fixture
def shipping(serve: Callable[..., Served]) -> Served:
    """A server that accepts shipped code."""
    return serve(**SHIPPING, max_num_seqs=8)


class Gate:
    """Limits the number of tokens of the requests with the processor `PERMITS`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.permit(0)

    def permit(self, tokens: int) -> None:
        """Allow this many tokens per request, and no more yet."""
        self._tokens = tokens
        self._file.write_text(str(tokens))

    def open(self) -> None:
        """Remove the limit."""
        self.permit(1 << 30)

    def permit_until_running(self, served: Served, sequences: int) -> None:
        """Allow steps until this many sequences run: sequences are only added between steps."""
        deadline = time.monotonic() + DEADLINE
        while served.state()["running"] != sequences:
            assert time.monotonic() < deadline, f"not {sequences} but {served.state()}"
            self.permit(self._tokens + 1)

    def body(self, prompt: str | list[str] = PROMPT, **fields: Any) -> dict[str, Any]:
        """Create a `/generate` body that the gate limits."""
        sampling = {
            "temperature": 0,
            "ignore_eos": True,
            "max_new_tokens": LENGTH,
            "custom_params": {"permits": str(self._file)},
            **fields.pop("sampling_params", {}),
        }
        processor = [PERMITS] * len(prompt) if isinstance(prompt, list) else PERMITS
        return {"text": prompt, "sampling_params": sampling, "custom_logit_processor": processor, **fields}


@pytest.fixture
def gate(tmp_path: Path, shipping: Served) -> Iterator[Gate]:
    """A gate that opens before the server stops, even if the test fails."""
    gate = Gate(tmp_path / "permits")
    yield gate
    gate.open()


def test_get_routes(served: Served) -> None:
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/health").content == b""
    assert served.http.get("/health_generate").status_code == 200
    for path in ("/model_info", "/get_model_info"):
        info = served.http.get(path).json()
        assert {
            "model_path": "tiny",
            "tokenizer_path": "tiny",
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
        }.items() <= info.items()
        assert (info["vocab_size"], info["max_model_len"]) == (260, 512)
    for path in ("/server_info", "/get_server_info"):
        info = served.http.get(path).json()
        assert info["max_num_seqs"] == 4
        assert info["internal_states"][0]["accepting"] is True
    assert [model["id"] for model in served.http.get("/v1/models").json()["data"]] == ["tiny"]
    assert served.http.get("/v1/models/tiny").json()["max_model_len"] == 512
    assert served.http.get("/openapi.json").json()["info"]["title"] == "logitship"
    assert served.http.get("/docs").status_code == 200
    assert served.http.post("/flush_cache").status_code == 200
    assert served.http.post("/abort_request", json={"rid": "nobody's"}).status_code == 200
    assert served.http.get("/nothing").status_code == 404


def test_sglang_stream_is_cumulative(served: Served) -> None:
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}}
    whole = served.ok("/generate", body)
    events = served.events("/generate", body)
    assert [len(event["output_ids"]) for event in events] == list(range(1, 25))
    for earlier, later in pairwise(events):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][:-1] == earlier["output_ids"]
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 24}
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * 23


def test_finish_reasons(served: Served) -> None:
    free = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    tokens = served.ok("/generate", {"text": PROMPT, "sampling_params": free})["output_ids"]
    last = next(token for i, token in enumerate(tokens) if i > 0 and token not in tokens[:i] and token >= 4)
    at = tokens.index(last)
    ended = served.ok("/generate", {"text": PROMPT, "sampling_params": {**free, "stop_token_ids": [last]}})
    assert ended["output_ids"] == tokens[: at + 1]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": last}
    allowed = {**free, "allowed_token_ids": served.tokens("a")}
    ended = served.ok("/generate", {"text": PROMPT, "sampling_params": {**allowed, "stop": ["aaa"]}})
    assert ended["text"] == ""
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": "aaa"}


def test_batch_with_n_is_ordered_by_prompt(served: Served) -> None:
    sampling = {"temperature": 1.5, "n": 2, "max_new_tokens": 6, "sampling_seed": 5, "ignore_eos": True}
    answers = served.ok("/generate", {"text": ["a", "bc"], "rid": "r", "sampling_params": sampling})
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 1, 2, 2]
    alone = [served.ok("/generate", {"text": text, "sampling_params": sampling}) for text in ("a", "bc")]
    assert [answer["output_ids"] for answer in answers] == [each["output_ids"] for pair in alone for each in pair]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]


def test_stop_regex(served: Served) -> None:
    allowed = {"temperature": 0, "allowed_token_ids": served.tokens("a")}
    body = {"text": PROMPT, "sampling_params": {**allowed, "max_new_tokens": 9, "stop_regex": ["b+", "a{3}$"], "n": 2}}
    for ended in served.ok("/generate", body):
        assert ended["text"] == "aaa"
        assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": "a{3}$"}
    for path, prompt in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        wanted = {**prompt, **allowed, "max_tokens": 9, "stop_regex": "a{3}$"}
        choice = served.ok(path, wanted)["choices"][0]
        assert choice.get("text", choice.get("message", {}).get("content")) == "aaa"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "a{3}$")
        events = [event["choices"][0] for event in served.events(path, wanted)]
        texts = [event.get("text") or event.get("delta", {}).get("content") or "" for event in events]
        assert [text for text in texts if text] == ["a", "a", "a"]


def test_openai_sdk(served: Served) -> None:
    sampling: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "temperature": 1.0, "seed": 3}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        completion = client.completions.create(prompt=PROMPT, logprobs=2, **sampling)
        stream = client.completions.create(prompt=PROMPT, stream=True, **sampling)
        assert "".join(event.choices[0].text for event in stream) == completion.choices[0].text
        assert completion.choices[0].logprobs is not None
        assert completion.usage is not None
        assert len(completion.choices[0].logprobs.tokens or []) == completion.usage.completion_tokens
        chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **sampling)
        pieces = client.chat.completions.create(messages=MESSAGES, stream=True, **sampling)
        assert "".join(e.choices[0].delta.content or "" for e in pieces) == chat.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="top_p") as refused:
            client.completions.create(prompt=PROMPT, top_p=2, model="tiny")
        assert refused.value.param == "top_p"


class Misspells(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits + custom_param_list[0]["biass"]


def test_messages_of_all_clients_have_the_authors_line(shipping: Served) -> None:
    params = {"bias": 1.0}
    with Client(shipping.url) as client, pytest.raises(GenerationError) as of_client:
        client.generate(PROMPT, processor=Misspells, params=params)
    extra_body = {"custom_logit_processor": Misspells.to_str(), "custom_params": params}
    with openai.OpenAI(base_url=f"{shipping.url}/v1", api_key="any", max_retries=0) as sdk:
        with pytest.raises(openai.BadRequestError) as of_sdk:
            sdk.completions.create(model="tiny", prompt=PROMPT, extra_body=extra_body)
        with pytest.raises(openai.APIError) as of_stream:
            list(sdk.completions.create(model="tiny", prompt=PROMPT, extra_body=extra_body, stream=True))
    offline = SamplingParams(custom_logit_processor=Misspells, custom_params=params)
    with pytest.raises(ProcessorFault) as of_llm:
        LLM._from_engine(shipping.engine).generate(PROMPT, offline, use_tqdm=False)
    line = 'in __call__: return logits + custom_param_list[0]["biass"])'
    for caught in (of_client, of_sdk, of_stream, of_llm):
        message = str(caught.value)
        assert "processor Misspells raised KeyError: 'biass' (test_real_engine.py, line " in message
        assert line in message


async def test_async_openai_sdk(served: Served) -> None:
    sampling: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        completion = await client.completions.create(prompt=PROMPT, **sampling)
        stream = await client.completions.create(prompt=PROMPT, stream=True, **sampling)
        assert "".join([e.choices[0].text async for e in stream]) == completion.choices[0].text
        chat = await client.chat.completions.create(messages=MESSAGES, **sampling)
        pieces = await client.chat.completions.create(messages=MESSAGES, stream=True, **sampling)
        text = "".join([e.choices[0].delta.content or "" async for e in pieces])
        assert text == chat.choices[0].message.content


def test_digests_in_a_header(served: Served) -> None:
    processors = [{"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [5]}}]
    body = {"prompt": PROMPT, "max_tokens": 2, "logits_processors": processors, "regex": "[a-z]+"}
    answer = served.http.post("/v1/completions", json=body)
    digests = [receipt["digest"] for receipt in answer.json()["choices"][0]["receipts"]]
    assert len(digests) == 2
    assert answer.headers["X-Logitship-Processors"] == ", ".join(digests)


TOOL_SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": TOOL_SCHEMA, "strict": True}}
    for name in ("weather", "time")
]
NAMED_TOOL = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize("parser", [None, "hermes", "llama3_json"])
@pytest.mark.parametrize("choice", ["required", NAMED_TOOL], ids=str)
def test_constrained_tool_calls(parser: str | None, choice: Any, serve: Callable[..., Served]) -> None:
    served = serve(tool_call_parser=parser)
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
    [answer] = served.ok("/v1/chat/completions", body)["choices"]
    [call] = answer["message"]["tool_calls"]
    assert answer["message"]["content"] is None
    assert call["function"]["name"] in (["time"] if choice is NAMED_TOOL else ["weather", "time"])
    assert orjson.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    deltas = [event["choices"][0]["delta"] for event in served.events("/v1/chat/completions", body)]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", [])]
    assert {"name": parts[0]["name"], "arguments": "".join(part["arguments"] for part in parts)} == call["function"]


def test_strict_tools_that_the_model_may_call(serve: Callable[..., Served]) -> None:
    served = serve(tool_call_parser="llama3_json")
    served.engine.tokenizer.template_uses = lambda variable: True  # type: ignore[method-assign]
    (brace,) = served.tokens("{")
    body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 100, "temperature": 0}
    called = served.ok("/v1/chat/completions", {**body, "logit_bias": {str(brace): 100}})["choices"][0]
    assert called["message"]["tool_calls"][0]["function"]["name"] in ("weather", "time")
    text = served.ok("/v1/chat/completions", {**body, "logit_bias": {str(brace): -100}})["choices"][0]
    assert "tool_calls" not in text["message"]
    assert len(text["message"]["content"]) > 10


def test_register_and_use_by_digest(shipping: Served) -> None:
    (letter,) = shipping.tokens("z")
    with Client(shipping.url) as client:
        registered = client.register(Force)
        assert client.register(Force) == registered
        options: dict[str, Any] = {"processor": registered, "params": {"token_id": letter}, "temperature": 0}
        generation = client.generate(PROMPT, max_new_tokens=3, **options)
        assert generation.text == "zzz"
        assert [receipt.digest for receipt in generation.receipts] == [registered.digest]
        client.flush_cache()
        assert client.completions(PROMPT, max_tokens=3, **options).text == "zzz"
        assert client.chat(MESSAGES, max_tokens=3, **options).text == "zzz"
        assert [g.text for g in client.generate(["a", "b"], max_new_tokens=2, **options)] == ["zz", "zz"]
        unknown = RegisteredProcessor("sha256:" + "0" * 64)
        with pytest.raises(BadRequestError, match="is registered: it never was") as refused:
            client.generate(PROMPT, processor=unknown)
        assert refused.value.param == "custom_logit_processor"


def test_registered_versions(shipping: Served) -> None:
    letters = dict(zip("xy", shipping.tokens("xy"), strict=True))
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 2}
    source = """
from logitship import CustomLogitProcessor

class Spells(CustomLogitProcessor):
    "Spells one letter."
    def __call__(self, logits, custom_param_list=None):
        logits[:, {token_id}] += 1000.0
        return logits
"""
    with Client(shipping.url) as client:
        forms = [{"source": source.format(token_id=each), "class_name": "Spells"} for each in letters.values()]
        assert [client.register(form, name="Letters").id for form in forms * 2] == ["Letters@1", "Letters@2"] * 2
        for name, text in (("Letters", "yy"), ("Letters@1", "xx"), ("Letters@2", "yy")):
            assert client.generate(PROMPT, processor=name, **options).text == text
            assert client.chat(MESSAGES, processor={"name": name}, temperature=0, max_tokens=2).text == text
        both = client.generate(["a", "b"], processor=["Letters@1", "Letters"], **options)
        assert [each.text for each in both] == ["xx", "yy"]
        listed = [each for each in client.processors() if each.name == "Letters"]
        assert [(each.id, each.description) for each in listed] == [
            ("Letters@1", "Spells one letter."),
            ("Letters@2", "Spells one letter."),
        ]
        details = client.processor("Letters@1")
        assert (details.source, details.class_name) == (forms[0]["source"], "Spells")
        assert details.digest == client.generate(PROMPT, processor="Letters@1", **options).receipts[0].digest
        assert client.delete_processor("Letters@2") == ["Letters@2"]
        assert client.generate(PROMPT, processor="Letters", **options).text == "xx"
        with pytest.raises(BadRequestError, match=r"custom_logit_processor: Letters@2 is not registered") as refused:
            client.generate(PROMPT, processor="Letters@2", **options)
        assert refused.value.param == "custom_logit_processor"
        with pytest.raises(BadRequestError, match="did you mean Letters"):
            client.generate(PROMPT, processor="Leters", **options)
        assert client.delete_processor(client.register(forms[1], name="Letters")) == ["Letters@3"]
        assert client.delete_processor("Letters") == ["Letters@1"]
        for ask in (client.processor, client.delete_processor):
            with pytest.raises(NotFoundError, match="Letters is not registered any more"):
                ask("Letters")
        with pytest.raises(PermissionDeniedError, match="only the server's operator"):
            client.delete_processor("disallowed_tokens")
        with pytest.raises(BadRequestError, match="name: 'a b' is not a name"):
            client.register(forms[0], name="a b")


def flat(table: list[Any]) -> list[float]:
    """Flatten the numbers of nested lists."""
    return [
        number
        for each in table
        for number in (flat(each) if isinstance(each, list) else [] if each is None else [each])
    ]


def test_prompt_logprobs_only(served: Served) -> None:
    body = {
        "text": PROMPT,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 0},
    }
    one_token = {**body, "sampling_params": {"max_new_tokens": 1}}
    steps = served.state()["steps"]
    answer = served.ok("/generate", body)
    assert served.state()["steps"] == steps + 1
    assert (answer["text"], answer["output_ids"]) == ("", [])
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 0)
    assert (meta["output_token_logprobs"], meta["output_top_logprobs"]) == ([], [])
    assert [token_id for _, token_id, _ in meta["input_token_logprobs"]] == served.tokens(PROMPT)
    expected = served.ok("/generate", one_token)["meta_info"]
    # A row more in the same multiplication rounds differently.
    assert flat(meta["input_token_logprobs"]) == pytest.approx(flat(expected["input_token_logprobs"]), abs=1e-4)
    assert flat(meta["input_top_logprobs"]) == pytest.approx(flat(expected["input_top_logprobs"]), abs=1e-4)
    (event,) = served.events("/generate", body)
    assert event["meta_info"]["input_token_logprobs"] == meta["input_token_logprobs"]
    echo = served.ok("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 0})
    assert echo["choices"][0]["text"] == PROMPT
    assert echo["choices"][0]["logprobs"]["token_logprobs"] == [lp for lp, _, _ in meta["input_token_logprobs"]]
    assert echo["usage"]["completion_tokens"] == 0
    chat = served.ok("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 0, "n": 2})
    assert [choice["finish_reason"] for choice in chat["choices"]] == ["length", "length"]
    assert chat["choices"][0]["message"]["content"] == ""
    assert served.events("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 0})


def test_first_position_has_no_logprob(served: Served) -> None:
    body: dict[str, Any] = {"text": PROMPT, "return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    whole = served.ok("/generate", {**body, "logprob_start_len": 0})["meta_info"]["input_token_logprobs"]
    part = served.ok("/generate", {**body, "logprob_start_len": 2})["meta_info"]["input_token_logprobs"]
    assert [token_id for _, token_id, _ in part] == [token_id for _, token_id, _ in whole[2:]]
    assert part[0][0] is None
    assert whole[2][0] is not None
    assert [lp for lp, _, _ in part[1:]] == pytest.approx([lp for lp, _, _ in whole[3:]], abs=1e-4)


def test_logprob_of_a_forbidden_token_is_finite(served: Served) -> None:
    allowed = {"allowed_token_ids": [70, 71], "logprobs_mode": "processed_logprobs", "temperature": 0}
    body = {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 3}
    meta = served.ok("/generate", {**body, "sampling_params": {**allowed, "max_new_tokens": 1}})["meta_info"]
    assert meta["output_top_logprobs"][0][2][0] == -9999.0
    answer = served.ok("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "logprobs": 3, **allowed})
    assert sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values())[0] == -9999.0


def test_top_k_above_the_vocabulary_size(served: Served) -> None:
    sampling = {"temperature": 1.5, "max_new_tokens": 12, "seed": 9, "ignore_eos": True}
    answers = [
        served.ok("/generate", {"text": PROMPT, "sampling_params": {**sampling, "top_k": top_k}})["output_ids"]
        for top_k in (-1, 0, 260, 1 << 30, (1 << 64) - 1)
    ]
    assert answers == [answers[0]] * 5
    one = served.ok("/generate", {"text": PROMPT, "sampling_params": {**sampling, "top_k": 1}})["output_ids"]
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    assert one == served.ok("/generate", {"text": PROMPT, "sampling_params": greedy})["output_ids"]


def test_64_bit_seeds(served: Served) -> None:
    def tokens(seed: int) -> Any:
        sampling = {"temperature": 1.5, "max_new_tokens": 12, "sampling_seed": seed, "ignore_eos": True}
        return served.ok("/generate", {"text": PROMPT, "sampling_params": sampling})["output_ids"]

    seeds = [-(1 << 63), -1, 0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    answers = {seed: tokens(seed) for seed in seeds}
    assert answers == {seed: tokens(seed) for seed in seeds}
    # The two readings of the same 64 bits.
    assert answers[-1] == answers[(1 << 64) - 1]
    assert answers[-(1 << 63)] == answers[1 << 63]
    assert len({tuple(answer) for answer in answers.values()}) == 4
    for seed in (-(1 << 63) - 1, 1 << 64):
        error = served.refused("/v1/completions", {"prompt": PROMPT, "seed": seed})
        assert (error["param"], error["message"]) == ("seed", "seed: must be an integer from -2^63 to 2^64 - 1")


def test_disconnect_frees_the_row_within_a_step(shipping: Served, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = Event()
    cancel = shipping.engine._cancel

    def cancel_and_tell(active: Any) -> None:
        cancel(active)
        noticed.set()

    monkeypatch.setattr(shipping.engine, "_cancel", cancel_and_tell)
    gate.permit(3)
    with shipping.http.stream("POST", "/generate", json=gate.body(stream=True)) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for count in (1, 2, 3):
            assert len(orjson.loads(next(lines).removeprefix("data: "))["output_ids"]) == count
    assert noticed.wait(DEADLINE)
    # Either the fourth step is under way, and held back, or the news came before it began.
    assert shipping.state()["steps"] == 3
    gate.open()
    shipping.wait_for(running=0)
    assert shipping.state()["steps"] <= 4


def test_abort_of_a_batch_spares_other_requests(shipping: Served, gate: Gate) -> None:
    with ThreadPoolExecutor() as pool:
        batch = pool.submit(shipping.ok, "/generate", gate.body(["a", "b"], rid="x"))
        others = {rid: pool.submit(shipping.ok, "/generate", gate.body(rid=rid)) for rid in ("x_9", "x_1_0", "xy", "y")}
        gate.permit_until_running(shipping, 6)
        shipping.abort({"rid": "x"})
        gate.open()
        reasons = [answer["meta_info"]["finish_reason"] for answer in batch.result(DEADLINE)]
        assert reasons == [{"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}] * 2
        for other in others.values():
            assert other.result(DEADLINE)["meta_info"]["finish_reason"] == {"type": "length", "length": LENGTH}


def test_abort_of_continuations(shipping: Served, gate: Gate) -> None:
    with ThreadPoolExecutor() as pool:
        two = {"sampling_params": {"n": 2}}
        all_of_it = pool.submit(shipping.ok, "/generate", gate.body(rid="x", **two))
        one_of_it = pool.submit(shipping.ok, "/generate", gate.body(rid="y", **two))
        single = pool.submit(shipping.ok, "/generate", gate.body(rid="z"))
        gate.permit_until_running(shipping, 5)
        for rid in ("x", "y_1", "z_0"):
            shipping.abort({"rid": rid})
        gate.open()
        kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in all_of_it.result(DEADLINE)]
        assert kinds == ["abort", "abort"]
        kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in one_of_it.result(DEADLINE)]
        assert kinds == ["length", "abort"]
        assert single.result(DEADLINE)["meta_info"]["finish_reason"]["type"] == "length"


def test_abort_of_a_batch_of_completions(shipping: Served, gate: Gate) -> None:
    body = {
        "prompt": ["a", "b"],
        "request_id": "x",
        "max_tokens": LENGTH,
        "ignore_eos": True,
        "custom_logit_processor": [PERMITS, PERMITS],
        "custom_params": gate.body()["sampling_params"]["custom_params"],
    }
    with ThreadPoolExecutor() as pool:
        batch = pool.submit(shipping.ok, "/v1/completions", body)
        gate.permit_until_running(shipping, 2)
        shipping.abort({"rid": "x"})
        gate.open()
        answer = batch.result(DEADLINE)
    assert answer["id"] == "x"
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]


def test_abort_all(shipping: Served, gate: Gate) -> None:
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(shipping.ok, "/generate", gate.body()) for _ in range(3)]
        gate.permit_until_running(shipping, 3)
        shipping.abort({"abort_all": True})
        gate.open()
        for each in running:
            assert each.result(DEADLINE)["meta_info"]["finish_reason"]["type"] == "abort"


def test_body_too_large(serve: Callable[..., Served]) -> None:
    served = serve(**SHIPPING, max_request_bytes=4096, max_processor_size=256)
    answer = served.http.post("/generate", json={"text": "x" * 4096})
    assert answer.status_code == 413
    source = {"source": "#" * 256, "class_name": "X"}
    answer = served.http.post("/generate", json={"text": "x", "custom_logit_processor": source})
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "custom_logit_processor")
    assert served.http.post("/v1/processors", json=source).status_code == 413
    served.ok("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}})


def test_api_key(serve: Callable[..., Served]) -> None:
    served = serve(api_key="secret")
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/processors", "/abort_request"):
        assert served.http.post(path, json={}).status_code == 401
    for path in ("/v1/models", "/server_info", "/get_model_info", "/openapi.json", "/docs"):
        assert served.http.get(path).status_code == 401
    for path in ("/health", "/health_generate"):
        assert served.http.get(path).status_code == 200
    with Client(served.url, api_key="secret") as client:
        assert client.generate(PROMPT, max_new_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    sdk = openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
    with sdk, pytest.raises(openai.AuthenticationError):
        sdk.models.list()


def test_processor_loads_per_minute(serve: Callable[..., Served]) -> None:
    served = serve(**SHIPPING, api_key=("mine", "other"), processor_loads_per_minute=2)

    def post(number: int, key: str, path: str = "/generate") -> httpx.Response:
        source = (
            f"from logitship import CustomLogitProcessor\nclass P{number}(CustomLogitProcessor):\n"
            "    def __call__(self, logits, custom_param_list=None):\n        return logits\n"
        )
        processor = {"source": source, "class_name": f"P{number}"}
        one = {"text": ["a", "b", "c"], "custom_logit_processor": processor, "sampling_params": {"max_new_tokens": 1}}
        body = processor if path == "/v1/processors" else one
        return served.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

    for _ in range(2):  # three prompts with one class; then it is loaded already
        assert post(1, "mine").status_code == 200
    assert post(2, "mine", "/v1/processors").status_code == 200
    for path in ("/generate", "/v1/processors"):
        refused = post(3, "mine", path)
        assert "--processor-loads-per-minute" in error_of(refused, 429)["message"]
        assert int(refused.headers["retry-after"]) >= 1
    assert post(3, "other", "/v1/processors").status_code == 200
    metrics = served.http.get("/metrics", headers={"Authorization": "Bearer mine"}).text
    assert 'logitship_rate_limited_requests_total{limit="processor_loads"} 2.0' in metrics


def test_shipping_key(serve: Callable[..., Served]) -> None:
    """API keys with the official SDK and with our client."""
    served = serve(**SHIPPING, api_key="generates", shipping_api_key="ships")
    extra = {"custom_logit_processor": Force.to_str(), "custom_params": {"token_id": 104}, "ignore_eos": True}
    for key in ("ships", "generates"):
        with (
            openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as sdk,
            Client(served.url, api_key=key) as client,
            ExitStack() as refused,
        ):
            if key == "ships":
                digest = client.register(Force).digest
            else:
                refused.enter_context(pytest.raises(openai.PermissionDeniedError, match="--shipping-api-key"))
            completion = sdk.completions.create(model="tiny", prompt="a", max_tokens=2, extra_body=extra)
            assert completion.usage is not None
            assert completion.usage.completion_tokens == 2
    with Client(served.url, api_key="generates") as client:
        for ship in (
            lambda: client.generate(PROMPT, processor=Force, params={"token_id": 104}),
            lambda: client.register(Force),
        ):
            with pytest.raises(PermissionDeniedError, match="--shipping-api-key") as denied:
                ship()
            assert (denied.value.status_code, denied.value.type) == (403, "permission_error")
        with pytest.raises(BadRequestError, match="installed or registered as 'Force'"):
            client.generate(PROMPT, processor="Force")
        with pytest.raises(NotFoundError, match="installed or registered as"):
            client.processor(digest)
        registered = RegisteredProcessor(digest)
        generation = client.generate(PROMPT, processor=registered, params={"token_id": 104}, max_new_tokens=2)
        assert generation.receipts[0].digest == digest


def test_abort_is_limited_to_the_tenant(serve: Callable[..., Served], gate: Gate) -> None:
    served = serve(**SHIPPING, api_key=["one", "two"])
    keys = {key: {"Authorization": f"Bearer {key}"} for key in ("one", "two")}
    served.http.headers.update(keys["one"])  # for what the helpers ask

    def generate(key: str) -> Any:
        return served.http.post("/generate", json=gate.body(rid="x"), headers=keys[key]).json()["meta_info"]

    with ThreadPoolExecutor() as pool:
        running = {key: pool.submit(generate, key) for key in keys}
        gate.permit_until_running(served, 2)
        served.abort({"rid": "x"})
        served.abort({"abort_all": True})
        gate.open()
        ended = {key: each.result(DEADLINE) for key, each in running.items()}
    assert {key: each["finish_reason"]["type"] for key, each in ended.items()} == {"one": "abort", "two": "length"}
    assert {each["id"] for each in ended.values()} == {"x"}


def test_allow_list(serve: Callable[..., Served], tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text(f"{parse(Force.to_str()).digest}  # Force\n")
    served = serve(**SHIPPING, allow_processor=str(allowed))
    with Client(served.url) as client:
        client.register(Force)
        options: dict[str, Any] = {"params": {"token_id": 104}, "max_new_tokens": 2}
        assert [receipt.name for receipt in client.generate(PROMPT, processor=Force, **options).receipts] == ["Force"]
        with pytest.raises(PermissionDeniedError, match=r"custom_logit_processor: the processor sha256:\w+ is not"):
            client.generate(PROMPT, processor={"source": "class A: ...", "class_name": "A"})
        with pytest.raises(PermissionDeniedError, match="--allow-processor"):
            client.register({"source": "class A: ...", "class_name": "A"})
        assert client.generate(PROMPT, processor="disallowed_tokens", params={"token_ids": [5]}).receipts


def test_unexpected_error_is_logged_once(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "stats", broken)
        answer = served.http.get("/server_info")
    assert error_of(answer, 500)["message"] == "internal server error"
    assert caplog.text.count("ZeroDivisionError: a secret") == 1
    assert "ASGI" not in capfd.readouterr().err
    served.ok("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}})


WEIGHTS = torch.zeros(1 << 15)
"""128 KiB, which differ from those of all other tests."""


class Weighs(CustomLogitProcessor):
    """Forces the token whose weight is largest."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        logits[:, int(WEIGHTS.argmax())] += 1000.0
        return logits


class WeighsToo(Weighs):
    """Another class with the same weights."""


def test_artifacts(shipping: Served) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 2}
    WEIGHTS[shipping.tokens("y")[0]] = 1.0
    string = serialize(Weighs, artifact_size=1 << 16)
    digest = string.artifacts[0].digest
    with Client(shipping.url) as client:
        with pytest.raises(BadRequestError, match=f"the artifact {digest} is missing: upload its bytes") as refused:
            client.generate(PROMPT, processor=to_text(string), **options)
        assert refused.value.param == "custom_logit_processor"
        assert [client.register(cls).id for cls in (Weighs, WeighsToo)] == ["Weighs@1", "WeighsToo@1"]
        assert [each["digest"] for each in client_get(shipping, "/v1/artifacts")["data"]] == [digest]
        for processor in ("Weighs", "WeighsToo", to_text(string), Weighs):
            assert client.generate(PROMPT, processor=processor, **options).text == "yy"
        details = client.processor("Weighs")
        assert details.size is not None
        assert details.size < 20_000
        assert digest in str(details.source_note)


def client_get(served: Served, path: str) -> Any:
    answer = served.http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()
