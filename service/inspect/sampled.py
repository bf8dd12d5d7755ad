"""Which tokens of a sample were sampled, by the raw turns alone: the plain loop.

Deliberately not the merge's own code: the view and the audit hold the merge against this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.types import TokenIds, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """turn, offset: which sampled token it is. logprob: nats, None: there is none. version: None
    where no span covers it, or several do.
    """

    turn: int
    offset: int
    token_id: int
    logprob: float | None
    version: int | None


def origins(
    trajectory: Trajectory, chain: Sequence[int], full: TokenIds
) -> tuple[dict[int, Origin], list[str]]:
    """Where each sampled token of the turns `chain` stands in the sample `full`.

    Returns: origins by position; faults: turns whose ids are not what stands there.
    Example: prompts [1,2] and [1,2,3,9], answers [3] and [4]: positions 2 and 4.
    """
    found: dict[int, Origin] = {}
    faults = []
    ids = full.tolist()
    for index in chain:
        turn = trajectory.turns[index]
        prompt = turn.prompt_token_ids.tolist()
        sampled = turn.sampled_token_ids.tolist()
        if ids[: len(prompt)] != prompt or ids[len(prompt) : len(prompt) + len(sampled)] != sampled:
            faults.append(f"the tokens of turn {index} are not what stands in the sample")
        for offset, origin in enumerate(turn_origins(turn, index)):
            found[len(prompt) + offset] = origin
    return found, faults


def turn_origins(turn: Turn, index: int) -> list[Origin]:
    """Each sampled token of one turn with its own columns."""
    logprobs: list[float] = turn.logprobs.tolist()
    found = []
    for offset, token_id in enumerate(turn.sampled_token_ids.tolist()):
        covering = [span.version for span in turn.version_spans if span.start <= offset < span.end]
        found.append(
            Origin(
                turn=index,
                offset=offset,
                token_id=token_id,
                logprob=logprobs[offset] if offset < len(logprobs) else None,
                version=covering[0] if len(covering) == 1 else None,
            )
        )
    return found
