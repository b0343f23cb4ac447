"""The engine: continuous batching of requests on one thread."""
