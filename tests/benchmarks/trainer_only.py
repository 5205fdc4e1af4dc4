"""Training alone, in the settings of prime-rl's published benchmarks: tokens per second and MFU on one GPU.

    python tests/benchmarks/trainer_only.py [--rows rl:16384 rl:65536 sft:8192] [--repeats 3] [--no-checkpointing]
    python tests/benchmarks/trainer_only.py --device cpu --tiny      the same code without a GPU

A random Qwen3-0.6B in bfloat16 with float32 masters, all weights trained. A step is one row: the forward pass, the
policy loss (or the negative log-likelihood), the backward pass and AdamW. Activations are recomputed in the backward
pass unless `--no-checkpointing` is given; recomputation does not count as work. MFU counts 6 FLOPs per parameter and
token, causal attention at half of full attention, and the dense bfloat16 peak of an H100 (989 TFLOP/s), which
reproduces the published rows: 11, 27 and 17 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_profile import one_rank

PEAK_FLOPS = 989e12
PUBLISHED = {("rl", 16_384): (11.9e3, 0.11), ("rl", 65_536): (10.2e3, 0.27), ("sft", 8_192): (26e3, 0.17)}
"""prime-rl on one H100: (loss, tokens per row) -> tokens per second, MFU."""
PROMPT = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    words: int

    @property
    def parameters(self) -> int:
        """Return the number of parameters without norms; the head is tied to the embedding."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.words * self.hidden

    def flops(self, tokens: int) -> float:
        """Return the training FLOPs per token in a row of `tokens` tokens."""
        return 6.0 * self.parameters + 6.0 * self.layers * self.heads * self.head * tokens


QWEN3 = Shape(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head=128, words=151_936)
TINY = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head=16, words=512)


class Trainer:
    """One rank with the model, and its rows."""

    def __init__(self, shape: Shape, device: str, checkpointing: bool, longest: int):
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        from rlfuse.config.schema import Config, OptimConfig
        from rlfuse.engines.deepspeed.optimizer import trainable
        from rlfuse.engines.trainer.models import load_policy

        self.shape, self.device, self.config = shape, device, Config()
        model, self.config.actor.use_kl_loss = self.config.model, False
        model.dtype, model.enable_gradient_checkpointing = "bfloat16" if device == "cuda" else "float32", checkpointing
        self.config.data.max_response_length = longest
        with tempfile.TemporaryDirectory() as folder:
            sizes = Qwen3Config(
                vocab_size=shape.words, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
                num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
                head_dim=shape.head, max_position_embeddings=longest, tie_word_embeddings=True,
            )  # fmt: skip
            Qwen3ForCausalLM._from_config(sizes, dtype=getattr(torch, model.dtype)).save_pretrained(folder)
            model.path = folder
            self.engine = trainable(load_policy(folder, model), self.config.actor, OptimConfig(lr=1e-6), device)
        self.engine.train()

    def row(self, loss: str, tokens: int) -> Any:
        """Return a row; with advantages of 1, the policy loss has the gradient of the negative log-likelihood."""
        import numpy as np

        from rlfuse.samples import Row

        draw = np.random.default_rng(tokens)
        prompt, response = (draw.integers(3, self.shape.words, n).astype(np.int32) for n in (PROMPT, tokens - PROMPT))
        advantages = draw.normal(size=len(response)) if loss == "rl" else np.ones(len(response))
        return Row(prompt, response, {"advantages": advantages.astype(np.float32)}, id="0")

    def seconds(self, row: Any) -> float:
        """Return the seconds of a step."""
        import torch

        from rlfuse.engines.deepspeed.optimizer import take_step
        from rlfuse.engines.trainer.micro_batch_losses import actor_loss, weighted_loss
        from rlfuse.engines.trainer.model_inputs import collate

        began = time.perf_counter()
        batch = collate([row], True, self.device, None, True)
        value, _ = actor_loss(self.config, self.engine, batch)
        self.engine.backward(weighted_loss(value, 1.0), scale_wrt_gas=False)
        take_step(self.engine, float(len(row.response_ids)), 1)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def measure(trainer: Trainer, loss: str, tokens: int, repeats: int) -> str:
    """Return a line of the table; the first step is not counted."""
    import torch

    published = "{:,.0f} | {:.0%}".format(*PUBLISHED[loss, tokens]) if (loss, tokens) in PUBLISHED else " | "
    row, on_gpu = trainer.row(loss, tokens), trainer.device == "cuda"
    try:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median([trainer.seconds(row) for _ in range(repeats + 1)][1:])
    except torch.OutOfMemoryError:
        return f"| {loss} | {tokens:,} | does not fit | | | {published} |"
    rate = tokens / seconds
    share = f"{rate * trainer.shape.flops(tokens) / PEAK_FLOPS:.0%}" if on_gpu else ""
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if on_gpu else ""
    return f"| {loss} | {tokens:,} | {rate:,.0f} | {share} | {peak} | {published} |"


def parsed(row: str) -> tuple[str, int]:
    loss, _, tokens = row.partition(":")
    if loss not in ("rl", "sft") or not tokens.isdecimal() or int(tokens) <= PROMPT:
        raise argparse.ArgumentTypeError(f"{row!r}: write rl:TOKENS or sft:TOKENS with more than {PROMPT} tokens")
    return loss, int(tokens)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=parsed, nargs="+", default=[*PUBLISHED], help="loss and tokens, as in rl:16384")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and rows of 128 tokens")
    options = parser.parse_args(arguments)
    rows = [(loss, 128) for loss in ("rl", "sft")] if options.tiny else options.rows
    with one_rank(options.device):
        shape, longest = TINY if options.tiny else QWEN3, max(tokens for _, tokens in rows)
        trainer = Trainer(shape, options.device, not options.no_checkpointing, longest)
        print("| loss | tokens of a row | tokens/s | MFU | peak | prime-rl: tokens/s | MFU |\n" + "|---" * 7 + "|")
        for loss, tokens in rows:
            print(measure(trainer, loss, tokens, options.repeats), flush=True)


if __name__ == "__main__":
    main()
