"""Send a logits processor with your request to an LLM server.

Names in `__all__` come from `logitship.client`. `LLM`, `AsyncLLM`, `SamplingParams`, `BeamSearchParams`,
`StructuredOutputsParams`, `RequestOutput`, `CompletionOutput` and `enable_vllm_names` are imported from
`logitship.server` on first access, and `replay`, a module, from `logitship.client`.
"""

from typing import TYPE_CHECKING

from logitship.client import (
    APIStatusError,
    AsyncClient,
    AuthenticationError,
    BadRequestError,
    CheckReport,
    Client,
    CustomLogitProcessor,
    FinishReason,
    Generation,
    GenerationChunk,
    GenerationError,
    InstalledProcessor,
    InternalServerError,
    LogitshipError,
    Model,
    NotFoundError,
    PermissionDeniedError,
    ProcessorDetails,
    ProcessorError,
    ProcessorFault,
    ProcessorInfo,
    ProcessorLoadError,
    ProcessorSerializationError,
    Receipt,
    RegisteredProcessor,
    RequestTooLargeError,
    Row,
    RowProcessor,
    ServerBusyError,
    TokenLogprob,
    TokenTrace,
    Trace,
    TraceCandidate,
    TraceStage,
    TransportError,
    Usage,
    from_hugging_face,
)

__all__ = [
    "APIStatusError",
    "AsyncClient",
    "AuthenticationError",
    "BadRequestError",
    "CheckReport",
    "Client",
    "CustomLogitProcessor",
    "FinishReason",
    "Generation",
    "GenerationChunk",
    "GenerationError",
    "InstalledProcessor",
    "InternalServerError",
    "LogitshipError",
    "Model",
    "NotFoundError",
    "PermissionDeniedError",
    "ProcessorDetails",
    "ProcessorError",
    "ProcessorFault",
    "ProcessorInfo",
    "ProcessorLoadError",
    "ProcessorSerializationError",
    "Receipt",
    "RegisteredProcessor",
    "RequestTooLargeError",
    "Row",
    "RowProcessor",
    "ServerBusyError",
    "TokenLogprob",
    "TokenTrace",
    "Trace",
    "TraceCandidate",
    "TraceStage",
    "TransportError",
    "Usage",
    "__version__",
    "from_hugging_face",
]

if TYPE_CHECKING:
    from logitship.client import replay as replay
    from logitship.server.offline.async_llm import AsyncLLM as AsyncLLM
    from logitship.server.offline.llm import LLM as LLM
    from logitship.server.offline.llm_beam_search import BeamSearchParams as BeamSearchParams
    from logitship.server.offline.outputs import CompletionOutput as CompletionOutput
    from logitship.server.offline.outputs import RequestOutput as RequestOutput
    from logitship.server.offline.sampling_params import SamplingParams as SamplingParams
    from logitship.server.offline.structured_outputs_params import StructuredOutputsParams as StructuredOutputsParams
    from logitship.server.vllm_names import enable_vllm_names as enable_vllm_names

    __version__: str
else:
    # Not in `__all__`: they need torch, which neither `import *` nor a client-only installation may require.
    _SERVER_NAMES = {
        "AsyncLLM": "logitship.server.offline.async_llm",
        "BeamSearchParams": "logitship.server.offline.llm_beam_search",
        "CompletionOutput": "logitship.server.offline.outputs",
        "LLM": "logitship.server.offline.llm",
        "RequestOutput": "logitship.server.offline.outputs",
        "SamplingParams": "logitship.server.offline.sampling_params",
        "StructuredOutputsParams": "logitship.server.offline.structured_outputs_params",
        "enable_vllm_names": "logitship.server.vllm_names",
    }

    def __getattr__(name: str) -> object:
        # Only in the distribution's metadata, which is slow to read, and most programs never need it.
        if name == "__version__":
            from importlib.metadata import version

            return version("logitship")
        if name == "replay":
            from logitship.client import replay

            return replay
        if name in _SERVER_NAMES:
            return _import_from_server(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def _import_from_server(name: str) -> object:
        from importlib import import_module

        try:
            return getattr(import_module(_SERVER_NAMES[name]), name)
        except ModuleNotFoundError as error:
            raise ImportError(f'logitship.{name} needs the server: pip install "logitship[serve]" ({error})') from error

    def __dir__() -> list[str]:
        return sorted({*globals(), *_SERVER_NAMES, "replay"})
