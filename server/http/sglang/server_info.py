"""Responses of `/model_info` and `/server_info`, and the schema of the latter."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from logitship.server.config import ServerConfig, setting_types
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.flags import FLAG_OF_FIELD
from logitship.server.model.kv_cache import BLOCK_SIZE
from logitship.server.schemas.documentation import ref
from logitship.server.schemas.documented import SCHEMA_LOCK, example_of
from logitship.server.schemas.sglang_response_schemas import InternalState, ModelInfoResponse

from .generate_route import WEIGHT_VERSION

_SECRETS = ("api_key", "shipping_api_key", "metrics_api_key", "watermark_key_file")


def model_info_of(engine: AsyncEngine) -> ModelInfoResponse:
    """Describe the model."""
    model = engine.model
    return {
        "model_path": model.path,
        "tokenizer_path": engine.config.tokenizer_path or model.path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": WEIGHT_VERSION,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "architectures": [model.architecture],
        "served_model_name": model.name,
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
        "eos_token_ids": sorted(model.eos_token_ids),
        "dtype": model.dtype,
        "device": model.device,
    }


def server_info_of(engine: AsyncEngine) -> dict[str, Any]:
    """Describe the model, the state, and the settings except API keys and the watermark key's file."""
    settings = asdict(engine.config)
    for name in _SECRETS:
        del settings[name]
    # SGLang has one internal state per replica of the model; there is one here.
    return {
        **settings,
        **model_info_of(engine),
        "version": version("logitship"),
        "max_total_num_tokens": engine.config.max_num_seqs * engine.model.max_model_len,
        "page_size": BLOCK_SIZE,
        "internal_states": [internal_state_of(engine)],
    }


def internal_state_of(engine: AsyncEngine) -> InternalState:
    """Describe the engine's state."""
    stats = engine.stats()
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "steps": stats.steps,
        "accepting": stats.accepting,
        "processor_cache_hits": stats.processor_cache_hits,
        "processor_cache_misses": stats.processor_cache_misses,
        "processor_cache_evictions": stats.processor_cache_evictions,
        "processor_cache_entries": stats.processor_cache_entries,
        "processor_cache_bytes": stats.processor_cache_bytes,
        "artifact_bytes": stats.artifact_bytes,
        "prefix_tokens_asked": stats.prefix_tokens_asked,
        "prefix_tokens_found": stats.prefix_tokens_found,
        "prefix_blocks": stats.prefix_blocks,
        "prefix_blocks_capacity": stats.prefix_blocks_capacity,
        "registered_processors": stats.registered_processors,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "forced": stats.forced,
        "sandboxes": stats.sandboxes,
        "sandboxes_started": stats.sandboxes_started,
        "sandboxes_ended": dict(stats.sandboxes_ended),
        "pool_jobs_running": stats.pool_jobs_running,
        "pool_jobs_waiting": stats.pool_jobs_waiting,
        "queued_bytes": stats.queued_bytes,
        "loads_running": stats.loads_running,
        "loads_waiting": stats.loads_waiting,
        "grammar_checks_running": stats.grammar_checks_running,
        "grammar_checks_waiting": stats.grammar_checks_waiting,
        "grammar_failures": stats.grammar_failures,
        "deferred_calls": stats.deferred_calls,
    }


@cache
def server_info_schema() -> dict[str, Any]:
    """Return the JSON schema of `server_info_of`. The settings' descriptions are the flags' help."""
    with SCHEMA_LOCK:
        of_model = TypeAdapter(ModelInfoResponse).json_schema()["properties"]
        settings = _settings()
    properties = {
        **settings,
        **of_model,
        "version": {"type": "string", "description": "logitship's version.", "examples": [version("logitship")]},
        "max_total_num_tokens": {
            "type": "integer",
            "description": "Tokens that fit into the KV cache: `max_num_seqs` sequences of `max_model_len`.",
            "examples": [262144],
        },
        "page_size": {
            "type": "integer",
            "description": "Tokens of a block of the prefix cache.",
            "examples": [BLOCK_SIZE],
        },
        "internal_states": {
            "type": "array",
            "items": ref(InternalState),
            "description": "State of the engine, in one entry.",
            "examples": [[example_of(InternalState)]],
        },
    }
    return {
        "title": "ServerInfo",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _settings() -> dict[str, Any]:
    types = setting_types()
    found = {}
    for field in fields(ServerConfig):
        if field.name not in _SECRETS:
            schema = TypeAdapter(types[field.name]).json_schema()
            found[field.name] = {**schema, "description": FLAG_OF_FIELD[field.name].help, "examples": [field.default]}
    return found
