"""A session that tests play by a script: the client's messages and the policy's replies."""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.environment.rendering import ChatRenderer
from actors.types import (
    SESSION,
    FinishReason,
    RolloutAssignment,
    Sample,
    Task,
    TokenIds,
    Trajectory,
    VersionSpan,
)
from service.gateway.chat import ChatRequest
from service.gateway.ends import judged_of, samples_of, trained, trajectory_of
from service.gateway.sampling import next_prompt
from service.gateway.tree import Place, SessionTree
from service.intake.session import SessionKeys, SessionTurn, StoredSession
from worlds.builders.session_builders import SPEC, session_end
from worlds.models.tool_families import FAMILIES, Family


def system(content: str) -> Message:
    return Message(role=Role.SYSTEM, content=content)


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def says(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role=Role.ASSISTANT, content=content, tool_calls=calls, reasoning=reasoning)


def call(call_id: str, expression: str = "3+4", *, name: str = "calculator") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments={"expression": expression})


def result(call_id: str, content: str) -> Message:
    return Message(role=Role.TOOL, content=content, tool_call_id=call_id)


class SessionPlayer:
    """A session whose policy gives scripted replies, in the chat format of a model family."""

    def __init__(
        self, family: str = "tiny", *, renderer: ChatRenderer | None = None, **options: Any
    ) -> None:
        self.family: Family = FAMILIES[family]
        self.renderer = renderer or self.family.renderer
        self.options = options
        self.tree = SessionTree("s-0", **options)
        self.places: list[Place] = []
        self.prompts: list[TokenIds] = []

    def ask(
        self,
        messages: list[Message],
        reply: Message,
        *,
        tools: tuple[ToolSchema, ...] = (),
        said: str | None = None,
        request: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Message:
        """Play a request and return the reply.

        said: text that the policy samples, if it differs from the family's format of the reply.
        request: further fields of the request. fields: further fields of the turn.
        """
        asked = ChatRequest(messages=tuple(messages), tools=tools, **(request or {}))
        place = self.tree.find(asked)
        self.tree.note_request(place.request_digest)
        prompt = next_prompt(place, self.renderer)
        number = self.tree.num_turns
        sampled = self.ids(self.family.say(reply) if said is None else said)
        fields = {"request_id": f"request-{number}", **fields}
        turn = SessionTurn(
            number=number,
            parent=place.parent,
            tools=place.tools if place.parent is None else (),
            new_messages=place.new_messages,
            reply=reply,
            extends_parent=prompt.extends_parent,
            new_token_ids=prompt.new_token_ids,
            sampled_token_ids=sampled,
            logprobs=np.full(len(sampled), -0.25 * (number + 1), np.float32),
            version_spans=(VersionSpan(version=number, start=0, end=len(sampled)),),
            finish_reason=fields.pop("finish_reason", FinishReason.STOP),
            num_inserted=prompt.num_inserted,
            break_reason=prompt.break_reason,
            is_auxiliary=asked.is_auxiliary,
            is_instructed=place.is_instructed,
            request_digest=place.request_digest,
            idempotency_key=asked.idempotency_key,
            **fields,
        )
        self.tree.add(turn)
        self.places.append(place)
        self.prompts.append(prompt.token_ids)
        node = self.tree.nodes[number]
        np.testing.assert_array_equal(np.concatenate(node.prompt()), prompt.token_ids)
        full = np.concatenate((prompt.token_ids, sampled))
        np.testing.assert_array_equal(node.full_ids(), full)
        return reply

    def rebuilt(self) -> SessionTree:
        """Return a tree that is built from the stored turns."""
        tree = SessionTree("s-0", **self.options)
        for turn in self.tree.turns:
            tree.add(turn)
        return tree

    def samples(self, **rewards: Any) -> tuple[Sample, ...]:
        return samples_of(self.tree, "t", **rewards)

    def judged(self, named: int | None = None) -> int | None:
        """Return the number of the turn that gets the reward; None if no turn gets it.

        named: number of the turn that the client named.
        """
        found = judged_of(self.tree, trained(self.tree), named)
        return None if found is None else found.turn.number

    def trajectory(self, tree: SessionTree | None = None) -> Trajectory:
        """Return the trajectory of the session as if it ended now.

        tree: the session's rebuilt tree; None: the tree of the player.
        """
        stored = StoredSession(
            id="s-0", submission_id="s", member=0, spec=SPEC,
            keys=SessionKeys(agent="", reward=""), created_at=0.0, end=session_end(),
        )  # fmt: skip
        assignment = RolloutAssignment(
            rollout_id="g000000.0-0", group_id="g000000.0", group_number=0, attempt=0,
            task=Task(task_id="s", environment=SESSION, seed=1),
        )  # fmt: skip
        return trajectory_of(stored, tree or self.tree, assignment, oldest_version=0)

    def shown(self) -> list[str]:
        """Return the text of each sample, with the trained parts in brackets."""
        return [self._shown(sample) for sample in self.samples()]

    def ids(self, text: str) -> TokenIds:
        encoded = self.family.tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoded, dtype=np.int32)

    def _shown(self, sample: Sample) -> str:
        borders = np.flatnonzero(np.diff(sample.mask)) + 1
        pieces = np.split(sample.token_ids, borders)
        texts = [self.family.tokenizer.decode(piece.tolist()) for piece in pieces]
        is_trained = bool(sample.mask[0])
        for index, text in enumerate(texts):
            if is_trained ^ bool(index % 2):
                texts[index] = f"[{text}]"
        return "".join(texts)
