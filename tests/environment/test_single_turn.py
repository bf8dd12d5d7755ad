"""Tests of single-turn environments and of reward functions with both kinds of signature."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.environment.builtin.single_turn import chat_message
from actors.environment.protocol import Action, RewardError, Role
from actors.environment.registry import BadEnvironmentOptions, UnknownEnvironment, resolve
from actors.environment.reward_functions import (
    BadRewardFunction,
    load_functions,
    method_as_reward,
)
from actors.environment.settings import RolloutSettings, rollout_settings
from actors.environment.user_names import BadName, module_of
from actors.types import Task

MODULE = """
import asyncio

seen = []

def exact(completion, answer, **columns):
    seen.append(columns)
    return float(completion == answer)

async def slow(completion, answer):
    await asyncio.sleep(0)
    return len(completion) == len(answer)

def parts(completion, prompt):
    return {"short": 0.5, "polite": 0.25}

def trl(completions, answer, **kwargs):
    seen.append(kwargs)
    return [1.0 if text == right else 0.0 for text, right in zip(completions, answer)]

def trl_chat(prompts, completions, **kwargs):
    ((message,),) = completions
    assert message["role"] == "assistant" and prompts[0][-1]["role"] == "user"
    return [len(message["content"])]

def array(completions, **columns):
    import numpy as np
    return np.array([float(len(text) > 2) for text in completions])

def generated(completions, **columns):
    yield from (1.0 for _ in completions)

def last_message(completions, answer, messages, **columns):
    assert messages == [[{"role": "assistant", "content": "4"}]]
    return [float(c[-1]["content"] == a) for c, a in zip(completions, answer)]

def whole_row(completion, columns):
    return float(columns["completion"] == "red" and completion == "blue")

def verl(completion):
    return {"score": 0.5, "acc": True, "pred": "four"}

def silent(completions):
    return [None]

def quiet(completion):
    return None

def nan(completion):
    return float("nan")

def words(completion):
    return "good"

def fails(completion):
    raise KeyError("x")

def vast(completion):
    return 1e300

def long_names(completion):
    return {"a" * 128 + "1": 1.0, "a" * 128 + "2": 2.0}

def equal_names(completion):
    return {1: 1.0, "1": 2.0}

def empty_name(completion):
    return {"": 1.0}

def odd_name(completion):
    return {"score": 1.0, "a\\nb": 2.0}

def many(completion):
    return {str(number): 0.0 for number in range(65)}

def leaves(completion):
    raise SystemExit(3)

def needs_ids(completions, completion_ids):
    return [0.0]

def other(text):
    return 0.0

def vaster(completion):
    return 10 ** 400

def not_known(completion):
    return {"right": 1.0, "style": None}

def made_of_locks(completion):
    return object.__new__(type("Lock", (), {"__reduce__": None}))

async def streams(completion):
    yield 1.0

def yields(completion):
    yield 1.0

class Exact:
    def score(self, completion, answer):
        return 1.0

class Scorer:
    def __call__(self, completion):
        return 1.0

def by_place(completion, /):
    return 1.0

def lists_and_prompt(completions, prompt):
    return [1.0 for text in completions]

def one_and_prompts(completion, prompts):
    return float(prompts == "two")

def both(completion, completions, answer):
    return 1.0

class Game:
    def get_reward(self, completions, prompt):
        return [1.0]

not_callable = 3
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("rewards")
    (directory / "rewards_of_test.py").write_text(MODULE)
    sys.path.insert(0, str(directory))
    import rewards_of_test

    yield rewards_of_test
    sys.path.remove(str(directory))


async def play(
    reward: Any, text: str, *, system: str | None = None, **data: Any
) -> tuple[float, dict[str, float]]:
    environment = resolve("single_turn", {"reward": named(reward), "system": system})()
    start = await environment.reset(Task(task_id="t", environment="single_turn", seed=0, data=data))
    assert start.messages[-1].role is Role.USER
    assert (start.messages[0].role is Role.SYSTEM) == (system is not None)
    result = await environment.step(Action(text=text))
    assert result.terminated
    # The answer is the text after the last thought.
    assert result.answer == text.rpartition("</think>")[2].strip()
    return result.reward, dict(result.reward_components)


def named(reward: Any) -> Any:
    if isinstance(reward, dict):
        return {f"rewards_of_test.py:{name}": weight for name, weight in reward.items()}
    if isinstance(reward, list):
        return [f"rewards_of_test:{name}" for name in reward]
    return f"rewards_of_test.py:{reward}"


async def test_a_function_gets_the_answer_and_the_columns_that_it_names(module: Any) -> None:
    # The functions run in this process, so that their arguments can be read here.
    rollout_settings.set(RolloutSettings(inline=True))
    module.seen.clear()
    asked: dict[str, Any] = {"prompt": "2 + 2", "answer": "4", "level": 3}
    assert await play("exact", "4", **asked) == (1.0, {})
    assert await play("exact", "5", **asked) == (0.0, {})
    assert module.seen[0] == {"prompt": "2 + 2", "level": 3}
    assert await play("slow", "5", **asked) == (1.0, {})
    assert await play("parts", "5", **asked) == (0.75, {"short": 0.5, "polite": 0.25})


async def test_a_function_with_trls_signature_works_unchanged(module: Any) -> None:
    # The functions run in this process, so that their arguments can be read here.
    rollout_settings.set(RolloutSettings(inline=True))
    module.seen.clear()
    assert await play("trl", "4", prompt="2 + 2", answer="4", level=3) == (1.0, {})
    (seen,) = module.seen
    assert seen.keys() == {"level", "prompts", "trainer_state", "log_metric", "log_extra"}
    assert (seen["level"], seen["prompts"]) == ([3], ["2 + 2"])
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    environment = resolve("single_turn", {"reward": named("trl_chat")})()
    task = Task(task_id="t", environment="single_turn", seed=0, data={"prompt": chat})
    start = await environment.reset(task)
    assert [message.content for message in start.messages] == ["Be brief.", "2 + 2"]
    assert (await environment.step(Action(text="four"))).reward == 4.0


async def test_a_column_of_any_name_does_not_replace_the_answer() -> None:
    chat = [{"role": "user", "content": "2 + 2"}]
    messages = [{"role": "assistant", "content": "4"}]
    asked: dict[str, Any] = {"prompt": chat, "answer": "4", "messages": messages}
    assert (await play("last_message", "5", **asked))[0] == 0.0
    assert (await play("last_message", "4", **asked))[0] == 1.0
    assert (await play("whole_row", "blue", prompt="A colour", completion="red"))[0] == 1.0


async def test_a_function_may_return_an_array_or_a_generator() -> None:
    assert (await play("array", "abc", prompt="?"))[0] == 1.0
    assert (await play("generated", "abc", prompt="?"))[0] == 1.0


async def test_the_number_called_score_is_the_reward_and_others_are_reported() -> None:
    assert await play("verl", "4", prompt="?") == (0.5, {"score": 0.5, "acc": 1.0})


async def test_a_chat_keeps_its_calls_names_and_roles_and_one_system_message() -> None:
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    chat = [
        {"role": "developer", "content": [{"type": "text", "text": "You are a clerk."}]},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]},
        {"role": "tool", "content": "Rain", "name": "weather", "tool_call_id": "a"},
        {"role": "assistant", "content": "Rain.", "reasoning_content": "It says so."},
        {"role": "user", "content": "And?"},
    ]
    environment = resolve("single_turn", {"reward": named("quiet"), "system": "Be brief."})()
    task = Task(task_id="t", environment="single_turn", seed=0, data={"prompt": chat})
    first, _, call, answer, said, _ = (await environment.reset(task)).messages
    assert first.role is Role.SYSTEM and first.content == "Be brief.\n\nYou are a clerk."
    assert call.call_texts == (("a", "weather", '{"city": "Bern"}'),)
    assert (answer.name, answer.tool_call_id) == ("weather", "a")
    assert said.reasoning == "It says so."


# The pattern that docs/evaluation.md shows.
PATTERN = r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\\boxed{1}</think>So \\boxed{2}, or \\boxed{ 3 }.", "3"),
        ("It is \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{4} or \\boxed{ }", "4"),
        ("Seven.", None),
    ],
)
async def test_an_option_says_which_part_of_the_text_is_the_answer(
    text: str, answer: str | None
) -> None:
    options = {"reward": named("parts"), "answer_pattern": PATTERN}
    environment = resolve("single_turn", options)()
    await environment.reset(
        Task(task_id="t", environment="single_turn", seed=0, data={"prompt": "2"})
    )
    assert (await environment.step(Action(text=text))).answer == answer


async def test_a_pattern_that_does_not_finish_is_a_reward_error() -> None:
    options = {"reward": named("parts"), "answer_pattern": r"^((?:a|aa)+)$"}
    environment = resolve("single_turn", options)()
    await environment.reset(
        Task(task_id="t", environment="single_turn", seed=0, data={"prompt": "2"})
    )
    with pytest.raises(RewardError, match=r"answer_pattern: .* did not finish within 1 s"):
        await environment.step(Action(text="a" * 60 + "b"))


@pytest.mark.parametrize("pattern", ["(", "[0-9]+", "(a)(b)", 5, ["(a)"]])
def test_a_pattern_without_exactly_one_group_is_refused(pattern: Any) -> None:
    with pytest.raises(BadEnvironmentOptions, match="answer_pattern: "):
        resolve("single_turn", {"reward": named("parts"), "answer_pattern": pattern})


async def test_several_functions_are_summed_by_their_weights() -> None:
    asked: dict[str, Any] = {"prompt": "2 + 2", "answer": "4"}
    found = await play({"exact": 2.0, "parts": -1.0}, "4", system="Calculate.", **asked)
    assert found == (
        2.0 - 0.75,
        {"exact": 1.0, "parts": 0.75, "parts.short": 0.5, "parts.polite": 0.25},
    )
    # A function that returns None changes nothing.
    assert await play(["exact", "silent"], "4", **asked) == (1.0, {"exact": 1.0})


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("nan", "nan gave nan, expected a number"),
        ("words", "words gave 'good', expected a number"),
        ("fails", "fails raised KeyError"),
        ("leaves", "leaves raised SystemExit"),
        ("vast", r"a number from -1e\+09 to 1e\+09"),
        ("vaster", "gave 10000.*, expected a number"),
        ("not_known", "gave None as style, expected a number"),
        ("made_of_locks", "gave a Lock, expected a number"),
        ("many", "gave 65 named numbers, expected 1 to 64"),
        ("long_names", "named a number 'a+', expected printable names that differ"),
        ("equal_names", "named a number '1', expected printable names that differ"),
        ("empty_name", "named a number '', expected printable names"),
        ("odd_name", r"named a number 'a\\nb', expected printable names"),
        ("silent", "none of the reward functions"),
        ("quiet", "none of the reward functions"),
    ],
)
async def test_a_function_without_a_valid_score_is_a_reward_error(reward: str, words: str) -> None:
    with pytest.raises(RewardError, match=words) as raised:
        await play(reward, "4", prompt="2 + 2")
    assert raised.value.rescore is not None
    with pytest.raises(RewardError, match=words):
        await raised.value.rescore()


async def test_a_missing_column_that_a_function_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="exact needs answer, got the columns prompt, result"):
        await play("exact", "4", prompt="2 + 2", result="4")
    words = "needs prompts, .*; in a function of one answer the argument is prompt; rename prompts"
    with pytest.raises(ValueError, match=words):
        await play("one_and_prompts", "4", prompt="2 + 2")
    # A column of the data may have this name.
    assert (await play("one_and_prompts", "4", prompt="2 + 2", prompts="two"))[0] == 1.0


def test_a_method_that_takes_lists_and_one_prompt_is_refused(module: Any) -> None:
    method = method_as_reward("get_reward", module.Game().get_reward)
    with pytest.raises(ValueError, match="with lists the argument is prompts; rename prompt"):
        method.check({"prompt": "2 + 2"})


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("needs_ids", "needs completion_ids, which only a trainer has"),
        (
            "Exact.score",
            r"is a method of the class Exact and has no instance.*own = Exact\(\)",
        ),
        ("other", r"takes \(text\), expected an argument completion"),
        (
            "lists_and_prompt",
            "needs prompt, which it is not given; in a function with lists the argument is prompts"
            "; rename prompt",
        ),
        ("both", "takes both completion and completions, expected completion for one answer"),
        ("streams", "yields its values, expected it to return a number"),
        ("yields", "yields its values"),
        ("Scorer", "is a class, expected a function or an instance with __call__"),
        ("by_place", r"takes \(completion, /\), expected .* can be passed by name"),
        ("not_callable", "is an int, expected a function"),
        ("missing", "has no attribute 'missing'"),
        ([], "got no function"),
        (["exact", "exact"], "expected each function once"),
        ({"exact": float("inf")}, "got inf, expected a finite number"),
        ({"exact": True}, "got True, expected a number"),
    ],
)
def test_invalid_reward_functions_are_refused_before_the_start(reward: Any, words: str) -> None:
    with pytest.raises(BadEnvironmentOptions, match=words):
        resolve("single_turn", {"reward": named(reward)})


def test_a_module_that_changes_the_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moves.py").write_text("import os\nos.chdir('/')\ndef score(completion): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadRewardFunction, match=r"moves\.py:score: importing .* to /, expected no"):
        load_functions("moves.py:score")
    assert Path.cwd() == tmp_path


def test_a_file_is_loaded_as_the_module_of_its_path() -> None:
    assert module_of("my.py:score", what="reward") == "my"
    assert module_of("./rewards/my.py:score", what="reward") == "rewards.my"
    assert module_of("rewards//my.py:score", what="reward") == "rewards.my"
    assert module_of("rewards/../rewards/./my.py:score", what="reward") == "rewards.my"
    assert module_of("package.module:score", what="reward") == "package.module"
    for text in ("my.py", ":score", "/tmp/my.py:score", "../my.py:score", "my.py:"):
        with pytest.raises(BadName, match=r"reward: got .*expected FILE\.py:NAME below"):
            module_of(text, what="reward")
    with pytest.raises(BadName, match=r"; write 'rewards/my\.py:score'$"):
        module_of(f"{Path.cwd()}/rewards/my.py:score", what="reward")
    with pytest.raises(BadName, match="; start the command in a directory above the file"):
        module_of("/elsewhere/my.py:score", what="reward")
    with pytest.raises(BadRewardFunction, match="the name of two functions"):
        load_functions(["rewards_of_test:exact", "rewards_of_test.py:exact"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_file.py:score", r"there is no such file in /.*; expected FILE\.py:NAME below"),
        ("named_of_test.v2.py:score", r"the file exists.* to named_of_test_v2\.py$"),
        ("no_such_module:score", "No module named 'no_such_module'; expected FILE"),
        ("named_of_test.py:scor", "has no attribute 'scor'; did you mean 'score'"),
        ("named_of_test.py:other", "has no attribute 'other'; expected one of Scorer, score$"),
        ("named_of_test.py:Scorer.cal", "has no attribute 'cal'; did you mean 'call'"),
        ("named_of_test.py", r"^reward: got 'named_of_test\.py', expected FILE"),
    ],
)
def test_a_wrong_name_is_refused_with_the_right_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "named_of_test", raising=False)
    (tmp_path / "named_of_test.py").write_text(
        "from json import dumps\ndef score(completion): ...\ndef _score(): ...\n"
        "class Scorer:\n    def call(self, completion): ...\n"
    )
    (tmp_path / "named_of_test.v2.py").write_text("def score(completion): ...\n")
    with pytest.raises(BadRewardFunction, match=words):
        load_functions(name)


def test_a_wrong_name_does_not_load_lazy_attributes_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lazy_of_test.py").write_text(
        "def score(completion): ...\ndef __dir__(): return ['score', 'heavy']\n"
        "def __getattr__(name):\n"
        "    if name == 'heavy': raise RuntimeError('loaded')\n"
        "    raise AttributeError(f'it has no {name}')\n"
    )
    with pytest.raises(BadRewardFunction, match="it has no scor; did you mean 'score'"):
        load_functions("lazy_of_test.py:scor")
    with pytest.raises(BadRewardFunction, match="reading heavy raised RuntimeError: loaded"):
        load_functions("lazy_of_test.py:heavy")


def test_a_file_with_the_name_of_another_module_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "types.py").write_text("def score(completion):\n    return 1.0\n")
    with pytest.raises(BadRewardFunction, match=r"types\.py: by this name Python imports"):
        load_functions("types.py:score")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import no_such_package",
            "/.*/broken_of_test.py:1 imports no_such_package, which is not installed",
        ),
        ("def score(completion", "its module raised SyntaxError.*correct it"),
        ("raise SystemExit(3)", "its module raised SystemExit: 3"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_of_test.py").write_text(text)
    with pytest.raises(BadRewardFunction, match=f"broken_of_test.py:score: {words}"):
        load_functions("broken_of_test.py:score")


@pytest.mark.parametrize(
    ("sibling", "words"),
    [
        (
            None,
            r"/mine/of_sibling\.py:1 imports helpers_of_test, which is not installed",
        ),
        ("", r"imports helpers_of_test, which is not found, although .*start it in .*/mine"),
    ],
)
def test_a_sibling_module_that_is_not_found_is_named_with_its_importer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sibling: str | None, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "of_sibling.py").write_text("import helpers_of_test\n")
    if sibling is not None:
        (tmp_path / "mine" / "helpers_of_test.py").write_text(sibling)
    with pytest.raises(BadRewardFunction, match=words):
        load_functions("mine/of_sibling.py:score")
    with pytest.raises(UnknownEnvironment, match=words):
        resolve("mine.of_sibling:Game", {})
    for name in ("mine.of_sibling", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_broken_sibling_module_is_named_with_its_importer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_broken_sibling.py").write_text("\nimport broken_sibling\n")
    (tmp_path / "broken_sibling.py").write_text("raise ValueError('no key')\n")
    words = r"ValueError: no key \(.*/broken_sibling\.py:1, imported at .*of_broken_sibling\.py:2\)"
    with pytest.raises(BadRewardFunction, match=words):
        load_functions("of_broken_sibling.py:score")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "user", "tool_call_id": "c1"},
            "role user has tool_call_id, .* role tool",
        ),
        (
            {"role": "system", "reasoning": "Hm."},
            "role system has reasoning, which only",
        ),
        ({"role": "tool", "reasoning_content": "Hm."}, "role tool has reasoning_content"),
    ],
)
async def test_fields_of_a_message_that_belong_to_another_role_are_refused(
    message: dict[str, Any], words: str
) -> None:
    prompt = [{**message, "content": "hi"}, {"role": "user", "content": "4", "tool_call_id": None}]
    with pytest.raises(ValueError, match=words):
        await play("parts", "4", prompt=prompt)


def test_the_name_of_a_speaker_is_kept_and_calls_of_a_user_are_refused() -> None:
    for role in ("user", "assistant", "system"):
        assert chat_message({"role": role, "content": "hi", "name": "Ada"}).name == "Ada"
    call = {"function": {"name": "lookup", "arguments": {}}}
    with pytest.raises(ValueError, match="role user has tool_calls"):
        chat_message({"role": "user", "content": "hi", "tool_calls": [call]})


@pytest.mark.parametrize("name", ["refusal", "images", "audio"])
def test_a_field_of_a_message_that_is_not_text_is_refused(name: str) -> None:
    environment: Any = resolve("single_turn", {"reward": named("exact")})()
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", name: "part"},
    ]
    with pytest.raises(ValueError, match=f"the message has {name}, which is not read"):
        environment.check_data({"prompt": chat, "answer": "4"})
    chat[1][name] = ""
    environment.check_data({"prompt": chat, "answer": "4"})


def test_a_thought_is_read_from_each_of_its_field_names() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert chat_message({"role": "assistant", "content": "4", name: "2+2"}).reasoning == "2+2"


def test_a_call_in_the_deprecated_form_is_refused() -> None:
    call = {"name": "lookup", "arguments": "{}"}
    with pytest.raises(ValueError, match="tool_calls"):
        chat_message({"role": "assistant", "content": "", "function_call": call})
    assert chat_message({"role": "user", "content": "hi", "function_call": None}).content == "hi"


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_a_message_of_a_user_or_the_system_without_content_is_refused(role: str) -> None:
    environment: Any = resolve("single_turn", {"reward": named("exact")})()
    call = {"id": "a", "function": {"name": "lookup", "arguments": {}}}
    # An assistant's message that only calls a tool has no content.
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "a"},
    ]
    environment.check_data({"prompt": chat, "answer": "4"})
    for empty in ({"content": None}, {"tool_calls": None}):
        prompt = [*chat, {"role": role, **empty}]
        with pytest.raises(ValueError, match=rf"prompt\[3\]: .* role {role} is null or missing"):
            environment.check_data({"prompt": prompt, "answer": "4"})


def test_system_messages_with_names_are_not_merged() -> None:
    """Their names would be lost before the template is asked whether it shows them."""
    environment: Any = resolve("single_turn", {"reward": named("exact"), "system": "Add."})()
    for name, num_messages in (("Ada", 3), ("system", 2), (None, 2)):
        chat = [
            {"role": "system", "content": "Be brief.", "name": name},
            {"role": "user", "content": "2+2?"},
        ]
        assert len(environment.first_messages({"prompt": chat})) == num_messages
