"""Prompts and parameters of a `GenerationRequest`, and checks against the limits of the model and the server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from logitship.client.serialization.processor_string import ProcessorString
from logitship.sampler.batch_processors.plugins import Plugin
from logitship.sampler.sampling_params import SANDBOXED_FIELDS, InvalidSamplingParams, SamplingParams
from logitship.sampler.sandbox.protocol import NotPlainError, check_plain
from logitship.server.config import ServerConfig
from logitship.server.refusals import BadRequest, RequestRefused
from logitship.server.tokenizer import Tokenizer

from .messages import BeamSearch, CallableRequest, GenerationRequest, ProcessorRequest
from .stop_regex import compile_stop_regex

Refused = TypeVar("Refused", bound=RequestRefused)

_NAME_WITH_UNDERSCORE = re.compile(r"(?<![\w'])[a-z]+(?:_[a-z]+)+(?![\w'])")
"""A field name in a message. Names without an underscore may be ordinary words; quoted text is the client's."""

_MAX_PROCESSORS = 64
"""Most processors of a request. Each costs one call per step, which delays all other requests."""

_MAX_TRACED_PROCESSORS = 16
"""Most processors of a traced request. The trace copies the row for each of them in every step."""

_MAX_STOP_STRINGS = 1024
"""Most stop strings of a request."""
_MAX_STOP_PATTERNS = 32
"""Most patterns of `stop_regex`, as in SGLang."""

_MAX_STOP_TOKENS_OF_BEAMS = 64
"""Most stop tokens of a beam search. Each adds `width` candidates to every step."""

_MAX_DEPTH = 100
"""Deepest nesting of parameters: every sequence copies them, and Python's recursion is limited."""

_LEAVES = frozenset({str, int, float, bool, type(None)})


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        token_ids: the prompt, never empty.
        text: the text that was tokenized, or None if the prompt was given as token ids.
    """

    token_ids: list[int]
    text: str | None = None


def encode_prompt(
    tokenizer: Tokenizer, max_model_len: int, value: str | list[int], at: str, *, add_special_tokens: bool = True
) -> Prompt:
    """Tokenize a prompt. That takes time: do not call it on an event loop with a long text.

    Args:
        tokenizer: the model's tokenizer.
        max_model_len: the model's length, in tokens.
        value: text or token ids.
        at: path of the prompt in the request, for errors.
        add_special_tokens: add the tokens that the model expects around a text.

    Raises:
        BadRequest: it has no tokens, or is far too long.
    """
    if isinstance(value, str):
        check_text_length(tokenizer, max_model_len, len(value), at)
        prompt = Prompt(tokenizer.encode(value, add_special_tokens=add_special_tokens), value)
    else:
        prompt = Prompt(value)
    if not prompt.token_ids:
        raise BadRequest(f"{at}: is empty: there is nothing to continue", param=at)
    return prompt


def check_text_length(tokenizer: Tokenizer, max_model_len: int, characters: int, at: str) -> None:
    """Refuse a text that would not fit even if all its tokens were the longest. Tokenizing it could take minutes.

    Raises:
        BadRequest: it is too long.
    """
    limit = max_model_len * tokenizer.longest_token
    if characters > limit:
        raise BadRequest(
            f"{at}: has {characters} characters, but the model's length is {max_model_len} tokens, prompt "
            f"and output together, and no token has more than {tokenizer.longest_token} characters",
            param=at,
        )


def bad_words_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences to forbid: each word at the start of a text, and after a space.

    Raises:
        InvalidSamplingParams: a word is empty, or only white space.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(words):
        if not word:
            raise InvalidSamplingParams("bad_words", "must not contain an empty string")
        if not word.strip():
            raise InvalidSamplingParams(
                "bad_words",
                f"{json.dumps(word)} is only white space, which is no word: forbid its tokens with logit_bias",
            )
        for text in (word.lstrip(), f" {word.lstrip()}"):
            sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(sequences)


def in_client_words(refused: Refused, names: Mapping[str, str]) -> Refused:
    """Rename the fields in a refusal to the client's names, and put the name of the field before the message.

    Args:
        refused: a refusal whose `param` is the engine's name of a field. Modified in place.
        names: engine's name → client's name, where they differ.
    """
    if refused.param is None:
        return refused
    # A processor's message is its author's: a name in it is a parameter of the processor.
    if not refused.param.startswith("processors["):
        refused.message = _NAME_WITH_UNDERSCORE.sub(lambda found: names.get(found[0], found[0]), refused.message)
    refused.param = names.get(refused.param, refused.param)
    refused.message = f"{refused.param}: {refused.message}"
    return refused


@dataclass(frozen=True)
class Limits:
    """Limits of the model and the server.

    Attributes:
        vocab_size: size of the vocabulary.
        max_model_len: longest prompt and output together, in tokens.
        max_logprobs: most log-probabilities per position that a request may ask for.
        max_num_seqs: most sequences of one tenant that run at a time.
        knows_thinking: True if the model's thinking markers are configured.
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
            config.max_num_seqs - config.reserved_slots,
            knows_thinking=config.reasoning_strings is not None,
        )


def check(request: GenerationRequest, limits: Limits, body_depth: int | None = None) -> None:
    """Refuse a request that cannot run.

    Args:
        request: the request.
        limits: the limits.
        body_depth: nesting of the body that it came from. Unless that is deep, its parameters need not be traversed,
            which takes long for large ones, and for each prompt of a batch.

    Raises:
        BadRequest: `param` is a field of `SamplingParams`, or `prompt`, `n`, `best_of`, `num_beams`, `processors` or
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
    capacity = limits.max_model_len - len(request.prompt_token_ids)
    if params.max_tokens is not None and params.max_tokens > capacity:
        raise BadRequest(
            f"asks for {params.max_tokens} tokens, but the prompt has {len(request.prompt_token_ids)} and the "
            f"model's length is {limits.max_model_len}: ask for at most {capacity}",
            param="max_tokens",
        )
    if params.min_tokens > capacity:
        raise BadRequest(f"must be at most {capacity}: that is what the prompt leaves", param="min_tokens")
    if params.thinking_token_budget is not None and not limits.knows_thinking:
        raise BadRequest(
            "this server does not know the model's thinking markers: start it with --reasoning-config "
            """'{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}', with the markers of the model""",
            param="thinking_token_budget",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > limits.max_logprobs:
            raise BadRequest(f"must be at most {limits.max_logprobs}, the server's max_logprobs", param=name)
    requested = params.logprob_token_ids or ()
    if len(requested) > limits.max_logprobs:
        raise BadRequest(
            f"has {len(requested)} tokens, at most {limits.max_logprobs} are allowed, the server's max_logprobs",
            param="logprob_token_ids",
        )
    if params.prompt_logprobs is not None and params.prompt_logprobs_start >= len(request.prompt_token_ids):
        raise BadRequest(
            f"is beyond the prompt, which has {len(request.prompt_token_ids)} tokens", param="prompt_logprobs_start"
        )
    if len(request.processors) > _MAX_PROCESSORS:
        raise BadRequest(
            f"has {len(request.processors)} processors, at most {_MAX_PROCESSORS} are allowed",
            param="processors",
        )
    if params.trace is not None and len(request.processors) > _MAX_TRACED_PROCESSORS:
        raise BadRequest(
            f"is limited to {_MAX_TRACED_PROCESSORS} processors, the request has {len(request.processors)}",
            param="trace",
        )
    if len(params.stop) > _MAX_STOP_STRINGS:
        raise BadRequest(f"has {len(params.stop)} strings, at most {_MAX_STOP_STRINGS} are allowed", param="stop")
    _check_stop_regex(params.stop_regex, request.tenant)
    if body_depth is None or body_depth > _MAX_DEPTH:
        _check_depths(request)
    _check_tokens(params.stop_token_ids, "stop_token_ids", limits)
    _check_tokens(params.logit_bias, "logit_bias", limits)
    _ = params.bias_arrays  # of all continuations, computed off the engine's thread
    _check_tokens(requested, "logprob_token_ids", limits)
    _check_tokens(params.allowed_token_ids or (), "allowed_token_ids", limits)
    _check_tokens([token for word in params.bad_words_token_ids for token in word], "bad_words", limits)


def _check_stop_regex(patterns: Sequence[str], tenant: str) -> None:
    if len(patterns) > _MAX_STOP_PATTERNS:
        raise BadRequest(f"has {len(patterns)} patterns, at most {_MAX_STOP_PATTERNS} are allowed", param="stop_regex")
    try:
        compile_stop_regex(tuple(patterns), tenant)
    except ValueError as error:
        raise BadRequest(str(error), param="stop_regex") from None


def check_with_plugins(params: SamplingParams, plugins: Iterable[Plugin]) -> None:
    """Let the installed batch processors refuse a request, as vLLM does.

    Raises:
        BadRequest: with the message of the processor.
    """
    for plugin in plugins:
        try:
            plugin.validate_params(params)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        # The client's parameters made it fail, so this is the client's error.
        except Exception as error:  # boundary: third-party code
            raise BadRequest(
                f"the installed logits processor {plugin.name} does not take these parameters: "
                f"{type(error).__name__}: {error}"
            ) from error


def check_sandboxed(request: GenerationRequest, ships_code: Callable[[ProcessorString], bool]) -> None:
    """Refuse values that cannot be sent to a request's sandboxed processors. None of them can be written in JSON.

    Args:
        request: the request.
        ships_code: returns True for processors that run in sandboxes, not in the server's process.

    Raises:
        BadRequest: `param` is `processors[i].params`, or a field of `SamplingParams`: processors see these as well.
    """
    sandboxed = {
        f"processors[{index}].params": processor.params
        for index, processor in enumerate(request.processors)
        if isinstance(processor, ProcessorRequest) and ships_code(processor.string)
    }
    if not sandboxed:
        return
    sampling = {name: getattr(request.sampling_params, name) for name in SANDBOXED_FIELDS}
    for param, value in {**sandboxed, **sampling}.items():
        try:
            check_plain(value)
        except NotPlainError as error:
            raise BadRequest(str(error), param=param) from None


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
    """Refuse parameters that beam search ignores, or that would slow all other requests down too much."""
    params = request.sampling_params
    if search.width > limits.max_num_seqs:
        raise BadRequest(
            f"asks for {search.width} beams, this server runs at most {limits.max_num_seqs} sequences at a time",
            param="num_beams",
        )
    if request.n > search.width:
        raise BadRequest(f"must not be greater than num_beams, which is {search.width}", param="n")
    if request.best_of is not None and request.best_of != request.n:
        raise BadRequest("is not supported with beam search: leave it out", param="best_of")
    if params.max_tokens == 0:
        raise BadRequest("must be 1 or greater with beam search", param="max_tokens")
    if params.trace is not None:
        raise BadRequest("is not supported with beam search: leave it out", param="trace")
    if params.return_sampling_mask:
        raise BadRequest("is not supported with beam search, which does not sample", param="return_sampling_mask")
    for name in params.random_fields:
        raise BadRequest("has no effect with beam search, which does not sample: leave it out", param=name)
    if params.logprobs is not None and params.logprobs_mode != "processed_logprobs":
        raise BadRequest("must be processed_logprobs with beam search, which adds these up", param="logprobs_mode")
    if len(params.stop_token_ids) > _MAX_STOP_TOKENS_OF_BEAMS:
        raise BadRequest(
            f"has {len(params.stop_token_ids)} tokens, beam search allows at most {_MAX_STOP_TOKENS_OF_BEAMS}",
            param="stop_token_ids",
        )


def _check_depths(request: GenerationRequest) -> None:
    params = request.sampling_params
    _check_depth(params.custom_params, "custom_params")
    _check_depth(params.extra_args, "extra_args")
    for index, processor in enumerate(request.processors):
        if isinstance(processor, CallableRequest):
            _check_depth([list(processor.args), processor.kwargs], f"processors[{index}]")
        # Processors without parameters of their own share `custom_params`.
        elif processor.params is not params.custom_params:
            _check_depth(processor.params, f"processors[{index}].params")


def _check_depth(params: Mapping[str, Any] | Sequence[Any] | None, param: str) -> None:
    level: list[Any] = [] if params is None else [params]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            values = each.values() if isinstance(each, Mapping) else each
            # Compares types only, in C: a tree may hold millions of numbers.
            if not _LEAVES.issuperset(map(type, values)):
                below += [value for value in values if isinstance(value, Mapping | list)]
        if not below:
            return
        level = below
    raise BadRequest(f"is nested deeper than {_MAX_DEPTH} levels", param=param)


def _check_tokens(token_ids: Collection[int], param: str, limits: Limits) -> None:
    lowest, highest = min(token_ids, default=0), max(token_ids, default=0)  # in C: a prompt may have a million
    if lowest < 0 or highest >= limits.vocab_size:
        outside = lowest if lowest < 0 else highest
        raise BadRequest(f"token id {outside} is outside the vocabulary (0 to {limits.vocab_size - 1})", param=param)
