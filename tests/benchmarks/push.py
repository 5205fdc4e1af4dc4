"""Seconds of a weight push from trainer ranks to engines: whole and sharded models, engines on one slot and on two.

    python tests/benchmarks/push.py [--zero 1 3] [--widths 1 2] [--hidden 512] [--layers 6] [--buckets 16 512]
                                    [--repeats 7] [--device cpu]

A random Qwen2 on two slots: two DeepSpeed ranks under each ZeRO stage (stage 3 gathers every bucket), and two engines
or one that spans both slots (tensor parallel). Bucket sizes (rollout.update_weights_bucket_mb) alternate within a
repetition; engines report the version of each push. The transfer is that of a run on the device: CUDA IPC on GPUs,
shared memory on CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from statistics import median

import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.engines.weights.staging import stagings
from rlfuse.engines.weights.sync import WeightPush
from rlfuse.events import Recorder
from rlfuse.progress import part
from rlfuse.run import inference
from rlfuse.run.starting import end_all, start_parts
from rlfuse.tasks.vocabulary import build_tokenizer

SLOTS = 2


def job(folder: str, options: argparse.Namespace, zero: int, width: int) -> Config:
    """Return a GRPO job without a reference, in which only the actor is pushed."""
    config = Config()
    config.model.path, config.model.dtype = folder, options.dtype
    config.trainer.n_gpus_per_node, config.cluster.device = SLOTS, options.device
    config.algorithm.adv_estimator, config.actor.zero_stage = "grpo", zero
    config.data.max_prompt_length = config.data.max_response_length = 64
    config.rollout.max_num_seqs, config.rollout.kv_cache_memory_mb = 16, 32
    config.rollout.tensor_model_parallel_size = width
    return inference.with_transfer(config, options.device)


async def measured(config: Config, slots: placement.Slots, options: argparse.Namespace) -> dict[int, list[float]]:
    """Return bucket size in MiB -> seconds of each push."""
    handles = inference.rollout_handles(config, slots, Recorder("benchmark"), print)
    starts = inference.engine_starts(handles, config, slots, lambda name: part(name, quiet=True))

    async def trainer(_):
        return await TrainerGroup.start(config, slots, slots.cores)

    started = await start_parts(slots.device, trainer=trainer, engines=starts)
    took: dict[int, list[float]] = {size: [] for size in options.buckets}
    nodes = stagings(handles, slots, config.cluster.timeout_s)
    for repeat in range(options.repeats + 1):
        for number, size in enumerate(options.buckets):
            started.trainer.config.rollout.update_weights_bucket_mb = size
            started.trainer._buckets.clear()
            push = WeightPush(started.trainer, handles, size, config.rollout.weight_transfer, nodes)
            began = time.perf_counter()
            await push.push(1 + repeat * len(options.buckets) + number)
            took[size].append(time.perf_counter() - began)
    await end_all(handle.stop() for handle in handles)
    for actor in (*started.trainer.ranks, *(handle.actor for handle in handles)):
        ray.kill(actor)
    return {size: seconds[1:] for size, seconds in took.items()}  # the first pushes pin and map memory


async def main(options: argparse.Namespace) -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as folder:
        heads = dict(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=options.layers)
        sizes = dict(hidden_size=options.hidden, intermediate_size=4 * options.hidden, vocab_size=32_000)
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).to(getattr(torch, options.dtype))
        model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        size = sum(each.nbytes for each in model.parameters())
        print(f"{size / 1e6:.0f} MB of weights, {options.dtype}; medians of {options.repeats}")
        print("| ranks | engines | bucket | seconds | GB/s |\n|---|---|---|---|---|")
        slots = await placement.start(job(folder, options, 1, 1))
        for zero in options.zero:
            for width in options.widths:
                engines = f"{SLOTS // width} of {width} slot{'s' * (width > 1)}"
                found = await measured(job(folder, options, zero, width), slots, options)
                for bucket, took in ((bucket, median(seconds)) for bucket, seconds in found.items()):
                    print(
                        f"| ZeRO {zero} | {engines} | {bucket} MiB | {took:.3f} | {size / took / 1e9:.2f} |", flush=True
                    )
    placement.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", nargs="+", type=int, choices=range(4), default=[1, 3])
    parser.add_argument("--widths", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--buckets", nargs="+", type=int, default=[16, 512])
    for name, value in (("hidden", 512), ("layers", 6), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    asyncio.run(main(parser.parse_args()))
