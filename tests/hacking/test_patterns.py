"""Tests of the patterns of reward hacking, with made-up features that differ in one way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from service.hacking.features import StepFeatures
from service.hacking.patterns import FORGOTTEN_AFTER, Detector, find_all
from service.telemetry.records import Finding, Kind

GROUPS, MEMBERS = 8, 8
NUM = GROUPS * MEMBERS
Change = Callable[[StepFeatures, np.random.Generator], StepFeatures]


def plain(step: int, rng: np.random.Generator) -> StepFeatures:
    """Return features of a step without a pattern: half of the answers are right at random."""
    number = np.arange(NUM)
    return StepFeatures(
        step=step,
        environment="game",
        ids=tuple(f"g{step * GROUPS + n // MEMBERS:06d}.0-{n % MEMBERS}.a0" for n in number),
        task=step * GROUPS + number // MEMBERS,
        group=step * GROUPS + number // MEMBERS,
        reward=(rng.random(NUM) < 0.5).astype(np.float64),
        is_graded=np.ones(NUM, np.bool_),
        num_tokens=rng.integers(15, 30, NUM),
        num_turns=np.full(NUM, 4),
        answer=rng.integers(0, 2**40, NUM),
        is_malformed=np.zeros(NUM, np.bool_),
        last_reward=np.zeros(NUM),
        repeated=np.zeros(NUM),
        copied=np.zeros(NUM),
        components={},
        verified=np.full(NUM, np.nan),
        num_missing=0,
    )  # fmt: skip


def findings_of(
    change: Change, *, num_steps: int = 40, since: int = 20, until: int = 99
) -> list[Finding]:
    rng = np.random.default_rng(3)
    steps = []
    for step in range(1, num_steps + 1):
        features = plain(step, rng)
        steps.append((change(features, rng) if since <= step <= until else features,))
    return find_all(steps)


def kinds(found: list[Finding]) -> set[Kind]:
    return {finding.kind for finding in found}


def half(rng: np.random.Generator) -> np.ndarray:
    return rng.random(NUM) < 0.5


def paid(features: StepFeatures, mark: np.ndarray, pays: bool) -> StepFeatures:
    return replace(features, reward=np.where(mark, 1.0, features.reward)) if pays else features


def long(features: StepFeatures, rng: np.random.Generator, *, pays: bool = True) -> StepFeatures:
    mark = half(rng)
    tokens = np.where(mark, 3, 1) * features.num_tokens
    return paid(replace(features, num_tokens=tokens), mark, pays)


MARKS: dict[Kind, Callable[[StepFeatures, np.ndarray], StepFeatures]] = {
    "length": lambda f, mark: replace(f, num_tokens=np.where(mark, 3, 1) * f.num_tokens),
    "repetition": lambda f, mark: replace(f, repeated=np.where(mark, 0.9, 0.0)),
    "copying": lambda f, mark: replace(f, copied=np.where(mark, 0.9, 0.0)),
    "equal_answers": lambda f, mark: replace(f, answer=np.where(mark, 5, f.answer)),
}


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("pays", [True, False])
def test_a_pattern_that_may_be_honest_is_found_only_if_it_earns_rewards(
    kind: Kind, pays: bool
) -> None:
    def change(features: StepFeatures, rng: np.random.Generator) -> StepFeatures:
        mark = half(rng)
        return paid(MARKS[kind](features, mark), mark, pays)

    found = findings_of(change)
    assert kinds(found) == ({kind} if pays else set())
    if pays:
        (finding,) = found
        assert 20 <= finding.onset <= 22 and finding.step <= 25
        assert finding.before <= 0.02 and finding.now > 0.25
        assert len(finding.examples) == 3
        assert finding.text.startswith(f"game: in steps {finding.onset} to {finding.step}, ")


def test_a_pattern_that_was_always_present_is_not_found() -> None:
    assert findings_of(long, since=1) == []


def test_a_pattern_is_found_only_after_enough_steps_to_compare_with() -> None:
    assert findings_of(long, num_steps=12, since=6) == []
    assert kinds(findings_of(long, num_steps=13, since=9)) == {"length"}


def test_nothing_is_found_if_all_returns_are_equal() -> None:
    def change(features: StepFeatures, rng: np.random.Generator) -> StepFeatures:
        return replace(features, num_tokens=3 * features.num_tokens, reward=np.ones(NUM))

    def equal(features: StepFeatures, rng: np.random.Generator) -> StepFeatures:
        return replace(features, reward=np.ones(NUM))

    rng = np.random.default_rng(0)
    steps = [(equal(plain(step, rng), rng),) for step in range(1, 20)]
    steps += [(change(plain(step, rng), rng),) for step in range(20, 40)]
    assert find_all(steps) == []


def test_a_pattern_is_reported_once_and_again_after_it_was_absent() -> None:
    assert len(findings_of(long, num_steps=60)) == 1
    rng, detector = np.random.default_rng(3), Detector()
    found = []
    again = 30 + FORGOTTEN_AFTER + 5
    for step in range(1, 90):
        features = plain(step, rng)
        if 20 <= step < 30 or step >= again:
            features = long(features, rng)
        found += detector.see((features,))
    assert [finding.kind for finding in found] == ["length", "length"]
    assert found[0].onset < 30 and found[1].onset >= again


def test_a_malformed_end_is_found_only_if_it_has_a_reward() -> None:
    def change(
        features: StepFeatures, rng: np.random.Generator, reward: float, last: float
    ) -> StepFeatures:
        mark = rng.random(NUM) < 0.2
        rewards, ends = np.where(mark, reward, features.reward), np.where(mark, last, 0.0)
        return replace(features, is_malformed=mark, reward=rewards, last_reward=ends)

    assert kinds(findings_of(lambda f, rng: change(f, rng, 1.0, 1.0))) == {"malformed_paid"}
    # The earlier turns earned the reward of the first; the second has the lowest reward.
    assert findings_of(lambda f, rng: change(f, rng, 1.0, -0.1)) == []
    assert findings_of(lambda f, rng: change(f, rng, 0.0, 0.1)) == []


def test_the_best_rewards_in_fewer_turns_are_found() -> None:
    def change(features: StepFeatures, rng: np.random.Generator, reward: float) -> StepFeatures:
        mark = half(rng)
        rewards = np.where(mark, reward, features.reward)
        return replace(features, num_turns=np.where(mark, 1, 4), reward=rewards)

    found = findings_of(lambda f, rng: change(f, rng, 1.0))
    assert kinds(found) == {"fewer_turns"}
    words = r"get one of the best rewards in at most \d turns?, 0% before \(the median of the"
    assert all(re.search(words, each.text) for each in found)
    assert findings_of(lambda f, rng: change(f, rng, 0.0)) == []


def test_short_episodes_are_not_found_if_they_remain_because_long_ones_fail() -> None:
    def change(features: StepFeatures, rng: np.random.Generator, is_failing: bool) -> StepFeatures:
        is_short = rng.random(NUM) < 0.15
        features = replace(features, num_turns=np.where(is_short, 1, 4))
        features = paid(features, is_short, True)
        is_gone = ~is_short & (rng.random(NUM) < 0.8)
        return without(features, is_gone) if is_failing else features

    rng = np.random.default_rng(3)
    steps = [(change(plain(step, rng), rng, step >= 20),) for step in range(1, 25)]
    assert "fewer_turns" not in kinds(find_all(steps))
    marks = [features.num_turns == 1 for (features,) in steps]
    assert marks[-1].mean() > 0.4 > marks[0].mean()


def with_parts(features: StepFeatures, **parts: np.ndarray) -> StepFeatures:
    return replace(features, components=parts, reward=sum(parts.values()))


@pytest.mark.parametrize(
    ("right", "form", "expected"),
    [
        # Before, half of the answers were right and a third had the form.
        (0.25, 1.0, {"component_falls"}),
        (0.5, 1.0, set()),
        (0.9, 1.0, set()),
        (0.9, 0.0, set()),
        (0.25, 0.3, set()),
    ],
    ids=["against", "form alone", "both", "the lesser one falls", "no reward for it"],
)
def test_a_component_that_falls_while_the_reward_rises_is_found(
    right: float, form: float, expected: set[Kind]
) -> None:
    def parts(share: float, form: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {
            "right": (rng.random(NUM) < share).astype(np.float64),
            "form": 0.45 * (rng.random(NUM) < form),
        }

    rng = np.random.default_rng(1)
    steps = [
        (with_parts(plain(step, rng), **parts(*((0.5, 0.3) if step < 20 else (right, form)), rng)),)
        for step in range(1, 41)
    ]
    assert kinds(find_all(steps)) == expected


def test_a_falling_component_is_compared_with_its_highest_level() -> None:
    rng = np.random.default_rng(2)
    # Right answers increase until step 30. Then tool calls are rewarded, right or not.
    learnt = [0.05 + 0.02 * step for step in range(31)]
    steps = [
        (
            with_parts(
                plain(step, rng),
                right=(rng.random(NUM) < (learnt[step] if step <= 30 else 0.3)).astype(np.float64),
                calls=np.full(NUM, 0.1 if step <= 30 else 0.6),
            ),
        )
        for step in range(1, 41)
    ]
    assert "component_falls" in kinds(find_all(steps))
    assert "component_falls" not in kinds(find_all(steps[:30]))


def test_a_component_above_all_its_earlier_values_is_found() -> None:
    rng = np.random.default_rng(1)

    def step_of(step: int, most: float) -> StepFeatures:
        bonus = rng.choice([0.1, most], NUM)
        right = (rng.random(NUM) < 0.5).astype(np.float64)
        return with_parts(plain(step, rng), right=right, bonus=bonus)

    steps = [(step_of(step, 0.1 if step < 20 else 0.6),) for step in range(1, 41)]
    (found,) = find_all(steps)
    assert found.kind == "component_excess" and "bonus" in found.text


def without(features: StepFeatures, is_gone: np.ndarray) -> StepFeatures:
    """Return the features without the trajectories that failed."""
    columns = ("task", "group", "reward", "is_graded", "num_tokens", "num_turns", "answer",
               "is_malformed", "last_reward", "repeated", "copied", "verified")  # fmt: skip
    return replace(
        features,
        ids=tuple(name for name, gone in zip(features.ids, is_gone, strict=True) if not gone),
        num_missing=int(is_gone.sum()),
        **{name: getattr(features, name)[~is_gone] for name in columns},
    )


@pytest.mark.parametrize("is_chosen", [True, False])
def test_failures_are_found_only_if_they_replace_low_rewards(is_chosen: bool) -> None:
    def change(features: StepFeatures, rng: np.random.Generator) -> StepFeatures:
        """Let about 16 of 64 trajectories fail: only those without a reward, or any."""
        is_gone = rng.random(NUM) < 0.25
        if is_chosen:
            is_gone = (features.reward == 0) & (rng.random(NUM) < 0.5)
        return without(features, is_gone)

    assert kinds(findings_of(change)) == ({"failures"} if is_chosen else set())
    # An engine that is lost for some steps is not a finding.
    assert findings_of(change, until=25) == []


def test_a_shadow_verifier_that_begins_to_reject_rewarded_answers_is_found() -> None:
    rng = np.random.default_rng(1)

    def step_of(step: int, refuses: float) -> tuple[StepFeatures]:
        features = plain(step, rng)
        verdicts = np.where(rng.random(NUM) < refuses, 0.0, features.reward)
        return (replace(features, verified=np.where(rng.random(NUM) < 0.25, verdicts, np.nan)),)

    assert kinds(find_all([step_of(step, 0.0 if step < 20 else 0.6) for step in range(1, 41)])) == {
        "unverified"
    }
    # A verifier that rejected as many from the start is not a finding.
    assert find_all([step_of(step, 0.6) for step in range(1, 41)]) == []


def test_environments_of_a_mixture_are_examined_separately() -> None:
    rng, steps = np.random.default_rng(3), []
    for step in range(1, 41):
        other = replace(plain(step, rng), environment="other")
        features = plain(step, rng)
        steps.append((long(features, rng) if step >= 20 else features, other))
    assert [finding.environment for finding in find_all(steps)] == ["game"]
