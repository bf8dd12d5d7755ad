"""Compute the advantage of each trained token, from the returns of its group or from a critic.

Start with `credit_group`. The setting `baseline` chooses the method; `scale` is independent of it:
- mean, leave_one_out: each trajectory's return is compared with the returns of its group; with
  `turn_discount`, this is done for each turn. Every trajectory counts once, so advantages do not
  depend on how many samples its turns were merged into.
- none: the return. A token's advantage includes KL penalties of this and later tokens only.
- critic: GAE over a trajectory's action tokens in the order of play. Tokens of observations do not
  count in the decay by lambda, so that a long observation does not reduce credit. The state of a
  token is the part of its sample before the token. Turns in other samples of the trajectory (a
  sub-agent, a compacted history) are not in the state.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from actors.algorithm import Baseline, CriticSettings, Scale, StateCreditSettings, Truncation
from actors.batch import Float64s, Int64s
from actors.merge.member import Member, token_numbers, turn_bounds
from actors.outcomes import are_equal
from actors.trajectory_queue.ledger import EvictionReason

STD_EPSILON = 1e-6


def credit_group(
    members: Sequence[Member],
    *,
    baseline: Baseline,
    scale: Scale,
    turn_discount: float | None,
    critic: CriticSettings,
    state_credit: StateCreditSettings | None = None,
) -> tuple[list[Member], EvictionReason | None]:
    """Compute the advantages of the trained tokens of a group.

    Args: members: the members that count in the group's baseline, at least one. If the
        setting `baseline` is critic, a critic must have scored them.
    Returns: the members with advantages, and the reason if all advantages are 0, otherwise None.
    """
    if baseline is Baseline.CRITIC:
        return [_credit_tokens(member, critic) for member in members], None
    if turn_discount is not None:
        of_turns, no_signal = turn_advantages(
            [_turn_rewards(member) for member in members],
            discount=turn_discount,
            baseline=baseline,
            scale=scale,
        )
        pairs = zip(members, of_turns, strict=True)
        return [_credit_turns(member, values) for member, values in pairs], no_signal
    returns = [member.baseline_return for member in members if member.baseline_return is not None]
    advantages = group_advantages(returns, baseline=baseline, scale=scale)
    no_signal = reason_without_signal(returns, baseline=baseline, scale=scale)
    credited = [
        _credit_kl_to_go(member, value)
        if baseline is Baseline.NONE and member.kl_rewards is not None
        else replace(
            member,
            advantages=tuple(np.full(sample.num_trained, value) for sample in member.samples),
        )
        for member, value in zip(members, advantages, strict=True)
    ]
    if state_credit is None:
        return credited, no_signal
    of_states = state_advantages(
        [_turn_rewards(member) if member.trajectory.turns else np.empty(0) for member in members],
        [_state_keys(member) for member in members],
        discount=state_credit.discount,
        baseline=baseline,
        scale=scale,
    )
    pairs = zip(credited, of_states, strict=True)
    credited = [_add_to_turns(member, state_credit.weight * values) for member, values in pairs]
    has_signal = any(values.any() for values in of_states)
    return credited, None if has_signal else no_signal


def reason_without_signal(
    returns: Sequence[float], *, baseline: Baseline = Baseline.MEAN, scale: Scale = Scale.STD
) -> EvictionReason | None:
    """Return the reason why all `group_advantages` of these returns are 0; None if any is not 0."""
    if baseline is Baseline.NONE:
        return None
    if are_equal(returns):
        return EvictionReason.ZERO_VARIANCE
    return EvictionReason.NEGATIVE_RETURN if scale is Scale.MEAN and min(returns) < 0 else None


def group_advantages(
    returns: Sequence[float], *, baseline: Baseline = Baseline.MEAN, scale: Scale = Scale.STD
) -> Float64s:
    """Turn the returns of one group into advantages.

    A_i = (r_i - b_i) / s. The baseline sets b_i: the group's mean (mean), the mean of the others
    (leave_one_out) or 0 (none). The scale sets s: 1 (none), the group's mean (mean), or
    sqrt(sum (r_i - mean)^2 / (G - 1)) + 1e-6 (std). With a baseline, all advantages are 0 if all
    returns are equal, also in a group of one. With scale mean, they are 0 if a return is negative.
    Source: mean, std: GRPO, arXiv 2402.03300, 4.1.2; leave_one_out: RLOO, arXiv 2402.14740, 3;
        scale mean: MaxRL; scale none: Dr.GRPO, arXiv 2503.20783, 3.2. Difference from GRPO: the
        standard deviation divides by G - 1.

    Args: returns: [G] float, finite, of the members in the baseline, G >= 1. scale: must be none
        if the baseline is none.
    Returns: [G] float64, in the order of the returns.
    Example: group_advantages([1, 0, 0, 0]) -> [1.499997, -.499999, -.499999, -.499999]
    """
    values = np.asarray(returns, np.float64)
    if baseline is Baseline.NONE:
        assert scale is Scale.NONE, f"advantages: scale {scale} without a group baseline"
        return values
    if reason_without_signal(values.tolist(), baseline=baseline, scale=scale) is not None:
        return np.zeros_like(values)
    mean = float(values.mean())
    match baseline:
        case Baseline.MEAN:
            differences = values - mean
        case Baseline.LEAVE_ONE_OUT:
            # If returns differ, there are at least two of them, so the divisor is not 0.
            differences = values - (values.sum() - values) / (values.size - 1)
        case Baseline.CRITIC:
            raise AssertionError("advantages: baseline critic has no group advantages")
    match scale:
        case Scale.NONE:
            return differences
        case Scale.STD:
            return differences / (float(values.std(ddof=1)) + STD_EPSILON)
        case Scale.MEAN:
            return differences / mean


def discounted_suffix_sums(values: Float64s, factor: float) -> Float64s:
    """Sum the discounted values from each index onwards: S_t = sum_k factor^k x_{t+k}.

    Args: values: [N] float. factor: in [0, 1].    Returns: [N] float64.
    Example: discounted_suffix_sums([1, 2, 4], .5) -> [3, 4, 4]
    """
    sums = np.array(values, np.float64)
    shift = 1
    # After each pass, an entry is the sum of its first 2 * shift terms: log2(N) passes suffice.
    while shift < sums.shape[0] and factor:
        sums[:-shift] = sums[:-shift] + factor**shift * sums[shift:]
        shift *= 2
    return sums


def turn_advantages(
    turn_rewards: Sequence[Float64s],
    *,
    discount: float,
    baseline: Baseline = Baseline.MEAN,
    scale: Scale = Scale.STD,
) -> tuple[list[Float64s], EvictionReason | None]:
    """Turn the rewards of a group's turns into an advantage for each turn.

    R_{i,t} = sum_k discount^k r_{i,t+k} is the return of member i from turn t on. For each t,
    `group_advantages` compares the R_{i,t} of all members. A member that ended before turn t counts
    with the R of its last turn. With discount 1 and rewards only at the end, every turn therefore
    gets its trajectory's advantage.
    Source: Kevin, arXiv 2507.11948, 3. Difference: Kevin compares a turn with all turns of the
        group. Early turns are far from the reward, so Kevin gives them low advantages even in a won
        game. Kevin also counts a long trajectory more often than a short one.

    Args: turn_rewards: for each member [K_i] float, K_i >= 1. discount: in [0, 1].
    Returns: the advantages, for each member [K_i] float64; and the reason if all advantages are 0,
    otherwise None.
    Example: rewards [[0, 1], [0, 0]], discount .5, mean, none: R = [[.5, 1], [0, 0]] -> [[.25, .5],
        [-.25, -.5]]
    """
    to_go = [discounted_suffix_sums(rewards, discount) for rewards in turn_rewards]
    num_turns = [values.shape[0] for values in to_go]
    columns = [
        [float(values[min(t, values.shape[0] - 1)]) for values in to_go]
        for t in range(max(num_turns))
    ]
    # Columns after a member's last turn are needed only for the other members.
    table = np.stack([group_advantages(each, baseline=baseline, scale=scale) for each in columns])
    advantages = [table[:length, i] for i, length in enumerate(num_turns)]
    reasons = {reason_without_signal(each, baseline=baseline, scale=scale) for each in columns}
    for reason in (None, EvictionReason.NEGATIVE_RETURN):
        if reason in reasons:
            return advantages, reason
    return advantages, EvictionReason.ZERO_VARIANCE


def state_advantages(
    turn_rewards: Sequence[Float64s],
    state_keys: Sequence[Sequence[Hashable]],
    *,
    discount: float,
    baseline: Baseline = Baseline.MEAN,
    scale: Scale = Scale.STD,
) -> list[Float64s]:
    """Compare each turn of a group with the group's turns that started from the same state.

    R_{i,t} = sum_k discount^k r_{i,t+k} is the return of member i from turn t on. For each key,
    `group_advantages` compares the R_{i,t} of all turns with this key. One trajectory may have
    several of these turns. A turn whose key no other turn has gets 0.
    Source: GiGPO, arXiv 2505.10978, 4.2, equations 5 to 7. In equation 8 of the paper, these
        values are multiplied by a weight and added to the advantage of the whole episode.

    Args: turn_rewards: for each member [K_i] float. state_keys: for each member [K_i]; equal for
        equal states. discount: in [0, 1].
    Returns: for each member [K_i] float64.
    Example: rewards [[0, 1], [0, 0]], keys [[s, a], [s, b]], discount .5, mean, none: R = [[.5, 1],
        [0, 0]] -> [[.25, 0], [-.25, 0]]
    """
    to_go = [discounted_suffix_sums(rewards, discount) for rewards in turn_rewards]
    met: dict[Hashable, list[tuple[int, int]]] = {}
    for i, keys in enumerate(state_keys):
        for t, key in enumerate(keys):
            met.setdefault(key, []).append((i, t))
    advantages = [np.zeros_like(values) for values in to_go]
    for turns in met.values():
        values = [float(to_go[i][t]) for i, t in turns]
        compared = group_advantages(values, baseline=baseline, scale=scale)
        for (i, t), value in zip(turns, compared, strict=True):
            advantages[i][t] = value
    return advantages


def kl_to_go(advantage: float, kl_rewards: Float64s) -> Float64s:
    """Remove the KL of earlier tokens from each token's advantage.

    A token cannot change the tokens before it. So its advantage is the reward minus beta times the
    KL of this token and of later tokens: A_t = A - sum_{i<t} k_i, with k_i = -beta KL_i.
    Source: REINFORCE++, arXiv 2501.03262, equation 8.

    Args: advantage: A, the reward plus the sum of all k_i. kl_rewards: [N], k_i.
    Returns: [N] float64.
    Example: reward 1, KL .4 and .1, beta 1: A = .5 -> [.5, .9]
    """
    return advantage - (np.cumsum(kl_rewards) - kl_rewards)


def _credit_kl_to_go(member: Member, advantage: float) -> Member:
    assert member.kl_rewards is not None
    bounds, by_token = turn_bounds(member), kl_to_go(advantage, member.kl_rewards)
    numbers = [token_numbers(sample, bounds) for sample in member.samples]
    return replace(member, advantages=tuple(by_token[own] for own in numbers))


def _turn_rewards(member: Member) -> Float64s:
    """Return the reward of each turn plus the KL rewards of the turn's tokens: [K]."""
    if not member.trajectory.turns:
        # A trajectory without turns counts in the baseline, but has no tokens to train.
        return np.array([member.baseline_return], np.float64)
    if member.kl_rewards is None:
        return member.rewards
    sums = np.append(0.0, np.cumsum(member.kl_rewards))
    return member.rewards + np.diff(sums[turn_bounds(member)])


def _state_keys(member: Member) -> list[Hashable]:
    """Return a key for the state in which each turn began; turns with equal keys are compared.

    The key is the environment's text or, without it, the token ids since the previous turn.
    """
    keys: list[Hashable] = [b""] * len(member.trajectory.turns)
    for sample in member.samples:
        begin = 0
        for turn in sample.turns:
            observation = sample.token_ids[begin : turn.start].tobytes()
            keys[turn.index] = observation if turn.state_key is None else turn.state_key
            begin = turn.end
    return keys


def _add_to_turns(member: Member, of_turns: Float64s) -> Member:
    added = _credit_turns(member, of_turns).advantages
    pairs = zip(member.advantages, added, strict=True)
    return replace(member, advantages=tuple(own + more for own, more in pairs))


def _credit_turns(member: Member, of_turns: Float64s) -> Member:
    counts = np.diff(turn_bounds(member))
    chains = [[turn.index for turn in sample.turns] for sample in member.samples]
    return replace(
        member, advantages=tuple(np.repeat(of_turns[turns], counts[turns]) for turns in chains)
    )


def end_value(final_value: float, *, is_truncated: bool, truncation: Truncation) -> float:
    """Return the value of the state after the last action token.

    If `truncation` is bootstrap and the trajectory was cut off (truncated, not terminated), the
    value is V(s_T). In all other cases it is 0.

    Args: final_value: V(s_T); s_T ends with the last observation, or with the last action if no
    observation followed. is_truncated: read from the recorded outcome, not guessed from token ids.
    """
    is_open = is_truncated and truncation == "bootstrap"
    return final_value if is_open else 0.0


def token_advantages(
    rewards: Float64s,
    values: Float64s,
    *,
    discount: float,
    decay: float,
    end_value: float = 0.0,
) -> Float64s:
    """Estimate the advantage of each action token of a trajectory by GAE.

    d_t = r_t + discount V_{t+1} - V_t, V_{N} = end_value; A_t = sum_k (discount decay)^k d_{t+k}.
    The critic learns A_t + V_t.   Source: Schulman et al. 2016 (GAE), arXiv 1506.02438, equations
    11 and 16 (deviation: t counts only action tokens, and the end of a truncated trajectory is
    worth V(s_T)).

    Args: rewards, values: [N] float, N >= 1; values[t]: the value of the state in which action
        token t was sampled. discount, decay: in [0, 1].
    Returns: [N] float64.
    Example: rewards 0, values [.5, .6, .7], discount = decay = 1: end_value .8 -> [.3, .2, .1]; 0
        -> [-.5, -.6, -.7]
    """
    next_values = np.append(values[1:], end_value)
    return discounted_suffix_sums(rewards + discount * next_values - values, discount * decay)


def _credit_tokens(member: Member, critic: CriticSettings) -> Member:
    """Compute the advantages of a member's tokens by GAE, from the critic's values."""
    bounds = turn_bounds(member)
    numbers = [token_numbers(sample, bounds) for sample in member.samples]
    old_values = np.empty(int(bounds[-1]), np.float32)
    if not old_values.shape[0]:
        return replace(member, advantages=tuple(np.empty(0) for _ in numbers))
    last_turn, final_value = len(member.trajectory.turns) - 1, 0.0
    for sample, scores, own in zip(member.samples, member.scores, numbers, strict=True):
        assert scores.values is not None
        # The state in which a token was sampled ends with the token before it.
        old_values[own] = scores.values[np.flatnonzero(sample.mask) - 1]
        if sample.turns[-1].index == last_turn:
            # The state s_T ends where the sample ends: with the observation after the last action
            # or, if there is none, with the action itself.
            final_value = float(scores.values[-1])
    values = old_values.astype(np.float64)
    advantages = token_advantages(
        _token_rewards(member, bounds),
        values,
        discount=critic.discount,
        decay=critic.decay,
        end_value=end_value(
            final_value,
            is_truncated=member.trajectory.is_truncated,
            truncation=critic.truncation,
        ),
    )
    targets = (advantages + values).astype(np.float32)
    return replace(
        member,
        advantages=tuple(advantages[own] for own in numbers),
        old_values=tuple(old_values[own] for own in numbers),
        value_targets=tuple(targets[own] for own in numbers),
    )


def _token_rewards(member: Member, bounds: Int64s) -> Float64s:
    """Return the rewards of the trained tokens, [N].

    A turn's reward goes to its last token, except the parts that were recorded for single tokens.
    The reward of an untrained token moves to the trained token before it, or else to the first.
    Example: token rewards [1, 2, 3, 4], mask [0, 1, 0, 1] -> [6, 4]
    """
    charged, of_turns = member.kl_rewards, member.rewards.copy()
    rewards = np.zeros(int(bounds[-1])) if charged is None else charged.copy()
    for sample in member.samples:
        if sample.token_rewards is None:
            continue
        mask = sample.mask
        for turn in sample.turns:
            earned = sample.token_rewards[turn.tokens].astype(np.float64)
            behind = bounds[turn.index] + np.cumsum(mask[turn.tokens] == 1) - 1
            np.add.at(rewards, np.maximum(behind, 0), earned)
            of_turns[turn.index] -= earned.sum()
    np.add.at(rewards, np.maximum(bounds[1:] - 1, 0), of_turns)
    return rewards


def normalise_members(members: Sequence[Member]) -> list[Member]:
    """Normalise the advantages of a whole step (REINFORCE++), with `normalise_over_tokens`."""
    arrays = [advantages for member in members for advantages in member.advantages]
    new = iter(normalise_over_tokens(arrays))
    return [
        replace(member, advantages=tuple(next(new) for _ in member.advantages))
        for member in members
    ]


def normalise_over_tokens(advantages: Sequence[Float64s]) -> list[Float64s]:
    """Centre and scale a step's advantages by the statistics of its trained tokens.

    A' = (A - m) / (s + 1e-6), where m is the mean and s the population standard deviation over all
    trained tokens. Padding is not counted, so that the numbers do not depend on packing, ranks or
    micro-batches.
    Source: REINFORCE++, arXiv 2501.03262, global advantage normalisation. Two differences from the
        paper: 1e-6 is added to s, as in the group statistics; groups without a signal keep
        advantage 0 and are not counted in m and s, so that solved groups do not enlarge the
        advantages of the others.

    Args: advantages: [M_i] float each, one for each trained token.
    Returns: the same shapes, float64; all 0 if the step's advantages are all equal.
    Example: [[1], [-1, -1, -1]]: m = -.5, s = .866025 -> [[1.732049], [-.577350, ...]]
    """
    flat = np.concatenate([np.empty(0), *advantages])
    if not flat.size or np.ptp(flat) == 0:
        return [np.zeros_like(values) for values in advantages]
    mean, deviation = flat.mean(), flat.std()
    return [(values - mean) / (deviation + STD_EPSILON) for values in advantages]
