"""Tests that each recipe of docs/recipes.md has the gradient of its paper's objective.

One gradient is computed as in a run: configuration of the page, step of the merge, loss of the
trainer. The other is that of the paper's objective J, written here in float64 with a loop for
each sum. The tests compare -dJ / d log p of each sampled token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds.builders.trajectory_builders import make_trajectory, make_turn
from worlds.checks.recipe_page import recipes

from actors.algorithm import Aggregation, RewardSettings
from actors.batch import RowScores
from actors.merge.groups import classify_groups
from actors.merge.step import build_step, trajectory_weights
from actors.trainer.loss.micro_batch import micro_batch_loss
from actors.trainer.model import row_tensors
from service.config.file import parse_config
from service.config.tree import Config

CPU = torch.device("cpu")
CONTEXT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of n tokens: its reward, and arrays of shape [n], float64, in nats."""

    reward: float
    behaviour: Tensor
    old: Tensor
    current: Tensor
    reference: Tensor
    values: Tensor
    """[n]; the values of the states in which the tokens were sampled."""

    @property
    def length(self) -> int:
        return len(self.behaviour)


Group = list[Answer]


def make_answers(
    *rewards: Sequence[float], lengths: Sequence[Sequence[int]], is_on_policy: bool = False
) -> list[Group]:
    """Return groups of answers with float32 values and, unless on policy, ratios of 0.5 to 2."""
    rng = np.random.default_rng(7)

    def draw(low: float, high: float, size: int) -> Tensor:
        return torch.tensor(rng.uniform(low, high, size).astype(np.float32)).double()

    groups = []
    for of_group, sizes in zip(rewards, lengths, strict=True):
        group = []
        for reward, size in zip(of_group, sizes, strict=True):
            behaviour = draw(-3, -1, size)
            old = behaviour if is_on_policy else behaviour + draw(-0.3, 0.3, size)
            current = behaviour if is_on_policy else behaviour + draw(-0.69, 0.69, size)
            group.append(
                Answer(
                    reward=reward,
                    behaviour=behaviour,
                    old=old,
                    current=current.clone().requires_grad_(),
                    reference=behaviour + draw(-0.5, 0.5, size),
                    values=draw(0, 1, size),
                )
            )
        groups.append(group)
    return groups


def config_of(name: str) -> Config:
    tree = {"tasks": {"environment": "guessing"}, **recipes()[name]}
    tree["model"] = {"tiny": {}, "max_context_tokens": CONTEXT, **tree.get("model", {})}
    tree.setdefault("rollouts", {"max_tokens_per_turn": CONTEXT // 2})
    return parse_config(tree, source=name)


def our_gradients(name: str, groups: list[Group], **changes: Any) -> list[np.ndarray]:
    """Return each answer's gradient by the page's configuration, with changes to `algorithm`."""
    settings = config_of(name).step_settings()
    # The division of a step into updates does not belong to an objective.
    algorithm = replace(settings.algorithm, minibatches=1, **changes)
    settings = replace(settings, algorithm=algorithm)
    played = [
        tuple(
            make_trajectory(
                [
                    make_turn(
                        [1 + number],
                        range(10, 10 + each.length),
                        logprobs=each.behaviour.tolist(),
                        reward=each.reward,
                    )
                ],
                rollout_id=f"g{number:06d}.0-{member}",
            )
            for member, each in enumerate(group)
        )
        for number, group in enumerate(groups)
    ]
    classified = [
        tuple(
            replace(member, scores=(scores_of(answer),))
            for member, answer in zip(members, group, strict=True)
        )
        for members, group in zip(classify_groups(played, settings), groups, strict=True)
    ]
    result = build_step(classified, settings, step=1, trainer_version=0)
    answers = [answer for group in groups for answer in group]
    by_token = {
        float(np.float32(value)): (number, at)
        for number, answer in enumerate(answers)
        for at, value in enumerate(answer.behaviour.tolist())
    }
    found = [np.zeros(answer.length) for answer in answers]
    for shard in result.shards:
        for row in (r for part in shard.minibatches for r in part if r.num_trained):
            places = [by_token[float(value)] for value in row.behaviour_logprobs]

            def of(field: str, places: list[tuple[int, int]] = places) -> Tensor:
                values = [getattr(answers[number], field)[at].item() for number, at in places]
                return torch.tensor(values, dtype=torch.float32)

            current = of("current").requires_grad_()
            terms = row_tensors(row, device=CPU).terms(
                current,
                torch.zeros_like(current),
                trainer_version=0,
                old_logprobs=of("old"),
                reference_logprobs=of("reference"),
            )
            (gradient,) = torch.autograd.grad(micro_batch_loss(terms, algorithm.loss).loss, current)
            for (number, at), value in zip(places, gradient.tolist(), strict=True):
                found[number][at] += value
    return found


def scores_of(answer: Answer) -> RowScores:
    """Return the answer's scores; a state's value is at the token before the sampled one."""
    return RowScores(
        reference_logprobs=answer.reference.float().numpy(),
        values=np.append(answer.values.float().numpy(), np.float32(9)),
    )


def paper_gradients(objective: Tensor, groups: list[Group]) -> list[np.ndarray]:
    currents = [answer.current for group in groups for answer in group]
    found = torch.autograd.grad(-objective, currents, allow_unused=True)
    return [
        np.zeros(len(current)) if each is None else each.numpy()
        for current, each in zip(currents, found, strict=True)
    ]


def group_normalised(group: Group, *, by_deviation: bool = True) -> list[float]:
    """Return advantages by GRPO, 2402.03300, 4.1.2; the deviation is by n - 1, plus 1e-6."""
    rewards = [answer.reward for answer in group]
    mean = sum(rewards) / len(rewards)
    if not by_deviation:
        return [reward - mean for reward in rewards]
    deviation = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def clipped(ratio: Tensor, advantage: float | Tensor, low: float, high: float) -> Tensor:
    """Return the term of PPO, equation 7."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def step_normalised(advantages: list[list[float]]) -> list[list[float]]:
    """Normalise by REINFORCE++, equation 10, over all tokens; the 1e-6 is not in the paper."""
    tokens = [value for each in advantages for value in each]
    mean = sum(tokens) / len(tokens)
    deviation = (sum((value - mean) ** 2 for value in tokens) / len(tokens)) ** 0.5
    return [[(value - mean) / (deviation + 1e-6) for value in each] for each in advantages]


def kl_of(answer: Answer) -> list[float]:
    """Return log pi_old / pi_ref at each token."""
    return (answer.behaviour - answer.reference).tolist()


def grpo(groups: list[Group]) -> Tensor:
    """Return J of 2402.03300, (3) and (4): (1/G) sum_i (1/|o_i|) sum_t {min(...) - beta KL_t}."""
    whole = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for answer, advantage in zip(group, group_normalised(group), strict=True):
            ratio = (answer.current - answer.behaviour).exp()
            delta = answer.reference - answer.current
            kl = delta.exp() - delta - 1
            tokens = clipped(ratio, advantage, 0.2, 0.2) - 0.04 * kl
            whole = whole + tokens.sum() / (answer.length * len(group) * len(groups))
    return whole


def dapo(groups: list[Group]) -> Tensor:
    """Return J of 2503.14476, (8): (1 / sum_i |o_i|) sum_i sum_t min(...), over the update."""
    whole = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for answer, advantage in zip(group, group_normalised(group), strict=True):
            ratio = (answer.current - answer.behaviour).exp()
            whole = whole + clipped(ratio, advantage, 0.2, 0.28).sum()
    return whole / num_tokens(groups)


def dr_grpo(groups: list[Group]) -> Tensor:
    """Return J of 2503.20783, 3.2: (1/G) sum_i sum_t min(...) / constant, A = R - mean."""
    whole = torch.zeros((), dtype=torch.float64)
    for group in groups:
        advantages = group_normalised(group, by_deviation=False)
        for answer, advantage in zip(group, advantages, strict=True):
            ratio = (answer.current - answer.behaviour).exp()
            whole = whole + clipped(ratio, advantage, 0.2, 0.28).sum() / len(group)
    return whole / len(groups) / CONTEXT


def rloo(groups: list[Group]) -> Tensor:
    """Return J of 2402.14740, (1) and (7): (1/k) sum_i [R_i - mean of the others] log pi(y_i)."""
    whole = torch.zeros((), dtype=torch.float64)
    for group in groups:
        returns = [answer.reward - 0.05 * sum(kl_of(answer)) for answer in group]
        for answer, own in zip(group, returns, strict=True):
            others = (sum(returns) - own) / (len(group) - 1)
            whole = whole + (own - others) * answer.current.sum() / len(group)
    return whole / len(groups)


def reinforce_plus_plus(groups: list[Group]) -> Tensor:
    """Return J of 2501.03262, (8) to (10): A_t = r - beta sum_{i>=t} KL_i, with PPO's clip."""
    answers = [answer for group in groups for answer in group]
    advantages = step_normalised(
        [
            [answer.reward - 0.01 * sum(kl_of(answer)[t:]) for t in range(answer.length)]
            for answer in answers
        ]
    )
    whole = torch.zeros((), dtype=torch.float64)
    for answer, values in zip(answers, advantages, strict=True):
        ratio = (answer.current - answer.behaviour).exp()
        whole = whole + clipped(ratio, torch.tensor(values).double(), 0.2, 0.2).sum()
    return whole / num_tokens(groups)


def gspo(groups: list[Group]) -> Tensor:
    """Return J of 2507.18071, (5) and (7): s_i = (pi / pi_old)^(1/|y|), one clip per answer."""
    whole = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for answer, advantage in zip(group, group_normalised(group), strict=True):
            ratio = ((answer.current - answer.old).sum() / answer.length).exp()
            whole = whole + clipped(ratio, advantage, 0.0003, 0.0004) / len(group)
    return whole / len(groups)


def cispo(groups: list[Group]) -> Tensor:
    """Return J of 2506.13585, (4) and (5): token mean of sg(min(r, 1 + high)) A log pi."""
    whole = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for answer, advantage in zip(group, group_normalised(group), strict=True):
            weight = (answer.current - answer.behaviour).exp().detach().clamp(max=1.28)
            whole = whole + (weight * advantage * answer.current).sum()
    return whole / num_tokens(groups)


def decoupled(groups: list[Group]) -> Tensor:
    """Return J of 2505.24298, (5): (pi_prox / pi_behav) min(u A, clip(u) A), u = pi / pi_prox."""
    whole = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for answer, advantage in zip(group, group_normalised(group), strict=True):
            weight = (answer.old - answer.behaviour).exp()
            ratio = (answer.current - answer.old).exp()
            whole = whole + (weight * clipped(ratio, advantage, 0.2, 0.28)).sum()
    return whole / num_tokens(groups)


def ppo(groups: list[Group]) -> Tensor:
    """Return J of PPO, (7), (11), (12): delta_t = r_t + V_{t+1} - V_t, A = sum (lambda)^l delta."""
    answers = [answer for group in groups for answer in group]
    advantages = []
    for answer in answers:
        rewards = [-0.01 * kl for kl in kl_of(answer)]
        rewards[-1] += answer.reward
        values = [*answer.values.tolist(), 0.0]
        found, running = [0.0] * answer.length, 0.0
        for t in reversed(range(answer.length)):
            running = rewards[t] + values[t + 1] - values[t] + 0.95 * running
            found[t] = running
        advantages.append(found)
    whole = torch.zeros((), dtype=torch.float64)
    for answer, of_tokens in zip(answers, step_normalised(advantages), strict=True):
        ratio = (answer.current - answer.behaviour).exp()
        whole = whole + clipped(ratio, torch.tensor(of_tokens).double(), 0.2, 0.2).sum()
    return whole / num_tokens(groups)


def num_tokens(groups: list[Group]) -> int:
    return sum(answer.length for group in groups for answer in group)


PAPERS: dict[str, Callable[[list[Group]], Tensor]] = {
    "GRPO": grpo,
    "DAPO": dapo,
    "Dr. GRPO": dr_grpo,
    "RLOO": rloo,
    "REINFORCE++": reinforce_plus_plus,
    "GSPO": gspo,
    "CISPO": cispo,
    "Decoupled PPO, running ahead": decoupled,
    "PPO with a critic": ppo,
}


def test_every_recipe_has_a_formula_in_this_file() -> None:
    assert list(recipes()) == list(PAPERS)


@pytest.mark.parametrize("name", PAPERS)
def test_the_gradient_of_a_recipe_is_that_of_its_papers_objective(name: str) -> None:
    groups = make_answers(
        [1.0, 0.0, 0.0],
        [0.0, 1.0, 0.5],
        lengths=[[1, 3, 4], [2, 5, 3]],
        # RLOO assumes that the current policy has sampled the answers.
        is_on_policy=name == "RLOO",
    )
    expected = paper_gradients(PAPERS[name](groups), groups)
    found = our_gradients(name, groups)
    assert any(np.abs(each).max() > 1e-3 for each in expected)
    for ours, of_paper in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, of_paper, rtol=2e-5, atol=2e-7)


def test_tokens_of_short_and_long_answers_weigh_the_same_in_rloo() -> None:
    groups = make_answers([1.0, 0.0], lengths=[[1, 3]], is_on_policy=True)
    short, long = our_gradients("RLOO", groups, reward=RewardSettings())
    # A = [1, -1] and two answers: 1/2 per token.
    np.testing.assert_allclose(short, [-0.5], atol=1e-7)
    np.testing.assert_allclose(long, [0.5, 0.5, 0.5], atol=1e-7)


def test_token_mean_is_over_all_tokens_and_prompt_mean_within_a_prompt() -> None:
    def weigh(aggregation: Aggregation) -> list[float]:
        return trajectory_weights(
            [6, 2],
            ["a", "b"],
            aggregation=aggregation,
            without_signal=np.zeros(3),
            constant_tokens=1,
        ).tolist()

    assert weigh("token_mean") == [1 / 8, 1 / 8]
    assert weigh("prompt_mean") == [1 / 12, 1 / 4]
