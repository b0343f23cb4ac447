"""Configuration of a server, built from the command line or in code."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from logitship.sampler.sampling_params import LogprobsMode

from .allowed_hosts import ANY, check_allowed_host, check_allowed_origin, is_loopback
from .allowed_processors import read_allowed_digests, read_digests
from .default_processors import DefaultProcessor, read_default_processors
from .logs import LogFormat
from .reasoning_config import ReasoningStrings, read_reasoning_config

if TYPE_CHECKING:  # it needs torch, which the client alone does not have
    from logitship.builtin_processors.watermarks.watermark_key import WatermarkKey

_SANDBOX_TIMES = (
    "sandbox_cpu_time",
    "sandbox_step_timeout",
    "sandbox_first_step_timeout",
    "sandbox_load_timeout",
)
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the engine and the HTTP server. Field names are the flags' names."""

    # The model
    model_path: str = DEFAULT_MODEL
    """The default model's name, a Hugging Face folder, a GGUF file, or a hub name."""
    tokenizer_path: str | None = None
    served_model_name: str | None = None
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = "auto"
    device: str = "auto"
    model_impl: Literal["auto", "transformers"] = "auto"
    """transformers: the model's own code. auto: fused layers for supported architectures, else the model's own code."""
    chat_template: str | None = None
    """A file with a Jinja template that replaces the tokenizer's."""
    tool_call_parser: Literal["hermes", "llama3", "llama3_json", "qwen", "qwen25"] | None = None
    """Format of the model's tool calls. None: as its chat template says, if that is one of these formats."""
    trust_remote_code: bool = False

    # The engine
    max_num_seqs: int = 32
    """Maximum size of the running batch: its rows, and slots of the KV cache."""
    max_model_len: int | None = None
    """Maximum length of prompt plus output, in tokens. None: the model's length, or what fits into memory."""
    max_queued_requests: int = 1024
    max_queued_bytes: int = 256 << 20
    """Maximum memory of request bodies that are received or wait, in bytes. If there are several API keys, each may use
    half of it."""
    chunked_prefill_size: int = 256
    """Maximum number of prompt tokens computed in one step next to the running rows."""
    mem_fraction_static: float = 0.5
    """Fraction of the free memory for the KV cache."""
    prefix_cache_bytes: int | None = None
    """Bytes of the KV cache that keep the prefixes of earlier requests. 0: no prefix cache. None: a tenth."""
    random_seed: int | None = None
    enable_deterministic_inference: bool = False
    """Batch-invariant: a token's logits are bitwise the same in any batch composition. Slower."""
    speculative_algorithm: Literal["NGRAM"] | None = None
    """NGRAM: speculative decoding by prompt lookup. None: a step samples one token."""
    speculative_num_draft_tokens: int = 8
    """Maximum number of draft tokens per sequence and step."""
    max_forced_run: int = 16
    """Maximum number of forced tokens per sequence and step: tokens that are the only ones allowed, and need no step of
    their own. 0: each token has its own step."""

    # Sampling
    constrained_json_whitespace_pattern: str = r"(\n[ \t]{0,20})?[ ]?"
    """Regular expression for the white space between the parts of JSON, unless a request has its own. "": none. The
    default is what people and programs write: a model that likes white space would fill its output with it."""
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    reasoning_config: str | Mapping[str, str] | None = None
    """Strings that start and end the model's reasoning, see `read_reasoning_config`; a dict or JSON text.
    None: requests cannot have a `thinking_token_budget`."""

    # Processors
    enable_custom_logit_processor: bool = False
    logits_processors: tuple[Any, ...] = ()
    """Batch processors to install: classes, `module:Class`, or `{"qualname", "args", "kwargs"}` (also as JSON text).
    Entry points of installed packages are loaded in addition."""
    logits_processor_pattern: str | None = None
    """Regular expression for the callables that requests may name; must match the full name. None: no callables."""
    allow_processor: str | None = None
    """A file with the digests of the only processors that may be shipped, see `allowed_digests`. None: any."""
    blocked_digests: str | None = None
    """A file with the digests of shipped processors that may not run; read again when it changes. None: none."""
    tree_decode_config: str | None = None
    """A file with a token tree that every request follows; looked up in the model's folder first."""
    tree: Sequence[str] = ()
    """Token trees that requests can select by name, each as `NAME=FILE`, see `named_trees`."""
    default_processor: Sequence[str] = ()
    """Processors of every request, which run after its own, see `read_default_processors`."""
    watermark_key_file: str | None = None
    """A file with the secret of the watermarks, see `watermark_key`. None: requests for a watermark are refused."""
    max_processor_size: int = 1 << 20
    """Maximum size of a processor string, in bytes."""
    processor_cache_entries: int = 256
    processor_cache_bytes: int = 64 << 20
    max_artifact_size: int = 128 << 20
    """Maximum size of an uploaded artifact, in bytes."""
    artifact_cache_bytes: int = 512 << 20
    """Maximum total size of the artifacts of all clients, in bytes."""

    # Isolation
    processor_isolation: Literal["sandbox", "none"] = "sandbox"
    max_sandboxes: int = 64
    """Maximum number of sandboxes; each is a process with one shipped processor."""
    sandbox_idle_timeout: float = 30.0
    """Seconds after which the sandbox of a processor that no request uses is ended."""
    sandbox_memory: int = 1 << 30
    """Memory limit of a sandbox, in bytes, on top of what torch takes."""
    sandbox_cpu_time: float = 2.0
    """CPU time that a sandbox may use outside its calls, in seconds."""
    sandbox_step_timeout: float = 1.0
    """CPU time that the calls of a tenant's processors may take in a step, in seconds. A call that waits instead of
    computing may take as long by the wall clock, and one that gets no core five times as long."""
    sandbox_first_step_timeout: float = 10.0
    """The same for the first call in a new sandbox, in seconds. A tenant's first calls may take the additional time
    once a minute."""
    sandbox_load_timeout: float = 10.0
    """CPU time for loading a processor, in seconds; like `sandbox_step_timeout`."""
    allow_anonymous_code: bool = False
    """Run shipped code in sandboxes without API keys, although other machines or any web page may send it."""

    processor_wait: float = 0.2
    """Longest wait of a step for shipped processors while other requests run, as a part of what it takes without them;
    inf: until they have ended."""
    tenant_step_share: float = 0.5
    """Share of the cores' time that one API key's shipped processors may take while requests of other keys run."""

    # HTTP
    host: str = "127.0.0.1"
    port: int = 30000
    allowed_host: Sequence[str] = ()
    """Further names of this server in `Host`: a name, `*.NAME`, or `*` for any."""
    allowed_origin: Sequence[str] = ()
    """Origins whose web pages may use the server; `*`: any. Empty: only the server's own pages, without CORS."""
    # A single key may be given as a plain string: `__post_init__` converts them to tuples.
    api_key: Sequence[str] = field(default=(), repr=False)
    """Keys that may generate. They may also ship code, unless there are shipping keys. Empty: no key is required."""
    shipping_api_key: Sequence[str] = field(default=(), repr=False)
    """Keys that may generate and ship code. If there are any, no other key may ship code."""
    metrics_api_key: Sequence[str] = field(default=(), repr=False)
    """The only keys that may read `/metrics`, and nothing else. Empty: the other keys may."""
    requests_per_minute: int = 0
    """Requests that a tenant may send in any 60 seconds. 0: any number."""
    processor_loads_per_minute: int = 0
    """Shipped processors that may be loaded for a tenant in any 60 seconds. 0: any number."""
    max_request_bytes: int = 16 << 20
    max_request_elements: int = 1 << 19
    """Maximum number of keys and values in a request body: a string counts as 2, a key, a list or an object as 4."""
    request_body_timeout: float = 60.0
    """Time limit for receiving a request body, and before it the headers, in seconds."""
    disable_playground: bool = False
    """Do not serve the playground."""
    shutdown_timeout: float = 30.0
    """Time that running requests get to finish after SIGTERM, in seconds."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"

    @property
    def reserved_slots(self) -> int:
        """Slots that an API key gets only if it has at most as many: an eighth, where there are several keys."""
        return self.max_num_seqs // 8 if self._has_several_keys else 0

    @property
    def _has_several_keys(self) -> bool:
        return len({*self.api_key, *self.shipping_api_key}) > 1

    @property
    def model_name(self) -> str:
        """The name under which clients ask for the model."""
        return self.served_model_name or self.model_path

    @cached_property
    def max_sequences_per_tenant(self) -> int:
        """Most sequences of one API key that run or wait: of several keys, each may have half."""
        return self._share(self.max_num_seqs + self.max_queued_requests)

    @property
    def max_queued_bytes_per_tenant(self) -> int:
        """The part of `max_queued_bytes` that one API key may use."""
        return self._share(self.max_queued_bytes)

    def _share(self, total: int) -> int:
        return -(-total // 2) if self._has_several_keys else total

    @property
    def names_in_metrics(self) -> bool:
        """True if `/metrics` may name shipped classes: no tenant can read those of another there."""
        return bool(self.metrics_api_key) or not self._has_several_keys

    @cached_property
    def allowed_digests(self) -> frozenset[str] | None:
        """Digests in the file `allow_processor`, read once at construction. None: no such file is configured."""
        return None if self.allow_processor is None else read_allowed_digests(self.allow_processor)

    @cached_property
    def default_processors(self) -> tuple[DefaultProcessor, ...]:
        """Parsed `default_processor`, with what is in its files, read once at construction."""
        return read_default_processors(self.default_processor)

    @property
    def runs_shipped_code(self) -> bool:
        """True if shipped code may run: that of clients, or the operator's own of `default_processor`."""
        return self.enable_custom_logit_processor or any(each.is_shipped for each in self.default_processors)

    @cached_property
    def watermark_key(self) -> WatermarkKey | None:
        """Key in the file `watermark_key_file`, read once at construction. None: no such file is configured."""
        if self.watermark_key_file is None:
            return None
        from logitship.builtin_processors.watermarks.watermark_key import WatermarkKey

        return WatermarkKey.read(self.watermark_key_file)

    @cached_property
    def reasoning_strings(self) -> ReasoningStrings | None:
        """Parsed `reasoning_config`."""
        return None if self.reasoning_config is None else read_reasoning_config(self.reasoning_config)

    @cached_property
    def named_trees(self) -> dict[str, str]:
        """Parsed `tree`: name → file."""
        trees: dict[str, str] = {}
        for entry in self.tree:
            name, _, file = entry.partition("=")
            if not name or not file:
                raise ValueError(f"tree: expected NAME=FILE, got {entry!r}")
            if name in (*trees, self.tree_decode_config):
                raise ValueError(f"tree: two trees are named {name!r}")
            trees[name] = file
        return trees

    def __post_init__(self) -> None:
        for name in (
            "api_key",
            "shipping_api_key",
            "metrics_api_key",
            "tree",
            "default_processor",
            "allowed_host",
            "allowed_origin",
        ):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        self._check_choices()
        self.named_trees  # noqa: B018  # report errors before the model is loaded
        self._check_numbers()
        self._check_keys()
        self.default_processors  # noqa: B018  # report errors before the model is loaded
        self.watermark_key  # noqa: B018  # report errors before the model is loaded
        for pattern in self.allowed_host:
            check_allowed_host(pattern)
        for origin in self.allowed_origin:
            check_allowed_origin(origin)
        self._check_anonymous_code()
        self.reasoning_strings  # noqa: B018  # report errors before the model is loaded
        try:
            re.compile(self.logits_processor_pattern or "")
        except re.error as error:
            raise ValueError(f"logits_processor_pattern is not a regular expression: {error}") from None
        if problem := _problem_of_white_space(self.constrained_json_whitespace_pattern):
            raise ValueError(f"constrained_json_whitespace_pattern: not a regular expression for grammars: {problem}")

    def _check_choices(self) -> None:
        for name, kind in setting_types().items():
            kinds = (kind, *get_args(kind))
            choices = [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)]
            value = getattr(self, name)
            if choices and value not in choices and not (value is None and type(None) in kinds):
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")

    def _check_numbers(self) -> None:
        positive = (
            "max_num_seqs",
            "max_model_len",
            "chunked_prefill_size",
            "speculative_num_draft_tokens",
            "max_processor_size",
            "processor_cache_entries",
            "processor_cache_bytes",
            "max_artifact_size",
            "artifact_cache_bytes",
            "max_sandboxes",
            "sandbox_memory",
            "max_request_bytes",
            "max_request_elements",
            "max_queued_bytes",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or greater, not {value}")
        for name in (
            "max_queued_requests",
            "max_logprobs",
            "max_forced_run",
            "prefix_cache_bytes",
            "requests_per_minute",
            "processor_loads_per_minute",
            "shutdown_timeout",
        ):
            if not (getattr(self, name) or 0) >= 0:  # NaN too
                raise ValueError(f"{name} must be 0 or greater, not {getattr(self, name)}")
        for name in (*_SANDBOX_TIMES, "sandbox_idle_timeout", "request_body_timeout"):
            if not 0 < getattr(self, name) < math.inf:  # NaN too
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        if self.max_queued_bytes_per_tenant < self.max_request_bytes:
            raise ValueError(
                f"max_queued_bytes must be enough for one request body of max_request_bytes, {self.max_request_bytes}, "
                f"twice that with several API keys; it is {self.max_queued_bytes}"
            )
        if not self.processor_wait >= 0:  # NaN too
            raise ValueError(f"processor_wait must be 0 or greater, not {self.processor_wait}")
        if not 0 < self.tenant_step_share <= 1:  # NaN too
            raise ValueError(f"tenant_step_share must be above 0 and at most 1, not {self.tenant_step_share}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        if not 0 < self.mem_fraction_static <= 1:
            raise ValueError(f"mem_fraction_static must be above 0 and at most 1, not {self.mem_fraction_static}")

    def _check_keys(self) -> None:
        for name in ("api_key", "shipping_api_key", "metrics_api_key"):
            # The message does not contain the key: keys must not be logged.
            if any(not key or key != key.strip() for key in getattr(self, name)):
                raise ValueError(f"{name}: a key is empty, or begins or ends with a space, which HTTP cannot transmit")
        if self.shipping_api_key and not self.enable_custom_logit_processor:
            raise ValueError(
                "shipping_api_key: this server does not accept shipped code; set enable_custom_logit_processor as well"
            )
        self.allowed_digests  # noqa: B018  # report errors in the file before the model is loaded
        if self.blocked_digests is not None:
            read_digests(self.blocked_digests, "blocked_digests")  # as above

    def _check_anonymous_code(self) -> None:
        """Refuse to run shipped code for everybody: without API keys, for other machines or for any web page."""
        if not self.enable_custom_logit_processor or self.api_key or self.shipping_api_key:
            return
        if not is_loopback(self.host):
            risk, fix = f"--host {self.host} lets other machines", "listen on --host 127.0.0.1"
        elif ANY in self.allowed_origin:
            risk, fix = "--allowed-origin * lets every web page", "list the origins"
        elif ANY in self.allowed_host:
            risk, fix = "--allowed-host * lets every web page", "list the hosts"
        else:
            return
        if self.processor_isolation == "none":
            raise ValueError(
                f"processor_isolation none: {risk} run code with all rights of the server, because there are no API "
                f"keys: set --api-key, or {fix}, or leave out --processor-isolation none"
            )
        if not self.allow_anonymous_code:
            raise ValueError(
                f"enable_custom_logit_processor: {risk} run code in sandboxes, because there are no API keys: set "
                f"--api-key, or {fix}, or permit it with --allow-anonymous-code"
            )


def _problem_of_white_space(pattern: str) -> str:
    """Return why llguidance does not take a regular expression; "" if it does."""
    if pattern in ("", ServerConfig.constrained_json_whitespace_pattern):
        return ""
    from llguidance import LLMatcher, grammar_from  # needed by the server alone, and only for its own pattern

    error = LLMatcher.validate_grammar(grammar_from("regex", pattern))
    return error.rpartition("error: ")[2].partition("\n")[0]


@cache
def setting_types() -> dict[str, Any]:
    """Return the types of the settings by name."""
    return get_type_hints(ServerConfig)
