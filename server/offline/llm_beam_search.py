"""Parameters and outputs of `LLM.beam_search`.

`BeamSearchParams`, `BeamSearchSequence` and `BeamSearchOutput` stand in for vLLM's classes of the same names, so that
programs written for vLLM work unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from logitship.client.records import Receipt
from logitship.sampler.sampling_params import InvalidSamplingParams
from logitship.server.requests.messages import EarlyStopping
from logitship.server.tokenizer import Tokenizer

from .outputs import Logprob, RequestOutput
from .sampling_params import SamplingParams
from .structured_outputs_params import StructuredOutputsParams


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search. Stand-in for `vllm.sampling_params.BeamSearchParams`.

    Raises:
        InvalidSamplingParams: a ValueError; a value is out of range or not supported. Names the field.
    """

    beam_width: int
    """Number of beams, and of sequences in the output."""
    max_tokens: int
    """Maximum number of output tokens."""
    ignore_eos: bool = False
    """Continue after the model's EOS token."""
    temperature: float = 0.0
    """Must be 0: beam search does not sample."""
    length_penalty: float = 1.0
    """Sums of log-probabilities are divided by length ** `length_penalty`."""
    include_stop_str_in_output: bool = False
    """Keep the EOS token among `tokens`."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """Constraint on the outputs."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    early_stopping: EarlyStopping = False
    """As in `SamplingParams`; not in vLLM."""
    custom_logit_processor: Any = None
    """As in `SamplingParams`; not in vLLM."""
    logits_processors: Sequence[Any] = ()
    """As in `SamplingParams`; not in vLLM."""
    custom_params: Mapping[str, Any] | None = None
    """As in `SamplingParams`; not in vLLM."""

    def __post_init__(self) -> None:
        if type(self.beam_width) is not int or self.beam_width < 1:
            raise InvalidSamplingParams("beam_width", "must be an integer, 1 or greater")
        if self.temperature != 0:
            raise InvalidSamplingParams("temperature", "must be 0: beam search does not sample")
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """Return the equivalent parameters for `LLM.generate`."""
        same = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "beam_width"}
        return SamplingParams(n=self.beam_width, use_beam_search=True, logprobs=0, **same)


@dataclass(frozen=True)
class BeamSearchSequence:
    """A sequence found by beam search.

    Attributes:
        tokens: token ids of the prompt and the output.
        logprobs: one dict per output token, the EOS token included: its log-probability, by token id.
        cum_logprob: sum of the log-probabilities.
        text: the text of `tokens`.
        finish_reason: `stop` or `length`.
        stop_reason: the stop token that ended the sequence; None for the model's own EOS token.
        score: determines the rank of the sequence.
        receipts: one per processor of the prompt.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float = 0.0
    receipts: tuple[Receipt, ...] = ()


@dataclass(frozen=True)
class BeamSearchOutput:
    """The sequences found for a prompt.

    Attributes:
        sequences: the best first; `beam_width` of them, or fewer if the processors allow fewer.
    """

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_search_output(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """Convert an output of `LLM.generate` to vLLM's output of a beam search."""
    sequences = []
    for one in output.outputs:
        ends_with_token = one.finish_reason == "stop" and not params.include_stop_str_in_output
        tokens = output.prompt_token_ids + (one.token_ids[:-1] if ends_with_token else one.token_ids)
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=one.logprobs or [],
                cum_logprob=one.cumulative_logprob or 0.0,
                text=tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens),
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
                score=one.beam_score or 0.0,
                receipts=one.receipts,
            )
        )
    return BeamSearchOutput(sequences)
