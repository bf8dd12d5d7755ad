"""Fetch models and data sets of a hub into HF_HOME, for the init container `fetch-models`.

The argument is a JSON list of objects with a name and a revision (a commit; empty for the newest),
and for a data set also subset and split. The other pods then need no hub.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def fetch_model(wanted: dict[str, Any]) -> Path:
    """Fetch a model. A pod that is offline asks for `main`, which has to be the pinned commit."""
    from huggingface_hub import snapshot_download

    place = Path(snapshot_download(wanted["name"], revision=wanted["revision"] or None))
    if wanted["revision"]:
        newest = place.parent.parent / "refs" / "main"
        newest.parent.mkdir(exist_ok=True)
        newest.write_text(wanted["revision"])
    return place


def fetch_data_set(wanted: dict[str, Any]) -> Path:
    """Fetch one split of a data set. A pod that is offline takes the newest of several commits."""
    from datasets import load_dataset

    found = load_dataset(
        wanted["name"],
        wanted["subset"] or None,
        split=wanted["split"],
        revision=wanted["revision"] or None,
    )
    place = Path(found.cache_files[0]["filename"]).parent
    os.utime(place)
    return place


for each in json.loads(sys.argv[1]):
    fetch = fetch_data_set if "split" in each else fetch_model
    print(each["name"], fetch(each), flush=True)
