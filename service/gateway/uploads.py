"""Store uploaded trajectories, and return them as rollouts when their groups are admitted.

Turns for agent loops that render their own prompts are sampled, but not stored. Invariants: an
accepted trajectory is stored before the answer. A delivered trajectory is read from the store, so
that another gateway can deliver it again after a crash.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.environment.policy import GenerateReply, GenerateRequest, PolicyClient
from actors.environment.rendering import ChatRenderer
from actors.limits import MIB
from actors.policy_age import oldest_version
from actors.trajectory_queue.window import oldest_admitted_version
from actors.types import Outcome, RolloutAssignment, Trajectory
from service.gateway.chat import RETRY_AFTER_S, RefusalCode, Refused, unavailable
from service.gateway.sampling import EngineClient, GatewaySettings
from service.intake.uploads import (
    GroupPolicy,
    PolicyFacts,
    TrajectoryAnswer,
    Upload,
    UploadGroup,
    UploadLimits,
    UploadReply,
)
from service.store.errors import LeaseLost, StoreError
from service.store.uploads import GroupDiffers, UploadsFull, UploadStore
from service.worker_thread import WorkerThread

log = logging.getLogger("rayloom.gateway")

AGAIN_S = 1.0


class Uploads:
    """A gateway's service for clients that sample on their own and upload whole trajectories.

    The clients can also sample tokens here without a session. Use an instance in one event loop.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        renderer: ChatRenderer,
        store: UploadStore,
        term: int,
        make_policy: Callable[[], PolicyClient],
        count_turn: Callable[[str], None],
    ) -> None:
        """Store the arguments; call neither the store nor the engines.

        count_turn: counts a turn under the key with the given name, and raises Refused if the key
        has reached its limit of turns per minute. term: number of the supervisor's lease on the
        run; the store refuses changes of an older lease.
        """
        self._settings = settings
        self.republished = settings.republished
        self._facts = policy_facts(settings, renderer)
        self._store = store
        self._term = term
        self._engine = EngineClient(make_policy)
        self._count_turn = count_turn
        # Use a separate thread, so that turns can be stored at the same time.
        self._thread = WorkerThread("store", expected=LeaseLost)

    async def policy_facts(self) -> PolicyFacts:
        """Return the facts about the policy (vocabulary, context) by which uploads are checked."""
        return replace(self._facts, republished=self.republished)

    async def generate(self, request: GenerateRequest, key_name: str) -> GenerateReply:
        """Sample the tokens that follow a prompt. Raises: Refused.

        Args: key_name: name of the client's key; empty if the client has the first admin key or no
        key.
        """
        self._count_turn(key_name)
        _, reply = await self._engine.sample(request, param="token_ids")
        return reply

    async def add(
        self,
        uploads: Sequence[Upload],
        policies: Sequence[GroupPolicy],
        *,
        policy_version: int,
        max_members: int,
        max_waiting_mib: int,
    ) -> UploadReply:
        """Store the uploads that can be accepted, and return the result of each.

        Args: policies: rules that decide when a group is complete. policy_version: the version of
        the newest finished step. max_members: largest number of trajectories in a group.
        max_waiting_mib: largest total size of the trajectories whose groups wait for admission.
        Raises: Refused.
        """
        algorithm = self._settings.algorithm
        limits = UploadLimits(
            # The oldest version in a group that is admitted from now on (`AdmissionWindow`).
            oldest_version=oldest_version(
                policy_version, algorithm.max_policy_age, self.republished
            ),
            # Engines have the next version before its step is recorded.
            newest_version=policy_version + 1,
            min_members=algorithm.min_group_size,
            max_members=max_members,
            max_waiting_bytes=max_waiting_mib * MIB,
        )
        try:
            return await self._thread.call(
                self._store.add, uploads, policies, term=self._term, limits=limits
            )
        except UploadsFull as error:
            raise Refused(
                RefusalCode.TOO_MANY_REQUESTS,
                f"{error}; send the request again later, or close or drop incomplete groups",
                retry_after_s=RETRY_AFTER_S,
            ) from error
        except GroupDiffers as error:
            raise Refused(RefusalCode.CONFLICT, str(error)) from error
        except (LeaseLost, StoreError) as error:
            raise unavailable(f"{error}; send the request again") from error

    async def view(self, name: str) -> TrajectoryAnswer | None:
        """Return an uploaded trajectory, without its tokens; None if it does not exist.

        Raises: Refused.
        """
        try:
            return await self._thread.call(self._store.view, name)
        except StoreError as error:
            raise unavailable(f"{error}; send the request again") from error

    async def drop(self, group: str) -> UploadGroup | None:
        """Delete a group and its trajectories, unless the group is complete.

        Returns: the group's state before the call; None if there is no such group. Raises: Refused.
        """
        try:
            return await self._thread.call(self._store.drop, group, term=self._term)
        except (LeaseLost, StoreError) as error:
            raise unavailable(f"{error}; send the request again") from error

    async def play(self, assignment: RolloutAssignment) -> Trajectory:
        """Return the uploaded trajectory for a rollout that the queue has assigned."""
        member = int(assignment.rollout_id.rpartition("-")[2])
        found = await self._load(assignment.task.task_id, member)
        if found is None:
            return Trajectory.of(
                assignment,
                Outcome.INFRASTRUCTURE_ERROR,
                detail=f"the store has no trajectory {member} of {assignment.task.task_id}",
            )
        return self._delivered(found, assignment)

    async def _load(self, group: str, member: int) -> Trajectory | None:
        while True:
            try:
                return await self._thread.call(self._store.load, group, member)
            except StoreError as error:
                # Retry without a limit: the client's answer said that the trajectory is stored.
                log.warning("trajectory %d of %s cannot be read yet: %s", member, group, error)
                await asyncio.sleep(AGAIN_S)

    def _delivered(self, uploaded: Trajectory, assignment: RolloutAssignment) -> Trajectory:
        """Return an uploaded trajectory as the result of an assigned rollout."""
        trajectory = replace(
            Trajectory.of(assignment, uploaded.outcome, detail=uploaded.detail),
            was_rewarded=uploaded.was_rewarded,
            samples=tuple(
                replace(sample, trajectory_id=assignment.trajectory_id)
                for sample in uploaded.samples
            ),
        )
        oldest = oldest_admitted_version(
            assignment.group_number,
            self._settings.algorithm,
            num_ahead=self._settings.num_ahead,
            republished=self.republished,
        )
        versions = trajectory.versions
        if versions is not None and versions[0] < oldest:
            detail = f"sampled by version {versions[0]}, expected at least {oldest}"
            return replace(trajectory, outcome=Outcome.STALE, detail=detail)
        return trajectory


def policy_facts(settings: GatewaySettings, renderer: ChatRenderer) -> PolicyFacts:
    """Return the facts that a client needs to sample tokens for this run elsewhere."""
    shape = settings.shape
    return PolicyFacts(
        tokenizer_fingerprint=renderer.fingerprint,
        vocab_size=None if shape is None else shape.vocab_size,
        mixture=None if shape is None else shape.mixture,
        max_context_tokens=settings.max_context_tokens,
        temperature=settings.rollouts.temperature,
    )
