"""Parsing of SGLang's `/generate` body into the engine's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any
from uuid import uuid4

from logitship.sampler.sampling_params import SamplingParams
from logitship.server.api_keys import Caller
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.admission import (
    check_batch,
    check_continuations,
    check_one_per_prompt,
    check_processor_lists,
    max_tokens_within_model,
    path_for_prompt,
    read_processors,
    read_prompt,
    sampling_params,
    value_for_prompt,
)
from logitship.server.http.running_requests import Submission
from logitship.server.refusals import BadRequest
from logitship.server.requests.messages import GenerationRequest
from logitship.server.schemas.request_schema import parse_model
from logitship.server.schemas.sglang_schemas import GenerateRequest, SGLangSamplingParams
from logitship.server.schemas.structured_outputs import constraint_of
from logitship.server.uploads.request_bodies import ReceivedBody

_NAMES_IN_SAMPLING_PARAMS = {field.name: field.name for field in fields(SamplingParams)} | {
    "bad_words": "bad_words",
    "bad_words_token_ids": "bad_words",
    "early_stopping": "early_stopping",
    "include_stop_str_in_output": "no_stop_trim",
    "length_penalty": "length_penalty",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "num_beams": "num_beams",
    "seed": "sampling_seed",
}
_NAMES_IN_BODY = {
    "extra_args": "vllm_xargs",
    "logprob_token_ids": "token_ids_logprob",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprobs_start": "logprob_start_len",
    "return_sampling_mask": "return_sampling_mask",
    "sampling_mask_format": "sampling_mask_format",
    "return_sampling_edits": "return_sampling_edits",
    "sampling_logprobs_mode": "sampling_logprobs_mode",
    "trace": "trace",
}
_ONE_PER_PROMPT = (
    "sampling_params",
    "rid",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_sampling_mask",
)


@dataclass(frozen=True)
class ParsedGenerateRequest:
    """A parsed `/generate` body.

    Attributes:
        submissions: one per prompt.
        rids: ids of the continuations in the response.
        many: the response is a list: the prompts are a list, or `n` is above 1.
        texts_in_logprobs: include the tokens' texts next to their ids.
    """

    submissions: list[Submission]
    rids: list[str]
    many: bool
    texts_in_logprobs: bool


async def parse_generate_request(
    engine: AsyncEngine, caller: Caller, received: ReceivedBody[GenerateRequest]
) -> ParsedGenerateRequest:
    """Validate what the schema cannot, tokenize, and build the engine's requests.

    Raises:
        RequestRefused: names the field.
    """
    parser = _GenerateParser(engine, caller, received)
    parser.check_lists()
    samplings = await received.work.run_if_large(parser.samplings)
    n = samplings[0].n
    rids = parser.rids()
    return ParsedGenerateRequest(
        submissions=[await parser.submission(i, samplings[i], rids[i]) for i in range(len(samplings))],
        rids=rids if n == 1 else [f"{rid}_{j}" for rid in rids for j in range(n)],
        many=parser.is_batch or n > 1,
        texts_in_logprobs=received.value.return_text_in_logprobs,
    )


class _GenerateParser:
    """Parses one body, prompt by prompt."""

    def __init__(self, engine: AsyncEngine, caller: Caller, received: ReceivedBody[GenerateRequest]) -> None:
        body = received.value
        if (body.text is None) == (body.input_ids is None):
            raise BadRequest("text: give either text or input_ids", param="text")
        self._engine = engine
        self._caller = caller
        self._work = received.work
        self._ignored = received.ignored
        self._body = body
        self._at = "input_ids" if body.text is None else "text"
        given = body.input_ids if body.text is None else body.text
        self.is_batch = isinstance(given, list) and not (given and isinstance(given[0], int))
        self._prompts: Sequence[Any] = given if self.is_batch and isinstance(given, list) else [given]

    def check_lists(self) -> None:
        """Refuse an empty batch, and lists whose length is not the number of prompts."""
        check_batch(self._engine.config, len(self._prompts), self._at)
        prompts = len(self._prompts) if self.is_batch else None
        for name in _ONE_PER_PROMPT:
            check_one_per_prompt(getattr(self._body, name), prompts, name)
        if _is_nested(self._body.token_ids_logprob):
            check_one_per_prompt(self._body.token_ids_logprob, prompts, "token_ids_logprob")
        if self.is_batch:
            check_processor_lists(self._body, len(self._prompts))

    def samplings(self) -> list[SGLangSamplingParams]:
        """Return the sampling parameters of each prompt."""
        given = self._body.sampling_params
        samplings = [
            parse_model(
                SGLangSamplingParams,
                value_for_prompt(given, i),
                path_for_prompt(given, i, "sampling_params"),
                self._ignored,
            )
            for i in range(len(self._prompts))
        ]
        n = samplings[0].n
        if any(sampling.n != n for sampling in samplings):
            raise BadRequest("sampling_params: n must be the same for all prompts", param="sampling_params")
        counts = [max(n, sampling.num_beams or 1) for sampling in samplings]
        at, most = self._at, max(counts)
        if most > 1:
            index = counts.index(most)
            name = "num_beams" if most > n else samplings[index].n_field
            at = f"{path_for_prompt(given, index, 'sampling_params')}.{name}"
        check_continuations(self._engine.config, sum(counts), at)
        return samplings

    def rids(self) -> list[str]:
        """Return the request id of each prompt."""
        given = self._body.rid
        if given is None:
            return [uuid4().hex for _ in self._prompts]
        if "" in ([given] if isinstance(given, str) else given):
            raise BadRequest("rid: must not be empty", param="rid")
        if isinstance(given, str):
            return [f"{given}_{i}" for i in range(len(self._prompts))] if self.is_batch else [given]
        if len(set(given)) != len(given):
            raise BadRequest("rid: must be a different one for each prompt", param="rid")
        return given

    async def submission(self, i: int, sampling: SGLangSamplingParams, rid: str) -> Submission:
        """Build the engine's request for one prompt."""
        body = self._body
        at = f"{self._at}[{i}]" if self.is_batch else self._at
        sampling_at = path_for_prompt(body.sampling_params, i, "sampling_params")
        parsed = await self._work.run_if_large(
            read_processors,
            self._engine,
            self._caller,
            body,
            i if self.is_batch else None,
            sampling.custom_params,
            f"{sampling_at}.custom_params",
            constraint_of(sampling, sampling_at),
        )
        names = {**_sampling_names(sampling, sampling_at), **_names(body, i), **parsed.names, "prompt": at}
        if body.max_thinking_tokens is not None:
            names["thinking_token_budget"] = "max_thinking_tokens"
        prompt = await read_prompt(self._engine, self._work, self._prompts[i], at, add_special_tokens=True)
        start = _logprob_start(
            value_for_prompt(body.logprob_start_len, i), len(prompt.token_ids), names["prompt_logprobs_start"]
        )
        top = value_for_prompt(body.top_logprobs_num, i) if value_for_prompt(body.return_logprob, i) else None
        params = await sampling_params(
            self._engine,
            self._work,
            sampling,
            names,
            max_tokens=max_tokens_within_model(self._engine, prompt, sampling, "max_new_tokens"),
            min_tokens=sampling.min_new_tokens,
            seed=sampling.seed if sampling.sampling_seed is None else sampling.sampling_seed,
            include_stop_str_in_output=sampling.no_stop_trim,
            thinking_token_budget=_thinking_token_budget(body, sampling),
            logprobs=top,
            logprob_token_ids=_logprob_token_ids(body.token_ids_logprob, i),
            prompt_logprobs=None if start is None else top,
            prompt_logprobs_start=start or 0,
            extra_args=body.vllm_xargs or None,
            return_sampling_mask=value_for_prompt(body.return_sampling_mask, i),
            sampling_mask_format=body.sampling_mask_format,
            return_sampling_edits=body.return_sampling_edits and value_for_prompt(body.return_sampling_mask, i),
            sampling_logprobs_mode=body.sampling_logprobs_mode,
            trace=body.trace and body.trace.top,
        )
        request = GenerationRequest(
            rid=rid,
            tenant=self._caller.tenant,
            batch_rid=body.rid if self.is_batch and isinstance(body.rid, str) else None,
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            processors=parsed.processors,
            n=sampling.n,
            beam_search=sampling.beam_search,
        )
        if request.beam_search is not None and body.stream:
            raise BadRequest(
                "stream: is not available with beam search: the output is only known at the end", param="stream"
            )
        return Submission(request, names, sampling.stream_interval)


def _names(body: GenerateRequest, index: int) -> dict[str, str]:
    """Return the paths of the fields outside of `sampling_params` for one prompt."""
    names = {field: path_for_prompt(getattr(body, name), index, name) for field, name in _NAMES_IN_BODY.items()}
    if not _is_nested(body.token_ids_logprob):
        names["logprob_token_ids"] = "token_ids_logprob"
    return names


def _sampling_names(sampling: SGLangSamplingParams, at: str) -> dict[str, str]:
    """Return the paths of the fields of one prompt's `sampling_params`."""
    names = {**_NAMES_IN_SAMPLING_PARAMS, "n": sampling.n_field}
    if sampling.num_beams is None and sampling.use_beam_search:
        names["num_beams"] = sampling.n_field
    return {field: f"{at}.{name}" for field, name in names.items()}


def _is_nested(token_ids: Any) -> bool:
    return isinstance(token_ids, list) and bool(token_ids) and isinstance(token_ids[0], list)


def _logprob_token_ids(token_ids: Any, index: int) -> list[int] | None:
    """Return the tokens that one prompt names: a list of numbers is for all prompts."""
    named: list[int] | None = token_ids[index] if _is_nested(token_ids) else token_ids
    return named


def _thinking_token_budget(body: GenerateRequest, sampling: SGLangSamplingParams) -> int | None:
    one, other = body.max_thinking_tokens, sampling.thinking_token_budget
    if None not in (one, other) and one != other:
        raise BadRequest(
            "max_thinking_tokens: differs from thinking_token_budget in sampling_params",
            param="max_thinking_tokens",
        )
    return other if one is None else one


def _logprob_start(given: int, prompt_tokens: int, at: str) -> int | None:
    """Return the first prompt position with log-probabilities; None for none."""
    if not -1 <= given <= prompt_tokens:
        raise BadRequest(f"{at}: must be from -1 to the length of the prompt, {prompt_tokens}", param=at)
    # For -1, SGLang returns the last prompt token without a log-probability, which is useless. Its documentation and
    # its scoring requests expect an empty list, as here.
    return None if given in (-1, prompt_tokens) else given
