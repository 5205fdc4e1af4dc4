"""CPU time of an engine per token without its model: rlfuse's rollout worker, vLLM's `AsyncLLM` and `LLM`.

    python tests/benchmarks/device_speed.py [--sequences 256] [--tokens 512] [--repeats 3]

The executor computes nothing (`null_executor.py`). Asynchronous scheduling and vLLM's second model runner are on, as on
GPUs, so that the measurement is the host's work around the device; on a GPU the slower of the two limits a decode step.
CPU time is meaningful on a busy machine, too. Each engine runs in a separate process, one after the other within each
repetition; tokens and log-probs of all three must be equal. Sampling is the same for all: log-probs of the sampled
tokens, only the final output, no text.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
MODES = ("rlfuse", "AsyncLLM", "LLM")
TARGETS = {"core": ("AsyncLLM", 5.0), "front": ("AsyncLLM", 6.0), "total": ("LLM", 3.0)}
PROMPT, PER_PROMPT = 65, 8
ENGINE = {
    "distributed_executor_backend": "null_executor.NullExecutor",
    "async_scheduling": True,
    "block_size": 16,
    "enforce_eager": True,
    "max_num_batched_tokens": 8192,
}
STOP: list[str] = []


def write_model(folder: str) -> str:
    """Write a config of Qwen2.5-0.5B's sizes without weights, and a tokenizer of a few words."""
    from transformers import Qwen2Config, Qwen2Tokenizer

    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = Qwen2Tokenizer(vocab=special, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_tokens([f"w{i}" for i in range(3, 1100)])
    tokenizer.save_pretrained(folder)
    Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        architectures=["Qwen2ForCausalLM"], dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    return folder


def cpu_seconds() -> dict[str, float]:
    """Return CPU seconds of this process (front end), its children (core) and theirs (separate model runner)."""
    import psutil

    used = {"front": 0.0, "core": 0.0, "runner": 0.0}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        part = "front" if process == this else "core" if process.ppid() == this.pid else "runner"
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            used[part] += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return used


def prompts(sequences: int) -> list[list[int]]:
    return [[3 + (i // PER_PROMPT * 7 + k * 13) % 1000 for k in range(PROMPT)] for i in range(sequences)]


class Rlfuse:
    async def start(self, model: str, sequences: int, longest: int) -> None:
        from rlfuse.config.rollout import RolloutConfig
        from rlfuse.config.schema import ModelConfig
        from rlfuse.engines.vllm.rollout_worker import RolloutWorker
        from rlfuse.engines.vllm.setup import DECODE_SCHEDULER

        self.worker = RolloutWorker(0)
        kwargs = ENGINE | {"scheduler_cls": f"{DECODE_SCHEDULER}.AsyncDecodeScheduler"}
        rollout = RolloutConfig(kv_cache_memory_mb=4096, max_num_seqs=sequences, engine_kwargs=kwargs)
        await self.worker.start(ModelConfig(path=model, dtype="bfloat16"), rollout, longest, "cpu")

    async def generate(
        self, name: str, ids: Sequence[Sequence[int]], tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        import numpy as np

        from rlfuse.engines.rollout.engine_actor import EMPTY_PARTIAL, Request
        from rlfuse.protocols import Sampling

        requests = [
            Request(f"{name}/{i}", 1, 1000 + i, np.asarray(prompt, np.int32), EMPTY_PARTIAL)
            for i, prompt in enumerate(ids)
        ]
        found = {}
        async for some in self.worker.generate(requests, Sampling(1.0, 1.0, -1, tokens, stop=tuple(STOP))):
            found |= dict(some)
        return [(found[each.id].token_ids.tolist(), found[each.id].log_probs.tolist()) for each in requests]

    async def stop(self) -> None:
        await self.worker.stop()


def vllm_arguments(model: str, sequences: int, longest: int) -> dict[str, object]:
    return ENGINE | {
        "model": model,
        "dtype": "bfloat16",
        "max_model_len": longest,
        "max_num_seqs": sequences,
        "kv_cache_memory_bytes": 4096 << 20,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
    }


def sampling(seed: int, tokens: int) -> object:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    final = RequestOutputKind.FINAL_ONLY
    texts = {"stop": STOP, "include_stop_str_in_output": True, "skip_special_tokens": False, "detokenize": bool(STOP)}
    return SamplingParams(max_tokens=tokens, seed=seed, logprobs=0, output_kind=final, **texts)


def answer(output: object) -> tuple[list[int], list[float]]:
    [drawn] = output.outputs
    ids = list(drawn.token_ids)
    return ids, [entry[token].logprob for entry, token in zip(drawn.logprobs, ids, strict=True)]


class Async:
    async def start(self, model: str, sequences: int, longest: int) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from rlfuse.engines.vllm.engine_fork import forking

        arguments = AsyncEngineArgs(**vllm_arguments(model, sequences, longest))
        with forking("cpu", {}):  # a spawned process would lack the patches of `as_on_gpus`
            self.engine = AsyncLLM.from_engine_args(arguments)

    async def generate(
        self, name: str, ids: Sequence[Sequence[int]], tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        async def one(i: int, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
            final = None
            async for output in self.engine.generate(
                {"prompt_token_ids": prompt}, sampling(1000 + i, tokens), f"{name}/{i}"
            ):
                final = output
            return answer(final)

        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(ids)))

    async def stop(self) -> None:
        self.engine.shutdown()


class Offline:
    async def start(self, model: str, sequences: int, longest: int) -> None:
        from vllm import LLM

        self.llm = LLM(**vllm_arguments(model, sequences, longest))

    async def generate(
        self, name: str, ids: Sequence[Sequence[int]], tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        parameters = [sampling(1000 + i, tokens) for i in range(len(ids))]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in ids], parameters, use_tqdm=False)
        return [answer(output) for output in outputs]

    async def stop(self) -> None: ...


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Return microseconds of CPU time per token in the core and the front end, and a hash of the samples."""
    import null_executor

    null_executor.as_on_gpus()
    STOP.extend(options.stop)
    if options.own_runner:
        ENGINE.update(distributed_executor_backend="mp", worker_cls="null_executor.NullWorker")
    engine = {"rlfuse": Rlfuse, "AsyncLLM": Async, "LLM": Offline}[options.mode]()
    with tempfile.TemporaryDirectory() as folder:
        await engine.start(write_model(folder), options.sequences, PROMPT + options.tokens)
        ids = prompts(options.sequences)
        await engine.generate("warm", ids, 8)
        before, began = cpu_seconds(), time.perf_counter()
        answers = await engine.generate("measured", ids, options.tokens)
        wall, after = time.perf_counter() - began, cpu_seconds()
        await engine.stop()
    count = sum(len(tokens) for tokens, _ in answers)
    used = {part: 1e6 * (after[part] - before[part]) / count for part in after}
    digest = hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]
    return used | {"total": sum(used.values()), "wall": 1e6 * wall / count, "tokens": count, "sampled": digest}


def in_process(mode: str, options: argparse.Namespace) -> dict[str, object]:
    from rlfuse.engines.vllm.setup import rollout_env

    offline = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if mode == "LLM" else {}
    environment = os.environ | rollout_env("cpu") | {
        "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
    } | offline  # fmt: skip
    command = [
        sys.executable,
        __file__,
        "--mode",
        mode,
        f"--sequences={options.sequences}",
        f"--tokens={options.tokens}",
        *(f"--stop={text}" for text in options.stop),
        *["--own-runner"] * options.own_runner,
    ]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(mode, done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the medians as JSON, for h200_estimate.py --speed")
    parser.add_argument("--stop", action="append", default=[], help="a text that ends responses; may be repeated")
    parser.add_argument("--own-runner", action="store_true", help="the model runner in a process of its own")
    parser.add_argument("--mode", choices=MODES)
    options = parser.parse_args()
    if options.mode:
        print(json.dumps(asyncio.run(measure(options))))
        return
    runs = []
    for _ in range(options.repeats):
        runs.append({mode: in_process(mode, options) for mode in MODES})
        assert len({run["sampled"] for run in runs[-1].values()}) == 1, "tokens or log-probs differ"
    print("| CPU us per token | core | front end | both | x rlfuse |\n|---|---|---|---|---|")
    parts = ("core", "front", "total")
    medians = {mode: {part: statistics.median(run[mode][part] for run in runs) for part in parts} for mode in MODES}
    for mode, us in medians.items():
        ratio = statistics.median(run[mode]["total"] / run["rlfuse"]["total"] for run in runs)
        print(f"| {mode} | {us['core']:.2f} | {us['front']:.2f} | {us['total']:.2f} | {ratio:.2f} |")
    if options.out:
        options.out.write_text(json.dumps(medians, indent=1) + "\n")
    for part, (other, target) in TARGETS.items():
        ratio = statistics.median(run[other][part] / run["rlfuse"][part] for run in runs)
        print(f"{part}: {ratio:.2f}x less than {other} (target {target:g}x)")


if __name__ == "__main__":
    main()
