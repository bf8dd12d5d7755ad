"""The routes of an application for tenants, and the bodies of requests to them."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute

from worlds.parts.tenant_world import TenantRun
from worlds.parts.upload_world import FACTS, item

ROLLOUTS, SESSIONS, KEYS = "/api/v1/rollouts", "/api/v1/sessions", "/api/v1/keys"
UPLOADS, FEED = "/api/v1/trajectories", "/api/v1/feed"
VERSIONS = [{"version": 3, "start": 2, "end": 6}]
HELLO = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
# The body for each route that takes one; a walk over the routes fails if one is missing.
BODIES: dict[str, dict[str, Any]] = {
    ROLLOUTS: {"environment": "guessing", "tasks": [{"id": "ID", "seed": 1}]},
    f"{ROLLOUTS}/{{rollout_id}}/cancel": {},
    SESSIONS: {"id": "ID"},
    f"{SESSIONS}/{{group}}/close": {},
    f"{SESSIONS}/{{name}}/finish": {"reward": 1.0},
    f"{SESSIONS}/{{name}}/reward": {"reward": 1.0},
    "/v1/chat/completions": HELLO,
    "/v1/messages": {**HELLO, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": HELLO["messages"]},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/{rest:path}": {},
    "/v1/responses": {"model": "any", "input": "hi"},
    "/api/v1/stop": {},
    KEYS: {"name": "mine", "tenant": "mine"},
    "/api/v1/control/{part}/pause": {"reason": ""},
    "/api/v1/control/{part}/resume": {},
    "/api/v1/checkpoints": {},
    "/api/v1/checkpoints/{checkpoint}/return": {},
    "/api/v1/evaluations": {},
    UPLOADS: {
        "tokenizer_fingerprint": FACTS.tokenizer_fingerprint,
        "trajectories": [item("ID", group="ID", sample={"versions": VERSIONS})],
    },
    "/api/v1/generate": {"token_ids": [1, 2]},
}


async def made_by(client: httpx.AsyncClient, run: TenantRun) -> dict[str, Any]:
    """Admit a task and a group of sessions, and upload a trajectory of an incomplete group.

    Returns: the answer with the sessions.
    """
    tasks = {"environment": "guessing", "tasks": [{"id": "owners-task", "seed": 1}]}
    assert (await client.post(ROLLOUTS, json=tasks)).status_code == 202
    created = await client.post(SESSIONS, json={"id": "owners-group"})
    assert created.status_code == 201, created.text
    await run.port.admit()
    text = json.dumps(BODIES[UPLOADS]).replace("ID", "owners-upload")
    uploaded = await client.post(UPLOADS, json=json.loads(text))
    assert uploaded.json()["accepted"] == ["owners-upload"], uploaded.text
    answer: dict[str, Any] = created.json()
    return answer


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def walked(app: FastAPI) -> list[tuple[str, str]]:
    """Return every method and path of the application."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return sorted({(method, route.path) for route in routes for method in route.methods})


def with_ids(path: str, *, task: str, group: str, session: str, upload: str = "u") -> str:
    """Return a route's path with the given ids in place of its parameters."""
    by_name = {"rollout_id": task, "group": group, "name": session}
    if path.startswith(UPLOADS):
        by_name = {"group": upload, "name": upload}
    by_name |= {"part": "training", "checkpoint": "step-000001-t1", "operation": "op-1"}
    by_name["environment_id"] = "guessing"
    return re.sub(r"\{(\w+)\}", lambda found: by_name[found[1]], path)
