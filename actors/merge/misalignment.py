"""Whether a trajectory's turns fit together: lengths, version spans, ids, routing records.

Says what is wrong and what to do about it, never with a payload. Called by `step` before merging;
`prefix` names the trajectory where it is asked to merge such turns all the same.
"""

from __future__ import annotations

import numpy as np

from actors.expert_records import ModelShape
from actors.lineage import Lineage
from actors.types import TokenIds, Trajectory, Turn

# Rewards by token are float32: their sum may differ from the turn's reward by rounding.
REWARD_TOLERANCE = 1e-4
# Nats: engines compute in float32, and the log-probability of a certain token may end above 0.
LOGPROB_TOLERANCE = 1e-3


def find_misalignment(trajectory: Trajectory, *, shape: ModelShape | None = None) -> str | None:
    """Say what in a trajectory's turns does not fit together; None when all does.

    A turn needs a prompt, one log-probability of at most 0 for each sampled token, version spans
    that cover the sampled tokens in order, ids of the vocabulary, and side data of the same
    lengths; expert records must be of the model's own mixture. A lineage needs each turn once. A
    trajectory without turns fits together; log-probabilities that are not finite are masked and
    counted when the turns are merged.

    Args: shape: of the model; None: ids and experts must not be negative, and have no upper bound.
    """
    if trajectory.lineage is not None:
        found = lineage_fault(trajectory.lineage, num_turns=len(trajectory.turns))
        if found is not None:
            return found
    chosen: tuple[int, ...] | None = None
    for index, turn in enumerate(trajectory.turns):
        found = _in_lengths(turn) or _in_spans(turn) or _in_rewards(turn)
        found = found or _in_experts(turn, chosen, shape)
        if found is not None:
            return f"turn {index}: {found}"
        if turn.expert_indices is not None:
            chosen = turn.expert_indices.shape[1:]
    for index in _whole_prompts(trajectory):
        found = _in_ids(trajectory.turns[index], shape.vocab_size if shape else None)
        if found is not None:
            return f"turn {index}: {found}"
    return None


def lineage_fault(lineage: Lineage, *, num_turns: int) -> str | None:
    """Say why a lineage is of other turns than these; None: it is of these, each once."""
    named = sorted(turn for sample in lineage.samples for turn in sample.turns)
    if named == list(range(num_turns)) and all(sample.turns for sample in lineage.samples):
        return None
    return (
        f"a lineage of {len(named)} turns for {num_turns}, expected each of them once; leave it "
        "out where turns are changed"
    )


def _whole_prompts(trajectory: Trajectory) -> list[int]:
    """Turns whose prompts and replies hold all ids: with a lineage, the last of each sample."""
    if trajectory.lineage is None:
        return list(range(len(trajectory.turns)))
    return sorted(sample.turns[-1] for sample in trajectory.lineage.samples)


def _in_lengths(turn: Turn) -> str | None:
    if turn.prompt_token_ids.shape[0] == 0:
        return "an empty prompt; send the ids that the engine was given"
    if turn.logprobs.shape[0] != turn.num_sampled:
        return (
            f"{turn.logprobs.shape[0]} log-probabilities for {turn.num_sampled} sampled tokens; "
            "have the engine give one for each (logprobs=0)"
        )
    # What is not a number is masked, token by token; what is above 0 is no log-probability at all.
    if turn.num_sampled and turn.logprobs.max() > LOGPROB_TOLERANCE:
        return (
            f"a log-probability of {turn.logprobs.max():g}, expected at most 0; record the natural "
            "logarithm of the probability"
        )
    return None


def _in_spans(turn: Turn) -> str | None:
    end = 0
    for span in turn.version_spans:
        if span.start != end or span.end < end:
            return f"a version span from {span.start}, expected {end}; order the spans by token"
        if not 0 <= span.version < 2**31:
            return f"policy version {span.version}; record the version that sampled each token"
        end = span.end
    if end != turn.num_sampled:
        return (
            f"version spans cover {end} of {turn.num_sampled} sampled tokens; record the policy "
            "version of each"
        )
    return None


def _in_rewards(turn: Turn) -> str | None:
    rewards = turn.token_rewards
    if rewards is None:
        return None
    if rewards.shape != (turn.num_sampled,):
        return (
            f"token rewards of shape {rewards.shape} for {turn.num_sampled} sampled tokens; give "
            "one for each, or none"
        )
    total = float(rewards.sum(dtype=np.float64))
    if not abs(total - turn.reward) <= REWARD_TOLERANCE * max(1.0, abs(turn.reward)):
        return f"token rewards sum to {total:g}, the reward is {turn.reward:g}; make them agree"
    return None


def _in_experts(turn: Turn, chosen: tuple[int, ...] | None, shape: ModelShape | None) -> str | None:
    """chosen: layers and experts of an earlier turn's records."""
    indices = turn.expert_indices
    if indices is None or not len(indices):
        return None
    if indices.shape[0] > turn.num_sampled:
        return (
            f"expert indices of shape {indices.shape} for {turn.num_sampled} sampled tokens, "
            "expected [tokens, layers, experts]; leave out the prompt's"
        )
    if indices.size and int(indices.min()) < 0:
        return "expert indices below 0; leave out tokens without a record"
    if chosen is not None and indices.shape[1:] != chosen:
        return (
            f"expert indices for {indices.shape[1:]} layers and experts, {chosen} in an earlier "
            "turn; record every turn with one model"
        )
    if shape is None:
        return None
    if shape.mixture is None:
        return "expert records for a model whose routing cannot be replayed; leave them out"
    return shape.mixture.fault(indices)


def _in_ids(turn: Turn, vocab_size: int | None) -> str | None:
    for name, ids in (("prompt", turn.prompt_token_ids), ("sampled", turn.sampled_token_ids)):
        num_outside = _num_outside(ids, vocab_size)
        if num_outside:
            end = "upwards" if vocab_size is None else f"to {vocab_size - 1}"
            return (
                f"{num_outside} {name} ids are outside the vocabulary, expected 0 {end}; use the "
                "policy's own tokenizer"
            )
    return None


def _num_outside(ids: TokenIds, vocab_size: int | None) -> int:
    """Ids below 0 count as large ones when they are read without a sign: one pass finds both."""
    limit = 2**31 if vocab_size is None else vocab_size
    if not ids.size or int(ids.view(np.uint32).max()) < limit:
        return 0
    return int(np.count_nonzero(ids.view(np.uint32) >= limit))
