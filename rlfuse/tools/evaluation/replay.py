"""`rlfuse reward replay RUN_DIR reward.functions=[...]`: score a run's samples with another reward.

Samples are scored by a reward pool as in a job, but without running normalisation. Writes `replay.json` and
`replay.csv`.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rlfuse.config.compose import compose_job
from rlfuse.config.rewards import RewardConfig
from rlfuse.config.secrets import hidden, remember
from rlfuse.errors import RewardError
from rlfuse.files import atomic_write, write_atomically, write_lock
from rlfuse.observe.live import figure
from rlfuse.observe.tracking import sample_of_row
from rlfuse.progress import Console
from rlfuse.run_folder.reader import RunFolder, open_run, reading
from rlfuse.samples import Reward, RewardFailure, Sample
from rlfuse.tools.dataframes import PART, sample_table
from rlfuse.tools.evaluation.comparison import ALL, TEXTS, Comparison, compare
from rlfuse.tools.evaluation.reward_table import as_columns
from rlfuse.tools.run_code import add_option, refuse_code, reward_code

EXCLUSIVE_KEYS = ("functions", "weights", "model_path")
"""Keys that define a reward: if one of them is set, the others are not taken from the run."""
TRUST = "model.trust_remote_code="
MAX_SHOWN_CHARS = 100


def main(argv: Sequence[str]) -> None:
    """Run the command. Raises RewardError, ConfigError or RunError."""
    parser = argparse.ArgumentParser(
        prog="rlfuse reward",
        description="Score the samples of a run with another reward and report what would have changed.",
    )
    parser.add_argument("command", choices=("replay",))
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="reward.KEY=VALUE",
        help="the other reward, as in a job (default: the reward of the run)",
    )
    add_option(parser)
    parser.add_argument(
        "--out", type=Path, help="output path without suffix (RUN_DIR/replay, for replay.json and replay.csv)"
    )
    parser.add_argument("--examples", type=int, default=5, help="number of samples to show (%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.examples < 0:
        raise RewardError(f"--examples {arguments.examples}: it must be 0 or more")
    run = open_run(arguments.run)
    out = arguments.out or run.path / "replay"
    with write_lock(_files(out)[0]):
        _replay(run, arguments, out)


def _replay(run: RunFolder, arguments: argparse.Namespace, out: Path) -> None:
    reward = reward_of(run, arguments.settings)
    of_folder = {**run.config, "reward": _run_settings(run, arguments.settings)}
    refuse_code(run.path / "config.yaml", reward_code(of_folder), arguments.run_code)
    trusts = trusts_code(run, arguments.settings, arguments.run_code)
    with reading(run.path):
        rows = list(run.samples())
        if not rows:
            raise RewardError(f"{run.path}: samples.jsonl has no samples; train with trainer.log_samples above 0")
        prompt_key = run.config.get("data", {}).get("prompt_key", "prompt")
        samples, table = [sample_of_row(row, prompt_key) for row in rows], sample_table(rows)
    rewards = asyncio.run(scored(samples, reward, prompt_key, trusts))
    after = pd.DataFrame([as_columns(each, PART) for each in rewards], table.index)
    found = compare(table, after)
    show(found, after, arguments.examples)
    written = write(found, table, after, out, {"run": run.name, "reward": hidden(asdict(reward))}, arguments.examples)
    print("\n".join(f"written    {path}" for path in written))


def reward_of(run: RunFolder, settings: Sequence[str]) -> RewardConfig:
    """Return the reward config with these settings; other values are those of the run."""
    if wrong := [word for word in settings if not word.lstrip("+").startswith(("reward.", TRUST))]:
        raise RewardError(f"{wrong[0]}: only reward.KEY=VALUE and {TRUST} are allowed")
    composed = compose_job(list(settings)).reward
    base = OmegaConf.merge(OmegaConf.structured(RewardConfig), _run_settings(run, settings))
    found = OmegaConf.to_object(OmegaConf.merge(base, {name: composed[name] for name in _changed_keys(settings)}))
    remember(asdict(found))
    return found


def _changed_keys(settings: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].lstrip("+").split(".")[1] for word in settings if not word.startswith(TRUST)}


def _run_settings(run: RunFolder, settings: Sequence[str]) -> dict[str, Any]:
    given = _changed_keys(settings)
    replaced = given.union(EXCLUSIVE_KEYS) if given.intersection(EXCLUSIVE_KEYS) else given
    return {name: value for name, value in (run.config.get("reward") or {}).items() if name not in replaced}


def trusts_code(run: RunFolder, settings: Sequence[str], run_code: bool = False) -> bool:
    """Return whether modelling code that ships with a reward model may run: set by `settings`, else by the run."""
    if any(word.startswith(TRUST) for word in settings):
        return compose_job(list(settings)).model.trust_remote_code
    return run_code and run.config.get("model", {}).get("trust_remote_code", False)


async def scored(
    samples: Sequence[Sample], reward: RewardConfig, prompt_key: str, trusts: bool = False
) -> list[Reward | RewardFailure]:
    """Return one result per sample, from a reward pool that is started and closed here."""
    from rlfuse.cluster import placement  # slow imports, after the settings are checked
    from rlfuse.config.schema import Config
    from rlfuse.rewards.workers.pool import RewardPool
    from rlfuse.run import WORKER_IMPORTS

    pool = RewardPool(reward, trusts, prompt_key=prompt_key)
    pool.check_prompts([sample.prompt for sample in samples], reward.max_failure_rate)
    config = Config()
    config.cluster.device = "cpu" if reward.device == "cpu" else "auto"
    slots = await placement.start(config, WORKER_IMPORTS if pool.has_models else None)
    try:
        await pool.start(slots)
        return await pool.score(samples)
    finally:
        await pool.close()
        placement.stop()


def show(found: Comparison, after: pd.DataFrame, examples: int) -> None:
    """Print tables of agreement and examples."""
    console = Console()
    table = Table("data_source", box=SIMPLE_HEAD, title="saved reward → new reward", title_justify="left")
    for name in ("samples", "mean", "Pearson", "Spearman", "flipped", "advantage_flipped"):
        table.add_column(name, justify="right")
    for source, row in found.agreement.iterrows():
        means = f"{figure(row['mean_before'])} → {figure(row['mean_after'])}"
        correlations = (figure(row["pearson"]), figure(row["spearman"]))
        flipped = f"{row['flipped']:.0f} of {row['pairs']:.0f}"
        table.add_row(
            Text(str(source)), f"{row['samples']:.0f}", means, *correlations, flipped, f"{row['advantage_flipped']:.0f}"
        )
    console.print(table)
    whole = found.agreement.loc[ALL]
    console.print(
        "flipped: pairs of responses to one prompt on whose order the rewards disagree; advantage_flipped: samples "
        f"whose advantage changes its sign. Pairs that only the new reward separates: {whole['untied']:.0f}, only the "
        f"saved one: {whole['tied']:.0f}. Groups with zero std, which give no gradient: "
        f"{whole['zero_std_before']:.0f} → {whole['zero_std_after']:.0f} of {whole['groups']:.0f}.\n"
    )
    if found.unscored:
        failures = after["failure"].dropna()
        first = f". First failure: {failures.iloc[0]}" if len(failures) else ""
        note = f"{found.unscored} samples lack one of the rewards and are excluded{first}"
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    shifted = found.disagreements(examples)
    if len(shifted):
        console.print(_examples(shifted[shifted["rank_shift"] != 0]))


def _examples(samples: pd.DataFrame) -> Table:
    table = Table(
        "sample", "reward", "prompt", "response", box=SIMPLE_HEAD, title="largest changes of rank", title_justify="left"
    )
    for _, row in samples.iterrows():
        rewards = f"{figure(row['before'])} → {figure(row['after'])}"
        table.add_row(Text(row["id"]), rewards, *(Text(_short(row[name])) for name in ("prompt", "response")))
    return table


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS // 2]} … {text[-MAX_SHOWN_CHARS // 2 :]}"


def write(
    found: Comparison, table: pd.DataFrame, after: pd.DataFrame, out: Path, about: dict[str, Any], examples: int
) -> tuple[Path, Path]:
    """Write `{out}.json` (agreement, examples) and `{out}.csv` (all samples). Return their paths."""
    report = about | {
        "unscored": found.unscored,
        "agreement": _plain(found.agreement.loc[[ALL]])[0],
        "by_data_source": {
            str(name): row
            for name, row in zip(found.agreement.index, _plain(found.agreement), strict=True)
            if name != ALL
        },
        "examples": _plain(found.disagreements(examples)),
    }
    paths = _files(out)
    write_atomically(paths[0], json.dumps(report, indent=2, default=str))
    whole = table[list(TEXTS)].assign(before=table["reward"], after=after["reward"])
    whole = whole.assign(rank_shift=found.samples["rank_shift"], advantage_flipped=found.samples["advantage_flipped"])
    with atomic_write(paths[1]) as aside:
        whole = whole.join(after.drop(columns=["reward", "traceback"]))
        # All texts are quoted, because a carriage return would otherwise start a row.
        whole.rename(columns=_as_text).map(_as_text).to_csv(aside, index=False, quoting=csv.QUOTE_NONNUMERIC)
    return paths


def _as_text(cell: Any) -> Any:
    """Escape a cell that a spreadsheet would interpret as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.lstrip().startswith(("=", "+", "-", "@")) else cell


def _files(out: Path) -> tuple[Path, Path]:
    return Path(f"{out}.json"), Path(f"{out}.csv")


def _plain(table: pd.DataFrame) -> list[dict[str, Any]]:
    return json.loads(table.to_json(orient="records", default_handler=str))
