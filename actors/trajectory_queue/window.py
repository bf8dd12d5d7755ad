"""The admission window: it bounds the policy age by admission, not by discarding work.

P groups make a step (`groups_per_step`). Groups are numbered k = 0, 1, 2, ... at admission, steps
from 1. Group k may be admitted if floor(k / P) <= v + S, where v is the version that every ready
engine holds, and S is `max_lag`. A step takes P closed groups, one at a time, each from W
consecutive group numbers (`window_groups`). The first of these numbers is the oldest that no step
has taken.

Invariant: no token is older than S + ceil((W - 1) / P) versions when it is trained. Proof: if n
groups are taken before group k, their numbers are below k + W and differ from k, so n <= k + W - 1.
Group k is trained by version floor(n / P) and was admitted at version floor(k / P) - S or later. A
step that is rolled back counts as never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.algorithm import AlgorithmSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSnapshot:
    """The state of the admission window that a checkpoint stores."""

    loaded_version: int = 0
    """The newest version that every ready engine held."""

    next_step: int = 1
    """The step that is being collected."""

    oldest: int = 0
    """The smallest group number that no step has taken."""

    taken_beyond: tuple[int, ...] = ()
    """The taken group numbers above `oldest`, ascending."""

    taken: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The groups of each step that was taken and is not finalised yet, by step."""


class AdmissionWindow:
    """The state machine that admits group numbers and chooses the closed groups of the next
    step.
    """

    def __init__(
        self,
        algorithm: AlgorithmSettings,
        *,
        num_steps: int | None = None,
        snapshot: WindowSnapshot | None = None,
    ) -> None:
        """Create a window. num_steps: steps of the whole run, beyond which no group is admitted;
        None for no limit.
        """
        self._algorithm = algorithm
        self._num_steps = num_steps
        snapshot = snapshot or WindowSnapshot()
        self._loaded_version = snapshot.loaded_version
        self._next_step = snapshot.next_step
        self._oldest = snapshot.oldest
        self._beyond = set(snapshot.taken_beyond)
        self._taken = dict(snapshot.taken)

    @property
    def loaded_version(self) -> int:
        return self._loaded_version

    @property
    def next_step(self) -> int:
        """The number of the step that is being collected."""
        return self._next_step

    @property
    def oldest(self) -> int:
        """The smallest group number that no step has taken."""
        return self._oldest

    @property
    def admissible_end(self) -> int:
        """The lowest group number that is not admissible: P (v + S + 1), or the end of the run."""
        algorithm = self._algorithm
        num_steps = self._loaded_version + algorithm.max_lag + 1
        if self._num_steps is not None:
            num_steps = min(num_steps, self._num_steps)
        return num_steps * algorithm.groups_per_step

    def is_taken(self, number: int) -> bool:
        return number < self._oldest or number in self._beyond

    def set_loaded_version(self, version: int) -> None:
        """Record that every ready engine holds `version`.

        Raises: ValueError if it is lower than the previous version.
        """
        if version < self._loaded_version:
            raise ValueError(
                f"window: got version {version}, expected at least {self._loaded_version}, which "
                "is loaded; versions only grow within a term: to go back, start a new term from a "
                "snapshot"
            )
        self._loaded_version = version

    def collecting(self) -> list[int]:
        """Return the P oldest untaken numbers; a step can be taken if these groups are closed."""
        numbers: list[int] = []
        number = self._oldest
        while len(numbers) < self._algorithm.groups_per_step:
            if number not in self._beyond:
                numbers.append(number)
            number += 1
        return numbers

    def choose(self, is_closed: Callable[[int], bool]) -> tuple[int, ...] | None:
        """Return the P groups that the next step would take, in the order of taking; None if the
        step cannot be completed yet.
        """
        oldest, beyond = self._oldest, set(self._beyond)
        chosen: list[int] = []
        while len(chosen) < self._algorithm.groups_per_step:
            reach = range(oldest, oldest + self._algorithm.window)
            number = next((k for k in reach if k not in beyond and is_closed(k)), None)
            if number is None:
                return None
            chosen.append(number)
            beyond.add(number)
            oldest = _advance(oldest, beyond)
        return tuple(chosen)

    def take(self, is_closed: Callable[[int], bool]) -> tuple[int, tuple[int, ...]] | None:
        """Take the next step's groups; return (step, numbers), or None if the step is
        incomplete.
        """
        chosen = self.choose(is_closed)
        if chosen is None:
            return None
        step = self._next_step
        self._beyond.update(chosen)
        self._oldest = _advance(self._oldest, self._beyond)
        self._taken[step] = chosen
        self._next_step += 1
        return step, chosen

    def taken_groups(self, step: int) -> tuple[int, ...]:
        """Return the groups of a step that was taken and is not finalised.

        Raises: ValueError if there is no such step.
        """
        if step not in self._taken:
            raise ValueError(
                f"window: step {step} is not taken, expected one of {sorted(self._taken)}, which "
                "are taken and not finalised"
            )
        return self._taken[step]

    def finalise(self, step: int) -> None:
        """Forget a step. Steps are finalised in order.

        Raises: ValueError if the step was not taken or an earlier one is not finalised.
        """
        self.taken_groups(step)
        earliest = min(self._taken)
        if step != earliest:
            raise ValueError(
                f"window: step {step} cannot be finalised before step {earliest}; finalise steps "
                "in order"
            )
        del self._taken[step]

    def roll_back_all(self) -> None:
        """Roll back every step that is taken and not finalised."""
        if self._taken:
            self.roll_back(min(self._taken))

    def roll_back(self, step: int) -> tuple[int, ...]:
        """Roll back a taken step and all later steps; return the numbers of these steps,
        ascending.
        """
        self.taken_groups(step)
        rolled_back = tuple(sorted(s for s in self._taken if s >= step))
        for each in rolled_back:
            self._untake(self._taken.pop(each))
        self._next_step = step
        return rolled_back

    def step_of(self, number: int) -> int | None:
        """Return the unfinalised step that has taken a group; None if no step has."""
        return next((s for s, numbers in self._taken.items() if number in numbers), None)

    def snapshot(self) -> WindowSnapshot:
        return WindowSnapshot(
            loaded_version=self._loaded_version,
            next_step=self._next_step,
            oldest=self._oldest,
            taken_beyond=tuple(sorted(self._beyond)),
            taken=dict(self._taken),
        )

    def _untake(self, numbers: tuple[int, ...]) -> None:
        lowest = min(self._oldest, *numbers)
        self._beyond.update(range(lowest, self._oldest))
        self._beyond.difference_update(numbers)
        self._oldest = _advance(lowest, self._beyond)


def oldest_admitted_version(
    group_number: int,
    algorithm: AlgorithmSettings,
    *,
    num_ahead: int = 0,
    republished: Sequence[int] = (),
) -> int:
    """Return the oldest policy version whose tokens a group may contain; older tokens are stale.

    Group k has the admission step max(0, floor(k / groups_per_step) - max_lag). The group is
    admitted only when all engines hold the weights of the admission step or newer weights. The
    result is the version under which the weights of the admission step were first published.
    Tokens of this version or a newer one do not exceed the age bound. A session may have older
    tokens if a recovery gave the session's group a new number.

    A term is the part of a run from a start, recovery or return to a checkpoint to the next.

    Args:
        num_ahead: Policy version minus number of trained steps, both at the beginning of the term.
        republished: Versions of the term under which a step's weights were published again
            (`actors.policy_age`).
    Example: groups_per_step=3, max_lag=1: groups 0 to 5 -> 0 (the initial weights), 6 to 8 -> 1;
        with num_ahead=2: group 8 -> 3
    """
    step = group_number // algorithm.groups_per_step - algorithm.max_lag
    version = max(step, 0) + num_ahead
    for each in sorted(republished):
        version += each <= version
    return version


def _advance(oldest: int, beyond: set[int]) -> int:
    """Return the first number from `oldest` on that is not in `beyond`; delete those before it."""
    while oldest in beyond:
        beyond.discard(oldest)
        oldest += 1
    return oldest
