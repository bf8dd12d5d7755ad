"""Tests of a merge actor that dies during a call: it is replaced, and its results remain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ray
from ray.actor import ActorHandle
from worlds.faults.mortal_merge import SIZE, Maker

from actors.deadline import ActorLost
from actors.merge.groups import PayloadsLost
from actors.trajectory_queue.messages import StepInput
from service.run.restartable_merge import MAX_ATTEMPTS, RestartableMerge

pytestmark = [pytest.mark.usefixtures("cluster")]

STEP = StepInput(step=1, groups=(), blocks=())


def make_merge(deaths: Path, told: list[str]) -> RestartableMerge:
    def start() -> ActorHandle:
        return ray.remote(num_cpus=0)(Maker).remote(deaths)

    return RestartableMerge(start, on_restart=told.append)


@pytest.mark.proof
@pytest.mark.slow
async def test_a_call_whose_actor_dies_is_repeated_and_results_outlive_the_actor(
    tmp_path: Path,
) -> None:
    deaths, told = tmp_path / "deaths", list[str]()
    deaths.write_text("1\n2")
    merge = make_merge(deaths, told)
    (rows,) = await merge.plan(STEP, 7)
    assert len(told) == 2 and "the merge actor died" in told[0]
    built = await merge.build(STEP, 8, (), ())
    with pytest.raises(PayloadsLost):
        await merge.plan(STEP, -1)
    merge.kill()
    for reference, value in ((rows, 7), (built.shards[0], 8)):
        np.testing.assert_array_equal(await reference, np.full(SIZE, value))
    # The actor was killed between two calls.
    assert (await merge.build(STEP, 9, (), ())).step == 1 and len(told) == 3
    merge.kill()


@pytest.mark.chaos
async def test_an_actor_that_dies_in_every_attempt_ends_the_term(tmp_path: Path) -> None:
    deaths, told = tmp_path / "deaths", list[str]()
    deaths.write_text("\n".join("x" * MAX_ATTEMPTS))
    merge = make_merge(deaths, told)
    with pytest.raises(ActorLost, match="the merge actor died"):
        await merge.build(STEP, 1, (), ())
    assert len(told) == MAX_ATTEMPTS - 1
    merge.kill()
