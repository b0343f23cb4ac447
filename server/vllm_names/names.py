"""Table of vLLM's modules and names that can be imported here, and the objects they resolve to.

It has the names that batch processors import in vLLM's documentation and examples, on PyPI and on GitHub. Names that
could be imported but not used as in vLLM are omitted, so that the import fails at start.
"""

from __future__ import annotations

from collections.abc import Mapping

VLLM_VERSION = "0.32.0"
"""The release that is implemented; plugins use it to choose where to import from."""

_BATCH_PROCESSORS = "logitship.builtin_processors.batch_processors"
_OFFLINE = "logitship.server.offline"
_BATCH = "logitship.sampler.batch"
_CONTRACT = "logitship.sampler.batch_processors"
_VLLM_NAMES = "logitship.server.vllm_names"

_INTERFACE = {
    name: f"{_CONTRACT}.interface:{name}"
    for name in (
        "AddedRequest",
        "BatchUpdate",
        "LogitsProcessor",
        "MoveDirectionality",
        "MovedRequest",
        "RemovedRequest",
    )
}
_STATE = {
    "BatchUpdateBuilder": f"{_BATCH}.persistent_batch:BatchUpdateBuilder",
    "LogitsProcessors": f"{_CONTRACT}.logits_processors:LogitsProcessors",
}
_BUILTIN = {
    "LogitBiasLogitsProcessor": "logitship.builtin_processors.parameter_processors:LogitBiasLogitsProcessor",
    "MinPLogitsProcessor": "logitship.builtin_processors.parameter_processors:MinPLogitsProcessor",
    "MinTokensLogitsProcessor": "logitship.builtin_processors.parameter_processors:MinTokensLogitsProcessor",
    "process_dict_updates": f"{_CONTRACT}.logits_processors:process_dict_updates",
}
_LOGITS_PROCESSOR = {
    **{name: _INTERFACE[name] for name in ("BatchUpdate", "LogitsProcessor", "MoveDirectionality")},
    **_STATE,
    **_BUILTIN,
    "AdapterLogitsProcessor": f"{_CONTRACT}.adapter:AdapterLogitsProcessor",
    "RequestLogitsProcessor": f"{_CONTRACT}.adapter:RequestLogitsProcessor",
    "BUILTIN_LOGITS_PROCESSORS": f"{_BATCH_PROCESSORS}:BUILTIN_LOGITS_PROCESSORS",
    "LOGITSPROCS_GROUP": f"{_BATCH_PROCESSORS}:LOGITSPROCS_GROUP",
    "STR_POOLING_REJECTS_LOGITSPROCS": f"{_BATCH_PROCESSORS}:STR_POOLING_REJECTS_LOGITSPROCS",
    "STR_SPEC_DEC_REJECTS_LOGITSPROCS": f"{_BATCH_PROCESSORS}:STR_SPEC_DEC_REJECTS_LOGITSPROCS",
    "_load_logitsprocs_by_fqcns": f"{_VLLM_NAMES}.class_names:load_classes",
    "build_logitsprocs": f"{_BATCH_PROCESSORS}:build_logitsprocs",
}
_SLOT_MODULE = "vllm.v1.worker.gpu.sample.logits_processor"
_SLOT_INTERFACE = {
    "LogitsContext": f"{_CONTRACT}.slot_interface:LogitsContext",
    "LogitsProcRequestState": f"{_CONTRACT}.slot_interface:LogitsProcRequestState",
    "LogitsProcessor": f"{_CONTRACT}.slot_interface:SlotLogitsProcessor",
}
_CONFIGS = {
    name: f"{_CONTRACT}.vllm_config:{name}"
    for name in ("DeviceConfig", "ModelConfig", "ParallelConfig", "SchedulerConfig", "VllmConfig")
}
_SAMPLING_PARAMS = {"SamplingParams": f"{_OFFLINE}.sampling_params:SamplingParams"}
_BEAM_SEARCH = {"BeamSearchParams": f"{_OFFLINE}.llm_beam_search:BeamSearchParams"}
_STRUCTURED_OUTPUTS = {"StructuredOutputsParams": f"{_OFFLINE}.structured_outputs_params:StructuredOutputsParams"}
_OUTPUTS = {name: f"{_OFFLINE}.outputs:{name}" for name in ("CompletionOutput", "RequestOutput")}
_TOKENIZERS = {name: f"{_VLLM_NAMES}.tokenizers:{name}" for name in ("cached_tokenizer_from_config", "get_tokenizer")}
_PLATFORM_UTILS = {"is_pin_memory_available": f"{_VLLM_NAMES}.devices:is_pin_memory_available"}

NAMES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        **_OUTPUTS,
        **_SAMPLING_PARAMS,
        "LLM": f"{_OFFLINE}.llm:LLM",
        "__version__": f"{__name__}:VLLM_VERSION",
    },
    "vllm.config": _CONFIGS,
    "vllm.entrypoints": {},
    "vllm.entrypoints.cli": {},
    "vllm.entrypoints.cli.main": {"main": "logitship.server.cli:main"},
    "vllm.exceptions": {"VLLMValidationError": f"{_VLLM_NAMES}.exceptions:VLLMValidationError"},
    "vllm.logger": {"init_logger": f"{_VLLM_NAMES}.logger:init_logger"},
    "vllm.logits_process": {"LogitsProcessor": f"{_CONTRACT}.adapter:RequestLogitsProcessor"},
    "vllm.outputs": _OUTPUTS,
    "vllm.platforms": {"current_platform": f"{_VLLM_NAMES}.devices:current_platform"},
    "vllm.sampling_params": {**_SAMPLING_PARAMS, **_BEAM_SEARCH, **_STRUCTURED_OUTPUTS},
    "vllm.tokenizers": _TOKENIZERS,
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.tokenizer": _TOKENIZERS,  # their module until 0.11
    "vllm.utils": _PLATFORM_UTILS,
    "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": f"{_VLLM_NAMES}.devices:gpu_sync_allowed"},
    "vllm.utils.platform_utils": _PLATFORM_UTILS,
    "vllm.utils.torch_utils": {"async_tensor_h2d": f"{_VLLM_NAMES}.devices:async_tensor_h2d"},
    "vllm.v1": {},
    "vllm.v1.sample": {},
    "vllm.v1.sample.logits_processor": _LOGITS_PROCESSOR,
    "vllm.v1.sample.logits_processor.builtin": _BUILTIN,
    "vllm.v1.sample.logits_processor.interface": _INTERFACE,
    "vllm.v1.sample.logits_processor.state": _STATE,
    "vllm.v1.worker": {},
    "vllm.v1.worker.gpu": {},
    "vllm.v1.worker.gpu.sample": {},
    _SLOT_MODULE: _SLOT_INTERFACE,
    f"{_SLOT_MODULE}.interface": _SLOT_INTERFACE,
}
"""Module -> name -> our object, as `module:name`."""

HINTS: Mapping[str, str] = {
    f"{_SLOT_MODULE}.loader": "logitship loads batch processors of both of vLLM's interfaces by itself: name the class "
    "in logits_processors",
}
"""Hints for modules that are not in the table."""
