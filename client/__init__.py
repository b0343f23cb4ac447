"""What the author of a processor imports. Importing it loads neither torch nor dill."""

from .async_client import AsyncClient
from .client import Client
from .errors import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    GenerationError,
    InternalServerError,
    LogitshipError,
    NotFoundError,
    PermissionDeniedError,
    ProcessorError,
    ProcessorFault,
    ProcessorLoadError,
    ProcessorSerializationError,
    RequestTooLargeError,
    ServerBusyError,
    TransportError,
)
from .processor import CustomLogitProcessor
from .processor_string import InstalledProcessor, RegisteredProcessor
from .records import FinishReason, Generation, GenerationChunk, InstalledInfo, Model, Receipt, TokenLogprob, Usage

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
    "InstalledInfo",
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
]
