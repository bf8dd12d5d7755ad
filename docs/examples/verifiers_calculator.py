"""Train on an environment of verifiers: each of its rollouts plays a session.

    $ rayloom serve deploy/configs/guessing-cpu.yaml --set tasks.environment=session \
        --set 'tasks.options={}' --set tasks.evaluation_tasks=0
    $ pip install 'verifiers<0.4'                                  # in a separate environment
    $ python docs/examples/verifiers_calculator.py --groups 320    # in a second terminal

The tiny model of that configuration writes no calls for verifiers' schemas, so it earns nothing;
name another model with `--set model.tiny=null --set model.path=…`.
"""

import argparse
import asyncio
import os

import httpx
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return str(sum(map(int, expression.split("+"))))


def correct(completion, answer) -> float:
    said = completion[-1].content or ""
    calculated = any(each.role == "tool" and each.content == answer for each in completion)
    return 0.5 * (calculated and said.isdigit()) + 0.5 * (said == answer)


def load_environment() -> vf.Environment:  # Or the one of any package for verifiers.
    pairs = [(first, second) for first in range(1, 4) for second in range(1, 4)]
    rows = [{"question": f"What is {a}+{b}?", "answer": str(a + b)} for a, b in pairs]
    data, rubric = Dataset.from_list(rows), vf.Rubric(funcs=[correct])
    return vf.ToolEnv(dataset=data, tools=[calculator], rubric=rubric, max_turns=4)


async def play(api: httpx.AsyncClient, environment: vf.Environment, row, session) -> float:
    url, key = (session["env"][f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY"))
    async with AsyncOpenAI(base_url=url, api_key=key, timeout=600, max_retries=10) as openai:
        client = OpenAIChatCompletionsClient(openai)
        played = await environment.run_rollout(row, client, "policy", {})
    # A rollout that was not played to its end has no reward, which is not the same as 0.
    reward = None if played["error"] else played["reward"]
    body = {"reward": reward, "components": played["metrics"]}
    headers = {"authorization": f"Bearer {session['reward_key']}"}
    place = f"/api/v1/sessions/{session['id']}/finish"
    (await api.post(place, json=body, headers=headers)).raise_for_status()
    return reward or 0.0


async def main(url: str, num_groups: int) -> None:
    environment, places = load_environment(), asyncio.Semaphore(16)
    key = os.environ.get("RAYLOOM_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600) as api:

        async def group(index: int, row) -> None:
            async with places:
                body = {"id": f"sum-{index}", "task": {"question": row["prompt"][-1]["content"]}}
                made = (await api.post("/api/v1/sessions", json=body)).raise_for_status().json()
                plays = [play(api, environment, row, session) for session in made["sessions"]]
                rewards = await asyncio.gather(*plays)
            print(f"group {index}: mean reward {sum(rewards) / len(rewards):.2f}", flush=True)

        rows = list(environment.get_dataset(seed=0))
        await asyncio.gather(*(group(n, rows[n % len(rows)]) for n in range(num_groups)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--groups", type=int, default=320)
    asked = parser.parse_args()
    asyncio.run(main(asked.url, asked.groups))
