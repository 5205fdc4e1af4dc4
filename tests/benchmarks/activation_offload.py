"""Time and memory of an update with one row of 32,768 tokens: activations kept, recomputed, or offloaded to disk.

    python tests/benchmarks/activation_offload.py                     # minutes: a small model in float32
    python tests/benchmarks/activation_offload.py --tokens 8192 --repeats 5

Each variant runs in a separate process, where a real `TrainerRank` trains on the row; the variants alternate. Memory is
the process's peak resident memory above its level before the model was loaded. Exits with status 1 if the row does not
fit `--budget` MiB with a disk, fits without one, or if the gradients differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from memory_peaks import SECONDS, Case, _peak, _reset_peak, _warm_up, config_of

from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import GIB, MIB, Budget, memory_of
from rlfuse.engines.memory.model_sizes import shapes_of
from rlfuse.engines.trainer.rank_group import MALLOC_SETTINGS
from rlfuse.samples import MicroBatch, Row

MODEL = dict(
    hidden_size=64, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=2048, max_position_embeddings=1 << 17,
)  # fmt: skip
ANSWER = 256
"""Number of predicted tokens."""
AWAY = {"model.enable_activation_offload": True, "model.activation_device_mb": 0}
WAYS: dict[str, dict[str, Any]] = {
    "stay": {},
    "all run again": {"model.enable_gradient_checkpointing": True},
    "long rows run again": AWAY,
    "on the disk": AWAY | {"model.activation_disk_mb": 1 << 16},
}


def main() -> int:
    """Print a row per variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--budget", type=float, help="MiB; default: half of what activations that stay take")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    arguments = parser.parse_args()
    os.environ |= MALLOC_SETTINGS | {"OMP_NUM_THREADS": str(arguments.threads)}
    with tempfile.TemporaryDirectory() as folder:
        configs = {way: _config(Path(folder), arguments.tokens, WAYS[way]) for way in arguments.ways}
        planned = {way: _planned(config) for way, config in configs.items()}
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in configs}
        for _ in range(arguments.repeats):
            for way, config in configs.items():
                found[way].append(_measured(config, arguments.tokens))
    print("| activations | planned MiB | measured MiB | off by | seconds | disk MiB |\n|---|---|---|---|---|---|")
    peaks = {way: median(each["peak"] for each in runs) for way, runs in found.items()}
    for way, runs in found.items():
        seconds, written = (median(each[name] for each in runs) for name in ("seconds", "written"))
        off = planned[way] / peaks[way] - 1
        print(f"| {way} | {planned[way]:.0f} | {peaks[way]:.0f} | {off:+.1%} | {seconds:.1f} | {written:.0f} |")
    norms = {each["norm"] for runs in found.values() for each in runs}
    print(f"gradient norms: {norms}")
    if not {"stay", "on the disk"} <= set(peaks):
        return 0
    budget = arguments.budget or peaks["stay"] / 2
    holds = peaks["on the disk"] <= budget < peaks["stay"] and len(norms) == 1 and norms != {0.0}
    print(f"a budget of {budget:.0f} MiB: {'holds with a disk alone' if holds else 'does NOT hold'}")
    return 0 if holds else 1


def _config(folder: Path, tokens: int, settings: dict[str, Any]) -> Config:
    sizes = {"data.max_prompt_length": tokens - ANSWER, "data.max_response_length": ANSWER, "actor.zero_stage": 0}
    sizes |= {"data.train_batch_size": 1, "actor.ppo_mini_batch_size": 1, "trainer.default_local_dir": str(folder)}
    sizes |= {"actor.ppo_max_token_len_per_gpu": tokens}
    return config_of(Case("qwen2", settings=sizes | settings), folder, MODEL)


def _planned(config: Config) -> float:
    memory = memory_of(config, shapes_of(config), Budget("cpu", 64 * GIB))
    return sum(part.size for part in memory.parts if part.role == "actor") / MIB


def _measured(config: Config, tokens: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_update, args=(config, tokens, answers))
    process.start()
    try:
        answer = answers.get(timeout=2 * SECONDS)
    finally:
        process.terminate()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _update(config: Config, tokens: int, answers: Any) -> None:
    try:
        answers.put(_updated(config, tokens))
    except BaseException as error:
        answers.put(f"{type(error).__name__}: {error}")
        raise


def _updated(config: Config, tokens: int) -> dict[str, Any]:
    from rlfuse.engines.trainer.trainer_rank import TrainerRank

    rank = TrainerRank(config, 0, 1, "cpu")
    rank.load_extensions()
    rank.join(rank.meeting_place())
    _warm_up()
    before = _reset_peak()
    rank.setup()
    rank.accumulate(("actor",), [_micro_batch(64)])
    rank.step("actor", 1.0)
    rank.drain()
    began = time.perf_counter()
    rank.accumulate(("actor",), [_micro_batch(tokens)])
    _, facts = rank.step("actor", float(ANSWER))
    seconds = time.perf_counter() - began
    written = max(span.attributes.get("disk_bytes", 0) for span in rank.drain())
    return {"peak": _peak() - before, "seconds": seconds, "written": written / MIB, "norm": facts["grad_norm"]}


def _micro_batch(tokens: int) -> MicroBatch:
    draw, answer = np.random.default_rng(tokens), min(ANSWER, tokens // 2)
    ids = draw.integers(3, MODEL["vocab_size"], tokens).astype(np.int32)
    means = {"advantages": 1.0, "old_log_probs": -log(MODEL["vocab_size"])}
    tensors = {name: draw.normal(mean, 0.1, answer).astype(np.float32) for name, mean in means.items()}
    return MicroBatch((Row(ids[:-answer], ids[-answer:], tensors),))


if __name__ == "__main__":
    sys.exit(main())
