"""Encode a batch of clips on 1 and 2 ranks: seconds, balance of the shards, and the gain from batching units.

    python tests/benchmarks/video_encoding.py [--repeats 5] [--frames 192] [--ranks 1 2] [--steps 1 2 4 8]

Clips of several lengths and sizes, with frames from a generator of negligible cost (decoding is measured separately).
Each repetition encodes new contents, so that no cache contains them. Ranks share the machine's cores, one thread each.
`ideal` is the ratio that the shards' costs allow, `measured` that of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from rlfuse.cluster import placement
from rlfuse.cluster.worker_environment import worker_environment
from rlfuse.config.schema import Config
from rlfuse.tasks.small_video_models import SmallModel, write_small_video_llama3
from rlfuse.video.cache import CacheSettings
from rlfuse.video.encoder_handle import EncoderPlacement
from rlfuse.video.encoder_rank import EncoderSettings
from rlfuse.video.encoding import Clip, SequenceParallelEncoder
from rlfuse.video.towers import Tower

SIZES = ((140, 252), (252, 140), (84, 112), (280, 280))
MODEL = SmallModel(heads=8, tower_heads=8, tower_layers=6)


def frame_reader():
    """Return a reader of grey ramps, defined inside a function so that it is pickled by value."""

    def frames(path, plan, first, last):
        import numpy

        ramp = numpy.arange(plan.height * plan.width * 3, dtype=numpy.uint8)
        return numpy.stack([numpy.roll(ramp, i) for i in range(first, last)]).reshape(-1, plan.height, plan.width, 3)

    return frames


def batch(folder: Path, frames: int, number: int) -> list[Clip]:
    """Return clips with 1/8, 1/8, 1/4 and 1/2 of the frames, one of each size."""
    clips = []
    for share, (height, width) in zip((8, 8, 4, 2), SIZES, strict=True):
        times = tuple(map(float, range(frames // share)))
        path = folder / f"{number}-{height}x{width}.mp4"
        path.write_text(path.name)
        seen = hashlib.sha256(repr((times, height, width)).encode()).hexdigest()
        tokens = len(times) * height * width // 28**2
        plan = SimpleNamespace(
            times=times, height=height, width=width, temporal_patch=1, merge=2, tokens=tokens, hash=seen
        )
        clips.append(Clip(path.name, str(path), plan))
    return clips


async def on_ranks(ranks: int, model: Path, folder: Path, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return (median seconds of a batch, heaviest shard / mean)."""
    environment = worker_environment("cpu")
    place = EncoderPlacement({"num_cpus": 0, "runtime_env": {"env_vars": environment}})
    encoder = SequenceParallelEncoder(
        EncoderSettings(str(model)), CacheSettings(256 << 20), frame_reader(), [place] * ranks, 600.0, environment
    )
    await encoder.start()
    seconds = []
    for number in range(arguments.repeats + 1):
        clips = batch(folder, arguments.frames, 1000 * ranks + number)
        began = time.perf_counter()
        await encoder.encode(clips, "step")
        seconds.append(time.perf_counter() - began)
        await encoder.release("step")
    metrics = await encoder.metrics()
    await encoder.close()
    assert metrics["video/encoded_over_unique_tokens"] == 1.0 and metrics["video/failed_clips"] == 0
    return statistics.median(seconds[1:]), metrics["video/shard_imbalance"]  # the first batch is warm-up


def of_steps(model: Path, arguments: argparse.Namespace) -> None:
    """Print milliseconds per frame for several numbers of units per call, with one process and one clip."""
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (32, 140, 252, 3), np.uint8))
    torch.set_num_threads(1)
    for step in arguments.steps:
        tower, seconds = Tower(model, step=step), []
        for _ in range(arguments.repeats + 1):
            began = time.perf_counter()
            tower.encode(frames)
            seconds.append(time.perf_counter() - began)
        print(f"step {step:>2}: {1000 * statistics.median(seconds[1:]) / len(frames):6.2f} ms a frame of 45 tokens")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--frames", type=int, default=192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    config = Config()
    config.trainer.n_gpus_per_node, config.cluster.device = 1, "cpu"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_small_video_llama3(folder / "model", MODEL)
        of_steps(model, arguments)
        asyncio.run(placement.start(config))
        try:
            alone = None
            for ranks in arguments.ranks:
                seconds, balance = asyncio.run(on_ranks(ranks, model, folder, arguments))
                alone = alone or seconds * ranks
                measured, ideal = alone / seconds, ranks / balance
                print(f"{ranks} ranks: {seconds:.2f} s a batch; measured {measured:.2f}, ideal {ideal:.2f}", flush=True)
        finally:
            placement.stop()


if __name__ == "__main__":
    main()
