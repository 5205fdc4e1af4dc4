"""Create the run that the notebooks read: a smaller quickstart that saves every sample of some prompts.

    python notebooks/make_data.py        (a few minutes on two cores; writes notebooks/data/run)

The result `data/run` is in the repository, so that the notebooks work without training. It has the events of two steps,
which the notebooks plot.
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
"""Steps whose events are saved."""


def main() -> None:
    """Prepare the task, train, and save the small files of the run."""
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
