"""Base classes of request schemas; validation errors become refusals that name the field."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo, model_validator

from logitship.builtin_processors.params import plain_reason
from logitship.sampler.sampling_params import MAX_TRACED, LogprobsMode, SamplingLogprobsMode, SamplingMaskFormat
from logitship.server.refusals import BadRequest
from logitship.server.requests.messages import BeamSearch, EarlyStopping, beam_search_of

from .documented import Documented
from .field_rules import FieldRule, Ignored, Refused

Model = TypeVar("Model", bound="RequestModel")
IgnoredFields: TypeAlias = set[str]
"""Names of fields of a request that were accepted without effect."""

MAX_PROMPTS = 1 << 16
"""Most prompts of a request, and entries of lists with one per prompt. The queue usually takes fewer."""
MAX_PROMPT_TOKENS = 1 << 24
"""Most token ids in a list of token ids. The model's length usually allows fewer."""
MAX_ID_LENGTH = 1024
"""Most characters of an id or a name."""
MAX_STOP_STRINGS = 1024
"""Most stop strings of a request."""
MAX_STOP_LENGTH = 1024
"""Most characters of a stop string: so much of the output may be held back, and is searched in every step."""
MAX_STOP_PATTERNS = 32
"""Most patterns of `stop_regex`, as in SGLang."""
MAX_STOP_PATTERN_LENGTH = 256
"""Most characters of a pattern of `stop_regex`. SGLang allows as many bytes of UTF-8."""
MAX_STOP_TOKENS = 4096
"""Most stop tokens of a request."""
MAX_BIASES = 1 << 16
"""Most entries of `logit_bias`, which are written in every step."""
MAX_ALLOWED_TOKENS = 1 << 19
"""Most entries of `allowed_token_ids`: more than any vocabulary has."""
MAX_BAD_WORDS = 1024
"""Most bad words of a request. Each is tokenized twice, and compared with the output in every step."""
MAX_BAD_WORD_LENGTH = 256
"""Most characters of a bad word."""

_MAX_DIGITS = 20
"""Most digits of a 64-bit number."""
_SEEDS = range(-(1 << 63), 1 << 64)
"""Integers that fit into 64 bits, signed or unsigned."""


class FieldError(ValueError):
    """An invalid field, found while validating the whole object."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class RequestModel(Documented):
    """A JSON object in a request. Strict: types are not converted (`"5"` is not a number).

    Every field is applied, or has a rule: ignored or refused. `null` means the default, as if the field were missing,
    except for the fields in `nullable`.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    rules: ClassVar[Mapping[str, FieldRule]] = {}
    """Rules for fields of the API that are not applied."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Fields that clients write here, and where they belong."""
    nullable: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _take_known_fields(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            raise ValueError("must be a JSON object")
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        for name, value in data.items():
            if name in known:
                if value is not None or name in cls.nullable:
                    kept[name] = value
            elif name in cls.rules:
                _apply_rule(cls.rules[name], name, value, info.context)
            else:
                raise FieldError(name, cls._unknown(name, known))
        return kept

    @classmethod
    def _unknown(cls, name: str, known: Iterable[str]) -> str:
        if name in cls.elsewhere:
            return f"unknown field: it belongs {cls.elsewhere[name]}"
        accepted = [*known, *(each for each, rule in cls.rules.items() if isinstance(rule, Ignored))]
        close = difflib.get_close_matches(name[:80], accepted, n=1)
        return "unknown field" + (f", did you mean {close[0]}?" if close else "")


def _apply_rule(rule: FieldRule, name: str, value: object, ignored: IgnoredFields | None) -> None:
    if isinstance(rule, Refused):
        if not rule.accepts(value):
            raise FieldError(name, f"is not supported by this server: {rule.reason}")
    elif value is not None and ignored is not None:
        ignored.add(name)


def parse_model(model: type[Model], data: object, at: str = "", ignored: IgnoredFields | None = None) -> Model:
    """Validate decoded JSON as a `model`.

    Args:
        model: the schema.
        data: the decoded JSON.
        at: path of `data` in the request body, such as `sampling_params`; "" for the body itself.
        ignored: receives the names of fields that are accepted without effect.

    Raises:
        BadRequest: names the first invalid field, by its path.
    """
    try:
        return model.model_validate(data, context=ignored)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    location, reason = first["loc"], plain_reason(first)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        location, reason = (*location, cause.field), cause.reason
    path = _join(at, location)
    raise BadRequest(f"{path or 'the request body'}: {reason}", param=path or None)


def _join(path: str, location: tuple[int | str, ...]) -> str:
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def one_or_list(
    kind: type, words: str, max_items: int = MAX_PROMPTS, max_length: int | None = None
) -> Callable[[Any], Any]:
    """Create a validator for a `kind` or a list of them. A `bool` is not an `int`.

    Args:
        kind: the type.
        words: its name in an error.
        max_items: most entries of a list.
        max_length: most characters of a string.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list):
            check_length(value, max_items)
        if not (type(value) is kind or _is_list_of(kind, value)):
            raise ValueError(f"must be {words}, or a list of them")
        if max_length is not None:
            check_texts([value] if isinstance(value, str) else value, max_length)
        return value

    return check


def check_length(value: Collection[Any], max_items: int) -> None:
    """Raise `ValueError` if a list or an object has too many entries."""
    if len(value) > max_items:
        raise ValueError(f"has {len(value)} entries, at most {max_items} are allowed")


def check_texts(texts: Iterable[str], max_length: int) -> None:
    """Raise `ValueError` if a string is too long."""
    longest = max(map(len, texts), default=0)
    if longest > max_length:
        raise ValueError(f"has a string of {longest} characters, at most {max_length} are allowed")


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    value = one_or_list(str, "a string", MAX_STOP_STRINGS, MAX_STOP_LENGTH)(value)
    return (value,) if isinstance(value, str) else tuple(value)


def _stop_patterns(value: Any) -> tuple[str, ...]:
    value = one_or_list(str, "a string", MAX_STOP_PATTERNS, MAX_STOP_PATTERN_LENGTH)(value)
    return (value,) if isinstance(value, str) else tuple(value)


def _token_biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    check_length(value, MAX_BIASES)
    for key, bias in value.items():
        # The length first: Python refuses to convert thousands of digits. With "01", a token could have two biases.
        if len(key) > _MAX_DIGITS or not (key.isascii() and key.isdigit()) or str(int(key)) != key:
            raise ValueError(f"{key[:80]!r} is not a token id")
        if type(bias) not in (int, float):
            raise ValueError(f"the bias of token {key[:80]} is not a number")
    return {int(key): float(bias) for key, bias in value.items()}


def is_token_ids(value: Any) -> bool:
    """Return whether the value is a list of integers.

    Raises:
        ValueError: it is a list of too many.
    """
    if not _is_list_of(int, value):
        return False
    check_length(value, MAX_PROMPT_TOKENS)
    return True


def is_list_of_prompts(value: Any, is_prompt: Callable[[Any], bool]) -> bool:
    """Return whether the value is a list of which each entry is a prompt.

    Args:
        value: the value.
        is_prompt: returns whether an entry is one.

    Raises:
        ValueError: it is a list of too many.
    """
    if not (isinstance(value, list) and all(map(is_prompt, value))):
        return False
    check_length(value, MAX_PROMPTS)
    return True


def _token_ids(max_items: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, list):
            check_length(value, max_items)
        if is_token_ids(value):
            return value
        raise ValueError("must be a list of token ids (integers)")

    return check


def texts(max_items: int, max_length: int) -> Callable[[Any], Any]:
    """Create a validator for a list of strings.

    Args:
        max_items: most strings.
        max_length: most characters of each.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list):
            check_length(value, max_items)
        if not _is_list_of(str, value):
            raise ValueError("must be a list of strings")
        check_texts(value, max_length)
        return value

    return check


def _count(value: Any) -> Any:
    if type(value) is not int or value < 1:
        raise ValueError("must be an integer, 1 or greater")
    if value > MAX_PROMPTS:
        raise ValueError(f"must be at most {MAX_PROMPTS}")
    return value


def _seed(value: Any) -> Any:
    # orjson decodes larger numbers as floats.
    if type(value) is int and value in _SEEDS:
        return value
    raise ValueError("must be an integer from -2^63 to 2^64 - 1")


def _early_stopping(value: Any) -> Any:
    if type(value) is bool or value == "never":
        return value
    raise ValueError('must be true, false or "never"')


Id = Annotated[str, Field(max_length=MAX_ID_LENGTH)]
_StopString = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[
    tuple[str, ...],
    PlainValidator(
        _stop_strings,
        json_schema_input_type=_StopString | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)],
    ),
]
_StopPattern = Annotated[str, Field(max_length=MAX_STOP_PATTERN_LENGTH)]
StopPatterns = Annotated[
    tuple[str, ...],
    PlainValidator(
        _stop_patterns,
        json_schema_input_type=_StopPattern | Annotated[list[_StopPattern], Field(max_length=MAX_STOP_PATTERNS)],
    ),
]
StopTokenIds = Annotated[
    list[int],
    PlainValidator(
        _token_ids(MAX_STOP_TOKENS), json_schema_input_type=Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)]
    ),
]
AllowedTokenIds = Annotated[
    list[int],
    PlainValidator(
        _token_ids(MAX_ALLOWED_TOKENS),
        json_schema_input_type=Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKENS)],
    ),
]
BadWordTexts = Annotated[
    list[str],
    PlainValidator(
        texts(MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH),
        json_schema_input_type=Annotated[
            list[Annotated[str, Field(max_length=MAX_BAD_WORD_LENGTH)]], Field(max_length=MAX_BAD_WORDS)
        ],
    ),
]
TokenBiases = Annotated[
    dict[int, float],
    PlainValidator(_token_biases, json_schema_input_type=Annotated[dict[str, float], Field(max_length=MAX_BIASES)]),
]
Count = Annotated[int, PlainValidator(_count, json_schema_input_type=Annotated[int, Field(ge=1, le=MAX_PROMPTS)])]
EarlyStoppingField = Annotated[
    EarlyStopping, PlainValidator(_early_stopping, json_schema_input_type=bool | Literal["never"])
]
Seed = Annotated[int, PlainValidator(_seed, json_schema_input_type=int)]


class TraceOptions(RequestModel):
    """`trace`."""

    examples: ClassVar = {"top": 5}

    top: int = Field(default=20, ge=1, le=MAX_TRACED)
    """Number of most likely tokens per stage."""


class RecordFields(RequestModel):
    """Records of the tokens of an answer, in both APIs."""

    examples: ClassVar = {
        "return_sampling_mask": True,
        "sampling_mask_format": "packed",
        "return_sampling_edits": True,
        "sampling_logprobs_mode": "selected",
        "trace": TraceOptions.examples,
    }

    return_sampling_mask: bool = False
    """Return for each output token the tokens that could be sampled in its place, and its log-probability under the
    distribution that it was sampled from. Needs `top_k` from 1 to 4096, `temperature` 0, or the format `packed`."""
    sampling_mask_format: SamplingMaskFormat = "lists"
    """`lists`: of token ids, as in SGLang and vLLM. `packed`: a `sampling_record`, for `logitship.replay`."""
    return_sampling_edits: bool = False
    """Add to a `sampling_record` what was done to the model's logits of the tokens that could be sampled."""
    sampling_logprobs_mode: SamplingLogprobsMode = "selected"
    """`selected`: the log-probability of the output token. `support`: those of all tokens in its mask."""
    trace: TraceOptions | None = None
    """Return a trace per token: how each processor and sampling parameter changed the probabilities."""

    @model_validator(mode="after")
    def _check_masks(self) -> Self:
        for name in ("sampling_mask_format", "return_sampling_edits", "sampling_logprobs_mode"):
            if name in self.model_fields_set and not self.return_sampling_mask:
                raise FieldError(name, "requires return_sampling_mask")
        return self


class SamplingFields(RequestModel):
    """Sampling parameters with the same name in both APIs."""

    examples: ClassVar = {
        "n": 2,
        "stream_interval": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "stop": ["\n\n"],
        "stop_regex": "[.!?]\\s*$",
        "stop_token_ids": [198],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "logit_bias": {"30": -5.0},
        "allowed_token_ids": [28, 30, 7042],
        "bad_words": ["never"],
        "logprobs_mode": "processed_logprobs",
        "thinking_token_budget": 256,
        "custom_params": {"token_ids": [30]},
        "num_beams": 4,
        "num_return_sequences": 2,
        "use_beam_search": True,
        "length_penalty": 0.8,
        "early_stopping": "never",
    }

    n: Count = 1
    """Number of independent continuations of each prompt."""
    stream_interval: Count = 1
    """With `stream`: tokens of an event. The first token and the end of a continuation are sent at once."""
    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this total probability."""
    top_k: int = -1
    """Sample from the `top_k` most likely tokens; -1 or 0: from all."""
    min_p: float = 0.0
    """Exclude tokens below this fraction of the highest probability."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each occurrence in the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that occurs in the output."""
    repetition_penalty: float = 1.0
    """For tokens in the prompt and the output: divides positive logits and multiplies negative ones."""
    stop: StopStrings = ()
    """Strings that end the output."""
    stop_regex: StopPatterns = ()
    """Regular expressions that end the output after the token with which one of them matches, in Python's syntax
    without lookaround and references. The text stays whole. A pattern without special characters is a stop string."""
    stop_token_ids: StopTokenIds = Field(default=[])
    """Tokens that end the output, in addition to the model's EOS tokens."""
    ignore_eos: bool = False
    """Continue after the model's EOS token."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text, if the tokenizer supports it."""
    no_stop_trim: bool = False
    """Keep the stop string in the text."""
    logit_bias: TokenBiases = Field(default={})
    """Added to the logits of these tokens."""
    allowed_token_ids: AllowedTokenIds | None = None
    """Only these tokens may be sampled."""
    bad_words: BadWordTexts = Field(default=[])
    """Texts that must not appear in the output."""
    logprobs_mode: LogprobsMode | None = None
    """Log-probabilities before or after all edits of the logits. Default: the server's `--logprobs-mode`."""
    thinking_token_budget: int | None = None
    """Maximum number of reasoning tokens, after which the end of the reasoning is forced; -1: no limit."""
    custom_params: dict[str, Any] | None = None
    """Parameters of the processors."""
    num_beams: Count | None = None
    """Above 1: beam search with this many beams. The best `n` are returned."""
    num_return_sequences: Count | None = None
    """Alias of `n` (Hugging Face)."""
    use_beam_search: bool = False
    """Beam search with `n` beams, which are all returned; or with `num_beams`, of which the best `n` are returned."""
    length_penalty: float = 1.0
    """Beam search: a sum of log-probabilities is divided by length ** `length_penalty`."""
    early_stopping: EarlyStoppingField = False
    """Beam search: true: stop when there are as many finished sequences as beams; "never": stop only when no beam can
    beat them."""

    @property
    def n_field(self) -> str:
        """Name of the field that the client set `n` with."""
        return "n" if self.num_return_sequences is None else "num_return_sequences"

    @property
    def beam_search(self) -> BeamSearch | None:
        """Beam search parameters, or None.

        Raises:
            InvalidSamplingParams: the fields contradict each other.
        """
        return beam_search_of(self)

    @model_validator(mode="before")
    @classmethod
    def _take_num_return_sequences(cls, data: Any) -> Any:
        n = data.get("num_return_sequences") if isinstance(data, dict) else None
        if type(n) is not int or not 1 <= n <= MAX_PROMPTS:
            return data  # refused by its own name
        if data.get("n") is not None and (type(data["n"]) is not int or data["n"] != n):
            raise FieldError("num_return_sequences", "is not the same as n")
        return {**data, "n": n}
