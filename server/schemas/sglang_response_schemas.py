"""Responses of SGLang's routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired, TypeAlias

from pydantic import Field
from typing_extensions import TypedDict

from .documented import documented, example_of
from .response_schemas import DIGEST, ReceiptObject, SamplingRecordObject, TokenTraceObject

TokenLogprobEntry: TypeAlias = Annotated[
    Sequence[float | int | str | None],
    Field(min_length=3, max_length=3, description="`[logprob, token id, text or null]`"),
]


@documented({"type": "stop", "matched": 2})
class StopReason(TypedDict):
    """Ended by an EOS token, a stop token, a stop string or a stop pattern."""

    type: Literal["stop"]
    """Kind of reason."""
    matched: int | str | None
    """The matched token id, string or pattern."""


@documented({"type": "length", "length": 4})
class LengthReason(TypedDict):
    """Reached `max_new_tokens` or the model's length."""

    type: Literal["length"]
    """Kind of reason."""
    length: int
    """Number of output tokens."""


@documented(
    {
        "type": "abort",
        "message": "processor Lipogram raised ZeroDivisionError: division by zero",
        "status_code": 400,
        "err_type": "ProcessorFault",
        "kind": "exception",
        "name": "Lipogram",
        "digest": DIGEST,
        "traceback": 'Traceback (most recent call last):\n  File "lipogram.py", line 9, in __call__\n',
    }
)
class AbortReason(TypedDict):
    """Cancelled, or ended by an error."""

    type: Literal["abort"]
    """Kind of reason."""
    message: str
    """Human-readable message."""
    status_code: int | None
    """HTTP status of the error; null if the request was cancelled."""
    err_type: str | None
    """Type of the error; null if the request was cancelled."""
    kind: NotRequired[str]
    """Only for a processor's fault: how the processor violated its contract."""
    name: NotRequired[str]
    """Only for a processor's fault: the processor's name."""
    digest: NotRequired[str]
    """Only for a processor's fault: the processor's digest."""
    traceback: NotRequired[str]
    """Only for a processor's fault: the traceback of its own code; may be empty."""


@documented(
    {
        "id": "first",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 5,
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "input_token_logprobs": [[None, 504, None], [-1.2, 3575, None]],
        "output_token_logprobs": [[-0.105, 7042, " Paris"]],
        "output_token_logprobs_length": 1,
        "input_top_logprobs": [None, [[-1.2, 3575, None]]],
        "output_top_logprobs": [[[-0.105, 7042, " Paris"], [-3.2, 253, " a"]]],
        "input_token_ids_logprobs": [None, [[-3.5, 9642, None]]],
        "output_token_ids_logprobs": [[[-4.25, 9642, " Yes"], [-6.5, 2822, " No"]]],
        "output_token_sampling_mask": [[7042, 253]],
        "output_token_sampling_logprobs": [-0.05],
        "output_token_sampling_mask_length": 1,
        "sampling_record": example_of(SamplingRecordObject),
        "trace": [example_of(TokenTraceObject)],
        "receipts": [example_of(ReceiptObject)],
        "cumulative_logprob": -2.5,
        "beam_score": -0.625,
        "e2e_latency": 0.25,
    }
)
class MetaInfo(TypedDict):
    """Metadata of a continuation."""

    id: str
    """Request id, with `_0`, `_1`, … appended if there are several continuations."""
    finish_reason: StopReason | LengthReason | AbortReason | None
    """Reason for the end of the generation; null while it runs."""
    prompt_tokens: int
    """Tokens of the prompt."""
    weight_version: str
    """Always `default`."""
    num_retractions: int
    """Always 0: requests are never preempted."""
    reasoning_tokens: int
    """Always 0: reasoning is not parsed."""
    completion_tokens: int
    """Tokens of the output so far."""
    cached_tokens: int
    """Prompt tokens whose KV cache was reused."""
    input_token_logprobs: NotRequired[list[TokenLogprobEntry]]
    """With `return_logprob`: the prompt's tokens from `logprob_start_len` on."""
    output_token_logprobs: NotRequired[list[TokenLogprobEntry]]
    """With `return_logprob`: the output's tokens."""
    output_token_logprobs_length: NotRequired[int]
    """With `return_logprob`: length of `output_token_logprobs`."""
    input_top_logprobs: NotRequired[list[list[TokenLogprobEntry] | None]]
    """With `top_logprobs_num`: the most likely tokens at each prompt position."""
    output_top_logprobs: NotRequired[list[list[TokenLogprobEntry] | None]]
    """With `top_logprobs_num`: the most likely tokens at each output position."""
    input_token_ids_logprobs: NotRequired[list[list[TokenLogprobEntry] | None]]
    """With `token_ids_logprob`: these tokens at each prompt position."""
    output_token_ids_logprobs: NotRequired[list[list[TokenLogprobEntry] | None]]
    """With `token_ids_logprob`: these tokens at each output position."""
    output_token_sampling_mask: NotRequired[list[list[int]]]
    """With `return_sampling_mask`: for each output token those that could be sampled, the most likely first."""
    output_token_sampling_logprobs: NotRequired[list[float] | list[list[float]]]
    """With `return_sampling_mask`: the log-probability of each output token under the distribution that it was sampled
    from, or with `sampling_logprobs_mode` `support` those of all tokens of its mask."""
    output_token_sampling_mask_length: NotRequired[int]
    """With `return_sampling_mask`: length of `output_token_sampling_mask`."""
    sampling_record: NotRequired[SamplingRecordObject]
    """With `sampling_mask_format` `packed`: the masks of the new tokens. No event of a stream repeats them."""
    trace: NotRequired[list[TokenTraceObject]]
    """With `trace`: one entry per token of the output so far."""
    receipts: NotRequired[list[ReceiptObject]]
    """At the end, if the request had processors: one per processor."""
    cumulative_logprob: NotRequired[float]
    """Beam search only: sum of the tokens' log-probabilities."""
    beam_score: NotRequired[float]
    """Beam search only: the score that ranks the sequences."""
    e2e_latency: NotRequired[float]
    """At the end: seconds since the request arrived."""


@documented(
    {
        "text": " Paris.",
        "output_ids": [7042, 30],
        "meta_info": {
            "id": "first",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 5,
            "weight_version": "default",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "e2e_latency": 0.25,
        },
        "index": 0,
    }
)
class GenerateResponse(TypedDict):
    """A continuation."""

    text: str
    """The whole text so far."""
    output_ids: list[int]
    """The tokens of the text."""
    meta_info: MetaInfo
    """Metadata."""
    index: NotRequired[int]
    """Only in streams with several continuations: index of the continuation."""


@documented(
    {
        "model_path": "SmolLM2-135M-Instruct",
        "tokenizer_path": "SmolLM2-135M-Instruct",
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "architectures": ["LlamaForCausalLM"],
        "served_model_name": "SmolLM2-135M-Instruct",
        "vocab_size": 49152,
        "max_model_len": 8192,
        "eos_token_ids": [2],
        "dtype": "float32",
        "device": "cpu",
    }
)
class ModelInfoResponse(TypedDict):
    """The model."""

    model_path: str
    """Path that the model was loaded from."""
    tokenizer_path: str
    """Path that the tokenizer was loaded from."""
    is_generation: Literal[True]
    """Always true: the model generates text."""
    preferred_sampling_params: None
    """Always null: requests without sampling parameters get the defaults."""
    weight_version: str
    """Always `default`."""
    has_image_understanding: Literal[False]
    """Always false: text input only."""
    has_audio_understanding: Literal[False]
    """Always false: text input only."""
    architectures: list[str]
    """Architecture of the model."""
    served_model_name: str
    """Name of the model in requests."""
    vocab_size: int
    """Vocabulary size, the width of the logits."""
    max_model_len: int
    """Maximum length of prompt plus output, in tokens."""
    eos_token_ids: list[int]
    """The tokens that end an output."""
    dtype: str
    """Dtype of the weights."""
    device: str
    """Device that runs the model."""


@documented(
    {
        "running": 3,
        "waiting": 0,
        "steps": 1234,
        "accepting": True,
        "processor_cache_hits": 41,
        "processor_cache_misses": 2,
        "processor_cache_evictions": 0,
        "processor_cache_entries": 2,
        "processor_cache_bytes": 3174,
        "artifact_bytes": 0,
        "prefix_tokens_asked": 1450,
        "prefix_tokens_found": 720,
        "prefix_blocks": 46,
        "prefix_blocks_capacity": 1674,
        "registered_processors": 1,
        "drafted": 0,
        "accepted": 0,
        "forced": 0,
        "sandboxes": 2,
        "sandboxes_started": 3,
        "sandboxes_ended": {"deadline": 1},
        "pool_jobs_running": 0,
        "pool_jobs_waiting": 0,
        "queued_bytes": 0,
        "loads_running": 0,
        "loads_waiting": 0,
        "grammar_checks_running": 0,
        "grammar_checks_waiting": 0,
        "grammar_failures": 0,
        "deferred_calls": 0,
    }
)
class InternalState(TypedDict):
    """State and counters of the engine."""

    running: int
    """Running sequences."""
    waiting: int
    """Waiting sequences."""
    steps: int
    """Steps since the start."""
    accepting: bool
    """False while shutting down."""
    processor_cache_hits: int
    """Lookups of shipped processors that were loaded already."""
    processor_cache_misses: int
    """Lookups of shipped processors that had to be loaded."""
    processor_cache_evictions: int
    """Shipped processors that were evicted."""
    processor_cache_entries: int
    """Loaded shipped processors."""
    processor_cache_bytes: int
    """Total size of the loaded shipped processors, in bytes."""
    artifact_bytes: int
    """Total size of the uploaded artifacts, in bytes."""
    prefix_tokens_asked: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_tokens_found: int
    """Prompt tokens found in the prefix cache."""
    prefix_blocks: int
    """Blocks of tokens in the prefix cache."""
    prefix_blocks_capacity: int
    """Capacity of the prefix cache, in blocks."""
    registered_processors: int
    """Registered processors."""
    drafted: int
    """Draft tokens (speculative decoding)."""
    accepted: int
    """Accepted draft tokens."""
    forced: int
    """Output tokens that needed no forward pass of their own, because they were forced."""
    sandboxes: int
    """Running sandboxes."""
    sandboxes_started: int
    """Sandboxes started."""
    sandboxes_ended: dict[str, int]
    """Sandboxes ended, by reason: `unloaded`, or the kind of a processor's fault."""
    pool_jobs_running: int
    """Jobs that prepare requests."""
    pool_jobs_waiting: int
    """Such jobs that wait for a thread."""
    queued_bytes: int
    """Memory of the bodies of requests that are received or wait, in bytes."""
    loads_running: int
    """Shipped processors that are being loaded."""
    loads_waiting: int
    """Shipped processors that wait to be loaded."""
    grammar_checks_running: int
    """Grammars that are being checked and compiled."""
    grammar_checks_waiting: int
    """Grammars that wait to be checked."""
    grammar_failures: int
    """Masks of grammars that took too long or were too complex, which ends the sequence."""
    deferred_calls: int
    """Calls of processors that a step did not wait for."""
