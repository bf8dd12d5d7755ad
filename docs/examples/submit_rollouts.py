"""Submit tasks to a running `rayloom serve` and watch the reward of each policy version.

Standard library only. Try it in a second terminal:

    $ rayloom serve deploy/configs/guessing-cpu.yaml
    $ python docs/examples/submit_rollouts.py --tasks 320

Every request may be repeated: a task that the service knows already is not played again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

OVER = {"trained", "evicted", "cancelled"}


class Client:
    """The API at one address. Waits and asks again where the service says that this helps."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def wait_until_ready(self) -> None:
        """Wait for /readyz to say so; print what it waits for."""
        told = ""
        while True:
            try:
                with urllib.request.urlopen(f"{self._url}/readyz", timeout=60):
                    return
            except urllib.error.HTTPError as error:
                text = error.read().decode()
                body = json.loads(text) if text.startswith("{") else {}
                reason = "; ".join(body.get("reasons", [])) or body.get("detail") or "starting"
            except urllib.error.URLError as error:
                reason = str(error.reason)
            if reason != told:
                print(f"not ready: {reason}", flush=True)
            told = reason
            time.sleep(1)

    def submit(self, environment: str, tasks: list[dict[str, Any]]) -> dict[str, Any]:
        return self._ask("POST", "/api/v1/rollouts", {"environment": environment, "tasks": tasks})

    def rollout(self, task_id: str) -> dict[str, Any]:
        return self._ask("GET", f"/api/v1/rollouts/{task_id}")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        while True:
            request = urllib.request.Request(
                self._url + path, data=data, headers=self._headers, method=method
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    found: dict[str, Any] = json.load(answer)
                    return found
            except urllib.error.HTTPError as error:
                wait_s = error.headers.get("Retry-After")
                if error.code not in (429, 503) or wait_s is None:
                    sys.exit(f"{method} {path}: {error.code} {error.read().decode()}")
                time.sleep(float(wait_s))
            except urllib.error.URLError as error:
                sys.exit(f"{method} {path}: {error.reason}; is the service still there?")


def batches(prefix: str, num_tasks: int, size: int) -> Iterator[list[dict[str, Any]]]:
    for first in range(0, num_tasks, size):
        last = min(first + size, num_tasks)
        yield [{"id": f"{prefix}-{number}", "seed": number} for number in range(first, last)]


def tell(rewards: dict[int, list[float]]) -> None:
    newest = max(rewards)
    mean = sum(rewards[newest]) / len(rewards[newest])
    print(f"policy version {newest}: reward {mean:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--environment", default="guessing")
    parser.add_argument("--tasks", type=int, default=320)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prefix", default="example", help="of the tasks' ids")
    options = parser.parse_args()
    client = Client(options.url, os.environ.get("RAYLOOM_API_KEY"))

    client.wait_until_ready()
    waiting: list[str] = []
    for tasks in batches(options.prefix, options.tasks, options.batch):
        answer = client.submit(options.environment, tasks)
        waiting += [task["id"] for task in tasks]
        print(f"accepted {answer['accepted']} of {len(tasks)}, {answer['queue']}", flush=True)

    rewards: dict[int, list[float]] = defaultdict(list)
    while waiting:
        found = client.rollout(waiting[0])
        if found["status"] not in OVER:
            time.sleep(0.5)
            continue
        waiting.pop(0)
        if found["policy_versions"] is None:
            continue
        version = found["policy_versions"][1]
        if rewards and version > max(rewards):
            tell(rewards)
        rewards[version].append(found["reward"])
    if rewards:
        tell(rewards)


if __name__ == "__main__":
    main()
