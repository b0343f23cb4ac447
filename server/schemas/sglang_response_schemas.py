"""The answers of SGLang's routes, for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired, TypeAlias

from pydantic import Field
from typing_extensions import TypedDict

from .documented import documented, example_of
from .response_schemas import DIGEST, ReceiptObject, TokenTraceObject

TokenLogprobEntry: TypeAlias = Annotated[
    Sequence[float | int | str | None],
    Field(min_length=3, max_length=3, description="`[logprob, token id, text or null]`"),
]


@documented({"type": "stop", "matched": 2})
class StopReason(TypedDict):
    """It came to its end."""

    type: Literal["stop"]
    """An end token, a stop token or a stop string."""
    matched: int | str | None
    """The token id or the string."""


@documented({"type": "length", "length": 4})
class LengthReason(TypedDict):
    """It has as many tokens as it may."""

    type: Literal["length"]
    """`max_new_tokens`, or the model's length."""
    length: int
    """Number of its tokens."""


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
    """It was cancelled, or ended by an error."""

    type: Literal["abort"]
    """It did not come to its end."""
    message: str
    """What happened."""
    status_code: int | None
    """The HTTP status that would fit; null if somebody cancelled it."""
    err_type: str | None
    """The type of the error; null if somebody cancelled it."""
    kind: NotRequired[str]
    """Of a processor's fault: in which way it broke its contract."""
    name: NotRequired[str]
    """Of a processor's fault: the processor's name."""
    digest: NotRequired[str]
    """Of a processor's fault: the processor's identity."""
    traceback: NotRequired[str]
    """Of a processor's fault: the traceback of its own code; empty where there is none."""


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
        "trace": [example_of(TokenTraceObject)],
        "receipts": [example_of(ReceiptObject)],
        "cumulative_logprob": -2.5,
        "beam_score": -0.625,
        "e2e_latency": 0.25,
    }
)
class MetaInfo(TypedDict):
    """What there is to say of a continuation."""

    id: str
    """Id of the request; of several continuations, with `_0`, `_1`, … appended."""
    finish_reason: StopReason | LengthReason | AbortReason | None
    """Why it ended; null while it runs."""
    prompt_tokens: int
    """Tokens of the prompt."""
    weight_version: str
    """Always `default`."""
    num_retractions: int
    """Always 0: nothing is preempted."""
    reasoning_tokens: int
    """Always 0: no thinking is parsed out of the text."""
    completion_tokens: int
    """Tokens of the output so far."""
    cached_tokens: int
    """Prompt tokens whose keys and values were copied from another continuation."""
    input_token_logprobs: NotRequired[list[TokenLogprobEntry]]
    """With `return_logprob`: of the prompt's tokens from `logprob_start_len` on."""
    output_token_logprobs: NotRequired[list[TokenLogprobEntry]]
    """With `return_logprob`: of the output's tokens."""
    output_token_logprobs_length: NotRequired[int]
    """With `return_logprob`: how many those are."""
    input_top_logprobs: NotRequired[list[list[TokenLogprobEntry] | None]]
    """With `top_logprobs_num`: of each of those positions, the most likely tokens."""
    output_top_logprobs: NotRequired[list[list[TokenLogprobEntry] | None]]
    """With `top_logprobs_num`: the same for the output."""
    trace: NotRequired[list[TokenTraceObject]]
    """With `trace`: one entry a token of the output so far."""
    receipts: NotRequired[list[ReceiptObject]]
    """At the end, if the request carried processors: one each."""
    cumulative_logprob: NotRequired[float]
    """Of a beam search: the sum of the tokens' log-probabilities."""
    beam_score: NotRequired[float]
    """Of a beam search: what the sequences were compared by."""
    e2e_latency: NotRequired[float]
    """At the end: seconds since the request came."""


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
    """The text, from its beginning."""
    output_ids: list[int]
    """Its tokens."""
    meta_info: MetaInfo
    """What there is to say of it."""
    index: NotRequired[int]
    """In the events of a stream with several continuations: which one."""


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
    """Where it was loaded from."""
    tokenizer_path: str
    """Where its tokenizer was."""
    is_generation: Literal[True]
    """It generates text."""
    preferred_sampling_params: None
    """Always null: requests without sampling parameters get the defaults."""
    weight_version: str
    """Always `default`."""
    has_image_understanding: Literal[False]
    """It takes text alone."""
    has_audio_understanding: Literal[False]
    """It takes text alone."""
    architectures: list[str]
    """The class that computes it."""
    served_model_name: str
    """The name to ask for it by."""
    vocab_size: int
    """Number of tokens, and width of the logits."""
    max_model_len: int
    """Longest prompt and output together, in tokens."""
    eos_token_ids: list[int]
    """The tokens that end an output."""
    dtype: str
    """Type of the weights."""
    device: str
    """Where it runs."""


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
        "prefix_tokens_asked": 1450,
        "prefix_tokens_found": 720,
        "prefix_blocks": 46,
        "prefix_blocks_capacity": 1674,
        "registered_processors": 1,
        "drafted": 0,
        "accepted": 0,
        "sandboxes": 2,
        "sandboxes_started": 3,
        "sandboxes_ended": {"deadline": 1},
    }
)
class InternalState(TypedDict):
    """Counters of the engine."""

    running: int
    """Sequences that have a slot."""
    waiting: int
    """Sequences that wait for a slot."""
    steps: int
    """Steps since the start."""
    accepting: bool
    """False while shutting down."""
    processor_cache_hits: int
    """Shipped processors that were loaded already."""
    processor_cache_misses: int
    """Shipped processors that had to be loaded."""
    processor_cache_evictions: int
    """Shipped processors that made way for others."""
    processor_cache_entries: int
    """Shipped processors that are loaded."""
    processor_cache_bytes: int
    """What they count for, in bytes."""
    prefix_tokens_asked: int
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_tokens_found: int
    """Those of them that need not be computed."""
    prefix_blocks: int
    """Blocks of tokens that the prefix cache keeps."""
    prefix_blocks_capacity: int
    """The most that it can keep."""
    registered_processors: int
    """Processors that were uploaded and are kept."""
    drafted: int
    """Tokens that were checked ahead of their time (speculative decoding)."""
    accepted: int
    """Those of them that were drawn."""
    sandboxes: int
    """Sandboxes that live."""
    sandboxes_started: int
    """Sandboxes that were started."""
    sandboxes_ended: dict[str, int]
    """How many ended, by the reason: `unloaded`, or the kind of a processor's fault."""
