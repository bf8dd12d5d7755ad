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
from typing import Any

REQUEST_LIMIT_S = 30
POLL_S = 2


class Failed(Exception):
    """The text is the reason."""


def call(method: str, url: str, *, token: str | None = None, body: Any = None) -> tuple[int, str]:
    """The status and the text of the answer. Raises: Failed where nobody answers."""
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        raise Failed(f"{url} does not answer: {error}") from error


def read(method: str, url: str, *, token: str | None = None, body: Any = None) -> Any:
    """The answer's JSON. Raises: Failed for any status but a good one."""
    status, text = call(method, url, token=token, body=body)
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
    """A task of one rollout is played; then it is taken back, so that nothing is trained on it."""
    api, key = told["api"], os.environ["RAYLOOM_API_KEY"]
    task = {**told["task"], "id": f"helm-test-{time.time_ns()}"}
    body = {"environment": told["environment"], "tasks": [task], "num_samples": 1}
    read("POST", f"{api}/api/v1/rollouts", token=key, body=body)
    address = f"{api}/api/v1/rollouts/{task['id']}"
    deadline = time.monotonic() + told["limit_s"]
    while True:
        view = read("GET", address, token=key)
        if view["outcomes"]:
            break
        if time.monotonic() > deadline:
            raise Failed(f"no rollout has ended after {told['limit_s']} s: {view}")
        time.sleep(POLL_S)
    status, text = call("POST", f"{address}/cancel", token=key)
    # 409: a step has taken it already.
    if status not in (200, 202, 204, 409):
        raise Failed(f"it cannot be taken back: status {status}: {text[:300]}")


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
