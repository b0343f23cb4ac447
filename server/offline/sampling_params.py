"""`logitship.SamplingParams`: the engine's sampling parameters with the constructor of vLLM's `SamplingParams`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from logitship.sampler.sampling_params import InvalidSamplingParams, LogprobsMode, SamplingMaskFormat
from logitship.sampler.sampling_params import SamplingParams as EngineSamplingParams
from logitship.server.processors.request_processors import RESERVED_KEY
from logitship.server.requests.messages import BeamSearch, beam_search_of
from logitship.server.schemas.request_schema import parse_model
from logitship.server.schemas.sglang_schemas import SGLangSamplingParams
from logitship.server.schemas.structured_outputs import constraint_of

from .structured_outputs_params import StructuredOutputsParams

_UNSUPPORTED = {
    "detokenize": True,
    "flat_logprobs": False,
    "logprob_token_ids": None,
    "output_kind": None,
    "prompt_logprob_start": None,
    "prompt_logprob_token_ids": None,
    "repetition_detection": None,
    "sampling_logprobs_mode": "selected",
    "sampling_mask_format": "packed",
    "skip_reading_prefix_cache": None,
    "stream_interval": None,
    "trace_decode_token_ids": None,
    "watermarking": None,
}
"""Fields of vLLM's class that this engine does not support, with the only value that is accepted: vLLM's default."""

_ENGINE_ONLY = {"eos_token_ids": "use stop_token_ids", "processors": "use logits_processors"}
"""Fields of the engine's record that it fills in itself, with what to use instead."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(EngineSamplingParams):
    """Sampling parameters of a prompt, with vLLM's names and defaults, and the processors of the request.

    Stand-in for `vllm.SamplingParams`, hence the name; it extends the engine's own record of the same name,
    `logitship.sampler.sampling_params.SamplingParams`.

    Fields with several values accept a list, a set, a tuple or None; `stop`, `stop_regex` and `bad_words` also accept a
    single string. Unlike vLLM's class, it is immutable: `dataclasses.replace(params, temperature=0)` returns a changed
    copy. Unsupported values are refused, not ignored.

    Raises:
        InvalidSamplingParams: a ValueError; a value is out of range or not supported. Names the field.
        TypeError: no parameter has this name.
    """

    n: int = 1
    """Number of independent continuations of each prompt."""
    best_of: int | None = None
    """Number of continuations to generate. The `n` with the highest log-probability per token are returned, the highest
    first. None: `n`."""
    num_beams: int | None = None
    """Above 1: beam search with this number of beams. The best `n` are returned, the best first."""
    num_return_sequences: int | None = None
    """Hugging Face's name for `n`."""
    use_beam_search: bool = False
    """Beam search with `n` beams, all of which are returned; with `num_beams`, the best `n` of these."""
    length_penalty: float = 1.0
    """For beam search: sums of log-probabilities are divided by length ** `length_penalty`."""
    early_stopping: bool | Literal["never"] = False
    """For beam search, once there are as many finished sequences as beams. True: stop. False: stop if the best beam,
    ended now, would not beat the worst of them. "never": stop only when no beam can become better than they are."""
    max_tokens: int | None = 16
    """Maximum number of output tokens. None: up to the model's length, which always limits the output."""
    bad_words: Sequence[str] = ()
    """Texts that must not appear in the output."""

    logprobs_mode: LogprobsMode | None = None  # type: ignore[assignment]  # never None in the engine
    """Log-probabilities before any edit of the logits, or after all of them. None: the setting of the `LLM`."""

    sampling_mask_format: SamplingMaskFormat = "packed"

    custom_logit_processor: Any = None
    """As in SGLang: a `CustomLogitProcessor` class, a processor string or its dict, an installed processor's name, or a
    digest; or a list of these, run in this order. Each gets `custom_params`."""
    logits_processors: Sequence[Any] = ()
    """Processors with parameters of their own, run in this order. An entry is `{"processor": …, "params": {…}}`
    with a processor as above, `{"qualname": "module.Class", "args": […], "kwargs": {…}}`, a callable's qualified name,
    or the callable itself: a function of `(output_token_ids, logits)` or `(prompt_token_ids, output_token_ids, logits)`
    as in vLLM V0, or a Hugging Face `LogitsProcessor`. Each continuation gets its own instance or copy of it."""

    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """Constraint on the output: a JSON schema, a regular expression, … May be a dict."""

    detokenize: bool = True
    flat_logprobs: bool = False
    logprob_token_ids: None = None
    output_kind: None = None
    prompt_logprob_start: None = None
    prompt_logprob_token_ids: None = None
    repetition_detection: None = None
    skip_reading_prefix_cache: None = None
    stream_interval: int | None = None
    trace_decode_token_ids: None = None
    watermarking: None = None

    def __post_init__(self) -> None:
        for name, default in _UNSUPPORTED.items():
            if getattr(self, name) != default:
                raise InvalidSamplingParams(name, f"is not supported by logitship: leave it at {default}")
        for name, advice in _ENGINE_ONLY.items():
            if getattr(self, name):
                raise InvalidSamplingParams(name, f"is set by the engine: {advice}")
        for name in ("custom_params", "extra_args"):
            value = getattr(self, name)
            if not isinstance(value, Mapping | None):
                raise InvalidSamplingParams(name, f"must be a dict, not {type(value).__name__}")
        if self.num_return_sequences is not None:
            if self.n not in (1, self.num_return_sequences):
                raise InvalidSamplingParams("num_return_sequences", f"must be equal to n, which is {self.n}")
            object.__setattr__(self, "n", self.num_return_sequences)
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise InvalidSamplingParams("n", "must be an integer, 1 or greater")
        if self.best_of is not None and (type(self.best_of) is not int or self.best_of < self.n):
            raise InvalidSamplingParams("best_of", f"must be an integer, not smaller than n, which is {self.n}")
        if self.beam_search is not None and self.best_of not in (None, self.n):
            raise InvalidSamplingParams("best_of", "cannot be combined with beam search: remove it")
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        object.__setattr__(self, "bad_words", words)
        self._check_processors()
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams(**self.structured_outputs))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            kind = type(self.structured_outputs).__name__
            raise InvalidSamplingParams("structured_outputs", f"must be StructuredOutputsParams or a dict, not {kind}")
        if RESERVED_KEY in (self.custom_params or {}):
            raise InvalidSamplingParams("custom_params", f"the key {RESERVED_KEY!r} is reserved: rename it")
        super().__post_init__()

    @property
    def beam_search(self) -> BeamSearch | None:
        """The requested beam search, or None."""
        return beam_search_of(self)

    def _check_processors(self) -> None:
        several = self.logits_processors or ()
        if isinstance(several, str | Mapping) or not isinstance(several, Sequence):
            raise InvalidSamplingParams(
                "logits_processors", f"must be a list of processors, not {type(several).__name__}: put it in a list"
            )
        if several and self.custom_logit_processor is not None:
            raise InvalidSamplingParams("logits_processors", "give either this or custom_logit_processor, not both")
        object.__setattr__(self, "logits_processors", tuple(several))

    @classmethod
    def from_sglang(cls, values: Mapping[str, Any], at: str = "sampling_params") -> Self:
        """Read parameters in SGLang's names, as in the body of `/generate`.

        SGLang's defaults apply too: `max_new_tokens` is 128.

        Args:
            values: may also hold `custom_logit_processor`, `logits_processors` and `extra_args`.
            at: name of the dict in error messages.

        Raises:
            BadRequest: a name is unknown, or its value has the wrong type.
            InvalidSamplingParams: a value is out of range.
        """
        extra = {name: values[name] for name in _ADDITIONAL_NAMES if name in values}
        read = parse_model(SGLangSamplingParams, {k: v for k, v in values.items() if k not in extra}, at)
        is_constrained = constraint_of(read, at) is not None
        shared = {field.name for field in dataclasses.fields(cls)} & set(SGLangSamplingParams.model_fields)
        try:
            return cls(
                **{name: getattr(read, name) for name in shared - {"seed", "stream_interval"}},
                stream_interval=None if read.stream_interval == 1 else read.stream_interval,
                max_tokens=read.max_new_tokens,
                min_tokens=read.min_new_tokens,
                seed=read.seed if read.sampling_seed is None else read.sampling_seed,
                include_stop_str_in_output=read.no_stop_trim,
                structured_outputs=StructuredOutputsParams(
                    read.json_schema,
                    read.regex,
                    grammar=read.ebnf,
                    whitespace_pattern=read.whitespace_pattern,
                    structural_tag=read.structural_tag,
                )
                if is_constrained
                else None,
                **extra,
            )
        except InvalidSamplingParams as error:
            reason = " ".join(SGLANG_NAMES.get(word, word) for word in error.reason.split(" "))
            raise InvalidSamplingParams(f"{at}.{SGLANG_NAMES.get(error.field, error.field)}", reason) from None

    def clone(self) -> Self:
        """Return a copy that shares only the processors."""
        return dataclasses.replace(
            self, extra_args=copy.deepcopy(self.extra_args), custom_params=copy.deepcopy(self.custom_params)
        )


_ADDITIONAL_NAMES = ("custom_logit_processor", "extra_args", "logits_processors")

SGLANG_NAMES = {
    "include_stop_str_in_output": "no_stop_trim",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
"""SGLang's names for fields that have another name here."""
SGLANG_CONSTRAINTS = {
    "structured_outputs.json": "json_schema",
    "structured_outputs.regex": "regex",
    "structured_outputs.grammar": "ebnf",
    "structured_outputs.structural_tag": "structural_tag",
    "structured_outputs.whitespace_pattern": "whitespace_pattern",
}
"""SGLang's names for the fields of `structured_outputs`."""
