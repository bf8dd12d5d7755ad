"""Check the turns and trajectories that an engine or another producer sent.

`find_misalignment` checks one turn before a sample is built of it; `find_misfit` checks a
trajectory in the merge actor, where the trained model is known. Each returns None, or a sentence
with the fault and its remedy. The sentence contains nothing of the payload.
"""

from __future__ import annotations

import numpy as np

from actors.expert_records import ModelShape
from actors.types import TokenIds, Trajectory, Turn

# Rewards by token are float32: their sum may differ from the turn's reward by rounding.
REWARD_TOLERANCE = 1e-4
# Nats: engines compute in float32, and the log-probability of a certain token may end above 0.
LOGPROB_TOLERANCE = 1e-3


def find_misalignment(turn: Turn) -> str | None:
    """Return a sentence on the first fault found in a turn; None if there is no fault.

    A turn needs a prompt, one log-probability of at most 0 for each sampled token, version spans
    that cover the sampled tokens in order, ids that are not negative, and token rewards and expert
    records that fit the sampled tokens. Log-probabilities that are not finite are masked and
    counted when samples are built.
    """
    return (
        _in_lengths(turn)
        or _in_spans(turn)
        or _in_rewards(turn)
        or _in_experts(turn)
        or _in_ids("prompt", turn.prompt_token_ids, None)
        or _in_ids("sampled", turn.sampled_token_ids, None)
    )


def find_misfit(trajectory: Trajectory, *, shape: ModelShape | None) -> str | None:
    """Return a sentence on why a trajectory does not fit the trained model; None if it fits.

    Token ids must be in the model's vocabulary. Recorded experts must be experts of the model.
    shape: properties of the trained model; None to check nothing.
    """
    if shape is None:
        return None
    for number, sample in enumerate(trajectory.samples):
        found = _in_ids("token", sample.token_ids, shape.vocab_size)
        if found is None and sample.experts is not None:
            if shape.mixture is None:
                found = (
                    "expert records for a model whose routing cannot be replayed; leave them out"
                )
            else:
                found = shape.mixture.fault(sample.experts.indices)
        if found is not None:
            return f"sample {number}: {found}"
    return None


def _in_lengths(turn: Turn) -> str | None:
    if turn.prompt_token_ids.shape[0] == 0:
        return "an empty prompt; send the ids that the engine was given"
    if turn.logprobs.shape[0] != turn.num_sampled:
        return (
            f"{turn.logprobs.shape[0]} log-probabilities for {turn.num_sampled} sampled tokens; "
            "have the engine give one for each (logprobs=0)"
        )
    above = turn.logprobs[turn.logprobs > LOGPROB_TOLERANCE]
    if above.size:
        return (
            f"a log-probability of {above.max():g}, expected at most 0; record the natural "
            "logarithm of the probability"
        )
    return None


def _in_spans(turn: Turn) -> str | None:
    end = 0
    for span in turn.version_spans:
        if span.start != end or span.end <= span.start:
            return (
                f"a version span from {span.start} to {span.end}, expected one from {end} that is "
                "not empty; order the spans by token"
            )
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


def _in_experts(turn: Turn) -> str | None:
    indices = turn.expert_indices
    if indices is None or not len(indices):
        return None
    if indices.shape[0] > turn.num_sampled:
        return (
            f"expert indices of shape {indices.shape} for {turn.num_sampled} sampled tokens, "
            "expected [tokens, layers, experts]; leave out the prompt's tokens"
        )
    if indices.size and int(indices.min()) < 0:
        return "expert indices below 0; leave out tokens without a record"
    return None


def _in_ids(name: str, ids: TokenIds, vocab_size: int | None) -> str | None:
    # An id below 0, read without its sign, is a large id: one pass finds both faults.
    limit = 2**31 if vocab_size is None else vocab_size
    unsigned = ids.view(np.uint32)
    if not ids.size or int(unsigned.max()) < limit:
        return None
    end = "upwards" if vocab_size is None else f"to {vocab_size - 1}"
    return (
        f"{np.count_nonzero(unsigned >= limit)} {name} ids are outside the vocabulary, expected 0 "
        f"{end}; use the policy's own tokenizer"
    )
