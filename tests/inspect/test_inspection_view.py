"""Tests of the view of a trajectory: the classes, columns and faults of its tokens."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from worlds.builders.chat_examples import (
    example_step,
    first_prompt,
    game,
    ids_of,
    text,
    turn_of,
    with_trained,
)
from worlds.builders.journal_builders import one_group, random_group, step_of
from worlds.builders.trajectory_builders import make_trajectory

from actors.journal.files import JournalStep
from actors.trainer.tiny.tokenizer import TURN_END
from actors.trajectory_queue.codec import decode, encode
from actors.types import LeftOutReason
from service.cli.inspect import show, write_page
from service.inspect.token_text import TokenText
from service.inspect.view import (
    HEADER_TRAINED,
    HEADER_WRITTEN,
    NO_LOGPROB,
    NOT_SAMPLED,
    Token,
    TrajectoryView,
    build_view,
    trajectory_document,
)
from service.units import visible


def view_of(row: int, step: JournalStep | None = None) -> TrajectoryView:
    step = step or example_step()
    return build_view(step, step.entries[row], text())


def tokens_of(view: TrajectoryView) -> list[Token]:
    return [token for sample in view.samples for token in sample.tokens]


def kinds(tokens: Sequence[Token]) -> list[tuple[str, str]]:
    return [(token.text, token.kind) for token in tokens]


def test_each_token_is_classified_by_its_author() -> None:
    # The first reply was cut off, so the renderer inserted its end.
    view = view_of(1)
    (sample,) = view.samples
    assert kinds(sample.segments[1].tokens) == [("3", "trained")]
    assert kinds(sample.segments[2].tokens) == [
        ("<|end|>", "inserted"),
        ("<|user|>", "template"),
        ("higher", "observation"),
        ("<|end|>", "template"),
        ("<|assistant|>", "template"),
    ]
    assert kinds(sample.segments[3].tokens) == [("5", "trained"), ("<|end|>", "trained")]
    assert kinds(sample.segments[0].tokens)[:2] == [("<|user|>", "template"), ("Guess", "prompt")]
    assert view.num_faulty == 0


def test_turns_of_a_session_that_are_left_out_are_listed_with_their_reasons() -> None:
    step = example_step()
    left_out = {2: LeftOutReason.TITLE, 5: LeftOutReason.AUXILIARY}
    trajectory = replace(step.entries[0].trajectory, left_out=left_out)
    shown = TrajectoryView(step=step, entry=step.entries[0], samples=(), note="")
    entry = replace(shown.entry, trajectory=trajectory)
    listed = dict(replace(shown, entry=entry).facts)
    assert listed["turns left out"] == "2 title, 5 auxiliary (numbers in the session)"
    assert decode(encode([trajectory]), 0).left_out == left_out
    assert "turns left out" not in dict(shown.facts)


def test_an_observation_after_the_last_turn_is_shown() -> None:
    step = example_step()
    trajectory = step.entries[1].trajectory
    (sample,) = trajectory.samples
    # Keep the observation after the first reply, but not the second reply.
    first, second = sample.turns
    cut = replace(
        sample,
        turns=(first,),
        token_ids=sample.token_ids[: second.start],
        logprobs=sample.logprobs[: second.start],
        versions=sample.versions[: second.start],
    )
    entry = replace(
        step.entries[1], trajectory=replace(trajectory, samples=(cut,)), advantages=(np.ones(1),)
    )
    (view,) = build_view(step, entry, text()).samples
    (whole,) = view_of(1).samples
    assert [segment.title for segment in view.segments] == [
        "first prompt",
        "turn 0",
        "after turn 0",
    ]
    assert kinds(view.segments[2].tokens) == kinds(whole.segments[2].tokens)


def test_the_columns_of_a_trained_token_have_the_recorded_values() -> None:
    tokens = [token for token in tokens_of(view_of(0)) if token.kind == "trained"]
    assert [token.turn for token in tokens] == [0, 0, 1, 1]
    assert [token.logprob for token in tokens] == pytest.approx([-0.1, -0.2, -0.1, -0.2])
    assert {token.version for token in tokens} == {0}
    # The returns 1, 0 and 1 have the mean 2/3 and the deviation 1/sqrt(3).
    assert [token.advantage for token in tokens] == pytest.approx([0.577349] * 4, abs=1e-6)


def test_a_branch_shows_its_first_turn_and_where_it_differs() -> None:
    first, second = view_of(2).samples
    assert first.opening == "turn 0"
    assert "turn 1; extends no sample (retokenised): differs from the nearest at token 19" in (
        second.opening
    )
    (parting,) = [token for token in second.tokens if token.starts_branch]
    assert parting.position == len(first_prompt()) == 19


def test_a_masked_trajectory_has_no_trained_token() -> None:
    view = view_of(3)
    assert view.counts.get("trained") is None and view.counts["masked"] == 12
    assert view.num_faulty == 0


def test_an_observation_inside_a_trained_span_is_a_fault() -> None:
    view = view_of(0, with_trained(example_step(), 0, [22]))
    (token,) = [token for token in tokens_of(view) if token.faults]
    assert (token.text, token.kind) == ("higher", "trained")
    assert token.faults == (NOT_SAMPLED,) and view.fault_counts == {NOT_SAMPLED: 1}


def test_a_role_header_that_is_trained_is_a_fault() -> None:
    view = view_of(0, with_trained(example_step(), 0, [24]))
    (token,) = [token for token in tokens_of(view) if token.faults]
    assert token.text == "<|assistant|>" and token.faults == (NOT_SAMPLED, HEADER_TRAINED)


def test_a_role_header_that_the_policy_wrote_is_a_fault_but_its_end_token_is_not() -> None:
    writer = make_trajectory([turn_of(first_prompt(), f"4<|user|>5{TURN_END}")])
    other = game(0, [f"4{TURN_END}"], reward=1.0)
    step = step_of([one_group([writer, replace(other, rollout_id="g000000.0-1")])])
    faulty = [token for token in tokens_of(view_of(0, step)) if token.faults]
    assert [(token.text, token.faults) for token in faulty] == [("<|user|>", (HEADER_WRITTEN,))]


def test_a_sampled_token_without_a_log_probability_is_a_fault() -> None:
    turn = turn_of(first_prompt(), f"42{TURN_END}", logprobs=[-1, np.nan, -1])
    lost = game(1, [f"4{TURN_END}"], reward=1.0)
    step = step_of([one_group([make_trajectory([turn], rollout_id="g000003.0-0"), lost])])
    (token,) = [token for token in tokens_of(view_of(0, step)) if token.faults]
    assert (token.text, token.kind, token.faults) == ("2", "masked", (NO_LOGPROB,))


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_any_trajectory_is_shown_with_each_sampled_token_once(seed: int) -> None:
    step = step_of([random_group(0, seed)], number=4)
    for entry in step.entries:
        view = build_view(step, entry, TokenText(note="none"))
        sampled = [token for token in tokens_of(view) if token.turn is not None]
        assert len(sampled) == entry.trajectory.num_sampled
        assert sum(t.kind == "trained" for t in sampled) == entry.num_trained
        assert {fault for token in sampled for fault in token.faults} <= {NO_LOGPROB}
        assert len(trajectory_document(view)["samples"]) == len(view.samples)


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (b"plain text", "plain text"),
        (b"a\n", "a⏎"),
        (b"\xc3", "\\xc3"),
        ("größer".encode(), "größer"),
        (b"\x1b[31m", "\\x1b[31m"),
        ("\u202e\u200b".encode(), "\\u202e\\u200b"),
        (b"\t\r", "\\t\\r"),
    ],
)
def test_bytes_are_shown_on_one_line_and_nothing_is_hidden(piece: bytes, shown: str) -> None:
    assert visible(piece) == shown


@given(st.text())
def test_the_pieces_of_a_text_are_its_bytes(words: str) -> None:
    assert b"".join(text().pieces(ids_of(words))) == words.encode()


def test_ids_outside_the_vocabulary_are_shown_as_ids() -> None:
    assert text().pieces([99_999, -1]) == ["⟨99999⟩".encode(), "⟨-1⟩".encode()]


def page_of(view: TrajectoryView, directory: Path) -> str:
    write_page(directory / "page.html", view)
    return (directory / "page.html").read_text(encoding="utf-8")


def test_the_document_has_each_token_with_all_its_columns() -> None:
    view = view_of(2, with_trained(example_step(), 2, [18]))
    document = trajectory_document(view)
    assert json.loads(json.dumps(document)) is not None
    kinds = [kind["name"] for kind in document["kinds"]]
    assert [kind["count"] for kind in document["kinds"]] == [view.counts.get(k, 0) for k in kinds]
    for sample, shown in zip(view.samples, document["samples"], strict=True):
        tokens = list(sample.tokens)
        assert shown["segments"][-1]["end"] == len(tokens) == len(shown["ids"])
        assert [kinds[number] for number in shown["kinds"]] == [t.kind for t in tokens]
        columns = ("texts", "turns", "versions")
        for column, name in zip(columns, ("text", "turn", "version"), strict=True):
            assert shown[column] == [getattr(token, name) for token in tokens]
        assert shown["faults"] == {str(t.position): t.faults for t in tokens if t.faults}
    first, second = document["samples"]
    assert (first["parent"], second["parent"], second["num_shared"]) == (None, 0, 19)


def test_the_page_shows_texts_of_model_and_environment_without_markup(tmp_path: Path) -> None:
    view = view_of(3)
    texts = "".join(trajectory_document(view)["samples"][0]["texts"])
    assert "<b>das</b> & \\x1b[31m?" in texts and "gr\\xc3\\xb6" in texts
    page = page_of(view, tmp_path)
    assert "<b>" not in page and "\x1b" not in page and "\\u003c" in page


def test_control_characters_in_names_are_escaped_on_page_and_terminal(tmp_path: Path) -> None:
    step = step_of([one_group([game(0, ["4"], reward=1.0, detail="all is well")])])
    names = ("rollout_id", "group_id", "task_id", "environment", "detail")
    wild = {name: f"<b>{name}\x1b[2J\x00\udcff" for name in names}
    trajectory = replace(step.entries[0].trajectory, **wild)
    entry = replace(step.entries[0], trajectory=trajectory, problem="a problem\x1b[1m")
    note = "no tokenizer in /tmp/\x1b[2J"
    view = build_view(replace(step, entries=(entry,)), entry, TokenText(note=note))
    page, shown = page_of(view, tmp_path), printed(view, is_coloured=False)
    for name in names:
        assert f"\\u003cb>{name}\\\\x1b[2J\\\\x00\\\\udcff" in page
    for text_shown, escape in ((page, "\\\\x1b"), (shown, "\\x1b")):
        assert not any(c < " " and c != "\n" for c in text_shown) and "<b>detail" not in page
        assert f"a problem{escape}[1m" in text_shown and f"/tmp/{escape}[2J" in text_shown


def printed(view: TrajectoryView, *, is_coloured: bool) -> str:
    console = Console(
        file=io.StringIO(), width=100, force_terminal=is_coloured, color_system="standard" if
        is_coloured else None,
    )  # fmt: skip
    show(view, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_shows_text_table_and_faults_without_colours_too() -> None:
    plain = printed(view_of(0, with_trained(example_step(), 0, [22])), is_coloured=False)
    assert f"tokens in red, 1: {NOT_SAMPLED}" in plain and "\x1b" not in plain
    assert "[before turn 1: 3 template, 1 sampled and trained]" in plain
    row = next(line for line in plain.splitlines() if line.split()[:2] == ["20", "<|end|>"])
    assert row.split() == ["20", "<|end|>", "1", "trained", "0", "-0.2000", "0", "0.5773"]


def test_the_terminal_colours_a_token_by_its_class() -> None:
    coloured = printed(view_of(1), is_coloured=True)
    assert "\x1b[1;4;32m3\x1b[0m" in coloured  # trained: bold, underlined, green
    assert "\x1b[35m<|end|>\x1b[0m" in coloured  # inserted: magenta
    assert "\x1b[36mhigher\x1b[0m" in coloured  # observation: cyan
