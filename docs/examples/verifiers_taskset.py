"""Train on a taskset of verifiers 0.4: each of its rollouts plays a session.

    $ rayloom serve deploy/configs/guessing-cpu.yaml --set tasks.environment=session \
        --set 'tasks.options={}' --set tasks.evaluation_tasks=0
    $ pip install 'verifiers>=0.4' uv                           # in a separate environment
    $ python docs/examples/verifiers_taskset.py --groups 320    # in a second terminal

uv makes the environment in which verifiers starts its chat loop, a process for each rollout.
"""

import argparse
import asyncio
import os

import httpx
import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> list[SumTask]:
        pairs = [(a, b) for a in range(1, 4) for b in range(1, 4)]
        return [SumTask(SumData(prompt=f"What is {a}+{b}?", answer=str(a + b))) for a, b in pairs]


def load_environment() -> vf.Env:
    config = vf.SingleAgentEnvConfig(
        taskset={"id": "verifiers_taskset"},  # Or the one of any package for verifiers.
        agent={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    )
    return vf.load_environment(config)


async def play(api: httpx.AsyncClient, environment: vf.Env, task: vf.Task, session) -> float:
    # verifiers takes a key by the name of a variable.
    variable = f"SESSION_{session['id']}"
    os.environ[variable] = session["env"]["OPENAI_API_KEY"]
    client = vf.EvalClientConfig(base_url=session["env"]["OPENAI_BASE_URL"], api_key_var=variable)
    context = vf.ModelContext(client=client, model="policy", sampling={})
    (slot,) = environment.slots(task)
    episode = await environment.run_slot(slot, context)
    # A rollout that was not played to its end has no reward, which is not the same as 0.
    reward = episode.traces[0].reward if episode.ok else None
    del os.environ[variable]
    headers = {"authorization": f"Bearer {session['reward_key']}"}
    place = f"/api/v1/sessions/{session['id']}/finish"
    (await api.post(place, json={"reward": reward}, headers=headers)).raise_for_status()
    return reward or 0.0


async def main(url: str, num_groups: int) -> None:
    environment, places = load_environment(), asyncio.Semaphore(8)
    key = os.environ.get("RAYLOOM_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    tasks = list(environment.taskset)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600) as api:

        async def group(index: int, task: vf.Task) -> None:
            async with places:
                body = {"id": f"sum-{index}", "task": {"question": task.data.prompt}}
                made = (await api.post("/api/v1/sessions", json=body)).raise_for_status().json()
                plays = [play(api, environment, task, each) for each in made["sessions"]]
                rewards = await asyncio.gather(*plays)
            print(f"group {index}: mean reward {sum(rewards) / len(rewards):.2f}", flush=True)

        async with environment.serving():
            await asyncio.gather(*(group(n, tasks[n % len(tasks)]) for n in range(num_groups)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--groups", type=int, default=320)
    asked = parser.parse_args()
    asyncio.run(main(asked.url, asked.groups))
