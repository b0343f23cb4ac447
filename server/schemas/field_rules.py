"""Rules for the fields of SGLang's, vLLM's and OpenAI's protocols that no schema here has.

Each field of theirs is honoured, which means that it is a field of a schema; or accepted, because it cannot change the
answer; or refused with a reason. `docs/protocol-fields.md` is made from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Ignored:
    """Accept a field with any value: it cannot change the answer.

    Attributes:
        why: why it cannot.
    """

    why: str


@dataclass(frozen=True)
class Refused:
    """Refuse a field, unless its value asks for nothing.

    Attributes:
        reason: why, and what to use instead.
        noops: values that ask for nothing, in addition to null.
    """

    reason: str
    noops: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """Return whether the value asks for nothing."""
        return value is None or any(value == one and type(value) is type(one) for one in self.noops)


FieldRule: TypeAlias = Ignored | Refused

_BILLING = Ignored("identifies or bills a client of OpenAI; API keys identify the clients of this server")
_LABELS = Ignored("labels a request for the operator's logs and metrics")
_CACHE_HINT = Ignored("advises a cache of prompts; prefixes are cached here without advice")
_ROUTING = Ignored("advises a router which replica to use; there is one")
_NO_DISAGGREGATION = "prompts are processed in the same process as outputs"
_NO_PARALLEL = "there is one replica of the model"
_NO_MEDIA = "this server takes only text"
_NO_SESSIONS = "the server keeps no sessions: send the whole prompt, its prefix is cached"
_NO_LORA = "this server has no LoRA adapters"
_NO_CACHE_KEYS = "prefixes are shared per API key, not per request: use another key"
_NOT_RETURNED = "the server does not compute it"
_PEER_INTERNAL = "SGLang's processes set it, clients do not"
_OTHER_FORMAT = "the response has one format for it, the API's own"
_NO_TRUNCATION = "prompts are never cut: shorten it yourself, /tokenize counts its tokens"
_NO_WATERMARK = "there is none built in: ship a processor that adds one"

BODY_RULES: Mapping[str, FieldRule] = {
    "audio": Refused(_NO_MEDIA),
    "audio_data": Refused(_NO_MEDIA, ([],)),
    "background": Refused("responses are not stored, so nothing can be fetched later", (False,)),
    "bootstrap_host": Refused(_NO_DISAGGREGATION),
    "bootstrap_pair_key": Refused(_NO_DISAGGREGATION),
    "bootstrap_port": Refused(_NO_DISAGGREGATION),
    "bootstrap_room": Refused(_NO_DISAGGREGATION),
    "cache_salt": Refused(_NO_CACHE_KEYS, ("",)),
    "chat_template": Refused("templates are programs, which the operator sets with --chat-template"),
    "conversation_id": _LABELS,
    "custom_labels": _LABELS,
    "data_parallel_rank": Refused(_NO_PARALLEL, (0,)),
    "decode_tp_size": Refused(_NO_DISAGGREGATION),
    "disagg_prefill_dp_rank": Refused(_NO_DISAGGREGATION),
    "documents": Refused("put them into the messages", ([],)),
    "ec_transfer_params": Refused(_NO_DISAGGREGATION),
    "encoder_urls": Refused(_NO_MEDIA, ([],)),
    "external_trace_header": _LABELS,
    "extra_key": Refused(_NO_CACHE_KEYS, ("",)),
    "function_call": Refused("deprecated by OpenAI", ("none", "auto")),
    "functions": Refused("deprecated by OpenAI", ([],)),
    "http_worker_ipc": Refused(_PEER_INTERNAL),
    "image_data": Refused(_NO_MEDIA, ([],)),
    "image_max_dynamic_patch": Refused(_NO_MEDIA),
    "images_config": Refused(_NO_MEDIA, ({},)),
    "include_reasoning": Ignored("reasoning is part of the text here, as in vLLM without a reasoning parser"),
    "input_embeds": Refused("the prompt is text or token ids"),
    "kv_hints": _CACHE_HINT,
    "kv_transfer_params": Refused(_NO_DISAGGREGATION),
    "log_metrics": _LABELS,
    "logprob_token_ids": Refused("use allowed_token_ids, or top_logprobs", ([],)),
    "lora_id": Refused(_NO_LORA),
    "lora_path": Refused(_NO_LORA),
    "max_dynamic_patch": Refused(_NO_MEDIA),
    "media_io_kwargs": Refused(_NO_MEDIA, ({},)),
    "metadata": _LABELS,
    "min_dynamic_patch": Refused(_NO_MEDIA),
    "mm_content_hashes": Refused(_NO_MEDIA, ([],)),
    "mm_hashes": Refused(_NO_MEDIA, ([],)),
    "mm_payload": Refused(_NO_MEDIA, ("tensors",)),
    "mm_processor_kwargs": Refused(_NO_MEDIA, ({},)),
    "modalities": Refused(_NO_MEDIA, ([], ["text"])),
    "moderation": Refused("this server moderates nothing"),
    "multi_item_delimiter_indices": Refused("for SGLang's scoring requests, which this server does not have"),
    "need_wait_for_mm_inputs": Refused(_PEER_INTERNAL, (False,)),
    "no_logs": _LABELS,
    "num_items_assigned": Refused(_PEER_INTERNAL),
    "positional_embed_overrides": Refused("the prompt is text or token ids"),
    "prediction": Ignored("makes OpenAI's servers faster; predicted text never changes the output"),
    "priority": Ignored("changes when a request runs, not its answer; API keys get equal shares here"),
    "prompt_cache_key": _CACHE_HINT,
    "prompt_cache_options": _CACHE_HINT,
    "prompt_cache_retention": _CACHE_HINT,
    "prompt_embeds": Refused("the prompt is text or token ids"),
    "received_time": Refused(_PEER_INTERNAL),
    "repetition_detection": Refused("use no_repeat_ngram, a built-in processor"),
    "require_reasoning": Refused("constraints apply from the first token", (False,)),
    "return_bytes": Refused(_OTHER_FORMAT, (False,)),
    "return_cached_tokens_details": Refused("usage.prompt_tokens_details has them always", (False,)),
    "return_entropy": Refused(_NOT_RETURNED, (False,)),
    "return_flat_raw_output_top_logprobs": Refused(_OTHER_FORMAT, (False,)),
    "return_flat_raw_top_logprobs": Refused(_OTHER_FORMAT, (False,)),
    "return_flat_raw_top_logprobs_b64": Ignored("encodes return_flat_raw_top_logprobs, which is refused"),
    "return_hidden_states": Refused(_NOT_RETURNED, (False,)),
    "return_indexer_topk": Refused(_NOT_RETURNED, (False,)),
    "return_input_ids_in_sglext": Refused("use return_token_ids", (False,)),
    "return_meta_info": Refused("it is in the responses of /generate", (False,)),
    "return_mm_kwargs": Refused(_NO_MEDIA, (False,)),
    "return_output_ids_in_sglext": Refused("use return_token_ids", (False,)),
    "return_prompt_text": Refused("use echo of /v1/completions", (False,)),
    "return_prompt_token_ids": Refused("use return_token_ids of the OpenAI routes", (False,)),
    "return_routed_experts": Refused(_NOT_RETURNED, (False,)),
    "return_spec_tokens_details": Refused("see /metrics", (False,)),
    "return_token_offsets": Refused("text_offset of /v1/completions has them", (False,)),
    "return_tokens_as_token_ids": Refused("use return_token_ids", (False,)),
    "return_weight_versions": Refused("weights never change: meta_info of /generate names them", (False,)),
    "routed_dp_rank": Refused(_NO_PARALLEL, (0,)),
    "routed_experts_prompt_start": Ignored("belongs to return_routed_experts, which is refused"),
    "routed_experts_start_len": Ignored("belongs to return_routed_experts, which is refused"),
    "routing_key": _ROUTING,
    "safety_identifier": _BILLING,
    "separate_reasoning": Ignored("reasoning is part of the text here, as in SGLang without a reasoning parser"),
    "service_tier": _BILLING,
    "session_id": _ROUTING,
    "session_params": Refused(_NO_SESSIONS, ({},)),
    "store": Ignored("responses are never stored; it says whether OpenAI does"),
    "stream_reasoning": Ignored("reasoning is part of the text here, as in SGLang without a reasoning parser"),
    "suffix": Refused("no text is inserted between two others", ("",)),
    "task": Refused("for one model of SGLang's, DeepSeek-V4"),
    "thinking": Refused("set the chat template's own variable in chat_template_kwargs"),
    "token_indices_to_pool": Refused("a generating model pools nothing", ([],)),
    "truncate_prompt_tokens": Refused(_NO_TRUNCATION),
    "truncation_side": Refused(_NO_TRUNCATION),
    "use_audio_in_video": Refused(_NO_MEDIA, (False,)),
    "user": _BILLING,
    "video_config": Refused(_NO_MEDIA, ({},)),
    "video_max_dynamic_patch": Refused(_NO_MEDIA),
    "video_data": Refused(_NO_MEDIA, ([],)),
    "watermark": Refused(_NO_WATERMARK),
    "watermarking": Refused(_NO_WATERMARK, (False,)),
    "web_search_options": Refused("this server searches nothing"),
}
"""Fields of request bodies. Where a schema has a field of the same name, the schema's counts."""

CHAT_RULES: Mapping[str, FieldRule] = {
    **BODY_RULES,
    "add_special_tokens": Refused("the chat template adds them", (False,)),
    "echo": Refused("messages are not repeated in the response", (False,)),
    "input_ids": Refused("use /generate or /v1/completions"),
}
"""Fields of `/v1/chat/completions`."""

_NOT_STORED = "responses are not stored: send the whole conversation as input, its prefix is cached"
_NO_TOOLS = "use /v1/chat/completions, which has tools"

RESPONSES_RULES: Mapping[str, FieldRule] = {
    **BODY_RULES,
    "access_programs": Refused(_NO_TOOLS, ([],)),
    "background_options": Refused(_NOT_STORED),
    "context_management": Refused(_NO_TRUNCATION, ([],)),
    "conversation": Refused(_NOT_STORED),
    "enable_response_messages": Refused("use /tokenize, which renders a conversation", (False,)),
    "image": Refused(_NO_MEDIA),
    "max_tool_calls": Ignored("bounds the calls of tools, which are refused"),
    "parallel_tool_calls": Ignored("says how tools are called, which are refused"),
    "previous_input_messages": Refused(_NOT_STORED, ([],)),
    "previous_response_id": Refused(_NOT_STORED),
    "prompt": Refused("prompts are not stored: send the text"),
    "tool_choice": Refused(_NO_TOOLS, ("auto", "none")),
    "tools": Refused(_NO_TOOLS, ([],)),
    "truncation": Refused(_NO_TRUNCATION, ("disabled",)),
}
"""Fields of `/v1/responses`."""

RESPONSES_INPUT_RULES: Mapping[str, FieldRule] = {
    "id": Ignored("names a message of an earlier response"),
    "phase": Ignored("labels a message for OpenAI's models"),
    "status": Ignored("says how an earlier response ended"),
}
"""Fields of messages in `input`."""

REASONING_RULES: Mapping[str, FieldRule] = {
    "context": Refused("reasoning of earlier responses is not stored"),
    "generate_summary": Refused("reasoning is part of the text here"),
    "mode": Refused("only effort is supported", ("standard",)),
    "summary": Refused("reasoning is part of the text here"),
}
"""Fields of `reasoning`."""

TEXT_FORMAT_RULES: Mapping[str, FieldRule] = {
    "description": Ignored("describes the schema for OpenAI's models, which see it; others never do"),
    "strict": Ignored("constraints are always strict"),
}
"""Fields of `text.format`."""

TOKENIZE_RULES: Mapping[str, FieldRule] = {
    name: CHAT_RULES[name] for name in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
}
"""Fields of `/tokenize`."""

SAMPLING_PARAMS_RULES: Mapping[str, FieldRule] = {
    "beam_width": Refused("use num_beams", (1,)),
    "is_normalized": Refused(_PEER_INTERNAL, (False,)),
    "ebnf_full_assistant": Refused(_PEER_INTERNAL, (False,)),
    "stop_regex_max_len": Refused(_PEER_INTERNAL, (0,)),
    "stop_regex_strs": Refused(_PEER_INTERNAL, ([],)),
    "stop_str_max_len": Refused(_PEER_INTERNAL, (0,)),
    "stop_strs": Refused("SGLang's alias of stop: use stop", ([],)),
    "watermark": Refused(_NO_WATERMARK),
}
"""Fields of `sampling_params` of `/generate`."""

MESSAGE_RULES: Mapping[str, FieldRule] = {
    "annotations": Refused("the template has no use for them", ([],)),
    "audio": Refused(_NO_MEDIA),
    "function_call": Refused("deprecated by OpenAI"),
    "phase": Ignored("marks a message for OpenAI's own models"),
    "prefix": Refused("use continue_final_message", (False,)),
    "reasoning": Refused("put it into content, as the model wrote it", ("",)),
    "reasoning_content": Refused("put it into content, as the model wrote it", ("",)),
    "refusal": Refused("put it into content"),
    "tools": Refused("put them into the body", ([],)),
}
"""Fields of a message."""

TOOL_RULES: Mapping[str, FieldRule] = {
    "defer_loading": Ignored("advises OpenAI's models to search for tools; here the template shows all of them"),
}
"""Fields of a tool."""

FUNCTION_RULES: Mapping[str, FieldRule] = {**TOOL_RULES, "key_order": Refused(_PEER_INTERNAL, ([],))}
"""Fields of a tool's function."""

STREAM_OPTIONS_RULES: Mapping[str, FieldRule] = {
    "include_obfuscation": Ignored("pads events of OpenAI's servers, without changing their content"),
}
"""Fields of `stream_options`."""

JSON_SCHEMA_RULES: Mapping[str, FieldRule] = {
    "description": Ignored("describes the schema for OpenAI's models, which see it; others never do"),
    "strict": Ignored("constraints are always strict"),
}
"""Fields of `response_format.json_schema`."""

STRUCTURED_OUTPUTS_RULES: Mapping[str, FieldRule] = {
    "disable_additional_properties": Refused("set additionalProperties: false in the schema", (False,)),
}
"""Fields of `structured_outputs`."""
