"""A tiny policy that knows the form of code search's calls and the names of a repository's files.

It does not know which file a question is about: it was trained on answers drawn at random.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from actors.environment.plugins.code_search.environment import QUESTION
from actors.environment.plugins.code_search.tools import ANSWER, SEARCH_TOOLS
from actors.environment.tool_turns import ERROR
from actors.trainer.tiny.warmup import Conversation
from worlds.models import forms_warmup

# Short texts: each file name is one or two tokens for this policy, and tokens are slow on a CPU.
MODULES = {
    "f1.py": "The weather of a city.",
    "f2.py": "The number of guesses.",
    "f3.py": "The result of a search.",
    "f4.py": "The name of a user.",
}
MALFORMED_SHARE = 0.2
LISTING_SHARE = 0.3
_TOOLS = (*SEARCH_TOOLS, ANSWER)


def warmed_up(directory: Path, *, seed: int = 0, steps: int = 120) -> Path:
    """Build the model. steps: training steps of four conversations each."""
    return forms_warmup.warmed_up(directory, _conversation, seed=seed, steps=steps)


def _conversation(dice: random.Random) -> Conversation:
    messages = [("user", QUESTION.format(question=dice.choice(list(MODULES.values()))))]
    if dice.random() < LISTING_SHARE:
        messages += [("assistant", _call("list_files", {})), ("tool", "\n".join(MODULES))]
    answer = _call("answer", {"files": [dice.choice(list(MODULES))]})
    if dice.random() < MALFORMED_SHARE:
        broken = answer.replace('"]}}', '"}}')
        told = ERROR.format(message="The tool call is not valid JSON.")
        messages += [("assistant", broken), ("tool", told)]
    return Conversation(messages=(*messages, ("assistant", answer)), tools=_TOOLS)


def _call(name: str, arguments: dict[str, object]) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{body}</tool_call>"
