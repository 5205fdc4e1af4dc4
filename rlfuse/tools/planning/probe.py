"""Measure a device without a run: half a minute of matrix products, copies, passes, optimizer steps and decoding.

Each time is the median of several measurements after a warm-up. Decoding uses transformers with a KV cache.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from rlfuse.engines.memory.model_sizes import Shape, read_shape
from rlfuse.engines.trainer.cost_measurement import matmul_rate
from rlfuse.tools.planning.exchanges import optimizer_traffic
from rlfuse.tools.planning.features import Work, forward_flops
from rlfuse.tools.planning.hardware import END_LAYERS

MIN_MEASURE_S, MIN_REPEATS = 0.12, 3  # minimum seconds and repetitions of a measurement
DEPTHS, WIDTHS, VOCABULARY = (2, 4), (256, 512), 1024
TOKENS, BATCHES, CONTEXTS, STEPS = (64, 192, 512), (1, 4, 16), (64, 256), 4
COPIED = 1 << 26  # bytes
OPTIMIZER_SIZES = (4_000_000, 8_000_000, 16_000_000)  # parameters per optimizer step, larger than any CPU cache
NORM_CHUNK = 1 << 18  # elements per gradient norm computation


@dataclass
class Probe:
    """Measures a device; calls `print_line` with a line for each measurement."""

    print_line: Callable[[str], None]
    min_measure_s: float = MIN_MEASURE_S
    tokens: tuple[int, ...] = TOKENS
    works: list[Work] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    product_flops: float = 0.0
    copy_bytes_per_s: float = 0.0
    host_bytes_per_s: float | None = None
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    _part: int = 0

    def measure(self, folder: str | None) -> None:
        with _threads(self.device):
            dtype = _dtype(AutoConfig.from_pretrained(folder)) if folder else self._default_dtype
            self._rates(dtype)
            for parameters in OPTIMIZER_SIZES:
                self._optimizer(parameters, dtype)
            for name, config in _configs(folder):
                with tempfile.TemporaryDirectory() as where:
                    config.save_pretrained(where)
                    shape = self.shapes[name] = read_shape(where, "--model")
                self._model(name, config, shape, _dtype(config) if folder else self._default_dtype)

    @property
    def _default_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def _seconds(self, run: Callable[[], Any]) -> float:
        run()
        taken: list[float] = []
        while len(taken) < MIN_REPEATS or sum(taken) < self.min_measure_s:
            self._wait()
            began = time.perf_counter()
            run()
            self._wait()
            taken.append(time.perf_counter() - began)
        return median(taken)

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _rates(self, dtype: torch.dtype) -> None:
        self.product_flops = matmul_rate(dtype, self.device)
        self.print_line(
            f"matrix products in {str(dtype).removeprefix('torch.')}: {self.product_flops / 1e9:,.1f} GFLOP/s"
        )
        data = torch.zeros(COPIED // 4, device=self.device)
        other = torch.empty_like(data)
        self.copy_bytes_per_s = 2 * COPIED / self._seconds(lambda: other.copy_(data))
        self.print_line(f"copies: {self.copy_bytes_per_s / 1e9:,.1f} GB/s (reads + writes)")
        if self.device == "cuda":
            host = torch.zeros(COPIED // 4, pin_memory=True)
            both = self._seconds(lambda: host.copy_(data)) + self._seconds(lambda: data.copy_(host))
            self.host_bytes_per_s = 2 * COPIED / both
            self.print_line(f"to the host and back: {self.host_bytes_per_s / 1e9:,.1f} GB/s")
        else:
            allocated = Work("copying", "", 0, self._seconds(data.clone), copied=2 * COPIED)
            self._add("copies", "into new memory", allocated)

    def _model(self, name: str, config: Any, shape: Shape, dtype: torch.dtype) -> None:
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        item, longest = dtype.itemsize, getattr(config, "max_position_embeddings", 1 << 30)
        for tokens in (each for each in self.tokens if each <= longest):
            self._passes(name, model, shape, tokens, item)
        for batch in BATCHES:
            for context in (each for each in CONTEXTS if each + STEPS <= longest):
                self._decoding(name, model, shape, (batch, context), item)

    def _add(self, name: str, description: str, work: Work) -> None:
        self.works.append(replace(work, source="probe", part=self._part))
        self.print_line(f"{name}, {description}: {1e3 * work.seconds:,.2f} ms")

    def _passes(self, name: str, model: Any, shape: Shape, tokens: int, item: int) -> None:
        ids = torch.ones(1, tokens, dtype=torch.long, device=self.device)

        def learn() -> None:
            model(input_ids=ids, use_cache=False).logits.float().sum().backward()

        with torch.no_grad():
            scored = self._seconds(lambda: model(input_ids=ids, use_cache=False).logits.float().sum())
        learned = self._seconds(learn)
        model.zero_grad(set_to_none=True)
        layers = len(shape.layers)
        begun = layers + END_LAYERS
        hidden, flops = layers * shape.hidden * item * tokens, forward_flops(shape, [0], [tokens])
        self._part += 1
        self._add(name, f"a pass over {tokens} tokens", Work("scoring", "", 0, scored, 0, begun, hidden, flops))
        work = Work("training", "", 0, learned, 0, 3 * begun, 3 * hidden, 3 * flops)
        self._add(name, f"forward and backward of {tokens} tokens", work)

    @torch.no_grad()
    def _decoding(self, name: str, model: Any, shape: Shape, size: tuple[int, int], item: int) -> None:
        batch, context = size
        ids = torch.ones(batch, context, dtype=torch.long, device=self.device)
        cache = model(input_ids=ids, use_cache=True).past_key_values

        def decode() -> None:
            for _ in range(STEPS):
                model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
            cache.crop(-STEPS)

        seconds = self._seconds(decode)
        self._part += 1
        work = Work(
            "generating",
            "",
            0,
            seconds,
            steps=STEPS,
            batch=batch,
            attended=STEPS * batch * len(shape.layers),
            read=STEPS * (sum(shape.layers) + shape.head) * item,
            computed=2 * STEPS * batch * (shape.passed + shape.head),
            moved=STEPS * batch * shape.cache.bytes_of(context, item),
        )
        self._add(name, f"{STEPS} decoding steps of {batch} sequences of {context} tokens", work)

    def _optimizer(self, parameters: int, dtype: torch.dtype) -> None:
        master = torch.nn.Parameter(torch.zeros(parameters, device=self.device))
        weights = torch.empty_like(master, dtype=dtype, requires_grad=False)
        master.grad = torch.randn_like(master)  # square roots of zeros are 20x slower on a CPU
        optimizer = torch.optim.AdamW([master], lr=1e-6, fused=self.device != "cpu")

        @torch.no_grad()
        def step() -> None:
            for part in master.grad.split(NORM_CHUNK):
                torch.linalg.vector_norm(part.double())
            master.grad.mul_(1.0)
            optimizer.step()
            weights.copy_(master)

        seconds = self._seconds(step)
        self._part += 1
        moved = optimizer_traffic(parameters, dtype.itemsize)
        copied = moved.host_only if self.device == "cpu" else 0.0
        work = Work("training", "", 0, seconds, moved=moved.in_place, copied=copied, optimizer_steps=1)
        self._add("optimizer", f"a step of {parameters:,} parameters", work)


def _configs(folder: str | None) -> Iterator[tuple[str, Any]]:
    for depth in DEPTHS:
        if folder:
            config = AutoConfig.from_pretrained(folder).get_text_config()
            config.num_hidden_layers = depth
            if kinds := getattr(config, "layer_types", None):
                config.layer_types = [kinds[layer % len(kinds)] for layer in range(depth)]
            yield f"{depth} layers", config
        for width in () if folder else WIDTHS:
            small = Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=depth,
                num_attention_heads=width // 64,
                num_key_value_heads=width // 128,
                architectures=["Qwen2ForCausalLM"],
            )
            yield f"{depth} layers of {width}", small


def _dtype(config: Any) -> torch.dtype:
    return getattr(config, "dtype", None) or torch.float32


@contextmanager
def _threads(device: str) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if device == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        yield
    finally:
        torch.set_num_threads(before)
