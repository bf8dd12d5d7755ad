"""Measure the time and the memory that it takes to read a data set's rows as tasks.

    $ python -m benchmarks.read_rows

The benchmark writes ROWS rows as chat prompts with an answer to a JSONL file, and reads them as a
start does. It prints processor seconds, the number of objects that garbage collections visit
afterwards, the number of memory blocks, and the growth of the process's peak memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from actors.environment.data_sets import read_data_set
from actors.environment.registry import resolve
from actors.environment.task_data import DataCheck, data_schema_of
from actors.environment.tasks import FileTasks

GOAL_S = 5.0
SINGLE_TURN = "single_turn"
REWARD = "benchmarks.read_rows:is_right"


def is_right(completion: str, answer: str) -> float:
    return float(answer in completion)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    environment = resolve(SINGLE_TURN, {"reward": REWARD})()
    check = DataCheck(data_schema_of(environment))
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.jsonl"
        with file.open("w") as written:
            for number in range(rows):
                question = f"What is {number} + {number % 997}? Think, and end with the number."
                prompt = [{"role": "user", "content": question}]
                row = {"prompt": prompt, "answer": str(number + number % 997)}
                written.write(json.dumps(row) + "\n")
        gc.collect()
        objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
        peak, began = _peak_mib(), time.process_time()
        tasks = read_data_set(
            str(file), environment=SINGLE_TURN, columns={}, split="train", check=check
        )
        source = FileTasks(tasks, run_seed=0, num_held_out=100)
        seconds, grown = time.process_time() - began, _peak_mib() - peak
        del tasks
        gc.collect()
    print(
        f"{rows} rows: {seconds:.1f} processor seconds, "
        f"{len(gc.get_objects()) - objects} objects and {sys.getallocatedblocks() - blocks} blocks "
        f"more, peak memory {grown:+.0f} MiB, goal {GOAL_S:g} s"
    )
    assert source.task(0).data["answer"]
    return 0 if seconds <= GOAL_S else 1


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
