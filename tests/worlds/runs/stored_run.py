"""A run directory of an earlier commit, kept as test data: what a user's run of that time is now.

`tests/data/run-of-format-9.tar.xz` was written at 4cb249f by `rayloom serve` with a model of 27,000
parameters: two steps were trained of sessions and checkpointed; of the group `waiting` one session
is finished and one open; of the group `uploads` one trajectory of two has come. No key was set. The
older checkpoint, the log and the reports are left out, and the model lies in the run directory.
`run-of-0.1.0.tar.xz` was written at 97d5c88, the commit before 0.2.0, by `rayloom train` with the
same model: two steps of `guessing`, and the checkpoint of the second.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import yaml

from service.launch.run_dir import RunDir

DATA = Path(__file__).parents[2] / "data"
FORMAT_9, BEFORE = "run-of-format-9", "run-of-0.1.0"


def unpack_run(directory: Path, name: str = FORMAT_9) -> RunDir:
    """The run in a new directory, moved with its model, which its configuration names by path."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    run_dir = RunDir(path=directory / name)
    tree = yaml.safe_load(run_dir.config_file.read_text())
    tree["model"]["path"] = str(run_dir.tiny_model)
    run_dir.config_file.write_text(yaml.safe_dump(tree))
    return run_dir
