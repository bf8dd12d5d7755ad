"""Tests of `rayloom explain` with runs of the real merge and trainer in this process.

The sum of the gradients is compared with the gradient norm that the trainer recorded, and each
gradient with one that a simple loop computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds.builders.journal_builders import step_of, written
from worlds.builders.trajectory_builders import linear_turns, make_trajectory
from worlds.parts.trainer_world import obvious_logprobs
from worlds.runs.explained_run import (
    Groups,
    PlayedRun,
    config_of,
    played_run,
    poisoned,
    rewarded,
    sampled_groups,
)

from actors.algorithm import Baseline
from actors.journal.files import list_files
from service.cli.explain import Order, describe, document, ranked, run_explain
from service.config.file import ConfigError, dump_config
from service.explain.recompute import Explanation, explain_step, find_source

# The error of float32 if the same numbers are added in another order.
SAME = 1e-5


def small_groups(model: Path, *, seed: int = 1, version: int = 0) -> Groups:
    """Return four groups of four: one with equal returns, one with a trajectory of two samples."""
    groups = sampled_groups(model, num_groups=4, group_size=4, seed=seed, version=version)
    groups[0] = tuple(rewarded(each, 1.0) for each in groups[0])
    turns = [*linear_turns(2, seed=seed, version=version), *linear_turns(1, reward=1.0, seed=9)]
    branched = make_trajectory(
        [replace(turn, version_spans=turns[0].version_spans) for turn in turns],
        rollout_id=groups[1][3].rollout_id,
    )
    groups[1] = (*(rewarded(each, 0.0) for each in groups[1][:3]), branched)
    assert len(branched.samples) == 2
    return groups


@pytest.fixture(scope="module")
def run(tiny_models: dict[bool, str], tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    """Return an ended run of four steps with a checkpoint of the first step."""
    directory = tmp_path_factory.mktemp("explained") / "run"
    with played_run(directory, config_of(tiny_models[True])) as run:
        for number in range(4):
            groups = small_groups(run.model, seed=number, version=number)
            run.step(groups, saves=number == 0)
    return run


@pytest.fixture(scope="module")
def first(run: PlayedRun) -> Explanation:
    return explained(run, 1)


@pytest.fixture(scope="module")
def second(run: PlayedRun) -> Explanation:
    return explained(run, 2)


def explained(run: PlayedRun, step: int, **options: bool) -> Explanation:
    return explain_step(find_source(run.run_dir.path, step), **options)


def check_adds_up(found: Explanation, *, grad_norm: float, rel: float = SAME) -> None:
    assert found.grad_norm == pytest.approx(grad_norm, rel=rel)
    assert found.source.recorded_grad_norm == grad_norm
    assert sum(each.share for each in found.trajectories) == pytest.approx(1, abs=rel)
    assert sum(each.share for each in found.groups) == pytest.approx(1, abs=rel)
    for group in found.groups:
        own = [each for each in found.trajectories if each.first.group_id == group.first.group_id]
        assert sum(each.share for each in own) == pytest.approx(group.share, abs=1e-6)
        assert group.norm <= sum(each.norm for each in own) * (1 + SAME)


def test_the_parts_of_a_step_add_up_to_the_recorded_gradient(
    run: PlayedRun, first: Explanation, second: Explanation
) -> None:
    for found in (first, second):
        step = found.source.step.step
        assert found.is_exact and found.replayed_steps == 0
        check_adds_up(found, grad_norm=run.stats[step - 1].statistics["grad_norm"])
        # The group with equal returns has no row, but counts in the weights of the loss.
        assert len(found.trajectories) < 16 and len(found.groups) < 4


def test_each_part_is_the_gradient_of_its_trajectorys_loss(
    run: PlayedRun, first: Explanation
) -> None:
    """Compare with the loss of one trajectory at a time, written out for a transformers model."""
    found = first
    causal_lm = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    members = [entry.trajectory for entry in found.source.step.entries]
    weight = 1 / sum(member.num_trained for member in members)
    gradients = []
    for each in found.trajectories:
        causal_lm.zero_grad()
        rows = zip(each.first.samples, each.entries[0].advantages, strict=True)
        for sample, advantages in rows:
            mask = torch.tensor(sample.mask[1:] == 1)
            current = obvious_logprobs(causal_lm, sample.token_ids)[mask]
            ratio = torch.exp(current - torch.tensor(sample.logprobs[1:])[mask])
            advantage = torch.tensor(advantages)
            clipped = ratio.clamp(0.8, 1.28) * advantage
            (-weight * torch.minimum(ratio * advantage, clipped).sum()).backward()
        parameters = [each for each in causal_lm.parameters() if each.grad is not None]
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
    whole = torch.stack(gradients).sum(0)
    for each, gradient in zip(found.trajectories, gradients, strict=True):
        assert each.norm == pytest.approx(gradient.norm().item(), rel=1e-3)
        share = torch.dot(gradient, whole) / whole.square().sum()
        assert each.share == pytest.approx(share.item(), abs=1e-4)


def test_older_weights_are_reported_and_a_replay_trains_up_to_the_step(
    run: PlayedRun,
) -> None:
    near = explained(run, 4)
    assert not near.is_exact and near.source.weights_step == 1
    shown = describe(near, by="own", top=3)
    assert "of step 1: 2 steps older than those at the start of step 4; --replay" in shown
    exact = explained(run, 4, replays=True)
    assert exact.is_exact and exact.replayed_steps == 2
    check_adds_up(exact, grad_norm=run.grad_norm, rel=1e-3)
    assert abs(near.grad_norm - run.grad_norm) > abs(exact.grad_norm - run.grad_norm)
    assert "and 2 steps trained again from the journal" in describe(exact, by="own", top=3)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"minibatches": 2, "epochs": 2, "loss": {"denominator": "old"}},
        {
            "scale": "none",
            "loss": {
                "aggregation": "prompt_mean",
                "ratio": "sequence",
                "entropy_coefficient": 0.01,
                "kl": {"coefficient": 0.1},
            },
        },
    ],
    ids=["four updates", "reference, entropy, sequences"],
)
@pytest.mark.proof
@pytest.mark.slow
def test_the_parts_of_other_losses_and_of_several_updates_add_up_too(
    tiny_models: dict[bool, str], tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    with played_run(tmp_path / "run", config_of(tiny_models[True], algorithm=algorithm)) as run:
        run.step(small_groups(run.model), saves=True)
        run.step(small_groups(run.model, seed=3, version=1))
    found = explained(run, 2)
    assert found.num_updates == run.stats[1].num_updates
    check_adds_up(found, grad_norm=run.grad_norm, rel=1e-4)


def test_a_critics_advantages_are_taken_from_the_journal(run: PlayedRun) -> None:
    source = find_source(run.run_dir.path, 2)
    critic = replace(source.config.algorithm, baseline=Baseline.CRITIC)
    found = explain_step(replace(source, config=replace(source.config, algorithm=critic)))
    assert found.grad_norm == pytest.approx(run.stats[1].statistics["grad_norm"], rel=SAME)
    shown = describe(found, by="norm", top=1)
    assert "the critic's own update is not in these numbers" in shown


@pytest.mark.proof
@pytest.mark.slow
def test_three_poisoned_trajectories_of_a_hundred_rank_first(
    tiny_models: dict[bool, str], tmp_path: Path
) -> None:
    config = config_of(tiny_models[True], algorithm={"scale": "none"})
    with played_run(tmp_path / "run", config) as run:
        groups = sampled_groups(run.model, num_groups=10, group_size=10, seed=4)
        groups, names = poisoned(groups, run.model, count=3)
        run.step(groups)
    found = explained(run, 1)
    first = ranked(found.trajectories, "own")[:3]
    assert {each.first.trajectory_id for each in first} == names


def test_nonfinite_values_rank_first_and_are_null_in_json(second: Explanation) -> None:
    last = second.trajectories[-1]
    culprit = replace(last, norm=math.inf, share=math.nan, cosine=math.nan)
    found = replace(second, grad_norm=math.nan, trajectories=(*second.trajectories[:-1], culprit))
    for by in get_args(Order):
        assert ranked(found.trajectories, by)[0] is culprit
    assert "THEY DIFFER" in describe(found, by="own", top=3)
    shown = json.loads(json.dumps(document(found, by="own", top=1), allow_nan=False))
    (first,) = shown["trajectories"]
    assert shown["grad_norm"] is None and first["norm"] is None and first["share"] is None


def test_the_command_prints_a_table(run: PlayedRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_explain(run.run_dir.path, 2, top=4)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 120
    norm = f"{run.stats[1].statistics['grad_norm']:.6g}"
    assert f"{norm} recorded: they agree" in shown[2]
    (first,) = (i for i, line in enumerate(shown) if line.startswith("trajectory"))
    assert [line.split()[-1] for line in shown[first + 1 : first + 5]] == ["completed"] * 4
    name = shown[first + 1].split()[0]
    assert shown[-1] == f"to see one: rayloom inspect {run.run_dir.path} {name}"


def test_a_document_has_every_trajectory_in_the_requested_order(second: Explanation) -> None:
    told = json.loads(json.dumps(document(second, by="share", top=None)))
    shares = [each["share"] for each in told["trajectories"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert told["is_exact"] and told["checkpoint"] == "step-000001-t1"
    assert told["grad_norm"] == pytest.approx(told["recorded_grad_norm"])


def refused(run: Path, step: int, *, replays: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        explain_step(find_source(run, step), replays=replays)
    return str(caught.value)


def test_a_step_that_cannot_be_explained_is_refused(run: PlayedRun, tmp_path: Path) -> None:
    place = run.run_dir.path
    assert "--step 9 is not in the journal" in refused(place, 9)
    assert "which has steps 1 to 4" in refused(place, 9)
    alone = written(tmp_path / "alone", step_of([]))
    assert "only a journal" in refused(alone, 1)
    file = list_files(run.run_dir.journal)[0].path
    assert "only a journal" in refused(file, 1)


@pytest.fixture
def without_step_2(run: PlayedRun) -> Iterator[Path]:
    """Hide the journal of step 2, which is after the checkpoint, and yield the run's directory."""
    (file,) = (each.path for each in list_files(run.run_dir.journal) if each.step == 2)
    aside = file.with_suffix(".gone")
    file.rename(aside)
    yield run.run_dir.path
    aside.rename(file)


def test_a_replay_needs_the_journal_of_all_steps_after_the_checkpoint(
    without_step_2: Path,
) -> None:
    assert "--replay needs the journal of steps 2 to 3, got 1 of 2" in refused(
        without_step_2, 4, replays=True
    )


def test_a_missing_model_is_refused(run: PlayedRun) -> None:
    config = run.config
    gone = replace(config, model=replace(config.model, path=str(run.run_dir.path / "gone")))
    run.run_dir.config_file.write_text(dump_config(gone))
    try:
        assert "explain: the model" in refused(run.run_dir.path, 2)
    finally:
        run.run_dir.config_file.write_text(dump_config(config))
