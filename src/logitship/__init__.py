"""Send a logits processor with your request to an LLM server.

Everything here comes from `logitship.client`; the other three folders are imported by their own names.
"""

from typing import TYPE_CHECKING

from logitship.client import (
    APIStatusError,
    AsyncClient,
    AuthenticationError,
    BadRequestError,
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
    ProcessorError,
    ProcessorFault,
    ProcessorLoadError,
    ProcessorSerializationError,
    Receipt,
    RegisteredProcessor,
    RequestTooLargeError,
    ServerBusyError,
    TokenLogprob,
    TransportError,
    Usage,
)

__all__ = [
    "APIStatusError",
    "AsyncClient",
    "AuthenticationError",
    "BadRequestError",
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
    "ProcessorError",
    "ProcessorFault",
    "ProcessorLoadError",
    "ProcessorSerializationError",
    "Receipt",
    "RegisteredProcessor",
    "RequestTooLargeError",
    "ServerBusyError",
    "TokenLogprob",
    "TransportError",
    "Usage",
    "__version__",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        # The version stands in the distribution's metadata alone, and most programs never ask for it.
        if name == "__version__":
            from importlib.metadata import version

            return version("logitship")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
