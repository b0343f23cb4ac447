"""How a server is set up: one record, built from the command line or by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from logitship.sampler.sampling_params import LogprobsMode

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the engine and of its HTTP front. Field names are the flags' names."""

    # The model
    model_path: str = DEFAULT_MODEL
    """The default model's name, a Hugging Face folder, a GGUF file, or a hub name."""
    tokenizer_path: str | None = None
    served_model_name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    chat_template: str | None = None
    """A file with a Jinja template that replaces the tokenizer's."""
    trust_remote_code: bool = False

    # The engine
    max_num_seqs: int = 32
    """Sequences that decode together: rows of the batch, and slots of the cache."""
    max_model_len: int | None = None
    """Longest prompt and output together, in tokens. None: the model's length, or what fits into memory."""
    max_queued_requests: int = 1024
    chunked_prefill_size: int = 256
    """Most prompt tokens computed in one step beside the running rows."""
    mem_fraction_static: float = 0.5
    """Share of the free memory that the cache may take."""
    random_seed: int | None = None

    # Sampling
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"

    # Processors
    enable_custom_logit_processor: bool = False
    logits_processors: tuple[Any, ...] = ()
    """The operator's own: classes, `module:Class`, or `{"qualname", "args", "kwargs"}` (also as JSON text). Those of
    installed packages are loaded besides."""
    logits_processor_pattern: str | None = None
    """Requests may name the callables whose qualified names this regular expression matches in full. None: no name."""
    processor_isolation: Literal["none"] = "none"
    max_processor_size: int = 1 << 20
    """Longest processor string, in bytes."""
    processor_cache_entries: int = 256
    processor_cache_bytes: int = 64 << 20

    # HTTP
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    max_request_bytes: int = 16 << 20
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def model_name(self) -> str:
        """The name under which clients ask for the model."""
        return self.served_model_name or self.model_path

    def __post_init__(self) -> None:
        positive = (
            "max_num_seqs",
            "max_model_len",
            "chunked_prefill_size",
            "max_processor_size",
            "processor_cache_entries",
            "processor_cache_bytes",
            "max_request_bytes",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or greater, not {value}")
        for name in ("max_queued_requests", "max_logprobs", "shutdown_timeout"):
            if not getattr(self, name) >= 0:  # NaN too
                raise ValueError(f"{name} must be 0 or greater, not {getattr(self, name)}")
        try:
            re.compile(self.logits_processor_pattern or "")
        except re.error as error:
            raise ValueError(f"logits_processor_pattern is not a regular expression: {error}") from None
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        if not 0 < self.mem_fraction_static <= 1:
            raise ValueError(f"mem_fraction_static must be above 0 and at most 1, not {self.mem_fraction_static}")
