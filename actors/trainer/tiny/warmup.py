"""A short supervised warm-up that teaches the tiny policy the form of an answer, never its content.

Invariant: every target is drawn independently of the question, the hints and the tool's results. So
only reinforcement teaches a policy to win. Only assistant tokens are in the loss. A share
MALFORMED_SHARE of the tool calls is malformed on purpose, so that training can reduce this share.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

from actors.environment.builtin.calculator import CALCULATOR, QUESTION
from actors.environment.builtin.guessing import HIGHER, INVITATION, LOWER, REMINDER
from actors.environment.protocol import ToolSchema
from actors.environment.tool_turns import ERROR
from actors.trainer.tiny.tokenizer import ROLE_TOKENS, TURN_END

IGNORED = -100
MALFORMED_SHARE = 0.3
"""The share of calculator calls whose JSON is broken."""
SPOILT_SHARE = 0.05
"""The share of guesses without a number, so that reminders occur; the loss ignores these
guesses.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat whose assistant messages are the targets."""

    messages: tuple[tuple[str, str], ...]
    """(role, content) pairs."""
    tools: tuple[ToolSchema, ...] = ()
    """The tools that the chat offers."""
    untrained: frozenset[int] = frozenset()
    """Indices of assistant messages that are context only."""


LEARNING_RATE = 2e-3
"""Peak AdamW learning rate, after a linear rise over a tenth of the steps and before decay."""
COUNTS = {"num_guessing": 16, "num_calculator": 6, "num_answers": 6}
"""Numbers of chats in each step: guessing games, chats with the calculator tool, and questions,
each with an answer and without tools."""


class Decks:
    """Deals random numbers from 1 to `high`, like cards from a shuffled deck.

    A deck is shuffled again only after all its numbers are dealt, so all are about equally
    frequent. Each turn of a game has a deck of its own, so that the game's guesses are independent.
    Games with different `high` use different decks.
    """

    def __init__(self) -> None:
        self._cards: dict[tuple[int, int], list[int]] = {}

    def deal(self, dice: random.Random, *, high: int, turn: int) -> int:
        cards = self._cards.setdefault((high, turn), [])
        if not cards:
            cards.extend(range(1, high + 1))
            dice.shuffle(cards)
        return cards.pop()


def guessing_conversation(dice: random.Random, decks: Decks) -> Conversation:
    """Return a guessing game with uniform guesses and true hints."""
    high = dice.choice((5, 6, 7, 7, 7, 7, 8, 9))
    max_guesses = dice.choice((2, 3, 3, 4))
    secret = dice.randint(1, high)
    messages = [("user", INVITATION.format(low=1, high=high, max_guesses=max_guesses))]
    untrained = set()
    for turn in range(max_guesses):
        guess = decks.deal(dice, high=high, turn=turn)
        is_spoilt = dice.random() < SPOILT_SHARE
        if is_spoilt:
            untrained.add(len(messages))
        messages.append(("assistant", "number" if is_spoilt else str(guess)))
        if turn == max_guesses - 1 or (guess == secret and not is_spoilt):
            break
        if is_spoilt:
            messages.append(("user", REMINDER.format(low=1, high=high)))
        else:
            messages.append(("user", HIGHER if secret > guess else LOWER))
    return Conversation(messages=tuple(messages), untrained=frozenset(untrained))


def _random_expression(dice: random.Random) -> str:
    return f"{dice.randint(1, 9)}{dice.choice('+-*')}{dice.randint(1, 9)}"


def _tool_call(dice: random.Random) -> tuple[str, bool]:
    arguments = {"expression": _random_expression(dice)}
    body = json.dumps({"name": CALCULATOR.name, "arguments": arguments})
    is_well_formed = dice.random() >= MALFORMED_SHARE
    if not is_well_formed:
        body = dice.choice((body[:-1], body[:-2], body.replace('"}}', "}}"), body[1:]))
    return f"<tool_call>{body}</tool_call>", is_well_formed


def calculator_conversation(dice: random.Random) -> Conversation:
    """Return a chat with one tool call; its operands and the final answer are random."""
    call, is_well_formed = _tool_call(dice)
    error = ERROR.format(message="The tool call is not valid JSON.")
    result = str(dice.randint(-8, 81)) if is_well_formed else error
    return Conversation(
        messages=(
            ("user", QUESTION.format(expression=_random_expression(dice))),
            ("assistant", call),
            ("tool", result),
            ("assistant", str(dice.randint(-8, 81))),
        ),
        tools=(CALCULATOR,),
    )


def answer_conversation(dice: random.Random) -> Conversation:
    """Return an arithmetic question with a random number as answer, with or without answer tags."""
    number = str(dice.randint(0, 99))
    question = f"What is {dice.randint(0, 99)} {dice.choice('+-*')} {dice.randint(0, 99)}?"
    answer = number if dice.random() < 0.5 else f"<answer>{number}</answer>"
    return Conversation(messages=(("user", question), ("assistant", answer)))


def encode(
    tokenizer: PreTrainedTokenizerFast, conversation: Conversation
) -> tuple[list[int], list[int]]:
    """Return ids [T] and labels [T]; the label of a token that is not trained is IGNORED."""
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in conversation.messages],
        tools=[tool.for_template() for tool in conversation.tools] or None,
        tokenize=False,
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    end_id = tokenizer.convert_tokens_to_ids(TURN_END)
    role_ids = set(tokenizer.convert_tokens_to_ids(list(ROLE_TOKENS.values())))
    labels = [IGNORED] * len(ids)
    starts = [position for position, token in enumerate(ids) if token in role_ids]
    # If there are tools, the template renders a system turn, which is not a message, before the
    # first message.
    for message, start in enumerate(starts[-len(conversation.messages) :]):
        is_answer = conversation.messages[message][0] == "assistant"
        if is_answer and message not in conversation.untrained:
            # The token of the role belongs to the prompt, so it is not trained.
            first, end = start + 1, ids.index(end_id, start) + 1
            labels[first:end] = ids[first:end]
    return ids, labels


def _padded(
    rows: Sequence[tuple[list[int], list[int]]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), pad_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (row_ids, row_labels) in enumerate(rows):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        labels[row, : len(row_labels)] = torch.tensor(row_labels)
    return ids, labels


def _step_loss(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[Sequence[Conversation]],
) -> torch.Tensor:
    """Return the mean cross-entropy over all assistant tokens."""
    total = torch.zeros(())
    count = 0
    for kind in conversations:
        rows = [encode(tokenizer, conversation) for conversation in kind]
        ids, labels = _padded(rows, tokenizer.pad_token_id)
        # Padding is on the right and the mask is causal: no attention mask is needed.
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        total = total + F.cross_entropy(
            logits.float(), targets, ignore_index=IGNORED, reduction="sum"
        )
        count += int((targets != IGNORED).sum())
    return total / count


def warm_up(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    seed: int,
) -> tuple[float, ...]:
    """Train the model in place and return the loss of each step, in nats per token.

    steps: number of optimiser steps; 0 leaves the random initialisation.
    """
    dice = random.Random(seed)
    decks = Decks()
    makers: tuple[Callable[[random.Random], Conversation], ...] = (
        lambda dice: guessing_conversation(dice, decks),
        calculator_conversation,
        answer_conversation,
    )
    kinds = list(zip(makers, COUNTS.values(), strict=True))
    return imitate(
        model,
        tokenizer,
        lambda: [[make(dice) for _ in range(count)] for make, count in kinds],
        steps=steps,
        learning_rate=LEARNING_RATE,
    )


def imitate(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    deal: Callable[[], Sequence[Sequence[Conversation]]],
    *,
    steps: int,
    learning_rate: float,
) -> tuple[float, ...]:
    """Train the model in place; return the loss of each step, in nats per token.

    deal: function that returns the next step's conversations, in one sequence for each kind of task
    (such as guessing or tool calls).
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    rise = max(1, steps // 10)
    losses: list[float] = []
    for step in range(steps):
        scale = min((step + 1) / rise, 2.0 * (1 - step / steps), 1.0)
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate * scale
        loss = _step_loss(model, tokenizer, deal())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return tuple(losses)
