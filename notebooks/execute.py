"""Runs notebooks from beginning to end, as the tests do, and can keep what they show.

    python notebooks/execute.py                       all, in a folder of their own; an error ends it
    python notebooks/execute.py --keep 01*.ipynb      and write the outputs into the notebook

Role: `execute` is called here and by the tests. A notebook runs in a copy of this folder, so that what it writes stays
out of the checkout.
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
"""For one cell: a job starts in it."""


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs; `folder`, a new one, becomes its working directory. Raises CellExecutionError."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs", ".*"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def without_traces(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without times, versions and what libraries say on stderr, which would be a change in every commit; a cell's
    prints in one piece."""
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
    """The command line."""
    parser = argparse.ArgumentParser(description="Run notebooks.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of this folder")
    parser.add_argument("--keep", action="store_true", help="write the outputs into them")
    arguments = parser.parse_args()
    for path in arguments.notebooks or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells")
        if arguments.keep:
            nbformat.write(without_traces(notebook), path)


if __name__ == "__main__":
    main()
