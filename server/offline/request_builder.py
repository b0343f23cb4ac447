"""From prompts and sampling parameters, in all the ways in which they are given, to the engine's requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from logitship.client.http.processor_argument import ProcessorStrings
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest, RequestRefused
from logitship.server.requests.messages import GenerationRequest
from logitship.server.requests.request_validation import Prompt, bad_words_token_ids, encode_prompt, in_client_words

from .error_translation import error_of_refusal
from .prompt_processors import Carried, read_carried
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
        request: what to submit.
        prompt: what it continues.
        names: the caller's names for what the engine's refusals name, where they differ.
    """

    request: GenerationRequest
    prompt: Prompt
    names: Mapping[str, str]


@dataclass(frozen=True)
class _Sampling:
    """Sampling parameters, read once for all the prompts that share them."""

    params: SamplingParams
    carried: Carried
    names: Mapping[str, str]


class RequestBuilder:
    """Makes requests for one engine. Nothing is submitted here: a mistake anywhere in a batch shows before it runs."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def build(
        self,
        prompts: Sequence[PromptLike],
        sampling_params: SamplingParamsLike | Sequence[SamplingParamsLike] | None,
        request_ids: Iterable[str],
        *,
        at: str = "prompts",
    ) -> list[OfflineRequest]:
        """One request a prompt.

        Args:
            prompts: what is continued.
            sampling_params: one for all prompts, or one a prompt.
            request_ids: at least as many.
            at: name of the prompts in error messages.

        Raises:
            InvalidRequest: the engine refuses one of them; names the field.
            TypeError: a prompt or a processor is none of the things that one can be given as.
            ValueError: the numbers of prompts and sampling parameters differ, or a value is out of its range.
        """
        samplings = self._samplings(sampling_params, len(prompts))
        requests = []
        for index, (prompt, sampling, request_id) in enumerate(zip(prompts, samplings, request_ids, strict=False)):
            with _noted(f"in {at}[{index}]" if len(prompts) > 1 else ""):
                place = f"{at}[{index}]" if len(prompts) > 1 else at
                requests.append(self._request(prompt, place, sampling, request_id))
        return requests

    def _samplings(self, given: Any, count: int) -> list[_Sampling]:
        """The sampling parameters of each prompt."""
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
        names, places = dict(_FIELD_NAMES), dict[str, str]()
        with refusals_translated():
            if isinstance(given, Mapping):
                names |= {field: f"{at}.{name}" for field, name in SGLANG_NAMES.items()}
                places = {place: f"{at}.{name}" for place, name in SGLANG_CONSTRAINTS.items()}
                given = SamplingParams.from_sglang(given, at)
            if not isinstance(given, SamplingParams):
                raise TypeError(f"{at}: expected logitship.SamplingParams or a dict, not {type(given).__name__}")
            params = dataclasses.replace(
                given,
                bad_words_token_ids=bad_words_token_ids(self._engine.tokenizer, given.bad_words),
                logprobs_mode=given.logprobs_mode or self._engine.config.logprobs_mode,
            )
            if given.beam_search is not None:
                params = dataclasses.replace(
                    params,
                    # 1 is the default, and changes nothing.
                    temperature=0 if given.temperature == 1 else given.temperature,
                    logprobs_mode=given.logprobs_mode or "processed_logprobs",
                )
            carried = read_carried(params, to_string, self._engine.config.max_processor_size)
        names |= {field: places.get(place, place) for field, place in carried.names.items()}
        return _Sampling(params, carried, names)

    def _request(self, given: PromptLike, at: str, sampling: _Sampling, request_id: str) -> OfflineRequest:
        names = {**sampling.names, "prompt": at}
        with refusals_translated():
            prompt = self._prompt(given, at)
            request = GenerationRequest(
                rid=request_id,
                prompt_token_ids=prompt.token_ids,
                sampling_params=self._ended_by_the_model(sampling.params, prompt),
                processors=sampling.carried.processors,
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
        if isinstance(given, Sequence) and all(type(token_id) is int for token_id in given):
            return dataclasses.replace(self._encode(list(given), at), text=text)
        raise TypeError(f"{at}: expected a text or a list of token ids (integers), not {_describe(given)}")

    def _encode(self, value: str | list[int], at: str) -> Prompt:
        return encode_prompt(self._engine.tokenizer, self._engine.model.max_model_len, value, at)

    def _check_n(self, request: GenerationRequest) -> None:
        n, param = request.num_sequences, "n" if request.best_of is None else "best_of"
        limit = self._engine.config.max_num_seqs + self._engine.config.max_queued_requests
        if n > limit:
            raise BadRequest(f"asks for {n} continuations, this engine takes at most {limit}", param=param)

    def _ended_by_the_model(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        """As in vLLM, an output that reaches the model's length ends there, however much was asked for."""
        room = self._engine.model.max_model_len - len(prompt.token_ids)
        if params.max_tokens is None or params.max_tokens <= room or params.min_tokens > room or room < 1:
            return params
        return dataclasses.replace(params, max_tokens=room)


def _from_mapping(given: Mapping[str, Any], at: str) -> tuple[Any, str | None]:
    """What is continued, and the text that it was made of where both are given."""
    if unknown := [key for key in given if key not in ("prompt", "prompt_token_ids") and given[key] is not None]:
        raise ValueError(f"{at}: {unknown[0]!r} is not supported: give 'prompt' or 'prompt_token_ids'")
    text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise ValueError(f"{at}: has neither 'prompt' nor 'prompt_token_ids'")
    return (text, None) if token_ids is None else (token_ids, text)


def _describe(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        odd = next(each for each in value if type(each) is not int)
        return f"a {type(value).__name__} with {type(odd).__name__} in it"
    return type(value).__name__


@contextmanager
def refusals_translated(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise the engine's refusals as what they are to a Python program.

    Args:
        names: the caller's names, for refusals in the engine's words; None: they are in the caller's already.
    """
    try:
        yield
    except RequestRefused as refused:
        if names is not None:
            in_client_words(refused, names)
        raise error_of_refusal(refused) from refused.__cause__


@contextmanager
def _noted(note: str) -> Iterator[None]:
    """Say which prompt of a batch an error is about."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if note:
            error.add_note(note)
        raise
