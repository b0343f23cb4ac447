"""`/v1/artifacts`: upload, list and delete the bytes of tensors and arrays that shipped classes refer to."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.routing import APIRoute

from logitship.server.processors.artifact_store import StoredArtifact
from logitship.server.refusals import BadRequest
from logitship.server.schemas.artifact_schemas import ArtifactList, ArtifactObject, DeletedArtifact
from logitship.server.schemas.documentation import BINARY, operation

from .refusal_responses import JSONResponse
from .request_bodies import received_artifact
from .upload_engine import UploadEngine, caller_of, check_key_may_ship

Digest = Annotated[str, Path(description="`sha256:` and the SHA-256 of the bytes.", examples=["sha256:9f86d081884c…"])]


def artifact_router(engine: UploadEngine, route_class: type[APIRoute] = APIRoute) -> APIRouter:
    """Create the routes for `engine`, of a class that may handle their errors."""
    router = APIRouter(prefix="/v1/artifacts", tags=["Processors"], route_class=route_class)

    @router.get("", openapi_extra=operation(response=ArtifactList))
    async def artifacts(request: Request) -> Response:
        """List the artifacts that were uploaded with this API key."""
        found = engine.processors.list_artifacts(caller_of(request).tenant)
        body: ArtifactList = {"object": "list", "data": [_artifact_object(each) for each in found]}
        return JSONResponse(body)

    @router.post(
        "", openapi_extra=operation(body=BINARY, body_type="application/octet-stream", response=ArtifactObject)
    )
    async def upload(request: Request) -> Response:
        """Upload an artifact: the body is its bytes. Processor strings then refer to it by its digest.

        Uploading the same bytes again is a no-op.
        """
        caller = caller_of(request)
        if engine.shipping_is_off is not None:
            raise BadRequest(engine.shipping_is_off)
        check_key_may_ship(caller)
        async with received_artifact(request, engine) as body:
            if not body.value:
                raise BadRequest("the request body is empty: send the artifact's bytes")
            return JSONResponse(_artifact_object(await engine.processors.add_artifact(body.value, caller.tenant)))

    @router.get("/{digest}", openapi_extra=operation(response=ArtifactObject))
    async def artifact(request: Request, digest: Digest) -> Response:
        """Show an artifact that was uploaded with this API key, without its bytes."""
        return JSONResponse(_artifact_object(engine.processors.artifact(digest, caller_of(request).tenant)))

    @router.delete("/{digest}", openapi_extra=operation(response=DeletedArtifact))
    async def delete(request: Request, digest: Digest) -> Response:
        """Delete an artifact that was uploaded with this API key. Loaded processors keep it."""
        engine.processors.delete_artifact(digest, caller_of(request).tenant)
        deleted: DeletedArtifact = {"digest": digest, "object": "artifact", "deleted": True}
        return JSONResponse(deleted)

    return router


def _artifact_object(artifact: StoredArtifact) -> ArtifactObject:
    return {
        "object": "artifact",
        "digest": artifact.digest,
        "size": artifact.size,
        "created": artifact.created,
    }
