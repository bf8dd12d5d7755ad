"""Tests of a judge over HTTP: its requests, how its reply is read, and its errors."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from actors.environment import judge as judges
from actors.environment.builtin.single_turn import SingleTurnEnvironment, SingleTurnOptions
from actors.environment.judge import Judge
from actors.environment.judge_options import JudgeOptions, question_of, score_of
from actors.environment.protocol import Action, RewardError
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.options import BadOptions, read
from actors.types import Task

PROMPT = "Is $completion the answer to $prompt? The right one is $answer. From 1 to 10."


@dataclass
class Model:
    """A fake of the judge's service: it sends the answers of a test, then one fixed completion."""

    url: str = ""
    answers: list[Callable[[], tuple[int, dict[str, str], bytes]]] = field(default_factory=list)
    text: str = "It is fine. Score: 8"
    delay_s: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    judges: list[Judge] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        assert scope["path"] == "/v1/chat/completions"
        self.requests.append(json.loads(body))
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.keys.append(headers.get("authorization", ""))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delay_s)
        self.at_once -= 1
        status, more, answer = self.answers.pop(0)() if self.answers else self.completion()
        named = [(b"content-type", b"application/json")]
        named += [(name.encode(), value.encode()) for name, value in more.items()]
        await send({"type": "http.response.start", "status": status, "headers": named})
        await send({"type": "http.response.body", "body": answer})

    def completion(self) -> tuple[int, dict[str, str], bytes]:
        choice = {"message": {"role": "assistant", "content": self.text}}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return 200, {}, json.dumps({"choices": [choice], "usage": usage}).encode()


def failing(status: int, **headers: str) -> Callable[[], tuple[int, dict[str, str], bytes]]:
    return lambda: (status, headers, b"{}")


def answering(text: str, usage: Any = None, **choice: Any) -> Any:
    choices = [{"message": {"content": text}, **choice}]
    return lambda: (200, {}, json.dumps({"choices": choices, "usage": usage}).encode())


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    found = Model()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(found, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        found.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        yield found
        for judge in found.judges:
            await judge.close()
        server.should_exit = True
        await serving


def options(model: Model, **changes: Any) -> dict[str, Any]:
    return {
        "url": model.url, "model": "judge-1", "prompt": PROMPT, "scale": [1, 10],
        "parse": r"Score: ([0-9.]+)", "api_key": "", **changes,
    }  # fmt: skip


def judge_of(model: Model, **changes: Any) -> Judge:
    judge = Judge(read(JudgeOptions, options(model, **changes), where="judges.good"))
    model.judges.append(judge)
    return judge


def single_turn(**judges: Any) -> SingleTurnEnvironment:
    return SingleTurnEnvironment(read(SingleTurnOptions, {"judges": judges}, where="options"))


async def ask(judge: Judge, completion: str = "7") -> Any:
    return await judge.judge(completion, prompt="3+4?", answer="7")


@pytest.fixture(autouse=True)
def without_delay(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Shorten the waits of the judge and return the list of the requested delays."""
    waited: list[float] = []
    real = asyncio.sleep

    async def sleep(delay_s: float, result: Any = None) -> Any:
        waited.append(delay_s)
        return await real(min(delay_s, 0.05), result)

    monkeypatch.setattr("actors.environment.judge.asyncio.sleep", sleep)
    return waited


async def test_the_example_in_the_module_docstring_runs(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    indented = [line for line in (judges.__doc__ or "").splitlines() if line.startswith("    ")]
    code = "\n".join(indented).replace("http://judge:8000/v1", model.url)
    names: dict[str, Any] = {"Judge": Judge, "JudgeOptions": JudgeOptions}
    exec(f"async def main():\n{code}\n    return judge", names)
    model.judges.append(await names["main"]())
    score, num_tokens, cost = capsys.readouterr().out.split()
    assert (round(float(score), 3), num_tokens, cost) == (0.778, "110", "0.0")


async def test_a_request_has_the_columns_in_its_prompt_and_the_score_is_scaled(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a secret")
    judge = judge_of(
        model, api_key="$JUDGE_KEY", system="Be fair.", input_price=2.0, output_price=8.0
    )
    found = await ask(judge)
    assert found.score == pytest.approx(7 / 9) and found.num_tokens == 110
    assert found.cost == pytest.approx((100 * 2 + 10 * 8) / 1e6)
    assert model.keys == ["Bearer a secret"]
    assert model.requests == [
        {
            "model": "judge-1",
            "messages": [
                {"role": "system", "content": "Be fair."},
                {
                    "role": "user",
                    "content": "Is 7 the answer to 3+4?? The right one is 7. From 1 to 10.",
                },
            ],
            "temperature": 0.0,
            "max_tokens": 512,
        }
    ]


async def test_equal_requests_are_sent_once_and_cost_once(model: Model) -> None:
    model.delay_s = 0.05
    judge = judge_of(model)
    first, second = await asyncio.gather(ask(judge), ask(judge))
    third = await ask(judge)
    other = await ask(judge, "8")
    assert len(model.requests) == 2
    assert sorted(each.num_tokens for each in (first, second, third)) == [0, 0, 110]
    assert first.score == second.score == third.score and other.num_tokens == 110


async def test_the_cache_file_keeps_replies_for_other_processes(
    model: Model, tmp_path: Path
) -> None:
    file = str(tmp_path / "judgements.db")
    await ask(judge_of(model, cache=file))
    again = await ask(judge_of(model, cache=file))
    assert len(model.requests) == 1 and again.num_tokens == 0
    # With another prompt the judge is asked again.
    await ask(judge_of(model, cache=file, prompt=PROMPT + " Think."))
    assert len(model.requests) == 2
    # Another service is asked too, even if its model has the same name.
    elsewhere = options(model)["url"].replace("127.0.0.1", "localhost")
    await ask(judge_of(model, cache=file, url=elsewhere))
    assert len(model.requests) == 3


async def test_a_cached_reply_without_a_score_is_requested_again(
    model: Model, tmp_path: Path
) -> None:
    file = str(tmp_path / "judgements.db")
    await ask(judge_of(model, cache=file))
    model.text = "Grade: 3"
    other = judge_of(model, cache=file, parse="Grade: ([0-9])", scale=None)
    assert (await ask(other)).score == 3.0
    assert (await ask(judge_of(model, cache=file, parse="Grade: ([0-9])", scale=None))).score == 3.0
    assert len(model.requests) == 2


async def test_a_cache_file_that_another_process_locks_is_not_used_for_a_while(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.environment.judge.LOCK_LIMIT_S", 0.1)
    file = tmp_path / "judgements.db"
    judge = judge_of(model, cache=str(file))
    await ask(judge)
    with closing(sqlite3.connect(file)) as other:
        other.execute("BEGIN EXCLUSIVE")
        await ask(judge, "8")
    # The locked file was not used, so the reply to "8" is not in it.
    assert (await ask(judge_of(model, cache=str(file)), "8")).num_tokens > 0
    await ask(judge, "9")
    with closing(sqlite3.connect(file)) as other:
        assert other.execute("SELECT count(*) FROM replies").fetchone() == (2,)


async def test_an_unreadable_cache_does_not_prevent_scores(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache.db").write_bytes(b"SQLite format 3\0 and nothing of it" * 99)
    judge = judge_of(model, cache=str(tmp_path / "cache.db"))
    assert (await ask(judge)).score == (await ask(judge)).score
    await ask(judge, "8")
    assert len(model.requests) == 2 and caplog.text.count("cannot be used") == 1


async def test_temporary_errors_are_retried_after_the_delay_that_the_server_asks_for(
    model: Model, without_delay: list[float]
) -> None:
    model.answers = [failing(503), failing(429, **{"Retry-After": "7.5"}), lambda: (200, {}, b"[]")]
    assert (await ask(judge_of(model))).score > 0
    assert len(model.requests) == 4
    delays = [each for each in without_delay if each > 0.4]
    assert 0.5 <= delays[0] <= 1 and delays[1] == 7.5 and 2 <= delays[2] <= 4


@pytest.mark.parametrize(
    ("answers", "text", "words", "num_requests"),
    [
        ([failing(520)] * 4, "", "status 520, 4 times", 4),
        ([answering("Score: 1", finish_reason="length")], "", "was cut off", 1),
        ([], "Score: 8" + " " * 100_000, "longer than 100000", 1),
        ([failing(500)] * 4, "", "status 500, 4 times", 4),
        ([failing(401)], "", "status 401 of http", 1),
        ([lambda: (200, {}, b"no json")] * 4, "", "not a chat completion, 4 times", 4),
        ([], "I will not say.", r"no score in its reply of 15 characters", 1),
        ([], "Score: 11", "its score is 11, expected 1 to 10", 1),
    ],
)
async def test_a_judgement_that_fails_is_a_reward_error(
    model: Model, answers: list[Any], text: str, words: str, num_requests: int
) -> None:
    model.answers, model.text = list(answers), text
    with pytest.raises(RewardError, match=words):
        await ask(judge_of(model))
    assert len(model.requests) == num_requests


async def test_a_failure_is_not_cached(model: Model) -> None:
    judge = judge_of(model, max_retries=0)
    model.answers = [failing(500)]
    with pytest.raises(RewardError):
        await ask(judge)
    assert (await ask(judge)).score > 0


async def test_an_unreachable_judge_and_a_timeout_are_reward_errors(model: Model) -> None:
    model.delay_s = 5
    with pytest.raises(RewardError, match="TimeoutError"):
        await ask(judge_of(model, timeout_s=0.02, max_retries=1))
    assert len(model.requests) == 2
    model.url = "http://127.0.0.1:1/v1"
    with pytest.raises(RewardError, match="ConnectError"):
        await ask(judge_of(model, max_retries=0))


async def test_a_key_is_sent_without_its_line_break_and_never_shown(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-abc\n")
    judge = judge_of(model, api_key=None, max_retries=0)
    await ask(judge)
    assert model.keys == ["Bearer sk-abc"]
    for key in ("sk-\nabc", "sk-→"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(
            BadOptions, match=r"\$OPENAI_API_KEY: got a key with control"
        ) as refused:
            judge_of(model, api_key=None)
        assert "sk-" not in str(refused.value)


@pytest.mark.parametrize("usage", ["abc", [1], {"prompt_tokens": -5}, {"prompt_tokens": 1e400}])
async def test_a_score_with_an_invalid_usage_counts_without_cost(
    model: Model, tmp_path: Path, usage: Any
) -> None:
    model.answers = [answering("\ud800 Score: 8", usage)]
    found = await ask(judge_of(model, cache=str(tmp_path / "cache.db"), input_price=1.0))
    assert (found.score, found.num_tokens, found.cost) == (pytest.approx(7 / 9), 0, 0.0)


async def test_concurrent_requests_are_bounded_by_the_option(model: Model) -> None:
    model.delay_s = 0.02
    judge = judge_of(model, concurrency=3)
    await asyncio.gather(*(ask(judge, str(number)) for number in range(12)))
    assert model.most_at_once == 3 and len(model.requests) == 12


async def test_the_last_match_is_the_score_and_is_unchanged_without_a_scale(
    model: Model,
) -> None:
    model.text = "Score: 2? No. Score: -0.5"
    judge = judge_of(model, parse=r"Score: (-?[0-9.]+)", scale=None)
    assert (await ask(judge)).score == -0.5


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("7", 7.0),
        ("Good: 8.5.", 8.5),
        ("-2", -2.0),
        ("From 1 to 10: 8.5.", None),
        ("7/10", None),
        ("9-3", None),
        ("1,000", None),
        ("1.5,2", None),
        ("fine", None),
    ],
)
async def test_without_a_pattern_the_only_number_of_a_reply_counts(
    model: Model, reply: str, score: float | None
) -> None:
    model.text = reply
    given = options(model, scale=None)
    del given["parse"]
    judge = Judge(read(JudgeOptions, given, where="judges.good"))
    model.judges.append(judge)
    if score is None:
        with pytest.raises(RewardError, match=r"(no score|numbers) in its reply"):
            await ask(judge)
    else:
        assert (await ask(judge)).score == score


async def test_a_pattern_that_does_not_finish_is_stopped(model: Model) -> None:
    model.text = "1" * 60 + "x"
    judge = judge_of(model, parse=r"^((?:1|11)+)$")
    with pytest.raises(RewardError, match=r"did not finish within 1 s on a text of 61 characters"):
        await ask(judge)


async def test_the_body_of_a_request_can_be_changed_by_options(model: Model) -> None:
    model.text = '{"score": 10}'
    body = {
        "max_tokens": None,
        "max_completion_tokens": 64,
        "response_format": {"type": "json_object"},
    }
    given = options(model, json_field="score", body=body)
    del given["parse"]
    judge = Judge(read(JudgeOptions, given, where="judges.good"))
    model.judges.append(judge)
    assert (await ask(judge)).score == 1.0
    [asked] = model.requests
    assert asked["response_format"] == {"type": "json_object"}
    assert asked["max_completion_tokens"] == 64 and "max_tokens" not in asked


@pytest.mark.parametrize(
    ("reply", "field", "score"),
    [
        ('{"score": 7}', "score", 7.0),
        ('Well.\n```json\n{"why": "{braces}", "score": "3.5"}\n```\nDone.', "score", 3.5),
        ('{"grades": {"style": 1, "right": true}}', "grades.right", 1.0),
        ('{"score": 1} No: {"score": 2} {"other": 9}', "score", 2.0),
        ('{not json} {"score": 4}', "score", 4.0),
        ('{"score": 5', "score", None),
        ('{"score": [5]}', "score", None),
        ('{"score": null}', "score", None),
        ('{"score": "NaN"}', "score", None),
        ('{"score": 1%s}' % ("0" * 400), "score", None),
        ('{"grades": 3}', "grades.right", None),
        ('{"example": {"score": 1}, "score": 7,}', "score", None),
        ('{"example": {"score": 1}, "score": ', "score", None),
        ('{"a":' * 20_000, "score", None),
        ("{" * 5000, "score", None),
        ("7", "score", None),
    ],
)
def test_a_score_is_read_out_of_json(reply: str, field: str, score: float | None) -> None:
    judged = JudgeOptions(url="http://j/v1", model="m", prompt="$completion", json_field=field)
    if score is None:
        with pytest.raises(RewardError, match="judge m: "):
            score_of(judged, reply)
    else:
        assert score_of(judged, reply) == score


async def test_a_judge_is_one_of_the_reward_functions(model: Model) -> None:
    environment = single_turn(good=options(model, weight=0.5))
    model.judges += [each for each in environment.functions if isinstance(each, Judge)]
    data = {"prompt": [{"role": "user", "content": "3+4?"}], "answer": 7}
    await environment.reset(Task(task_id="t", environment="single_turn", seed=0, data=data))
    result = await environment.step(Action(text="7"))
    assert result.reward == pytest.approx(0.5 * 7 / 9) and result.terminated
    assert result.reward_components == {"score": pytest.approx(7 / 9), "tokens": 110, "cost": 0}
    assert "user: 3+4?" in model.requests[0]["messages"][0]["content"]
    model.answers = [failing(400)]
    with pytest.raises(RewardError, match="status 400") as missing:
        await environment.step(Action(text="8"))
    # The same answer can be scored again.
    assert missing.value.rescore is not None
    assert (await missing.value.rescore()).reward > 0


async def test_data_without_a_column_of_the_prompt_are_refused(model: Model) -> None:
    environment = single_turn(good=options(model))
    with pytest.raises(ValueError, match="its prompt needs answer, got the columns prompt"):
        await environment.reset(
            Task(task_id="t", environment="single_turn", seed=0, data={"prompt": "x"})
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "judge:8000"}, "url: got 'judge:8000'"),
        ({"model": ""}, "model: got '', expected a text of 1"),
        ({"prompt": "Good?"}, "prompt: it lacks $completion"),
        ({"prompt": "$completion for $ 5"}, "prompt: it has a $ without a name"),
        ({"parse": "[0-9]+"}, "parse: got '[0-9]+', expected one group"),
        ({"parse": "("}, "parse: '(' is not a regular expression"),
        ({"parse": "(x)", "json_field": "score"}, "json_field: got parse and json_field"),
        ({"json_field": "grades."}, "json_field: got 'grades.'"),
        ({"json_field": 3}, "json_field: got 3, expected a text"),
        ({"body": {"stream": True, "top_p": 1}}, "body: got stream"),
        ({"body": ["top_p"]}, "body: got ['top_p']"),
        ({"scale": [10, 1]}, "scale: got [10, 1]"),
        ({"body": {"top_p": float("nan")}}, "body: got a value that cannot be sent as JSON"),
        ({"url": "http://"}, "url: got 'http://"),
        ({"url": "http://j:99999/v1"}, "url: got 'http://j:99999/v1'"),
        ({"url": "http://j\n/v1"}, "url: got 'http://"),
        ({"cache": "/tmp"}, "cache: got '/tmp', expected a file"),
        ({"cache": __file__}, f"cache: {__file__} is not an SQLite file"),
        ({"parse": None}, "parse: got null, expected a text"),
        ({"weight": 10**400}, "weight: got"),
        ({"weight": 1e301}, "weight: got 1e+301, expected at most 1e+300"),
        ({"temperature": True}, "temperature: got True, expected a number"),
        ({"scale": [0, 10**400]}, "scale.1: got"),
        ({"scale": 5}, "scale: got 5"),
        ({"scale": ["a", "b"]}, "scale.0: got 'a'"),
        ({"timeout_s": 0}, "timeout_s: got 0"),
        ({"model": 3}, "model: got 3, expected a text"),
        ({"api_key": "$NOT_SET_ANYWHERE"}, "api_key: the variable NOT_SET_ANYWHERE is not set"),
        ({"concurrency": 0}, "concurrency: got 0"),
        ({"timeout_s": "long"}, "timeout_s: got 'long'"),
        ({"temprature": 0}, "temprature: unknown key; did you mean 'temperature'"),
        ({"weight": "much"}, "weight: got 'much'"),
        ({"cache": "/no/such/place/cache.db"}, "cache: /no/such/place cannot be written"),
    ],
)
def test_invalid_options_are_refused_before_the_start(changes: Any, words: str) -> None:
    given = {"url": "http://j/v1", "model": "m", "prompt": "$completion", **changes}
    with pytest.raises(BadOptions, match=re.escape(f"options.judges.good.{words}")):
        read(SingleTurnOptions, {"judges": {"good": given}}, where="options")


def test_a_judge_may_have_the_name_of_an_option() -> None:
    with pytest.raises(
        BadOptions, match=r"options\.judges\.model\.uri: unknown key; did you mean 'url'"
    ):
        single_turn(model={"uri": "http://j/v1", "model": "m", "prompt": "$completion"})


def test_options_without_a_function_or_judge_are_refused() -> None:
    with pytest.raises(BadEnvironmentOptions, match="got no function"):
        resolve("single_turn", {})


def test_the_judge_reads_the_texts_and_calls_of_a_chat_and_an_empty_list_as_json() -> None:
    call = {"id": "c1", "function": {"name": "calc", "arguments": '{"sum": "2+2"}'}}
    chat = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "Again.", "tool_calls": [call["function"], call]},
    ]
    asked = JudgeOptions(url="http://j/v1", model="m", prompt="$prompt|$tests|$seen|$completion")
    columns = {"prompt": chat, "tests": [], "seen": [{"role": "user", "content": [{"type": "x"}]}]}
    shown, tests, seen, _ = question_of(asked, "4", columns)["messages"][0]["content"].split("|")
    line = '{"name": "calc", "arguments": {"sum": "2+2"}}'
    assert shown.splitlines() == [
        "system: Be brief.", "user: 2+2?", f"assistant: {line}", "tool: 4", "assistant: Again.",
        line, line,
    ]  # fmt: skip
    assert (tests, seen) == ("[]", 'user: [{"type": "x"}]')


@pytest.mark.parametrize(
    ("calls", "line"), [('[{"name": "f"}]', '[{"name": "f"}]'), (5, "5"), ({"a": 1}, '{"a": 1}')]
)
def test_calls_that_are_no_list_are_shown_to_the_judge_on_one_line(calls: Any, line: str) -> None:
    chat = [{"role": "assistant", "content": "Wait.", "tool_calls": calls}]
    asked = JudgeOptions(url="http://j/v1", model="m", prompt="$prompt $completion")
    shown = question_of(asked, "4", {"prompt": chat})["messages"][0]["content"]
    assert shown == f"assistant: Wait.\n{line} 4"


@pytest.mark.parametrize("calls", [None, [], "", {}])
def test_a_message_without_calls_is_shown_to_the_judge_as_its_text(calls: Any) -> None:
    chat = [{"role": "assistant", "content": "Wait.", "tool_calls": calls}]
    asked = JudgeOptions(url="http://j/v1", model="m", prompt="$prompt $completion")
    shown = question_of(asked, "4", {"prompt": chat})["messages"][0]["content"]
    assert shown == "assistant: Wait. 4"
