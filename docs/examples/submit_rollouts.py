"""Submit tasks to a running `rayloom serve` and watch the reward of each policy version.

Try it in a second terminal:

    $ rayloom serve deploy/configs/guessing-cpu.yaml
    $ python docs/examples/submit_rollouts.py --tasks 320

You can repeat every request: the service does not play a known task again.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Iterator

from rayloom import ApiError, Client, NoAnswer, TaskBody


def wait_until_ready(client: Client) -> None:
    """Wait until the service is ready, and print the reasons why it is not."""
    told = ""
    while True:
        try:
            found = client.ready()
            if found.ready:
                return
            reason = "; ".join(found.reasons)
        except (ApiError, NoAnswer) as error:
            reason = str(error)
        if reason != told:
            print(f"not ready: {reason}", flush=True)
        told = reason
        time.sleep(1)


def batches(prefix: str, num_tasks: int, size: int) -> Iterator[list[TaskBody]]:
    for first in range(0, num_tasks, size):
        last = min(first + size, num_tasks)
        yield [TaskBody(id=f"{prefix}-{number}", seed=number) for number in range(first, last)]


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
    with Client(options.url, key=os.environ.get("RAYLOOM_API_KEY")) as client:
        wait_until_ready(client)
        names: list[str] = []
        for tasks in batches(options.prefix, options.tasks, options.batch):
            answer = client.submit(options.environment, tasks)
            names += [task.id for task in tasks]
            print(f"accepted {answer.accepted} of {len(tasks)}, {answer.queue}", flush=True)

        rewards: dict[int, list[float]] = defaultdict(list)
        for name in names:
            found = client.wait(name)
            if found.policy_versions is None or found.reward is None:
                continue
            version = found.policy_versions[1]
            if rewards and version > max(rewards):
                tell(rewards)
            rewards[version].append(found.reward)
        if rewards:
            tell(rewards)


if __name__ == "__main__":
    main()
