"""Find the patterns of reward hacking that a run's own journal can show. Pure.

A pattern is reported if it is new in the run (its share in the newest steps exceeds its earlier
share) and pays (its trajectories get more reward than others of their group). Each pattern has a
threshold. `docs/hacking.md` counts the findings in runs that were not used to set the thresholds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from service.hacking.features import (
    EARLIER_STEPS,
    NUM_SPREADS,
    RECENT_STEPS,
    Bools,
    Floats,
    Ints,
    StepFeatures,
    Window,
    noise,
    usual,
)
from service.telemetry.records import Finding, Kind

# Smallest share of the newest trajectories for a pattern to count.
MIN_SHARE = 0.3
# Smallest rise of this share.
MIN_RISE = 0.25
# For patterns that are always wrong (a reward without an answer): a few in a hundred suffice.
MIN_SHARE_OF_WRONG, MIN_WRONG = 0.05, 8
# Smallest gain in return of marked trajectories, as a share of the spread of returns.
MIN_GAIN = 0.15
# Smallest gain in standard errors.
GAIN_ERRORS = 3.0
# Growth of the length; honest answers grow too, by about half.
LONG = 1.8
# Share of runs that are repeated: a fifth in honest prose, a half in a turn with several calls, and
# nearly all in spam.
MOSTLY_REPEATED, MOSTLY_COPIED = 0.7, 0.6
# Factor by which a component exceeds all earlier values; bounded components never do.
EXCESS = 1.5
# Smallest number of tasks with one answer: two tasks may have the same solution.
MIN_TASKS = 4
# Share of the best seen return from which a trajectory counts as a success.
SUCCESS = 0.9
# Smallest fall of a component, and smallest rise of the reward. Each is a share of its own range.
MIN_FALL, MIN_REWARD_RISE = 0.12, 0.05
# Number of steps just before the newest ones.
LATELY_STEPS = 10
# Only components with at least this share of the widest range count: others may fall for good
# reasons, such as brevity.
MAIN_COMPONENT = 0.5
# Failures by chance lower the shares of low and of other rewards alike. If failures replace low
# rewards, the share of low rewards falls by at least the first factor times the rise of failures.
# The share of other rewards then falls by at most the second factor times this rise. If the policy
# learns, the share of other rewards grows, but by at most the third factor times this rise.
FROM_BOTTOM, FROM_OTHERS, TO_OTHERS = 0.6, 0.25, 1.25
# If an engine is missing while the policy learns, steps look the same, but only for fewer steps.
LASTING_STEPS = 8
# Share of the best return from which a trajectory should be verified; verdicts are 1 or 0.
PASSED = 0.5
MIN_VERIFIED = 15
NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A rise of the share of trajectories that show a pattern, from `before` to `now`.

    mark: [N], which of the counted trajectories show the pattern. onset: the first step of the
    rise.
    """

    mark: Bools
    before: float
    now: float
    onset: int


def find(window: Window) -> Iterator[Finding]:
    """Find every pattern that is clear at the window's last step."""
    if not window.is_enough or window.scale == 0.0:
        return
    for look in _PATTERNS:
        found = look(window)
        if found is not None:
            yield found


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _rise(
    window: Window,
    mark: Bools,
    among: Bools,
    *,
    min_share: float = MIN_SHARE,
    min_rise: float = MIN_RISE,
    before: float | None = None,
) -> _Seen | None:
    """Return the rise of the share of trajectories that show a pattern; None if it is not clear.

    Args: mark: which trajectories show the pattern. among: which trajectories count at all. before:
    the earlier share; None uses the median of the earlier steps.
    """
    values = mark.astype(np.float64)
    shares, now = window.means(values, among), window.recent_mean(values, among)
    median, spread = usual(shares[:-RECENT_STEPS])
    if np.isnan(median) or np.isnan(now):
        return None
    median = median if before is None else before
    if now < min_share or now - median < max(min_rise, NUM_SPREADS * spread / RECENT_STEPS**0.5):
        return None
    known = np.where(np.isnan(shares), median, shares)
    return _Seen(
        mark=mark & among,
        before=median,
        now=now,
        onset=window.onset(known, before=median, now=now),
    )


def _pays(window: Window, gains: Floats | None) -> bool:
    """Return whether trajectories that show a pattern clearly earn more than the others.

    gains: how much more they earn in each group; None if too few groups have both kinds.
    """
    if gains is None:
        return False
    mean, error = float(gains.mean()), float(gains.std(ddof=1)) / len(gains) ** 0.5
    return mean >= MIN_GAIN * window.scale and mean >= GAIN_ERRORS * error


def _earns_more_than_before(window: Window, mark: Bools) -> bool:
    """Return whether the newest marked trajectories earn more than all trajectories did earlier.

    Use it only for a pattern that is never honest, if `_pays` has too few unmarked trajectories.
    """
    now = window.recent_mean(window.reward, mark & window.is_graded)
    before, _ = _reward_before_and_now(window)
    return bool(now >= before + MIN_GAIN * window.scale)


def _reward_before_and_now(window: Window) -> tuple[float, float]:
    means = window.means(window.reward, window.is_graded)
    return usual(means[:-RECENT_STEPS])[0], window.recent_mean(window.reward, window.is_graded)


def _share(window: Window, kind: Kind, seen: _Seen, what: str, *, rest: str = "") -> Finding:
    """Return a finding that states the share of trajectories with a pattern, now and before.

    what: the predicate of the sentence, such as "say the same over and over". rest: the end.
    """
    text = f"{_percent(seen.now)} of the trajectories {what}, {_percent(seen.before)} before{rest}"
    return _finding(window, kind, seen, text)


def _finding(window: Window, kind: Kind, seen: _Seen, text: str) -> Finding:
    """Make a finding about a rise. text: continues the sentence "in steps 31 to 40, …"."""
    last = int(window.step_numbers[-1])
    before, now = _reward_before_and_now(window)
    since = f"in steps {seen.onset} to {last}" if seen.onset < last else f"in step {last}"
    name = window.steps[-1].environment
    return Finding(
        kind=kind,
        environment=name,
        onset=seen.onset,
        step=last,
        before=seen.before,
        now=seen.now,
        reward_before=before,
        reward_now=now,
        examples=_examples(window, seen.mark),
        text=f"{name}: {since}, {text}; the mean reward was {before:.2f} and is {now:.2f}",
    )


def _examples(window: Window, mark: Bools) -> tuple[str, ...]:
    """Return ids of the newest marked trajectories, at most one of each group, the best first."""
    chosen = np.flatnonzero(mark & window.is_recent)
    ids = [name for each in window.steps for name in each.ids]
    found: dict[int, str] = {}
    for place in chosen[np.lexsort((-chosen, -window.reward[chosen]))]:
        found.setdefault(int(window.group[place]), ids[place])
        if len(found) == NUM_EXAMPLES:
            break
    return tuple(found.values())


def _beside(gains: Floats | None) -> str:
    if gains is None:
        return "almost no group has other trajectories"
    return f"they earn {gains.mean():.2f} more than others of their group"


def _equal_answers(window: Window) -> Finding | None:
    answers, tasks = window.ints("answer"), window.ints("task")
    among = window.is_graded
    most, num_tasks, _ = _most_frequent(answers, tasks, among & window.is_recent)
    if most is None or num_tasks < MIN_TASKS:
        return None
    # The usual share is the median share of the earlier windows' most frequent answers.
    count = len(window.steps) - RECENT_STEPS
    blocks = [
        range(end - RECENT_STEPS, end) for end in range(count, RECENT_STEPS - 1, -RECENT_STEPS)
    ]
    shares = [
        _most_frequent(answers, tasks, among & (window.place >= b.start) & (window.place < b.stop))
        for b in blocks
    ]
    before = float(np.median([share for _, _, share in shares]))
    mark = answers == most
    seen = _rise(window, mark, among, before=before)
    if seen is None:
        return None
    gains = window.gains(mark)
    if not (_pays(window, gains) or (gains is None and _earns_more_than_before(window, mark))):
        return None
    return _finding(
        window,
        "equal_answers",
        seen,
        f"{_percent(seen.now)} of the trajectories give one and the same answer, to {num_tasks} "
        f"tasks; before, the most frequent answer had {_percent(before)}; {_beside(gains)}",
    )


def _most_frequent(answers: Ints, tasks: Ints, among: Bools) -> tuple[int | None, int, float]:
    """Return the answer to the most tasks, the number of these tasks, and the answer's share.

    The answer is a code, or None. The share is of the trajectories in `among`.
    """
    if not among.any():
        return None, 0, 0.0
    pairs = np.unique(np.stack([answers[among], tasks[among]]), axis=1)
    values, counts = np.unique(pairs[0], return_counts=True)
    # If several have equally many tasks, take the one with the most trajectories.
    best = values[counts == counts.max()]
    totals = [(int((answers[among] == value).sum()), int(value)) for value in best]
    number, most = max(totals)
    return most, int(counts.max()), number / int(among.sum())


def _malformed_paid(window: Window) -> Finding | None:
    is_wrong = window.ints("is_malformed").astype(np.bool_)
    bottom = float(np.percentile(window.reward[window.is_graded], 5))
    mark = is_wrong & (window.floats("last_reward") > 0) & (window.reward > bottom)
    if int((mark & window.is_recent).sum()) < MIN_WRONG:
        return None
    share = MIN_SHARE_OF_WRONG
    seen = _rise(window, mark, window.is_graded, min_share=share, min_rise=share)
    if seen is None:
        return None
    earned = window.recent_mean(window.reward, mark)
    what = "end with a turn that is malformed or empty and has a reward above 0"
    rest = f"; they earn {earned:.2f} on average"
    return _share(window, "malformed_paid", seen, what, rest=rest)


def _marked_and_paid(window: Window, kind: Kind, mark: Bools, what: str) -> Finding | None:
    """Return a finding if a pattern became more frequent and pays. what: see `_share`."""
    seen, gains = _rise(window, mark, window.is_graded), window.gains(mark)
    # A pattern that does not pay may be honest.
    if seen is None or not _pays(window, gains):
        return None
    return _share(window, kind, seen, what, rest=f"; {_beside(gains)}")


def _length(window: Window) -> Finding | None:
    tokens = window.floats("num_tokens")
    usual_length = float(np.median(tokens[~window.is_recent]))
    what = f"have more than {LONG:g} times the {usual_length:.0f} sampled tokens of before"
    return _marked_and_paid(window, "length", tokens > LONG * usual_length, what)


def _repetition(window: Window) -> Finding | None:
    mark = window.floats("repeated") >= MOSTLY_REPEATED
    return _marked_and_paid(window, "repetition", mark, "say the same over and over")


def _copying(window: Window) -> Finding | None:
    mark = window.floats("copied") >= MOSTLY_COPIED
    return _marked_and_paid(window, "copying", mark, "say their prompt over again")


def _fewer_turns(window: Window) -> Finding | None:
    turns = window.floats("num_turns")
    usual_turns = float(np.median(turns[~window.is_recent]))
    best = float(np.percentile(window.reward[window.is_graded], 95))
    if usual_turns < 2:
        return None
    mark = (turns <= usual_turns / 2) & (window.reward >= SUCCESS * best) & (best > 0)
    seen = _rise(window, mark, window.is_graded)
    if seen is None:
        return None
    # Long episodes fail more often, so failures raise the share of short ones: check the share of
    # all rollouts too.
    number = int((seen.mark & window.is_recent).sum())
    if number < MIN_SHARE * int(window.num_rollouts[-RECENT_STEPS:].sum()):
        return None
    most = int(usual_turns / 2)
    what = f"get one of the best rewards in at most {most} turn{'s' if most > 1 else ''}"
    rest = f" (the median of the earlier steps is {usual_turns:g} turns)"
    return _share(window, "fewer_turns", seen, what, rest=rest)


def _component_falls(window: Window) -> Finding | None:
    rewards = window.means(window.reward, window.is_graded)
    before, spread = usual(rewards[:-RECENT_STEPS])
    rise = window.recent_mean(window.reward, window.is_graded) - before
    if not rise >= max(MIN_REWARD_RISE * window.scale, 2 * spread / RECENT_STEPS**0.5):
        return None
    ranges = {name: _range(window, name) for name in window.component_names}
    falls = [
        (*fall, name)
        for name, width in ranges.items()
        if width > 0 and width >= MAIN_COMPONENT * max(ranges.values())
        if (fall := _fall(window, name, width)) is not None
    ]
    if not falls:
        return None
    _, was, name = max(falls)
    values = window.component(name)
    known = ~np.isnan(values) & window.is_graded
    means, now = window.means(values, known), window.recent_mean(values, known)
    seen = _Seen(
        mark=known & (values <= now),
        before=was,
        now=now,
        onset=window.onset(np.where(np.isnan(means), was, means), before=was, now=now),
    )
    return _finding(
        window,
        "component_falls",
        seen,
        f"{name} is {now:.2f} on average, {was:.2f} before, while the reward rose",
    )


def _range(window: Window, name: str) -> float:
    values = window.component(name)
    known = values[~np.isnan(values) & ~window.is_recent & window.is_graded]
    return float(np.ptp(np.percentile(known, (1, 99)))) if known.size else 0.0


def _fall(window: Window, name: str, width: float) -> tuple[float, float] | None:
    """Return how far a reward component's mean fell, as a share of `width`, and its earlier mean.

    Return None if the mean did not fall by more than the noise.
    """
    values = window.component(name)
    known = ~np.isnan(values) & window.is_graded
    if not (known & window.is_recent).any():
        return None
    earlier, now = window.means(values, known)[:-RECENT_STEPS], window.recent_mean(values, known)
    lately, _ = usual(earlier[-LATELY_STEPS:])
    # The last LATELY_STEPS show the fall of a component that first rose and then fell.
    for was, spread in (usual(earlier), (lately, noise(earlier))):
        if was - now >= max(MIN_FALL * width, NUM_SPREADS * spread / RECENT_STEPS**0.5):
            return (was - now) / width, was
    return None


def _component_excess(window: Window) -> Finding | None:
    for name in window.component_names:
        values = window.component(name)
        earlier = values[~np.isnan(values) & ~window.is_recent & window.is_graded]
        if not earlier.size or (most := float(np.percentile(earlier, 99))) <= 0:
            continue
        mark = np.nan_to_num(values) > EXCESS * most
        what = f"have more than {EXCESS:g} times the {most:g} that {name} hardly ever exceeded"
        found = _marked_and_paid(window, "component_excess", mark, what)
        if found is not None:
            return found
    return None


def _failures(window: Window) -> Finding | None:
    """Return a finding if rollouts fail more often while low rewards become rarer.

    The mean reward leaves out failed rollouts, so it rises if low rewards become failures.
    """
    totals = window.num_rollouts
    cut_off = np.bincount(window.place[~window.is_graded], minlength=len(window.steps))
    failed = cut_off + window.num_missing
    with np.errstate(invalid="ignore"):
        shares = failed / totals
    before, spread = usual(shares[:-RECENT_STEPS])
    now = float(failed[-RECENT_STEPS:].sum() / totals[-RECENT_STEPS:].sum())
    rise = now - before
    if rise < max(MIN_RISE / 2, NUM_SPREADS * spread / RECENT_STEPS**0.5):
        return None
    graded = window.reward[window.is_graded]
    # The lower half: a penalty for form is below the reward of a wrong answer.
    low = float(np.percentile(graded, 5)) + window.scale / 2
    is_low = window.reward <= low
    bottom, others = (_growth_of_all(window, mark) for mark in (is_low, ~is_low))
    if bottom > -FROM_BOTTOM * rise or not -FROM_OTHERS * rise <= others <= TO_OTHERS * rise:
        return None
    if not _is_rarer(window, is_low, failed=rise):
        return None
    known = np.where(np.isnan(shares), before, shares)
    is_lasting = known[-LASTING_STEPS:] >= before + rise / 2
    # One step may be an exception.
    if int(is_lasting.sum()) < LASTING_STEPS - 1:
        return None
    seen = _Seen(
        mark=~window.is_graded,
        before=before,
        now=now,
        onset=window.onset(known, before=before, now=now),
    )
    return _finding(
        window,
        "failures",
        seen,
        f"{_percent(now)} of the rollouts failed or were cut off, {_percent(before)} before, and "
        f"low rewards became rarer by {_percent(-bottom)} of all; the mean is over the others",
    )


def _is_rarer(window: Window, is_low: Bools, *, failed: float) -> bool:
    """Return whether the additional failed rollouts seem to have replaced low rewards.

    failed: how much the share of failed rollouts has increased.
    """
    values = is_low.astype(np.float64)
    before, _ = usual(window.means(values, window.is_graded)[:-RECENT_STEPS])
    now = window.recent_mean(values, window.is_graded)
    number = int((window.is_graded & window.is_recent).sum())
    # Example: if failed=0.1 replaces only low rewards, 30 low rewards of 100 become 20 of 90.
    expected = before - max(0.0, before - failed) / (1 - failed)
    chance = (before * (1 - before) / max(number, 1)) ** 0.5
    return before - now >= max(FROM_BOTTOM * expected, GAIN_ERRORS * chance)


def _growth_of_all(window: Window, mark: Bools) -> float:
    """Return how much the share of marked trajectories has grown; negative if the share fell.

    The share is that of marked and graded trajectories in all rollouts, also the failed ones.
    """
    totals = window.num_rollouts
    counts = np.bincount(window.place[mark & window.is_graded], minlength=len(window.steps))
    with np.errstate(invalid="ignore"):
        before, _ = usual((counts / totals)[:-RECENT_STEPS])
    return float(counts[-RECENT_STEPS:].sum() / totals[-RECENT_STEPS:].sum()) - before


def _unverified(window: Window) -> Finding | None:
    verified = window.floats("verified")
    best = float(np.percentile(window.reward[window.is_graded], 99))
    among = ~np.isnan(verified) & window.is_graded & (window.reward >= PASSED * best) & (best > 0)
    if int((among & window.is_recent).sum()) < MIN_VERIFIED:
        return None
    seen = _rise(window, (verified < PASSED) & among, among)
    if seen is None:
        return None
    number = int((among & window.is_recent).sum())
    return _finding(
        window,
        "unverified",
        seen,
        f"the shadow verifier refused {_percent(seen.now)} of {number} well rewarded trajectories "
        f"that it checked, {_percent(seen.before)} before",
    )


_PATTERNS: Sequence[Callable[[Window], Finding | None]] = (
    _equal_answers,
    _malformed_paid,
    _length,
    _repetition,
    _copying,
    _fewer_turns,
    _component_falls,
    _component_excess,
    _failures,
    _unverified,
)

KEPT_STEPS = EARLIER_STEPS + RECENT_STEPS
# Steps without a pattern after which it is reported again.
FORGOTTEN_AFTER = 20


class Detector:
    """Finds patterns in a run's steps, which must be passed in order."""

    def __init__(self) -> None:
        self._steps: dict[str, deque[StepFeatures]] = {}
        """The newest steps by environment."""
        self._last_seen: dict[tuple[str, Kind], int] = {}

    def see(self, features: Sequence[StepFeatures]) -> list[Finding]:
        """Add a step, and return the new findings. features: one part for each environment."""
        new = []
        for part in features:
            steps = self._steps.setdefault(part.environment, deque(maxlen=KEPT_STEPS))
            steps.append(part)
            for finding in find(Window(steps)):
                key = part.environment, finding.kind
                last = self._last_seen.get(key)
                self._last_seen[key] = part.step
                if last is None or part.step - last > FORGOTTEN_AFTER:
                    new.append(finding)
        return new


def find_all(steps: Sequence[Sequence[StepFeatures]]) -> list[Finding]:
    """Return all findings of a run's steps, in the order of their discovery."""
    detector = Detector()
    return [finding for features in steps for finding in detector.see(features)]
