"""A step's scalars under verl's names: pure functions of its samples and spans.

Role: the metric log calls these once a step. Seconds come from the spans alone, so every chart can be traced to events.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlfuse.algorithms.shaping import zero_spread
from rlfuse.engines.scoring import PASSES
from rlfuse.engines.trainer.activation_places import Place
from rlfuse.engines.trainer.micro_batches import balance
from rlfuse.events import Span
from rlfuse.observe.idle import account, union
from rlfuse.samples import Group, Reward, RewardFailure, Sample


def sample_metrics(groups: Sequence[Group], n: int, max_prompt: int, max_response: int, ranks: int) -> dict[str, float]:
    """Rewards, lengths and balance of a step's samples; `groups` holds those of each prompt's `n` with a reward."""
    samples = [sample for group in groups for sample in group.samples]
    responses = np.array([len(sample.response.token_ids) for sample in samples])
    prompts = np.array([len(sample.prompt.token_ids) for sample in samples])
    metrics = _spread("critic/score", [sample.reward.value for sample in samples])
    metrics |= _spread("response_length", responses) | _spread("prompt_length", prompts)
    metrics["response_length/clip_ratio"] = float((responses >= max_response).mean())
    metrics["prompt_length/clip_ratio"] = float((prompts >= max_prompt).mean())
    return metrics | _flat(groups, n) | _parts(samples) | _balance(prompts + responses, ranks) | _trained(samples)


def _spread(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    return {f"{name}/mean": float(array.mean()), f"{name}/max": float(array.max()), f"{name}/min": float(array.min())}


def _flat(groups: Sequence[Group], n: int) -> dict[str, float]:
    """reward/frac_reward_zero_std: the share of groups whose rewards are all equal; with /{fn} behind it the same of
    each function by itself, where there are several. reward/groups_of_one: those of which only one reward did not
    fail, so that there is nothing to compare it with. reward/frac_gated: of samples at which a gate closed.
    """
    rewards = [[sample.reward for sample in group.samples] for group in groups]
    flat = zero_spread([[reward.value for reward in each] for each in rewards], n)
    metrics = {"reward/frac_reward_zero_std": float(np.mean(flat))}
    if n > 1:
        metrics["reward/groups_of_one"] = float(sum(len(each) == 1 for each in rewards))
    names = dict.fromkeys(name for each in rewards for reward in each for name in reward.dimensions)
    for name in names if len(names) > 1 else ():
        asked = [[r.dimensions[name] for r in each if name in r.dimensions] for each in rewards]
        flat = zero_spread([values for values in asked if values], n)
        metrics[f"reward/frac_reward_zero_std/{name}"] = float(np.mean(flat))
    gates = [reward.gate is not None for each in rewards for reward in each]
    return metrics | {"reward/frac_gated": float(np.mean(gates))}


def _parts(samples: Sequence[Sample]) -> dict[str, float]:
    """rewards/{fn}/mean and std of every named part, over the samples that have it."""
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.reward.parts.items():
            parts[name].append(value)
    return _over_each("rewards", parts, "mean", "std")


def _over_each(prefix: str, found: Mapping[str, Sequence[float]], *kinds: str) -> dict[str, float]:
    """{prefix}/{name}/{kind} of each name's values; `kinds`: functions of NumPy."""
    return {f"{prefix}/{name}/{kind}": float(getattr(np, kind)(found[name])) for name in found for kind in kinds}


def _balance(tokens: np.ndarray, ranks: int) -> dict[str, float]:
    """Tokens per rank as they came and as they were balanced."""
    came = [int(share.sum()) for share in np.array_split(tokens, ranks)]
    balanced = [int(tokens[share].sum()) for share in balance(tokens.tolist(), ranks)]
    return {
        "global_seqlen/min": min(came),
        "global_seqlen/max": max(came),
        "global_seqlen/minmax_diff": max(came) - min(came),
        "global_seqlen/balanced_min": min(balanced),
        "global_seqlen/balanced_max": max(balanced),
        "global_seqlen/mean": float(np.mean(came)),
    }


def _trained(samples: Sequence[Sample]) -> dict[str, float]:
    """Advantages, returns and values, where the step trained."""
    if "advantages" not in samples[0].tensors:
        return {}
    tensors = {
        name: np.concatenate([sample.tensors[name] for sample in samples])
        for name in ("advantages", "returns", "values")
        if name in samples[0].tensors
    }
    metrics = _spread("critic/rewards", [float(sample.tensors["token_rewards"].sum()) for sample in samples])
    for name, values in tensors.items():
        metrics |= _spread(f"critic/{name}", values)
    if "values" in tensors and (spread := tensors["returns"].var()) > 0:
        metrics["critic/vf_explained_var"] = float(1 - (tensors["returns"] - tensors["values"]).var() / spread)
    return metrics


def failure_metrics(failures: Iterable[tuple[Sample, RewardFailure]]) -> dict[str, float]:
    """reward/failures/{fn}: samples without a reward."""
    counts = Counter(failure.function for _, failure in failures)
    return {f"reward/failures/{name}": float(count) for name, count in counts.items()}


def latency_metrics(spans: Iterable[Span]) -> dict[str, float]:
    """reward/latency_s/{fn}/mean and max: seconds of a function's calls, repeated ones included."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.kind == "reward" and "function" in span.attributes:
            seconds[span.attributes["function"]].append(span.seconds)
    return _over_each("reward/latency_s", seconds, "mean", "max")


def validation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """val-core/{data_source}/{acc or reward}/mean@N, every other reward part under val-aux."""
    sources: dict[str, list[Sample]] = defaultdict(list)
    for group in groups:
        sources[group.prompt.data_source] += group.samples
    metrics: dict[str, float] = {}
    n = max(len(group.samples) for group in groups)
    for source, samples in sources.items():
        scored = [sample.reward for sample in samples if isinstance(sample.reward, Reward)]
        figures: dict[str, list[float]] = {"reward": [reward.value for reward in scored]}
        for reward in scored:
            for name, value in reward.parts.items():
                figures.setdefault(name.rsplit("/", 1)[-1] if name.endswith("/acc") else name, []).append(value)
        core = "acc" if "acc" in figures else "reward"
        for name, values in figures.items():
            section = "val-core" if name == core else "val-aux"
            metrics[f"{section}/{source}/{name}/mean@{n}"] = float(np.mean(values)) if values else float("nan")
        metrics[f"val-aux/{source}/response_length/mean@{n}"] = float(
            np.mean([len(sample.response.token_ids) for sample in samples])
        )
    return metrics


def repetition(spans: Sequence[Span], samples: Mapping[str, Sample]) -> dict[str, float]:
    """perf/tokens_run_over_unique of the passes without gradients: 1 where every prompt ran once for all its answers.

    Padding up to the degree of sequence parallelism counts as run.
    """
    run = unique = 0
    for kind in PASSES:
        ran = [span for span in spans if span.kind == kind and "run" in span.attributes and span.samples]
        mine = [span for span in ran if samples.keys() >= set(span.samples)]
        run += sum(span.attributes["run"] for span in mine)
        scored = [samples[name] for name in {name for span in mine for name in span.samples}]
        prompts = {sample.prompt.index: len(sample.prompt.token_ids) for sample in scored}
        unique += sum(prompts.values()) + sum(len(sample.response.token_ids) for sample in scored)
    return {"perf/tokens_run_over_unique": run / unique} if unique else {}


def balance_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """balance/makespan_over_bound/mean, /max and /min of passes over all ranks, by what they were predicted to take.

    The bound is the larger of all work shared out evenly and of what long rows take (`makespan.bounds`); above 1 is
    what ranks wait for each other. balance/frac_bound_by_longest: the share of passes that long rows keep from ending
    sooner.
    """
    told = [span.attributes for span in spans if span.kind == "plan" and "makespan" in span.attributes]
    if not told:
        return {}
    ratios = [each["makespan"] / max(each["even"], each["longest"]) for each in told]
    longest = float(np.mean([each["longest"] > each["even"] for each in told]))
    return _spread("balance/makespan_over_bound", ratios) | {"balance/frac_bound_by_longest": longest}


TIMED = ("gen", "reward", *PASSES, "adv", "update_critic", "update_actor", "update_weights")
TIMED += ("save_checkpoint", "testing", "step")


def time_metrics(spans: Sequence[Span], tokens: dict[str, int], slots: int) -> dict[str, float]:
    """timing_s/* (seconds in which that work was under way), milliseconds per token, throughput per slot.

    `tokens` gives the tokens that each kind of work is counted by; `gen` by responses, the rest by whole sequences.
    """
    seconds = {kind: covered(_on_driver(spans, kind)) for kind in TIMED}
    metrics: dict[str, float] = {f"timing_s/{kind}": value for kind, value in seconds.items() if value}
    for kind, value in seconds.items():
        if value and tokens.get(kind):
            metrics[f"timing_per_token_ms/{kind}"] = 1000 * value / tokens[kind]
    if seconds["step"]:
        metrics["perf/time_per_step"] = seconds["step"]
        metrics["perf/throughput"] = tokens["step"] / seconds["step"] / slots
    metrics["perf/total_num_tokens"] = tokens["step"]
    return metrics


def video_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """video/prefill_s: seconds in which an engine read prompts, the most of any; video/degree of the passes."""
    prefill: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "decode" and span.attributes.get("prefill_tokens"):
            prefill[span.where].append(span)
    degrees = [span.attributes["degree"] for span in spans if "degree" in span.attributes]
    return {
        "video/prefill_s": max(map(covered, prefill.values()), default=0.0),
        "video/degree": float(np.mean(degrees)) if degrees else 1.0,
    }


def _on_driver(spans: Sequence[Span], kind: str) -> list[Span]:
    """The controller's own spans of a kind; what it did to validate counts as `testing` alone."""
    return [span for span in spans if span.kind == kind and span.where == "driver" and span.cause != "testing"]


def covered(spans: Iterable[Span]) -> float:
    """Seconds covered by at least one of the spans."""
    return sum(end - start for start, end in union(spans))


def fusion_metrics(spans: Sequence[Span], slots: int, width: int = 1) -> dict[str, float]:
    """What ran beside generation: samples scored, learned from and moved; and the share of slots' time without work.

    `slots`: engines; `width`: trainer ranks on each.
    """
    generated = _on_driver(spans, "gen")
    steps = _on_driver(spans, "step")
    if not generated or not steps:
        return {}
    step = account(spans, steps[0].start, steps[0].end, slots * width, width)
    last = max(span.end for span in generated)

    def early(*kinds: str) -> float:
        found = [span for kind in kinds for span in _on_driver(spans, kind) if span.start < last]
        return float(len({sample for span in found for sample in span.samples}))

    return {
        "fusion/samples_overlapped": early("reward", *PASSES),
        "fusion/samples_trained_in_tail": early("update_critic", "update_actor"),
        "fusion/samples_moved": float(sum(len(span.samples) for span in _on_driver(spans, "move"))),
        "fusion/idle_share": step.idle_share,
    }


def utilisation(spans: Sequence[Span], facts: dict[str, Any], ranks: int, tokens: int, epochs: int) -> dict[str, float]:
    """perf/mfu/*: model FLOPs (6 per parameter and token trained, 2 per token generated) over what the slots could do.

    What a slot could do is its rate of large matrix products in the model's dtype, measured at start-up.
    """
    if "peak_flops" not in facts:
        return {}
    work = {"actor": ("update_actor", 6 * epochs), "critic": ("update_critic", 6 * epochs), "actor_infer": ("gen", 2)}
    metrics = {}
    for name, (kind, per_token) in work.items():
        if seconds := covered(_on_driver(spans, kind)):
            done = per_token * facts["parameters"] * tokens
            metrics[f"perf/mfu/{name}"] = done / (seconds * ranks * facts["peak_flops"])
    return metrics


def garbage_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """timing_s/gc: seconds in which a process collected garbage; perf/gc_unplanned: collections at no step's end."""
    found = [span for span in spans if span.kind == "gc"]
    unplanned = sum(span.cause in ("memory", "python") for span in found)
    return {"timing_s/gc": covered(found), "perf/gc_unplanned": float(unplanned)} if found else {}


def memory_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """perf/max_memory_allocated_gb: the most that a trainer rank's device held, on GPUs. timing_s/optimizer_wait:
    seconds for which updates waited for optimizer state to come to the device, the most of any rank. And those of
    `activation_metrics`."""
    peaks = [span.attributes["max_memory"] for span in spans if "max_memory" in span.attributes]
    waited: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "optimizer_wait":
            waited[span.where].append(span)
    found = {"timing_s/optimizer_wait": max(map(covered, waited.values()))} if waited else {}
    found |= {"perf/max_memory_allocated_gb": max(peaks) / 2**30} if peaks else {}
    return found | activation_metrics(spans)


def activation_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """perf/activation_offload/{device,host,disk,again}: share of the layers of training micro-batches whose activations
    stayed, were copied to host memory or to disk, or were recomputed; perf/activation_offload/{host,disk}_gb: bytes
    that all ranks copied there, in GB. None without model.enable_activation_offload.
    """
    names = [f"layers_{place}" for place in Place] + [f"{place}_bytes" for place in Place]
    totals: Counter[str] = Counter()
    for span in spans:
        if span.kind == "forward":
            totals.update({name: span.attributes[name] for name in names if name in span.attributes})
    layers = sum(totals[f"layers_{place}"] for place in Place)
    if not layers:
        return {}
    found = {place: totals[f"layers_{place}"] / layers for place in Place}
    found |= {f"{place}_gb": totals[f"{place}_bytes"] / 2**30 for place in Place if f"{place}_bytes" in totals}
    return {f"perf/activation_offload/{name}": value for name, value in found.items()}
