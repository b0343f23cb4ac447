"""Sampling parameters of a request, validated at construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127

MAX_LISTED = 4096
"""Most tokens of a sampling mask that is returned as a list: SGLang's default for `--sampling-mask-max-tokens`."""

MAX_TRACED = 100
"""Maximum number of tokens per stage in a trace."""

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
SamplingMaskFormat = Literal["lists", "packed"]
SamplingLogprobsMode = Literal["selected", "support"]


class AttachedProcessor(Protocol):
    """A processor attached to a request: the part of `ProcessorUse` that the parameters need."""

    @property
    def name(self) -> str:
        """Name of the processor."""
        ...


class InvalidSamplingParams(ValueError):
    """A sampling parameter is out of range.

    Attributes:
        field: name of the `SamplingParams` field.
        reason: why its value is invalid.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _token_ids(value: Any) -> frozenset[int]:
    return frozenset(value or ())


def _optional_token_ids(value: Any) -> frozenset[int] | None:
    return None if value is None else frozenset(value)


def _sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sequence) for sequence in value or ())


def _biases(value: Any) -> dict[int, float]:
    return dict(value or {})


def _budget(value: Any) -> Any:
    return None if type(value) is int and value == -1 else value


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "stop": _strings,
    "stop_regex": _strings,
    "stop_token_ids": _token_ids,
    "eos_token_ids": _token_ids,
    "allowed_token_ids": _optional_token_ids,
    "bad_words_token_ids": _sequences,
    "logit_bias": _biases,
    "thinking_token_budget": _budget,
}
"""Callers may pass lists and single strings, as in vLLM; the stored values are copies."""


def _require(condition: bool, field: str, reason: str) -> None:
    if not condition:
        raise InvalidSamplingParams(field, reason)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping parameters of one sequence.

    Names are vLLM's where it has one, because its batch processors read them; else SGLang's. Token ids are checked
    against the vocabulary at admission, not here.

    Raises:
        InvalidSamplingParams: a value is out of range; names the field.
    """

    temperature: float = 1.0
    """0 takes the most likely token (greedy), whatever `top_p`, `top_k` and `min_p` are."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens in any batch. None: the engine chooses a seed."""

    max_tokens: int | None = None
    """None: up to the model's length. 0: generate nothing, for a prompt's log-probabilities alone."""
    min_tokens: int = 0
    """No EOS token and no stop token before this many output tokens."""
    thinking_token_budget: int | None = None
    """Maximum number of tokens between the start and the end of the model's thinking; then its end is forced. None or
    -1: no limit. Needs a server that knows the model's markers for start and end."""
    stop: Sequence[str] = ()
    stop_regex: Sequence[str] = ()
    """Regular expressions that end the output after the token with which one of them matches."""
    stop_token_ids: Collection[int] = frozenset()
    eos_token_ids: Collection[int] = frozenset()
    """End-of-sequence tokens of the model, filled in at admission."""
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Collection[int] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    """Token sequences that must not be completed."""

    logprobs: int | None = None
    """None: none. k: log-probabilities of the sampled token and of the k most likely ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from `prompt_logprobs_start` on."""
    prompt_logprobs_start: int = 0
    logprob_token_ids: Sequence[int] | None = None
    """Tokens whose log-probabilities are returned as well, at every position that has some."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Raw: before any edit. Processed: after all of them, with temperature, min-p, top-k and top-p."""

    return_sampling_mask: bool = False
    """Return for each output token the tokens that could be sampled in its place, and its log-probability under the
    distribution that it was sampled from."""
    sampling_mask_format: SamplingMaskFormat = "lists"
    """Lists: of token ids, as SGLang and vLLM return them. Packed: a `SamplingRecord`, of any size."""
    return_sampling_edits: bool = False
    """Add to the packed masks what was done to the model's logits of the tokens that could be sampled."""
    sampling_logprobs_mode: SamplingLogprobsMode = "selected"
    """Selected: the log-probability of the output token. Support: those of all tokens that could be sampled."""

    trace: int | None = None
    """None: no trace. k: the k most likely tokens before and after each edit of the logits."""

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    custom_params: Mapping[str, Any] | None = None
    extra_args: Mapping[str, Any] | None = None
    """vLLM's `vllm_xargs`: parameters for installed batch processors."""
    processors: tuple[AttachedProcessor, ...] = ()
    """The request's processors, in list order."""

    def __post_init__(self) -> None:
        for name, convert in _CONVERSIONS.items():
            object.__setattr__(self, name, convert(getattr(self, name)))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            _require(math.isfinite(getattr(self, name)), name, "must be a finite number")
        _require(self.temperature >= 0, "temperature", "must be 0 (greedy) or greater")
        _require(0 < self.top_p <= 1, "top_p", "must be greater than 0 and at most 1")
        _require(self.top_k >= -1, "top_k", "must be -1 (all tokens) or greater")
        _require(0 <= self.min_p <= 1, "min_p", "must be from 0 to 1")
        _require(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "must be from 0.01 to 100")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "must be from -2 to 2")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", "must be from -2 to 2")
        _require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "must be 0 or greater")
        _require(self.min_tokens >= 0, "min_tokens", "must be 0 or greater")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            "must not be greater than max_tokens",
        )
        budget = self.thinking_token_budget
        _require(
            budget is None or (isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0),
            "thinking_token_budget",
            "must be an integer: 0 or greater, or -1 for no limit",
        )
        _require(all(self.stop), "stop", "must not contain an empty string")
        _require(all(self.stop_regex), "stop_regex", "must not contain an empty pattern")
        _require(
            all(abs(bias) <= _FLOAT32_MAX for bias in self.logit_bias.values()),
            "logit_bias",
            "must hold finite numbers within float32's range",
        )
        _require(self.allowed_token_ids is None or bool(self.allowed_token_ids), "allowed_token_ids", "is empty")
        _require(all(self.bad_words_token_ids), "bad_words", "must not contain an empty sequence")
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", "must be 0 or greater")
        _require(self.prompt_logprobs is None or self.prompt_logprobs >= 0, "prompt_logprobs", "must be 0 or greater")
        _require(self.prompt_logprobs_start >= 0, "prompt_logprobs_start", "must be 0 or greater")
        modes = get_args(LogprobsMode)
        # None: only in `logitship.SamplingParams`, which gets the setting of its `LLM`.
        _require(self.logprobs_mode in (*modes, None), "logprobs_mode", f"must be one of {', '.join(modes)}")
        formats, of_tokens = get_args(SamplingMaskFormat), get_args(SamplingLogprobsMode)
        _require(self.sampling_mask_format in formats, "sampling_mask_format", f"must be one of {', '.join(formats)}")
        _require(
            self.sampling_logprobs_mode in of_tokens, "sampling_logprobs_mode", f"must be one of {', '.join(of_tokens)}"
        )
        _require(
            not self.return_sampling_edits or (self.return_sampling_mask and self.sampling_mask_format == "packed"),
            "return_sampling_edits",
            "needs return_sampling_mask and sampling_mask_format packed",
        )
        is_short = self.greedy or 1 <= self.top_k <= MAX_LISTED
        _require(
            not self.return_sampling_mask or is_short or self.sampling_mask_format == "packed",
            "return_sampling_mask",
            f"needs top_k from 1 to {MAX_LISTED}, temperature 0, or sampling_mask_format packed",
        )
        _require(
            self.sampling_logprobs_mode == "selected" or self.sampling_mask_format == "lists",
            "sampling_logprobs_mode",
            "must be selected with sampling_mask_format packed",
        )
        _require(
            self.trace is None or (type(self.trace) is int and 1 <= self.trace <= MAX_TRACED),
            "trace",
            f"must be an integer from 1 to {MAX_TRACED}",
        )

    def with_checked(self, **values: Any) -> SamplingParams:
        """Return a copy with other values, which are not checked. It shares all others, which may take megabytes."""
        copied = object.__new__(SamplingParams)
        for each in fields(SamplingParams):
            object.__setattr__(copied, each.name, values.get(each.name, getattr(self, each.name)))
        if copied.logit_bias is self.logit_bias and "bias_arrays" in vars(self):
            vars(copied)["bias_arrays"] = self.bias_arrays
        return copied

    @cached_property
    def bias_arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The tokens of `logit_bias`, int64 [n], and their biases, float32 [n]. Takes milliseconds if they are many."""
        biases = self.logit_bias
        return np.fromiter(biases, np.int64, len(biases)), np.fromiter(biases.values(), np.float32, len(biases))

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken instead of sampling."""
        return self.temperature == 0

    @property
    def has_records(self) -> bool:
        """True if the answer has log-probabilities, sampling masks or traces of its tokens: these need all logits."""
        return self.logprobs is not None or self.return_sampling_mask or self.trace is not None

    @property
    def all_stop_token_ids(self) -> frozenset[int]:
        """All tokens that may end the sequence: the model's EOS tokens and the request's stop tokens."""
        return frozenset((*self.stop_token_ids, *self.eos_token_ids))

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end the sequence: `all_stop_token_ids`, or with `ignore_eos` the request's stop tokens."""
        return frozenset(self.stop_token_ids) if self.ignore_eos else self.all_stop_token_ids

    def is_end_token(self, token_id: int) -> bool:
        """Return whether a token is one of `end_token_ids`."""
        return token_id in self.stop_token_ids or (token_id in self.eos_token_ids and not self.ignore_eos)

    @property
    def forbidding(self) -> tuple[str, ...]:
        """Names of the fields and processors of this request that may forbid tokens."""
        return self.forbidding_fields + tuple(dict.fromkeys(attached.name for attached in self.processors))

    @property
    def forbidding_fields(self) -> tuple[str, ...]:
        """Names of the fields in use that may forbid tokens."""
        return _in_use(
            allowed_token_ids=self.allowed_token_ids is not None,
            bad_words=bool(self.bad_words_token_ids),
            logit_bias=bool(self.logit_bias),
            min_tokens=self.min_tokens > 0,
            thinking_token_budget=self.thinking_token_budget is not None,
        )

    @property
    def random_fields(self) -> tuple[str, ...]:
        """Names of the fields in use that only matter in random sampling. Beam search refuses them."""
        return _in_use(
            temperature=self.temperature != 0, top_p=self.top_p != 1, top_k=self.top_k > 0, min_p=self.min_p > 0
        )

    # SGLang's names for the same things: processors read these.
    @property
    def max_new_tokens(self) -> int | None:
        """SGLang's name for `max_tokens`."""
        return self.max_tokens

    @property
    def min_new_tokens(self) -> int:
        """SGLang's name for `min_tokens`."""
        return self.min_tokens


def _in_use(**fields: bool) -> tuple[str, ...]:
    return tuple(name for name, is_used in fields.items() if is_used)


SANDBOXED_FIELDS = tuple(each.name for each in fields(SamplingParams) if each.name != "processors")
"""Fields that are sent to sandboxes: the processors in them see these."""
