"""Tests of the list of faults: each can be planted, and each package has at least five."""

from __future__ import annotations

from collections import Counter

from mutants import problems, read_mutants


def test_every_fault_of_the_list_can_be_planted() -> None:
    assert list(problems(read_mutants())) == []


def test_each_package_has_at_least_five_faults() -> None:
    counts = Counter(mutant.package for mutant in read_mutants())
    assert min(counts.values()) >= 5 and len(counts) >= 16
