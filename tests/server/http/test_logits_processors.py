"""`logits_processors`, `vllm_xargs` and the pooling routes, with the real engine on the tiny model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from logitship import BadRequestError, Client, CustomLogitProcessor
from logitship.builtin_processors.batch_processors import STR_POOLING_REJECTS_LOGITSPROCS
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import BatchRows
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http_server import running_server
from tests.helpers.answers import error_of

# The tiny model has a token for each byte; that of a printable character `c` is ord(c) - 29.
FORCE = {
    "class_name": "Force",
    "source": """
from logitship import CustomLogitProcessor

class Force(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            row[ord(params["text"][len(params["__req__"].output_ids) % len(params["text"])]) - 29] += 1000.0
        return logits
""",
}
CALLABLES = '''
class Force:
    """Forces one byte."""
    def __init__(self, text, strength=1000.0):
        self.token_id, self.strength = ord(text) - 29, strength
    def __call__(self, output_token_ids, logits):
        logits[self.token_id] += self.strength
        return logits

def force_z(output_token_ids, logits):
    logits[ord("z") - 29] += 1000.0
    return logits
'''
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "ignore_eos": True,
    },
}
ROUTES = pytest.mark.parametrize("path", list(BODIES))


class ForceByte(LogitsProcessor):
    """A batch processor that forces `extra_args["byte"]`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: BatchRows[int] = BatchRows(lambda params, *_: params.extra_args and params.extra_args.get("byte"))

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("byte", 0), int):
            raise ValueError("byte must be an integer")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.rows.update(batch_update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, byte in self.rows.items():
            logits[row, byte - 29] += 1000.0
        return logits


class Upper(CustomLogitProcessor):
    """Replaces the most likely byte by an upper-case letter."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, params in zip(logits, custom_param_list, strict=True):
            row[int(row.argmax()) - params["by"]] += 10_000.0
        return logits


def text_of(answer: Any) -> str:
    """Return the text of a response of any of the three routes."""
    if "choices" not in answer:
        return str(answer["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


class Server:
    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60.0)

    def ok(self, path: str, **fields: Any) -> Any:
        answer = self.http.post(path, json=BODIES[path] | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def error(self, path: str, status_code: int = 400, **fields: Any) -> Any:
        return error_of(self.http.post(path, json=BODIES[path] | fields), status_code)


@pytest.fixture
def serve(
    make_engine: Callable[..., AsyncEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Server]]:
    (tmp_path / "served_callables.py").write_text(CALLABLES)
    monkeypatch.syspath_prepend(tmp_path)
    with ExitStack() as stack:

        def start(**settings: Any) -> Server:
            defaults: dict[str, Any] = {
                "logits_processor_pattern": r"served_callables\..*",
                "logits_processors": (ForceByte,),
            }
            engine = make_engine(port=0, log_level="error", shutdown_timeout=1.0, **(defaults | settings))
            server = Server(stack.enter_context(running_server(engine.config, engine)))
            stack.callback(server.http.close)
            return server

        yield start
    sys.modules.pop("served_callables", None)


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


@ROUTES
def test_list_of_all_kinds_of_processors(server: Server, path: str) -> None:
    shipped = {"processor": FORCE, "params": {"text": "abcd"}}
    answer = server.ok(path, logits_processors=[{"qualname": "served_callables.Force", "kwargs": {"text": "q"}}])
    assert text_of(answer) == "qqqq"
    assert text_of(server.ok(path, logits_processors=["served_callables.force_z"])) == "zzzz"
    assert text_of(server.ok(path, logits_processors=[shipped])) == "abcd"
    stronger = {"qualname": "served_callables.Force", "args": ["q", 5000.0]}
    assert text_of(server.ok(path, logits_processors=[shipped, stronger])) == "qqqq"


def test_receipts_are_in_list_order(server: Server) -> None:
    entries = ["served_callables.force_z", {"processor": FORCE, "params": {"text": "x"}}]
    meta = server.ok("/generate", logits_processors=entries)["meta_info"]
    assert [receipt["name"] for receipt in meta["receipts"]] == ["served_callables.force_z", "Force"]


def test_custom_params_are_the_default_of_an_entry(server: Server) -> None:
    sampling = BODIES["/generate"]["sampling_params"] | {"custom_params": {"text": "m"}}
    answer = server.ok("/generate", sampling_params=sampling, logits_processors=[{"processor": FORCE}])
    assert answer["text"] == "mmmm"


@ROUTES
def test_vllm_xargs_reach_the_batch_processor(server: Server, path: str) -> None:
    assert text_of(server.ok(path, vllm_xargs={"byte": ord("k")})) == "kkkk"
    # vLLM hands an empty object on as None, and documents plugins that rely on it.
    assert len(text_of(server.ok(path, vllm_xargs={}))) > 0
    error = server.error(path, vllm_xargs={"byte": "k"})
    assert error["message"] == "byte must be an integer"


@ROUTES
@pytest.mark.parametrize(
    ("entries", "param", "message"),
    [
        (["os.getcwd"], "logits_processors[0]", "'os.getcwd' is not allowed by this server"),
        ([{"processor": FORCE, "params": {}}, {"qualname": "os.system"}], "logits_processors[1]", "is not allowed"),
        (["served_callables.missing"], "logits_processors[0]", "could not be resolved"),
        ([{"qualname": "served_callables.Force"}], "logits_processors[0]", "text"),
        (
            [{"processor": {"name": "no_such"}}],
            "logits_processors[0]",
            "no processor is installed or registered as 'no_such'",
        ),
        ([{"processor": {"name": "disallowed_tokens"}, "params": {}}], "logits_processors[0].params", "token_ids"),
        ([{"processor": {"source": "x = (", "class_name": "X"}}], "logits_processors[0]", "never closed"),
        ([{}], "logits_processors[0]", "has neither"),
        ([5], "logits_processors[0]", "must be an object"),
        ({}, "logits_processors", "list"),
        ("os.getcwd", "logits_processors", "list"),
        (["served_callables.force_z"] * 65, "logits_processors", "at most 64 are allowed"),
    ],
)
def test_refused_lists(server: Server, path: str, entries: Any, param: str, message: str) -> None:
    error = server.error(path, logits_processors=entries)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert message in error["message"]


@ROUTES
def test_both_fields_are_refused(server: Server, path: str) -> None:
    error = server.error(path, logits_processors=[], custom_logit_processor=FORCE)
    assert error["param"] == "logits_processors"
    assert "not both" in error["message"]


def test_callables_require_a_pattern(serve: Callable[..., Server]) -> None:
    server = serve(logits_processor_pattern=None, enable_custom_logit_processor=False)
    error = server.error("/v1/completions", logits_processors=["served_callables.force_z"])
    assert "not supported by this server. See --logits-processor-pattern" in error["message"]
    error = server.error("/v1/completions", logits_processors=[{"processor": FORCE}])
    assert error["param"] == "logits_processors[0]"
    assert "--enable-custom-logit-processor" in error["message"]


@pytest.mark.parametrize(("path", "prompts"), [("/generate", "text"), ("/v1/completions", "prompt")])
def test_list_per_prompt(server: Server, path: str, prompts: str) -> None:
    def texts(**fields: Any) -> list[str]:
        answer = server.ok(path, **{prompts: ["a", "b"]}, **fields)
        return [each["text"] for each in (answer if isinstance(answer, list) else answer["choices"])]

    one = [{"qualname": "served_callables.Force", "args": ["q"]}]
    assert texts(logits_processors=one) == ["qqqq"] * 2
    assert texts(logits_processors=[one, ["served_callables.force_z"]]) == ["qqqq", "zzzz"]
    error = server.error(path, **{prompts: ["a", "b"]}, logits_processors=[one])
    assert error["param"] == "logits_processors"
    error = server.error(path, **{prompts: ["a", "b"]}, logits_processors=[one, ["os.getcwd"]])
    assert error["param"] == "logits_processors[1][0]"


def test_client_sends_classes_with_params(server: Server) -> None:
    with Client(server.url) as client:
        entries = ["served_callables.force_z", {"processor": Upper, "params": {"by": 32}}]
        answer = client.generate("hello", logits_processors=entries, max_new_tokens=3, ignore_eos=True)
        assert answer.text == "ZZZ"
        assert [receipt.name for receipt in answer.receipts] == ["served_callables.force_z", "Upper"]
        with pytest.raises(BadRequestError, match=r"logits_processors\[0\]"):
            client.generate("hello", logits_processors=["os.getcwd"])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify", "/score", "/v1/rerank"])
def test_pooling_is_refused_with_vllms_message(server: Server, path: str) -> None:
    error = error_of(server.http.post(path, json={"input": "hello"}))
    assert error["message"].startswith("The model does not support ")
    error = error_of(server.http.post(path, json={"input": "hello", "logits_processors": ["a.b"]}))
    assert error["message"] == f"logits_processors: {STR_POOLING_REJECTS_LOGITSPROCS}"


@ROUTES
def test_params_are_checked_against_the_schema(serve: Callable[..., Server], path: str) -> None:
    server = serve()
    source = FORCE["source"].replace("    def", "    params_schema = {'required': ['text']}\n\n    def", 1)
    force = {**FORCE, "source": source}
    given = [{"processor": force, "params": {"text": "ab"}}]
    assert text_of(server.ok(path, logits_processors=given)) == "abab"
    error = server.error(path, custom_logit_processor=force)
    assert error["message"].endswith("params: 'text' is a required property")
    error = server.error(path, logits_processors=[{"processor": force, "params": {"txt": "ab"}}])
    assert error["message"].endswith("params: 'text' is a required property")
    assert error["param"] == "logits_processors[0].params"
    unsupported = {**FORCE, "source": source.replace("required", "requird")}
    error = server.error(path, custom_logit_processor=unsupported)
    assert "params_schema: 'requird' is not a keyword of JSON Schema" in error["message"]
