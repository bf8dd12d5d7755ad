"""The tables and the definitions of the fold "Statistics of the loss"; pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from service import units
from service.report.tables import Table
from service.telemetry.records import StepRecord
from service.telemetry.statistic_names import STATISTICS


def loss_tables(records: Sequence[StepRecord]) -> tuple[Table, ...]:
    """One table a group: of each statistic that was known at some step, where it began, where it
    went and where it ended. What a group's names begin with stands in its caption alone.
    """
    tables = [_table(group, names, records) for group, names in STATISTICS.items()]
    return tuple(table for table in tables if not table.is_empty)


def _table(group: str, names: Sequence[str], records: Sequence[StepRecord]) -> Table:
    known = {
        name: [record.statistics[name] for record in records if name in record.statistics]
        for name in names
    }
    num_shared = _num_shared_words(names)
    return Table(
        caption=group,
        header=("statistic", "first", "smallest", "largest", "last"),
        rows=tuple(
            (
                " ".join(name.split("_")[num_shared:]),
                *map(units.significant, (found[0], min(found), max(found), found[-1])),
            )
            for name, found in known.items()
            if found
        ),
    )


def _num_shared_words(names: Sequence[str]) -> int:
    """How many words all names begin with; the last of a name is not among them."""
    places = zip(*(name.split("_")[:-1] for name in names), strict=False)
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, places))


LOSS_DEFINITIONS: tuple[tuple[str, str], ...] = (
    (
        "Log-probability",
        "of trained tokens under the policy at each update; positive, negative: those with an "
        "advantage of that sign.",
    ),
    ("KL to the reference", "the estimate that is in the loss, at each trained token."),
    (
        "Ratio",
        "probability of a token now over that at its sampling, or at the step's start; before "
        "clip and mask.",
    ),
    (
        "Clipped",
        "the objective took a token's gradient away, or bounded its weight: low or high ratios.",
    ),
    ("Masked", "out of the loss, because trainer and engine differ too much there."),
    ("Importance weight", "corrects the loss of a token for that difference; 1 without it."),
    (
        "Critic",
        "explained: 1 for values that foresee every return, 0 for ones as good as their mean, less "
        "for worse ones.",
    ),
    ("Return", "of a graded trajectory, after reward shaping; not over the best possible one."),
    ("Surrogate", "what the objective raises, with weight and mask; and ratio times advantage."),
)
