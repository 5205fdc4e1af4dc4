"""Measure how long training waits for a checkpoint: files staged in shared memory against files written at once.

    python tests/benchmarks/background_checkpoints.py [--parameters 40e6] [--repetitions 5] [--folder DIR]

Both write the state of a model with this many parameters (12 bytes each: float32 weights and moments) with the
functions of a trainer rank, alternately, to the same folder, and sync it. `pause` is the time until the next step may
start, `complete` the time until the files are on the disk.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from rlfuse.engines.trainer import state_files
from rlfuse.engines.trainer.saving import StagedFiles, checkpoint_writer
from rlfuse.engines.trainer.state_files import MOMENTS, WEIGHT, Part

TENSOR = 1 << 20


def save(parts: list[Part], folder: Path, staged: StagedFiles | None) -> tuple[float, float]:
    """Return (pause, time until complete) in seconds."""
    size = sum(tensor.nbytes for part in parts for tensor in part.tensors.values())
    began = time.perf_counter()
    with checkpoint_writer() as files, staged.folder(folder, size) if staged else nullcontext(folder) as to:
        state_files.save(to, 0, parts, 1, files)
    pause = time.perf_counter() - began
    problem = files.problem or (staged.problem() if staged else None)
    assert problem is None, problem
    return pause, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=40e6)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("."))
    given = parser.parse_args()
    fields = (WEIGHT, *MOMENTS)
    parts = [
        Part(f"{number}", (TENSOR,), 0, {field: torch.randn(TENSOR) for field in fields}, steps=1)
        for number in range(max(1, int(given.parameters) // TENSOR))
    ]
    found: dict[str, list[tuple[float, float]]] = {"at once": [], "staged": []}
    for _ in range(given.repetitions):
        for way, times in found.items():
            folder = Path(tempfile.mkdtemp(dir=given.folder))
            times.append(save(parts, folder, StagedFiles() if way == "staged" else None))
            shutil.rmtree(folder)
    medians = {way: [statistics.median(each) for each in zip(*times, strict=True)] for way, times in found.items()}
    size = len(parts) * TENSOR * 4 * len(fields) / 2**20
    print(f"{size:.0f} MiB, medians of {given.repetitions}")
    for way, (pause, complete) in medians.items():
        print(f"{way:8} pause {pause:6.2f} s   complete {complete:6.2f} s")
    print(f"training waits {medians['at once'][0] / medians['staged'][0]:.1f}x less")


if __name__ == "__main__":
    main()
