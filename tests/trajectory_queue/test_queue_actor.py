"""Tests of the queue and merge actors on real Ray: payloads, losses, waits and restarts."""

from __future__ import annotations

import os
import pickle
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ObjectLostError, RayActorError
from worlds.agents.queue_player import Player
from worlds.builders.queue_builders import GAME, through_json
from worlds.builders.settings import queue_settings, step_settings
from worlds.builders.trajectory_builders import linear_turns, make_task, make_trajectory

from actors.algorithm import Baseline, Scale
from actors.batch import RowScores
from actors.merge.actor import MergeActor
from actors.merge.groups import PayloadsLost
from actors.trajectory_queue import actor as queue_actor
from actors.trajectory_queue.codec import TrajectoryBlock, decode, encode
from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.ledger import TokenCounts
from actors.trajectory_queue.messages import ActorReleased, QueueSnapshot, StepInput
from actors.types import Outcome

pytestmark = [pytest.mark.usefixtures("cluster")]
LIMIT_S = 60.0


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=LIMIT_S)


def start_queue(*, step: int = 2, lag: int = 0, snapshot: QueueSnapshot | None = None) -> Any:
    settings = queue_settings(groups_per_step=step, max_lag=lag, window_groups=1)
    queue = queue_actor.start_queue(settings)
    assert get(queue.open.remote(0, snapshot))
    return queue


def take_step(queue: Any, *, limit_s: float = LIMIT_S) -> StepInput | None:
    taken, _ = get(queue.take_step.remote(limit_s))
    return taken


def admit_all(queue: Any, *, num_samples: int = 4) -> None:
    requests = [
        GroupRequest(
            group_number=slot.group_number,
            task=make_task(slot.group_number),
            num_samples=num_samples,
        )
        for slot in get(queue.admissible.remote(LIMIT_S))[0]
    ]
    get(queue.admit.remote(requests))


def kill_9(actor: Any) -> None:
    os.kill(get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(RayActorError):
        get(actor.pid.remote())


def wait_until_lost(reference: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            get(reference)
        except ObjectLostError:
            return
        time.sleep(0.1)
    raise AssertionError(f"the object still exists after {LIMIT_S} s")


@pytest.mark.parametrize("sampled", [6, 5000], ids=["small blocks", "blocks in shared memory"])
def test_finished_trajectories_outlive_their_player(
    sampled: int,
) -> None:
    queue = start_queue()
    merge = ray.remote(MergeActor).options(num_cpus=0).remote(step_settings(num_ranks=2))
    first, second = Player.remote(queue, "first"), Player.remote(queue, "second")
    admit_all(queue)
    assert len(get(first.take.remote(8, LIMIT_S))) == 8
    assert get(first.hand_in.remote(5, sampled)) == [True] * 5
    kill_9(first)
    assert get(queue.release_actor.remote("first")) == 3
    again = get(second.take.remote(8, LIMIT_S))
    assert again == ["g000001.0-1.a1", "g000001.0-2.a1", "g000001.0-3.a1"]
    assert get(second.hand_in.remote(8, sampled)) == [True] * 3
    step_input = take_step(queue)
    assert step_input is not None
    assert len(step_input.blocks) == 2 and len(step_input.rollout_ids) == 8
    for block in step_input.blocks:
        trajectory = decode(get(block), 0)
        assert trajectory.num_sampled == 2 * sampled
    reply = get(merge.build.remote(step_input, 0))
    shards = get(list(reply.shards))
    assert [shard.step for shard in shards] == [1, 1]
    trained = sum(row.num_trained for s in shards for m in s.minibatches for row in m)
    assert trained == reply.report.num_trained_tokens == 8 * 2 * sampled
    dropped, cut = get(queue.finalise.remote(1, reply.outcomes))
    assert dropped == TokenCounts()
    ledger = get(queue.stats.remote()).ledger
    assert ledger.is_balanced and (ledger.trained, ledger.in_flight) == (8, 0)
    assert len(cut.events) == 8 and {e.kind for e in cut.events} == {"trained"}


def test_a_step_with_a_critic_is_scored_between_its_plan_and_its_batch() -> None:
    queue = start_queue()
    player = Player.remote(queue, "player")
    settings = step_settings(baseline=Baseline.CRITIC, scale=Scale.NONE, num_ranks=2)
    merge = ray.remote(MergeActor).options(num_cpus=0).remote(settings)
    admit_all(queue)
    get(player.take.remote(8, LIMIT_S))
    get(player.hand_in.remote(8, 2))
    step_input = take_step(queue)
    assert step_input is not None
    with pytest.raises(ValueError, match="ask the trainer to score the samples of this step first"):
        get(merge.build.remote(step_input, 0))
    scores = [
        ray.put([RowScores(values=np.full(row.num_tokens, 0.25, np.float32)) for row in rows])
        for shard in get(list(get(merge.plan.remote(step_input, 0))))
        for rows in [shard.minibatches[0]]
    ]
    reply = get(merge.build.remote(step_input, 0, scores))
    rows = [row for shard in get(list(reply.shards)) for row in shard.value_rows]
    assert len(reply.shards) == 2
    assert {float(value) for row in rows for value in row.old_values} == {0.25}
    assert {float(value) for row in rows for value in row.value_targets} == {0.0, 1.0}
    found = {
        float(value)
        for shard in get(list(reply.shards))
        for row in shard.minibatches[0]
        for value in row.advantages
    }
    assert found == {-0.25, 0.75}


@pytest.mark.proof
@pytest.mark.slow
def test_other_calls_are_answered_while_a_large_block_is_stored() -> None:
    queue = start_queue()
    get(queue.stats.remote())
    block = ray.put(TrajectoryBlock(data=np.zeros(400 << 20, np.uint8), offsets=(0,)))
    storing, asked = queue.put.remote("player", block, []), queue.stats.remote()
    first, _ = ray.wait([storing, asked], timeout=LIMIT_S)
    assert first == [asked]
    assert get(storing) == []


@pytest.mark.proof
@pytest.mark.slow
def test_the_queue_measures_how_long_each_side_waited() -> None:
    queue = queue_actor.start_queue(queue_settings(groups_per_step=1, max_lag=2, max_items=4))
    assert get(queue.open.remote(0, None))
    admit_all(queue)
    player = Player.remote(queue, "player")
    assert take_step(queue, limit_s=1.0) is None
    waited = get(queue.stats.remote()).blocked_s
    assert 1.0 <= waited["consumer"] < LIMIT_S and waited["producer"] == 0.0
    assert len(get(player.take.remote(4, LIMIT_S))) == 4
    get(player.hand_in.remote(4, 2))
    # The number of waiting trajectories is at the bound, so that the next groups are held back.
    assert get(player.take.remote(4, 1.5)) == []
    stats = get(queue.stats.remote())
    assert 1.5 <= stats.blocked_s["producer"] < LIMIT_S
    assert stats.oldest_s is not None and 1.5 <= stats.oldest_s < LIMIT_S
    assert stats.blocked_s["consumer"] == waited["consumer"]


@pytest.mark.proof
@pytest.mark.slow
def test_lost_payloads_are_named_and_their_rollouts_played_again() -> None:
    queue = start_queue()
    merge = ray.remote(MergeActor).options(num_cpus=0).remote(step_settings())
    player = Player.remote(queue, "player")
    admit_all(queue)
    get(player.take.remote(8, LIMIT_S))
    get(player.hand_in.remote(6, 2))
    get(player.hand_in.remote(2, 2))
    step_input = take_step(queue)
    assert step_input is not None
    # A block whose owner has died is lost, like the objects of a lost node.
    orphan = Player.remote(queue, "orphan")
    (lost,) = get(orphan.own_a_block.remote())
    kill_9(orphan)
    wait_until_lost(lost)
    step_input = replace(step_input, blocks=(step_input.blocks[0], lost))
    with pytest.raises(PayloadsLost) as caught:
        get(merge.build.remote(step_input, 0))
    # Ray raises an error of the actor's class with the actor's own error as its cause.
    error: Any = caught.value
    assert error.cause.rollout_ids == ("g000001.0-2", "g000001.0-3")
    get(queue.replay_lost.remote(error.cause.rollout_ids))
    assert take_step(queue, limit_s=0.0) is None
    assert get(player.take.remote(8, LIMIT_S)) == ["g000001.0-2.a1", "g000001.0-3.a1"]
    get(player.hand_in.remote(8, 2))
    step_input = take_step(queue)
    assert step_input is not None
    reply = get(merge.build.remote(step_input, 0))
    get(queue.finalise.remote(1, reply.outcomes))
    assert get(queue.stats.remote()).ledger.trained == 8


def test_waits_end_with_a_result_or_at_their_limit() -> None:
    queue = start_queue(step=1)
    assert get(queue.take_rollouts.remote("a", 1, 0.05, GAME)) == []
    assert take_step(queue, limit_s=0.05) is None
    waiting = queue.take_rollouts.remote("a", 8, LIMIT_S, GAME)
    ready, _ = ray.wait([waiting], timeout=0.3)
    assert ready == []
    admit_all(queue, num_samples=2)
    assert [x.rollout_id for x in get(waiting)] == ["g000000.0-0", "g000000.0-1"]
    assert get(queue.admissible.remote(0.05))[0] == []
    admissible = queue.admissible.remote(LIMIT_S)
    get(queue.set_loaded_version.remote(1))
    assert [slot.group_number for slot in get(admissible)[0]] == [1]
    with pytest.raises(ValueError, match="got version 0, expected at least 1"):
        get(queue.set_loaded_version.remote(0))


def test_a_waiting_call_of_a_released_actor_takes_no_rollouts() -> None:
    queue = start_queue(step=1)
    waiting = queue.take_rollouts.remote("dead", 8, LIMIT_S, GAME)
    assert get(queue.release_actor.remote("dead")) == 0
    admit_all(queue, num_samples=2)
    with pytest.raises(ActorReleased, match="dead was released"):
        get(waiting)
    assert len(get(queue.take_rollouts.remote("alive", 8, LIMIT_S, GAME))) == 2


def test_a_run_is_restored_from_a_stored_cut() -> None:
    queue = start_queue(step=1, lag=1)
    player = Player.remote(queue, "player")
    admit_all(queue, num_samples=2)
    get(player.take.remote(4, LIMIT_S))
    get(player.hand_in.remote(3, 2))
    cut = get(queue.cut.remote())
    assert cut.snapshot.last_event_seq == 3
    tasks = {number: make_task(number) for number in range(2)}
    stored = through_json(cut.snapshot.with_tasks(tasks))
    ray.kill(queue)
    later = start_queue(step=1, lag=1, snapshot=stored)
    assert get(later.admissible.remote(0.0))[0] == []
    again = get(later.take_rollouts.remote("other", 9, LIMIT_S, GAME))
    assert [x.attempt for x in again] == [1, 1, 1, 1] and again[0].task == make_task(0)
    stats = get(later.stats.remote())
    assert stats.ledger.admitted == stats.ledger.in_flight == 4


@pytest.mark.proof
@pytest.mark.slow
def test_the_size_of_replies_does_not_grow_with_the_data_of_tasks() -> None:
    sizes = []
    for num_bytes in (1, 1_000_000):
        queue = start_queue(step=4)
        requests = [
            GroupRequest(
                group_number=number,
                task=replace(make_task(number), data={"text": "x" * num_bytes}),
                num_samples=2,
            )
            for number in range(4)
        ]
        admitted = get(queue.admit.remote(requests))
        idle = get(queue.admissible.remote(0.0))
        player = Player.remote(queue, "player")
        get(player.take.remote(1, LIMIT_S))
        get(player.hand_in.remote(1, 2))
        played = get(queue.take_step.remote(0.0))
        sizes.append([len(pickle.dumps(reply)) for reply in (admitted, idle, played)])
    assert sizes[1] == pytest.approx(sizes[0], abs=64)
    assert idle[1].snapshot is None and played[1].snapshot is not None


def test_a_block_that_does_not_fit_its_summaries_is_refused() -> None:
    queue = start_queue()
    block = encode([make_trajectory(linear_turns(1), outcome=Outcome.COMPLETED)])
    with pytest.raises(ValueError, match="1 rows with 0 summaries"):
        get(queue.put.remote("a", block, []))


def test_a_block_is_one_buffer_in_shared_memory() -> None:
    block = get(ray.put(encode([make_trajectory(linear_turns(400))])))
    # The array would be writable if Ray had copied it out of its store.
    assert not block.data.flags.writeable and not block.data.flags.owndata
