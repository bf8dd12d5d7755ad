"""Build the samples of one trajectory while it is played.

A turn extends a sample if the sample's ids are an exact prefix of the turn's prompt. The other
tokens of the prompt are observation, with mask 0. If the turn could extend several samples, it
extends the longest, and the newest of equally long ones. `append` takes a turn that is known to
continue the last turn, so it compares no ids. `add` takes any turn, and compares its prompt with
every sample. `tests/worlds/checks/prefix_merge.py` has a plain implementation for comparison.

To save memory, a sample keeps only its newest prompt and reply, which have all of its ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.branches import branch_reason, common_prefix, regions
from actors.expert_records import ExpertIndices, ExpertRecords
from actors.types import (
    NO_VERSION,
    BranchReason,
    Sample,
    TokenIds,
    Turn,
    TurnSpan,
)

_NO_IDS: TokenIds = np.empty(0, np.int32)


@dataclass(slots=True)
class _OpenSample:
    """A sample that further turns may extend; its ids are the newest turn's `prompt` and `sampled`.

    `observed` has the tokens that the environment added at the end of the episode.
    """

    parent: int | None
    num_shared: int
    reason: BranchReason | None
    prompt: TokenIds = field(default_factory=_NO_IDS.copy)
    sampled: TokenIds = field(default_factory=_NO_IDS.copy)
    length: int = 0
    last_id: int = -1
    observed: TokenIds = field(default_factory=_NO_IDS.copy)
    turns: list[TurnSpan] = field(default_factory=list)
    recorded: list[Turn] = field(default_factory=list)
    """The turns without their prompts, because a prompt repeats all earlier turns."""

    def id_at(self, position: int) -> int:
        num_prompt = self.prompt.shape[0]
        if position < num_prompt:
            return int(self.prompt[position])
        return int(self.sampled[position - num_prompt])

    def begins(self, prompt: TokenIds) -> bool:
        """Return whether the sample's ids are an exact prefix of the prompt."""
        # Compare the last id first: it rules out most samples without reading the other ids.
        if self.length > prompt.shape[0] or prompt[self.length - 1] != self.last_id:
            return False
        num_prompt = self.prompt.shape[0]
        return np.array_equal(self.prompt, prompt[:num_prompt]) and np.array_equal(
            self.sampled, prompt[num_prompt : self.length]
        )

    def num_common(self, prompt: TokenIds) -> int:
        shared = common_prefix(self.prompt, prompt)
        if shared < self.prompt.shape[0]:
            return shared
        return shared + common_prefix(self.sampled, prompt[shared:])


class SampleBuilder:
    """The open samples of one trajectory.

    Example: add([1, 2] -> [3]), then append([1, 2, 3, 4] -> [5]), then add([1, 9] -> [7]) give the
    sample [1, 2, 3, 4, 5] of turns 0 and 1, and [1, 9, 7] of turn 2, which shares 1 token with it.
    """

    def __init__(self, trajectory_id: str) -> None:
        self._trajectory_id = trajectory_id
        self._open: list[_OpenSample] = []
        self._newest: _OpenSample | None = None  # the sample of the last turn
        self._num_turns = 0

    def append(self, turn: Turn) -> None:
        """Append a turn whose prompt begins with all ids of the last turn's sample."""
        self._put(turn, self._newest or self._opened(turn.prompt_token_ids, None))

    def add(self, turn: Turn, *, reason: BranchReason | None = None) -> None:
        """Add a turn to the sample that the turn's prompt extends, or to a new sample.

        If the prompt extends several samples, the longest is chosen; among equals, the newest.
        Args: reason: the reason why the prompt extends no sample; None to infer it from the ids as
        far as possible.
        """
        prompt = turn.prompt_token_ids
        found: _OpenSample | None = None
        for sample in reversed(self._open):
            if (found is None or sample.length > found.length) and sample.begins(prompt):
                found = sample
        self._put(turn, found or self._opened(prompt, reason))

    def score(self, *, reward: float, components: Mapping[str, float], is_malformed: bool) -> None:
        """Record the environment's score of the last turn."""
        assert self._newest is not None, "a score before the first turn"
        turns = self._newest.turns
        turns[-1] = msgspec.structs.replace(
            turns[-1], reward=reward, reward_components=components, is_malformed=is_malformed
        )

    def observe(self, prompt: TokenIds) -> None:
        """Append the environment's last observation to the sample of the last turn.

        Args: prompt: the prompt that the next turn would have if the episode went on. If it extends
        the last turn's sample, the prompt's new tokens end the sample, with mask 0; otherwise
        nothing is recorded.
        """
        newest = self._newest
        if newest is not None and newest.begins(prompt):
            newest.observed = prompt[newest.length :]

    def samples(self) -> tuple[Sample, ...]:
        """Return the samples of all turns so far, in the order in which they began."""
        has_rewards = any(
            each.token_rewards is not None for sample in self._open for each in sample.recorded
        )
        return tuple(self._sample(sample, has_rewards=has_rewards) for sample in self._open)

    def _put(self, turn: Turn, sample: _OpenSample) -> None:
        prompt, sampled = turn.prompt_token_ids, turn.sampled_token_ids
        start, num_sampled = prompt.shape[0], sampled.shape[0]
        assert start >= max(1, sample.length), "a prompt that is shorter than what it extends"
        sample.prompt, sample.sampled, sample.length = prompt, sampled, start + num_sampled
        sample.last_id = int(sampled[-1] if num_sampled else prompt[-1])
        sample.turns.append(
            TurnSpan(
                index=self._num_turns,
                start=start,
                end=start + num_sampled,
                finish_reason=turn.finish_reason,
                reward=turn.reward,
                reward_components=turn.reward_components,
                is_malformed=turn.is_malformed,
                state_key=turn.state_key,
            )
        )
        sample.recorded.append(replace(turn, prompt_token_ids=_NO_IDS))
        self._num_turns += 1
        self._newest = sample

    def _opened(self, prompt: TokenIds, reason: BranchReason | None) -> _OpenSample:
        """Open a sample for a prompt. If `reason` is None, derive the reason from the ids."""
        if not self._open:
            sample = _OpenSample(None, 0, None)
        else:
            parent, shared = self._nearest(prompt)
            if reason is None:
                nearest = self._open[parent]
                ids = np.concatenate([nearest.prompt, nearest.sampled])
                reason = branch_reason(ids, prompt, regions=regions(nearest.turns), position=shared)
            sample = _OpenSample(parent if shared else None, shared, reason)
        self._open.append(sample)
        return sample

    def _nearest(self, prompt: TokenIds) -> tuple[int, int]:
        """Find the open sample that shares the longest prefix with a prompt; of equals, the newest.

        Returns: the sample's index, and the number of shared ids.
        """
        nearest = len(self._open) - 1
        most = self._open[nearest].num_common(prompt)
        for number in range(nearest - 1, -1, -1):
            if most == prompt.shape[0]:
                break
            sample = self._open[number]
            # A sample that shares more ids also has the prompt's id at position `most`.
            if sample.length > most and sample.id_at(most) == prompt[most]:
                shared = sample.num_common(prompt)
                if shared > most:
                    nearest, most = number, shared
        return nearest, most

    def _sample(self, sample: _OpenSample, *, has_rewards: bool) -> Sample:
        token_ids = np.concatenate([sample.prompt, sample.sampled, sample.observed])
        num_tokens = token_ids.shape[0]
        logprobs = np.zeros(num_tokens, np.float32)
        versions = np.full(num_tokens, NO_VERSION, np.int32)
        rewards = np.zeros(num_tokens, np.float32) if has_rewards else None
        for turn, recorded in zip(sample.turns, sample.recorded, strict=True):
            start, end = turn.start, turn.end
            logprobs[start:end] = recorded.logprobs
            for span in recorded.version_spans:
                versions[start + span.start : start + span.end] = span.version
            if rewards is not None and recorded.token_rewards is not None:
                rewards[start:end] = recorded.token_rewards
            elif rewards is not None and end > start:
                rewards[end - 1] = turn.reward
        is_usable = np.isfinite(logprobs)
        if not is_usable.all():
            logprobs[~is_usable] = 0
            versions[~is_usable] = NO_VERSION
        return Sample(
            trajectory_id=self._trajectory_id,
            turns=tuple(sample.turns),
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            token_rewards=rewards,
            experts=_experts(sample),
            parent=sample.parent,
            num_shared=sample.num_shared,
            branch_reason=sample.reason,
        )


def _experts(sample: _OpenSample) -> ExpertRecords | None:
    """Return the experts that a mixture-of-experts model chose for a sample's tokens, or None."""
    positions: list[NDArray[np.int32]] = []
    indices: list[ExpertIndices] = []
    for turn, recorded in zip(sample.turns, sample.recorded, strict=True):
        chosen = recorded.expert_indices
        if chosen is not None and len(chosen):
            positions.append(np.arange(turn.start, turn.start + len(chosen), dtype=np.int32))
            indices.append(chosen)
    if not indices:
        return None
    return ExpertRecords(positions=np.concatenate(positions), indices=np.concatenate(indices))


def build_samples(turns: Iterable[Turn], *, trajectory_id: str) -> tuple[Sample, ...]:
    """Return the samples of recorded turns; each turn must have its whole prompt."""
    builder = SampleBuilder(trajectory_id)
    for turn in turns:
        builder.add(turn)
    return builder.samples()
