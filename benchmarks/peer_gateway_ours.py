"""Rayloom's side of `benchmarks.peer_gateway`: routes in uvicorn, and the gateway's actor.

The process answers the same commands as `peers/agentcore_gateway.py`, in the same form.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvicorn
from transformers import AutoTokenizer

from actors.environment.policy import GenerateReply, GenerateRequest, ParsedReply
from actors.types import FinishReason, VersionSpan
from benchmarks.serve_router import free_port
from benchmarks.session_world import NAME, World, world
from service.access.keys import AGENT, session_key
from service.gateway.ends import samples_of
from service.gateway.tree import SessionTree
from service.intake.session import session_id
from service.store.run_store import RunStore
from service.store.sessions import SessionStore

# A log-probability names its token: answer n, token i. Exact in float32.
TOKENS_AN_ANSWER, UNIT = 256, 2.0**-16


class Script:
    """A script that returns its answers one after another, at once and for any request.

    It parses the text of an answer, as an engine's replica and the other gateway do.
    """

    def __init__(self, model: str, path: str, kind: str) -> None:
        answers = json.loads(Path(path).read_text())[kind]
        self._answers = [np.array(ids, np.int32) for ids in answers]
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._number = 0

    async def generate(self, _request: GenerateRequest) -> GenerateReply:
        ids = self._answers[self._number % len(self._answers)]
        self._number += 1
        count = ids.shape[0]
        names = self._number * TOKENS_AN_ANSWER + np.arange(count)
        return GenerateReply(
            token_ids=ids,
            logprobs=(-UNIT * names).astype(np.float32),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=1, start=0, end=count),),
            cache_salt="v1",
            parsed=ParsedReply(content=self._tokenizer.decode(ids, skip_special_tokens=True)),
        )


def key_of(member: int) -> str:
    """Return the key with which an agent uses a member's session."""
    return session_key("", session_id(NAME, member), AGENT)


def rows(store: SessionStore, session: str) -> dict[str, Any]:
    """Return a session's training rows, made from its stored turns."""
    loaded = store.load(session)
    assert loaded is not None
    tree = SessionTree(session)
    for turn in loaded[1]:
        tree.add(turn)
    samples = samples_of(tree, session, reward=1.0)
    trained = [
        name
        for sample in samples
        for name in np.rint(-sample.logprobs[sample.mask.astype(bool)] / UNIT).astype(int).tolist()
    ]
    return {
        "sampled": [turn.num_sampled for turn in loaded[1]],
        "tokens": [sample.num_tokens for sample in samples],
        "trained": trained,
    }


def cpu_s(here: World) -> dict[str, float]:
    """Return processor seconds by part; the part "ray" is the processes that Ray itself runs."""
    found = {"routes": time.process_time(), "gateway": here.gateway_cpu_s()}
    times = [
        each.cpu_times()
        for each in psutil.Process().children(recursive=True)
        if each.pid != here.gateway.pid
    ]
    return {**found, "ray": float(sum(each.user + each.system for each in times))}


def main() -> None:
    path, kind, num_sessions = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with closing(answers), tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_policy = partial(Script, str(directory / "model"), path, kind)
        with world(directory, num_sessions=int(num_sessions), make_policy=make_policy) as here:
            port = free_port()
            config = uvicorn.Config(here.app, port=port, log_level="warning")
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run)
            thread.start()
            while not server.started:
                time.sleep(0.05)
            store = SessionStore(RunStore(f"sqlite:///{directory / 'run.db'}"))
            print("ready", file=answers, flush=True)
            for line in sys.stdin:
                command, *words = line.split()
                if command == "port":
                    print(port, file=answers, flush=True)
                elif command == "cpu":
                    print(json.dumps(cpu_s(here)), file=answers, flush=True)
                elif command == "rows":
                    print(json.dumps(rows(store, words[0])), file=answers, flush=True)
            server.should_exit = True
            thread.join(10)


if __name__ == "__main__":
    main()
