"""Tests of `rayloom try`, which plays tasks without a run, and of `rayloom rescore`."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from worlds.builders.episode_builders import tokenizer
from worlds.builders.trajectory_builders import make_trajectory, make_turn

from actors.journal.files import JournalStep, TrajectoryEntry, write_file
from actors.types import SESSION, Outcome
from service.cli.rescore import Rescored, describe, run_rescore
from service.cli.try_out import TryRequest, run_try
from service.config.file import ConfigError, dump_config, parse_config
from service.config.tree import Config
from service.launch.run_dir import RunDir

CODE = '''
import time

def score(completion, answer):
    right = completion.strip() == answer
    return {"right": float(right), "short": 0.5}

def rarest(completions, **columns):
    return [1.0 / completions.count(text) for text in completions]

def breaks(completions, **columns):
    raise KeyError("no")

def step_of(completion, trainer_state):
    return trainer_state.global_step + trainer_state.max_steps / 1000

def lengths(completions):
    return [None if text == "5" else float(len(text)) for text in completions]

def hangs(completion):
    time.sleep(1000)

def of_messages(completion, messages):
    return 1.0

def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "of_try.py").write_text(CODE)
    row = {"task_id": "one", "prompt": "1 + 2?", "answer": "3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_try", raising=False)
    return tmp_path


def config_of(**options: Any) -> Config:
    environment = "tools" if options else "single_turn"
    tasks = {
        "environment": environment, "dataset": "rows.jsonl", "evaluation_tasks": 0,
        "options": {"reward": "of_try.py:score", **options},
    }  # fmt: skip
    tree = {"model": {"tiny": {}}, "tasks": tasks, "rollouts": {"max_turns": 4}}
    return parse_config(tree, source="for a test")


def test_a_reference_answer_is_played_and_its_parts_are_shown(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_try(TryRequest(config=config_of(), num_tasks=1, answer="answer")) == 0
    shown = capsys.readouterr().out
    assert "<|user|>1 + 2?<|end|><|assistant|>" in shown
    assert "reward 1.5 (right 1, short 0.5)" in shown and "mean reward 1.5" in shown


def test_a_person_can_type_calls_and_answers(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"first": 1, "second": 2}}</tool_call>'
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{call}\n\n4\n\n"))
    assert run_try(TryRequest(config=config_of(tools=["of_try.py:add"]), num_tasks=2)) == 0
    shown = capsys.readouterr().out
    assert "tool\n  3" in shown and "reward 0.5" in shown
    # The input ended before the second task.
    assert "1 task played, mean reward 0.5" in shown


def test_a_group_function_scores_the_answers_to_a_task_together(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {
        "environment": "single_turn", "dataset": "rows.jsonl", "evaluation_tasks": 0,
        "options": {"reward": "of_try.py:score", "group_reward": "of_try.py:rarest"},
    }  # fmt: skip
    config = parse_config({"model": {"tiny": {}}, "tasks": tasks}, source="for a test")
    monkeypatch.setattr(sys, "stdin", io.StringIO("3\n\n3\n\n4\n\n"))
    # The input ends before the fourth answer, so that the group has three.
    assert run_try(TryRequest(config=config, num_tasks=2)) == 0
    shown = capsys.readouterr().out
    assert "task one, 1 of 2, answer 4 of 4" in shown and "group of 3 answers" in shown
    assert "answer 2: group reward 0.5 (rarest 0.5), in all 2" in shown
    assert "answer 3: group reward 1 (rarest 1), in all 1.5" in shown
    assert "1 task played, 3 answers, mean reward 1.833" in shown
    broken = {**tasks, "options": {"group_reward": "of_try.py:breaks"}}
    config = parse_config({"model": {"tiny": {}}, "tasks": broken}, source="for a test")
    assert run_try(TryRequest(config=config, num_tasks=1, num_samples=2, answer="answer")) == 1
    shown = capsys.readouterr().out
    assert "answer 2 of 2" in shown and "no reward of the group: score_group: " in shown
    assert "breaks raised KeyError" in shown


@pytest.fixture
def run(place: Path) -> Path:
    """Make a run with one step of four trajectories and return its directory.

    They are an answer, a call at the last turn, the answer 5, and an answer that was cut off.
    """
    run_dir = RunDir(path=place / "runs" / "one")
    run_dir.path.mkdir(parents=True)
    run_dir.config_file.write_text(dump_config(config_of(tools=["of_try.py:add"])))
    tokenizer().save_pretrained(run_dir.tiny_model)
    said = (
        ("3", Outcome.COMPLETED, 1.5),
        ("<tool_call>", Outcome.MAX_TURNS, 0.0),
        ("5", Outcome.COMPLETED, 0.5),
        ("1 and then", Outcome.TRUNCATED_TOKENS, 0.25),
    )
    prompt = tokenizer().encode("1 + 2?")
    entries = tuple(
        TrajectoryEntry(
            trajectory=replace(
                make_trajectory(
                    [make_turn(prompt, tokenizer().encode(text), reward=reward)],
                    rollout_id=f"g000016.0-{number}",
                    outcome=outcome,
                ),
                task_id="one",
                environment="tools",
            ),
            reason=None,
            baseline_return=reward,
            advantages=(),
        )
        for number, (text, outcome, reward) in enumerate(said)
    )
    step = JournalStep(
        step=1, term=1, trainer_version=0, max_policy_age=0, group_rule=None,
        num_packed_trained=0, entries=entries,
    )  # fmt: skip
    run_dir.journal.mkdir()
    write_file(run_dir.journal, step)
    return run_dir.path


def table_of(shown: str) -> dict[str, tuple[float, float]]:
    """Return the old and the new reward by trajectory."""
    rows = [line.split() for line in shown.splitlines() if ".a0 " in line]
    return {row[1]: (float(row[2]), float(row[3])) for row in rows}


def test_functions_are_called_again_only_for_trajectories_that_a_run_scores(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_rescore(run, rewards=["of_try.py:score"], limit=0) == 0
    shown = capsys.readouterr().out
    # A run does not score a call at the last turn or an answer that was cut off.
    assert table_of(shown) == {"g000016.0-3.a0": (0.25, 0.0)}
    assert "4 trajectories that were scored" in shown
    # The step follows from the group's number: there are 16 groups in a step.
    assert run_rescore(run, rewards=["of_try.py:step_of"], limit=0) == 0
    changed = table_of(capsys.readouterr().out)
    steps = config_of().run.steps
    assert changed["g000016.0-0.a0"] == (1.5, pytest.approx(1 + steps / 1000, rel=1e-3))


def test_a_group_function_is_called_again_in_addition_to_other_functions(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"rewards": ["of_try.py:score"], "group_rewards": ["of_try.py:lengths"]}
    assert run_rescore(run, **names, limit=0) == 0
    shown = table_of(capsys.readouterr().out)
    assert shown == {
        "g000016.0-0.a0": (1.5, 2.5),
        "g000016.0-1.a0": (0.0, 11.0),
        "g000016.0-3.a0": (0.25, 10.0),
    }
    assert run_rescore(run, rewards=[], group_rewards=["of_try.py:lengths"], limit=0) == 0
    assert "not scored  1; the first: none of the functions" in capsys.readouterr().out
    row = {"task_id": "other", "prompt": "1 + 2?", "answer": "3"}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    assert run_rescore(run, rewards=[], group_rewards=["of_try.py:breaks"], limit=0) == 1
    out, err = capsys.readouterr()
    assert "breaks raised KeyError: 'no' (" in out
    assert "1 of 1 tasks are no longer in the run's data, such as one" in err


def test_a_session_is_scored_by_its_last_reply(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = make_turn(tokenizer().encode("1 + 2?"), tokenizer().encode("3"), reward=1.0)
    session = replace(make_trajectory([turn], rollout_id="g000000.0-0"), environment=SESSION)
    entry = TrajectoryEntry(trajectory=session, reason=None, baseline_return=1.0, advantages=())
    step = JournalStep(
        step=2, term=1, trainer_version=1, max_policy_age=0, group_rule=None,
        num_packed_trained=0, entries=(entry,),
    )  # fmt: skip
    write_file(RunDir(path=run).journal, step)
    # The task of a session has no columns.
    assert run_rescore(run, rewards=["of_try.py:score"], limit=0) == 0
    shown = capsys.readouterr().out
    assert "not scored  1; the first: reward function score needs answer" in shown
    assert run_rescore(run, rewards=["of_try.py:step_of"], limit=0) == 0
    assert "5 trajectories that were scored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["of_try.py:score"] * 2, "more than once, expected each function once"),
        (["of_try.py:of_messages"], "needs messages, which the journal does not hold"),
    ],
)
def test_functions_that_cannot_rescore_a_run_are_refused(
    run: Path, names: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_rescore(run, rewards=names, limit=1)


def test_a_task_that_a_run_leaves_out_for_its_length_is_reported(
    place: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    row = {"task_id": "long", "prompt": "1 + 2? " * 500, "answer": "3"}
    with Path("rows.jsonl").open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    from transformers.utils import logging as transformers_logging

    transformers_logging.enable_propagation()
    assert run_try(TryRequest(config=config_of(), num_tasks=2, answer="answer")) == 0
    short, long = capsys.readouterr().out.split("── task long")
    assert "a run leaves" not in short
    assert re.search(r"prompt, \d\u202f\d{3} tokens\n", long)
    assert "a run leaves this task out, because its prompt has more than 1984 tokens" in long
    assert "indexing errors" not in caplog.text


def test_a_task_is_played_with_the_time_limit_of_the_configuration(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of()
    config = replace(config, rollouts=replace(config.rollouts, reward_limit_s=0.3))
    tasks = replace(config.tasks, options={"reward": "of_try.py:hangs"})
    request = TryRequest(config=replace(config, tasks=tasks), num_tasks=1, answer="answer")
    assert run_try(request) == 1
    assert "hangs did not answer within 0.3 s" in capsys.readouterr().out


def test_rescore_without_a_function_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="got no function, expected one or more"):
        run_rescore(place, rewards=[], limit=1)


@pytest.fixture
def api() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Start a chat API that calls `add` and repeats the answer; yield its URL and its requests."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            last = body["messages"][-1]
            message: dict[str, Any] = {"role": "assistant", "content": last["content"]}
            if last["role"] == "user":
                function = {"name": "add", "arguments": '{"first": 1, "second": 2}'}
                message = {"content": None, "tool_calls": [{"id": "c1", "function": function}]}
            answer = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()
        thread.join()


def test_a_model_plays_with_its_calls_and_the_given_sampling(
    place: Path, api: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, asked = api
    request = TryRequest(
        config=config_of(tools=["of_try.py:add"]), num_tasks=1, model="m", base_url=url,
        parameters={"min_p": 0.1},
    )  # fmt: skip
    assert run_try(request) == 0
    assert "reward 1.5" in capsys.readouterr().out
    first, second = asked
    assert first["min_p"] == 0.1 and first["tools"][0]["function"]["name"] == "add"
    called, told = second["messages"][-2:]
    assert called["tool_calls"][0]["id"] == told["tool_call_id"] == "c1" and told["content"] == "3"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "m", "base_url": "http://h/v1", "answer": "answer"}, "got --answer answer too"),
        ({"model": "m"}, "--model NAME and --base-url URL"),
        ({"parameters": {"top_p": 0.5}}, "--top-p: got no --model"),
        ({"answer": "author"}, "--answer author: task one has the columns answer, prompt"),
    ],
)
def test_options_without_a_source_of_replies_are_refused(
    place: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_try(TryRequest(config=config_of(), num_tasks=1, **fields))


def test_the_table_begins_with_the_largest_difference() -> None:
    def rescored(number: int, new: float | str) -> Rescored:
        prompt, sampled = (tokenizer().encode(text) for text in ("Say it", "4<|im_end|>"))
        made = make_trajectory([make_turn(prompt, sampled)], rollout_id=f"g{number:06d}.0-0")
        old = made.episode_return
        return Rescored(step=1, trajectory=made, new=new if isinstance(new, str) else old + new)

    found = [rescored(1, 0.5), rescored(2, -1.0), rescored(3, 0.0), rescored(4, "f: KeyError")]
    shown = describe(found, limit=1).splitlines()
    assert "changed     2 of 3: 1 higher, 1 lower" in shown
    assert "not scored  1; the first: f: KeyError" in shown
    assert shown[-1].split()[1] == "g000002.0-0.a0" and shown[-2].startswith("step")


def test_a_prompt_whose_name_the_template_does_not_show_is_not_played(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = [{"role": "user", "name": name, "content": "1 + 2?"} for name in ("Ada", "Bob")]
    row = {"task_id": "named", "prompt": prompt, "answer": "3"}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    assert run_try(TryRequest(config=config_of(), num_tasks=1, answer="answer")) == 1
    assert "cannot render the prompt: got the names 'Ada' and 'Bob'" in capsys.readouterr().out
