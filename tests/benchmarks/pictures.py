"""Inputs of `jobs/pictures.sh` besides commands: rows of tables, a contact sheet, two runs in one picture.

python tests/benchmarks/pictures.py row RUN_DIR ...             a row of the README's table for each quickstart run
python tests/benchmarks/pictures.py lines RUN_DIR               the lines of a quickstart run that the README quotes
python tests/benchmarks/pictures.py sheet RUN_DIR PNG           the sheet whose answers differ most, latest first
python tests/benchmarks/pictures.py proxy PNG TITLE=RUN_DIR ... reward model and true reward, a panel for each run
python tests/benchmarks/pictures.py model FOLDER                the shapes of Qwen2.5-7B-Instruct, for `rlfuse plan`
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from rlfuse.observe.overoptimization import draw_overoptimization_panels
from rlfuse.observe.summary import summary_text
from rlfuse.observe.terminal import step_line
from rlfuse.run_folder.reader import open_run

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip


def row(*runs: str) -> None:
    """Print seed, rewards, held-out accuracy and seconds of each run."""
    print("| `data.seed` | mean reward, first steps | last steps | held out, before | after | seconds |")
    print("|---|---|---|---|---|---|")
    for path in runs:
        run = open_run(Path(path))
        found = run.summary()
        names = ("reward_first", "reward_last", "val_before", "val_after")
        cells = [str(run.config["data"]["seed"]), *(f"{found[name]:.2f}" for name in names), f"{found['seconds']:.0f}"]
        print("| " + " | ".join(cells) + " |")


def lines(path: str) -> None:
    """Print lines of the run whose curve and report are pictures, so that text and pictures have the same numbers."""
    run = open_run(Path(path))
    summary, rows = run.summary(), run.rows()
    print(f"validation  {summary['val_name']} {summary['val_before']:.3f}")
    print(step_line(1, summary["steps"], next(row for row in rows if row["step"] == 1)))
    print("\n".join(summary_text(summary, run.path).splitlines()[:3]))


def sheet(path: str, out: str) -> None:
    """Copy the contact sheet with the largest spread of rewards."""
    run, rewards = open_run(Path(path)), defaultdict(list)
    for each in run.samples():
        if each["contact_sheet"] and each["reward"] is not None and (run.path / each["contact_sheet"]).exists():
            rewards[each["step"], each["contact_sheet"]].append(each["reward"])
    (step, name), values = max(rewards.items(), key=lambda item: (max(item[1]) - min(item[1]), item[0][0]))
    shutil.copy(run.path / name, out)
    print(f"step {step}, {name}: rewards {values}")


def proxy(out: str, *runs: str) -> None:
    """Plot the runs by title; print the true reward of each at its best and at its end."""
    rows = {title: open_run(Path(path)).rows() for title, _, path in (run.rpartition("=") for run in runs)}
    draw_overoptimization_panels(rows, Path(out))
    for title, each in rows.items():
        name = next(name for row in each for name in row if name.startswith("val-core/") and "/acc/" in name)
        truth = {int(row["step"]): row[name] for row in each if name in row}
        best = max(truth, key=truth.__getitem__)
        print(f"{title}: truth {truth[min(truth)]:.2f} before, {truth[best]:.2f} at step {best}, "
              f"{truth[max(truth)]:.2f} at step {max(truth)}")  # fmt: skip


def model(folder: str) -> None:
    """Write config.json without weights, since a plan reads nothing else."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "config.json").write_text(json.dumps(QWEN_7B))


COMMANDS: dict[str, Callable[..., None]] = {"row": row, "lines": lines, "sheet": sheet, "proxy": proxy, "model": model}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
