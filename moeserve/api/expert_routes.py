"""The routes under ``/experts``: where experts are, what they are used for, and who moves them.

What is posted goes to rank 0 as it came, as JSON; rank 0 checks it and answers, or says what is
wrong. Moving takes longer than an answer: it comes with the id of an entry in the history.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request

from moeserve.api.engine_client import EngineClient
from moeserve.api.experts import expert_load, expert_placement
from moeserve.api.json_response import Json
from moeserve.api.parse import decode_object

Action = Literal["rebalance", "place", "rollback", "freeze", "unfreeze", "pin", "unpin", "cancel"]

_BODIES: dict[Action, dict[str, Any]] = {
    "rebalance": {"planner": {"type": "string"}, "dry_run": {"type": "boolean"}},
    "place": {"num_experts": {"type": "integer"}, "layers": {"type": "object"}},
    "rollback": {"id": {"type": "integer"}},
    "freeze": {},
    "unfreeze": {},
    "pin": {"layer": {"type": "integer"}, "expert": {"type": "integer"}},
    "unpin": {"layer": {"type": "integer"}, "expert": {"type": "integer"}},
    "cancel": {},
}
_REQUIRED: dict[Action, list[str]] = {
    "place": ["num_experts", "layers"],
    "pin": ["layer", "expert"],
    "unpin": ["layer", "expert"],
}


def add_expert_routes(app: FastAPI, client: EngineClient) -> None:
    """Adds them all."""

    @app.get("/experts/placement")
    async def placement() -> Json:
        return Json(await expert_placement(client))

    @app.get("/experts/load")
    async def load() -> Json:
        return Json(await expert_load(client))

    @app.get("/experts/history")
    async def history() -> Json:
        return Json((await client.query("history", [0]))[0])

    for action in _BODIES:
        _add_action(app, client, action)


def _add_action(app: FastAPI, client: EngineClient, action: Action) -> None:
    async def act(request: Request) -> Json:
        body = await request.body()
        if body:
            decode_object(body, request.headers.get("content-type", ""))
        return Json(await client.command(action, body or b"{}"))

    schema = {"type": "object", "properties": _BODIES[action], "additionalProperties": False}
    schema["required"] = _REQUIRED.get(action, [])
    described = {
        "requestBody": {
            "required": action in _REQUIRED,
            "content": {"application/json": {"schema": schema}},
        }
    }
    app.post(f"/experts/{action}", name=action, openapi_extra=described)(act)
