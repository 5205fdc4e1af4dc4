"""A small GRPO job with two slots, driven by a script of these tests in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

from job_processes import REWARD


def settings_of(folder: Path, model: Path) -> dict:
    """The job's settings; its data and reward are written to `folder`."""
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"w{3 + i} w{50 + i} w{7 + i % 5}", "answer": str(i), "data_source": "x"} for i in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
        "trainer.default_local_dir": folder / "runs",
        "cluster.timeout_s": 300,
    }


def drive(script: str, folder: Path, model: Path, **settings) -> dict:
    """What `script OUT key=value ...` wrote to OUT."""
    settings = settings_of(folder, model) | settings
    path, out = Path(__file__).with_name(script), folder / "found.json"
    command = [sys.executable, str(path), str(out), *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())
