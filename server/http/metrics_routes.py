"""`/metrics`, in the Prometheus formats."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from logitship.server.metrics.observed_metrics import EngineMetrics

from .documentation import operation

METRICS_PATH = "/metrics"


def metrics_router(metrics: EngineMetrics) -> APIRouter:
    """Create the route for `metrics`."""
    router = APIRouter(tags=["Monitoring"])

    @router.get(METRICS_PATH, openapi_extra=operation(text="logitship_running_sequences 1.0\n"))
    async def read_metrics(request: Request) -> Response:
        """Metrics in the Prometheus text format, or in OpenMetrics if `Accept` asks for it."""
        accept = request.headers.get("accept", "")
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # `Accept` has an invalid version number
            encode, content_type = choose_encoder("")
        # Encoding hundreds of series takes milliseconds: do not block the event loop.
        body = await asyncio.to_thread(encode, metrics.registry)
        return Response(body, headers={"Content-Type": content_type})

    return router
