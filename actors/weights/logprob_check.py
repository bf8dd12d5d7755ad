"""The log-probability check, which compares the trainer's and the engines' scores of a text.

    text = CheckText(token_ids=join_prompts(prompts, num_tokens=4032, vocab_size=vocab_size))
    own = ...                          # the trainer's scores of `text_row(text)`, [T - 1], nats
    found = LogprobCheck(num_tokens=4032, dtype=dtype, comparisons=(compare("alone", own, engine),))
    found.is_beyond                    # whether they differ by more than BOUNDS allows

Pure; needs only NumPy. `service.run.engines.Publisher` compares scores after each load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from actors.batch import Float32s, Int32s, MicroBatch, untrained_row
from actors.types import Dtype

CPU_CHECK_TOKENS = 4096
"""Number of tokens of the text that is scored before the first step on CPU, unless the
configuration sets another number.
"""
FAR_TOKENS = 1024
"""Number of the text's last tokens that are scored after a publication."""
SHORT_TOKENS = 64
"""Number of the text's first tokens that are scored if scoring its last tokens would take too
long.
"""
MIN_JUDGED_TOKENS = 18
"""Length below which the difference of a text is reported but not judged."""
MAX_SAMPLED = 256
"""Largest number of sampled tokens in the check before the first step, over all temperatures."""
MAX_SAMPLED_AT_ONE = 64
"""Largest number of sampled tokens in the check before the first step, at one temperature."""
CHECKED_TEMPERATURES = (1.0, 0.7)
"""Temperatures that are checked in addition to the run's own."""
COST_SHARE = 0.05
"""Largest share of the time since the start that the checks after publications may take."""
_MAX_PIECE = 64
_MIN_QUARTER = 64
# Replaces a difference that is not a number, so that it can be stored and shown.
_NO_NUMBER_NATS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The largest differences that rounding can explain, in nats."""

    mean: float
    largest: float | None
    """Bound for a single token; None if a token's scores may differ by any amount."""


# These bounds are constants; no run measures its own. If trainer and engine compute the same
# function, rounding stays below the bounds. With model families that trainer and engine compute
# differently, the difference is 0.5 to 6 nats, far above the bounds.
# In bfloat16 rounding depends on the model: trainer and engine differ by 0.01 nats on average with
# tiny models, and by 0.03 to 0.065 with SmolLM2-135M. With that model each of the two differs by
# 0.044 from float32. A single unlikely token may differ by 0.5.
BOUNDS: Mapping[Dtype, Bounds] = {
    Dtype.FLOAT32: Bounds(mean=1e-4, largest=1e-2),
    Dtype.BFLOAT16: Bounds(mean=0.1, largest=None),
}
# An engine with quantised weights or cache is not the same function. The bound is only for an
# engine that holds other weights or computes another architecture.
QUANTISED_BOUNDS = Bounds(mean=0.2, largest=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckText:
    """The text that an engine scores after it has loaded a version."""

    token_ids: Int32s
    """[T] int32, the tokens of the text."""
    first_scored: int = 1
    """Index of the first token whose score is compared; token 0 has no score."""
    temperatures: tuple[float, ...] = ()
    """Temperatures at which the text is continued."""
    num_sampled: int = 0
    """Number of tokens of each continuation."""


NO_TEXT = CheckText(token_ids=np.empty(0, np.int32))
"""The text of a publication that is not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSample:
    """A continuation of the check's text that an engine sampled."""

    temperature: float
    token_ids: Int32s
    """[N] int32, the sampled tokens."""
    logprobs: Float32s
    """[N] float32, nats, at the sample's temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineScores:
    """An engine's log-probabilities of a `CheckText`, and its continuations of the text."""

    logprobs: Float32s
    """[T - first_scored] float32, nats, at temperature 1, the only one at which vLLM scores
    prompts.
    """
    samples: tuple[CheckSample, ...] = ()
    seconds: float = 0.0


def start_text(
    prompts: Sequence[Int32s],
    *,
    max_context_tokens: int,
    limit: int | None,
    is_on_cpu: bool,
    vocab_size: int,
    temperatures: Iterable[float],
) -> CheckText:
    """Return the text that trainer and engines score before the first step.

    Engines also sample a continuation of the text at each temperature.

    Args:
        limit: The largest number of tokens of the text plus one continuation. None for 4,096 on
            CPU, and for the whole context on GPU.
        temperatures: The run's temperatures, which are checked in addition to 1.0 and 0.7.
    """
    cap = limit or (CPU_CHECK_TOKENS if is_on_cpu else max_context_tokens)
    num_tokens = max(min(max_context_tokens, cap), 8)
    every = tuple(dict.fromkeys((*CHECKED_TEMPERATURES, *temperatures)))
    num_sampled = max(1, min(MAX_SAMPLED_AT_ONE, MAX_SAMPLED // len(every), num_tokens // 4))
    token_ids = join_prompts(prompts, num_tokens=num_tokens - num_sampled, vocab_size=vocab_size)
    return CheckText(token_ids=token_ids, temperatures=every, num_sampled=num_sampled)


def join_prompts(prompts: Sequence[Int32s], *, num_tokens: int, vocab_size: int) -> Int32s:
    """Return a text of the first prompt and random pieces of all prompts: [num_tokens] int32.

    The text is the same in each call with the same prompts. Pieces are short, because a model
    predicts a repeated passage almost with certainty, and the scores of such tokens would hide a
    fault. If there are no prompts, the tokens are drawn from the vocabulary.
    """
    generator = np.random.default_rng(0)
    usable = [each for each in prompts if each.size and 0 <= each.min() and each.max() < vocab_size]
    if not usable:
        return generator.integers(vocab_size, size=num_tokens).astype(np.int32)
    pieces = [usable[0][:num_tokens]]
    missing = num_tokens - pieces[0].size
    while missing > 0:
        prompt = usable[int(generator.integers(len(usable)))]
        begin = int(generator.integers(prompt.size))
        length = int(generator.integers(1, _MAX_PIECE + 1))
        pieces.append(prompt[begin : begin + min(length, missing)])
        missing -= pieces[-1].size
    return np.concatenate(pieces).astype(np.int32)


def published_text(start: CheckText, samples: Sequence[CheckSample], *, most: int) -> CheckText:
    """Return the text that is scored after new weights are published.

    The text is `start`, followed by the first of an engine's continuations of `start`, if there is
    one. It is shortened to `most` tokens, the longest prompt that an engine accepts.
    """
    token_ids = np.concatenate([start.token_ids, *[each.token_ids for each in samples[:1]]])
    return CheckText(token_ids=token_ids[:most].astype(np.int32))


def far_end(text: CheckText) -> CheckText:
    """Return a check's text for a quicker check, which scores only the last FAR_TOKENS tokens.

    Faults that depend on a token's position appear at the end of the text.
    """
    if text.token_ids.size <= FAR_TOKENS + text.first_scored:
        return text
    return replace(text, first_scored=max(1, text.token_ids.size - FAR_TOKENS))


def short(text: CheckText) -> CheckText:
    """Return the first SHORT_TOKENS tokens of the text, for a check that takes little time."""
    return CheckText(token_ids=text.token_ids[:SHORT_TOKENS])


def text_row(text: CheckText) -> MicroBatch:
    """Return a packed row with only the text; its targets are the tokens that are compared."""
    return _row([text.token_ids], [-1], text, begin=0)


def packed_row(text: CheckText) -> MicroBatch:
    """Return a packed row in which the text is between two other samples.

    The scores of the text should be the same as in `text_row`. They differ if the model mixes the
    samples of a packed row. The other two samples are parts of the text, and are not compared.
    """
    quarter = max(1, text.token_ids.size // 4)
    before, after = text.token_ids[:quarter], text.token_ids[quarter : 2 * quarter]
    return _row([before, text.token_ids, after], [-1, -1, -1], text, begin=quarter)


def sampled_row(text: CheckText, samples: Sequence[CheckSample]) -> MicroBatch:
    """Return a packed row of the text and its continuations; the continuations are the targets."""
    length = text.token_ids.size
    starts = list(accumulate((each.token_ids.size for each in samples), initial=length))
    positions = [
        np.concatenate(([length - 1], np.arange(start, start + each.token_ids.size - 1)))
        for start, each in zip(starts, samples, strict=False)
    ]
    return untrained_row(
        [text.token_ids, *[each.token_ids for each in samples]],
        [-1, *[0] * len(samples)],
        loss_positions=np.concatenate(positions),
        targets=np.concatenate([each.token_ids for each in samples]),
        temperatures=np.concatenate(
            [np.full(each.token_ids.size, each.temperature) for each in samples]
        ),
    )


def _row(
    segments: Sequence[Int32s], parents: Sequence[int], text: CheckText, *, begin: int
) -> MicroBatch:
    targets = text.token_ids[text.first_scored :]
    return untrained_row(
        segments,
        parents,
        loss_positions=begin + np.arange(text.first_scored - 1, text.token_ids.size - 1),
        targets=targets,
        temperatures=np.ones(targets.size),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The difference between two series of scores, |trainer - engine| in nats."""

    name: str
    """Name of the series."""
    num_scores: int
    mean: float
    largest: float
    quarters: tuple[float, float, float]
    """The mean differences over the first, the middle and the last quarter of the tokens."""

    def ratio(self, bounds: Bounds) -> float:
        """Return the difference divided by its bound; rounding cannot explain a value above 1."""
        means = [self.mean]
        if self.num_scores >= 4 * _MIN_QUARTER:
            means += self.quarters
        found = max(means) / bounds.mean
        return found if bounds.largest is None else max(found, self.largest / bounds.largest)

    def __str__(self) -> str:
        first, middle, last = (_nats(each) for each in self.quarters)
        return (
            f"{self.name}: mean {_nats(self.mean)}, largest {_nats(self.largest)} over "
            f"{self.num_scores} tokens (first quarter {first}, middle {middle}, last {last})"
        )


def compare(name: str, own: Float32s, engine: Float32s) -> Comparison:
    """Return the difference between the trainer's scores `own` and an engine's scores.

    Args: both [N] float32, nats, N at least 1.
    Raises: ValueError if the engine scored another number of tokens.
    """
    if engine.shape != own.shape:
        raise ValueError(
            f"log-probability check: got {engine.shape[0]} log-probabilities of an engine, "
            f"expected {own.shape[0]}; trainer and engine run different versions of Rayloom"
        )
    found = np.abs(own.astype(np.float64) - engine.astype(np.float64))
    found = np.nan_to_num(found, nan=_NO_NUMBER_NATS, posinf=_NO_NUMBER_NATS)
    count, quarter = found.size, max(1, found.size // 4)
    middle = (count - quarter) // 2
    parts = (found[:quarter], found[middle : middle + quarter], found[count - quarter :])
    first, second, last = (float(part.mean()) for part in parts)
    return Comparison(
        name=name,
        num_scores=count,
        mean=float(found.mean()),
        largest=float(found.max()),
        quarters=(first, second, last),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobCheck:
    """The result of the check before the first step, or after a publication."""

    num_tokens: int
    """Number of tokens of the text with its continuations: the context that was checked."""
    dtype: Dtype
    """The type whose bounds apply: the less precise of the trainer's and the engine's."""
    comparisons: tuple[Comparison, ...]
    """The compared series, at least one."""
    is_quantised: bool = False
    """Whether the engine's weights or cache are quantised, so that the wider bounds apply."""
    seconds: float = 0.0
    """Seconds that the trainer and the slowest engine took together, for a check after a
    publication.
    """

    @property
    def bounds(self) -> Bounds:
        return QUANTISED_BOUNDS if self.is_quantised else BOUNDS[self.dtype]

    @property
    def worst(self) -> Comparison:
        return max(self.comparisons, key=lambda each: each.ratio(self.bounds))

    @property
    def ratio(self) -> float:
        return self.worst.ratio(self.bounds)

    @property
    def is_judged(self) -> bool:
        """Whether the text is long enough to judge the difference.

        The mean difference over fewer than MIN_JUDGED_TOKENS tokens is not reliable in bfloat16.
        """
        return self.num_tokens >= MIN_JUDGED_TOKENS

    @property
    def is_beyond(self) -> bool:
        return self.is_judged and self.ratio > 1

    @property
    def statistics(self) -> dict[str, float]:
        """The check's statistics by their names in `actors.statistics`."""
        ratio = {"logprob_check_ratio": self.ratio} if self.is_judged else {}
        return ratio | {
            "logprob_check_max": max(each.largest for each in self.comparisons),
            "logprob_check_mean": max(each.mean for each in self.comparisons),
            "logprob_check_tokens": float(self.num_tokens),
            "logprob_check_seconds": self.seconds,
        }

    def after(self, earlier: LogprobCheck | None) -> LogprobCheck:
        """Return one check with the comparisons of an earlier check and of this one.

        If a step's record must show two checks, they are joined in this way.
        """
        if earlier is None:
            return self
        return replace(
            self,
            num_tokens=max(self.num_tokens, earlier.num_tokens),
            comparisons=(*earlier.comparisons, *self.comparisons),
        )

    def __str__(self) -> str:
        """Return a sentence with the differences beyond the bounds, and with likely causes."""
        bounds = self.bounds
        allowed = f"a mean of at most {_nats(bounds.mean)}"
        if bounds.largest is not None:
            allowed += f" and a largest of at most {_nats(bounds.largest)}"
        remedy = ""
        if self.dtype is Dtype.BFLOAT16:
            remedy = (
                "; to rule out rounding, try model.dtype and trainer.dtype float32, where it is "
                "below 1e-4 nats"
            )
        return (
            f"trainer and engine differ over a text of {self.num_tokens} tokens by "
            f"|trainer - engine|, nats: {self._listed()}; expected "
            f"{'of a quantised engine' if self.is_quantised else f'in {self.dtype}'} {allowed}; "
            f"likely: {self._causes()}{remedy}"
        )

    def _listed(self) -> str:
        """Describe the comparisons beyond their bound, the worst first; at least the worst one."""
        found: dict[str, Comparison] = {}
        bounds = self.bounds
        for each in sorted(self.comparisons, key=lambda each: -each.ratio(bounds)):
            if each is self.worst or each.ratio(bounds) > 1:
                found.setdefault(each.name, each)
        return "; ".join(str(each) for each in found.values())

    def _causes(self) -> str:
        bounds = self.bounds
        beyond = {each.name for each in self.comparisons if each.ratio(bounds) > 1}
        first, _, last = self.worst.quarters
        if PACKED in beyond and ALONE not in beyond:
            return (
                "the model's layers mix the samples of a packed row; choose an architecture that "
                "mixes tokens only in attention"
            )
        if ALONE not in beyond:
            return "the two divide their logits by different temperatures"
        if last > 10 * max(first, bounds.mean / 10):
            return (
                "positions or attention that change with the length (RoPE scaling, a sliding "
                "window, chunks): shorten model.max_context_tokens to where they agree"
            )
        return (
            "the engine holds other weights than the trainer (a tensor or a buffer that is not "
            "published, a head that is not tied), or one of the two computes this architecture "
            "differently; compare with other versions of vLLM and transformers, or choose another "
            "model"
        )


ALONE, PACKED = "only the text", "the text packed with other rows"


def sampled_name(temperature: float) -> str:
    return f"tokens sampled at temperature {temperature:g}"


def bounds_dtype(*dtypes: Dtype) -> Dtype:
    """Return the less precise of the types of trainer and engine, which determines `Bounds`."""
    return Dtype.BFLOAT16 if Dtype.BFLOAT16 in dtypes else Dtype.FLOAT32


def _nats(value: float) -> str:
    return f"{value:.2g}"
