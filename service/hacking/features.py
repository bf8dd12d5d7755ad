"""Describe one step's trajectories as columns of numbers, computed only from the journal.

Lengths, repetition and copying are counted in tokens, without a tokenizer. The columns are small,
because the audit keeps those of the newest hundred steps.

A pattern marks the trajectories that show it. A `Window` compares the share of marked trajectories
in the newest steps with their share in the earlier steps. It also compares the reward of marked and
unmarked trajectories of the same group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from actors.environment.tasks import derived_seed
from actors.journal.files import JournalStep
from actors.merge.report import MAX_COMPONENT_NAME, MAX_COMPONENTS
from actors.types import FinishReason, TokenIds, Trajectory, TurnSpan

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Maximum number of trajectories of a step, in whole groups. Five steps of this size determine a
# share to within three percentage points.
MAX_TRAJECTORIES = 256
# Lengths of compared runs of tokens: shorter runs recur in any text.
REPEATED_RUN, COPIED_RUN = 4, 6
# Smallest lengths in tokens of texts that are compared; shorter texts have too few runs.
MIN_REPEATED_TOKENS, MIN_COPIED_TOKENS = 16, 8
MOST_OF_PROMPT = 0.3
# Length in tokens to which texts are cut.
MAX_TOKENS = 4096
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFeatures:
    """N trajectories of one environment in one step; every column has N values."""

    step: int
    environment: str
    ids: tuple[str, ...]
    task: Ints
    """A code that is equal for trajectories of the same task."""
    group: Ints
    reward: Floats
    """The return, divided by the best possible return if that is known."""
    is_graded: Bools
    """Whether the return is a score; False if the trajectory was cut off before it was scored."""
    num_tokens: Ints
    """Number of sampled tokens."""
    num_turns: Ints
    answer: Ints
    """A code that is equal for equal answers.

    Case and spaces are ignored if the environment reports the answer.
    """
    is_malformed: Bools
    """Whether the last turn is malformed, or has only a stop token."""
    last_reward: Floats
    """Reward of the last turn."""
    repeated: Floats
    """Share of a turn's runs of tokens that already occurred earlier in the turn, in the turn with
    the largest share.

    0 for a short text. Repetitions between turns do not count: all tool calls have equal markup.
    """
    copied: Floats
    """The share of the last turn's tokens in runs that also occur in the first prompt.

    0 for a short turn. Also 0 if less than MOST_OF_PROMPT of the prompt is copied, because a
    question may contain its own answer.
    """
    components: Mapping[str, Floats]
    """Reward components by name; NaN if a trajectory lacks the component."""
    verified: Floats
    """The shadow verifier's verdict, 1 or 0; NaN if there is none."""
    num_missing: int
    """Number of rollouts that are missing from the step's groups.

    It is computed from the members' numbers and the most frequent size of a group.
    """

    @property
    def num_trajectories(self) -> int:
        return len(self.ids)

    def with_verified(self, verdicts: Mapping[str, bool]) -> StepFeatures:
        """Return a copy with a verifier's verdicts, which are given by trajectory id."""
        found = [float(verdicts[name]) if name in verdicts else np.nan for name in self.ids]
        return replace(self, verified=np.array(found, np.float64))


def step_features(step: JournalStep) -> tuple[StepFeatures, ...]:
    """Describe a step, with one result for each environment, in the order of their names."""
    found: dict[str, list[Trajectory]] = {}
    for entry in step.entries:
        found.setdefault(entry.trajectory.environment, []).append(entry.trajectory)
    return tuple(_of_environment(step.step, name, _bounded(found[name])) for name in sorted(found))


def _bounded(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return whole groups with at most MAX_TRAJECTORIES trajectories, or one larger group."""
    if len(trajectories) <= MAX_TRAJECTORIES:
        return list(trajectories)
    groups: dict[str, list[Trajectory]] = {}
    for each in trajectories:
        groups.setdefault(each.group_id, []).append(each)
    kept: list[Trajectory] = []
    # The groups are ordered by a hash, so that the choice is the same each time.
    for group_id in sorted(groups, key=derived_seed):
        if kept and len(kept) + len(groups[group_id]) > MAX_TRAJECTORIES:
            break
        kept += groups[group_id]
    return kept


def _of_environment(step: int, name: str, trajectories: Sequence[Trajectory]) -> StepFeatures:
    sampled = [_sampled(each) for each in trajectories]
    last = [each.turns[-1] if each.turns else None for each in trajectories]
    stop = _stop_token(last, sampled)
    return StepFeatures(
        step=step,
        environment=name,
        ids=tuple(each.trajectory_id for each in trajectories),
        task=_codes([each.task_id for each in trajectories]),
        group=_codes([each.group_id for each in trajectories]),
        reward=np.array([each.episode_return / (each.best_return or 1.0) for each in trajectories]),
        is_graded=np.array([each.is_graded for each in trajectories], np.bool_),
        num_tokens=np.array([each.num_sampled for each in trajectories], np.int64),
        num_turns=np.array([len(each.turns) for each in trajectories], np.int64),
        answer=np.array(
            [_answer_code(*pair) for pair in zip(trajectories, sampled, strict=True)], np.int64
        ),
        is_malformed=np.array(
            [
                _is_malformed(turn, parts[-1], stop)
                for turn, parts in zip(last, sampled, strict=True)
            ],
            np.bool_,
        ),
        last_reward=np.array([turn.reward if turn else 0.0 for turn in last], np.float64),
        repeated=np.array([max(map(_repeated, parts)) for parts in sampled], np.float64),
        copied=np.array(
            [_copied(*pair) for pair in zip(trajectories, sampled, strict=True)], np.float64
        ),
        components=_components(trajectories),
        verified=np.full(len(trajectories), np.nan),
        num_missing=_num_missing(trajectories),
    )


_NOTHING = np.empty(0, np.int32)


def _sampled(trajectory: Trajectory) -> list[TokenIds]:
    """Return the sampled tokens of each turn, in order; one empty array if there are no turns."""
    turns = sorted(
        ((turn.index, sample.token_ids[turn.tokens]) for sample in trajectory.samples
         for turn in sample.turns),
        key=lambda each: each[0],
    )  # fmt: skip
    return [tokens for _, tokens in turns] or [_NOTHING]


def _code(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), signed=True)


def _codes(names: Sequence[str]) -> Ints:
    return np.array([_code(name.encode()) for name in names], np.int64)


def _answer_code(trajectory: Trajectory, sampled: Sequence[TokenIds]) -> int:
    """Return a code that is equal for equal answers."""
    if trajectory.answer is None:
        return _code(sampled[-1].tobytes())
    return _code(" ".join(trajectory.answer.casefold().split()).encode("utf-8", "surrogatepass"))


def _stop_token(last: Sequence[TurnSpan | None], sampled: Sequence[Sequence[TokenIds]]) -> int:
    """Return the most frequent last token of the answers with the finish reason STOP, or -1."""
    ended = [
        parts[-1]
        for turn, parts in zip(last, sampled, strict=True)
        if turn is not None and turn.finish_reason is FinishReason.STOP and parts[-1].size
    ]
    # A stop string may end an answer after one ordinary token. Prefer longer answers.
    counts = Counter(int(each[-1]) for each in [e for e in ended if e.size > 1] or ended)
    return max(counts, key=counts.__getitem__, default=-1)


def _is_malformed(turn: TurnSpan | None, tokens: TokenIds, stop: int) -> bool:
    return turn is not None and (turn.is_malformed or tokens.tolist() in ([], [stop]))


def _runs(tokens: TokenIds, length: int) -> NDArray[np.uint64]:
    """Return a hash of each run of `length` consecutive tokens."""
    whole = tokens[:MAX_TOKENS].astype(np.uint64) + np.uint64(1)
    count = whole.shape[0] - length + 1
    if count < 1:
        return np.empty(0, np.uint64)
    found = np.zeros(count, np.uint64)
    for offset in range(length):
        found = found * _BASE + whole[offset : offset + count]
        found ^= found >> np.uint64(29)
    return found


def _repeated(tokens: TokenIds) -> float:
    """Return the share of a turn's n-grams that occurred earlier in the turn; n is REPEATED_RUN."""
    if tokens.shape[0] < MIN_REPEATED_TOKENS:
        return 0.0
    runs = _runs(tokens, REPEATED_RUN)
    return 1.0 - np.unique(runs).shape[0] / runs.shape[0]


def _copied(trajectory: Trajectory, sampled: Sequence[TokenIds]) -> float:
    tokens = sampled[-1][:MAX_TOKENS]
    if tokens.shape[0] < MIN_COPIED_TOKENS or not trajectory.samples:
        return 0.0
    first = trajectory.samples[0]
    prompt = _runs(first.token_ids[: first.prompt_length], COPIED_RUN)
    runs = _runs(tokens, COPIED_RUN)
    if np.isin(prompt, runs).sum() < MOST_OF_PROMPT * prompt.shape[0]:
        return 0.0
    known = np.isin(runs, prompt)
    is_copied = np.zeros(tokens.shape[0], np.bool_)
    for offset in range(COPIED_RUN):
        is_copied[offset : offset + known.shape[0]] |= known
    return float(is_copied.mean())


def _components(trajectories: Sequence[Trajectory]) -> dict[str, Floats]:
    """Return, by name, each reward component's value for each trajectory, [N].

    The value is the sum over the trajectory's turns; NaN if no turn has the component.
    """
    found: dict[str, Floats] = {}
    for number, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            for name, value in turn.reward_components.items():
                column = found.setdefault(
                    name[:MAX_COMPONENT_NAME], np.full(len(trajectories), np.nan)
                )
                column[number] = value + (0.0 if np.isnan(column[number]) else column[number])
    # As in the step's record, long names were cut, and only the first names are kept.
    return {name: found[name] for name in sorted(found)[:MAX_COMPONENTS]}


def _num_missing(trajectories: Sequence[Trajectory]) -> int:
    """Return how many members of the groups have no trajectory, in all groups together.

    Example: a group with the members 0, 1 and 4 misses two members.
    """
    members: dict[str, set[int]] = {}
    for each in trajectories:
        _, _, member = each.rollout_id.rpartition("-")
        if member.isdecimal():
            members.setdefault(each.group_id, set()).add(int(member))
    sizes = Counter(max(found) + 1 for found in members.values())
    most_frequent = max(sizes, key=sizes.__getitem__, default=0)
    # If most groups have one size, assume that smaller groups lost their last members.
    usual = most_frequent if 2 * sizes[most_frequent] > len(members) else 0
    return sum(max(usual, max(found) + 1) - len(found) for found in members.values())


# Number of newest steps: fewer are noisy, more find patterns later.
RECENT_STEPS = 5
# Smallest number of earlier steps from which the usual values are known.
MIN_EARLIER_STEPS = 8
# Older steps are dropped, so that slow changes become usual.
EARLIER_STEPS = 100
# Smallest number of trajectories in the newest steps for a share.
MIN_TRAJECTORIES = 40
# Smallest number of groups with both kinds of members for a gain.
MIN_MIXED_GROUPS = 4
# A value counts as new if its distance from the earlier values is at least this number of spreads.
# With four and a normal distribution, chance alone gives such a value once in about 30,000. That is
# rare enough for hundreds of steps and ten patterns.
NUM_SPREADS = 4.0
# Factor from the median deviation to the standard deviation, for a normal spread.
MAD_TO_SD = 1.4826


class Window:
    """Consecutive steps of one environment, with N trajectories in which patterns are sought.

    The trajectories of the newest RECENT_STEPS steps are compared with those of the earlier steps.
    """

    def __init__(self, steps: Sequence[StepFeatures]) -> None:
        """Make a window. steps: steps of one environment, in order."""
        self.steps = tuple(steps)

    @property
    def is_enough(self) -> bool:
        return (
            len(self.steps) >= RECENT_STEPS + MIN_EARLIER_STEPS
            and int(self.is_recent.sum()) >= MIN_TRAJECTORIES
        )

    @cached_property
    def place(self) -> Ints:
        """[N], for each trajectory the index of its step in `steps`."""
        counts = [each.num_trajectories for each in self.steps]
        return np.repeat(np.arange(len(self.steps)), counts)

    @cached_property
    def is_recent(self) -> Bools:
        return self.place >= len(self.steps) - RECENT_STEPS

    @cached_property
    def reward(self) -> Floats:
        return self.floats("reward")

    @cached_property
    def is_graded(self) -> Bools:
        return np.concatenate([each.is_graded for each in self.steps])

    @cached_property
    def num_missing(self) -> Ints:
        """[number of steps], number of failed rollouts."""
        return np.array([each.num_missing for each in self.steps])

    @cached_property
    def num_rollouts(self) -> Ints:
        """[number of steps], number of rollouts including failed ones."""
        return np.array([each.num_trajectories for each in self.steps]) + self.num_missing

    @cached_property
    def group(self) -> Ints:
        """[N], codes of the groups; groups of different steps have different codes."""
        return np.concatenate([each.group for each in self.steps]) ^ (self.place << 40)

    def floats(self, name: str) -> Floats:
        return np.concatenate([getattr(each, name) for each in self.steps]).astype(np.float64)

    def ints(self, name: str) -> Ints:
        return np.concatenate([getattr(each, name) for each in self.steps])

    def component(self, name: str) -> Floats:
        return np.concatenate(
            [
                each.components.get(name, np.full(each.num_trajectories, np.nan))
                for each in self.steps
            ]
        )

    @cached_property
    def component_names(self) -> tuple[str, ...]:
        return tuple(sorted({name for each in self.steps for name in each.components}))

    @cached_property
    def scale(self) -> float:
        """The range of returns from the 5th to the 95th percentile, but at least half of the whole
        range.
        """
        known = self.reward[self.is_graded]
        if not known.size:
            return 0.0
        low, high = np.percentile(known, (5, 95))
        return float(max(high - low, (known.max() - known.min()) / 2))

    @cached_property
    def step_numbers(self) -> Ints:
        return np.array([each.step for each in self.steps])

    def means(self, values: Floats, among: Bools) -> Floats:
        """Return each step's mean of `values` over the trajectories in `among`, [number of steps].

        NaN for a step without such trajectories.
        """
        counts = np.bincount(self.place[among], minlength=len(self.steps))
        sums = np.bincount(self.place[among], weights=values[among], minlength=len(self.steps))
        with np.errstate(invalid="ignore"):
            return sums / counts

    def recent_mean(self, values: Floats, among: Bools) -> float:
        """Return the mean over the newest steps' trajectories that `among` selects; NaN if none."""
        chosen = values[among & self.is_recent]
        return float(chosen.mean()) if chosen.size else float("nan")

    def gains(self, mark: Bools) -> Floats | None:
        """Return how much more the marked trajectories of the newest steps earn than the unmarked.

        The array has one value for each group that contains both kinds: the mean reward of the
        marked trajectories, minus the mean reward of the unmarked trajectories. Return None if
        fewer than MIN_MIXED_GROUPS groups contain both kinds.
        mark: for each trajectory of the window, whether it shows a pattern.
        """
        among = self.is_recent & self.is_graded
        marked, groups, rewards = mark[among], self.group[among], self.reward[among]
        _, codes = np.unique(groups, return_inverse=True)
        size = int(codes.max(initial=-1)) + 1
        counts = [np.bincount(codes[m], minlength=size) for m in (marked, ~marked)]
        sums = [
            np.bincount(codes[m], weights=rewards[m], minlength=size) for m in (marked, ~marked)
        ]
        is_mixed = (counts[0] > 0) & (counts[1] > 0)
        if int(is_mixed.sum()) < MIN_MIXED_GROUPS:
            return None
        marked_mean, unmarked_mean = (
            each_sum[is_mixed] / count[is_mixed]
            for each_sum, count in zip(sums, counts, strict=True)
        )
        return marked_mean - unmarked_mean

    def onset(self, values: Floats, *, before: float, now: float) -> int:
        """Return the number of the step at which the values changed from `before` to `now`.

        From this step on, the values are nearer to `now` than to `before`, except at isolated
        steps. values: one value for each step of the window.
        """
        is_new = (values - before) / (now - before) >= 0.5
        first = len(values) - 1
        exceptions = 0
        for number in range(len(values) - 1, -1, -1):
            if is_new[number]:
                first, exceptions = number, 0
                continue
            exceptions += 1
            if exceptions > 1 and number < len(values) - RECENT_STEPS:
                break
        return int(self.step_numbers[first])


def noise(values: Floats) -> float:
    """Return how far earlier steps' values scatter about their trend, as a standard deviation.

    The estimate is robust to outliers. It uses the differences of neighbouring values, on which a
    slow trend has little influence. NaNs are ignored.
    """
    steps = np.diff(values[~np.isnan(values)])
    # The variance of a difference is twice the variance of a value.
    return MAD_TO_SD * float(np.median(np.abs(steps))) / 2**0.5 if steps.size else float("nan")


def usual(values: Floats) -> tuple[float, float]:
    """Return the median and the robust spread of earlier steps' values; NaNs are ignored."""
    known = values[~np.isnan(values)]
    if not known.size:
        return float("nan"), float("nan")
    median = float(np.median(known))
    return median, MAD_TO_SD * float(np.median(np.abs(known - median)))
