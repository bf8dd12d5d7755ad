"""A run that an earlier commit began goes on as a whole: it is resumed, and trains its sessions."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from openai import OpenAIError
from worlds.guessing_agent import SessionClient, play
from worlds.run_checks import check_lineage
from worlds.run_driver import START_S, STEP_S, running
from worlds.stored_run import unpack_run

from service.gateway.bodies import NewSession
from service.gateway.keys import AGENT, REWARD, session_key

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(900)]


def test_a_run_of_format_9_is_resumed_and_trains_on(tmp_path: Path) -> None:
    run_dir = unpack_run(tmp_path)
    with running(None, run_dir.path, ["--resume"], command="serve") as run:
        address = run.api_address(limit_s=START_S)
        with httpx.Client(base_url=address, timeout=START_S) as client:
            sessions = SessionClient(client)
            deadline = time.monotonic() + START_S
            # The agent and the rewarder of that time go on with the keys that they have.
            name = "waiting-1"
            old = NewSession.of(name, client_key="", address=address)
            while True:
                try:
                    play(old.env, number=2)
                    break
                except (httpx.HTTPError, OpenAIError):
                    assert time.monotonic() < deadline, run.log()
                    time.sleep(1.0)
            rewarded = {"id": name, "reward_key": session_key("", name, REWARD)}
            assert session_key("", name, AGENT) == old.agent_key
            ended = sessions.finish(rewarded, reward=1.0, limit_s=START_S)
            assert ended["status"] == "finished" and ended["turns"] > 3
            # The second group of step 3 comes by keys of this run's own secret.
            made = sessions.create("new", limit_s=START_S, num_sessions=2)
            assert made[0]["reward_key"] != session_key("", made[0]["id"], REWARD)
            for index, session in enumerate(made):
                play(session["env"], number=100)
                sessions.finish(session, reward=float(index), limit_s=START_S)
            run.wait_for_step(3, limit_s=2 * STEP_S)
            view = client.get("/api/v1/rollouts/waiting").json()
            while view["status"] not in ("trained", "evicted"):
                assert time.monotonic() < deadline + STEP_S, view
                time.sleep(0.5)
                view = client.get("/api/v1/rollouts/waiting").json()
            assert view["status"] == "trained", view
            assert [sample["reward"] for sample in view["samples"]] == [0.0, 1.0]
        run.interrupt()
        assert run.wait(limit_s=START_S) == 130, run.log()
    check_lineage(run.events())
    assert [record.step for record in run.history().steps] == [1, 2, 3]
