"""Uploads over HTTP without Ray: real routes, checks, stores, submission queue and window."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from actors.algorithm import AlgorithmSettings
from actors.environment.settings import RolloutSettings
from actors.expert_records import MixtureShape, ModelShape
from actors.trajectory_queue.groups import BlockRow
from actors.types import NO_VERSION, UPLOADED, RolloutAssignment, Sample, Trajectory, summarize
from service.api.app import create_app
from service.api.schemas import ReadyAnswer
from service.api.settings import HttpSettings
from service.config.sections import ServiceSettings, SessionSettings
from service.gateway.sampling import GatewaySettings
from service.gateway.upload_routes import add_uploads
from service.gateway.uploads import policy_facts
from worlds.builders.episode_builders import renderer
from worlds.builders.queue_builders import take_all
from worlds.builders.trajectory_builders import linear_turns, make_trajectory
from worlds.parts.gateway_world import Policy
from worlds.parts.local_run import LocalRun
from worlds.parts.local_uploads import local_uploads
from worlds.parts.submission_service import Service

URL, GENERATE = "/api/v1/trajectories", "/api/v1/generate"
MSGPACK = "application/msgpack"
MIXTURE = MixtureShape(num_layers=2, num_experts=6, num_chosen=2)
ALGORITHM = AlgorithmSettings(group_size=2, groups_per_step=2, max_lag=1)
ROLLOUTS = RolloutSettings(max_tokens_per_turn=16)
SETTINGS = GatewaySettings(
    sessions=SessionSettings(hold_s=5),
    rollouts=ROLLOUTS,
    algorithm=ALGORITHM,
    chat_template=None,
    max_context_tokens=400,
    shape=ModelShape(vocab_size=516, mixture=MIXTURE),
)
FACTS = policy_facts(SETTINGS, renderer())
HTTP = HttpSettings(
    service=ServiceSettings(max_samples_per_task=4, max_tasks_per_request=8),
    algorithm=ALGORITHM,
    rollouts=ROLLOUTS,
    sessions=SETTINGS.sessions,
    environments=("guessing",),
)


class _Run(LocalRun):
    """A run whose policy version is the service's step."""

    async def readiness(self) -> ReadyAnswer:
        found = await super().readiness()
        return found.model_copy(update={"policy_version": self.service.step})


@dataclass
class UploadWorld:
    """One process of a run; `restart` returns the process that follows it after a kill -9."""

    directory: Path
    policy: Policy = field(default_factory=Policy)
    http: HttpSettings = HTTP
    service: Service = field(init=False)

    async def begin(self) -> UploadWorld:
        self.service = await Service(self.directory, settings=self.http.service).begin()
        self.uploads = local_uploads(self.service, SETTINGS, make_policy=lambda: self.policy)
        run = _Run(self.service)
        app = create_app(run, self.http)
        add_uploads(app, run, self.uploads, self.http)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost"
        )
        return self

    async def restart(self) -> UploadWorld:
        self.service.store.close()
        return await UploadWorld(self.directory, self.policy, self.http).begin()

    async def send(
        self, *items: dict[str, Any], packed: bool = False, url: str = URL, **fields: Any
    ) -> httpx.Response:
        body = {
            "tokenizer_fingerprint": FACTS.tokenizer_fingerprint,
            "trajectories": list(items),
            **fields,
        }
        return await self.post(body, packed=packed, url=url)

    async def post(self, body: Any, *, packed: bool = False, url: str = URL) -> httpx.Response:
        encode = msgspec.msgpack.encode if packed else msgspec.json.encode
        raw = body if isinstance(body, bytes) else encode(body)
        kind = MSGPACK if packed else "application/json"
        return await self.client.post(url, content=raw, headers={"content-type": kind})

    async def admitted(self) -> list[RolloutAssignment]:
        """Admit what the window has room for; return the assignments for the gateway."""
        await self.service.admit()
        return take_all(self.service.queue, environments=(UPLOADED,))

    async def deliver(self, assignments: Sequence[RolloutAssignment]) -> list[Trajectory]:
        played = [await self.uploads.play(assignment) for assignment in assignments]
        for trajectory in played:
            payload = BlockRow(block=object(), row=0, num_bytes=100)
            assert self.service.queue.put("a", summarize(trajectory, num_bytes=100), payload)
        self.service.drain()
        return played


def item(name: str = "t-0", *, group: str = "g", **changes: Any) -> dict[str, Any]:
    """Make an upload of two turns: [1, 2] -> [3, 4], then [5] -> [6]; version 0."""
    sample = {
        "token_ids": [1, 2, 3, 4, 5, 6],
        "mask": [0, 0, 1, 1, 0, 1],
        "logprobs": [0, 0, -0.5, -0.25, 0, -1.5],
        "versions": [{"version": 0, "start": 2, "end": 6}],
    }
    sample.update(changes.pop("sample", {}))
    sample = {name: value for name, value in sample.items() if value is not None}
    return {"id": name, "group": group, "samples": [sample], "reward": 1.0, **changes}


def played(*, seed: int, version: int = 0, reward: float = 1.0) -> Trajectory:
    """Make a trajectory of three turns, as the product's own environments do."""
    return make_trajectory(linear_turns(3, seed=seed, version=version, reward=reward))


def as_item(
    trajectory: Trajectory, name: str, *, group: str = "g", packed: bool = False
) -> dict[str, Any]:
    """Return a trajectory as its producer uploads it. packed: columns as bytes."""
    turns = trajectory.turns
    by_tokens = any(sample.token_rewards is not None for sample in trajectory.samples)
    rewards = {turn.index: turn.reward for turn in turns[:-1] if turn.reward}
    return {
        "id": name,
        "group": group,
        "samples": [_as_sample(each, packed=packed) for each in trajectory.samples],
        "outcome": trajectory.outcome.value,
        "detail": trajectory.detail,
        "components": dict(turns[-1].reward_components),
        **({} if by_tokens else {"reward": turns[-1].reward, "turn_rewards": rewards}),
    }


def _as_sample(sample: Sample, *, packed: bool) -> dict[str, Any]:
    def column(values: np.ndarray, dtype: str, **shape: Any) -> Any:
        return pack(values, dtype, **shape) if packed else values.tolist()

    found: dict[str, Any] = {
        "token_ids": column(sample.token_ids, "<i4"),
        "logprobs": column(sample.logprobs, "<f4"),
        "mask": column(sample.mask, "|u1"),
        "versions": spans_of(sample.versions),
        "turns": [
            {
                "start": turn.start,
                "end": turn.end,
                "index": turn.index,
                "finish_reason": turn.finish_reason.value,
                "is_malformed": turn.is_malformed,
                "state_key": turn.state_key,
            }
            for turn in sample.turns
        ],
    }
    if sample.token_rewards is not None:
        found["token_rewards"] = column(sample.token_rewards, "<f4")
    if sample.experts is not None:
        indices = sample.experts.indices
        found["experts"] = {
            "positions": column(sample.experts.positions, "<i4"),
            "indices": column(indices, indices.dtype.str, shape=indices.shape),
        }
    return found


def pack(values: Any, dtype: str, **shape: Any) -> dict[str, Any]:
    return {"dtype": dtype, "data": np.asarray(values, dtype).tobytes(), **shape}


def in_json(item: Any) -> Any:
    """Return an item with the bytes of packed columns in base64, as JSON needs them."""
    if isinstance(item, dict):
        return {name: in_json(value) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return [in_json(value) for value in item]
    return base64.b64encode(item).decode() if isinstance(item, bytes) else item


def spans_of(versions: np.ndarray) -> list[dict[str, int]]:
    """Return spans that cover the trained tokens; tokens between have the version before them."""
    trained = np.flatnonzero(versions != NO_VERSION)
    if not trained.size:
        return []
    starts = [i for n, i in enumerate(trained) if n == 0 or versions[i] != versions[trained[n - 1]]]
    ends = [*starts[1:], trained[-1] + 1]
    return [
        {"version": int(versions[start]), "start": int(start), "end": int(end)}
        for start, end in zip(starts, ends, strict=True)
    ]


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["code"] == code, answer.text
    return body


def renamed(trajectory: Trajectory) -> tuple[Sample, ...]:
    """Return a trajectory's samples without their id, which only an assignment gives."""
    return tuple(replace(sample, trajectory_id="") for sample in trajectory.samples)
