"""Prometheus metrics of the engine, its requests and its processors."""
