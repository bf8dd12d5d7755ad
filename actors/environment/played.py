"""The turns of an episode as they are played: tokens in columns, what came with them beside.

A prompt is kept as what it has beyond the sample that it goes on from, so that an episode's memory
grows with its tokens, not with its turns times their length, and merging compares nothing. Called
by the turn loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from actors.environment.protocol import StepResult
from actors.environment.rendering import BreakReason
from actors.lineage import Lineage, MismatchKind
from actors.merge.buffer import TrajectoryBuffer
from actors.policy import GenerateReply
from actors.types import TokenIds, Turn

# What a prompt that was rendered anew is counted as, should it extend no sample.
_KIND_OF_BREAK = {
    BreakReason.TEMPLATE_REFUSED: MismatchKind.TEMPLATE,
    BreakReason.TEMPLATE_LOOKS_BACK: MismatchKind.TEMPLATE,
    BreakReason.RETOKENISED: MismatchKind.RETOKENISED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    is_malformed: bool = False


class PlayedTurns:
    """Turns so far. After `turns`, no more can be recorded."""

    def __init__(self) -> None:
        self._tokens = TrajectoryBuffer()
        self._sample: int | None = None  # that the next prompt goes on from
        self._break: BreakReason | None = None
        self._replies: list[GenerateReply] = []
        self._scores: list[_Score] = []

    def break_off(self, reason: BreakReason) -> None:
        """The next prompt was rendered anew: it is looked for where it belongs."""
        self._sample, self._break = None, reason

    def record(self, prompt: TokenIds, reply: GenerateReply) -> None:
        """Keep a turn. prompt: [P] int32; it goes on from the last turn's ids, unless the history
        was broken off, when it may extend any sample, or begin one.
        """
        sampled = np.ascontiguousarray(reply.token_ids)
        if self._sample is None:
            kind = None if self._break is None else _KIND_OF_BREAK[self._break]
            self._sample = self._tokens.add(prompt, sampled, kind=kind)
        else:
            # A copy: a view would keep the whole prompt in memory.
            observed = prompt[self._tokens.length(self._sample) :].copy()
            self._tokens.extend(self._sample, observed, sampled)
        self._replies.append(reply)
        self._scores.append(_Score())

    def score(self, result: StepResult) -> None:
        """Say what the environment answered to the last turn; copied, for it may change it."""
        self._scores[-1] = _Score(
            reward=float(result.reward),
            components={str(k): float(v) for k, v in result.reward_components.items()},
            is_malformed=result.is_malformed,
        )

    def lineage(self) -> Lineage:
        return self._tokens.lineage()

    def turns(self) -> tuple[Turn, ...]:
        """Each turn with its prompt as a view of its sample's ids."""
        tokens = self._tokens.prompts_and_replies()
        return tuple(
            Turn(
                prompt_token_ids=prompt,
                sampled_token_ids=sampled,
                logprobs=reply.logprobs,
                finish_reason=reply.finish_reason,
                version_spans=reply.version_spans,
                reward=score.reward,
                reward_components=score.components,
                is_malformed=score.is_malformed,
                expert_indices=reply.expert_indices,
            )
            for (prompt, sampled), reply, score in zip(
                tokens, self._replies, self._scores, strict=True
            )
        )
