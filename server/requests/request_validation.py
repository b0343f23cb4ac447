"""What a request must fulfil to run on this model. Everything else was checked before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from logitship.client.serialization.processor_string import ProcessorString
from logitship.sampler.batch_processors.plugins import Plugin
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.plain_values import NotPlainError, check_plain
from logitship.server.config import ServerConfig
from logitship.server.refusals import BadRequest

from .beam_search import BeamSearch
from .messages import GenerationRequest, ProcessorRequest

_MAX_PROCESSORS = 64
"""Of one request. Each costs a call a step, while which all other requests wait."""
_MAX_TRACED_PROCESSORS = 16
"""Of one request. A trace keeps a copy of the row for each, until the step ends."""
_MAX_STOP_STRINGS = 1024
"""Of one request. Each is searched for in every step."""
_MAX_STOP_TOKENS_OF_BEAMS = 64
"""Of a beam search. For each, `width` more candidates are looked at in every step."""
_MAX_DEPTH = 100
"""Of parameters: every sequence has its own copy of them, and Python's recursion is limited."""
_LEAVES = frozenset({str, int, float, bool, type(None)})


@dataclass(frozen=True)
class Limits:
    """What the model and the operator allow.

    Attributes:
        max_model_len: longest prompt and output together, in tokens.
        max_logprobs: most log-probabilities that a request may ask for at each position.
        max_num_seqs: most sequences that run together.
        knows_thinking: the operator said how the model writes the start and the end of its thinking.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_num_seqs: int
    knows_thinking: bool = False

    @classmethod
    def of(cls, config: ServerConfig, vocab_size: int, max_model_len: int) -> Limits:
        """Return the limits of a server."""
        return cls(
            vocab_size,
            max_model_len,
            config.max_logprobs,
            config.max_num_seqs,
            knows_thinking=config.reasoning_strings is not None,
        )


def check(request: GenerationRequest, limits: Limits) -> None:
    """Refuse what cannot run.

    Raises:
        BadRequest: `param` is a field of `SamplingParams`, or `prompt`, `n`, `best_of`, `processors` or
            `processors[i].params`.
    """
    _check_prompt(request.prompt_token_ids, limits)
    params = request.sampling_params
    if request.n < 1:
        raise BadRequest("must be 1 or greater", param="n")
    if request.num_sequences < request.n:
        raise BadRequest(f"must not be smaller than n, which is {request.n}", param="best_of")
    if request.beam_search is not None:
        _check_beam_search(request, request.beam_search, limits)
    room = limits.max_model_len - len(request.prompt_token_ids)
    if params.max_tokens is not None and params.max_tokens > room:
        raise BadRequest(
            f"asks for {params.max_tokens} tokens, but the prompt has {len(request.prompt_token_ids)} and the "
            f"model's length is {limits.max_model_len}: there is room for {room}",
            param="max_tokens",
        )
    if params.min_tokens > room:
        raise BadRequest(f"there is room for {room} tokens", param="min_tokens")
    if params.thinking_token_budget is not None and not limits.knows_thinking:
        raise BadRequest(
            "this server does not know how the model writes its thinking: start it with --reasoning-config "
            """'{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}', or as the model writes them""",
            param="thinking_token_budget",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > limits.max_logprobs:
            raise BadRequest(f"this server gives at most {limits.max_logprobs}", param=name)
    if params.prompt_logprobs is not None and params.prompt_logprobs_start >= len(request.prompt_token_ids):
        raise BadRequest("is beyond the prompt", param="prompt_logprobs_start")
    if len(request.processors) > _MAX_PROCESSORS:
        raise BadRequest(
            f"holds {len(request.processors)} processors, a request may have {_MAX_PROCESSORS}",
            param="processors",
        )
    if params.trace is not None and len(request.processors) > _MAX_TRACED_PROCESSORS:
        raise BadRequest(
            f"goes with at most {_MAX_TRACED_PROCESSORS} processors, the request has {len(request.processors)}",
            param="trace",
        )
    if len(params.stop) > _MAX_STOP_STRINGS:
        raise BadRequest(f"holds {len(params.stop)} strings, a request may have {_MAX_STOP_STRINGS}", param="stop")
    _check_depth(params.custom_params, "custom_params")
    _check_depth(params.extra_args, "extra_args")
    for place, carried in enumerate(request.processors):
        # Those without parameters of their own share the object.
        if isinstance(carried, ProcessorRequest) and carried.params is not params.custom_params:
            _check_depth(carried.params, f"processors[{place}].params")
    _check_tokens(params.stop_token_ids, "stop_token_ids", limits)
    _check_tokens(params.logit_bias, "logit_bias", limits)
    _check_tokens(params.allowed_token_ids or (), "allowed_token_ids", limits)
    _check_tokens((token for word in params.bad_words_token_ids for token in word), "bad_words", limits)


def check_with_plugins(params: SamplingParams, plugins: Iterable[Plugin]) -> None:
    """Let the installed batch processors refuse a request, as vLLM does.

    Raises:
        BadRequest: with what the processor says.
    """
    for plugin in plugins:
        try:
            plugin.validate_params(params)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        # The client's parameters made it fail, so it is the client who must be told.
        except Exception as error:
            raise BadRequest(
                f"the installed logits processor {plugin.name} does not take these parameters: "
                f"{type(error).__name__}: {error}"
            ) from error


def check_sandboxed(request: GenerationRequest, ships_code: Callable[[ProcessorString], bool]) -> None:
    """Refuse values that cannot travel to the processors of a request that run in sandboxes. JSON has none.

    Args:
        ships_code: tells those from installed ones, which run in the server's process.

    Raises:
        BadRequest: `param` is `processors[i].params`, or a field of `SamplingParams`, which processors see too.
    """
    sandboxed = {
        f"processors[{place}].params": carried.params
        for place, carried in enumerate(request.processors)
        if isinstance(carried, ProcessorRequest) and ships_code(carried.string)
    }
    if not sandboxed:
        return
    travelling = {name: getattr(request.sampling_params, name) for name in _SAMPLING_FIELDS}
    for param, value in {**sandboxed, **travelling}.items():
        try:
            check_plain(value)
        except NotPlainError as error:
            raise BadRequest(str(error), param=param) from None


_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name != "processors")


def _check_prompt(prompt: list[int], limits: Limits) -> None:
    if not prompt:
        raise BadRequest("is empty: it needs at least one token", param="prompt")
    if len(prompt) >= limits.max_model_len:
        raise BadRequest(
            f"has {len(prompt)} tokens, but the model's length is {limits.max_model_len}, prompt and output together",
            param="prompt",
        )
    _check_tokens(prompt, "prompt", limits)


def _check_beam_search(request: GenerationRequest, search: BeamSearch, limits: Limits) -> None:
    """Refuse what a search cannot honour, or would cost all other requests too much."""
    params = request.sampling_params
    if search.width > limits.max_num_seqs:
        raise BadRequest(
            f"asks for {search.width} beams, this server runs at most {limits.max_num_seqs} sequences together",
            param="num_beams",
        )
    if request.n > search.width:
        raise BadRequest(f"must not be greater than num_beams, which is {search.width}", param="n")
    if request.best_of is not None and request.best_of != request.n:
        raise BadRequest("does not go with beam search: leave it out", param="best_of")
    if params.max_tokens == 0:
        raise BadRequest("must be 1 or greater with beam search", param="max_tokens")
    if params.trace is not None:
        raise BadRequest("does not go with beam search, which draws no token: leave it out", param="trace")
    drawing = {
        "temperature": params.temperature != 0,
        "top_p": params.top_p != 1,
        "top_k": params.top_k > 0,
        "min_p": params.min_p > 0,
    }
    for name, is_asked in drawing.items():
        if is_asked:
            raise BadRequest("has no effect with beam search, which draws nothing at random: leave it out", param=name)
    if params.logprobs is not None and params.logprobs_mode != "processed_logprobs":
        raise BadRequest(
            "must be processed_logprobs with beam search: those are what it adds up", param="logprobs_mode"
        )
    if len(params.stop_token_ids) > _MAX_STOP_TOKENS_OF_BEAMS:
        raise BadRequest(
            f"holds {len(params.stop_token_ids)} tokens, with beam search at most {_MAX_STOP_TOKENS_OF_BEAMS}",
            param="stop_token_ids",
        )


def _check_depth(params: Mapping[str, Any] | None, param: str) -> None:
    level: list[Any] = [] if params is None else [params]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            values = each.values() if isinstance(each, Mapping) else each
            # The types alone, which C code looks through: a tree may hold millions of numbers.
            if not _LEAVES.issuperset(map(type, values)):
                below += [value for value in values if isinstance(value, Mapping | list)]
        if not below:
            return
        level = below
    raise BadRequest(f"is nested deeper than {_MAX_DEPTH} levels", param=param)


def _check_tokens(token_ids: Iterable[int], param: str, limits: Limits) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise BadRequest(
                f"token id {token_id} is outside the vocabulary (0 to {limits.vocab_size - 1})", param=param
            )
