"""Conversion of prompts and sampling parameters, in all their forms, to requests for the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from logitship.client.http.processor_argument import ProcessorStrings
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest, RequestRefused
from logitship.server.requests.messages import GenerationRequest
from logitship.server.requests.request_validation import Prompt, bad_words_token_ids, encode_prompt, in_client_words

from .error_translation import error_of_refusal
from .prompt_processors import PromptProcessors, read_prompt_processors
from .sampling_params import SGLANG_CONSTRAINTS, SGLANG_NAMES, SamplingParams

PromptLike: TypeAlias = str | Sequence[int] | Mapping[str, Any] | Prompt
"""A text, token ids, or vLLM's `{"prompt": text}` and `{"prompt_token_ids": [...]}`."""
SamplingParamsLike: TypeAlias = SamplingParams | Mapping[str, Any]
"""`SamplingParams`, or a dict in SGLang's names."""

_FIELD_NAMES = {"bad_words_token_ids": "bad_words", "rid": "request_id"}


@dataclass(frozen=True)
class OfflineRequest:
    """A request for the engine.

    Attributes:
        request: the request to submit.
        prompt: its prompt.
        names: the caller's names for the fields that the engine's refusals name, where they differ.
    """

    request: GenerationRequest
    prompt: Prompt
    names: Mapping[str, str]


@dataclass(frozen=True)
class _Sampling:
    """Sampling parameters, read once for all prompts that share them."""

    params: SamplingParams
    processors: PromptProcessors
    names: Mapping[str, str]


class RequestBuilder:
    """Builds requests for one engine without submitting them, so that mistakes are found before any prompt runs."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def build(
        self,
        prompts: Sequence[PromptLike],
        sampling_params: SamplingParamsLike | Sequence[SamplingParamsLike] | None,
        request_ids: Iterable[str],
        *,
        at: str = "prompts",
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> list[OfflineRequest]:
        """Build one request per prompt.

        Args:
            prompts: the prompts.
            sampling_params: one for all prompts, or one per prompt.
            request_ids: at least one per prompt.
            at: name of the prompts in error messages.
            names: the caller's names of fields of `SamplingParams`, where they differ.

        Raises:
            InvalidRequest: the engine refuses a request; names the field.
            TypeError: a prompt or a processor has an unsupported type.
            ValueError: the numbers of prompts and sampling parameters differ, or a value is out of range.
        """
        samplings = self._samplings(sampling_params, len(prompts))
        requests = []
        for index, (prompt, sampling, request_id) in enumerate(zip(prompts, samplings, request_ids, strict=False)):
            with _add_note(f"in {at}[{index}]" if len(prompts) > 1 else ""):
                location = f"{at}[{index}]" if len(prompts) > 1 else at
                sampling_names = {**sampling.names, **names}
                requests.append(self._request(prompt, location, sampling, request_id, sampling_names))
        return requests

    def _samplings(self, given: Any, count: int) -> list[_Sampling]:
        """Read the sampling parameters of each prompt."""
        at = "sampling_params"
        to_string = ProcessorStrings()
        if isinstance(given, list | tuple):
            if len(given) != count:
                raise ValueError(f"{at}: has {len(given)} entries for {count} prompts")
            read: dict[int, _Sampling] = {}
            for index, one in enumerate(given):
                if id(one) not in read:  # callers often repeat one object
                    read[id(one)] = self._sampling(one, f"{at}[{index}]", to_string)
            return [read[id(one)] for one in given]
        sampling = self._sampling(SamplingParams() if given is None else given, at, to_string)
        return [sampling] * count

    def _sampling(self, given: Any, at: str, to_string: ProcessorStrings) -> _Sampling:
        names, aliases = dict(_FIELD_NAMES), dict[str, str]()
        with refusals_translated():
            if isinstance(given, Mapping):
                names |= {field: f"{at}.{name}" for field, name in SGLANG_NAMES.items()}
                aliases = {location: f"{at}.{name}" for location, name in SGLANG_CONSTRAINTS.items()}
                given = SamplingParams.from_sglang(given, at)
            if not isinstance(given, SamplingParams):
                raise TypeError(f"{at}: expected logitship.SamplingParams or a dict, not {type(given).__name__}")
            if given.bad_words_token_ids:  # only these can be outside of the vocabulary
                names["bad_words"] = "bad_words_token_ids"
            words = bad_words_token_ids(self._engine.tokenizer, given.bad_words)
            params = dataclasses.replace(
                given,
                bad_words_token_ids=(*given.bad_words_token_ids, *words),
                logprobs_mode=given.logprobs_mode or self._engine.config.logprobs_mode,
            )
            if given.beam_search is not None:
                params = dataclasses.replace(
                    params,
                    # 1 is the default, and changes nothing.
                    temperature=0 if given.temperature == 1 else given.temperature,
                    logprobs_mode=given.logprobs_mode or "processed_logprobs",
                )
            processors = read_prompt_processors(params, to_string, self._engine.config.max_processor_size)
        names |= {field: aliases.get(location, location) for field, location in processors.names.items()}
        return _Sampling(params, processors, names)

    def _request(
        self, given: PromptLike, at: str, sampling: _Sampling, request_id: str, sampling_names: Mapping[str, str]
    ) -> OfflineRequest:
        names = {**sampling_names, "prompt": at}
        with refusals_translated():
            prompt = self._prompt(given, at)
            request = GenerationRequest(
                rid=request_id,
                prompt_token_ids=prompt.token_ids,
                sampling_params=self._limit_to_model_length(sampling.params, prompt),
                processors=sampling.processors.processors,
                n=sampling.params.n,
                best_of=sampling.params.best_of,
                beam_search=sampling.params.beam_search,
            )
        with refusals_translated(names):
            self._check_n(request)
            self._engine.check(request)
        return OfflineRequest(request, prompt, names)

    def _prompt(self, given: Any, at: str) -> Prompt:
        if isinstance(given, Prompt):
            return given
        text = None
        if isinstance(given, Mapping):
            given, text = _from_mapping(given, at)
        if isinstance(given, str):
            return self._encode(given, at)
        if (
            isinstance(given, Sequence)
            and not isinstance(given, bytes | bytearray)
            and all(type(token_id) is int for token_id in given)
        ):
            return dataclasses.replace(self._encode(list(given), at), text=text)
        raise TypeError(f"{at}: expected a string or a list of token ids (integers), not {_describe(given)}")

    def _encode(self, value: str | list[int], at: str) -> Prompt:
        return encode_prompt(self._engine.tokenizer, self._engine.model.max_model_len, value, at)

    def _check_n(self, request: GenerationRequest) -> None:
        n, param = request.num_sequences, "n" if request.best_of is None else "best_of"
        limit = self._engine.config.max_num_seqs + self._engine.config.max_queued_requests
        if n > limit:
            raise BadRequest(f"asks for {n} continuations, this engine takes at most {limit}", param=param)

    def _limit_to_model_length(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        """Cap `max_tokens` at the model's length, as vLLM does."""
        limit = self._engine.model.max_model_len - len(prompt.token_ids)
        if params.max_tokens is None or params.max_tokens <= limit or params.min_tokens > limit or limit < 1:
            return params
        return dataclasses.replace(params, max_tokens=limit)


def _from_mapping(given: Mapping[str, Any], at: str) -> tuple[Any, str | None]:
    """Return the prompt, and its text if both text and token ids are given."""
    if unknown := [key for key in given if key not in ("prompt", "prompt_token_ids") and given[key] is not None]:
        raise ValueError(f"{at}: {unknown[0]!r} is not supported: give 'prompt' or 'prompt_token_ids'")
    text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise ValueError(f"{at}: has neither 'prompt' nor 'prompt_token_ids'")
    return (text, None) if token_ids is None else (token_ids, text)


def _describe(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        odd = next(each for each in value if type(each) is not int)
        return f"a {type(value).__name__} with {type(odd).__name__} in it"
    return type(value).__name__


@contextmanager
def refusals_translated(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise the engine's refusals as exceptions of a Python program.

    Args:
        names: the caller's names for fields that refusals name. None: refusals use the caller's names already.
    """
    try:
        yield
    except RequestRefused as refused:
        if names is not None:
            in_client_words(refused, names)
        raise error_of_refusal(refused) from refused.__cause__


@contextmanager
def _add_note(note: str) -> Iterator[None]:
    """Add to exceptions which prompt of a batch they are about."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if note:
            error.add_note(note)
        raise
