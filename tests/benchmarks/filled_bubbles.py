"""Scoring passes in the pipeline bubbles of a critic-free job: log-probs, gradients and updates of one step.

    python tests/benchmarks/filled_bubbles.py [--out FOLDER] [--repeats 5] [--mini-batches 4] [--micro-batches 4]

On 2 ranks, each bound to a core, a batch of mini-batches is repeatedly scored and trained on, in alternating order:
- serial (`fusion.training=serial`): all old log-probs, all reference passes, then 1F1B of one mini-batch after another;
- fused: passes of the first mini-batch, then schedules whose bubbles run the passes of later mini-batches.
Passes before training have as many micro-batches as those in schedules. The first round measures durations, searches
schedules and is not counted. Then operations of fixed length (forward 30 ms, backward 60 ms, sleeping) run on 2 and 4
ranks: one schedule that trains on a mini-batch and scores the next with both models, against the three sequentially.
Prints medians and writes `table.md`: measured, planned by the schedules, and the same work in 1F1B.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

import ray

sys.path.insert(0, str(Path(__file__).parent.parent / "end_to_end"))
sys.path.insert(0, str(Path(__file__).parent))
import pipeline_executor
import pipelines
from pipeline_executor import FIXED, make_rows, model_folder, play

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.pipeline_group import PipelineGroup
from rlfuse.engines.pipeline.pipeline_trainer import PipelineTrainer
from rlfuse.fusion.schedules.planning import Plan, Planner

for module in (pipelines, pipeline_executor):  # ranks can't import from tests/
    ray.cloudpickle.register_pickle_by_value(module)
PASSES = ("actor", "ref")
SEQUENCE = 128
"""Tokens per row; a micro-batch has two rows."""


async def a_step(trainer: PipelineTrainer, parts: list, fused: bool) -> dict[str, float]:
    """Run one step; return its seconds by part, and the planned seconds of its schedules."""
    sums = dict.fromkeys(("passes", "training", "planned", "in 1F1B"), 0.0)
    began = time.perf_counter()
    for model in PASSES:
        await trainer.score((model,), parts[0] if fused else [row for part in parts for row in part])
    sums["passes"] = time.perf_counter() - began
    began = time.perf_counter()
    for number, part in enumerate(parts):
        later = parts[number + 1 :] if fused else []
        scored = {"ref": later[0]} if later else {}
        if later and number == 0:
            scored["actor"] = [row for each in later for row in each]
        made, _ = await trainer.train({"actor": part}, scored)
        await trainer.step("actor", [len(row.response_ids) for row in part])
        sums["planned"] += made.get("fusion/train_makespan_planned", 0.0)
        sums["in 1F1B"] += made.get("fusion/train_makespan_serial", 0.0)
    sums["training"] = time.perf_counter() - began
    return sums | {"step": sums["passes"] + sums["training"]}


async def real(config: Config, slots, options: argparse.Namespace) -> list[str]:
    """Return the lines of the table for real compute."""
    trainer, _ = await PipelineTrainer.start(config, slots, list(slots.cores) if slots.cores else None)
    rows = make_rows(options.mini_batches * options.micro_batches * 2, SEQUENCE // 2)
    size = options.micro_batches * 2
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    planners = {order: Planner(2, order) for order in ("serial", "fused")}
    took: dict[str, list[dict[str, float]]] = {order: [] for order in planners}
    for number in range(options.repeats + 1):
        for order, planner in planners.items():
            trainer.planner = planner
            found = await a_step(trainer, parts, order == "fused")
            if number:
                took[order].append(found)
    lines = []
    for order, steps in took.items():
        middle = {name: statistics.median(each[name] for each in steps) for name in steps[0]}
        lines.append(f"| 2 ranks, {order} | " + " | ".join(f"{seconds:.3f}" for seconds in middle.values()) + " |")
    pairs = zip(took["serial"], took["fused"], strict=True)
    ratios = sorted(serial["step"] / fused["step"] for serial, fused in pairs)
    lines.append(f"\nserial / fused, step: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    for rank in trainer.ranks:
        ray.kill(rank)
    return lines


def planned(stages: int, order: str, count: int) -> Plan:
    """Return a schedule for operations of fixed length, planned with their durations."""
    planner = Planner(stages, order)
    work = {"actor": count}, dict.fromkeys(PASSES, count)
    first = planner.plan(*work)
    for each in (each for row in first.rows for each in row):
        planner.learn(first.planned_operation(each), FIXED[each.kind] + (FIXED["W"] if each.kind == "B" else 0.0))
    return planner.plan(*work)


async def fixed(config: Config, slots, options: argparse.Namespace) -> list[str]:
    """Return the lines for operations of fixed length: training of a mini-batch and passes of the next one."""
    lines = []
    for stages in (2, 4):
        layout = [Pipelines(name, stages) for name in PASSES]
        group, _ = await PipelineGroup.start(config, pipelines.Anywhere(None, stages, "cpu"), layout)
        plans = {order: planned(stages, order, options.micro_batches) for order in ("serial", "fused")}
        took: dict[str, list[float]] = {order: [] for order in plans}
        for _ in range(options.repeats):
            for order, plan in plans.items():
                calls = [rank.__ray_call__.remote(play, plan.rows, layout) for rank in group.ranks]
                took[order].append(max(await asyncio.gather(*calls)))
        middle = {order: statistics.median(each) for order, each in took.items()}
        ratio = middle["serial"] / middle["fused"], plans["serial"].seconds / plans["fused"].seconds
        lines.append(
            f"30 / 60 ms on {stages} ranks, measured (planned): "
            + ", ".join(f"{order} {middle[order]:.3f} s ({plan.seconds:.3f})" for order, plan in plans.items())
            + f", serial / fused {ratio[0]:.3f} ({ratio[1]:.3f})"
        )
        for rank in group.ranks:
            ray.kill(rank)
    return lines


async def main(options: argparse.Namespace) -> None:
    """Start ranks, measure, write."""
    options.out.mkdir(parents=True, exist_ok=True)
    config = Config()
    config.model.path = model_folder(options.hidden, 6)
    config.model.dtype, config.cluster.device, config.trainer.n_gpus_per_node = "float32", "cpu", 2
    config.algorithm.adv_estimator, config.actor.use_kl_loss = "grpo", True
    config.actor.ppo_max_token_len_per_gpu = 2 * SEQUENCE
    config.training.pipeline_parallel_size = 2
    slots = await placement.start(config)
    head = ["seconds", "passes before training", "training", "its schedules planned", "their work in 1F1B", "step"]
    table = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    table += await real(config, slots, options)
    table += ["", *await fixed(config, slots, options)]
    print("\n".join(table), flush=True)
    (options.out / "table.md").write_text("\n".join(table) + "\n")
    placement.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/filled_bubbles"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    asyncio.run(main(parser.parse_args()))
