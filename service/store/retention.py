"""Remove the rows of a run that no resume, report, API call or `inspect` needs any more.

`forget` runs after each committed checkpoint, in one transaction. Only the newest term can remove
rows. Totals are stored separately (`service.telemetry.totals`), so removing rows does not change
them.

- Rows that the run undid by returning to an older checkpoint are removed at once.
- Queue snapshots are kept for the checkpoints to which the run can return: the newest
  `run.keep_checkpoints`, the best `run.keep_best`, and the `milestones`.
- Step records and evaluations are kept for the first 5 steps, the newest 256 steps, the steps of
  the journal, the steps since the oldest of the newest `run.keep_checkpoints` checkpoints, and the
  steps of all kept checkpoints. Of the other steps one of every 2^k is kept, with the smallest k
  that leaves at most 257.
- Ledger events are kept for the steps after the oldest kept checkpoint and for the journal's steps.
  Events of `algorithm.max_policy_age` earlier steps are kept too: a group may be admitted that
  number of versions before its step.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Table, delete, func, not_, select, update

from service.store import tables
from service.store.lineage import Checkpoint, Span, surviving_spans, within
from service.store.run_store import RunStore
from service.telemetry.summary import AVERAGED_STEPS

# Maximum number of steps after which a collapse of the reward is detected.
MILESTONE_STEPS = 20
# A fall of the reward may begin this number of steps before the first step that is detected.
SLOW_STEPS = 10
WHOLE_STEPS = 256
OLDER_STEPS = 256


def milestones(steps: Sequence[int], *, collapsed_since: int | None) -> frozenset[int]:
    """Return the steps whose checkpoints are kept for a return after a collapse of the reward.

    - No collapse: the newest checkpoint that is at least MILESTONE_STEPS older than the newest of
      all, and the checkpoint after it, which replaces it later.
    - Suspected collapse: the newest checkpoint at least SLOW_STEPS before the collapse.
    - If no checkpoint is old enough, the oldest one. Before step MILESTONE_STEPS none is kept,
      because no collapse is detected so early.

    Args: steps: steps of checkpoints, newest first, at least one. collapsed_since: first step of a
    suspected collapse, or None.

    Examples, with MILESTONE_STEPS 20 and SLOW_STEPS 10:
        ([110, 105, 95, 80], None) -> {80, 95}
        ([110, 105, 95, 80], 107) -> {95}
        ([25, 15, 10], None) -> {10}
        ([15, 10], None) -> {}
    """
    if collapsed_since is not None:
        before = [step for step in steps if step <= collapsed_since - SLOW_STEPS]
        return frozenset(before[:1] or steps[-1:])
    old = [step for step in steps if step <= steps[0] - MILESTONE_STEPS]
    if not old:
        # A collapse before MILESTONE_STEPS is not reported; from that step on keep a milestone.
        return frozenset(steps[-1:] if steps[0] >= MILESTONE_STEPS else ())
    return frozenset([old[0], *[step for step in steps if step > old[0]][-1:]])


def forget(
    store: RunStore,
    *,
    term: int,
    kept: Sequence[Checkpoint],
    keep_checkpoints: int,
    journal_steps: int,
    max_policy_age: int,
) -> None:
    """Remove the rows that the run no longer needs, by the rules of this module.

    Args: kept: the checkpoints to which the run can return from now on, newest first, at least one;
    the newest is of this term. keep_checkpoints: the number of newest checkpoints that are always
    kept; the rest of `kept` are the best and the milestones. journal_steps: number of newest
    steps whose trajectories `inspect` can show. max_policy_age: largest allowed age of the policy,
    in versions.

    Raises: LeaseLost, StoreError.
    """
    newest, oldest = kept[0].step, kept[-1].step
    oldest_new = kept[:keep_checkpoints][-1].step
    journalled = newest - journal_steps

    def remove(connection: Connection) -> None:
        _forget_superseded(connection, surviving_spans(connection))
        _forget_snapshots(connection, [commit.id for commit in kept])
        last_thinned = min(oldest_new, journalled, newest - WHOLE_STEPS)
        for table in (tables.steps, tables.evaluations):
            _thin(connection, table, last_step=last_thinned, spared=[each.step for each in kept])
        _forget_events(connection, last_step=min(oldest, journalled) - max_policy_age - 1)

    store.write(term, remove)


def _forget_superseded(connection: Connection, spans: Sequence[Span]) -> None:
    ends = {span.term: span for span in spans}
    for table in (tables.steps, tables.evaluations, tables.events, tables.bindings, tables.results):
        column = table.c.term
        for term in connection.scalars(select(column).distinct()).all():
            rows = delete(table).where(column == term)
            if (span := ends.get(term)) is None:
                connection.execute(rows)
            elif table not in (tables.bindings, tables.results) and span.last_step is not None:
                connection.execute(rows.where(not_(within(table.c, span))))


def _forget_snapshots(connection: Connection, kept: Sequence[int]) -> None:
    """Remove the rows of all checkpoints except those with the ids `kept`."""
    table, leases = tables.checkpoints, tables.leases.c
    others = table.c.id.not_in(kept)
    # The row of a checkpoint from which the run has continued stays, as it shows the lineage.
    joints = select(leases.parent_checkpoint).where(leases.parent_checkpoint.is_not(None))
    connection.execute(delete(table).where(others, table.c.id.not_in(joints)))
    connection.execute(
        update(table)
        .where(others, table.c.queue_snapshot.is_not(None))
        .values(queue_snapshot=None, totals=None, curriculum=None)
    )


def _thin(connection: Connection, table: Table, *, last_step: int, spared: Sequence[int]) -> None:
    """Remove most rows of the steps up to `last_step`, by the rules of this module."""
    stride, step = 1, table.c.step
    while last_step // stride > OLDER_STEPS:
        stride *= 2
    if stride == 1:
        return
    firsts = select(func.min(step)).where(step <= last_step).group_by(step // stride)
    connection.execute(
        delete(table).where(
            step > AVERAGED_STEPS,
            step <= last_step,
            step.not_in(firsts),
            step.not_in(spared),
        )
    )


def _forget_events(connection: Connection, *, last_step: int) -> None:
    """Remove all ledger events up to the last event of the step `last_step`."""
    events = tables.events.c
    # Only the oldest events are removed, so the other events' numbers have no gaps.
    last_seq = connection.scalar(select(func.max(events.seq)).where(events.step <= last_step))
    if last_seq is not None:
        connection.execute(delete(tables.events).where(events.seq <= last_seq))
