"""Building of HTTP requests from the arguments of the client's methods. Pure functions; nothing is sent here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import orjson

from logitship.client.serialization.artifact import ARTIFACT_SIZE, Artifact
from logitship.client.serialization.processor_string import RegisteredProcessor

from .processor_argument import LargestClass, ProcessorStrings, is_list_of_processors
from .request_options import ChatOptions, CompletionOptions, GenerateOptions, SGLangSamplingOptions

_PROCESSOR_FIELDS = ("processor", "logits_processors")
"""May contain classes, which are converted to JSON when the body is finished."""
_MIN_INTEGER, _MAX_INTEGER = -(1 << 63), (1 << 64) - 1
"""The integers that orjson encodes."""
_SGLANG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_OPENAI_NAMES = {name: other for other, name in _SGLANG_NAMES.items()}


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request that has not been sent.

    Attributes:
        method: `GET`, `POST` or `DELETE`.
        path: path on the server, with its leading slash.
        json: the body, or None.
        body: the body as bytes, or None.
        largest: the class with the longest string in it, which may be too long for the server; None if it has none.
        stream: whether the response is streamed.
        idempotent: whether sending it twice does no harm, so that it is retried after a broken connection.
        fault_token: the `stop_reason` that reports a failed processor (vLLM with logitship's plugin), or None.
    """

    method: str
    path: str
    json: Any = None
    stream: bool = False
    idempotent: bool = False
    fault_token: int | None = None
    body: bytes | None = None
    largest: LargestClass | None = field(default=None, compare=False)

    @property
    def content(self) -> bytes | None:
        """The encoded body.

        Raises:
            TypeError: the body contains an object that has no JSON form.
        """
        return self.body if self.json is None else orjson.dumps(self.json)

    @property
    def content_type(self) -> str | None:
        """The media type of the body."""
        if self.json is not None:
            return "application/json"
        return None if self.body is None else "application/octet-stream"


def get(path: str) -> HttpRequest:
    """Build a `GET` request."""
    return HttpRequest("GET", path, idempotent=True)


def generate(prompt: Any, n: int | None, options: GenerateOptions, *, stream: bool) -> HttpRequest:
    """Build a request for SGLang's `/generate`.

    Raises:
        TypeError: an argument has the wrong type, or is unknown.
        ValueError: an argument has an invalid value: an empty prompt, lists of different lengths, NaN.
    """
    batch_size = check_prompt(prompt)
    fields = _renamed(_checked(options, GenerateOptions.__optional_keys__), _SGLANG_NAMES)
    sampling = {key: fields.pop(key) for key in SGLangSamplingOptions.__optional_keys__ & fields.keys()}
    if "seed" in sampling:
        sampling["sampling_seed"] = sampling.pop("seed")
    if n is not None:
        sampling["n"] = check_n(n)
    params = fields.pop("params", None)
    body: dict[str, Any] = {"text" if _is_text(prompt) else "input_ids": prompt, "stream": stream}
    if isinstance(params, list | tuple):
        per_prompt = _one_per_prompt("params", params, batch_size)
        body["sampling_params"] = [_with_params(sampling, one, f"params[{i}]") for i, one in enumerate(per_prompt)]
    else:
        body["sampling_params"] = _with_params(sampling, params, "params")
    if isinstance(fields.get("rid"), list | tuple):
        _one_per_prompt("rid", fields["rid"], batch_size)
    strings = ProcessorStrings()
    finished = _finish(body, fields, batch_size, strings)
    return HttpRequest("POST", "/generate", finished, stream, largest=strings.largest)


def completions(prompt: Any, n: int | None, options: CompletionOptions, *, stream: bool) -> HttpRequest:
    """Build a request for OpenAI's `/v1/completions`.

    Raises:
        TypeError: as `generate`.
        ValueError: as `generate`.
    """
    batch_size = check_prompt(prompt)
    fields = _renamed(_checked(options, CompletionOptions.__optional_keys__), _OPENAI_NAMES)
    return _openai("/v1/completions", {"prompt": prompt}, n, fields, batch_size, stream)


def chat(messages: Any, n: int | None, options: ChatOptions, *, stream: bool) -> HttpRequest:
    """Build a request for OpenAI's `/v1/chat/completions`.

    Raises:
        TypeError: as `generate`.
        ValueError: as `generate`.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError('messages: expected a list such as [{"role": "user", "content": "Hi"}]')
    if not messages:
        raise ValueError("messages: the list is empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise TypeError(f"messages[{i}]: expected a dict with 'role' and 'content'")
    fields = _renamed(_checked(options, ChatOptions.__optional_keys__), _OPENAI_NAMES)
    body = {"messages": _json_form("messages", list(messages))}
    return _openai("/v1/chat/completions", body, n, fields, None, stream)


@dataclass(frozen=True)
class RegisterRequests:
    """The requests that register a processor.

    Attributes:
        request: uploads the processor.
        artifacts: what it refers to, which has to be there before.
    """

    request: HttpRequest
    artifacts: tuple[Artifact, ...] = ()


def register(processor: Any, name: str | None = None, *, artifact_size: int | None = ARTIFACT_SIZE) -> RegisterRequests:
    """Build the requests that upload a processor.

    Args:
        processor: see `ProcessorLike`.
        name: name to register it by; None: its class's name.
        artifact_size: bytes of a tensor or array from which on it is uploaded by itself; None: none is.
    """
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError("name: expected a string such as 'Lipogram'")
    strings = ProcessorStrings(artifact_size)
    form = orjson.loads(strings(processor, "processor"))
    query = "" if name is None else f"?name={quote(name, safe='')}"
    request = HttpRequest("POST", f"/v1/processors{query}", form, idempotent=True, largest=strings.largest)
    return RegisterRequests(request, tuple(strings.artifacts))


def find_artifact(digest: str) -> HttpRequest:
    """Build a request that asks whether an artifact is on the server."""
    return get(f"/v1/artifacts/{digest}")


def upload_artifact(artifact: Artifact) -> HttpRequest:
    """Build a request that uploads an artifact."""
    assert artifact.content is not None
    return HttpRequest("POST", "/v1/artifacts", body=artifact.content.data, idempotent=True)


def processor(id: str | RegisteredProcessor) -> HttpRequest:
    """Build a request for the details of a processor, by name, name and version, or digest."""
    return get(_processor_path(id))


def delete_processor(id: str | RegisteredProcessor) -> HttpRequest:
    """Build a request that deletes a version, or all versions of a name or a digest."""
    return HttpRequest("DELETE", _processor_path(id))


def abort(rid: str | None) -> HttpRequest:
    """Build a request that cancels one request, or all of them (None)."""
    if rid is not None and (not isinstance(rid, str) or not rid):
        # SGLang cancels every request whose id *begins* with `rid`: an empty one would cancel them all.
        raise ValueError("rid: expected the id of a request")
    return HttpRequest("POST", "/abort_request", {"rid": rid or "", "abort_all": rid is None}, idempotent=True)


def flush_cache() -> HttpRequest:
    """Build a request that clears the server's prefix cache."""
    return HttpRequest("POST", "/flush_cache", idempotent=True)


def _processor_path(id: str | RegisteredProcessor) -> str:
    given = (id.id or id.digest) if isinstance(id, RegisteredProcessor) else id
    if not isinstance(given, str) or not given:
        raise ValueError("id: expected a name, a name and version such as 'Lipogram@2', or a digest")
    return f"/v1/processors/{quote(given, safe='@:')}"


def is_many(prompt: Any, n: int | None) -> bool:
    """Return whether the client's method returns a list: for a list of prompts, and whenever `n` is given."""
    return n is not None or not (isinstance(prompt, str) or _is_token_id(prompt[0]))


def check_prompt(prompt: Any) -> int | None:
    """Check the prompt; return the number of prompts, or None for a single one.

    Raises:
        TypeError: it is neither text, token ids, nor a list of one of them.
        ValueError: it is empty, or cannot be encoded.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("prompt: the text is empty")
        _json_text("prompt", prompt)
        return None
    if not isinstance(prompt, list | tuple):
        raise TypeError(f"prompt: expected text, token ids, or a list of one of them, not {type(prompt).__name__}")
    if not prompt:
        raise ValueError("prompt: the list is empty")
    if _is_token_id(prompt[0]):
        _check_token_ids("prompt", prompt)
        return None
    for i, one in enumerate(prompt):
        if type(one) is not type(prompt[0]) or not isinstance(one, str | list | tuple):
            raise TypeError(f"prompt[{i}]: all prompts of a batch are texts, or all are lists of token ids")
        if not one:
            raise ValueError(f"prompt[{i}]: the prompt is empty")
        if isinstance(one, str):
            _json_text(f"prompt[{i}]", one)
        else:
            _check_token_ids(f"prompt[{i}]", one)
    return len(prompt)


def check_n(n: Any) -> int:
    """Check and return `n`, a number of continuations."""
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"n: expected an integer, not {type(n).__name__}")
    if n < 1:
        raise ValueError(f"n: must be 1 or greater, not {n}")
    return n


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or isinstance(prompt[0], str)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_token_ids(name: str, token_ids: Sequence[Any]) -> None:
    for i, token_id in enumerate(token_ids):
        if not _is_token_id(token_id):
            raise TypeError(f"{name}[{i}]: expected a token id, not {type(token_id).__name__}")
        if token_id < 0:
            raise ValueError(f"{name}[{i}]: a token id cannot be negative: {token_id}")
        if token_id > _MAX_INTEGER:
            raise ValueError(f"{name}[{i}]: an integer of more than 64 bits cannot be sent")


def _checked(options: Any, known: Collection[str]) -> dict[str, Any]:
    """Return `options` without those that are None, in their JSON forms; check that all are known."""
    fields = {}
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "send fields unknown to the client in extra_body={…}"
            raise TypeError(f"unknown argument {name!r}: {hint}")
        if value is None:
            continue
        if name == "logit_bias":
            value = _string_keys(name, value)
        fields[name] = value if name in _PROCESSOR_FIELDS else _json_form(name, value)
    return fields


def _renamed(fields: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields under the names of the API.

    Args:
        fields: the fields.
        names: the API's names by the other API's.

    Raises:
        ValueError: a field was given by both names, with different values.
    """
    for name in names.keys() & fields.keys():
        if fields.get(names[name], fields[name]) != fields[name]:
            raise ValueError(f"{name}: differs from {names[name]}, which is the same")
    return {names.get(name, name): value for name, value in fields.items()}


def _string_keys(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a dict of token ids and numbers, not {type(value).__name__}")
    return {str(key): entry for key, entry in value.items()}


def _json_form(path: str, value: Any) -> Any:
    """Return a value in the types that orjson encodes: NumPy's float64 becomes a float, any mapping a dict.

    Refuses values that JSON lacks or would silently change (infinity becomes null, a key 5 becomes "5").
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _json_text(path, value)
    if isinstance(value, int):
        if not _MIN_INTEGER <= value <= _MAX_INTEGER:
            raise ValueError(f"{path}: an integer of more than 64 bits cannot be sent")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path}: {value} has no JSON form")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{path}: the keys of a JSON object are strings, not {type(key).__name__} ({key!r})")
        return {_json_text(path, key): _json_form(f"{path}[{key!r}]", entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_json_form(f"{path}[{i}]", entry) for i, entry in enumerate(value)]
    raise TypeError(f"{path}: {type(value).__name__} has no JSON form; send numbers, texts, lists and dicts")


def _json_text(path: str, text: str) -> str:
    """Return a text as a plain string: orjson takes no keys of another class."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        unpaired = text[error.start]
        raise ValueError(f"{path}: the unpaired surrogate {unpaired!r} at {error.start} has no JSON form") from None
    return str.__str__(text)


def _one_per_prompt(name: str, values: Sequence[Any], batch_size: int | None) -> Sequence[Any]:
    if batch_size is None:
        raise ValueError(f"{name}: a list needs a list of prompts, with one entry per prompt")
    if len(values) != batch_size:
        raise ValueError(f"{name}: {len(values)} entries for {batch_size} prompts")
    return values


def _with_params(sampling: Mapping[str, Any], params: Any, name: str) -> dict[str, Any]:
    if params is None:
        return dict(sampling)
    return {**sampling, "custom_params": _check_params(name, params)}


def _check_params(name: str, params: Any) -> dict[str, Any]:
    if not isinstance(params, Mapping):
        raise TypeError(f"{name}: expected a dict, not {type(params).__name__}")
    if "__req__" in params:
        raise ValueError(f"{name}: the key '__req__' is reserved for the server")
    return dict(params)


def _openai(
    path: str, body: dict[str, Any], n: int | None, fields: dict[str, Any], batch_size: int | None, stream: bool
) -> HttpRequest:
    body["stream"] = stream
    if stream:
        body["stream_options"] = {"include_usage": True}
    if n is not None:
        body["n"] = check_n(n)
    params = fields.pop("params", None)
    if isinstance(params, list | tuple):
        raise TypeError("params: this route takes one dict for all prompts; `generate` takes one per prompt")
    if params is not None:
        body["custom_params"] = _check_params("params", params)
    strings = ProcessorStrings()
    finished = _finish(body, fields, batch_size, strings)
    return HttpRequest("POST", path, finished, stream, largest=strings.largest)


def _finish(
    body: dict[str, Any], fields: dict[str, Any], batch_size: int | None, to_string: ProcessorStrings
) -> dict[str, Any]:
    """Add the processors and the remaining fields."""
    processor = fields.pop("processor", None)
    several = fields.pop("logits_processors", None)
    if processor is not None and several is not None:
        raise ValueError("logits_processors: give either this or processor, not both")
    extra_body = fields.pop("extra_body", {})
    if processor is not None:
        body["custom_logit_processor"] = _processor_field(processor, batch_size, to_string)
    if several is not None:
        body["logits_processors"] = _processor_list(several, batch_size, to_string)
    return {**body, **fields, **extra_body}


def _processor_field(processor: Any, batch_size: int | None, to_string: ProcessorStrings) -> Any:
    """Return the value of `custom_logit_processor`: a processor string, or lists of them shaped like `processor`."""

    def for_one_prompt(given: Any, name: str) -> Any:
        if is_list_of_processors(given):
            return [to_string(each, f"{name}[{i}]") for i, each in enumerate(given)]
        return to_string(given, name)

    if batch_size is None or not is_list_of_processors(processor):
        return for_one_prompt(processor, "processor")
    return [
        given if given is None else for_one_prompt(given, f"processor[{i}]")
        for i, given in enumerate(_one_per_prompt("processor", processor, batch_size))
    ]


def _processor_list(entries: Any, batch_size: int | None, to_string: ProcessorStrings) -> list[Any]:
    """Return the value of `logits_processors`: its entries with processor strings, or one such list per prompt."""
    name = "logits_processors"
    if not isinstance(entries, list | tuple):
        raise TypeError(f"{name}: expected a list, not {type(entries).__name__}")
    if batch_size is not None and entries and all(isinstance(each, list | tuple) for each in entries):
        per_prompt = enumerate(_one_per_prompt(name, entries, batch_size))
        return [[_entry(each, f"{name}[{i}][{j}]", to_string) for j, each in enumerate(own)] for i, own in per_prompt]
    return [_entry(each, f"{name}[{i}]", to_string) for i, each in enumerate(entries)]


def _entry(entry: Any, name: str, to_string: ProcessorStrings) -> Any:
    if not isinstance(entry, Mapping) or "processor" not in entry:
        if not isinstance(entry, str) and not (isinstance(entry, Mapping) and "qualname" in entry):
            raise TypeError(
                f"{name}: expected a dict with 'processor' and 'params', one with 'qualname', 'args' and 'kwargs', or "
                "a qualified name"
            )
        return _json_form(name, entry)
    sent = {**entry, "processor": to_string(entry["processor"], f"{name}['processor']")}
    if entry.get("params") is not None:
        sent["params"] = _check_params(f"{name}['params']", entry["params"])
    return _json_form(name, sent)
