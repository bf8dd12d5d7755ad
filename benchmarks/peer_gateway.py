"""Compare sessions with the gateway of agentcore-rl-toolkit 0.2.0: turns a second, and samples.

    $ python -m benchmarks.peer_gateway --peer-python build/peers/agentcore/bin/python

Both gateways own the chat template and the token ids, and speak OpenAI's chat completions over HTTP
on this machine. They have the same tokenizer and the same scripted answers, which their own
sampling ports return immediately, so that neither pays for an engine or for the connection to it.
All of a side's processes share one core, and the clients have the other; the sides alternate their
rounds. If other work runs on the machine, a side of two processes gets more of its core than a side
of one: then only processor time can be compared.

Only our gateway does the following in the measured time. A turn is committed to a database before
it is answered (SQLite on a file, one commit for all sessions each 5 ms), so that it outlives the
process. Keys and bodies are checked. The routes are in a separate process, as in a replica of the
API, and send each request to the gateway's process through Ray. (Serve's proxy or HAProxy in front
of the routes is left out; a run has one of them.) The other gateway is one process that keeps the
sessions in its memory and ends with them, by design, because it is the trainer's own process; it
checks no key. Both gateways make the text of a reply from its ids.

The other gateway is measured in both of its modes. `tree` (its default) renders and tokenizes the
conversation again with each turn. `linear` uses the sampled ids instead of tokenizing them, as long
as a session's requests continue each other, and calls `reset` if they do not. Our gateway always
keeps the ids. The agent whose samples are counted has a main line of eight turns, of which one is
requested twice, as clients do whose answer was lost. (The retry is marked as the OpenAI client
marks it, with an idempotency key; the other gateway ignores both and samples the turn again.) It
also has a sub-agent of three turns with its own instructions between them, a compaction, and three
turns after it. It plays once with answers as the tokenizer would encode them (*canonical*: no
answer changes), and once with the first word of each answer in single letters (*split*: all change,
the worst case; a real model's answers are between these cases). `trained_once` is the number of
sampled tokens that are trained exactly once; a token is recognised by its log-probability, which is
different for each token and passes both gateways unchanged. The benchmark prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer

from actors.trainer.tiny.model import build_tiny_model
from benchmarks.environment import describe_environment
from benchmarks.http_connection import HttpConnection
from benchmarks.line_process import LineProcess
from benchmarks.pairs import Spread, rounds
from benchmarks.peer_gateway_ours import key_of
from benchmarks.session_world import NAME
from service.intake.session import session_id

PEER_SCRIPT = Path(__file__).parent / "peers" / "agentcore_gateway.py"
NUM_CLIENTS, NUM_TURNS, NUM_TOKENS, NUM_OBSERVED = 64, 8, 128, 64
WORDS = "higher lower number guess name answer correct error is of the and in search city".split()
GATEWAY_CORE, CLIENT_CORE = {0}, {1}
SIDES = ("ours", "tree", "linear")
Kind = Literal["canonical", "split"]
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A running gateway."""

    process: LineProcess
    port: int
    is_ours: bool

    def name(self, member: int) -> str:
        return session_id(NAME, member)

    async def ask(
        self,
        connection: HttpConnection,
        member: int,
        messages: Messages,
        **headers: str,
    ) -> str:
        """Request one turn, and return the answer's text."""
        name = self.name(member)
        path = f"/sessions/{name}/v1/chat/completions" if self.is_ours else "/v1/chat/completions"
        key = key_of(member) if self.is_ours else name
        body = json.dumps({"model": "any", "messages": messages}).encode()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        status, answer = await connection.post(
            path, body, {"Authorization": f"Bearer {key}", **headers}
        )
        if status != 200:
            raise SystemExit(f"benchmark: status {status}: {answer[:500]!r}")
        return str(json.loads(answer)["choices"][0]["message"]["content"])

    def cpu_s(self) -> dict[str, float]:
        found: dict[str, float] = json.loads(self.process.ask("cpu"))
        return found

    def rows(self, member: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.process.ask(f"rows {self.name(member)}"))
        return found


@dataclass
class Measured:
    """The measurements of one side, over its rounds."""

    turns_per_s: list[float] = field(default_factory=list)
    cpu_s: Counter[str] = field(default_factory=Counter)
    num_turns: int = 0


async def converse(side: Side, member: int, said: str, *, num_turns: int) -> None:
    messages = [{"role": "user", "content": said}]
    observed = " ".join(["lower"] * NUM_OBSERVED)
    async with HttpConnection(side.port) as connection:
        for _ in range(num_turns):
            answer = await side.ask(connection, member, messages)
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": observed})


def play(side: Side, measured: Measured, number: int, *, history: int, num_turns: int) -> None:
    """Play a round, in which every client has a new conversation in its own session.

    history: number of tokens with which each conversation begins.
    """

    async def all_of_them() -> None:
        text = " is" * history
        await asyncio.gather(
            *(
                converse(side, member, f"Conversation {number}.{text}", num_turns=num_turns)
                for member in range(NUM_CLIENTS)
            )
        )

    before, started = Counter(side.cpu_s()), time.perf_counter()
    asyncio.run(all_of_them())
    seconds = time.perf_counter() - started
    after = Counter(side.cpu_s())
    after.subtract(before)
    measured.cpu_s.update(after)
    measured.num_turns += NUM_CLIENTS * num_turns
    measured.turns_per_s.append(NUM_CLIENTS * num_turns / seconds)


async def play_branching(side: Side, member: int) -> None:
    """Play the agent whose samples are counted; the module's docstring describes it."""
    main = [
        {"role": "system", "content": "You have the search tool."},
        {"role": "user", "content": "What is the weather in my city?"},
    ]
    helper = [
        {"role": "system", "content": "Say one number."},
        {"role": "user", "content": "What is the number of the answer?"},
    ]

    async def go_on(messages: Messages, **headers: str) -> None:
        answer = await side.ask(connection, member, messages, **headers)
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": "search result"})

    async with HttpConnection(side.port) as connection:
        for number in range(NUM_TURNS):
            if number == 5:
                # Request this turn twice, as if the first answer had been lost.
                await side.ask(connection, member, main, idempotency_key="fifth")
                again = {"idempotency_key": "fifth", "x_stainless_retry_count": "1"}
                await go_on(main, **again)
            else:
                await go_on(main)
            if number in (2, 3, 4):
                await go_on(helper)
        compacted = [main[0], {"role": "user", "content": "The answer from search is one number."}]
        for _ in range(3):
            await go_on(compacted)


def samples(side: Side, member: int) -> dict[str, Any]:
    """Return counts of the turns, tokens and samples of one rollout of the branching agent."""
    asyncio.run(play_branching(side, member))
    rows = side.rows(member)
    times = Counter(rows["trained"])
    num_sampled = sum(rows["sampled"])
    return {
        "sampled_turns": len(rows["sampled"]),
        "sampled_tokens": num_sampled,
        "samples": len(rows["tokens"]),
        "tokens_in_samples": sum(rows["tokens"]),
        "trained_once": sum(count == 1 for count in times.values()),
        "trained_twice_or_more": sum(count > 1 for count in times.values()),
        "never_trained": num_sampled - len(times),
    }


def write_answers(model: Path, path: Path) -> None:
    """Write the scripted answers of both kinds; each has NUM_TOKENS ids, including the stop token.

    In *split* answers the first word is in single letters.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    (end,) = tokenizer.encode("<|end|>")
    answers: dict[Kind, list[list[int]]] = {"canonical": [], "split": []}
    for number in range(997):
        # The first three tokens distinguish the answers.
        places = [number % 15, number // 15 % 15, number // 225 % 15]
        words = [WORDS[place] for place in places]
        words += [WORDS[(number + place) % 15] for place in range(NUM_TOKENS - 4)]
        ids = tokenizer.encode(" ".join(words))
        assert len(ids) == NUM_TOKENS - 1
        letters = [each for letter in words[0] for each in tokenizer.encode(letter)]
        split = [*letters, *ids[1:]][: NUM_TOKENS - 1]
        assert split != tokenizer.encode(tokenizer.decode(split))
        answers["canonical"].append([*ids, end])
        answers["split"].append([*split, end])
    path.write_text(json.dumps(answers))


def start(name: str, kind: Kind, *, peer_python: str, model: Path, answers: Path) -> LineProcess:
    remedy = "; make the other gateway's environment with `make bench-gateway`"
    if name == "ours":
        command = [sys.executable, "-m", "benchmarks.peer_gateway_ours"]
        command += [str(answers), kind, str(NUM_CLIENTS + 1)]
    else:
        command = [peer_python, str(PEER_SCRIPT), str(model), str(answers), kind, name]
    return LineProcess(command, environment={}, remedy=remedy)


def told(measured: Measured) -> dict[str, Any]:
    per_turn = {
        part: round(1e3 * seconds / measured.num_turns, 2)
        for part, seconds in measured.cpu_s.items()
    }
    return {
        "turns_per_s": round(statistics.median(measured.turns_per_s)),
        "cpu_ms_a_turn": per_turn,
        "cpu_ms_a_turn_in_all": round(sum(per_turn.values()), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True, help="Python of the peer's environment")
    parser.add_argument("--rounds", type=rounds, default=3)
    parser.add_argument(
        "--histories", type=int, nargs="+", default=[0, 8000], help="tokens before the first turn"
    )
    asked = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "peer_gateway", "peer": "agentcore-rl-toolkit 0.2.0"}
    with tempfile.TemporaryDirectory() as name:
        model, answers = Path(name) / "model", Path(name) / "answers.json"
        build_tiny_model(model, seed=0, warmup_steps=0)
        write_answers(model, answers)
        kinds: tuple[Kind, ...] = ("split", "canonical")
        for kind in kinds:
            with ExitStack() as stack:
                # The started processes inherit the core.
                os.sched_setaffinity(0, GATEWAY_CORE)
                sides = {}
                for side in SIDES:
                    process = stack.enter_context(
                        start(
                            side,
                            kind,
                            peer_python=asked.peer_python,
                            model=model,
                            answers=answers,
                        )
                    )
                    sides[side] = Side(
                        process=process, port=int(process.ask("port")), is_ours=side == "ours"
                    )
                os.sched_setaffinity(0, CLIENT_CORE)
                found[f"samples_{kind}"] = {
                    side: samples(each, NUM_CLIENTS) for side, each in sides.items()
                }
                print(json.dumps(found[f"samples_{kind}"]), file=sys.stderr, flush=True)
                if kind == "canonical":
                    found["speed"] = speed(sides, asked.histories, num_rounds=asked.rounds)
    print(json.dumps({**found, **describe_environment("ray", "transformers", "uvicorn")}))


def speed(sides: dict[str, Side], histories: list[int], *, num_rounds: int) -> list[dict[str, Any]]:
    found = []
    for place, history in enumerate(histories):
        number = place * (num_rounds + 1)
        for side in sides.values():
            play(side, Measured(), number, history=history, num_turns=1)
        measured = {name: Measured() for name in sides}
        for each in range(number + 1, number + num_rounds + 1):
            names = list(sides) if each % 2 else list(reversed(sides))
            for name in names:
                play(sides[name], measured[name], each, history=history, num_turns=NUM_TURNS)
        ours = measured["ours"].turns_per_s
        found.append(
            {
                "history_tokens": history,
                **{name: told(each) for name, each in measured.items()},
                "ours_over": {
                    name: asdict(
                        Spread.of([a / b for a, b in zip(ours, each.turns_per_s, strict=True)])
                    )
                    for name, each in measured.items()
                    if name != "ours"
                },
            }
        )
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
