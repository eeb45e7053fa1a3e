"""The routes, as a FastAPI application."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from moeserve.api.convert import check_token_ids, read_messages
from moeserve.api.encoder import check_model
from moeserve.api.engine_client import ClientGone
from moeserve.api.errors import ApiError
from moeserve.api.expert_routes import add_expert_routes
from moeserve.api.guard import Guard
from moeserve.api.json_response import Json
from moeserve.api.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from moeserve.api.parse import parse
from moeserve.api.service import Service
from moeserve.api.stream import DisconnectWatch, EventStream
from moeserve.config import ServerConfig
from moeserve.metrics import CONTENT_TYPE

# Parts of OpenAI's API that a client may try: a clear answer instead of a bare 404.
_ELSEWHERE = (
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/audio/transcriptions",
    "/v1/images/generations",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
)
R = TypeVar("R", bound=BaseModel)
_MODELS = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def build_app(service: Service, server: ServerConfig) -> ASGIApp:
    """The whole application: guard outside, routes inside."""
    app = FastAPI(title="moeserve", version=version(), docs_url=None, redoc_url=None)
    _add_generation_routes(app, service)
    _add_text_routes(app, service)
    _add_model_routes(app, service)
    add_expert_routes(app, service.client)
    _add_state_routes(app, service)
    _add_error_handlers(app)
    _describe(app)
    guard: ASGIApp = Guard(
        app,
        api_key=server.api_key,
        admin_key=server.admin_key,
        max_body_bytes=server.max_body_bytes,
        metrics=service.metrics,
    )
    if server.allowed_origins is None:
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=[origin.strip() for origin in server.allowed_origins.split(",")],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
    )


def version() -> str:
    """The installed version of this package; "unknown" in a bare checkout."""
    try:
        return importlib.metadata.version("moeserve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's description of a body that a route parses itself."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _read(model: type[R], request: Request) -> R:
    return parse(model, await request.body(), request.headers.get("content-type", ""))


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    async def answer(
        request: Request, work: Callable[[DisconnectWatch], Awaitable[EventStream | bytes]]
    ) -> Response:
        watch = DisconnectWatch(request.receive)
        try:
            result = await work(watch)
        except ClientGone:
            return Response(status_code=499)  # nobody reads it; it marks the metrics
        except BaseException:
            watch.stop()
            raise
        if isinstance(result, EventStream):
            return result  # which stops the watch at its end
        watch.stop()
        return Json(result)

    @app.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        asked = await _read(CompletionRequest, request)
        return await answer(request, lambda watch: service.completion(asked, watch))

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        asked = await _read(ChatRequest, request)
        return await answer(request, lambda watch: service.chat(asked, watch))


def _add_text_routes(app: FastAPI, service: Service) -> None:
    client, encoder = service.client, service.encoder

    @app.post("/tokenize", openapi_extra=_body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        asked = await _read(TokenizeRequest, request)
        client.check_serving()
        check_model(asked.model, service.model_name)
        max_model_len = client.info.max_model_len
        if asked.messages is not None:
            continues = bool(asked.continue_final_message)
            _, tokens = await encoder.encode_chat(
                read_messages(asked.messages, max_model_len),
                max_model_len,
                add_generation_prompt=asked.add_generation_prompt is not False and not continues,
                continue_final_message=continues,
                add_special_tokens=bool(asked.add_special_tokens),
                variables=asked.chat_template_kwargs,
            )
        elif asked.prompt is not None:
            add = asked.add_special_tokens is not False
            tokens = await encoder.encode(asked.prompt, max_model_len, add_special_tokens=add)
        else:
            raise ApiError(400, "prompt: needs a prompt or messages", param="prompt")
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": max_model_len,
            "tokens": tokens,
        }
        if asked.return_token_strs and encoder.tokenizer is not None:
            answer["token_strs"] = [encoder.tokenizer.token_text(token) for token in tokens]
        return Json(answer)

    @app.post("/detokenize", openapi_extra=_body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        asked = await _read(DetokenizeRequest, request)
        client.check_serving()
        check_model(asked.model, service.model_name)
        if encoder.tokenizer is None:
            raise ApiError(400, "the server runs without a tokenizer")
        tokens = check_token_ids("tokens", asked.tokens, client.info.vocab_size)
        if len(tokens) > client.info.max_model_len:
            text = f"tokens: {len(tokens)} are more than the context of {client.info.max_model_len}"
            raise ApiError(400, text, param="tokens")
        return Json({"prompt": encoder.tokenizer.decode(tokens, skip_special_tokens=False)})


def _add_model_routes(app: FastAPI, service: Service) -> None:
    client = service.client

    def card() -> dict[str, Any]:
        client.check_serving()
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "moeserve",
            "root": service.model_root,
            "parent": None,
            "max_model_len": client.info.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        check_model(model_id, service.model_name)
        return Json(card())


def _add_state_routes(app: FastAPI, service: Service) -> None:
    client, metrics = service.client, service.metrics

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health() -> Response:
        state = client.state
        return Json({"status": state}, 503 if state in ("dead", "stalled") else 200)

    @app.get("/ready")
    @app.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        state = client.state
        return Json({"status": state}, 200 if state == "ready" else 503)

    @app.get("/ping")
    @app.head("/ping", include_in_schema=False)
    @app.post("/ping", include_in_schema=False)
    async def ping() -> Response:
        return Json({})

    @app.get("/version")
    async def show_version() -> Response:
        return Json({"version": version()})

    @app.get("/metrics")
    @app.head("/metrics", include_in_schema=False)
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    async def elsewhere(request: Request) -> Response:
        # 404, no 5xx: clients take those for a passing fault and try again.
        raise ApiError(404, f"{request.url.path} is not implemented here")

    for path in _ELSEWHERE:
        app.add_route(path, elsewhere, methods=["GET", "POST"], include_in_schema=False)


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        response = Json(error.body, error.status)
        response.raw_headers += error.headers[1:]
        return response

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = {
            404: "there is no such route",
            405: f"the method {request.method[:20]} is not allowed here",
        }
        message = text.get(error.status_code, "the request can not be served")
        response = Json(ApiError(error.status_code, message).body, error.status_code)
        if error.headers and "Allow" in error.headers:
            response.headers["allow"] = error.headers["Allow"]
        return response

    async def our_fault(request: Request, error: Exception) -> Response:
        return Json(ApiError(500, "an internal error; see the server's log").body, 500)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, our_fault)


def _describe(app: FastAPI) -> None:
    """Adds the request bodies to the OpenAPI document; FastAPI does not know them."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        document = generated()
        _, schemas = models_json_schema(
            [(model, "validation") for model in _MODELS],
            ref_template="#/components/schemas/{model}",
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
