"""Tests of the environment actor in a real Ray: it takes assignments and returns all as blocks."""

import json
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from worlds.builders.settings import queue_settings
from worlds.parts.environment_fakes import FakeQueue, GuessFour
from worlds.parts.quick_actor import QuickActor

from actors.environment.actor import SHOWN_SAMPLES
from actors.environment.evaluation import plays_of
from actors.environment.settings import (
    EnvironmentActorSettings,
    EnvironmentSettings,
    RolloutSettings,
)
from actors.trainer.tiny.tokenizer import build_tokenizer
from actors.trajectory_queue.actor import start_queue
from actors.trajectory_queue.codec import decode
from actors.trajectory_queue.groups import GroupRequest
from actors.types import Outcome, RolloutAssignment, Task

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("cluster"),
]

LIMITS = RolloutSettings(
    slots_per_actor=16,
    max_turns=4,
    max_tokens_per_turn=8,
    temperature=1.0,
    turn_deadline_s=30.0,
    episode_deadline_s=60.0,
)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(str(path))
    return path


def _assignments(count: int, environment: str = "guessing") -> list[RolloutAssignment]:
    return [
        RolloutAssignment(
            rollout_id=f"r{i}",
            group_id=f"g{i // 4}",
            group_number=i // 4,
            attempt=0,
            task=Task(
                task_id="unwanted" if i == 0 else f"t{i}", environment=environment, seed=i // 4
            ),
        )
        for i in range(count)
    ]


def _start(
    queue: Any, tokenizer_path: Path, *, actor_id: str = "e0", delay_s: float = 0.0, **changes: Any
) -> Any:
    ids = build_tokenizer().encode("4<|end|>")
    fields: dict[str, Any] = {
        "rollouts": LIMITS,
        "max_context_tokens": 256,
        "chat_template": None,
        "groups_per_step": 1,
        "environments": {
            name: EnvironmentSettings(environment=name, options=options)
            for name, options in {
                "guessing": {"max_guesses": 2},
                "worlds.parts.environment_fakes:Endless": {"word": "hello"},
            }.items()
        },
    }
    return (
        ray.remote(QuickActor)
        .options(num_cpus=0)
        .remote(
            EnvironmentActorSettings(**(fields | changes)),
            actor_id=actor_id,
            tokenizer_path=str(tokenizer_path),
            make_policy=partial(GuessFour, ids, delay_s=delay_s),
            queue=queue,
        )
    )


def _queue(assignments: list[RolloutAssignment], **options: Any) -> Any:
    return ray.remote(FakeQueue).options(num_cpus=0).remote(assignments, **options)


def _until_ended(queue: Any, count: int) -> tuple[list[Any], list[int], int]:
    while True:
        report = ray.get(queue.report.remote(), timeout=120)
        if len(report[0]) >= count:
            return report
        time.sleep(0.05)


def _finish(actor: Any, run: Any) -> None:
    ray.get(actor.stop.remote(), timeout=120)
    ray.get(run, timeout=120)
    ray.kill(actor)


def test_every_assignment_ends_once_with_its_tokens(tokenizer_path: Path) -> None:
    queue = _queue(_assignments(100), num_failing_puts=2)
    actor = _start(queue, tokenizer_path)
    run = actor.run.remote()
    ended, block_sizes, max_held = _until_ended(queue, 100)
    _finish(actor, run)
    assert Counter(summary.rollout_id for summary, _ in ended) == Counter(
        f"r{i}" for i in range(100)
    )
    for summary, trajectory in ended:
        assert trajectory.trajectory_id == f"{summary.rollout_id}.a0"
        assert (summary.num_turns, summary.outcome) == (
            len(trajectory.turns),
            Outcome.COMPLETED,
        )
        assert summary.num_bytes > 0 and trajectory.num_sampled == 2 * summary.num_turns
    by_group = {t.group_id: t.episode_return for _, t in ended}
    assert all(t.episode_return == by_group[t.group_id] for _, t in ended)
    assert max(block_sizes) <= 8 and max_held <= 16


def test_stopping_ends_running_episodes_as_cancelled_and_loses_none(tokenizer_path: Path) -> None:
    queue = _queue(_assignments(40, environment="worlds.parts.environment_fakes:Endless"))
    actor = _start(queue, tokenizer_path)
    run = actor.run.remote()
    while ray.get(queue.report.remote(), timeout=120)[2] < 16:
        time.sleep(0.05)
    _finish(actor, run)
    ended, _, _ = ray.get(queue.report.remote(), timeout=120)
    assert len(ended) == 16
    assert {summary.outcome for summary, _ in ended} == {Outcome.CANCELLED}


def test_a_stop_with_drain_waits_for_running_episodes(tokenizer_path: Path) -> None:
    queue = _queue(_assignments(8))
    actor = _start(queue, tokenizer_path, delay_s=0.3)
    run = actor.run.remote()
    while ray.get(queue.asked.remote(), timeout=120) < 2:
        time.sleep(0.05)
    ray.get(actor.stop.remote(drain_s=60.0), timeout=180)
    ray.get(run, timeout=120)
    ended, _, _ = ray.get(queue.report.remote(), timeout=120)
    assert [summary.outcome for summary, _ in ended] == [Outcome.COMPLETED] * 8
    ray.kill(actor)


def test_evaluation_returns_results_in_order_and_sends_none_to_the_queue(
    tokenizer_path: Path,
) -> None:
    queue = _queue([])
    actor = _start(queue, tokenizer_path)
    tasks = [Task(task_id=f"e{i}", environment="guessing", seed=i) for i in range(50)]
    plays = plays_of(tasks, 1)
    played = ray.get(actor.evaluate.remote(plays), timeout=120)
    assert [each.summary.task_id for each in played] == [task.task_id for task in tasks]
    assert {each.summary.outcome for each in played} == {Outcome.COMPLETED}
    assert {each.line for each in played} == {None}
    texts = [each.summary.text for each in played]
    assert texts[SHOWN_SAMPLES:] == [None] * (len(tasks) - SHOWN_SAMPLES)
    for text in texts[:SHOWN_SAMPLES]:
        assert text is not None and text.answer.startswith("4") and "guess" in text.prompt.lower()
    (failed,) = ray.get(actor.evaluate.remote(plays[:1], temperature=0.25), timeout=120)
    assert failed.summary.outcome is Outcome.INFRASTRUCTURE_ERROR and failed.summary.text is None
    assert ray.get(actor.evaluate.remote([]), timeout=120) == []
    assert ray.get(actor.num_evaluated.remote(), timeout=120) == len(tasks) + 1
    unknown = plays_of([Task(task_id="u", environment="chess", seed=0)], 1)
    (refused,) = ray.get(actor.evaluate.remote(unknown), timeout=120)
    assert refused.summary.outcome is Outcome.ENVIRONMENT_ERROR
    assert "guessing" in refused.summary.detail
    assert ray.get(queue.report.remote(), timeout=120)[0] == []
    ray.kill(actor)


@pytest.mark.proof
@pytest.mark.slow
def test_an_evaluation_writes_a_line_for_each_rollout_with_its_tokens(tokenizer_path: Path) -> None:
    queue, tokenizer = _queue([]), build_tokenizer()
    actor = _start(queue, tokenizer_path)
    plays = plays_of([Task(task_id="e", environment="guessing", seed=3)], 2)
    played = ray.get(actor.evaluate.remote(plays, keeps_tokens=True), timeout=120)
    for number, each in enumerate(played):
        line = json.loads(ray.get(each.line, timeout=120))
        assert (line["task_id"], line["sample"], line["outcome"]) == ("e", number, "completed")
        assert (line["return"], line["answer"]) == (each.summary.episode_return, "4")
        assert line["components"] == {"hit": each.summary.episode_return}
        (sample,) = line["samples"]
        assert len(sample["token_ids"]) == len(sample["mask"]) == len(sample["logprobs"])
        assert sum(sample["mask"]) == each.summary.num_sampled == 2 * line["num_turns"]
        assert tokenizer.decode(sample["token_ids"]).startswith(sample["text"])
    ray.kill(actor)


@pytest.mark.proof
@pytest.mark.slow
def test_the_queue_loses_no_rollout_of_a_killed_actor(tokenizer_path: Path) -> None:
    queue = start_queue(queue_settings(groups_per_step=8, window_groups=8, num_steps=1))
    queue.open.remote(0, None)
    groups = [
        GroupRequest(group_number=i, task=assignment.task, num_samples=4)
        for i, assignment in enumerate(_assignments(8))
    ]
    ray.get(queue.admit.remote(groups), timeout=120)
    first = _start(queue, tokenizer_path, delay_s=0.05)
    first.run.remote()
    while ray.get(queue.stats.remote(), timeout=120).num_waiting < 8:
        time.sleep(0.05)
    ray.kill(first)
    ray.get(queue.release_actor.remote("e0"), timeout=120)
    second = _start(queue, tokenizer_path, actor_id="e1")
    run = second.run.remote()
    step = None
    while step is None:
        step, _ = ray.get(queue.take_step.remote(1.0), timeout=120)
    assert len(step.rollout_ids) == len(set(step.rollout_ids)) == 32
    blocks = ray.get(list(step.blocks), timeout=120)
    for group in step.groups:
        for member in group:
            trajectory = decode(blocks[member.block], member.row)
            assert trajectory.rollout_id == member.rollout_id and trajectory.turns
    outcomes = dict.fromkeys(step.rollout_ids)
    ray.get(queue.finalise.remote(step.step, outcomes), timeout=120)
    ledger = ray.get(queue.stats.remote(), timeout=120).ledger
    assert (ledger.admitted, ledger.trained, ledger.in_flight) == (32, 32, 0)
    _finish(second, run)


def test_a_dead_queue_ends_the_run_with_an_error(tokenizer_path: Path) -> None:
    queue = _queue([])
    actor = _start(queue, tokenizer_path)
    run = actor.run.remote()
    ray.get(actor.ping.remote(), timeout=120)
    ray.kill(queue)
    with pytest.raises(ray.exceptions.RayTaskError, match="take_rollouts"):
        ray.get(run, timeout=120)
    ray.kill(actor)


@pytest.mark.proof
@pytest.mark.slow
def test_wrong_options_are_refused_at_the_start(tokenizer_path: Path) -> None:
    wrong = EnvironmentSettings(environment="guessing", options={"hihg": 9})
    actor = _start(_queue([]), tokenizer_path, environments={"guessing": wrong})
    with pytest.raises(ray.exceptions.RayActorError, match="hihg"):
        ray.get(actor.ping.remote(), timeout=120)


@pytest.mark.proof
@pytest.mark.slow
def test_a_group_is_scored_together_once_all_its_rollouts_have_ended(tokenizer_path: Path) -> None:
    name = "single_turn"
    scored = frozenset({name})
    settings = queue_settings(groups_per_step=2, window_groups=2, num_steps=1, scores_groups=scored)
    queue = start_queue(settings)
    queue.open.remote(0, None)
    task = Task(task_id="t", environment=name, seed=0, data={"prompt": "2 + 2", "answer": "4"})
    groups = [GroupRequest(group_number=i, task=task, num_samples=3) for i in range(2)]
    ray.get(queue.admit.remote(groups), timeout=120)
    options = {"group_reward": "worlds.parts.group_rewards:places"}
    environments = {name: EnvironmentSettings(environment=name, options=options)}
    actor = _start(queue, tokenizer_path, environments=environments)
    run = actor.run.remote()
    step = None
    while step is None:
        step, _ = ray.get(queue.take_step.remote(1.0), timeout=120)
    blocks = ray.get(list(step.blocks), timeout=120)
    found = [[decode(blocks[each.block], each.row) for each in group] for group in step.groups]
    assert [[each.episode_return for each in group] for group in found] == [[0.0, 1.0, 2.0]] * 2
    assert found[1][2].extra_columns == {"place": "place 2"}
    _finish(actor, run)
