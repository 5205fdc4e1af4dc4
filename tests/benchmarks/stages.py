"""Pipeline stages of a model whose head costs as much as nine layers: split evenly, by cost, in chunks, shared head.

    python tests/benchmarks/stages.py [--out FOLDER] [--parts simulated sleeping real] [--repeats 5]
                                      [--micro-batches 8] [--hidden 128]

The model has Qwen2.5-0.5B's proportions: 24 layers, a head worth 9.1 of them if all positions have logits, 4.6 if half
of them do. An actor trains with whole backward; for every split the best list schedule is run. A shared head may use
half as much memory more than 1F1B.

simulated: on 4, 8 and 16 devices, twice as many micro-batches as devices; transfers take no time.
sleeping: on 4 ranks whose operations take the modelled time (more ranks than cores), with real transfers; measured and
    simulated.
real: computed on 4 ranks, with a scaled-down model, half of whose positions have logits. With fewer cores than ranks it
    shows the cost of a split in work and waiting, not its gain.

Splits alternate in each repetition; medians are reported. Writes `table.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import ray
import torch
from pipeline_executor import make_rows
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.partition import LayerCosts, stage_costs
from rlfuse.engines.pipeline.pipeline_group import PipelineGroup
from rlfuse.fusion.schedules import shared_heads

sys.path.insert(0, str(Path(__file__).parent.parent / "end_to_end"))
import pipelines

ray.cloudpickle.register_pickle_by_value(pipelines)  # ranks can't import from tests/
LAYERS, HEAD, WIDE = 24, 9.1, 169
"""Layers, cost of a head in layers, and the ratio of vocabulary to hidden size that gives this cost."""
LAYER_S = 0.005
"""Forward time of a sleeping layer."""
PASSES = {"F": 1, "B": 2, "H": 3}
MEMORY = 1.5
"""Memory cap relative to 1F1B."""
MEASURED = ("even", "by cost", "shared head")


def head_worth(share: float) -> LayerCosts:
    """Return the costs in layers if this share of the positions has logits."""
    return [1.0] * LAYERS, 0.0, HEAD * share


def cuts(stages: int, costs: LayerCosts) -> dict[str, Pipelines]:
    """Return name -> layout of the actor, with its layers."""
    even = tuple(len(range(i, LAYERS, stages)) for i in range(stages))
    ways = {"by cost": Pipelines("actor", stages)}
    if 2 * stages <= LAYERS:
        ways["interleaved"] = Pipelines("actor", stages, chunks=2, placement="interleaved")
        ways["V"] = Pipelines("actor", stages, chunks=2)
    ways["shared head"] = Pipelines("actor", stages, vocabulary=True)
    found = {name: replace(each, layers=each.balanced(costs)) for name, each in ways.items()}
    return {"even": Pipelines("actor", stages, layers=even), **found}


class Plan:
    """Schedule of one split, and its makespan for a forward time per layer of `layer_s`."""

    def __init__(self, layout: Pipelines, costs: LayerCosts, count: int, layer_s: float):
        self.layout, (layers, embedding, head) = layout, costs
        own = stage_costs(layout.layers, layers, embedding, 0.0 if layout.vocabulary else head)
        shared = head / layout.stages if layout.vocabulary else 0.0
        self.seconds = [
            {kind: times * layer_s * (shared if kind == "H" else cost) for kind, times in PASSES.items()}
            for cost in own
        ]
        arguments = (layout,), {"actor": count}, lambda model, stage, kind: self.seconds[stage][kind]
        self.rows = pipelines.fused(*arguments)
        if layout.vocabulary:
            of = replace(pipelines.problem(*arguments), memory_cap=MEMORY)
            plain = tuple(tuple(each for each in row if each.kind != "H") for row in self.rows)
            self.rows = shared_heads.best(of, plain, {"actor": self.seconds[0]["H"]})
        self.simulated = pipelines.makespan(self.rows, *arguments)


def simulated() -> list[str]:
    """Return the lines of the table: the makespan of even stages over that of each split."""
    lines = []
    for stages in (4, 8, 16):
        for share in (1.0, 0.5):
            costs = head_worth(share)
            plans = {name: Plan(each, costs, 2 * stages, 1.0) for name, each in cuts(stages, costs).items()}
            for name, plan in plans.items():
                gain = plans["even"].simulated / plan.simulated
                lines.append(line("simulated", stages, f"{share:.0%}", name, plan, "", gain, gain))
    return lines


def line(work: str, devices: int, share: str, name: str, plan: Plan, *columns: float | str) -> str:
    """Return one line of the table."""
    measured, gain, foretold = (f"{each:.3f}" if isinstance(each, float) else each for each in columns)
    cells = [work, devices, share, name, plan.layout.layers, measured, f"{plan.simulated:.3f}", gain, foretold]
    text = "| " + " | ".join(map(str, cells)) + " |"
    print(text, flush=True)
    return text


def compared(work: str, share: str, plans: dict[str, Plan], took: dict[str, list[float]]) -> list[str]:
    """Return a line per split; gains are taken within repetitions."""
    lines = []
    for name, plan in plans.items():
        gain = statistics.median(even / own for even, own in zip(took["even"], took[name], strict=True))
        foretold = plans["even"].simulated / plan.simulated
        lines.append(line(work, 4, share, name, plan, statistics.median(took[name]), gain, foretold))
    return lines


def play(rank, rows, layout, seconds) -> float:
    """Run operations of fixed length on a rank; return their total duration."""
    own = layout.stages_on(rank.executor.device)
    stages = {("actor", stage): pipelines.Sleeping(layout, stage, seconds[stage] | {"W": 0.0}) for stage in own}
    return pipelines.play(rank, rows, stages)


async def sleeping(group: PipelineGroup, count: int, repeats: int) -> list[str]:
    """Lines of the table."""
    lines = []
    for share in (1.0, 0.5):
        costs = head_worth(share)
        plans = {name: Plan(cuts(4, costs)[name], costs, count, LAYER_S) for name in MEASURED}
        took: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(repeats):
            for name, plan in plans.items():
                await group.setup((plan.layout,))
                given = plan.rows, plan.layout, plan.seconds
                calls = [rank.__ray_call__.remote(play, *given) for rank in group.ranks]
                took[name].append(max(await asyncio.gather(*calls)))
        lines += compared("sleeping", f"{share:.0%}", plans, took)
    return lines


async def real(group: PipelineGroup, count: int, repeats: int) -> list[str]:
    """Lines of the table."""
    rows, costs = {"actor": make_rows(count * 2, 64)}, head_worth(0.5)
    plans = {name: Plan(cuts(4, costs)[name], costs, count, 1.0) for name in MEASURED}
    took: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(repeats):
        for name, plan in plans.items():
            await group.setup((plan.layout,))
            await group.run(plan.rows, rows)  # warm-up
            took[name].append((await group.run(plan.rows, rows)).makespan)
            group._accumulated["actor"] = []  # gradients are discarded without an optimizer step
    return compared("real compute", "50%", plans, took)


def model_folder(hidden: int) -> str:
    """Save a random model of Qwen2.5-0.5B's proportions."""
    folder = tempfile.mkdtemp(prefix="rlfuse-benchmark-")
    config = Qwen2Config(
        vocab_size=WIDE * hidden, hidden_size=hidden, intermediate_size=38 * hidden // 7,
        num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=1, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


async def main(options: argparse.Namespace) -> None:
    """Start ranks; measure and write the table."""
    options.out.mkdir(parents=True, exist_ok=True)
    lines = simulated() if "simulated" in options.parts else []
    measured = {"sleeping": (32, sleeping), "real": (options.hidden, real)}
    if selected := [measured[part] for part in measured if part in options.parts]:
        config = Config()
        config.model.dtype, config.cluster.device, config.trainer.n_gpus_per_node = "float32", "cpu", 2
        await placement.start(config)
        for hidden, measure in selected:
            config.model.path = model_folder(hidden)
            first = (Pipelines("actor", 4),)
            group, _ = await PipelineGroup.start(config, pipelines.Anywhere(None, 4, "cpu"), first)
            lines += await measure(group, options.micro_batches, options.repeats)
            for rank in group.ranks:
                ray.kill(rank)
        placement.stop()
    head = ["work", "devices", "logits", "cut", "layers", "measured s", "simulated s", "even / cut", "simulated"]
    table = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]
    (options.out / "table.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/stages"))
    parser.add_argument("--parts", nargs="+", choices=("simulated", "sleeping", "real"), default=["simulated"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    asyncio.run(main(parser.parse_args()))
