"""Memory that `rlfuse plan` predicts for CPU hosts, against the peaks of real ranks and real engines.

    python tests/benchmarks/memory_peaks.py                # all cases, minutes each; or the names of some
    python tests/benchmarks/memory_peaks.py --returned     # the same with a heap without fragmentation

Each case loads its models in fresh processes. There a `TrainerRank` with initialised optimizers runs all calls of a
step on the largest micro-batches of the plan, or vLLM generates as many concurrent samples as it admits. The peak is
the process's peak resident memory above its level before the models were loaded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import AutoModelForCausalLM

from rlfuse.cluster.host_memory import resident_mib
from rlfuse.config.schema import Config
from rlfuse.engines.memory.activations import worst_micro_batches
from rlfuse.engines.memory.estimate import GIB, MIB, Budget, Memory, memory_of
from rlfuse.engines.memory.model_sizes import shapes_of
from rlfuse.engines.memory.tracing import SequenceLengths
from rlfuse.engines.trainer.rank_group import MALLOC_SETTINGS
from rlfuse.samples import MicroBatch, Row

WIDTHS = dict(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4,
    vocab_size=32000, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
TIED = {"tie_word_embeddings": True}
SPARSE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512, intermediate_size=512, head_dim=64)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", TIED),
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", TIED | {"head_dim": 128}),
    "gemma3": ("Gemma3TextConfig", TIED | {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "qwen3_moe": ("Qwen3MoeConfig", SPARSE),
}
SECONDS = 3600
"""Time limit for a process of a case, generous because memory is measured, also on a busy machine."""
STEPS = 3
"""Steps of a rank: remaining blocks fragment its heap differently after each step."""
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
"""glibc settings that return freed memory to the system; ranks of a run keep it (`rank_group.MALLOC_SETTINGS`)."""
HOLES = "heap fragmentation"
"""Part of the plan for a heap that keeps freed memory."""


@dataclass(frozen=True)
class Case:
    """A job on CPUs; `roles`: the models of a rank, or only `engine`."""

    model: str
    roles: tuple[str, ...] = ("actor",)
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


ALL, PPO = ("actor", "critic", "reference"), ("actor", "critic")
BF16, RECOMPUTE = {"model.dtype": "bfloat16"}, {"model.enable_gradient_checkpointing": True}
CASES = {
    "actor": Case("qwen2", settings={"actor.zero_stage": 0}),
    "actor, own head": Case("llama", settings={"actor.zero_stage": 1}),
    "actor, wide heads": Case("gemma3", settings={"actor.zero_stage": 1}),
    "actor, experts": Case("qwen3_moe", settings={"actor.zero_stage": 0}),
    "actor, bfloat16 summed in float32": Case("llama", settings={"actor.zero_stage": 0} | BF16),
    "actor, short answers": Case("qwen2", settings={"data.max_prompt_length": 16, "data.max_response_length": 48}),
    "actor and reference": Case("qwen3", ("actor", "reference"), settings={"actor.use_kl_loss": True}),
    "actor and critic": Case("qwen2", PPO, settings={"actor.zero_stage": 1}),
    "all, recomputed": Case("llama", ALL, settings={"algorithm.use_kl_in_reward": True} | RECOMPUTE),
    "two ranks, ZeRO 1": Case("qwen2", PPO, 2, {"actor.zero_stage": 1} | BF16),
    "two ranks, ZeRO 2": Case("llama", PPO, 2, {"actor.zero_stage": 2}),
    "two ranks, ZeRO 3": Case("llama", ALL, 2, {"actor.zero_stage": 3, "algorithm.use_kl_in_reward": True}),
    "two ranks, shared layers": Case("qwen2", PPO, 2, {"training.tensor_model_parallel_size": 2}),
    "engine": Case("qwen2", ("engine",)),
    "engine, own head": Case("llama", ("engine",), settings=BF16),
    "engine, experts": Case("qwen3_moe", ("engine",)),
}


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; all if none is given")
    parser.add_argument("--parts", action="store_true", help="also what the plan counts")
    parser.add_argument("--returned", action="store_true", help="ranks give back what is freed: no holes")
    arguments = parser.parse_args()
    heap = RETURNED if arguments.returned else MALLOC_SETTINGS
    print("| | model | planned MiB | measured MiB | off by |\n|---|---|---|---|---|", flush=True)
    for name in arguments.names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(CASES[name], Path(folder))
            parts = planned(config, CASES[name].roles)
            if arguments.returned:
                parts = [(what, size) for what, size in parts if HOLES not in what]
            ours, theirs = sum(size for _, size in parts), measured(config, CASES[name], heap)
        print(f"| {name} | {CASES[name].model} | {ours:.0f} | {theirs:.0f} | {ours / theirs - 1:+.1%} |", flush=True)
        for what, size in parts if arguments.parts else ():
            print(f"    {size:8.0f} {what}", flush=True)


def config_of(case: Case, folder: Path, widths: dict[str, Any] | None = None) -> Config:
    """Return the case as a job, with random weights in `folder`; `widths`: replaces the default widths."""
    kind, sizes = MODELS[case.model]
    given = getattr(transformers, kind)(**(WIDTHS | sizes | (widths or {})))
    AutoModelForCausalLM.from_config(given).save_pretrained(folder)
    config = Config()
    config.model.path, config.model.dtype, config.cluster.device = str(folder), "float32", "cpu"
    config.trainer.n_gpus_per_node = case.ranks
    config.data.max_prompt_length, config.data.max_response_length = 128, 384
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n = 16, 16, 1
    config.actor.ppo_max_token_len_per_gpu, config.rollout.max_num_seqs = 2048, 16
    config.rollout.kv_cache_memory_mb = 512
    config.algorithm.adv_estimator = "gae" if "critic" in case.roles else "reinforce"
    config.algorithm.use_kl_in_reward = config.actor.use_kl_loss = False
    for key, value in case.settings.items():
        node = config
        *rooms, last = key.split(".")
        for room in rooms:
            node = getattr(node, room)
        setattr(node, last, value)
    return config


def planned(config: Config, roles: tuple[str, ...]) -> list[tuple[str, float]]:
    """Return the planned MiB of each part of these roles."""
    memory: Memory = memory_of(config, shapes_of(config), Budget("cpu", 64 * GIB))
    return [(f"{part.role}: {part.what}", part.size / MIB) for part in memory.parts if part.role in roles]


def measured(config: Config, case: Case, heap: Mapping[str, str]) -> float:
    """Return the maximum MiB over processes; raises TimeoutError, or an error with the message of a process."""
    context = multiprocessing.get_context("spawn")
    answers_queue, meeting = context.Queue(), context.Queue()
    work = _engine if case.roles == ("engine",) else _rank
    for key in MALLOC_SETTINGS:
        os.environ.pop(key, None)
    os.environ |= heap if work is _rank else {}  # engines of a run do not have them either
    processes = [
        context.Process(target=_report, args=(work, config, i, answers_queue, meeting)) for i in range(case.ranks)
    ]
    try:
        for process in processes:
            process.start()
        answers = [answers_queue.get(timeout=SECONDS) for _ in processes]
    finally:
        for process in processes:
            process.terminate()
    if failed := [answer for answer in answers if isinstance(answer, str)]:
        raise RuntimeError(failed[0])
    return max(answers)


def _report(work: Any, config: Config, number: int, answers_queue: Any, meeting: Any) -> None:
    try:
        answers_queue.put(work(config, number, meeting))
    except BaseException as error:
        answers_queue.put(f"{type(error).__name__}: {error}")
        raise


def _rank(config: Config, number: int, meeting: Any) -> float:
    from rlfuse.engines.trainer.trainer_rank import TrainerRank

    rank = TrainerRank(config, number, config.slots, "cpu", number % (os.cpu_count() or 1))
    rank.load_extensions()
    if number == 0:
        where = rank.meeting_place()
        for _ in range(config.slots - 1):
            meeting.put(where)
    else:
        where = meeting.get(timeout=SECONDS)
    rank.join(where)
    _warm_up()
    before = _reset_peak()
    rank.setup()
    _step(rank, [], [_micro_batch(SequenceLengths(((8, 8),)))])
    large = [[_micro_batch(texts) for texts in worst_micro_batches(config, False, learns)] for learns in (False, True)]
    large[1].append(large[1][0])  # the most logits without gradients and, in the plan, with gradients
    for _ in range(STEPS):
        _step(rank, *large)
    return _peak() - before


def _step(rank: Any, passed: list[MicroBatch], learned: list[MicroBatch]) -> None:
    """Run all calls of a step on a rank; it may continue with the actor after its share of the critic, before either
    optimizer steps."""
    for name in ("actor", "ref"):
        if passed and name in rank.engines:
            rank.score((name,), passed)
    if passed and "critic" in rank.engines:
        rank.score(("critic",), passed)
    trained = [name for name in ("critic", "actor") if name in rank.engines]
    for name in trained:
        rank.accumulate((name,), learned)
    for name in trained:
        rank.step(name, 1.0)


def _micro_batch(texts: SequenceLengths) -> MicroBatch:
    draw = np.random.default_rng(0)
    names = ("old_log_probs", "advantages", "ref_log_probs", "values", "returns")
    rows = [
        Row(
            draw.integers(3, 30000, prompt, dtype=np.int32),
            draw.integers(3, 30000, response, dtype=np.int32),
            {name: draw.normal(-1, 0.1, response).astype(np.float32) for name in names},
        )
        for prompt, response in texts.lengths
    ]
    return MicroBatch(tuple(rows))


def _engine(config: Config, number: int, meeting: Any) -> float:
    from rlfuse.engines.vllm.setup import engine_arguments, rollout_env

    os.environ |= rollout_env("cpu") | {"VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    longest = config.data.max_prompt_length + config.data.max_response_length
    arguments = engine_arguments(config.model, config.rollout, longest, "cpu")
    _warm_up()
    before = _reset_peak()
    engine = LLM(**arguments, skip_tokenizer_init=True)
    draw = np.random.default_rng(0)
    lengths = (config.data.max_prompt_length, config.data.max_response_length)
    prompts = [{"prompt_token_ids": draw.integers(3, 30000, lengths[0]).tolist()} for _ in range(64)]
    engine.generate(prompts, SamplingParams(max_tokens=lengths[1], ignore_eos=True, logprobs=0, detokenize=False))
    return _peak() - before


def _warm_up() -> None:
    """Run matrix products, since the libraries that they load are not memory of the model."""
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(64, 64, dtype=dtype)
        layer(torch.ones(64, 64, dtype=dtype)).sum().backward()


def _reset_peak() -> int:
    """Reset the peak; return the current MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_mib()


def _peak() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
