"""Where a prompt belongs: the tree's answer is that of comparing it with every open sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds.trajectory_builders import ids

from actors.merge.open_samples import OpenSamples, Place


def obvious_place(samples: list[list[int]], prompt: list[int]) -> Place:
    """`Place` word for word."""
    shared = [num_shared(sample, prompt) for sample in samples]
    begin = [
        (len(sample), number)
        for number, sample in enumerate(samples)
        if shared[number] == len(sample)
    ]
    return Place(
        extends=max(begin)[1] if begin else None,
        nearest=max(number for number, count in enumerate(shared) if count == max(shared)),
        shared=max(shared),
    )


def num_shared(left: list[int], right: list[int]) -> int:
    unequal = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(unequal, min(len(left), len(right)))


class Played:
    """Open samples beside plain lists of the same ids."""

    def __init__(self) -> None:
        self.tree = OpenSamples()
        self.samples: list[list[int]] = []

    def add(self, prompt: list[int], sampled: list[int]) -> None:
        """A turn by its whole prompt, as a buffer adds it."""
        place = None
        if self.samples:
            place = self.tree.place(ids(prompt))
            assert place == obvious_place(self.samples, prompt)
        if place is None or place.extends is None:
            self.samples.append(prompt + sampled)
            assert self.tree.open(ids(prompt), ids(sampled), at=place) == len(self.samples) - 1
        else:
            self.extend(place.extends, prompt[len(self.samples[place.extends]) :] + sampled)

    def extend(self, sample: int, more: list[int]) -> None:
        self.samples[sample] = self.samples[sample] + more
        self.tree.pieces[sample].append(ids(more))
        self.tree.grown.append(sample)

    def check(self) -> None:
        for number, sample in enumerate(self.samples):
            assert self.tree.view(number).tolist() == sample
            for length in range(len(sample) + 1):
                for prompt in (sample[:length], [*sample[:length], 9]):
                    assert self.tree.place(ids(prompt)) == obvious_place(self.samples, prompt)


def random_prompt(rng: np.random.Generator, played: Played, head: list[int]) -> list[int]:
    """A part of any sample, the whole of it or nothing, and a few ids more or none."""
    base = head
    if played.samples and rng.random() < 0.9:
        base = played.samples[-1 if rng.random() < 0.5 else rng.integers(len(played.samples))]
    keep = len(base) - int(rng.choice([0, 0, 1, 2, rng.integers(0, len(base) + 1)]))
    return base[: max(keep, 0)] + rng.integers(0, 3, rng.integers(0, 4)).tolist()


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 5]))
@settings(max_examples=300)
def test_a_prompt_is_placed_where_comparing_it_with_every_sample_places_it(
    seed: int, num_common: int
) -> None:
    # Few distinct ids and short stretches: samples that are equal, or begin others, are common.
    rng = np.random.default_rng(seed)
    played, head = Played(), [7] * num_common
    for _ in range(rng.integers(1, 25)):
        sampled = rng.integers(0, 3, rng.integers(0, 4)).tolist()
        if played.samples and rng.random() < 0.2:
            sample, other = rng.integers(len(played.samples), size=2).tolist()
            # At times along another sample, which may be a newer one.
            ahead = played.samples[other][len(played.samples[sample]) :]
            played.extend(sample, ahead[: rng.integers(0, 9)] + sampled)
        else:
            played.add(random_prompt(rng, played, head), sampled)
    played.check()


@given(st.integers(0, 2**32 - 1))
def test_branches_off_a_comb_and_combs_that_take_turns_are_placed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    played = Played()
    histories = [[7, number] for number in range(rng.integers(1, 4))]
    for _ in range(rng.integers(1, 40)):
        number = int(rng.integers(len(histories)))
        history = histories[number]
        # A thought that the next prompt does not have, at times the one that an older turn had.
        played.add(history, [int(rng.integers(3, 5)), 5])
        if rng.random() < 0.8:
            histories[number] = [*history, *rng.integers(0, 3, rng.integers(1, 3)).tolist()]
        else:
            histories[number] = history[: rng.integers(1, len(history) + 1)]
    played.check()


@given(st.lists(st.integers(0, 29_999), min_size=1, max_size=6), st.booleans())
@example([15_000], False)
@example([14_999], True)
@example([4_095, 4_096, 29_999], True)
@settings(max_examples=30)
def test_the_place_where_long_samples_part_is_found_to_the_token(
    places: list[int], goes_on: bool
) -> None:
    line = list(range(1, 30_001))
    played = Played()
    played.add(line[:20_000], line[20_000:])
    for place in places:
        played.add([*line[:place], 0, *line[place + 1 :]], [5] if goes_on else [])
        played.add(line[:place], [5] if goes_on else [])


@pytest.mark.parametrize("num_common", [0, 3])
def test_a_sample_that_another_begins_with_is_found_until_it_grows(num_common: int) -> None:
    head = [7] * num_common
    played = Played()
    played.add([*head, 1, 2, 3], [4])
    played.add([*head, 1], [2])
    assert played.tree.place(ids([*head, 1, 2, 3])) == Place(
        extends=1, nearest=0, shared=num_common + 3
    )
    played.extend(1, [5])
    assert played.tree.place(ids([*head, 1, 2, 3])) == Place(
        extends=None, nearest=0, shared=num_common + 3
    )


def test_a_sample_that_grows_along_a_newer_one_is_not_the_newest_there() -> None:
    played = Played()
    played.add([1, 2, 3, 4, 5, 6], [])
    played.add([1, 2, 3], [])
    played.add([1, 2], [3, 4, 5, 9])
    played.tree.place(ids([1]))
    played.extend(1, [4, 7])
    played.check()
    assert played.tree.place(ids([1, 2, 3, 4, 8])) == Place(extends=None, nearest=2, shared=4)
