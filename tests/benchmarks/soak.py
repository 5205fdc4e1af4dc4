"""Memory, open files, shared memory and step time of a tiny run over thousands of steps, and a picture.

    python tests/benchmarks/soak.py --steps 3000 [--out soak.png] [--every 5] [key=value ...]

PPO with critic and reference on two slots, a random model and responses of at most 24 tokens, so that an hour covers
the steps of days; a checkpoint every 200 steps. Every process is sampled from outside. Memory is the resident set;
Ray's object store is in the raylet's. Growth is the slope of a line through the second half; `+-` is twice its error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil

from rlfuse.tasks.settings import WarmStart
from rlfuse.tasks.vocabulary import build_tokenizer
from rlfuse.tasks.warm_start import build_model

WARM_UP = 1 / 2
MIB = 1 << 20
REWARD = (
    "def even(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str) % 2)\n"
)
ROLES = (
    "RolloutWorker",
    "EngineCore",
    "TrainerRank",
    "RewardWorker",
    "DashboardAgent",
    "RuntimeEnvAgent",
    "raylet",
    "gcs_server",
    "wandb-core",
)
"""Searched in this order in a process's title and command line."""
SHOWN = ("process", "MiB at the end", "MiB a 1,000 steps", "+-", "files open")


def command(folder: Path, overrides: list[str]) -> list[str]:
    """Write the job's model, data and reward to `folder`; return its command line."""
    tokenizer = build_tokenizer()
    build_model(WarmStart(), tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f" {40 + i} mod {2 + i % 7} =", "answer": "1", "data_source": "x"} for i in range(256)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    settings = {
        "algorithm": "ppo",
        "algorithm.use_kl_in_reward": "true",
        "model.path": folder / "model",
        "model.dtype": "float32",
        "data.train_files": f"[{folder}/train.jsonl]",
        "data.max_prompt_length": 16,
        "data.max_response_length": 24,
        "data.train_batch_size": 8,
        "actor.ppo_mini_batch_size": 8,
        "actor.ppo_max_token_len_per_gpu": 1024,
        "rollout.n": 2,
        "rollout.kv_cache_memory_mb": 16,
        "reward.functions": f"[{folder}/reward.py:even]",
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": 1_000_000,
        "trainer.save_freq": 200,
        "trainer.val_before_train": "false",
        "trainer.default_local_dir": folder / "runs",
        "trainer.experiment_name": "soak",
    }
    return [sys.executable, "-m", "rlfuse.train", *(f"{key}={value}" for key, value in settings.items()), *overrides]


def name_of(process: psutil.Process) -> str:
    """Return the role of a process, with its pid if there are several."""
    title = f"{process.name()} {' '.join(process.cmdline())}"
    return f"{next((role for role in ROLES if role in title), process.name())} {process.pid}"


def sample(driver: psutil.Process) -> dict[str, tuple[float, int]]:
    """Return name -> (MiB, open files) of each process of the run."""
    found = {}
    for process in (driver, *driver.children(recursive=True)):
        try:
            name = "driver" if process == driver else name_of(process)
            found[name] = process.memory_info().rss / MIB, process.num_fds()
        except psutil.Error:
            continue  # the process has ended
    shared = [file.stat().st_blocks * 512 for file in Path("/dev/shm").rglob("*") if file.is_file()]
    return found | {"/dev/shm": (sum(shared) / MIB, len(shared))}


def growth(steps: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Return MiB per step, and twice its standard error."""
    line, covariance = np.polyfit(steps, values, 1, cov=True)
    return line[0], 2 * float(np.sqrt(covariance[0, 0]))


def last_step(metrics: Path) -> int | None:
    """Return the step of the file's last complete line, or None."""
    tail = metrics.read_bytes()[-65536:].splitlines(keepends=True) if metrics.exists() else []
    whole = [line for line in tail if line.startswith(b'{"step"') and line.endswith(b"\n")]
    return json.loads(whole[-1])["step"] if whole else None


def watch(process: subprocess.Popen, metrics: Path, steps: int, every: float) -> dict[str, list[tuple]]:
    """Return name -> (step, seconds, MiB, open files) from the first step to step `steps`."""
    driver, began, seen, step = psutil.Process(process.pid), time.monotonic(), defaultdict(list), None
    while (step or 0) < steps:
        if process.poll() is not None:
            raise SystemExit(f"the job ended with status {process.returncode}")
        if (step := last_step(metrics)) is not None:
            for name, values in sample(driver).items():
                seen[name].append((step, time.monotonic() - began, *values))
        time.sleep(every)
    return seen


def report(seen: dict[str, list[tuple]]) -> None:
    """Print a table of the processes that lived throughout."""
    longest = max(map(len, seen.values()))
    print(f"{SHOWN[0]:<24}" + "".join(f"{word:>19}" for word in SHOWN[1:]))
    for name, rows in sorted(seen.items(), key=lambda item: -item[1][-1][2]):
        if len(rows) < longest - 1:
            continue
        steps, _, sizes, files = np.array(rows[int(len(rows) * WARM_UP) :]).T
        slope, error = growth(steps, sizes)
        cells = (sizes[-1], slope * 1000, error * 1000, f"{files[0]:.0f} -> {files[-1]:.0f}")
        print(f"{name:<24}" + "".join(f"{cell:>19}" if isinstance(cell, str) else f"{cell:>19.2f}" for cell in cells))


def draw(seen: dict[str, list[tuple]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    longest = max(map(len, seen.values()))
    for name, rows in seen.items():
        if len(rows) >= longest - 1:
            steps, _, sizes, *_ = np.array(rows).T
            axes.plot(steps, sizes, label=name.split()[0], linewidth=1)
    axes.set(xlabel="step", ylabel="MiB resident", yscale="log", title="memory of every process of a run")
    axes.legend(fontsize=7, ncols=3)
    figure.savefig(path, dpi=120)


def seconds_per_step(rows: list[tuple]) -> list[float]:
    """Return the seconds per step of each quarter of the steps."""
    steps, seconds, *_ = np.array(rows).T
    ends = np.linspace(steps[0], steps[-1], 5)
    return (np.diff(np.interp(ends, steps, seconds)) / np.diff(ends)).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--out", type=Path, default=Path("soak.png"))
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command(folder, overrides), stdout=log, stderr=subprocess.STDOUT)
        try:
            seen = watch(process, folder / "runs/rlfuse/soak/metrics.jsonl", arguments.steps, arguments.every)
        except BaseException:
            print((folder / "log").read_text()[-3000:])
            raise
        finally:
            process.terminate()  # background jobs of a script ignore SIGINT
            process.wait()
    quarters = ", ".join(f"{each:.2f}" for each in seconds_per_step(seen["driver"]))
    print(f"{seen['driver'][-1][0]} steps; seconds per step in each quarter: {quarters}")
    report(seen)
    draw(seen, arguments.out)


if __name__ == "__main__":
    main()
