"""Profile a decode step and a training step on a GPU, in about three minutes.

    python tests/benchmarks/gpu_profile.py [--sequences 256] [--tokens 256] [--shape 0.5b|tiny]
        [--parts engine trainer] [--kwargs '{"max_num_batched_tokens": 4096}']

A random Qwen2 runs in vLLM's engine as the rollout worker starts it, and in DeepSpeed as on a trainer rank, without
Ray. The engine's step is timed with rlfuse's scheduler, with its fast path on and off. On a CPU, a tiny model tests the
script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from part_times import collected, kernel_rows, noted, spent, timed

HERE = Path(__file__).resolve().parent
SHAPES = {
    "tiny": (128, 256, 2, 2, 1, 2000),
    "0.5b": (896, 4864, 24, 14, 2, 151_936),
    "1.5b": (1536, 8960, 28, 12, 2, 151_936),
}
"""Hidden size, intermediate size, layers, heads, key/value heads, vocabulary."""
STEP = "engine core: a step"


def print_table(title: str, rows: list[tuple[str, list[float]]], steps: float) -> None:
    print(f"\n{title}\n{'':44}{'ms a step':>12}{'core ms':>10}{'calls':>8}")
    for name, (wall, cpu, calls) in rows:
        print(f"{name[:44]:44}{1e3 * wall / steps:12.3f}{1e3 * cpu / steps:10.3f}{calls / steps:8.2f}", flush=True)


def print_kernels(title: str, rows: list[tuple[str, float, float]]) -> None:
    rows = sorted((row for row in rows if row[1]), key=lambda row: -row[1])
    print(f"\n{title}: {sum(row[1] for row in rows):.2f} ms of kernels, {sum(row[2] for row in rows):.0f} of them")
    for name, ms, count in rows[:14]:
        print(f"  {ms:9.3f} ms {count:8.1f} x  {name}", flush=True)


def make_model(folder: Path, shape: str, dtype: str) -> None:
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    hidden, intermediate, layers, heads, kv_heads, words = SHAPES[shape]
    known = ["<pad>", "<eos>", "<unk>", *sorted(ByteLevel.alphabet())]
    vocabulary = {
        word: place for place, word in enumerate([*known, *(f"\u0120w{k}" for k in range(len(known), words))])
    }
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=words, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=32768,
        tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM._from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


class EngineProfile:
    """Times the steps of a rollout worker by part."""

    def __init__(self, worker: Any, options: argparse.Namespace):
        import numpy as np

        self.worker, self.options, words = worker, options, SHAPES[options.shape][5]
        groups = -(-options.sequences // 8)
        self.prompts = np.random.default_rng(0).integers(300, words, (groups, 65)).astype(np.int32)

    async def ask(self, method: str, *arguments: Any) -> Any:
        return json.loads((await self.worker._engine.collective_rpc(method, args=arguments))[0])

    async def run(self, name: str, tokens: int) -> None:
        from rlfuse.engines.rollout.engine_actor import EMPTY_PARTIAL, Request
        from rlfuse.protocols import Sampling

        count = range(self.options.sequences)
        requests = [Request(f"{name}/{k}", 1, k, self.prompts[k // 8], EMPTY_PARTIAL) for k in count]
        async for _ in self.worker.generate(requests, Sampling(1.0, 1.0, -1, tokens)):
            pass

    async def measure(self, title: str) -> None:
        sequences, tokens, thread = self.options.sequences, self.options.tokens, "event loop's thread"
        await self.ask("profile_report")
        spent.clear()
        await self.worker.drain()
        with noted(thread):
            await self.run(title, tokens)
        wall, core = spent[thread][0], await self.ask("profile_report")
        spans = [span for span in await self.worker.drain() if span.kind == "decode"]
        spans = [s for s in spans if not s.attributes["prefill_tokens"] and s.attributes["batch"] > 0.9 * sequences]
        steps, seconds = sum(s.attributes["steps"] for s in spans), sum(s.end - s.start for s in spans)
        rate, step = sequences * tokens / wall, 1e3 * seconds / max(1, steps)
        print(f"\n{title}: {sequences} x {tokens} tokens, {rate:,.0f} tokens/s; a decode step takes {step:.2f} ms")
        ordered = sorted(core.items(), key=lambda row: ("engine" not in row[0], row[0].startswith("    "), -row[1][0]))
        print_table("the engine's process", ordered, max(1, core[STEP][2]))
        print_table("the front end", sorted(spent.items(), key=lambda row: -row[1][0]), tokens)

    async def trace(self) -> None:
        task = asyncio.create_task(self.run("traced", self.options.tokens))
        await asyncio.sleep(0.7)
        with suppress(Exception):  # without CUPTI
            await self.ask("profile_trace", True)
            await asyncio.sleep(0.5)
            steps, rows = await self.ask("profile_trace", False)
            print_kernels(f"the device in a decode step (CUPTI, {steps} steps)", rows)
        await task


async def profile_engine(folder: Path, device: str, dtype: str, options: argparse.Namespace) -> None:
    from rlfuse.config.rollout import RolloutConfig
    from rlfuse.config.schema import ModelConfig
    from rlfuse.engines.vllm.rollout_worker import RolloutWorker

    kwargs = {"worker_extension_cls": "core_profile.Extension"} | json.loads(options.kwargs)
    worker, began = RolloutWorker(0), time.perf_counter()
    rollout = RolloutConfig(max_num_seqs=options.sequences, gpu_memory_utilization=0.3, engine_kwargs=kwargs)
    facts = await worker.start(ModelConfig(str(folder), dtype), rollout, 128 + options.tokens, device)
    print(f"engine start {time.perf_counter() - began:.1f} s, KV cache {facts['kv_tokens']:,} tokens")
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.serial_utils import MsgpackDecoder

    methods = ((MsgpackDecoder, "decode"), (OutputProcessor, "process_outputs"), (StatLoggerManager, "record"))
    for owner, name in (*methods, (RolloutWorker, "_response")):
        timed(owner, name, f"  {owner.__name__}.{name}")
    gc.callbacks.append(collected)
    profile = EngineProfile(worker, options)
    await profile.run("warm", 16)
    await profile.measure("rlfuse's scheduler")
    await profile.ask("profile_short_path", False)
    await profile.measure("without its short path")
    await profile.ask("profile_short_path", True)
    if device == "cuda":
        await profile.trace()
    for verb, *arguments in (
        ("sleep",),
        ("wake", "weights"),
        ("wake", "kv_cache"),
        ("begin_update",),
        ("finish_update", 1),
    ):
        began = time.perf_counter()
        await getattr(worker, verb)(*arguments)
        print(f"{verb} {arguments or ''}: {1e3 * (time.perf_counter() - began):.1f} ms", flush=True)
    await worker.stop()


class TrainerProfile:
    """Times the passes and steps of a rank by part."""

    def __init__(self, folder: Path, device: str, dtype: str, options: argparse.Namespace):
        import numpy as np
        import torch

        from rlfuse.config.schema import Config, OptimConfig
        from rlfuse.engines.deepspeed.optimizer import trainable
        from rlfuse.engines.trainer.models import load_policy

        self.device, self.tokens, self.words = device, options.tokens, SHAPES[options.shape][5]
        self.config, self.random = Config(), np.random.default_rng(0)
        self.config.model.path, self.config.model.dtype = str(folder), dtype
        self.config.actor.use_kl_loss, self.config.data.max_response_length = False, options.tokens
        model = load_policy(str(folder), self.config.model)
        self.engine = trainable(model, self.config.actor, OptimConfig(lr=1e-6), device)
        self.engine.train()
        self.synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.took: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0])

    def row(self, number: int) -> Any:
        import numpy as np

        from rlfuse.samples import Row

        draw, advantages = self.random.integers, self.random.normal(size=self.tokens).astype(np.float32)
        prompt, response = draw(3, 1900, 65).astype(np.int32), draw(3, self.words, self.tokens).astype(np.int32)
        return Row(prompt, response, {"advantages": advantages}, id=str(number))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        host = time.perf_counter() - began
        self.synchronize()
        each = self.took[name]
        each[0] += time.perf_counter() - began
        each[1] += host
        each[2] += 1

    def step(self, rows: list[Any], micro_batches: int) -> None:
        import torch

        from rlfuse.engines.deepspeed.optimizer import take_step
        from rlfuse.engines.trainer.micro_batch_losses import actor_loss, log_probs, weighted_loss
        from rlfuse.engines.trainer.model_inputs import collate

        for _ in range(micro_batches):
            with self.part("collate"):
                batch = collate(rows, True, self.device, None, True)
            with self.part("forward and loss"):
                loss, _ = actor_loss(self.config, self.engine, batch)
            with self.part("backward"):
                self.engine.backward(weighted_loss(loss, 1.0), scale_wrt_gas=False)
        with self.part("optimizer step"):
            take_step(self.engine, float(self.tokens * len(rows) * micro_batches), 1)
        with torch.no_grad(), self.part("log-probs alone"):
            log_probs(self.config, self.engine, collate(rows, True, self.device, None, True))

    def run(self, count: int) -> None:
        import torch

        rows = [self.row(number) for number in range(count)]
        self.step(rows, 1)
        self.took.clear()
        self.step(rows, 4)
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0
        tokens = sum(row.tokens for row in rows)
        print(f"\ntrainer, micro-batches of {count} rows ({tokens:,} tokens), peak {peak:.1f} GiB: ms, ms of the host")
        for name, (wall, host, calls) in self.took.items():
            print(f"{name:30}{1e3 * wall / calls:10.2f}{1e3 * host / calls:10.2f}", flush=True)
        if self.device == "cuda":
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
                self.step(rows, 1)
                self.synchronize()
            print_kernels("the device in one micro-batch, its step and its log-probs", kernel_rows(trace))

    def moves(self) -> None:
        from rlfuse.engines.deepspeed.deepspeed_model import DeepSpeedModel
        from rlfuse.engines.trainer.offloading import to_device, to_host

        model = DeepSpeedModel(self.engine, 1)
        for turn in (1, 2):
            began = time.perf_counter()
            to_host(model)
            away = time.perf_counter()
            to_device(model)
            print(f"turn {turn}: to the host {away - began:.3f} s, back {time.perf_counter() - away:.3f} s", flush=True)


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Make this process the only rank of a trainer."""
    import torch.distributed as dist

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
    }
    with tempfile.TemporaryDirectory() as meeting:
        store = dist.FileStore(f"{meeting}/store", 1)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def profile_trainer(folder: Path, device: str, dtype: str, options: argparse.Namespace) -> None:
    with one_rank(device):
        profile = TrainerProfile(folder, device, dtype, options)
        for count in (max(1, 13_848 // (65 + options.tokens)) if device == "cuda" else 2, 1):
            profile.run(count)
        if device == "cuda":
            profile.moves()


def main() -> None:
    device = (
        "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"
    )  # without a CUDA context, which forks can't use
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b" if device == "cuda" else "tiny")
    parser.add_argument("--parts", nargs="+", choices=("engine", "trainer"), default=("engine", "trainer"))
    parser.add_argument("--kwargs", default="{}", help="more of rollout.engine_kwargs, as JSON")
    options, dtype = parser.parse_args(), "bfloat16" if device == "cuda" else "float32"
    sys.path.insert(0, str(HERE))
    os.environ["PYTHONPATH"] = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    from rlfuse.engines.vllm.setup import rollout_env

    os.environ |= {"HF_HUB_OFFLINE": "1"} | rollout_env(device)
    with tempfile.TemporaryDirectory() as made:
        make_model(folder := Path(made), options.shape, dtype)
        if "engine" in options.parts:
            asyncio.run(profile_engine(folder, device, dtype, options))
        if "trainer" in options.parts:
            profile_trainer(folder, device, dtype, options)


if __name__ == "__main__":
    main()
