"""What `helm test` runs, in the image of the pods: does the release do what was asked of it?

Told by RELEASE_CHECK, as JSON: addresses, what to submit, and what ought to run. Each check prints
a line; the exit code is 1 where one failed. Standard library alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any

REQUEST_LIMIT_S = 30
SET_TASK = "set test.task to a task that this environment plays, such as {data: {...}}"
# Outcomes of rollouts in which nothing was played.
ERRORS = {"agent_error", "environment_error", "infrastructure_error", "reward_error", "cancelled"}
POLL_S = 2


class Failed(Exception):
    """The text is the reason."""


def call(
    method: str,
    url: str,
    *,
    token: str | None = None,
    body: Any = None,
    limit_s: float = REQUEST_LIMIT_S,
) -> tuple[int, str]:
    """The status and the text of the answer. Raises: Failed where nobody answers."""
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        raise Failed(f"{url} does not answer: {error}") from error


def read(
    method: str,
    url: str,
    *,
    token: str | None = None,
    body: Any = None,
    limit_s: float = REQUEST_LIMIT_S,
) -> Any:
    """The answer's JSON. Raises: Failed for any status but a good one."""
    status, text = call(method, url, token=token, body=body, limit_s=limit_s)
    if status >= 400:
        raise Failed(f"{method} {url}: status {status}: {text[:300]}")
    return json.loads(text)


def check_health(told: dict[str, Any]) -> None:
    """The API answers, is ready, and asks for a key."""
    api = told["api"]
    deadline = time.monotonic() + told["limit_s"]
    while True:
        status, text = call("GET", f"{api}/readyz")
        if status == 200:
            break
        if time.monotonic() > deadline:
            raise Failed(f"/readyz is {status} after {told['limit_s']} s: {text[:300]}")
        time.sleep(POLL_S)
    status, _ = call("GET", f"{api}/api/v1/rollouts/nobody")
    if status != 401:
        raise Failed(f"a request without a key is answered with {status}, expected 401")


def check_rollout(told: dict[str, Any]) -> None:
    """Play one task, and take it back, so that nothing is trained on it."""
    api, key = told["api"], os.environ["RAYLOOM_API_KEY"]
    task = {**told["task"], "id": f"helm-test-{time.time_ns()}"}
    environment = told["environment"]
    if "data" not in task:
        played = read("GET", f"{api}/api/v1/environments/{environment}", token=key)
        task["data"] = smallest(played["data_schema"], played["data_schema"])
    body = {"environment": environment, "tasks": [task], "num_samples": told["samples"]}
    status, text = call("POST", f"{api}/api/v1/rollouts", token=key, body=body)
    if status >= 400:
        raise Failed(f"the task is refused: status {status}: {text[:300]}; {SET_TASK}")
    address = f"{api}/api/v1/rollouts/{task['id']}"
    try:
        view = polled(address, lambda v: bool(v["outcomes"]), told, waits_for="a rollout's end")
    finally:
        cancel(address)
    if set(view["outcomes"]) <= ERRORS:
        raise Failed(f"its rollouts ended as {', '.join(sorted(view['outcomes']))}; {SET_TASK}")


def check_session(told: dict[str, Any]) -> None:
    """Sample one turn of a session, and take its group back, so that nothing is trained on it."""
    api, key = told["api"], os.environ["RAYLOOM_API_KEY"]
    group = f"helm-test-{time.time_ns()}"
    task = told["task"].get("data", {})
    body = {"id": group, "num_sessions": told["samples"], "task": task}
    session = read("POST", f"{api}/api/v1/sessions", token=key, body=body)["sessions"][0]
    address = f"{api}/api/v1/rollouts/{group}"
    try:
        polled(
            f"{api}/api/v1/sessions/{session['id']}",
            lambda view: view["status"] != "queued",
            told,
            waits_for="a session that is open",
        )
        turn = {"model": "helm-test", "messages": [{"role": "user", "content": "Hello."}]}
        chat = f"{api}/sessions/{session['id']}/v1/chat/completions"
        answer = read("POST", chat, token=session["agent_key"], body=turn, limit_s=told["limit_s"])
        if not answer.get("choices"):
            raise Failed(f"a turn was answered without a choice: {answer}")
    finally:
        cancel(address)


def polled(
    address: str, is_done: Callable[[Any], bool], told: dict[str, Any], *, waits_for: str
) -> Any:
    """Return the view at the address once it is done. Raises: Failed at the time limit."""
    deadline = time.monotonic() + told["limit_s"]
    while True:
        view = read("GET", address, token=os.environ["RAYLOOM_API_KEY"])
        if is_done(view):
            return view
        if time.monotonic() > deadline:
            raise Failed(f"waited {told['limit_s']} s for {waits_for}: {view}")
        time.sleep(POLL_S)


def cancel(address: str) -> None:
    """Take a task or a group of sessions back. Raises: Failed."""
    status, text = call("POST", f"{address}/cancel", token=os.environ["RAYLOOM_API_KEY"])
    # 409: a step has taken it already.
    if status not in (200, 202, 204, 409):
        raise Failed(f"it cannot be taken back: status {status}: {text[:300]}")


def smallest(schema: Any, root: dict[str, Any]) -> Any:
    """Return a small value that the schema describes; a task may need data, and none is given.

    The environment may still refuse it: then test.task has to name a task.
    """
    schema = schema if isinstance(schema, dict) else {}
    if "$ref" in schema:
        found: Any = root
        for name in filter(None, schema["$ref"].removeprefix("#").split("/")):
            found = found[name]
        return smallest(found, root)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        for first in schema.get(key, ()):
            return first
    for key in ("anyOf", "oneOf", "allOf"):
        for first in schema.get(key, ()):
            return smallest(first, root)
    return _of_kind(schema, root)


def _of_kind(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: smallest(properties.get(name), root) for name in schema.get("required", ())}
    if kind == "array":
        return [smallest(schema.get("items"), root)] * schema.get("minItems", 0)
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    return {"boolean": False, "null": None}.get(kind, "1" * max(1, schema.get("minLength", 1)))


def check_metrics(told: dict[str, Any]) -> None:
    """The run's metrics are there."""
    status, text = call("GET", told["metrics"])
    if status != 200 or "rayloom_" not in text:
        raise Failed(f"{told['metrics']}: status {status}, no series rayloom_*: {text[:300]}")


def check_pods(told: dict[str, Any]) -> None:
    """As many nodes of Ray as there are to be pods, and each of the template that is stored."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    answer = read("GET", f"{told['dashboard']}/api/v0/nodes?limit=10000", token=token)
    nodes = [node for node in answer["data"]["result"]["result"] if node["state"] == "ALIVE"]
    found = Counter((node.get("labels") or {}).get("rayloom/template", "none") for node in nodes)
    names = {told["templates"][name]: name for name in told["templates"]}
    wrong = [
        f"{count} of the template {names.get(template, template)}, {told['pods'].get(template, 0)} "
        "to be"
        for template, count in sorted(found.items())
        if told["pods"].get(template, 0) != count
    ]
    wrong += [
        f"none of the template {names[template]}, {count} to be"
        for template, count in sorted(told["pods"].items())
        if count and template not in found
    ]
    if wrong:
        raise Failed(
            f"what runs is not what is stored: {'; '.join(wrong)}; wait for pods that are to come, "
            "and where pods are of an older template suspend and resume"
        )


def check_serve(told: dict[str, Any]) -> None:
    """Serve runs the arguments that are stored."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    answer = read("GET", f"{told['dashboard']}/api/serve/applications/", token=token)
    application = answer["applications"].get("rayloom")
    if application is None:
        raise Failed("Serve has no application rayloom")
    running = (application.get("deployed_app_config") or {}).get("args")
    if application["status"] != "RUNNING" or running != told["arguments"]:
        same = "the same" if running == told["arguments"] else "other"
        raise Failed(
            f"the application is {application['status']} with {same} arguments as stored: "
            f"{application.get('message', '')[:300]}"
        )


CHECKS = {
    "health": check_health,
    "rollout": check_rollout,
    "session": check_session,
    "metrics": check_metrics,
    "pods": check_pods,
    "serve": check_serve,
}


def main() -> int:
    told = json.loads(os.environ["RELEASE_CHECK"])
    is_wrong = False
    for name in told["checks"]:
        try:
            CHECKS[name](told)
        except Failed as reason:
            is_wrong = True
            print(f"FAILED {name}: {reason}", flush=True)
        else:
            print(f"ok {name}", flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
