"""Read the completions of a step from the run's journal, as rows of a tracker's table.

A tracker's thread reads and decodes the completions, so that a step does not wait for this.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from pathlib import Path

import numpy as np

from actors.journal.files import TrajectoryEntry, file_name
from service.inspect.reader import OpenJournal, load_step, tokenizer_of
from service.inspect.token_text import TokenText
from service.launch.run_dir import RunDir
from service.trackers.tracker import Completion

# Maximum number of characters of a prompt and of a completion, as in an evaluation's samples.
MAX_CHARS = 2000


class Completions:
    """A reader of the first `most` completions of each step of a run."""

    def __init__(self, directory: Path, *, most: int) -> None:
        self._run_dir, self._most = RunDir(path=directory), most

    def of_step(self, step: int, *, term: int) -> list[Completion]:
        """Return a step's completions in the order of its groups.

        The list is empty if the journal no longer has the step.
        Raises: ConfigError if the step's file cannot be read.
        """
        path = self._run_dir.journal / file_name(step, term=term)
        if not self._most or not path.is_file():
            return []
        entries = [each for each in load_step(path).entries if each.trajectory.samples]
        return [self._completion(entry) for entry in entries[: self._most]]

    @cached_property
    def _text(self) -> TokenText:
        return tokenizer_of(OpenJournal(place=self._run_dir.path, run_dir=self._run_dir, files=()))

    def _completion(self, entry: TrajectoryEntry) -> Completion:
        trajectory = entry.trajectory
        rewards: defaultdict[str, float] = defaultdict(float)
        for turn in trajectory.turns:
            for name, value in turn.reward_components.items():
                rewards[name] += value
        first = trajectory.samples[0]
        prompt, answer = np.split(first.token_ids, [first.prompt_length])
        return Completion(
            task_id=trajectory.task_id,
            rollout_id=trajectory.rollout_id,
            prompt=self._shown(prompt.tolist()),
            completion=self._shown(answer.tolist()),
            outcome=trajectory.outcome.value,
            episode_return=trajectory.episode_return,
            rewards=dict(rewards),
            advantage=_mean_advantage(entry),
            untrained=entry.reason.value if entry.reason is not None else "",
        )

    def _shown(self, token_ids: list[int]) -> str:
        text = b"".join(self._text.pieces(token_ids)).decode(errors="replace")
        if len(text) <= MAX_CHARS:
            return text
        half = MAX_CHARS // 2
        return f"{text[:half]} … {text[-half:]}"


def _mean_advantage(entry: TrajectoryEntry) -> float | None:
    if not entry.num_trained:
        return None
    return float(np.concatenate(entry.advantages).mean(dtype=np.float64))
