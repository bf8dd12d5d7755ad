"""Run directories of earlier commits, kept as test data: users may have runs of that time.

`tests/data/run-of-format-9.tar.xz` was written at 4cb249f by `rayloom serve` with a model of 27,000
parameters. Two steps were trained on sessions and checkpointed. The group `waiting` has a finished
and an open session; one of two trajectories of the group `uploads` was uploaded. No key was set.
The older checkpoint, the log and the reports are omitted, and the model is in the run directory.
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
    """Unpack a run, and set the path of its model in its configuration to the new place."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    run_dir = RunDir(path=directory / name)
    tree = yaml.safe_load(run_dir.config_file.read_text())
    tree["model"]["path"] = str(run_dir.tiny_model)
    run_dir.config_file.write_text(yaml.safe_dump(tree))
    return run_dir
