"""Run the gateway of agentcore-rl-toolkit 0.2.0 with scripted answers, in its own environment.

    python agentcore_gateway.py MODEL ANSWERS KIND MODE

It is assembled as its documentation describes for a trainer that waits in its own thread: its own
renderer, OpenAI adapter and server, and MODE as `history_mode` (tree or linear). Only the code that
answers its sampling port is ours. Each line of the input is a command: `port`, `cpu` (seconds of
this process), or `rows SESSION` (ends the session and returns its training rows). The module
imports nothing of Rayloom.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.rollout_gateway import (
    HfTemplateRenderer,
    RolloutGateway,
    ThreadedGatewayServer,
    TurnRecord,
)
from transformers import AutoTokenizer

END = "<|end|>"
# A log-probability names its token: answer n, token i. Exact in float32.
TOKENS_AN_ANSWER, UNIT = 256, 2.0**-16


class Script:
    """A script that returns its answers one after another, at once and for any request."""

    def __init__(self, path: str, kind: str) -> None:
        self._answers: list[list[int]] = json.loads(Path(path).read_text())[kind]
        self._number = 0
        self.sampled: defaultdict[str, list[int]] = defaultdict(list)

    async def generate(
        self, *, prompt_ids: list[int], session_id: str = "", **_: object
    ) -> TurnRecord:
        ids = self._answers[self._number % len(self._answers)]
        self._number += 1
        first = self._number * TOKENS_AN_ANSWER
        self.sampled[session_id].append(len(ids))
        return TurnRecord(
            prompt_ids=list(prompt_ids),
            output_ids=list(ids),
            finish_reason="stop",
            output_log_probs=[-(first + place) * UNIT for place in range(len(ids))],
        )


def rows(gateway: Any, script: Script, session: str) -> dict[str, Any]:
    """Return the rows of one session, and the names of the tokens that each row trains."""
    records = asyncio.run(gateway.finish_session(session, reward=1.0))
    return {
        "sampled": script.sampled.pop(session),
        "tokens": [len(record.token_ids) for record in records],
        "trained": [
            round(-logprob / UNIT)
            for record in records
            for logprob, is_trained in zip(record.logprobs, record.loss_mask, strict=True)
            if is_trained
        ],
    }


def main() -> None:
    model, path, kind, mode = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    script = Script(path, kind)
    gateway = RolloutGateway(
        backend=script,
        # No registry has the tiny template, so state that a reply ends with its stop token.
        renderer=HfTemplateRenderer(
            tokenizer, reasoning_parser=lambda text: ("", text.removesuffix(END))
        ),
        tokenizer=tokenizer,
        adapters=["openai"],
        history_mode=mode,
    )
    server = ThreadedGatewayServer(gateway, host="127.0.0.1")
    server.start()
    print("ready", flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "port":
            print(server.port, flush=True)
        elif command == "cpu":
            print(json.dumps({"gateway": time.process_time()}), flush=True)
        elif command == "rows":
            print(json.dumps(rows(gateway, script, words[0])), flush=True)
    server.shutdown()


if __name__ == "__main__":
    main()
