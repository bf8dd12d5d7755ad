"""The notebook of the documentation, executed in a real kernel.

Execute it and write its output into the file: `PYTHONPATH=.:tests python -m
worlds.checks.notebook`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from worlds.runs.run_driver import ROOT

NOTEBOOK = ROOT / "docs" / "examples" / "notebook.ipynb"
# Limit of one cell. On a busy machine a training of the notebook takes minutes.
CELL_S = 1200


def read_notebook() -> Any:
    """Return the notebook as it is in the repository."""
    return nbformat.read(NOTEBOOK, as_version=4)


def code_of(notebook: Any) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: Any) -> str:
    """Return a cell's printed output, followed by its value as text."""
    printed = [each.text for each in cell.outputs if each.output_type == "stream"]
    values = [each.data["text/plain"] for each in cell.outputs if "data" in each]
    return "".join([*printed, *values])


def joined(outputs: list[Any]) -> list[Any]:
    """Join a cell's printed lines, which arrive one by one, into one output."""
    printed = [each for each in outputs if each.output_type == "stream"]
    if not printed:
        return outputs
    printed[0].text = "".join(each.text for each in printed)
    return [printed[0], *(each for each in outputs if each.output_type != "stream")]


def execute(notebook: Any, directory: Path) -> None:
    """Execute all cells in one kernel, in a directory, and store their output in the notebook.

    Raises: CellExecutionError if a cell raises.
    """
    manager = AsyncKernelManager(kernel_name="python3")
    assert manager.kernel_spec is not None
    # Use the Python of this environment, even if the user has installed another kernel.
    manager.kernel_spec.argv[0] = sys.executable
    client = NotebookClient(
        notebook, km=manager, timeout=CELL_S, resources={"metadata": {"path": str(directory)}}
    )
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client.execute(env={**os.environ, "PYTHONPATH": paths})


def main() -> None:
    notebook = read_notebook()
    with tempfile.TemporaryDirectory() as directory:
        execute(notebook, Path(directory))
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    notebook.metadata = {
        "kernelspec": notebook.metadata["kernelspec"],
        "language_info": {"name": "python"},
    }
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
