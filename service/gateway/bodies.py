"""The bodies and answers of the session routes. Unknown fields are refused."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from actors.environment.settings import RolloutSettings
from actors.environment.tasks import derived_seed
from actors.limits import MAX_REWARD
from actors.types import SESSION, LeftOutReason, Outcome, Task
from service.access.keys import AGENT, REWARD, Caller, own_id, session_key
from service.api.schemas import WHOLE, NumSamples, RolloutId, StrictBody, TaskData
from service.config.sections import SessionSettings
from service.intake.listing import SessionPage
from service.intake.session import (
    Finish,
    SessionKeys,
    SessionRequest,
    SessionSpec,
    SessionStatus,
    StoredSession,
    session_id,
)
from service.intake.submission import RolloutRequest

# A group's id must be shorter than other ids, because a member's number is appended to it.
SESSIONS_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,119}$"
# Outcomes that a client may state; the gateway decides the others.
STATED_OUTCOMES = frozenset(
    {
        Outcome.COMPLETED,
        Outcome.MAX_TURNS,
        Outcome.MALFORMED_TOOL_CALL,
        Outcome.WALL_TIMEOUT,
        Outcome.AGENT_ERROR,
        Outcome.ENVIRONMENT_ERROR,
        Outcome.REWARD_ERROR,
    }
)


def _stated(outcome: Outcome) -> Outcome:
    if outcome not in STATED_OUTCOMES:
        allowed = ", ".join(sorted(STATED_OUTCOMES))
        raise ValueError(f"got {outcome}, expected null or one of {allowed}")
    return outcome


StatedOutcome = Annotated[
    Outcome,
    AfterValidator(_stated),
    WithJsonSchema({"type": "string", "enum": sorted(STATED_OUTCOMES)}),
]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, strict=True, allow_inf_nan=False)]
MAX_COMPONENTS = 64
Components = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=128)], Reward],
    Field(max_length=MAX_COMPONENTS),
]
TurnNumber = Annotated[int, Field(ge=0, lt=10**9, strict=True), WHOLE]
TURN_PATTERN = "^(0|[1-9][0-9]{0,8})$"


def _turn_number(name: object) -> object:
    """Refuse a turn's number such as "+1" or "01"; "1" and "01" would name the same turn."""
    if isinstance(name, str) and not re.fullmatch(TURN_PATTERN, name):
        raise ValueError(
            "expected a turn's number of at most nine digits, without a sign or leading zeros, "
            "such as 0 or 12"
        )
    return name


TurnRewards = Annotated[
    dict[Annotated[int, Field(ge=0, lt=10**9), BeforeValidator(_turn_number)], Reward],
    Field(json_schema_extra={"propertyNames": {"pattern": TURN_PATTERN}}),
]
# Beyond any limit of a run, and small enough for an error to show it as a float.
MAX_WHOLE = 2**31 - 1
WholeNumber = Annotated[int, Field(ge=1, le=MAX_WHOLE, strict=True), WHOLE]
Seconds = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]


class LimitsBody(StrictBody):
    """Limits of one session; each is at most the run's own limit, which is the default."""

    max_turns: WholeNumber | None = Field(
        None, description="maximum number of turns; at most rollouts.max_turns"
    )
    max_tokens_per_turn: WholeNumber | None = Field(
        None,
        description="maximum number of sampled tokens in a turn; at most "
        "rollouts.max_tokens_per_turn",
    )
    ttl_seconds: Seconds | None = Field(
        None,
        description="seconds from the session's admission or claim after which it ends; at most "
        "rollouts.episode_deadline_s",
    )
    idle_seconds: Seconds | None = Field(
        None,
        description="seconds without a request after which the session ends; at most "
        "sessions.idle_s",
    )
    reward_seconds: Seconds | None = Field(
        None,
        description="seconds after the finish within which a pending reward must be given; at most "
        "sessions.reward_deadline_s",
    )


class SamplingBody(StrictBody):
    """Sampling parameters that a client states only as a check: they must equal the run's."""

    temperature: Number | None = Field(None, description="must equal rollouts.temperature")
    top_p: Number | None = Field(None, description="must be 1")
    top_k: Annotated[int, Field(ge=-1, le=MAX_WHOLE, strict=True), WHOLE] | None = Field(
        None, description="must be -1 or 0, which are off"
    )


class SessionsBody(StrictBody):
    """A task for external agents, played in several sessions that share a baseline."""

    id: str = Field(pattern=SESSIONS_ID_PATTERN, description="chosen by you; unique in your tenant")
    task: TaskData = Field(
        default_factory=dict, description="the task; stored with the sessions for people to read"
    )
    session: str | None = Field(
        None,
        pattern=SESSIONS_ID_PATTERN,
        description="claim one session of the group under this name, which you choose: agents join "
        "one by one, and send the same body except for this name; null: get all sessions",
    )
    join_seconds: Seconds | None = Field(
        None,
        description="only with `session`: seconds after its admission in which the group can be "
        "joined; at most rollouts.episode_deadline_s, the default",
    )
    num_sessions: NumSamples | None = Field(
        None, description="number of sessions in the group; null: algorithm.group_size"
    )
    min_usable_sessions: NumSamples | None = Field(
        None,
        description="train the group as soon as this number of its sessions is usable; null: "
        "when all have ended",
    )
    batch: RolloutId | None = Field(
        None, description="a name that you choose, by which groups can be listed"
    )
    limits: LimitsBody = LimitsBody()
    sampling: SamplingBody = SamplingBody()
    shows_tokens: Flag = Field(
        False, description="whether answers have the sampled ids and their log-probabilities"
    )

    def request(
        self,
        *,
        caller: Caller,
        group_size: int,
        rollouts: RolloutSettings,
        sessions: SessionSettings,
    ) -> RolloutRequest:
        """Return the request that submits the group of sessions to the run.

        Args: caller: the client, from whose key the sessions' keys are derived. group_size: number
        of sessions if the body sets none.
        Raises: ValueError if a limit exceeds the run's limit, or if a sampling parameter differs
        from the run's.
        """
        self._check_sampling(rollouts)
        if self.session is None and self.join_seconds is not None:
            raise ValueError(
                "join_seconds without session: a group whose sessions are all given at once cannot "
                "be joined; remove join_seconds"
            )
        task = Task(
            task_id=caller.whole(self.id),
            environment=SESSION,
            seed=derived_seed("submitted", self.id),
            data=self.task,
        )
        num_sessions = self.num_sessions or group_size
        asked: dict[str, int | float | bool] = {
            name: value for name, value in self.limits.model_dump().items() if value is not None
        }
        if self.shows_tokens:
            asked["shows_tokens"] = True
        if self.session is not None:
            asked["joins"] = True
        if self.join_seconds is not None:
            asked["join_seconds"] = self.join_seconds
        return RolloutRequest.of(
            task,
            asked_samples=self.num_sessions,
            default_samples=group_size,
            min_usable_samples=self.min_usable_sessions,
            batch=self.batch or "",
            key_name=caller.name,
            sessions=SessionRequest(
                spec=self._spec(rollouts, sessions),
                keys=tuple(
                    SessionKeys.of(caller.secret, session_id(task.task_id, member))
                    for member in range(num_sessions)
                ),
                asked=asked,
            ),
        )

    def _spec(self, rollouts: RolloutSettings, sessions: SessionSettings) -> SessionSpec:
        limits = self.limits
        return SessionSpec(
            max_turns=_at_most("max_turns", limits.max_turns, rollouts.max_turns),
            max_tokens_per_turn=_at_most(
                "max_tokens_per_turn", limits.max_tokens_per_turn, rollouts.max_tokens_per_turn
            ),
            ttl_s=_at_most("ttl_seconds", limits.ttl_seconds, rollouts.episode_deadline_s),
            idle_s=_at_most("idle_seconds", limits.idle_seconds, sessions.idle_s),
            reward_deadline_s=_at_most(
                "reward_seconds", limits.reward_seconds, sessions.reward_deadline_s
            ),
            shows_tokens=self.shows_tokens,
            join_s=None
            if self.session is None
            else _at_most("join_seconds", self.join_seconds, rollouts.episode_deadline_s),
        )

    def _check_sampling(self, rollouts: RolloutSettings) -> None:
        sampling = self.sampling
        wanted: dict[str, tuple[float | None, set[float]]] = {
            "temperature": (sampling.temperature, {rollouts.temperature}),
            "top_p": (sampling.top_p, {1.0}),
            "top_k": (sampling.top_k, {-1, 0}),
        }
        for name, (value, allowed) in wanted.items():
            if value is not None and value not in allowed:
                raise ValueError(
                    f"sampling.{name} is {value:g}, expected {max(allowed):g}, with which the run "
                    f"samples and trains; remove sampling.{name}"
                )


def _at_most(name: str, asked: Any, limit: Any) -> Any:
    if asked is not None and asked > limit:
        raise ValueError(
            f"{name} is {asked:g}, expected at most {limit:g}, the run's limit; lower it, or "
            "raise the run's setting"
        )
    return limit if asked is None else asked


class FinishBody(StrictBody):
    """The body of a request that ends a session. Sending the same body again changes nothing."""

    model_config = ConfigDict(
        json_schema_extra={
            "not": {
                "properties": {"reward": {"type": "number"}, "reward_pending": {"const": True}},
                "required": ["reward", "reward_pending"],
            }
        }
    )

    reward: Reward | None = Field(
        None, description="reward of the whole session; 0 is a reward like any other"
    )
    reward_pending: Flag = Field(
        False,
        description="whether the reward is given later, with PUT …/reward; `reward` is then null",
    )
    components: Components = Field(
        default_factory=dict, description="named parts of the reward, for curves"
    )
    turn_rewards: TurnRewards = Field(
        default_factory=dict,
        description="rewards by the number of the turn, in addition to the session's reward",
    )
    turn: TurnNumber | None = Field(
        None,
        description="the number of the judged turn, which gets reward and components; null: the "
        "newest trained turn of a conversation that continued",
    )
    outcome: StatedOutcome | None = Field(None, description="null: the gateway decides")
    detail: str = Field("", max_length=2000, description="the reason of the outcome, for people")

    @model_validator(mode="after")
    def _agree(self) -> FinishBody:
        if self.reward_pending and self.reward is not None:
            raise ValueError("got a reward and reward_pending, expected one of them; leave one out")
        return self

    @property
    def _stated_reward(self) -> float | None:
        """The body's `reward`, or 0 if the body omits the field but has turn rewards."""
        is_left_out = "reward" not in self.model_fields_set and not self.reward_pending
        return 0.0 if is_left_out and self.turn_rewards else self.reward

    def finish(self) -> Finish:
        return Finish(
            reward=self._stated_reward,
            is_reward_pending=self.reward_pending,
            components=self.components,
            turn_rewards=self.turn_rewards,
            turn=self.turn,
            outcome=self.outcome,
            detail=self.detail,
        )


class RewardBody(StrictBody):
    """The body of a request that gives a reward to a session that was finished without one."""

    reward: Reward | None = Field(
        description="null: the reward could not be obtained; the session ends as reward_error"
    )
    components: Components = Field(default_factory=dict)
    turn_rewards: TurnRewards = Field(default_factory=dict)

    def finish(self) -> Finish:
        return Finish(
            reward=self.reward, components=self.components, turn_rewards=self.turn_rewards
        )


class NewSession(StrictBody):
    """A session's address and keys."""

    id: str
    base_url: str = Field(
        description="address for the OpenAI protocols; Anthropic's has no /v1 at its end"
    )
    agent_key: str = Field(description="key of the agent, which can sample but not give a reward")
    reward_key: str = Field(description="key of the judge, which can end and reward the session")
    env: dict[str, str] = Field(description="environment variables with which to start an agent")

    @classmethod
    def of(cls, name: str, *, client_key: str, address: str) -> NewSession:
        """Derive a session's keys and addresses.

        Args: name: the session's run-wide id, with its tenant. client_key: raw key of the client
        that creates the session. address: the API's URL, without a final slash.
        """
        root = f"{address}/sessions/{name}"
        agent_key = session_key(client_key, name, AGENT)
        return cls(
            id=own_id(name),
            base_url=f"{root}/v1",
            agent_key=agent_key,
            reward_key=session_key(client_key, name, REWARD),
            env={
                "OPENAI_BASE_URL": f"{root}/v1",
                "OPENAI_API_KEY": agent_key,
                "ANTHROPIC_BASE_URL": root,
                "ANTHROPIC_API_KEY": agent_key,
            },
        )


class CloseAnswer(StrictBody):
    """The answer when a group is closed: no agent can join it any more."""

    given_up: int = Field(description="number of the group's sessions that were not claimed")


class SessionsAnswer(StrictBody):
    """The answer to a request that submits a group of sessions, or claims one of its sessions.

    If the request claims a session, `sessions` has only this one. No other answer shows the
    sessions' keys. To see them again, send the same request again.
    """

    id: str
    is_new: bool = Field(description="false: this group existed before")
    sessions: list[NewSession]


class SessionLineAnswer(StrictBody):
    """A session, as a list of sessions shows it."""

    id: str
    group: str = Field(description="the session's group; see GET /api/v1/rollouts/GROUP")
    member: int
    status: SessionStatus
    created_at: float = Field(description="seconds since 1970")
    opened_at: float | None = Field(
        description="time when the group was admitted, in seconds since 1970; null: not yet"
    )
    ended_at: float | None
    reward: float | None
    reward_pending: bool
    outcome: Outcome | None

    @classmethod
    def of_line(cls, session: StoredSession, caller: Caller) -> SessionLineAnswer:
        end = session.end
        return cls(
            id=caller.shown(session.id),
            group=caller.shown(session.submission_id),
            member=session.member,
            status=session.status,
            created_at=session.created_at,
            opened_at=session.opened_at,
            ended_at=end.ended_at if end else None,
            reward=end.reward if end else None,
            reward_pending=end is not None and end.reward_until is not None,
            outcome=end.outcome if end else None,
        )


class SessionListAnswer(StrictBody):
    """A page of sessions."""

    sessions: list[SessionLineAnswer]
    next: str | None = Field(
        description="the `cursor` that requests the next page; null: this is the last page"
    )

    @classmethod
    def of(cls, page: SessionPage, caller: Caller) -> SessionListAnswer:
        return cls(
            sessions=[SessionLineAnswer.of_line(line, caller) for line in page.items],
            next=None if page.next is None else "{}.{}".format(*page.next),
        )


class LeftOutTurn(StrictBody):
    """A turn that is not trained."""

    turn: int = Field(description="the turn's number")
    reason: LeftOutReason


class SessionAnswer(SessionLineAnswer):
    """The state of a session."""

    turns: int
    sampled_tokens: int
    ambiguous: int = Field(
        description="number of conversations that were rendered again, because they may continue "
        "any of several turns with equal texts"
    )
    left_out: int = Field(description="number of turns that are not trained")
    left_out_turns: list[LeftOutTurn] = Field(
        description="the turns that are not trained; empty if an older version ended the session"
    )
    malformed: int = Field(description="number of turns with a call that could not be read")
    ignored: dict[str, int] = Field(
        description="number of turns for each parameter that agents sent and that was ignored "
        "(sessions.unsupported: ignore)"
    )
    detail: str

    @classmethod
    def of(cls, session: StoredSession, caller: Caller) -> SessionAnswer:
        totals = session.totals
        assert totals is not None
        return cls(
            **dict(SessionLineAnswer.of_line(session, caller)),
            turns=totals.num_turns,
            sampled_tokens=totals.num_sampled_tokens,
            ambiguous=totals.num_ambiguous,
            left_out=totals.num_left_out,
            left_out_turns=[
                LeftOutTurn(turn=number, reason=reason)
                for number, reason in totals.left_out.items()
            ],
            malformed=totals.num_malformed,
            ignored=dict(totals.ignored),
            detail=session.end.detail if session.end else "",
        )
