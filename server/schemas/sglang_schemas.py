"""SGLang's request bodies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainValidator, model_validator

from .field_rules import BODY_RULES, SAMPLING_PARAMS_RULES
from .request_schema import (
    MAX_ID_LENGTH,
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    FieldError,
    Id,
    RecordFields,
    RequestModel,
    SamplingFields,
    Seed,
    is_list_of_prompts,
    is_token_ids,
    one_or_list,
)
from .structured_outputs import Constraint, GrammarFields, GrammarText

OneOrMoreTexts = Annotated[
    str | list[str],
    PlainValidator(
        one_or_list(str, "a string"),
        json_schema_input_type=str | Annotated[list[str], Field(max_length=MAX_PROMPTS)],
    ),
]
OneOrMoreIds = Annotated[
    str | list[str],
    PlainValidator(
        one_or_list(str, "a string", max_length=MAX_ID_LENGTH),
        json_schema_input_type=Id | Annotated[list[Id], Field(max_length=MAX_PROMPTS)],
    ),
]
OneOrMoreInts = Annotated[
    int | list[int],
    PlainValidator(
        one_or_list(int, "an integer"),
        json_schema_input_type=int | Annotated[list[int], Field(max_length=MAX_PROMPTS)],
    ),
]
OneOrMoreFlags = Annotated[
    bool | list[bool],
    PlainValidator(
        one_or_list(bool, "true or false"),
        json_schema_input_type=bool | Annotated[list[bool], Field(max_length=MAX_PROMPTS)],
    ),
]
OneOrMoreObjects = Annotated[
    dict[str, Any] | list[dict[str, Any]],
    PlainValidator(
        one_or_list(dict, "an object"),
        json_schema_input_type=dict[str, Any] | Annotated[list[dict[str, Any]], Field(max_length=MAX_PROMPTS)],
    ),
]


def _input_ids(value: Any) -> Any:
    if is_token_ids(value) or is_list_of_prompts(value, is_token_ids):
        return value
    raise ValueError("must be a list of token ids (integers), or a list of such lists")


_TokenIds = Annotated[list[int], Field(max_length=MAX_PROMPT_TOKENS)]
InputIds = Annotated[
    list[int] | list[list[int]],
    PlainValidator(
        _input_ids, json_schema_input_type=_TokenIds | Annotated[list[_TokenIds], Field(max_length=MAX_PROMPTS)]
    ),
]


class SGLangSamplingParams(SamplingFields, GrammarFields):
    """`sampling_params` of `/generate`."""

    rules: ClassVar = SAMPLING_PARAMS_RULES
    examples: ClassVar = {
        "structural_tag": '{"type": "structural_tag", "format": {"type": "regex", "pattern": "[a-z]+"}}',
        "max_new_tokens": 64,
        "min_new_tokens": 4,
        "sampling_seed": 42,
        "seed": 42,
    }
    nullable: ClassVar = frozenset({"max_new_tokens"})

    structural_tag: GrammarText | None = None
    """Structured output: a structural tag, as JSON text."""
    max_new_tokens: int | None = 128
    """Maximum number of output tokens; null: up to the model's length."""
    min_new_tokens: int = 0
    """Minimum number of output tokens before an EOS token."""
    sampling_seed: Seed | None = None
    """Seed: the same seed, prompt and parameters give the same tokens."""
    seed: Seed | None = None
    """Alias of `sampling_seed`."""

    @model_validator(mode="after")
    def _check_seeds(self) -> Self:
        if None not in (self.seed, self.sampling_seed) and self.seed != self.sampling_seed:
            raise FieldError("seed", "differs from sampling_seed")
        return self

    def constraints(self, at: str = "") -> Iterator[Constraint]:
        """Yield the constraints in these fields."""
        yield from super().constraints(at)
        if self.structural_tag is not None:
            name = "structural_tag"
            yield Constraint({name: self.structural_tag}, f"{at}.{name}" if at else name)


class GenerateRequest(RecordFields):
    """Body of `/generate`."""

    examples: ClassVar = {
        "text": "The capital of France is",
        "input_ids": [504, 3575, 282, 4649, 314],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "custom_params": {"token_ids": [30]}},
        "custom_logit_processor": {"name": "disallowed_tokens"},
        "logits_processors": [{"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [30]}}],
        "vllm_xargs": {"target_token": 30},
        "max_thinking_tokens": 256,
        "stream": True,
        "rid": "first",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 5,
        "token_ids_logprob": [9642, 2822],
        "return_text_in_logprobs": True,
        "return_sampling_mask": True,
    }
    rules: ClassVar = BODY_RULES
    elsewhere: ClassVar = dict.fromkeys(SGLangSamplingParams.model_fields, "in sampling_params")

    text: OneOrMoreTexts | None = None
    """The prompt, or a list of prompts. Alternative to `input_ids`."""
    input_ids: InputIds | None = None
    """The prompt as token ids, or a list of such prompts."""
    sampling_params: OneOrMoreObjects = Field(default={})
    """See `SGLangSamplingParams`; for a list of prompts also a list."""
    custom_logit_processor: Any = None
    """The processor: a processor string or its JSON object, or a list of processors, which run in this order. For a
    list of prompts, a list has one entry per prompt."""
    logits_processors: Annotated[list[Any], Field(max_length=MAX_PROMPTS)] | None = None
    """Processors with parameters of their own, and callables by name; see "Processors in a request". For a list of
    prompts also a list of such lists."""
    vllm_xargs: dict[str, Any] | None = None
    """Parameters of installed batch processors, as in vLLM."""
    max_thinking_tokens: int | None = None
    """Alias of `thinking_token_budget` (SGLang), for all prompts."""
    stream: bool = False
    """Stream server-sent events, each with the whole text so far."""
    rid: OneOrMoreIds | None = None
    """Request id, for `/abort_request`. For a list of prompts a list, or one id to which `_0`, `_1`, … are appended."""
    return_logprob: OneOrMoreFlags = False
    """Return log-probabilities."""
    logprob_start_len: OneOrMoreInts = -1
    """First prompt position with a log-probability; -1: no prompt log-probabilities."""
    top_logprobs_num: OneOrMoreInts = 0
    """Number of most likely tokens to return per position."""
    token_ids_logprob: InputIds | None = None
    """Tokens whose log-probabilities to return per position; for a list of prompts also a list of such lists."""
    return_text_in_logprobs: bool = False
    """Return the tokens' texts next to their ids."""
    return_sampling_mask: OneOrMoreFlags = False  # type: ignore[assignment]  # SGLang takes lists
    """See `/v1/completions`; for a list of prompts also a list."""


SGLangSamplingParams.elsewhere = dict.fromkeys(GenerateRequest.model_fields, "next to sampling_params, not in it")


class AbortRequest(RequestModel):
    """Body of `/abort_request`."""

    examples: ClassVar = {"rid": "first", "abort_all": True}

    rid: Id = ""
    """The request to cancel."""
    abort_all: bool = False
    """Cancel all requests."""
