"""Plan and decode an hour of video under Seed1.5-VL's budget: seconds, and peak memory of both processes.

    python tests/benchmarks/video_decoding.py [--height 360] [--width 640] [--fps 5] [--gop 10] [--repeats 3]

Writes the clip itself (one picture per second, so that encoding is cheap), as MP4 and as Matroska, whose keyframes have
to be searched. For comparison: the same file decoded from end to end by plain PyAV without converting a frame, the
minimum for a reader without seeking.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from rlfuse.video.decode_pool import DecodePool
from rlfuse.video.plan import SeedSampling, plan_video


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seconds", 3600), ("height", 360), ("width", 640), ("fps", 5), ("gop", 10), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("mp4", "mkv"):
            path = str(Path(folder) / f"hour.{kind}")
            written = seconds(lambda path=path: write(path, settings))
            size = Path(path).stat().st_size / 1e6
            print(
                f"{kind}: {settings.seconds} s, {settings.fps} fps, {settings.height} x {settings.width}, {size:.1f} MB"
            )
            print(f"     keyframe every {settings.gop / settings.fps:g} s; written in {written:.1f} s")
            measure(path, settings.repeats)
    here, worker = peak(resource.RUSAGE_SELF), peak(resource.RUSAGE_CHILDREN)
    print(f"peak memory: this process {here:.0f} MB, a worker {worker:.0f} MB, the frames among both")


def measure(path: str, repeats: int) -> None:
    with DecodePool(timeout_s=600.0) as pool:
        [facts] = pool.probe([path])  # starts the worker, uncounted
        plan = plan_video(facts, SeedSampling())
        rows = {
            "probe": [seconds(lambda: list(pool.probe([path]))) for _ in range(repeats)],
            "plan": [seconds(lambda: plan_video(facts, SeedSampling()).hash) for _ in range(repeats)],
            "decode": [seconds(lambda: pool.decode(path, plan)) for _ in range(repeats)],
            "(every frame)": [seconds(lambda: read(path)) for _ in range(repeats)],
        }
    print(f"     {plan.frames} frames of {plan.height} x {plan.width}, {plan.tokens} tokens at level {plan.level}")
    for name, taken in rows.items():
        print(f"     {name:<14} median {statistics.median(taken):.4f} s, {min(taken):.4f} to {max(taken):.4f}")


def read(path: str) -> None:
    with av.open(path) as container:
        for _ in container.decode(video=0):
            pass


def write(path: str, settings: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    with av.open(path, "w") as container:
        options = {"preset": "ultrafast", "g": str(settings.gop), "sc_threshold": "0"}
        stream = container.add_stream("libx264", rate=settings.fps, options=options)
        stream.height, stream.width, stream.pix_fmt = settings.height, settings.width, "yuv420p"
        for number in range(settings.seconds * settings.fps):
            if number % settings.fps == 0:
                blocks = rng.integers(0, 256, (settings.height // 40, settings.width // 40, 3), dtype=np.uint8)
                pixels = np.ascontiguousarray(np.kron(blocks, np.ones((40, 40, 1), np.uint8)))
                frame = av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, settings.fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak(who: int) -> float:
    return resource.getrusage(who).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
