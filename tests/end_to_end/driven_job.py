"""Small GRPO jobs with two slots, driven by scripts of these tests in one separate process: `driven_jobs`."""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from job_processes import ENVIRONMENT, REWARD, all_gone, descendants

TIMEOUT_S = 570


def settings_of(folder: Path, model: Path) -> dict:
    """Write the job's data and reward to `folder`; return its settings."""
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"w{3 + i} w{50 + i} w{7 + i % 5}", "answer": str(i), "data_source": "x"} for i in range(64)]
    for name, some in (("train", rows), ("val", rows[:6])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return {
        "algorithm": "grpo",
        "model.path": model,
        "model.dtype": "float32",
        "data.train_files": f"[{folder}/train.jsonl]",
        "data.max_prompt_length": 16,
        "actor.optim.lr": 1e-3,
        "rollout.n": 4,
        "rollout.kv_cache_memory_mb": 32,
        "reward.functions": f"[{folder}/reward.py:even]",
        "trainer.n_gpus_per_node": 2,
        "trainer.logger": "[]",
        "trainer.timeline_freq": 0,
        "trainer.default_local_dir": folder / "runs",
        "cluster.timeout_s": 300,
    }


@contextmanager
def driver(model: Path, log: Path):
    """Start the process; yield the function that runs `script` in it, in `folder`, and returns the script's result."""
    command = [sys.executable, str(Path(__file__).with_name("driven_jobs.py"))]
    with log.open("w") as output:
        pipes = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, text=True, **pipes)

    def drive(script: str, folder: Path, *command: str, **settings):
        settings = settings_of(folder, model) | settings
        words = [*command, *(f"{key}={value}" for key, value in settings.items())]
        out = Path(tempfile.mkdtemp(dir=log.parent)) / "found.json"
        process.stdin.write(json.dumps([script, str(out), words]) + "\n")
        process.stdin.flush()
        until = time.monotonic() + TIMEOUT_S
        while not out.exists():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        answer = json.loads(out.read_text())
        assert answer["failed"] is None, log.read_text() + answer["failed"]
        return answer["found"]

    try:
        yield drive
        loggers = [each for each in descendants(process) if "wandb" in each.name()]
        process.stdin.close()
        process.wait(120)
        assert not all_gone(loggers), "wandb processes outlive the process that logged"
    finally:
        process.kill()
