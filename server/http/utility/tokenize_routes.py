"""`/tokenize` and `/detokenize`, as in SGLang and vLLM."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.admission import check_model_name
from logitship.server.http.openai.chat_prompt import render_chat, used_options
from logitship.server.http.openai.tool_use import check_template_shows_tools
from logitship.server.http.receiving import received
from logitship.server.refusals import BadRequest
from logitship.server.requests.request_validation import check_text_length
from logitship.server.schemas.documentation import operation
from logitship.server.schemas.tokenize_schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from logitship.server.uploads.refusal_responses import JSONResponse
from logitship.server.uploads.request_bodies import ReceivedBody

_TOKENIZE = operation(
    body=TokenizeRequest, body_example={"prompt": "The capital of France is"}, response=TokenizeResponse
)
_DETOKENIZE = operation(body=DetokenizeRequest, body_example={"tokens": [504, 3575]}, response=DetokenizeResponse)


def tokenize_router(engine: AsyncEngine) -> APIRouter:
    """Create the routes for `engine`."""
    router = APIRouter(tags=["Tokens"])

    @router.post("/tokenize", openapi_extra=_TOKENIZE)
    @router.post("/v1/tokenize", include_in_schema=False)
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text, of several, or of a conversation."""
        async with received(request, engine, TokenizeRequest) as body:
            check_model_name(engine, body.value.model)
            return JSONResponse(await _tokenize(engine, body))

    @router.post("/detokenize", openapi_extra=_DETOKENIZE)
    @router.post("/v1/detokenize", include_in_schema=False)
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        async with received(request, engine, DetokenizeRequest) as body:
            check_model_name(engine, body.value.model)
            return JSONResponse(await body.work.run_if_large(_detokenize, engine, body.value))

    return router


async def _tokenize(engine: AsyncEngine, received_body: ReceivedBody[TokenizeRequest]) -> TokenizeResponse:
    body, work = received_body.value, received_body.work
    tokens: Any
    if body.messages is not None:
        check_template_shows_tools(engine, body)
        options = used_options(engine, body.template_options, received_body.ignored)
        tokens = await render_chat(
            engine,
            work,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.template_tools,
            variables=options | body.chat_template_kwargs,
        )
    elif isinstance(body.prompt, list):
        for index, text in enumerate(body.prompt):
            check_text_length(engine.tokenizer, engine.model.max_model_len, len(text), f"prompt[{index}]")
        tokens = await work.run(_encode_all, engine, body.prompt, body.add_special_tokens)
    else:
        assert body.prompt is not None
        check_text_length(engine.tokenizer, engine.model.max_model_len, len(body.prompt), "prompt")
        [tokens] = await work.run(_encode_all, engine, [body.prompt], body.add_special_tokens)
    response: TokenizeResponse = {
        "tokens": tokens,
        "count": [len(each) for each in tokens] if isinstance(body.prompt, list) else len(tokens),
        "max_model_len": engine.model.max_model_len,
    }
    if body.return_token_strs:
        response["token_strs"] = await work.run_if_large(_token_strs, engine, tokens)
    return response


def _encode_all(engine: AsyncEngine, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    return [engine.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]


def _token_strs(engine: AsyncEngine, tokens: Any) -> Any:
    if _are_lists(tokens):
        return [_token_strs(engine, each) for each in tokens]
    return [engine.tokenizer.token(token_id) for token_id in tokens]


def _detokenize(engine: AsyncEngine, body: DetokenizeRequest) -> DetokenizeResponse:
    tokens: Any = body.tokens
    if not _are_lists(tokens):
        return {
            "text": _decode(engine, tokens, "tokens", skip_special_tokens=body.skip_special_tokens),
            "prompt": _decode(engine, tokens, "tokens", skip_special_tokens=False),
        }
    return {
        "text": [
            _decode(engine, each, f"tokens[{index}]", skip_special_tokens=body.skip_special_tokens)
            for index, each in enumerate(tokens)
        ],
        "prompt": [
            _decode(engine, each, f"tokens[{index}]", skip_special_tokens=False) for index, each in enumerate(tokens)
        ],
    }


def _decode(engine: AsyncEngine, tokens: list[int], at: str, *, skip_special_tokens: bool) -> str:
    vocab_size = engine.model.vocab_size
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise BadRequest(f"{at}: the token id {outside} is not from 0 to {vocab_size - 1}", param=at)
    return engine.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


def _are_lists(tokens: Any) -> bool:
    return bool(tokens) and isinstance(tokens[0], list)
