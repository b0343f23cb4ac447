"""`/metrics`, in the Prometheus formats."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from logitship.server.metrics.observed_metrics import EngineMetrics
from logitship.server.requests.fair_pool import SCRAPES, FairPool
from logitship.server.schemas.documentation import operation

METRICS_PATH = "/metrics"


def metrics_router(metrics: EngineMetrics, pool: FairPool) -> APIRouter:
    """Create the route for `metrics`, which are encoded in `pool`."""
    router = APIRouter(tags=["Monitoring"])

    @router.get(METRICS_PATH, openapi_extra=operation(text="logitship_running_sequences 1.0\n"))
    async def read_metrics(request: Request) -> Response:
        """Metrics in the Prometheus text format, or in OpenMetrics if `Accept` asks for it."""
        accept = request.headers.get("accept", "")
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # `Accept` has an invalid version number
            encode, content_type = choose_encoder("")
        # Encoding hundreds of series takes milliseconds: do not block the event loop. Scrapes have a tenant of their
        # own, so that they never wait behind a full queue of requests.
        body = await pool.run(SCRAPES, encode, metrics.registry)
        return Response(body, headers={"Content-Type": content_type})

    return router
