"""Operations that the CPU launches for a pass of a small model: eager, and as a CUDA graph.

    python tests/benchmarks/graph_launches.py

Uses no GPU: operations are counted on CPUs, in float32, with attention by segment as on a GPU; views and allocations
are not counted, and the replay of a graph is one launch. Both sides run the same micro-batches in one process.
`h200_estimate.py` uses the sums of a quickstart step, one micro-batch of each pass.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from worlds.emulated_graphs import Count, EmulatedRecording, Graph

from rlfuse.config.schema import Config, ModelConfig, OptimConfig
from rlfuse.engines.deepspeed.optimizer import trainable
from rlfuse.engines.trainer import cuda_graphs
from rlfuse.engines.trainer.micro_batch_losses import actor_loss, log_probs
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import prepare_for_training
from rlfuse.events import Recorder
from rlfuse.samples import Row

SHAPES = {
    "quickstart": dict(hidden_size=128, layers=2, heads=4),
    "12 layers": dict(hidden_size=256, layers=12, heads=8),
}
TOKENS, PROMPT, RESPONSE = 1024, 9, 29
"""Tokens per micro-batch and per sample: 3,695 tokens in 128 responses, two per prompt."""
REPEATS = 30
STEP = {"scores": 3, "update": 2}
"""Passes over a quickstart step's samples: old log-probs, reference and values; actor and critic."""


def model_of(hidden_size: int, layers: int, heads: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=256,
    )  # fmt: skip
    return prepare_for_training(Qwen2ForCausalLM(config), ModelConfig())


def rows() -> list[Row]:
    """Return as many rows as fit, in pairs with a shared prompt."""
    draw, found = np.random.default_rng(0), []
    for _ in range(TOKENS // (PROMPT + 2 * RESPONSE)):
        prompt = draw.integers(3, 30, PROMPT).astype(np.int32)
        for _ in range(2):
            tensors = {name: draw.normal(size=RESPONSE).astype(np.float32) for name in ("advantages", "old_log_probs")}
            found.append(Row(prompt, draw.integers(3, 30, RESPONSE).astype(np.int32), tensors))
    return found


class Passes:
    """Passes of one micro-batch on a DeepSpeed engine, each with an uncounted warm-up."""

    def __init__(self, shape: dict[str, int], sizes: tuple[int, ...]):
        self._config, self._sizes, self._rows = Config(), sizes, rows()
        self._engine = trainable(model_of(**shape), self._config.actor, OptimConfig(lr=1e-4), "cpu")
        self.recorder = Recorder("trainer/0")
        if sizes:
            cuda_graphs.PassGraphs({"actor": self._engine.module}, sizes, self.recorder)
        for name in STEP:
            self.run(name)

    def run(self, name: str) -> None:
        batch = collate(self._rows, True, shared=True, sizes=self._sizes)
        with torch.set_grad_enabled(name == "update"):
            if name == "scores":
                log_probs(self._config, self._engine, batch)
            else:
                self._engine.backward(actor_loss(self._config, self._engine, batch)[0], scale_wrt_gas=False)

    def launches(self, name: str) -> int:
        Graph.replays = 0
        with Count(may_wait=True) as count:
            self.run(name)
        return count.operations + Graph.replays

    def cpu_ms(self, name: str) -> float:
        """Return the minimum CPU time with collation; graph replay is empty here, as a GPU computes it alongside."""
        least = float("inf")
        for _ in range(REPEATS):
            began = time.process_time()
            self.run(name)
            least = min(least, time.process_time() - began)
        return 1e3 * least


def main() -> None:
    cuda_graphs.CudaRecording = EmulatedRecording
    torch.set_num_threads(1)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ[name] = value
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo", verbose=False)
    print("| model | pass | launched | with graphs | | CPU time with graphs |\n|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        plain, recorded = Passes(shape, ()), Passes(shape, (TOKENS,))
        assert len([span for span in recorded.recorder.drain() if span.kind == "record"]) == len(STEP)
        counts = {each: (plain.launches(each), recorded.launches(each)) for each in STEP}
        replay, Graph.replay = Graph.replay, lambda graph: None
        ms = {each: recorded.cpu_ms(each) for each in STEP}
        Graph.replay = replay
        counts["a PPO step's"] = [sum(STEP[each] * counts[each][side] for each in STEP) for side in (0, 1)]
        ms["a PPO step's"] = sum(STEP[each] * ms[each] for each in STEP)
        for each, (before, after) in counts.items():
            print(f"| {name} | {each} | {before:,} | {after:,} | {before / after:.0f}x | {ms[each]:.1f} ms |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
