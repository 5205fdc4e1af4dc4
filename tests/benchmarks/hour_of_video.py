"""An hour of video through a whole step under Seed1.5-VL's budget: seconds of each stage, peak memory of each process.

    python tests/benchmarks/hour_of_video.py [--seconds 3600] [--layers 2] [key=value ...]

Writes an hour of 360 x 640 pixels as mp4 and a small random VideoLLaMA3 with a sufficient context, and runs one step of
the real job (`rlfuse.train`, GRPO with two responses, two slots) on a single question: plan, decode, encode on two
ranks, rollout, log-probs, update with up to two ranks per sequence. Seconds come from the run's events; memory is the
maximum of each process, shared pages included, sampled five times per second. Nothing is truncated: the prompt's length
is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil
import video_decoding

from rlfuse.events import Span, covered, read_events
from rlfuse.observe.tracking import read_metrics
from rlfuse.tasks.small_video_models import SmallModel, write_small_video_llama3

CONTEXT = 98_304
REWARD = "def length(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str))\n"
FILE = argparse.Namespace(seconds=3600, height=360, width=640, fps=5, gop=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("settings", nargs="*", help="keys of the job to change")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        FILE.seconds = arguments.seconds
        video_decoding.write(str(folder / "hour.mp4"), FILE)
        (folder / "reward.py").write_text(REWARD)
        row = {"prompt": "<video>what happens?", "videos": [{"video": "hour.mp4"}], "answer": ""}
        (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
        write_small_video_llama3(folder / "model", SmallModel(layers=arguments.layers, context=CONTEXT))
        peaks = watched([*command(folder), *arguments.settings])
        report(folder / "runs/rlfuse/run", peaks)


def command(folder: Path) -> list[str]:
    settings = {
        "algorithm": "grpo",
        "video.sampling": "seed_vl",
        "video.timestamps": "seed_vl",
        "data.train_files": f"[{folder}/rows.jsonl]",
        "data.max_prompt_length": CONTEXT - 64,
        "data.max_response_length": 32,
        "data.train_batch_size": 1,
        "actor.ppo_mini_batch_size": 1,
        "model.path": folder / "model",
        "model.dtype": "float32",
        "rollout.n": 2,
        "rollout.kv_cache_memory_mb": 512,
        "reward.functions": f"[{folder}/reward.py:length]",
        "training.ulysses_sequence_parallel_size": 2,
        "actor.ppo_max_token_len_per_gpu": CONTEXT // 2,
        "video.cache_mb": 256,
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": 1,
        "trainer.save_freq": 0,
        "trainer.logger": "[console]",
        "trainer.default_local_dir": folder / "runs",
        "trainer.experiment_name": "run",
        "cluster.timeout_s": 1800,
    }
    return [sys.executable, "-m", "rlfuse.train", *(f"{key}={value}" for key, value in settings.items())]


def watched(job: list[str]) -> dict[str, float]:
    """Run the job and return the peak MiB of each kind of process."""
    peaks: dict[str, float] = defaultdict(float)
    with subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            for each in (tree, *tree.children(recursive=True)):
                try:
                    kind = role(each)
                    peaks[kind] = max(peaks[kind], each.memory_info().rss / 2**20)
                except psutil.Error:
                    continue
            time.sleep(0.2)
        if process.returncode:
            raise SystemExit(process.stdout.read())
    return peaks


def role(process: psutil.Process) -> str:
    words = process.cmdline() or ["?"]
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").split(".")[0]
    if words[0].startswith("VLLM::"):
        return "vLLM"
    if "spawn_main" in " ".join(words):
        return "decoder"
    return "driver" if "rlfuse.train" in words else "other"


def report(run: Path, peaks: dict[str, float]) -> None:
    events, row = read_events(run / "events.jsonl"), read_metrics(run / "metrics.jsonl")[-1]
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in events:
        spans[span.kind].append(span)
    print(
        f"prompt: {row['prompt_length/max']:.0f} tokens, {row['video/tokens']:.0f} of them visual "
        f"({row['video/frames']:.0f} frames at level {row['video/level']:.0f})"
    )
    print(f"decode {row['video/decode_s']:.1f} s of work, encode {row['video/encode_s']:.1f} s of work on two ranks")
    for kind in ("encode_clips", "gen", "old_log_prob", "ref", "update_actor", "step"):
        mine = [span for span in spans[kind] if span.where == "driver"]
        print(f"{kind:<14} {covered(mine):8.1f} s")
    print(
        f"prefill on the engine {row['video/prefill_s']:.1f} s; "
        f"encoded {row['video/encoded_over_unique_tokens']:.2f} times"
    )
    print(
        f"computed over unique tokens in passes {row['perf/computed_over_unique_tokens']:.4f}, "
        f"degree {row['video/sequence_parallel_degree']:.0f}"
    )
    for name in ("driver", "EncoderRank", "decoder", "RolloutWorker", "vLLM", "TrainerRank", "EmbeddingCache"):
        print(f"peak memory  {name:<15} {peaks.get(name, float('nan')):8.0f} MiB")


if __name__ == "__main__":
    main()
