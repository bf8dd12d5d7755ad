"""Tests of sessions after a kill, a recovery or an outage of the database."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from worlds.parts.gateway_world import NAME, Gateway, Policy, said, user

from actors.types import NO_VERSION, UNDONE
from service.config.sections import SessionSettings
from service.gateway.chat import RefusalCode, Refused

HI, MORE = user("hi"), user("lower")


async def refusal(work: object) -> Refused:
    with pytest.raises(Refused) as caught:
        await work  # type: ignore[misc]
    return caught.value


async def test_a_kill_between_commit_and_answer_loses_no_turn(tmp_path: Path) -> None:
    """Check that a request that is sent again gets the stored turn."""
    gateway = await Gateway(tmp_path).opened()
    before = await gateway.ask(HI, request_id="one")
    after = await gateway.restart(NAME)
    assert await after.ask(HI, request_id="one") == before
    # A retry by the agent gets the same turn.
    assert await after.ask(HI, request_id="two", is_retry=True) == before
    assert len(after.policy.requests) == 1
    second = await after.ask(HI, said("0"), MORE)
    assert second.turn_id == "task-0.1"
    await after.finish(1.0)
    (sample,) = (await after.trajectory()).samples
    assert sample.num_trained == 4


async def test_after_a_kill_before_the_commit_the_request_is_sampled_again(tmp_path: Path) -> None:
    """Check that a reply that no client received is neither stored nor trained."""
    gate = asyncio.Event()
    gateway = await Gateway(tmp_path, policy=Policy(before=gate.wait)).opened()
    lost = asyncio.create_task(gateway.ask(HI, request_id="one"))
    while not gateway.policy.requests:
        await asyncio.sleep(0.01)
    after = await gateway.restart(NAME)
    await asyncio.gather(lost, return_exceptions=True)
    found = after.sessions_store.load(NAME)
    assert found is not None and found[1] == ()
    gate.set()
    assert (await after.ask(HI, request_id="one")).turn_id == "task-0.0"
    await after.finish(1.0)
    assert (await after.trajectory()).num_trained == 2


async def test_turns_of_a_version_that_a_recovery_undid_are_trained_as_sampled(
    tmp_path: Path,
) -> None:
    """Check a session that continues after the run went back to an earlier version."""
    gateway = await Gateway(tmp_path).opened()
    before = await gateway.ask(HI)
    after = await gateway.restart(NAME)
    assert before.policy_version == 3
    assert await after.ask(HI, is_retry=True) == before
    await after.ask(HI, said("0"), MORE)
    await after.finish(1.0)
    trajectory = await after.trajectory()
    (sample,) = trajectory.samples
    # The second term resumed from version 0 and samples with another version 3.
    trained = sample.versions[sample.versions != NO_VERSION].tolist()
    assert trained == [UNDONE + 3] * 2 + [3] * 2
    assert trajectory.versions == (3, 3)


async def test_a_finished_session_is_delivered_by_the_next_gateway(tmp_path: Path) -> None:
    gateway = await Gateway(tmp_path).opened()
    await gateway.ask(HI)
    await gateway.finish(0.5)
    first = await gateway.trajectory()
    after = await gateway.restart(NAME)
    again = await after.trajectory()
    assert (again.attempt, again.episode_return, again.outcome) == (1, 0.5, first.outcome)
    assert np.array_equal(again.samples[0].token_ids, first.samples[0].token_ids)


async def test_no_turn_is_shown_while_the_database_is_locked(tmp_path: Path) -> None:
    gateway = await Gateway(tmp_path, settings=SessionSettings(hold_s=0.3)).opened()
    with gateway.store._database._writing_connection():
        # Another writer holds the lock of the database.
        refused = await refusal(gateway.ask(HI))
        assert refused.code is RefusalCode.NOT_AVAILABLE
    assert (await gateway.ask(HI, is_retry=True)).turn_id == "task-0.0"
    assert len(gateway.policy.requests) == 1
    await gateway.finish(1.0)
    assert len((await gateway.trajectory()).turns) == 1


async def test_stopping_a_gateway_does_not_end_its_sessions(tmp_path: Path) -> None:
    """Check that a refused request can be sent again to the next gateway."""
    gate = asyncio.Event()
    gateway = await Gateway(tmp_path, policy=Policy(before=gate.wait)).opened()
    asked = asyncio.create_task(gateway.ask(HI, request_id="one"))
    while not gateway.policy.requests:
        await asyncio.sleep(0.01)
    after = await gateway.restart(NAME)
    for refused in (await refusal(asked), await refusal(gateway.ask(HI))):
        assert refused.code is RefusalCode.NOT_AVAILABLE
    gate.set()
    assert (await after.ask(HI, request_id="one")).turn_id == "task-0.0"
