"""Run notebooks from beginning to end, as the tests do, and optionally save their outputs.

    python notebooks/execute.py                       all notebooks, in a temporary folder; stops at the first error
    python notebooks/execute.py --keep 01*.ipynb      also save the outputs in the notebook

A notebook runs in a copy of this folder, so that its files are not written to the checkout.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
TIMEOUT_S = 400
"""Time limit per cell, which may run a job."""


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Execute a notebook in the new folder `folder` and return it with outputs. Raises CellExecutionError."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs", ".*"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def strip_volatile_outputs(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove times, versions and stderr, which would differ in every commit, and merge the prints of a cell."""
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        outputs, cell["outputs"] = cell.get("outputs", []), []
        for output in outputs:
            if output.get("name") == "stderr":
                continue
            last = cell.outputs[-1] if cell.outputs else None
            if last is not None and output.output_type == "stream" and last.get("name") == output.name:
                last.text += output.text
            else:
                cell.outputs.append(output)
        if cell.cell_type != "code":
            del cell["outputs"]
    return notebook


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Run notebooks.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all notebooks in this folder")
    parser.add_argument("--keep", action="store_true", help="save the outputs in the notebooks")
    arguments = parser.parse_args()
    for path in arguments.notebooks or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells")
        if arguments.keep:
            nbformat.write(strip_volatile_outputs(notebook), path)


if __name__ == "__main__":
    main()
