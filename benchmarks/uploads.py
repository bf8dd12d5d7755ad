"""Compare uploaded trajectories as packed columns in MessagePack with lists in JSON.

    python -m benchmarks.uploads

Both sides have the same trajectories of 8,192 tokens, and process a request from its bytes to
durable storage, as the API's replica and the gateway do: it is decoded, checked, encoded for the
queue, and stored in SQLite with synchronous writes. JSON is decoded by msgspec into typed lists;
its numbers are short, with six digits for a log-probability. *base64*, packed columns in JSON, is
also reported. The stored bytes are compared before anything is timed. The sides process one request
each, in changing order. The benchmark prints one JSON line, and exits with 1 if the upper quartile
of the ratio misses its goal.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.environment import describe_environment
from benchmarks.pairs import Seconds, interleave, ratios_of, rounds, time_once
from service.gateway.upload_bodies import UploadBody, decode_body
from service.gateway.upload_checks import checked_upload
from service.intake.uploads import PolicyFacts, Upload, UploadLimits
from service.store.run_store import RunStore
from service.store.uploads import UploadStore

GOAL = 3.0
NUM_TOKENS, NUM_PROMPT, NUM_SAMPLED, NUM_OBSERVED = 8192, 512, 128, 128
VOCABULARY = 151_936
FACTS = PolicyFacts(
    tokenizer_fingerprint="sha256:0",
    vocab_size=VOCABULARY,
    mixture=None,
    max_context_tokens=NUM_TOKENS,
    temperature=1.0,
)
LIMITS = UploadLimits(
    oldest_version=0,
    newest_version=9,
    min_members=2,
    max_members=1 << 20,
    max_waiting_bytes=1 << 40,
)


class Columns:
    """The numbers of a trajectory, as columns."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.token_ids = rng.integers(0, VOCABULARY, NUM_TOKENS).astype(np.int32)
        behind = np.arange(NUM_TOKENS) - NUM_PROMPT
        is_sampled = (behind >= 0) & (behind % (NUM_SAMPLED + NUM_OBSERVED) < NUM_SAMPLED)
        self.mask = is_sampled.astype(np.uint8)
        short = np.array([float(f"{x:.6g}") for x in -rng.exponential(0.7, NUM_TOKENS)])
        self.logprobs = np.where(is_sampled, short, 0.0)

    def lists(self) -> dict[str, Any]:
        return {
            "token_ids": self.token_ids.tolist(),
            "mask": self.mask.tolist(),
            # The shortest form of 0 in JSON.
            "logprobs": [value or 0 for value in self.logprobs.tolist()],
        }

    def packed(self) -> dict[str, Any]:
        return {
            "token_ids": {"dtype": "<i4", "data": self.token_ids.astype("<i4").tobytes()},
            "mask": {"dtype": "|u1", "data": self.mask.tobytes()},
            "logprobs": {"dtype": "<f4", "data": self.logprobs.astype("<f4").tobytes()},
        }

    def base64(self) -> dict[str, Any]:
        return {
            name: {**each, "data": base64.b64encode(each["data"]).decode()}
            for name, each in self.packed().items()
        }


class Side:
    """One form of a request; each request has trajectories that are not in the store yet."""

    def __init__(self, name: str, store: UploadStore, term: int, columns: list[Columns]) -> None:
        self._name, self._store, self._term = name, store, term
        self._is_packed = name == "msgpack"
        encode = msgspec.msgpack.encode if self._is_packed else msgspec.json.encode
        form = {"json": "lists", "msgpack": "packed", "base64": "base64"}[name]
        self._samples = [getattr(each, form)() for each in columns]
        self._encode: Callable[[Any], bytes] = encode
        self._number = 0

    def next_body(self) -> bytes:
        self._number += 1
        return self.body(f"{self._name}-{self._number}")

    def body(self, group: str) -> bytes:
        """Return the body of a request that uploads one group."""
        items = [
            {
                "id": f"{group}-{number}",
                "group": group,
                "reward": 1.0,
                "samples": [
                    {**sample, "versions": [{"version": 3, "start": 0, "end": NUM_TOKENS}]}
                ],
            }
            for number, sample in enumerate(self._samples)
        ]
        return self._encode(
            {"tokenizer_fingerprint": FACTS.tokenizer_fingerprint, "trajectories": items}
        )

    def read(self, raw: bytes) -> list[Upload]:
        body = decode_body(raw, UploadBody, packed=self._is_packed)
        return [checked_upload(item, FACTS) for item in body.trajectories]

    def take(self, raw: bytes) -> None:
        uploads = self.read(raw)
        reply = self._store.add(uploads, [], term=self._term, limits=LIMITS)
        assert len(reply.accepted) == len(uploads), reply

    def time(self) -> tuple[Seconds, Seconds]:
        """Return the times of two requests: one is processed, the other one is not stored."""
        raw, other = self.next_body(), self.next_body()
        return time_once(partial(self.take, raw)), time_once(partial(self.read, other))


def measure(folder: Path, *, num_rounds: int, num_trajectories: int) -> dict[str, Any]:
    store = RunStore(f"sqlite:///{folder / 'run.db'}")
    term = store.acquire_lease(owner="benchmark").term
    columns = [Columns(np.random.default_rng(seed)) for seed in range(num_trajectories)]
    sides = {
        name: Side(name, UploadStore(store), term, columns)
        for name in ("json", "base64", "msgpack")
    }
    bodies = {name: side.body("same") for name, side in sides.items()}
    contents = {
        tuple(upload.content for upload in side.read(bodies[name])) for name, side in sides.items()
    }
    assert len(contents) == 1, "the sides do not store the same"
    for side in sides.values():
        side.time()
    times = interleave({name: side.time for name, side in sides.items()}, num_rounds=num_rounds)
    store.close()
    whole = {name: [each for each, _ in found] for name, found in times.items()}
    unstored = {name: [each for _, each in found] for name, found in times.items()}
    return {
        "request_mib": {name: round(len(body) / 2**20, 2) for name, body in bodies.items()},
        "seconds": {name: asdict(Seconds.median(each)) for name, each in whole.items()},
        "seconds_unstored": {name: asdict(Seconds.median(each)) for name, each in unstored.items()},
        "ratios": {name: _spreads(whole[name], whole["msgpack"]) for name in ("json", "base64")},
        "ratios_unstored": {
            name: _spreads(unstored[name], unstored["msgpack"]) for name in ("json", "base64")
        },
    }


def _spreads(slow: list[Seconds], fast: list[Seconds]) -> dict[str, Any]:
    return {name: asdict(spread) for name, spread in ratios_of(slow, fast).items()}


def main() -> int:
    """Run, print one JSON line, and return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=rounds, default=15, help="requests of each side")
    parser.add_argument("--trajectories", type=int, default=64, help="of a request")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Path(folder), num_rounds=options.rounds, num_trajectories=options.trajectories
        )
    best = found["ratios"]["json"]["ratio_cpu"]["upper"]
    result = {
        "benchmark": "uploads",
        "rounds": options.rounds,
        "trajectories": options.trajectories,
        "tokens": NUM_TOKENS,
        "goal": GOAL,
        **found,
        "missed": [f"json / msgpack: {best} < {GOAL}"] if best < GOAL else [],
        "environment": describe_environment("msgspec", "numpy", "sqlalchemy"),
    }
    print(json.dumps(result))
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
