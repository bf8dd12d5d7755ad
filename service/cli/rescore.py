"""`rayloom rescore`: score the trajectories in a run's journal again with other functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.environment import workers
from actors.environment.builtin.single_turn import SINGLE_TURN
from actors.environment.builtin.tools import TOOLS
from actors.journal.files import JournalStep
from actors.outcomes import Disposition, OutcomePolicy
from actors.types import Outcome, Trajectory
from service.cli.outlet import say, warn
from service.config.file import ConfigError
from service.config.tree import Config
from service.config.trial import Trial, tried
from service.hacking.shadow import ShadowVerifier
from service.inspect.reader import OpenJournal, config_beside, open_journal

EXIT_OK, EXIT_UNSCORED = 0, 1
AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A trajectory with its old and its new reward."""

    step: int
    trajectory: Trajectory
    new: float | str
    """The new reward, or the reason why there is none."""

    @property
    def old(self) -> float:
        return self.trajectory.episode_return

    @property
    def change(self) -> float:
        return 0.0 if isinstance(self.new, str) else self.new - self.old


def run_rescore(
    run: Path, *, rewards: Sequence[str], group_rewards: Sequence[str] = (), limit: int
) -> int:
    """Score the trajectories of a run again, show the changes, and return the exit code.

    rewards, group_rewards: names of the functions; the sum of their scores is the new reward.
    limit: maximum number of listed trajectories; 0 lists all.
    Raises: ConfigError if the run or a function cannot be used.
    """
    if not (rewards or group_rewards):
        raise ConfigError(
            "rescore: got no function, expected one or more that score; name it with --reward or "
            "--group-reward FILE.py:FUNCTION"
        )
    journal = open_journal(run)
    run_dir = journal.run_dir
    if run_dir is None:
        raise ConfigError(
            f"rescore: {run} is a journal file, expected the run's directory, for its tasks and "
            "tokenizer; name that"
        )
    names = [*rewards, *group_rewards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"rescore: got {', '.join(twice)} more than once, expected each function once; remove "
            "the repetition"
        )
    config = config_beside(run_dir)
    # This refuses an import that hangs or ends its process, and says why.
    keys = dict.fromkeys(rewards, "--reward") | dict.fromkeys(group_rewards, "--group-reward")
    tried(config, Trial(begins=False, functions=False, others=keys), tell=warn)
    verifiers, of_groups = (
        [
            ShadowVerifier(
                config,
                model=config.model.path or str(run_dir.tiny_model),
                name=name,
                num_samples=0,
                key="--group-reward" if scores_groups else "--reward",
                scores_groups=scores_groups,
            )
            for name in names
        ]
        for names, scores_groups in ((rewards, False), (group_rewards, True))
    )
    found = asyncio.run(_all_rescored(config, journal, verifiers, of_groups))
    _warn_of_missing_tasks(config, found, [*verifiers, *of_groups][0])
    say(describe(found, limit=limit))
    return EXIT_OK if any(not isinstance(each.new, str) for each in found) else EXIT_UNSCORED


def _warn_of_missing_tasks(
    config: Config, found: Sequence[Rescored], verifier: ShadowVerifier
) -> None:
    with_data = {
        name
        for name, each in config.members.items()
        if each.tasks.dataset is not None or each.tasks.file is not None
    }
    own = {e.trajectory.task_id for e in found if e.trajectory.environment in with_data}
    if missing := sorted(each for each in own if not verifier.knows(each)):
        warn(
            f"{len(missing)} of {len(own)} tasks are no longer in the run's data, such "
            f"as {missing[0]}: the functions received only their prompts; expected the data that "
            "the run was trained on; restore the data"
        )


_Scores = Mapping[str, float | str | None]


async def _all_rescored(
    config: Config,
    journal: OpenJournal,
    verifiers: Sequence[ShadowVerifier],
    of_groups: Sequence[ShadowVerifier],
) -> list[Rescored]:
    workers.configure(size=config.rollouts.workers, memory_mib=config.rollouts.worker_memory_mib)
    scored_alone = partial(_is_scored_alone, config.members, config.policies)
    found: list[Rescored] = []
    for step in journal.steps():
        found += await _rescored(step, verifiers, of_groups, scored_alone)
    return found


def _is_scored_alone(
    members: Mapping[str, Config], policies: Mapping[str, OutcomePolicy], trajectory: Trajectory
) -> bool:
    """Return whether the functions of --reward are called for a trajectory.

    They are called as in a run for single_turn and tools, and always for other environments.
    """
    name, outcome = trajectory.environment, trajectory.outcome
    if name not in members or members[name].tasks.environment not in (SINGLE_TURN, TOOLS):
        return True
    is_score = policies[name].disposition(outcome) is Disposition.SCORE
    return outcome is Outcome.COMPLETED or (trajectory.is_truncated and is_score)


async def _rescored(
    step: JournalStep,
    verifiers: Sequence[ShadowVerifier],
    of_groups: Sequence[ShadowVerifier],
    is_scored_alone: Callable[[Trajectory], bool],
) -> list[Rescored]:
    places = asyncio.Semaphore(AT_ONCE)
    graded = [each.trajectory for each in step.entries if each.trajectory.is_graded]
    trajectories = [each for each in graded if each.samples]
    by_group = [await _group_scores(step, each) for each in of_groups]

    async def one(trajectory: Trajectory) -> Rescored:
        alone: list[float | str | None] = [0.0] if verifiers else []
        if verifiers and is_scored_alone(trajectory):
            async with places:
                alone = [await each.score(trajectory) for each in verifiers]
        scores = alone + [
            each.get(trajectory.trajectory_id, "it was not in its group's baseline")
            for each in by_group
        ]
        problem = next((each for each in scores if isinstance(each, str)), None)
        numbers = [each for each in scores if isinstance(each, float)]
        new: float | str = sum(numbers)
        if problem is None and any(
            own and all(each is None for each in own) for own in (alone, scores)
        ):
            problem = "none of the functions scores it"
        if problem is not None:
            new = problem
        return Rescored(step=step.step, trajectory=trajectory, new=new)

    return list(await asyncio.gather(*(one(each) for each in trajectories)))


async def _group_scores(step: JournalStep, verifier: ShadowVerifier) -> _Scores:
    """Score a step's groups with a function of --group-reward; return scores by trajectory id."""
    groups: dict[str, list[Trajectory]] = {}
    for entry in step.entries:
        # As in a run, leave out trajectories that are not in their group's baseline.
        if entry.baseline_return is not None and entry.trajectory.samples:
            groups.setdefault(entry.trajectory.group_id, []).append(entry.trajectory)
    found: dict[str, float | str | None] = {}
    for group in groups.values():
        group.sort(key=lambda each: int(each.rollout_id.rpartition("-")[2]))
        scores = await verifier.score_group(group)
        names = [each.trajectory_id for each in group]
        found |= (
            dict.fromkeys(names, scores)
            if isinstance(scores, str)
            else dict(zip(names, scores, strict=True))
        )
    return found


def describe(found: Sequence[Rescored], *, limit: int) -> str:
    """Return lines with the mean rewards, the counts and the trajectories that changed most."""
    scored = [each for each in found if not isinstance(each.new, str)]
    missing = [each.new for each in found if isinstance(each.new, str)]
    lines = [f"{len(found)} trajectories that were scored"]
    if scored:
        old, new = (
            sum(values) / len(scored)
            for values in (
                [each.old for each in scored],
                [each.old + each.change for each in scored],
            )
        )
        higher, lower = (sum(sign * each.change > 1e-9 for each in scored) for sign in (1, -1))
        lines += [
            f"old reward  {old:.4g}",
            f"new reward  {new:.4g}",
            f"changed     {higher + lower} of {len(scored)}: {higher} higher, {lower} lower",
        ]
    if missing:
        lines.append(f"not scored  {len(missing)}; the first: {missing[0]}")
    most = sorted(scored, key=lambda each: -abs(each.change))
    rows = [each for each in most if abs(each.change) > 1e-9][: limit or None]
    if rows:
        lines += ["", "step  trajectory                   old      new  task"]
        lines += [
            f"{each.step:>4}  {each.trajectory.trajectory_id:<22} {each.old:>9.4g} "
            f"{each.old + each.change:>8.4g}  {each.trajectory.task_id}"
            for each in rows
        ]
    return "\n".join(lines)
