"""Tests that published templates lose no message and still accept the chats of the baseline.

`templates.toml` lists the packages. `template_baseline.json` has the result of each chat from the
time before prompts were searched for their messages (`tests/template_baseline.py` wrote it).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds.models.published_templates import locked, published, tokenizer_of
from worlds.models.template_chats import CHATS, Chat, Seen
from worlds.models.template_player import Player

pytestmark = [pytest.mark.proof, pytest.mark.templates]

BASELINE: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "template_baseline.json").read_text()
)


def test_the_baseline_has_each_published_template_and_each_chat() -> None:
    assert {template.name for template in published()} == set(BASELINE)
    assert len(BASELINE) >= 50
    for row in BASELINE.values():
        assert set(row) == {chat.name for chat in CHATS}


def test_each_package_is_locked_by_its_digest() -> None:
    for package in locked().values():
        assert package.integrity.startswith(("sha512-", "sha256-"))


@pytest.mark.parametrize("name", sorted(BASELINE))
async def test_every_message_is_in_the_prompt_or_refused(name: str, tmp_path: Path) -> None:
    [template] = [each for each in published() if each.name == name]
    player = Player(tokenizer_of(template), tmp_path)
    problems = []
    for chat in CHATS:
        seen = await player.play(chat)
        before = BASELINE[name][chat.name]
        problems += [f"{chat.name}: {each}" for each in _problems(chat, seen, before)]
    player.close()
    assert not problems, "\n".join(problems)


def _problems(chat: Chat, seen: Seen, before: str) -> list[str]:
    """Return the faults of a played chat.

    before: the result of the chat in the baseline.
    """
    found = [
        f"turn {number}: lost {turn.lost}" for number, turn in enumerate(seen.turns) if turn.lost
    ]
    last = seen.turns[-1]
    if seen.is_refused and (last.status != 400 or len(last.error.split()) < 6):
        found.append(f"refused with {last.status} and {last.error!r}")
    if seen.num_samples > 1 + len(seen.branches):
        found.append(f"{seen.num_samples} samples, counted branches: {seen.branches}")
    if before == "lost":
        return found
    if seen.is_refused and not (
        before.startswith("refused") and len(seen.turns) >= int(before[8:])
    ):
        found.append(f"refused ({last.error}), before: {before}")
    # The baseline appended wrongly to chats whose template numbers results or marks the first one.
    is_plain = not chat.has_tools and not seen.is_refused
    if is_plain and before.isdecimal() and seen.num_samples > int(before):
        found.append(
            f"{seen.num_samples} samples {seen.branches} {dict(seen.breaks)}, before: {before}"
        )
    return found
