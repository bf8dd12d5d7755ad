"""Train an agent that imports nothing from Rayloom: it speaks OpenAI's protocol and gets a URL.

    $ rayloom serve deploy/configs/guessing-cpu.yaml --set tasks.environment=session \
        --set 'tasks.options={}' --set tasks.evaluation_tasks=0
    $ python docs/examples/guessing_agent.py --groups 320          # in a second terminal

`play` is the agent. `main` creates a group of sessions for each game, starts the agents with the
service's answers, and rewards them.
"""

from __future__ import annotations

import argparse
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from openai import APIStatusError, OpenAI

LOW, HIGH, GUESSES = 1, 8, 4


def play(env: dict[str, str], number: int) -> float:
    """Play one game of the agent. Returns: 1 if it found the number, else 0."""
    client = OpenAI(
        base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"], timeout=600, max_retries=10
    )
    ask = f"Guess my number from {LOW} to {HIGH}. You have {GUESSES} guesses."
    messages: list[Any] = [{"role": "user", "content": ask}]
    for _ in range(GUESSES):
        try:
            answer = client.chat.completions.create(model="policy", messages=messages)
        except APIStatusError:
            return 0.0
        text = (answer.choices[0].message.content or "").strip()
        if text == str(number):
            return 1.0
        hint = "higher" if text.isdigit() and int(text) < number else "lower"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--groups", type=int, default=320)
    parser.add_argument("--name", default="guess", help="of the groups: another for other games")
    arguments = parser.parse_args()
    key = os.environ.get("RAYLOOM_API_KEY", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # No connection is kept idle: httpx may close one that another thread is about to use.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=arguments.url, headers=headers, timeout=600, limits=limits) as api:

        def group(index: int) -> float:
            body = {"id": f"{arguments.name}-{index}", "task": {"index": index}}
            answer = api.post("/api/v1/sessions", json=body)
            answer.raise_for_status()
            number = random.Random(index).randint(LOW, HIGH)
            rewards = list(
                agents.map(lambda made: finished(made, number), answer.json()["sessions"])
            )
            return sum(rewards) / len(rewards)

        def finished(session: dict[str, Any], number: int) -> float:
            reward = play(session["env"], number)
            api.post(
                f"/api/v1/sessions/{session['id']}/finish",
                json={"reward": reward},
                headers={"Authorization": f"Bearer {session['reward_key']}"},
            ).raise_for_status()
            return reward

        with ThreadPoolExecutor(256) as agents, ThreadPoolExecutor(16) as groups:
            for index, mean in enumerate(groups.map(group, range(arguments.groups))):
                print(f"group {index}: mean reward {mean:.2f}", flush=True)


if __name__ == "__main__":
    main()
