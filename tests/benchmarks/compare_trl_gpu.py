"""A GRPO step of TRL with in-process vLLM and of rlfuse, alternately on one GPU, in six minutes.

    python tests/benchmarks/compare_trl_gpu.py outputs/compare_trl [--sizes 0.5b 1.5b] [--steps 4] [--limit 360]
    python tests/benchmarks/compare_trl_gpu.py outputs/compare_trl --device cpu --tiny      the same code without a GPU

Random models of Qwen2.5's shape in bfloat16, 32 prompts of 64 tokens x 8 responses of 512 tokens, no KL, one update per
step; rewards depend only on the text. TRL's additional defaults (recomputed activations, a reference model) are off.
TRL's engine sleeps during training, as rlfuse's does if both do not fit. Both sides run once per repetition, in
alternating order, until the next run would exceed the limit. Reported steps are medians without the first of each run;
the ratio is taken within each repetition. On a CPU, TRL generates with transformers.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
OURS, TRL = "rlfuse", "TRL"
MICRO_BATCH = 16
"""Rows of TRL's micro-batches: 5.6 GB of float32 logits, and as much for their gradient."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The sizes of a step."""

    prompts: int = 32
    group: int = 8
    prompt: int = 64
    response: int = 512

    @property
    def samples(self) -> int:
        return self.prompts * self.group


TINY = Setting(prompts=4, group=2, prompt=8, response=16)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Return a number between 0 and 1 that depends only on the text."""
    return zlib.crc32(solution_str.encode()) % 1000 / 1000


def main() -> None:
    """Run both sides until the limit and print the table; with --train: TRL's process."""
    options = options_of()
    if options.train:
        train(options.train, options.folder, options)
        return
    began, folder = time.monotonic(), options.folder.absolute()
    runs: dict[str, list[dict[str, list[float]]]] = {size: [] for size in options.sizes}
    longest = 0.0
    for repeat in range(options.repeats):
        for size in options.sizes:
            found: dict[str, list[float]] = {}
            for name in (OURS, TRL)[:: 1 if repeat % 2 == 0 else -1]:
                if time.monotonic() - began + longest > options.limit:
                    print(f"{name}, {size}, repetition {repeat + 1}: left out, --limit={options.limit:g} s", flush=True)
                    continue
                start = time.monotonic()
                found[name] = measure(
                    name, folder / f"{size}_{name}_{repeat}", prepared(folder, size, options), options
                )
                longest = max(longest, time.monotonic() - start)
                print(f"{name}, {size}: steps of {[round(each, 2) for each in found[name]]} s", flush=True)
            runs[size].append(found)
    print(table(runs), flush=True)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for models, data and logs")
    parser.add_argument("--sizes", nargs="+", choices=("0.5b", "1.5b", "tiny"), default=["0.5b", "1.5b"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=360.0, help="seconds in all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short responses")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.sizes = ["tiny"]
    options.setting = TINY if options.tiny else Setting()
    return options


def prepared(folder: Path, size: str, options: argparse.Namespace) -> Path:
    """Return the folder of the model and its prompts, written by a separate process to release its memory."""
    if not (model := folder / "models" / size).exists():
        model.mkdir(parents=True)
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        code = f"import sys, pathlib, gpu_profile as c; c.make_model(pathlib.Path(sys.argv[1]), {size!r}, {dtype!r})"
        subprocess.run([sys.executable, "-c", code, str(model)], cwd=Path(__file__).parent, check=True)
        import pyarrow as pa
        import pyarrow.parquet as pq

        draw, setting = random.Random(0), options.setting
        texts = ["".join(draw.choices("abcdefgh", k=setting.prompt)) for _ in range(setting.prompts * options.steps)]
        rows = [{"data_source": "none", "prompt": each, "reward_model": {"ground_truth": ""}} for each in texts]
        pq.write_table(pa.Table.from_pylist(rows), model / "prompts.parquet")
    return model


def measure(name: str, folder: Path, model: Path, options: argparse.Namespace) -> list[float]:
    """Return the seconds of each step of a run in separate processes."""
    from compare_trl import STEPS, seconds_of, steps_of_ours

    folder.mkdir(parents=True)
    if name == OURS:
        seconds_of(name, ours(folder, model, options), folder, {})
        return steps_of_ours(folder)
    command = [sys.executable, __file__, str(folder), "--train", str(model), f"--steps={options.steps}"]
    command += [f"--device={options.device}", *["--tiny"] * options.tiny]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29534"}
    seconds_of(
        name, command, folder, {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | (alone if options.device == "cuda" else {})
    )
    return json.loads((folder / STEPS).read_text())


def ours(folder: Path, model: Path, options: argparse.Namespace) -> list[str]:
    """Return rlfuse's command."""
    setting = options.setting
    settings = {
        "algorithm": "grpo",
        "model.path": model,
        "model.dtype": "bfloat16" if options.device == "cuda" else "float32",
        "data.train_files": f"[{model / 'prompts.parquet'}]",
        "data.prompt_is_chat": "false",
        "data.train_batch_size": setting.prompts,
        "data.max_prompt_length": setting.prompt + 1,
        "data.max_response_length": setting.response,
        "reward.functions": f"[{__file__}:compute_score]",
        "rollout.n": setting.group,
        "rollout.temperature": 1,
        "rollout.max_num_seqs": setting.samples,
        "actor.ppo_mini_batch_size": setting.prompts,
        "actor.optim.lr": 1e-6,
        "actor.use_kl_loss": "false",
        "cluster.device": options.device,
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": "false",
        "trainer.save_freq": 0,
        "trainer.logger": "[console]",
        "trainer.total_training_steps": options.steps,
        "trainer.default_local_dir": folder,
        "trainer.experiment_name": "run",
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "rlfuse.cli", "train", *words]


def train(model: Path, folder: Path, options: argparse.Namespace) -> None:
    """Run TRL in this process."""
    import pyarrow.parquet as pq
    import torch
    from compare_trl import train_by_trl
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig

    def reward(completions: list[str], **_: object) -> list[float]:
        return [compute_score("", completion, "") for completion in completions]

    rows = [{"prompt": row["prompt"]} for row in pq.read_table(model / "prompts.parquet").to_pylist()]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    train_by_trl(policy, model, GRPOConfig(**trl_settings(folder, options)), rows, reward)


def trl_settings(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Return GRPOConfig's arguments: one update per step, from micro-batches."""
    setting, on_gpu = options.setting, options.device == "cuda"
    rows = min(MICRO_BATCH, setting.samples)
    settings = {
        "output_dir": str(folder),
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": setting.samples // rows,
        "num_generations": setting.group,
        "max_completion_length": setting.response,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "weight_decay": 0.01,
        "lr_scheduler_type": "constant",
        "max_steps": options.steps,
        "save_strategy": "no",
        "report_to": [],
        "seed": 1,
    }
    if on_gpu:
        longest = setting.prompt + 1 + setting.response
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
        settings |= {"vllm_gpu_memory_utilization": 0.4, "vllm_max_model_length": longest}
    return settings


def table(runs: dict[str, list[dict[str, list[float]]]]) -> str:
    """Return medians over repetitions; a run's step time is the median without its first step."""
    lines = ["\n| model | rlfuse, a step | TRL, a step | TRL / rlfuse | repetitions |\n|---|---|---|---|---|"]
    for size, found in runs.items():
        steps = [{name: median(each[1:] or each) for name, each in run.items()} for run in found]
        both = [run for run in steps if len(run) == 2]
        if not both:
            lines.append(f"| {size} | | | | 0 |")
            continue
        ours_s, trl_s = (median(run[name] for run in both) for name in (OURS, TRL))
        ratio = median(run[TRL] / run[OURS] for run in both)
        lines.append(f"| {size} | {ours_s:.2f} s | {trl_s:.2f} s | {ratio:.2f} | {len(both)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
