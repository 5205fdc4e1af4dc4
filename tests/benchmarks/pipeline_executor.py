"""The pipeline executor, serial and fused side by side in one run: measured and simulated makespans.

    python tests/benchmarks/pipeline_executor.py [--out FOLDER] [--ranks 2 4 8] [--repeats 3] [--micro-batches 8]
                                                 [--hidden 256]

Operations of fixed length (forward 30 ms, backward 60 ms, sleeping: more ranks than cores) on 2, 4 and 8 ranks, whole
and split backward; actor and critic with the same number of stages in opposite directions. On 2 ranks, each bound to a
core, also real compute: an actor and a critic train, and the simulation uses the median durations of the serial run.
Serial is each model's 1F1B, one after the other, without a barrier; fused is the best list schedule. Serial runs first
in each repetition; medians are reported. Writes `table.md` and, for real compute, `schedules.png` (the median runs).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.pipeline_group import PipelineGroup, ScheduleResult
from rlfuse.fusion.schedules.problem import Model, Problem
from rlfuse.fusion.schedules.schedule import Timed
from rlfuse.observe.schedule_picture import draw
from rlfuse.samples import Row

sys.path.insert(0, str(Path(__file__).parent.parent / "end_to_end"))
import pipelines

ray.cloudpickle.register_pickle_by_value(pipelines)  # ranks can't import from tests/
FIXED = {"F": 0.03, "B": 0.03, "W": 0.03}


def opposite(stages: int) -> tuple[Pipelines, ...]:
    """Return a layout with equal numbers of stages for both models in opposite directions."""
    return Pipelines("actor", stages), Pipelines("critic", stages, direction="up")


def schedules(layout, count: int, seconds, split: bool) -> dict:
    """Return order -> (rows, simulated makespan)."""
    counts = {model.model: count for model in layout}
    rows = {
        "serial": pipelines.serial(layout, counts, split),
        "fused": pipelines.fused(layout, counts, seconds, split),
    }
    return {order: (each, pipelines.makespan(each, layout, counts, seconds, split)) for order, each in rows.items()}


def play(rank, rows, layout) -> float:
    """Run operations of fixed length on a rank; return their total duration."""
    stages = {
        (model.model, stage): pipelines.Sleeping(model, stage, FIXED)
        for model in layout
        for stage in model.stages_on(rank.executor.device)
    }
    return pipelines.play(rank, rows, stages)


async def fixed(group: PipelineGroup, layout, count: int, repeats: int) -> list[str]:
    """Return the lines of the table for operations of fixed length."""
    lines = []
    for split in (False, True):

        def seconds(model, stage, kind, split=split):
            return FIXED[kind] + (FIXED["W"] if kind == "B" and not split else 0)

        planned = schedules(layout, count, seconds, split)
        took = {order: [] for order in planned}
        for _ in range(repeats):
            for order, (rows, _) in planned.items():
                calls = [rank.__ray_call__.remote(play, rows, layout) for rank in group.ranks]
                took[order].append(max(await asyncio.gather(*calls)))
        lines.append(line("30 / 60 ms", len(group.ranks), count, split, took, planned))
    return lines


def line(work: str, ranks: int, count: int, split: bool, took: dict, planned: dict) -> str:
    """Return one line of the table."""
    measured = {order: statistics.median(each) for order, each in took.items()}
    simulated = {order: makespan for order, (_, makespan) in planned.items()}
    cells = [work, ranks, count, "split" if split else "whole"]
    for order in ("serial", "fused"):
        cells += [f"{measured[order]:.3f}", f"{simulated[order]:.3f}", f"{measured[order] / simulated[order]:.3f}"]
    ratios = [each["serial"] / each["fused"] for each in (measured, simulated)]
    text = "| " + " | ".join(map(str, [*cells, *(f"{ratio:.3f}" for ratio in ratios)])) + " |"
    print(text, flush=True)
    return text


def make_rows(count: int, length: int) -> list[Row]:
    """Return rows of one length with the tensors that both losses read."""
    rng = np.random.default_rng(0)

    def row(i: int) -> Row:
        prompt, response = (rng.integers(3, 500, length).astype(np.int32) for _ in range(2))
        names = ("old_log_probs", "advantages", "ref_log_probs", "values", "returns")
        return Row(prompt, response, {name: rng.normal(0, 0.3, length).astype(np.float32) for name in names}, id=str(i))

    return [row(i) for i in range(count)]


async def real(group: PipelineGroup, count: int, repeats: int, out: Path) -> list[str]:
    """Return the lines of the table for real compute; plot the runs with whole backward."""
    rows, lines = make_rows(count * 2, 64), []
    work = {"actor": rows, "critic": rows}
    for split in (False, True):
        counts = dict.fromkeys(work, count)
        serial = pipelines.serial(opposite(2), counts, split)
        await group.run(serial, work)
        costs = durations(await group.run(serial, work))

        def seconds(model, stage, kind, costs=costs):
            return costs[model, stage, kind]

        planned = schedules(opposite(2), count, seconds, split)
        runs: dict[str, list[ScheduleResult]] = {order: [] for order in planned}
        for _ in range(repeats):
            for order, (schedule, _) in planned.items():
                runs[order].append(await group.run(schedule, work))
        took = {order: [run.makespan for run in each] for order, each in runs.items()}
        lines.append(line("real compute", 2, count, split, took, planned))
        if not split:
            middle = {order: sorted(each, key=lambda run: run.makespan)[repeats // 2] for order, each in runs.items()}
            picture(middle, out / "schedules.png")
        for model in work:
            group._accumulated[model] = []  # gradients are discarded without an optimizer step
    return lines


def durations(execution: ScheduleResult) -> dict:
    """Return (model, stage, kind) -> median seconds."""
    seconds: dict = {}
    for row in execution.timed:
        for each in row:
            key = each.operation.model, each.operation.stage, each.operation.kind
            seconds.setdefault(key, []).append(each.end - each.start)
    return {key: statistics.median(each) for key, each in seconds.items()}


def picture(runs: dict[str, ScheduleResult], path: Path) -> None:
    """Plot the measured schedules."""
    count = 1 + max(each.operation.micro_batch for run in runs.values() for row in run.timed for each in row)
    problem = Problem(2, tuple(Model(name, 2, count, 1.0, 2.0) for name in ("actor", "critic")))
    schedules = [
        (f"{order}, measured", tuple(tuple(_from_zero(row, run)) for row in run.timed)) for order, run in runs.items()
    ]
    draw(problem, schedules, path, "s")


def _from_zero(row: Sequence[Timed], run: ScheduleResult) -> Iterator[Timed]:
    """Return the row with times relative to the first operation."""
    began = min(each.start for other in run.timed for each in other)
    for each in sorted(row, key=lambda each: each.start):
        yield Timed(each.operation, each.start - began, each.end - began)


def model_folder(hidden: int, layers: int) -> str:
    """Save a random model."""
    folder = tempfile.mkdtemp(prefix="rlfuse-benchmark-")
    config = Qwen2Config(
        vocab_size=512, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


async def main(options: argparse.Namespace) -> None:
    """Start ranks; measure and write the table."""
    options.out.mkdir(parents=True, exist_ok=True)
    config = Config()
    config.model.dtype, config.cluster.device, config.trainer.n_gpus_per_node = "float32", "cpu", 2
    slots, lines = await placement.start(config), []
    for ranks in options.ranks:
        # With 6 layers, operations take tens of milliseconds on a core; sleeping ones only need a layer per stage.
        folder = model_folder(options.hidden, 6) if ranks == 2 else model_folder(32, ranks)
        config.model.path = config.critic.path = folder
        cores = list(slots.cores) if ranks == 2 and slots.cores else None
        group, _ = await PipelineGroup.start(config, pipelines.Anywhere(None, ranks, "cpu"), opposite(ranks), cores)
        lines += await fixed(group, opposite(ranks), options.micro_batches, options.repeats)
        if ranks == 2:
            lines += await real(group, options.micro_batches, options.repeats, options.out)
        for rank in group.ranks:
            ray.kill(rank)
    head = ["work", "ranks", "micro-batches", "backward"]
    head += [f"{order} {what}" for order in ("serial", "fused") for what in ("measured s", "simulated s", "ratio")]
    head += ["serial / fused measured", "simulated"]
    table = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]
    (options.out / "table.md").write_text("\n".join(table) + "\n")
    placement.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/pipeline_executor"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    asyncio.run(main(parser.parse_args()))
