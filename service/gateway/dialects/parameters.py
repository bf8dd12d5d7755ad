"""The effect of each parameter in a client's body, as data: read, without effect, or refused.

The documentation is made from these tables too. An unknown parameter is refused; null counts as not
given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Effect(StrEnum):
    """The effect that the gateway gives to a parameter in a client's body."""

    READ = "read"
    NONE = "none"
    """Any value is accepted and changes nothing: the run decides, or nothing depends on it."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The effect of one parameter in a client's body, and a note about it for the docs."""

    effect: Effect
    note: str
    """Text for the docs: the form of the value, or why it has no effect or is refused."""
    harmless: tuple[object, ...] = ()
    """Values of a refused parameter that change nothing, and are accepted."""
    is_ignorable: bool = False
    """Whether `sessions.unsupported: ignore` accepts and counts this refused parameter: the answer
    has the same form without it."""


Parameters = Mapping[str, Parameter]


def taken(note: str) -> Parameter:
    return Parameter(effect=Effect.READ, note=note)


def without_effect(note: str) -> Parameter:
    return Parameter(effect=Effect.NONE, note=note)


def refused(note: str, *harmless: object) -> Parameter:
    return Parameter(effect=Effect.REFUSED, note=note, harmless=harmless)


def ignorable(note: str, *harmless: object) -> Parameter:
    """Return a parameter that is refused, or ignored if `sessions.unsupported` is `ignore`.

    harmless: values that are accepted, because they change nothing.
    """
    return Parameter(effect=Effect.REFUSED, note=note, harmless=harmless, is_ignorable=True)


BOOKKEEPING = "nothing is billed, stored or cached by it"
TRAINED = "the policy's training decides this"
UNCONSTRAINED = "sampling cannot be constrained; ask for the form in a message"
OWN_PROBABILITIES = (
    "tokens are sampled with the policy's own probabilities; send the request without this"
)
SHOWN_TOKENS = "create the session with shows_tokens"
OWN_TEMPLATE = "the run trains with its own chat template"
OWN_TURNS = "the policy begins its own turns"
ONLY_TEXT = "the policy reads and writes only text"
IN_THE_CLIENT = "tools run in the client; declare a function"

MODEL = taken("any text; `:auxiliary` at its end marks a call outside the task")
MAX_TOKENS = taken("at least 1; the session's own limit holds too")
STREAM = taken("the answer is sampled whole, then sent as events")
STOP = taken(
    "the answer's text ends before the first of these texts; the sampled tokens are trained whole. "
    "Reasoning and calls are not searched for them"
)

COMMON: Parameters = {
    "model": MODEL,
    "stream": STREAM,
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "seed"),
        without_effect("the run decides the sampling"),
    ),
    "presence_penalty": ignorable(OWN_PROBABILITIES, 0),
    "frequency_penalty": ignorable(OWN_PROBABILITIES, 0),
    "repetition_penalty": ignorable(OWN_PROBABILITIES, 1),
    **dict.fromkeys(
        ("metadata", "user", "store", "service_tier", "safety_identifier", "cache_control"),
        without_effect(BOOKKEEPING),
    ),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        without_effect(BOOKKEEPING),
    ),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        ignorable(UNCONSTRAINED),
    ),
    "chat_template": refused(OWN_TEMPLATE),
    "chat_template_kwargs": taken(
        "options of the chat template, such as enable_thinking; they belong to the conversation, "
        "as tools do"
    ),
    "logit_bias": ignorable(UNCONSTRAINED, {}),
    "documents": refused("send them in a message"),
    "add_generation_prompt": refused(OWN_TURNS, True),
    "continue_final_message": refused(OWN_TURNS, False),
    "echo": refused(OWN_TURNS, False),
    "logprobs": refused(SHOWN_TOKENS, False),
    "prompt_logprobs": refused(SHOWN_TOKENS),
    "return_token_ids": refused(SHOWN_TOKENS, False),
    "top_logprobs": refused(SHOWN_TOKENS, 0),
    "moderation": ignorable("there is no moderation"),
}
"""Parameters that every dialect has: a provider's client may call another provider's routes."""
