"""Compute the scalars of a step from its samples and spans, under the names of verl. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlfuse.algorithms.shaping import has_zero_std
from rlfuse.engines.trainer.activation_placement import Place
from rlfuse.engines.trainer.micro_batches import balance
from rlfuse.events import Span, covered, union
from rlfuse.observe.best_of_n import best_at, majority_at, sizes, worst_at
from rlfuse.observe.idle import account, split_by
from rlfuse.samples import Group, Partial, Reward, RewardFailure, Sample, flattened
from rlfuse.step.scoring import PASSES

RESPONSE_LENGTH = "response_length"


def sample_metrics(
    groups: Sequence[Group],
    trained: Sequence[Group],
    n: int,
    max_prompt: int,
    max_response: int,
    ranks: int,
    *,
    partials: Mapping[str, Partial] | None = None,
    logged: Iterable[str] = (),
) -> dict[str, float]:
    """Return rewards, lengths and balance of the samples of a step.

    `groups`: all groups of `n` samples, before selection; `trained`: groups that the step trained on; `logged`: names
    of reward parts in earlier steps.
    """
    samples = [sample for group in groups for sample in group.samples]
    finished = [sample for sample in samples if sample.response is not None]
    rewards = [sample.reward for sample in finished if isinstance(sample.reward, Reward)]
    prompts = np.array([len(sample.prompt.token_ids) for sample in samples])
    lengths = np.array([_generated(sample, partials or {}) for sample in samples])
    metrics = _spread("prompt_length", prompts) | {"prompt_length/clip_ratio": float((prompts >= max_prompt).mean())}
    whole = np.array([sample.response.length for sample in finished])
    for name, each in ((RESPONSE_LENGTH, lengths), (f"{RESPONSE_LENGTH}_non_aborted", whole)):
        if len(each):
            metrics |= _spread(name, each) | {f"{name}/clip_ratio": float((each >= max_response).mean())}
    metrics["response/aborted_ratio"] = (len(samples) - len(finished)) / len(samples)
    if total := whole.sum():  # unbiased estimate from all responses, not only those trained on
        metrics["response/entropy"] = -float(sum(sample.response.log_probs.sum() for sample in finished) / total)
    if rewards:
        metrics |= _spread("critic/score", [reward.value for reward in rewards])
        metrics["reward/frac_gated"] = float(np.mean([reward.gate is not None for reward in rewards]))
        metrics |= _flat(groups, n) | _parts(rewards, logged)
    if learned := [sample for group in trained for sample in group.samples]:
        metrics |= _balance(np.array([sample.tokens for sample in learned]), ranks) | _trained(learned)
    return metrics


def _generated(sample: Sample, partials: Mapping[str, Partial]) -> int:
    if sample.response is not None:
        return sample.response.length
    return len(partials[sample.id].token_ids) if sample.id in partials else 0


def _spread(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    return {f"{name}/mean": float(array.mean()), f"{name}/max": float(array.max()), f"{name}/min": float(array.min())}


def _flat(groups: Sequence[Group], n: int) -> dict[str, float]:
    """Return the share of groups with equal rewards, in total and per function, and the number with one reward."""
    scored = [[sample.reward for sample in group.samples] for group in groups]
    scored = [each for each in scored if None not in each]  # groups with aborted samples are not comparable
    rewards = [[reward for reward in each if isinstance(reward, Reward)] for each in scored]
    rewards = [each for each in rewards if each]
    flat = has_zero_std([[reward.value for reward in each] for each in rewards], n)
    metrics = {"reward/frac_reward_zero_std": float(np.mean(flat))} if flat else {}
    if n > 1:
        metrics["reward/groups_with_one_reward"] = float(sum(len(each) == 1 for each in rewards))
    names = dict.fromkeys(name for each in rewards for reward in each for name in reward.dimensions)
    for name in names if len(names) > 1 else ():
        values_by_group = [[r.dimensions[name] for r in each if name in r.dimensions] for each in rewards]
        flat = has_zero_std([values for values in values_by_group if values], n)
        metrics[f"reward/frac_reward_zero_std/{name}"] = float(np.mean(flat))
    return metrics


def _parts(rewards: Sequence[Reward], logged: Iterable[str]) -> dict[str, float]:
    """Return mean, std and coverage of each part over the samples that its function applies to.

    As in TRL, None does not count. A part that is missing because of a gate counts as 0.
    """
    metrics = {}
    for name in dict.fromkeys([*(name for reward in rewards for name in reward.parts), *logged]):
        values = [reward.parts.get(name, 0.0) for reward in rewards if name in reward.parts or _applies(name, reward)]
        if values:
            metrics |= {f"rewards/{name}/{kind}": float(getattr(np, kind)(values)) for kind in ("mean", "std")}
            metrics[f"rewards/{name}/coverage"] = float(np.mean([name in reward.parts for reward in rewards]))
    return metrics


def _applies(part: str, reward: Reward) -> bool:
    return any(part == function or part.startswith(f"{function}/") for function in reward.dimensions)


def _over_each(prefix: str, found: Mapping[str, Sequence[float]], *kinds: str) -> dict[str, float]:
    return {f"{prefix}/{name}/{kind}": float(getattr(np, kind)(found[name])) for name in found for kind in kinds}


def _balance(tokens: np.ndarray, ranks: int) -> dict[str, float]:
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
    if "advantages" not in samples[0].tensors:
        return {}
    masks = [sample.response.mask for sample in samples]
    tensors = {
        name: flattened([sample.tensors[name] for sample in samples], masks)
        for name in ("advantages", "returns", "values")
        if name in samples[0].tensors
    }
    metrics = {}
    if all(isinstance(sample.reward, Reward) for sample in samples):
        metrics |= _spread("critic/rewards", [float(sample.tensors["token_rewards"].sum()) for sample in samples])
    for name, values in tensors.items():
        metrics |= _spread(f"critic/{name}", values)
    if "values" in tensors and (spread := tensors["returns"].var()) > 0:
        metrics["critic/vf_explained_var"] = float(1 - (tensors["returns"] - tensors["values"]).var() / spread)
    return metrics


def failure_metrics(failures: Iterable[tuple[Sample, RewardFailure]]) -> dict[str, float]:
    """Return reward/failures/{function}: number of samples without a reward."""
    counts = Counter(failure.function for _, failure in failures)
    return {f"reward/failures/{name}": float(count) for name, count in counts.items()}


def latency_metrics(spans: Iterable[Span]) -> dict[str, float]:
    """Return reward/latency_s/{function}/{mean,max}: seconds of its calls, including repeated ones."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.kind == "reward" and "function" in span.attributes:
            seconds[span.attributes["function"]].append(span.seconds)
    return _over_each("reward/latency_s", seconds, "mean", "max")


def validation_metrics(groups: Sequence[Group], logged: Collection[str] = ()) -> dict[str, float]:
    """Return val-core/{data_source}/{acc or reward}/mean@N, other parts as val-aux, and coverage@N.

    With N > 1 responses per prompt, also best@N/mean and, if a response has a `pred`, maj@N/mean; val-aux has them for
    fewer responses, and worst@N/mean. A missing part counts as 0. `logged`: names of the previous validation, which
    decide between acc and reward. If they do not, and all rewards are gated, both are logged.
    """
    sources: dict[str, list[Sample]] = defaultdict(list)
    for group in groups:
        sources[group.prompt.data_source] += group.samples
    metrics: dict[str, float] = {}
    n = max(len(group.samples) for group in groups)
    for source, samples in sources.items():
        of_source = [group for group in groups if group.prompt.data_source == source]
        scored = [sample.reward for sample in samples if isinstance(sample.reward, Reward)]
        parts = _validation_parts(scored)
        core, aux = (logged_parts(logged, f"{section}/{source}/", f"/mean@{n}") for section in ("val-core", "val-aux"))
        if len(core) != 1:  # not decided by an earlier validation
            unknown = all(reward.gate is not None for reward in scored)
            core = ["acc", "reward"] if unknown else ["acc"] if "acc" in parts else ["reward"]
        aux = [name for name in dict.fromkeys([*parts, *aux]) if [name] != core]
        for section, name in [*(("val-core", name) for name in core), *(("val-aux", name) for name in aux)]:
            values = parts.get(name, [])
            metrics[f"{section}/{source}/{name}/mean@{n}"] = sum(values) / len(scored) if scored else math.nan
            metrics[f"val-aux/{source}/{name}/coverage@{n}"] = len(values) / len(samples)
        for name in core:
            metrics |= _of_several_responses(of_source, source, name, n)
        metrics[f"val-aux/{source}/{RESPONSE_LENGTH}/mean@{n}"] = float(
            np.mean([sample.response.length for sample in samples])
        )
    return metrics


def _of_several_responses(groups: Sequence[Group], source: str, name: str, n: int) -> dict[str, float]:
    """Return best@k/mean, worst@k/mean and maj@k/mean of the part `name` for k up to `n` responses, over prompts."""
    answered = [[each for sample in group.samples if isinstance(each := sample.reward, Reward)] for group in groups]
    answered = [rewards for rewards in answered if rewards]
    scores = [[(each.accuracy or 0.0) if name == "acc" else each.value for each in rewards] for rewards in answered]
    answers = [[each.pred for each in rewards] for rewards in answered]
    votes = any(answer is not None for each in answers for answer in each)
    metrics = {}
    for k in sizes(n) if answered else ():
        section = f"val-core/{source}/{name}" if k == n else f"val-aux/{source}/{name}"
        metrics[f"{section}/best@{k}/mean"] = float(np.mean([best_at(each, k) for each in scores]))
        metrics[f"val-aux/{source}/{name}/worst@{k}/mean"] = float(np.mean([worst_at(each, k) for each in scores]))
        if votes:
            majority = [majority_at(each, voted, k) for each, voted in zip(scores, answers, strict=True)]
            metrics[f"{section}/maj@{k}/mean"] = float(np.mean(majority))
    return metrics


def _validation_parts(scored: Sequence[Reward]) -> dict[str, list[float]]:
    parts: dict[str, list[float]] = {"reward": [reward.value for reward in scored]}
    for reward in scored:
        named = {name: value for name, value in reward.parts.items() if name not in reward.accuracies}
        if reward.accuracy is not None:
            named["acc"] = reward.accuracy
        for name, value in named.items():
            parts.setdefault(name, []).append(value)
    return parts


def logged_parts(logged: Iterable[str], prefix: str, suffix: str) -> list[str]:
    """Return the names of reward parts in these metric names."""
    found = [name[len(prefix) : -len(suffix)] for name in logged if name.startswith(prefix) and name.endswith(suffix)]
    return [name for name in found if name != RESPONSE_LENGTH]


def repetition(spans: Sequence[Span], samples: Mapping[str, Sample]) -> dict[str, float]:
    """Return perf/computed_over_unique_tokens of passes without gradients, with padding; 1 if each prompt ran once."""
    run = unique = 0
    for kind in PASSES:
        ran = [span for span in spans if span.kind == kind and "run" in span.attributes and span.samples]
        mine = [span for span in ran if samples.keys() >= set(span.samples)]
        run += sum(span.attributes["run"] for span in mine)
        unique += _tokens_run([samples[name] for name in {name for span in mine for name in span.samples}])[0]
    return {"perf/computed_over_unique_tokens": run / unique} if unique else {}


def balance_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """Return balance/makespan_over_bound/{mean,max,min}, the predicted time over the bound of `makespan.bounds`, and
    balance/frac_limited_by_longest, the share of passes whose bound is the longest row.
    """
    plans = [span.attributes for span in spans if span.kind == "plan" and "makespan" in span.attributes]
    if not plans:
        return {}
    ratios = [each["makespan"] / max(each["even"], each["longest"]) for each in plans]
    longest = float(np.mean([each["longest"] > each["even"] for each in plans]))
    return _spread("balance/makespan_over_bound", ratios) | {"balance/frac_limited_by_longest": longest}


TIMED = ("gen", "reward", *PASSES, "adv", "update_critic", "update_actor", "update_weights")
TIMED += ("save_checkpoint", "testing", "step")


def tokens_of(whole: Sequence[Sample], generated: Sequence[Sample], trained: Sequence[Sample]) -> dict[str, int]:
    """Return kind of work -> tokens: response tokens for `gen`, else tokens of whole sequences."""
    responses = sum(len(sample.response.token_ids) for sample in generated if sample.response is not None)
    learned = dict.fromkeys(("adv", "update_critic", "update_actor"), sum(sample.tokens for sample in trained))
    return dict.fromkeys(TIMED, sum(sample.tokens for sample in whole)) | learned | {"gen": responses}


def time_metrics(spans: Sequence[Span], tokens: dict[str, int], slots: int) -> dict[str, float]:
    """Return timing_s/*, timing_per_token_ms/* and the throughput per slot."""
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
    """Return video/prefill_s, prefill seconds of the slowest engine, and the mean video/sequence_parallel_degree."""
    prefill: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "decode" and span.attributes.get("prefill_tokens"):
            prefill[span.where].append(span)
    degrees = [span.attributes["degree"] for span in spans if "degree" in span.attributes]
    return {
        "video/prefill_s": max(map(covered, prefill.values()), default=0.0),
        "video/sequence_parallel_degree": float(np.mean(degrees)) if degrees else 1.0,
    }


def _on_driver(spans: Sequence[Span], kind: str) -> list[Span]:
    return [span for span in spans if span.kind == kind and span.where == "driver" and span.cause != "testing"]


def fusion_metrics(spans: Sequence[Span], slots: int, width: int = 1) -> dict[str, float]:
    """Return counts of samples processed during generation, the accepted share of draft tokens if there were any, and
    the idle share. `width`: ranks per engine."""
    generated = _on_driver(spans, "gen")
    steps = _on_driver(spans, "step")
    if not generated or not steps:
        return {}
    step = account(spans, steps[0].start, steps[0].end, slots * width, width)
    last = max(span.end for span in generated)
    drafted = [span for span in spans if "drafted" in span.attributes]
    offered, accepted = (sum(span.attributes[name] for span in drafted) for name in ("drafted", "accepted"))

    def early(*kinds: str) -> float:
        found = [span for kind in kinds for span in _on_driver(spans, kind) if span.start < last]
        return float(len({sample for span in found for sample in span.samples}))

    return {
        "fusion/samples_overlapped": early("reward", *PASSES),
        "fusion/samples_trained_in_tail": early("update_critic", "update_actor"),
        "fusion/samples_moved": float(sum(len(span.samples) for span in _on_driver(spans, "move"))),
        "fusion/idle_share": step.idle_share,
        **({"fusion/draft_acceptance": accepted / offered} if offered else {}),
    }


def utilisation(
    spans: Sequence[Span], facts: Mapping[str, Any], samples: Mapping[str, Sample], quantized: bool = False
) -> dict[str, float]:
    """Return perf/mfu/*: FLOPs of the required products with parameters over the measured matrix-product rate.

    `actor` and `critic` are their updates, `actor_infer` the pass for old log-probs, `rollout` the generation (no value
    for `quantized` engines). Attention and recomputation are excluded.
    """
    if "peak_flops" not in facts:
        return {}
    parameters, flops = facts["parameters"], {}
    for model in parameters:
        rows = [[samples[name] for name in span.samples] for span in _on_driver(spans, f"update_{model}")]
        flops[model, f"update_{model}"] = sum(6 * _products(*parameters[model], *_tokens_run(each)) for each in rows)
    rows = [[samples[name] for name in span.samples] for span in _on_driver(spans, "old_log_prob")]
    flops["actor_infer", "old_log_prob"] = sum(2 * _products(*parameters["actor"], *_tokens_run(each)) for each in rows)
    if not quantized:
        generating = union(_on_driver(spans, "gen"))
        steps = [span for span in spans if span.kind == "decode" and split_by([(span.start, span.end)], generating)[0]]
        tokens, read = sum(span.tokens for span in steps), sum(span.attributes["prefill_tokens"] for span in steps)
        flops["rollout", "gen"] = 2 * _products(*parameters["actor"], read + tokens, tokens)
    return {
        f"perf/mfu/{name}": done / (seconds * facts["peak_flops"])
        for (name, kind), done in flops.items()
        if done and (seconds := covered(_on_driver(spans, kind)))
    }


def _products(layers: int, head: int, tokens: int, responses: int) -> int:
    """Return multiply-adds of `tokens` with the layers, and of `responses` with the head."""
    return layers * tokens + head * responses


def _tokens_run(samples: Sequence[Sample]) -> tuple[int, int]:
    """Return (tokens of a pass with each prompt once, response tokens among them)."""
    responses = sum(len(sample.response.token_ids) for sample in samples)
    prompts = {sample.prompt.index: len(sample.prompt.token_ids) for sample in samples}
    return sum(prompts.values()) + responses, responses


def garbage_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """Return timing_s/gc, seconds with a garbage collection in any process, and perf/gc_unplanned, unplanned ones."""
    found = [span for span in spans if span.kind == "gc"]
    unplanned = sum(span.cause in ("memory", "python") for span in found)
    return {"timing_s/gc": covered(found), "perf/gc_unplanned": float(unplanned)} if found else {}


def memory_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """Return perf/max_memory_allocated_gb, timing_s/optimizer_wait and `activation_metrics`."""
    peaks = [span.attributes["max_memory"] for span in spans if "max_memory" in span.attributes]
    waited: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "optimizer_wait":
            waited[span.where].append(span)
    found = {"timing_s/optimizer_wait": max(map(covered, waited.values()))} if waited else {}
    found |= {"perf/max_memory_allocated_gb": max(peaks) / 2**30} if peaks else {}
    return found | activation_metrics(spans)


def activation_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """Return the shares of layers by place of their activations (device, host, disk, recomputed), and GB copied."""
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
