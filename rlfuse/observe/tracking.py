"""Where scalars and samples go: `metrics.jsonl`, `samples.jsonl` always, the terminal and wandb as trainer.logger says.

Role: owned by the journal. Nothing is computed here. wandb is offline unless trainer.wandb_mode=online.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlfuse.config.schema import Config
from rlfuse.samples import Reward, Sample


class StepFile:
    """JSON lines, each of a step. On resume, steps after the checkpoint are cut off: they run again."""

    def __init__(self, path: Path, after: int):
        kept = [row for row in read_metrics(path) if row["step"] <= after]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a")

    def write(self, step: int, *rows: dict[str, Any]) -> None:
        self._file.writelines(json.dumps({"step": step, **row}, default=str) + "\n" for row in rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run folder's `metrics.jsonl` or `samples.jsonl`, oldest first; none when there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sample_row(sample: Sample) -> dict[str, Any]:
    """A finished sample as people read it: a row of `samples.jsonl` and of wandb's table."""
    prompt, response, reward = sample.prompt, sample.response, sample.reward
    scored = isinstance(reward, Reward)
    return {
        "id": sample.id,
        "data_source": prompt.data_source,
        "prompt": prompt.text,
        "response": response.text,
        "finish": response.finish_reason,
        "prompt_tokens": len(prompt.token_ids),
        "response_tokens": len(response.token_ids),
        "reward": reward.value if scored else None,
        "parts": reward.parts if scored else {},
        "note": reward.text if scored else f"{reward.function}: {reward.message}" if reward else None,
        "ground_truth": prompt.ground_truth,
    }


class Terminal:
    """A progress bar with reward, KL, lengths, tokens per second and time left; one line a step where there is none."""

    def __init__(self, total: int, start: int):
        self.console = Console()
        columns = ("reward {task.fields[reward]}", "kl {task.fields[kl]}", "length {task.fields[length]}")
        self._bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            *(TextColumn(column) for column in (*columns, "{task.fields[speed]} tokens/s")),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        unknown = dict.fromkeys(("reward", "kl", "length", "speed"), "-")
        self._task = self._bar.add_task("train", total=total, completed=start, **unknown)
        self._total = total
        self._bar.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        fields = {
            "reward": _figure(metrics.get("critic/score/mean"), ".3f"),
            "kl": _figure(metrics.get("critic/kl", metrics.get("actor/kl_loss", metrics.get("actor/ppo_kl"))), ".4f"),
            "length": _figure(metrics.get("response_length/mean"), ".0f")
            + "/"
            + _figure(metrics.get("response_length/max"), ".0f"),
            "speed": _figure(metrics.get("perf/throughput"), ".0f"),
        }
        self._bar.update(self._task, completed=step, **fields)
        if not self.console.is_terminal:
            seconds = _figure(metrics.get("perf/time_per_step"), ".1f")
            line = "  ".join(f"{name} {value}" for name, value in fields.items())
            print(f"step {step}/{self._total}  {line}  {seconds} s", flush=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


class Wandb:
    """A wandb run in the run folder, resumed under its own id when the job resumes."""

    def __init__(self, config: Config, resolved: dict[str, Any], folder: Path, resumed: bool):
        import wandb  # half a second, and not everyone logs to it

        identity = folder / "wandb_id.txt"
        if not (resumed and identity.exists()):
            identity.write_text(secrets.token_hex(4))
        self._wandb = wandb
        self._run = wandb.init(
            project=config.trainer.project_name,
            name=config.trainer.experiment_name,
            id=identity.read_text(),
            resume="allow" if config.trainer.wandb_mode == "online" else None,
            dir=folder,
            mode=config.trainer.wandb_mode,
            config=resolved,
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """A table of prompts, responses and what their reward was made of."""
        parts = sorted({name for row in rows for name in row["parts"]})
        shown = ("id", "prompt", "response", "finish", "response_tokens", "reward")
        table = self._wandb.Table(columns=["step", *shown, *parts])
        for row in rows:
            table.add_data(step, *(row[name] for name in shown), *(row["parts"].get(name) for name in parts))
        self._run.log({"samples": table}, step=step)

    def failure(self, where: str, text: str) -> None:
        """A row in the table of errors, so that it is seen where the curves are."""
        self._run.log({"errors": self._wandb.Table(columns=["where", "error"], data=[[where, text]])})

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)
