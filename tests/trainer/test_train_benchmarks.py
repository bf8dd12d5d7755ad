"""Tests that both sides of the training-step benchmarks compute the same loss and gradients."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.algorithm import LossSettings
from actors.batch import MicroBatch
from actors.merge.packing import pack_row
from actors.trainer.loss.micro_batch import micro_batch_loss
from actors.trainer.model import PolicyModel, load_policy, row_tensors
from benchmarks.padded_step import accumulate, padded_batches, sorted_batches, turn_rows
from benchmarks.pairs import Seconds, Spread, interleave, ratios_of
from benchmarks.side import Side, StepTaken
from benchmarks.train_inputs import UpdateShape, advantages_of, make_trajectories, weigh

SHAPE = UpdateShape(prompt=9, turns=3, sampled=4, observed=5, groups=2, group_size=3)
VOCABULARY = 500


def our_loss(policy: PolicyModel, row: MicroBatch) -> torch.Tensor:
    tensors = row_tensors(row, device=torch.device("cpu"))
    current, entropies = policy(tensors)
    terms = tensors.terms(current, entropies, trainer_version=0)
    return micro_batch_loss(terms, LossSettings()).loss


def test_an_update_has_one_sample_per_trajectory_and_shares_the_prompts_of_groups() -> None:
    trajectories = make_trajectories(SHAPE, vocabulary=VOCABULARY)
    weighted = weigh(trajectories)
    length = SHAPE.prompt + SHAPE.turns * SHAPE.sampled + (SHAPE.turns - 1) * SHAPE.observed
    assert [each.sample.num_tokens for each in weighted] == [length] * SHAPE.num_trajectories
    assert sum(each.sample.num_trained for each in weighted) == SHAPE.num_trained
    assert sum(each.loss_weight * each.sample.num_trained for each in weighted) == pytest.approx(1)
    tree = pack_row(weighted)
    assert tree.num_tokens == SHAPE.num_trajectories * (length - SHAPE.prompt) + 2 * SHAPE.prompt
    by_group = np.array(advantages_of(trajectories)).reshape(SHAPE.groups, SHAPE.group_size)
    np.testing.assert_allclose(by_group.sum(1), 0, atol=1e-12)
    assert UpdateShape.from_json(SHAPE.to_json()) == SHAPE


@pytest.mark.parametrize("lay_out", [padded_batches, sorted_batches])
@pytest.mark.parametrize("rows_at_once", [4, 100])
def test_padded_rows_of_turns_have_the_loss_and_gradients_of_the_packed_tree(
    tiny_models: dict[bool, str], lay_out, rows_at_once: int
) -> None:
    trajectories = make_trajectories(SHAPE, vocabulary=VOCABULARY)
    policy = load_policy(tiny_models[True], logprob_chunk=10, gradient_checkpointing=False)
    loss = our_loss(policy, pack_row(weigh(trajectories)))
    loss.backward()
    plain = AutoModelForCausalLM.from_pretrained(tiny_models[True], dtype=torch.float32)
    batches = lay_out(turn_rows(trajectories), rows_at_once=rows_at_once)
    assert accumulate(plain, batches, dtype=torch.float32) == pytest.approx(loss.item(), abs=1e-6)
    ours = dict(policy.causal_lm.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=0, atol=2e-5 * scale)


def test_each_round_runs_every_side_once_in_changing_order_and_gives_a_ratio() -> None:
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    results = interleave({name: partial(run, name) for name in "abc"}, num_rounds=2)
    assert "".join(order) == "abccba"
    assert results == {"a": [1, 6], "b": [2, 5], "c": [3, 4]}

    def seconds(*walls: float) -> list[Seconds]:
        return [Seconds(wall_s=wall, cpu_s=2 * wall) for wall in walls]

    # The ratios of the rounds are 2, 4 and 3.
    ratios = ratios_of(seconds(2.0, 4.0, 9.0), seconds(1.0, 1.0, 3.0))
    assert ratios["ratio"] == Spread(median=3.0, lower=2.5, upper=3.5)
    assert Seconds.median(seconds(1.0, 5.0, 2.0)) == Seconds(wall_s=2.0, cpu_s=4.0)


CHILD = """
from benchmarks.pairs import Seconds
from benchmarks.side import StepTaken, serve

def step(command):
    print("not an answer")
    number = float(command)
    return StepTaken(seconds=Seconds(wall_s=1 / number, cpu_s=2.0), loss=number, grad_norm=3.0)

serve(step)
"""


def test_a_side_answers_one_step_at_a_time_and_reports_why_it_ended() -> None:
    with Side([sys.executable, "-c", CHILD], environment={}) as side:
        taken = side.step("4")
        assert taken == StepTaken(seconds=Seconds(wall_s=0.25, cpu_s=2.0), loss=4.0, grad_norm=3.0)
        with pytest.raises(SystemExit, match=r"ended with code 1:(?s:.*)ZeroDivisionError"):
            side.step("0")


OURS = """
import sys
from functools import partial
from pathlib import Path
from benchmarks.side_ours import make_shard, start_rank, train
from benchmarks.train_inputs import UpdateShape, make_trajectories, weigh
model, directory, shape, vocabulary = sys.argv[1:]
trajectories = make_trajectories(UpdateShape.from_json(shape), vocabulary=int(vocabulary))
shard = make_shard(weigh(trajectories), budget=4096)
rank = start_rank(model, Path(directory), num_threads=1)
print(train(rank, shard).statistics["loss"], train(rank, shard).statistics["loss"])
rank.close()
"""


@pytest.mark.proof
@pytest.mark.slow
def test_our_side_repeats_the_same_step(tiny_models: dict[bool, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OURS, tiny_models[True], tmp_path, SHAPE.to_json(), str(VOCABULARY)],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split())
    assert first == pytest.approx(second, abs=1e-6)
