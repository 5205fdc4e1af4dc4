"""Pipelines whose ranks' tensors can be read: layouts, schedules, training steps and their results."""

import asyncio

import ray
import torch
from pipelines import Anywhere, fused, serial
from single_process import BATCHES, lengths, settings
from transformers import AutoConfig

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.pipeline_group import PipelineGroup
from rlfuse.engines.trainer.state_files import MOMENTS, WEIGHT, SavedState

COUNTS = {"actor": 4, "critic": 4}
"""Micro-batches per pipeline."""
WAYS = {"actor": "down", "critic": "up"}
OPPOSITE = (Pipelines("actor", 2), Pipelines("critic", 2, direction="up"))
TWO_CRITICS = (Pipelines("actor", 4), Pipelines("critic", 2, 2, "up"))
LAYOUTS = {
    "4 and 4": (Pipelines("actor", 4), Pipelines("critic", 4, direction="up")),
    "dp 2": OPPOSITE,  # two blocks of two devices
    "V, dp 2": (Pipelines("actor", 2, chunks=2), Pipelines("critic", 2, direction="up")),
    "both in a V": tuple(Pipelines(name, 2, direction=way, chunks=2) for name, way in WAYS.items()),
    "interleaved": (Pipelines("actor", 2, chunks=2, placement="interleaved"), Pipelines("critic", 2, direction="up")),
    "unequal, side by side": (Pipelines("actor", 2, 2, layers=(3, 1)), Pipelines("critic", 4, layers=(1, 1, 2, 0))),
    "whole models": (Pipelines("actor", 1, 2), Pipelines("critic", 2)),
}


def schedule(order, layout, split):
    if order == "serial" and all(pipelines.chunks == 1 for pipelines in layout):
        return serial(layout, COUNTS, split)
    seconds = {"F": 5, "B": 5 if split else 10, "W": 5, "H": 4}
    return fused(layout, COUNTS, lambda model, stage, kind: seconds[kind], split)


class Probe(PipelineGroup):
    """Reads tensors of single ranks, and trains with one schedule after the other."""

    async def take(self, config, layout):
        """Load the stages of another layout in the same processes, whose start takes longest."""

        def reconfigure(rank, config):
            rank.config = config

        self.config = config
        self.tied = AutoConfig.from_pretrained(config.model.path).tie_word_embeddings
        await asyncio.gather(*(rank.__ray_call__.remote(reconfigure, config) for rank in self.ranks))
        return await self.setup(layout)

    async def train(self, rows):
        """Run one step of both models with the schedule `self.rows`."""
        await self.run(self.rows, dict.fromkeys(COUNTS, rows))
        actor, critic = [await self.step(name, lengths(rows)) for name in COUNTS]
        return actor | critic

    async def tensors(self, model, field):
        """Return {name: tensor} over all stages: `grad` as a sum over data parallel ranks, or `data`."""

        def read(rank, model, field):
            whole, shares = {}, rank.executor.shares.get(model)
            for name, parameter in rank.engines[model].module.named_parameters():
                tensor, name = getattr(parameter, field), name.split(".", 1)[1]
                name += f"/{shares.index}" if name == "lm_head.weight" and shares else ""
                tensor = torch.zeros_like(parameter) if tensor is None else tensor.detach()
                if rank.tensor and hasattr(parameter, "partition_dim"):
                    tensor = rank.tensor.gather_whole(tensor, parameter.partition_dim)
                whole[name] = tensor
            return whole

        parts = await asyncio.gather(*(rank.__ray_call__.remote(read, model, field) for rank in self.ranks))
        parts, total = parts[:: self.mesh.tp], {}
        for part in parts if field == "grad" else parts[: self.layout[model].stages]:
            for name, tensor in part.items():
                total[name] = total[name] + tensor if name in total else tensor
        if shares := sorted(name for name in total if name.startswith("lm_head.weight/")):
            total["lm_head.weight"] = torch.cat([total.pop(name) for name in shares])
        if "lm_head.weight" in total and model == "actor" and self.tied:
            head = total.pop("lm_head.weight")
            if field == "grad":
                total["model.embed_tokens.weight"] = total["model.embed_tokens.weight"] + head
        return total


async def started_group(folders, count, layout):
    """Yield ranks that can load layouts; kill them afterwards."""
    group, _ = await Probe.start(settings(folders), Anywhere(None, count, "cpu"), layout)
    yield group
    for rank in group.ranks:
        ray.kill(rank)


async def three_steps(group, config, layout, order, split):
    """Return {model: gradient of each step}, {model: parameters after them}, metrics of each step."""
    rows = schedule(order, layout, split)
    await group.take(config, layout)
    metrics, gradients = [], {name: [] for name in COUNTS}
    for batch in BATCHES:
        await group.run(rows, {name: batch for name in COUNTS})
        metrics.append({})
        for name in COUNTS:
            summed = await group.tensors(name, "grad")
            gradients[name].append({key: tensor / sum(lengths(batch)) for key, tensor in summed.items()})
            metrics[-1] |= await group.step(name, lengths(batch))
    return gradients, {name: await group.tensors(name, "data") for name in COUNTS}, metrics


async def fourth_step(group):
    """Run a fourth step; return its metrics, and the parameters after it."""
    group.rows = schedule("fused", tuple(group.layout.values()), True)
    return await group.train(BATCHES[0]), {name: await group.tensors(name, "data") for name in COUNTS}


def distance(found, expected):
    """Return the norm of the difference of all tensors, relative to the norm of `expected`."""
    assert found.keys() == expected.keys()
    one, other = (torch.cat([tensors[name].flatten() for name in expected]) for tensors in (found, expected))
    return float((one - other).norm() / other.norm())


def state(folder):
    """Return {model/field/parameter: tensor} of a checkpoint."""
    saved = {name: SavedState(folder / name) for name in COUNTS}
    return {
        f"{model}/{field}/{name}": each._whole(field, name)
        for model, each in saved.items()
        for name in each._parts
        for field in (WEIGHT, *MOMENTS)
    }
