"""The run that the notebooks read: the quickstart, a little smaller, with every sample of some prompts kept.

    python notebooks/make_data.py        (a few minutes on two cores; writes notebooks/data/run)

Role: makes what stands in `data/run`, which is in the repository so that the notebooks open at once. Events are those
of two steps, whose slots the notebooks look at.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rlfuse.tasks.prepare import prepare

FOLDER = Path(__file__).parent / "data" / "run"
SETTINGS = (
    "experiment=quickstart",
    "data.train_batch_size=32",
    "rollout.n=4",
    "trainer.total_training_steps=12",
    "trainer.log_samples=32",
    "trainer.logger=[console]",
    "trainer.project_name=notebooks",
    "trainer.experiment_name=run",
)
WHOLE = ("metrics.jsonl", "samples.jsonl", "summary.json")
STEPS = (2, 12)
"""Whose events are kept."""


def main() -> None:
    """Prepare the task, train, keep what is small."""
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rlfuse.train", *SETTINGS, f"trainer.default_local_dir={folder}"]
        subprocess.run(command, check=True, timeout=1800)
        run = Path(folder) / "notebooks" / "run"
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name in WHOLE:
            shutil.copy(run / name, FOLDER)
        text = (run / "config.yaml").read_text().replace(folder, "runs").replace(f"{os.getcwd()}/", "")
        (FOLDER / "config.yaml").write_text(text)
        lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
        (FOLDER / "events.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] in STEPS))


if __name__ == "__main__":
    main()
