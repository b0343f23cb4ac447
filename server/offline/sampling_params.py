"""`logitship.SamplingParams`: vLLM's constructor, on the engine's own record."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from logitship.sampler.sampling_params import InvalidSamplingParams, LogprobsMode
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
    "skip_reading_prefix_cache": None,
    "stream_interval": None,
    "trace_decode_token_ids": None,
    "watermarking": None,
}
"""What vLLM's class has beyond this engine, each with the only value that is taken: the one that asks for nothing."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(EngineSamplingParams):
    """How a prompt is continued: vLLM's names and defaults, and the processors that the request carries.

    A list, a set, a tuple or None are taken wherever several values are meant, a single string for `stop` and
    `bad_words`. Unlike vLLM's, it does not change: `dataclasses.replace(params, temperature=0)` makes another. What
    cannot be honoured is refused, not dropped.

    Raises:
        InvalidSamplingParams: a ValueError; a value is out of range or not supported. Names the field.
        TypeError: no parameter has this name.
    """

    n: int = 1
    """Number of independent continuations of each prompt."""
    best_of: int | None = None
    """Number of continuations to make, of which the `n` with the highest log-probability per token come out, the
    highest first. None: `n`."""
    num_beams: int | None = None
    """Above 1: beam search with so many beams, of which the best `n` come out, the best first."""
    num_return_sequences: int | None = None
    """Hugging Face's name of `n`."""
    use_beam_search: bool = False
    """Beam search with `n` beams, all of which come out; with `num_beams`, the best `n` of these."""
    length_penalty: float = 1.0
    """Of beam search: sums of log-probabilities are divided by length ** `length_penalty`."""
    early_stopping: bool | Literal["never"] = False
    """Of beam search: whether to stop as soon as there are as many finished sequences as beams; "never": only when no
    beam can become better than they are."""
    max_tokens: int | None = 16
    """Most tokens of the output. None: up to the model's length, which always ends the output."""
    bad_words: Sequence[str] = ()
    """Texts that must not appear in the output."""

    logprobs_mode: LogprobsMode | None = None  # type: ignore[assignment]  # never None in the engine
    """Log-probabilities before any edit of the logits, or after all of them. None: as `LLM` was made."""

    custom_logit_processor: Any = None
    """SGLang's way: a `CustomLogitProcessor` class, a processor string or its dict, an installed processor's name, a
    digest; or a list of them, run in this order. Each sees `custom_params`."""
    logits_processors: Sequence[Any] = ()
    """Several processors with parameters of their own, run in this order. An entry is `{"processor": …, "params": {…}}`
    with a processor as above, `{"qualname": "module.Class", "args": […], "kwargs": {…}}`, a callable's qualified name,
    or the callable itself: a function of `(output_token_ids, logits)` or `(prompt_token_ids, output_token_ids, logits)`
    as in vLLM V0, or a Hugging Face `LogitsProcessor`. A callable is made or copied anew for each continuation."""

    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """What the output is constrained to: a JSON schema, a regular expression, … Also as a dict."""

    detokenize: bool = True
    flat_logprobs: bool = False
    logprob_token_ids: None = None
    output_kind: None = None
    prompt_logprob_start: None = None
    prompt_logprob_token_ids: None = None
    repetition_detection: None = None
    skip_reading_prefix_cache: None = None
    stream_interval: None = None
    trace_decode_token_ids: None = None
    watermarking: None = None

    def __post_init__(self) -> None:
        for name, harmless in _UNSUPPORTED.items():
            if getattr(self, name) is not harmless:
                raise InvalidSamplingParams(name, f"is not supported by logitship: leave it at {harmless}")
        if self.num_return_sequences is not None:
            if self.n not in (1, self.num_return_sequences):
                raise InvalidSamplingParams("num_return_sequences", f"is not the same as n, which is {self.n}")
            object.__setattr__(self, "n", self.num_return_sequences)
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise InvalidSamplingParams("n", "must be an integer, 1 or greater")
        if self.best_of is not None and (type(self.best_of) is not int or self.best_of < self.n):
            raise InvalidSamplingParams("best_of", f"must be an integer, not smaller than n, which is {self.n}")
        if self.beam_search is not None and self.best_of not in (None, self.n):
            raise InvalidSamplingParams("best_of", "does not go with beam search: leave it out")
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        object.__setattr__(self, "bad_words", words)
        self._check_processors()
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams(**self.structured_outputs))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            kind = type(self.structured_outputs).__name__
            raise InvalidSamplingParams("structured_outputs", f"must be StructuredOutputsParams or a dict, not {kind}")
        if RESERVED_KEY in (self.custom_params or {}):
            raise InvalidSamplingParams("custom_params", f"the key {RESERVED_KEY!r} is the engine's own")
        super().__post_init__()

    @property
    def beam_search(self) -> BeamSearch | None:
        """The search that is asked for."""
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
        """The same in SGLang's names, as in the body of `/generate`: `max_new_tokens` (128), `sampling_seed`, …

        Args:
            values: may also hold `custom_logit_processor`, `logits_processors` and `extra_args`.
            at: name of the dict in error messages.

        Raises:
            BadRequest: a name is unknown, or its value is of another type.
            InvalidSamplingParams: a value is out of range.
        """
        ours = {name: values[name] for name in _BESIDE_SGLANGS if name in values}
        read = parse_model(SGLangSamplingParams, {k: v for k, v in values.items() if k not in ours}, at)
        is_constrained = constraint_of(read, at) is not None
        shared = {field.name for field in dataclasses.fields(cls)} & set(SGLangSamplingParams.model_fields)
        return cls(
            **{name: getattr(read, name) for name in shared - {"seed"}},
            max_tokens=read.max_new_tokens,
            min_tokens=read.min_new_tokens,
            seed=read.seed if read.sampling_seed is None else read.sampling_seed,
            include_stop_str_in_output=read.no_stop_trim,
            structured_outputs=StructuredOutputsParams(
                read.json_schema, read.regex, grammar=read.ebnf, structural_tag=read.structural_tag
            )
            if is_constrained
            else None,
            **ours,
        )

    def clone(self) -> Self:
        """A copy that shares only what the processors are made of."""
        return dataclasses.replace(
            self, extra_args=copy.deepcopy(self.extra_args), custom_params=copy.deepcopy(self.custom_params)
        )


_BESIDE_SGLANGS = ("custom_logit_processor", "extra_args", "logits_processors")

SGLANG_NAMES = {
    "include_stop_str_in_output": "no_stop_trim",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
"""SGLang's names of fields that it calls differently."""
SGLANG_CONSTRAINTS = {
    "structured_outputs.json": "json_schema",
    "structured_outputs.regex": "regex",
    "structured_outputs.grammar": "ebnf",
    "structured_outputs.structural_tag": "structural_tag",
}
"""SGLang's names of what stands elsewhere here."""
