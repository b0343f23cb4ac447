"""API for authors of processors and users of a server. Importing it loads neither torch nor dill."""

from logitship.client.serialization.processor_string import InstalledProcessor, RegisteredProcessor

from .async_client import AsyncClient
from .check_report import CheckReport
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
from .hugging_face import from_hugging_face
from .processor import CustomLogitProcessor
from .processor_info import ProcessorDetails, ProcessorInfo
from .records import (
    FinishReason,
    Generation,
    GenerationChunk,
    Model,
    Receipt,
    TokenLogprob,
    TokenTrace,
    Trace,
    TraceCandidate,
    TraceStage,
    Usage,
)
from .row_processor import Row, RowProcessor

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
    "from_hugging_face",
]
