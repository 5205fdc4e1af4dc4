"""A rank's step with its optimizer state always resident, prefetched, or resident only during updates.

    python tests/benchmarks/optimizer_residency.py                                 # minutes, on two cores
    python tests/benchmarks/optimizer_residency.py --tokens 16 --repeats 1 --layers 1

A real `TrainerRank` on one core whose device is this host too, so that its moves are copies within memory; prefetching
uses the other core. In a step the rank leaves and takes its device and makes two updates, each of four micro-batches of
`--tokens`. The variants alternate; ratios are within a repetition. Planned ratios use the durations of moves and
gradients of the variant that loads the optimizer with the weights; planned bytes besides activations are those of
`rlfuse plan`. Exits with status 1 if a ratio is off by more than a tenth.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from memory_peaks import Case, config_of

from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import GIB, MIB, Budget, memory_of
from rlfuse.engines.memory.model_sizes import shapes_of
from rlfuse.engines.memory.residency import Item
from rlfuse.engines.trainer import offloading
from rlfuse.engines.trainer.trainer_rank import TrainerRank
from rlfuse.fusion.mini_batches import optimizers_to_fetch
from rlfuse.samples import MicroBatch, Row

WAYS = ("training", "forecast", "step")
UPDATES, MICRO_BATCHES = 2, 4
COLUMNS = ("tokens", "optimizer", "step, planned", "measured", "off by", "of it waited", "MiB, planned", "measured")
SETTINGS = {"actor.zero_stage": 1, "data.max_prompt_length": 1, "data.max_response_length": 511}


class MovingRank(TrainerRank):
    """Rank on CPUs whose models move as on a GPU."""

    def switch(self, role: str) -> float:
        """Copy the models between two locations in host memory."""
        with self._elsewhere():
            return super().switch(role)

    @contextmanager
    def optimizer_on_device(self, model: str) -> Iterator[None]:
        """Move the optimizer as on a GPU; the update itself runs on the CPU."""
        with self._elsewhere(), super().optimizer_on_device(model):
            self.device = "cpu"
            yield
            self.device = "cuda"

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        self.device = "cuda"
        yield
        self.device = "cpu"


def main() -> int:
    """Print a row per variant and length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 128], help="of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        case = Case("qwen2", settings=SETTINGS)
        config = config_of(case, Path(folder), {"num_hidden_layers": arguments.layers})
        rank = _rank(config)
        planned = {way: _planned_bytes(config, way) for way in WAYS}
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        off = [_compare(rank, tokens, arguments.repeats, planned) for tokens in arguments.tokens]
    return int(max(off) > 0.1)


def _rank(config: Config) -> MovingRank:
    rank = MovingRank(config, 0, 1, "cpu")
    rank.load_extensions()
    rank.join(rank.meeting_place())
    rank.setup()
    rank.accumulate(("actor",), [_micro_batch(8, 0)])
    rank.step("actor", 8.0)
    return rank


def _planned_bytes(config: Config, way: str) -> float:
    """Return the bytes on the device except activations before an update."""
    memory = memory_of(config, shapes_of(config), Budget("cuda", 64 * GIB))
    counted = {Item.PARAMETERS, Item.GRADIENTS} | (set() if way == "step" else {Item.OPTIMIZER})
    return sum(part.size for part in memory.parts if part.role == "actor" and part.item in counted)


def _compare(rank: MovingRank, tokens: int, repeats: int, planned: dict[str, float]) -> float:
    """Print the variants' rows; return the maximum error of a ratio."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    each_s = _step(rank, "training", tokens, 0.0)["gradients"] / UPDATES / MICRO_BATCHES
    for _ in range(repeats):
        for way in WAYS:
            found[way].append(_step(rank, way, tokens, each_s))
    worst = 0.0
    for way in WAYS:
        pairs = list(zip(found[way], found["training"], strict=True))
        ratio = median(mine["seconds"] / theirs["seconds"] for mine, theirs in pairs)
        foreseen = median(_planned_seconds(way, theirs) / theirs["seconds"] for _, theirs in pairs)
        waited = median(mine["waited"] / mine["seconds"] for mine, _ in pairs)
        there = max(mine["bytes"] for mine, _ in pairs)
        off = foreseen / ratio - 1
        worst = max(worst, abs(off))
        sizes = f"{planned[way] / MIB:.0f} | {there / MIB:.0f}"
        print(f"| {tokens} | {way} | {foreseen:.2f} | {ratio:.2f} | {off:+.1%} | {waited:.1%} | {sizes} |", flush=True)
    return worst


def _planned_seconds(way: str, stays: dict[str, float]) -> float:
    """Return the planned seconds of a step, from one in which the optimizer moves with the weights."""
    there, back = (stays["optimizer"] * stays[name] for name in ("coming", "leaving"))
    if way == "forecast":
        return stays["seconds"] - min(there, stays["gradients"] / UPDATES)
    return stays["seconds"] + (way == "step") * (UPDATES - 1) * (there + back)


def _step(rank: MovingRank, way: str, tokens: int, each_s: float) -> dict[str, float]:
    """Run a step; return seconds in total, of moves, gradients and waits, and the bytes before the first update.

    `each_s`: the predicted duration of a micro-batch.
    """
    engine = rank.engines["actor"]
    rank.config.actor.optimizer_residency = "training"
    for role in ("rollout", "trainer"):
        rank.switch(role)
    rank.config.actor.optimizer_residency = way
    masters = sum(each.nbytes() for each in offloading._storages(engine))
    if way == "step":
        offloading.to_host(engine, optimizer_alone=True)
    rank.drain()
    start = time.perf_counter()
    rank.switch("rollout")
    left, all_of_it = time.perf_counter(), offloading.offloaded_bytes(engine)
    takes = rank.switch("trainer")
    came = time.perf_counter()
    gradients, there = 0.0, 0
    for update in range(UPDATES):
        began = time.perf_counter()
        for number in range(MICRO_BATCHES):
            if takes and optimizers_to_fetch(
                {0: takes}, (MICRO_BATCHES - 1 - number) * each_s
            ):  # transfers in progress count as done
                rank.fetch_optimizers()
                takes = 0.0
            rank.accumulate(("actor",), [_micro_batch(tokens, number)])
        gradients += time.perf_counter() - began
        if not update:
            there = sum(each.nbytes() for each in offloading._storages(engine))
        rank.step("actor", float(tokens * MICRO_BATCHES))
    end = time.perf_counter()
    assert masters == all_of_it
    waited = sum(span.seconds for span in rank.drain() if span.kind == "optimizer_wait")
    share = 1 - _weights(engine) / all_of_it
    return {"seconds": end - start, "leaving": left - start, "coming": came - left, "gradients": gradients,
            "waited": waited, "bytes": there, "optimizer": share}  # fmt: skip


def _weights(engine: Any) -> int:
    late = offloading._of_optimizer(engine)
    return sum(each.nbytes() for each in offloading._storages(engine) if each.data_ptr() not in late)


def _micro_batch(tokens: int, number: int) -> MicroBatch:
    draw = np.random.default_rng(number)
    ids = draw.integers(3, 32000, tokens + 1).astype(np.int32)
    tensors = {name: draw.normal(mean, 0.1, tokens).astype(np.float32)
               for name, mean in {"advantages": 1.0, "old_log_probs": -10.4}.items()}  # fmt: skip
    return MicroBatch((Row(ids[:1], ids[1:], tensors),))


if __name__ == "__main__":
    sys.exit(main())
