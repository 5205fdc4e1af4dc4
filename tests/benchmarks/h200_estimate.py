"""Estimate a step and the startup on one H200: as recorded, and with the changes in this tree.

    python tests/benchmarks/h200_estimate.py [--speed FILE] [--assume NAME ...]

Uses no GPU. Every term has its source. The column *recorded tree* sums the single costs of the recorded tree (f7d4a75)
and was within 20 % of the recorded total. The column *this tree* replaces the costs that a later change affects:
`CHANGES` names the code of each change and the assumption where nothing was measured. A change whose code is missing
counts as nothing, unless it is named in `--assume`. CPU time per token comes from `device_speed.py`: the numbers in
this file, or those that `device_speed.py --out FILE` has just measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
RECORD = "recorded"
"""One H200, 27 November 2026, rlfuse at f7d4a75: step durations from events, copies by `gpu_curves.py`."""

# CPU time per token: microseconds, 256 x 512 tokens, a null executor --------------------------------------------------

RECORDED_US = {"core": 14.5, "front": 12.4}
"""rlfuse at f7d4a75, on the reference machine of HOST_FACTOR."""
ASYNC_US = {"core": 14.6, "front": 8.3}
"""`AsyncLLM` on the same machine."""
MEASURED_US = {"rlfuse": {"core": 4.63, "front": 1.53}, "AsyncLLM": {"core": 27.51, "front": 17.07}}
"""`device_speed.py` today on another machine, both in one run; only their ratio is used."""

# The H200 and its host ------------------------------------------------------------------------------------------------

HOST_FACTOR = 2.6
"""CPU time on the H200's host over that on the machine of RECORDED_US: 14.5 us x 256 x 2.6 plus the runner's 3 ms are
12.7 ms; 11 to 15.7 ms were recorded."""
RUNNER_S = 3e-3
"""vLLM's model runner per decode step: 12 Triton launches, 30 torch operations, 5 copies."""
MESSAGES_S = 0.13e-3
"""CPU time of the core per decode step of 256 samples with the runner in another process (`device_speed.py`)."""
GRAPH_STEP_S = 2.5e-3
"""A decode step of the 0.5B on the device: 1 ms of kernels, 2 to 3 ms with the launches of CUDA graphs."""
MEMORY_BYTES_PER_S = 4.3e12
PIN_BYTES_PER_S, COPY_BYTES_PER_S = 1.6e9, 53e9
"""Pinning host memory for the first time; copies of pinned memory, 52 to 55 GB/s."""
RESET_S = 0.14e-6
"""Resetting a block of vLLM's KV cache (0.14 s per million), RESETS times per step."""
RESETS = 3
GRAPH_PASSES = {"scores": (3 * 5, 1.6e-3), "updates": (2 * 8, 5.1e-3)}
"""Passes of a quickstart step (old log-probs, reference, values: 5 micro-batches of 1,024 tokens each; actor, critic: 2
for each of 4 mini-batches), and CPU time of one, collation included, by `graph_launches.py`."""
ADMISSION_S, END_S, FAST_END_S = 0.5e-3, 0.54e-3, 0.23e-3
"""CPU time per sample on the machine of RECORDED_US: until it is scheduled, and from its last token to the driver."""


@dataclass(frozen=True, slots=True)
class Change:
    """The code of a change, and the assumption of the estimate."""

    file: str
    text: str
    assumes: str

    @property
    def built(self) -> bool:
        path = TREE / self.file
        return bool(self.text) and path.is_file() and self.text in path.read_text()


CHANGES = {
    "scheduler": Change(
        "rlfuse/engines/vllm/decode_scheduler.py",
        "class AsyncDecodeScheduler",
        "measured on CPUs: CPU time per token relative to AsyncLLM, and per finished sample (0.54 to 0.23 ms)",
    ),
    "runner process": Change(
        "rlfuse/engines/vllm/gpu_settings.py",
        '"distributed_executor_backend"',
        "scheduling and the model runner overlap; messages between the two take the core 0.13 ms a step (CPUs)",
    ),
    "logits": Change(
        "rlfuse/engines/trainer/micro_batch_losses.py",
        "temperature == 1.0",
        "bytes: float32 logits are neither copied forward nor backward at temperature 1",
    ),
    "fused log probs": Change(
        "rlfuse/engines/trainer/micro_batch_losses.py",
        "is_fused",
        "20 % of a pass: 43 of the 55 ms that logits take of 215 ms; three passes over bfloat16 logits take 3 ms",
    ),
    "queued batches": Change(
        "rlfuse/engines/trainer/transfers.py",
        "class DeviceTimes",
        "a micro-batch is collated while the device computes the last one, and none waits for it to end",
    ),
    "recorded passes": Change(
        "rlfuse/engines/trainer/cuda_graphs.py",
        "class PassGraphs",
        "measured on CPUs: CPU time of passes whose graphs compute nothing; a GPU computes alongside",
    ),
    "sharing": Change(
        "rlfuse/step/colocation.py",
        "sharing.alternates",
        "both sides fit: the memory plan counts 43 of 141 GB; no sleep, wake, copy, or emptied cache",
    ),
    "KV cap": Change(
        "rlfuse/engines/vllm/kv_cache.py",
        "def max_kv_cache_bytes",
        "mapping and resets scale with the cache's bytes",
    ),
    "pinned ahead": Change(
        "rlfuse/engines/trainer/offloading.py", "def start_pinning", "pinning ends before it is needed"
    ),
    "reserve": Change("rlfuse/engines/trainer/offloading.py", "def release_cached", "the plan has room for it"),
    "packed push": Change(
        "rlfuse/engines/vllm/rollout_worker.py",
        '"packed": True',
        "0.05 s for 1 GB, a goal that was not measured; the first push opens one handle and takes as long",
    ),
    "imports": Change(
        "rlfuse/run/inference.py", "actor.prepare.remote", "vLLM's import (10 s) overlaps with the ranks' start"
    ),
    "graph sizes": Change(
        "rlfuse/engines/vllm/gpu_settings.py", "def graph_sizes", "4 s less, not measured; 13 sizes, not 51"
    ),
    "compiled kernels": Change(
        "rlfuse/user_folders.py",
        "TORCHINDUCTOR_CACHE_DIR",
        "a second start: 10 to 20 s less, not measured, and 10 s of model inspection, which vLLM keeps itself",
    ),
    "forked core": Change(
        "rlfuse/engines/vllm/engine_fork.py", "def can_fork", "12 s less; on CPUs 8 to 10 s of CPU time"
    ),
    "concurrent start": Change(
        "rlfuse/run/starting.py",
        "let_engines_start()",
        "both sides fit: ranks load models while the engine starts, but for the 2 s until they have met; not measured",
    ),
    "joined passes": Change(
        "rlfuse/engines/trainer/trainer_group.py",
        "async def score(",
        "counted on CPUs: 19 calls to a rank for passes and optimizer steps become 13, of 118 in a quickstart step",
    ),
}


@dataclass(frozen=True, slots=True)
class Term:
    """Seconds of one cost in the recorded tree and in this one."""

    part: str
    name: str
    recorded: float
    now: float
    source: str


@dataclass(frozen=True, slots=True)
class Job:
    """Counts of a step."""

    samples: int
    tokens: int
    """Tokens of responses."""
    engine_steps: int
    """Number of decode steps of the engine."""


QUICKSTART = Job(samples=128, tokens=3_695, engine_steps=156)
"""Means of the first three steps of `experiment=quickstart trainer.n_gpus_per_node=1`, counted on CPUs; rewards of the
first two were the same on the H200."""
QUICKSTART_CALLS, JOINED_CALLS = 118, 118 - (19 - 13)
"""Ray calls in a quickstart step, by `fixed_costs.py` with one slot."""
"""Micro-batches in a quickstart step: of three passes without gradients, of forward and of backward passes. Medians of
11 steps: with 1,024 tokens for each by their spans, with 2,048 by their tokens (4,014 to 5,010 a pass, 1,614 at most a
mini-batch)."""
GRPO = Job(samples=256, tokens=256 * 512, engine_steps=512)
"""32 prompts x 8 responses, none of which ends before its 512th token."""
PARAMETERS, VOCABULARY, TRAINED = 0.494e9, 151_936, 147_000
STATES_BYTES, MOMENTS_BYTES = 14, 8
"""Per parameter on the rank: bf16 weight, float32 master, two moments; moments only from the first update on."""
MICRO_BATCH, PASSES_S, UPDATE_S = 13_848, 0.0920 + 0.1305, 0.181
"""Tokens; forward (78 to 106 ms) and backward (125 to 136 ms) of one; the optimizer."""
KV_CACHE, KV_USED = 50e9, 256 * 577 * 12_288
"""Bytes: as vLLM sized it, and 256 of the longest samples at 12 KB a token."""
KV_BLOCK = 16 * 12_288


class Estimate:
    """Terms of a step and of the startup, with the changes in `counted`."""

    def __init__(self, counted: Collection[str], measured_us: Mapping[str, Mapping[str, float]]):
        self.counted = counted
        ours, plain = measured_us["rlfuse"], measured_us["AsyncLLM"]
        self.now_us = {part: ASYNC_US[part] * ours[part] / plain[part] for part in ASYNC_US}

    def term(self, part: str, name: str, seconds: float, source: str, **replaced: float) -> Term:
        """Add a term; `replaced`: seconds with each change that affects it, the largest effect first."""
        changes = (value for change, value in replaced.items() if change.replace("_", " ") in self.counted)
        return Term(part, name, seconds, next(changes, seconds), source)

    def decode(self, job: Job, device_s: float) -> Term:
        """Add decoding; the core's single thread also runs the model, unless a separate process does."""

        def seconds(us: Mapping[str, float], own_process: bool) -> float:
            core, front = (1e-6 * us[part] * HOST_FACTOR * job.tokens / job.engine_steps for part in ("core", "front"))
            engine = max(core + MESSAGES_S * HOST_FACTOR, RUNNER_S) if own_process else core + RUNNER_S
            return job.engine_steps * max(engine, front, device_s)

        us = self.now_us if "scheduler" in self.counted else RECORDED_US
        now = seconds(us, "runner process" in self.counted)
        source = f"CPU time per token x {HOST_FACTOR:g} x tokens, {1e3 * RUNNER_S:g} ms x {job.engine_steps} steps"
        return Term("generation", "decoding", seconds(RECORDED_US, False), now, source)

    def samples(self, job: Job) -> list[Term]:
        def whole(each: float) -> float:
            return job.samples * each * HOST_FACTOR

        admission = f"{1e3 * ADMISSION_S:g} ms x {job.samples} samples x {HOST_FACTOR:g}"
        end = f"{1e3 * END_S:g} ms x {job.samples} samples x {HOST_FACTOR:g}"
        return [
            self.term("generation", "admission of samples", whole(ADMISSION_S), admission),
            self.term("generation", "ends of samples", whole(END_S), end, scheduler=whole(FAST_END_S)),
        ]

    def quickstart(self) -> list[Term]:
        """Add a step of PPO with critic and reference, float32, one slot."""
        push = 0.044 * HOST_FACTOR
        passes = HOST_FACTOR * sum(count * each for count, each in GRAPH_PASSES.values())
        return [
            self.decode(QUICKSTART, 0.0),
            *self.samples(QUICKSTART),
            self.term("hand-over", "sleep, wake and push", 1.0, f"{RECORD}; shared: a CPU push, 44 ms", sharing=push),
            self.term("hand-over", "resets of KV blocks", 0.2, RECORD, KV_cap=0.0),
            self.term("training", "launch-bound passes", 0.65, f"{RECORD}; graphs: CPU time", recorded_passes=passes),
            self.term(
                "other",
                "Ray",
                0.2,
                f"{RECORD}, {QUICKSTART_CALLS} calls",
                joined_passes=0.2 * JOINED_CALLS / QUICKSTART_CALLS,
            ),
        ]

    def grpo(self, first: bool) -> list[Term]:
        """Add a bfloat16 step; `first`: the first step, whose allocations and pinned buffers are reused later."""
        return [
            self.decode(GRPO, GRAPH_STEP_S),
            self.term("generation", "first decode step", 0.249, f"{RECORD}, unexplained"),
            *self.samples(GRPO),
            *self.training(),
            *(self.first_hand_over() if first else []),
            *self.hand_over(first),
            self.term("other", "Ray", 0.2, f"{RECORD} (quickstart)"),
        ]

    def training(self) -> list[Term]:
        batches = TRAINED / MICRO_BATCH
        copies = 4 * 4 * TRAINED * VOCABULARY / MEMORY_BYTES_PER_S
        passes, source = batches * PASSES_S, f"{RECORD}: {1e3 * PASSES_S:.0f} ms x {batches:.1f} micro-batches"
        fused, spared = 0.8 * passes, passes - copies
        return [
            self.term("training", "forward and backward", passes, source, fused_log_probs=fused, logits=spared),
            self.term("training", "collation", 2.5e-3 * batches, f"{RECORD}: 2 to 3 ms", queued_batches=0.0),
            self.term("training", "synchronisations", 2e-3 * batches, f"{RECORD}: 2 ms", queued_batches=0.0),
            self.term("training", "optimizer", UPDATE_S, RECORD),
        ]

    def first_hand_over(self) -> list[Term]:
        pinned = MOMENTS_BYTES * PARAMETERS / PIN_BYTES_PER_S
        return [
            self.term("hand-over", "first push", 2.2 - 0.32, RECORD, packed_push=0.0),
            self.term("hand-over", "pinning for moments", pinned, RECORD, sharing=0.0, pinned_ahead=0.0),
            self.term("hand-over", "first sleep: weights pinned", 1.4 - 0.06, RECORD, sharing=0.0),
        ]

    def hand_over(self, first: bool) -> list[Term]:
        share = KV_USED / KV_CACHE
        resets = RESETS * RESET_S * KV_CACHE / KV_BLOCK
        moved = STATES_BYTES * PARAMETERS * (1 if first else 2) / COPY_BYTES_PER_S
        return [
            self.term("hand-over", "push", 0.32, RECORD, packed_push=0.05),
            self.term("hand-over", "sleep", 0.06, RECORD, sharing=0.0),
            self.term("hand-over", "KV cache mapped", 0.38, RECORD, sharing=0.0, KV_cap=0.38 * share),
            self.term("hand-over", "resets of KV blocks", resets, "0.14 s a million", KV_cap=resets * share),
            self.term("hand-over", "states to and from the host", moved, f"{RECORD}: 53 GB/s", sharing=0.0),
            self.term("hand-over", "emptied cache", 0.075, f"{RECORD}: 50 to 100 ms", sharing=0.0, reserve=0.0),
        ]

    def start(self) -> list[Term]:
        """Add the startup from the command to the first step, with warm caches."""
        return [
            self.term("start", "driver's libraries", 13.0, RECORD),
            self.term("start", "ranks: imports", 13.0, f"{RECORD}: 12 to 14 s"),
            self.term("start", "ranks: models", 20.0, RECORD, concurrent_start=2.0),
            self.term("start", "engine: vLLM's import", 10.0, RECORD, imports=0.0),
            self.term("start", "engine: a new process", 12.0, "share of its start on CPUs", forked_core=0.0),
            self.term("start", "engine: model inspection", 10.0, RECORD, compiled_kernels=0.0),
            self.term("start", "engine: compilation", 15.0, "10 to 20 s", compiled_kernels=0.0),
            self.term("start", "engine: memory profiling", 4.5, "3 to 6 s", KV_cap=0.0),
            self.term("start", "engine: CUDA graphs", 6.0, RECORD, graph_sizes=2.0),
            self.term("start", "engine: weights and the rest", 94 - 57.5, "94 s less the above"),
        ]


@dataclass(frozen=True, slots=True)
class Total:
    """A sum of terms, with the recorded value and the target."""

    name: str
    recorded_s: float | None
    target_s: float | None
    terms: list[Term]

    @property
    def before(self) -> float:
        return sum(term.recorded for term in self.terms)

    @property
    def now(self) -> float:
        return sum(term.now for term in self.terms)

    @property
    def hand_over(self) -> float:
        """Return the current share of the step."""
        return sum(term.now for term in self.terms if term.part == "hand-over") / self.now

    def table(self) -> str:
        lines = [f"\n| {self.name} | recorded tree | this tree | source |\n|---|---|---|---|"]
        lines += [f"| {t.part}: {t.name} | {t.recorded:.2f} | {t.now:.2f} | {t.source} |" for t in self.terms]
        lines.append(f"| **seconds** | **{self.before:.2f}** | **{self.now:.2f}** | |")
        if self.recorded_s:
            lines.append(f"\nRecorded: {self.recorded_s:g} s; differs by {self.before / self.recorded_s - 1:+.0%}.")
        if self.target_s:
            lines.append(f"Target: {self.target_s:g} s, {'met' if self.now <= self.target_s else 'missed'}.")
        if any(term.part == "hand-over" for term in self.terms):
            lines.append(f"Hand-over: {self.hand_over:.0%} of the step now; target 5 %.")
        return "\n".join(lines)


def totals(counted: Collection[str], measured_us: Mapping[str, Mapping[str, float]] = MEASURED_US) -> list[Total]:
    """Return all estimates, with the changes in `counted`."""
    estimate = Estimate(counted, measured_us)
    return [
        Total("PPO quickstart, a step", 3.5, 0.8, estimate.quickstart()),
        Total("GRPO 0.5B, the first step", 14.6, None, estimate.grpo(first=True)),
        Total("GRPO 0.5B, later steps", None, 5.0, estimate.grpo(first=False)),
        Total("from command to first step", 140.0, 45.0, estimate.start()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", type=Path, help="what device_speed.py --out wrote")
    parser.add_argument("--assume", nargs="+", default=[], choices=CHANGES, help="changes that this tree lacks")
    options = parser.parse_args()
    measured = json.loads(options.speed.read_text()) if options.speed else MEASURED_US
    counted = {name for name, change in CHANGES.items() if change.built} | set(options.assume)
    for total in totals(counted, measured):
        print(total.table())
    print("\n| change | counted | assumption |\n|---|---|---|")
    for name, change in CHANGES.items():
        counts = "no" if name not in counted else "yes" if change.built else "assumed"
        print(f"| {name} | {counts} | {change.assumes} |")


if __name__ == "__main__":
    main()
