"""Build the workload of a step from configuration, costs and response lengths, for runs, plans and recorded runs.

Only samples generated completely within the span of the step count; validation does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf

import numpy as np

from rlfuse.algorithms.experience import Experience
from rlfuse.algorithms.zero_advantage import expects_skips
from rlfuse.config.custom_functions import traits_of
from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.costs.spans import lengths_of
from rlfuse.events import Span
from rlfuse.samples import PASSES
from rlfuse.simulate.workload import Scoring, Training, Workload, workload_from_costs


def workload_of(
    config: Config,
    costs: Costs,
    engines: int,
    lengths: Sequence[int],
    prompt_tokens: int,
    history: float | None = None,
    skipped_share: float = 0.0,
) -> Workload:
    """Return the workload of a step with these response lengths, in prompt order.

    A baseline comes last of the responses to its prompt. Lengths of incomplete groups count as one prompt each.
    `history`: `length_history_sigma`. `skipped_share`: expected share of samples without advantage; ignored if the job
    skips none.
    """
    actor, experience = config.actor, Experience(config)
    group = responses_per_prompt(config)
    group = group if len(lengths) % group == 0 else 1
    prompts = len(lengths) // group
    training = Training(
        mini_batches=-(-prompts // actor.ppo_mini_batch_size),
        models=("critic", "actor") if config.uses_critic else ("actor",),
        epochs=actor.ppo_epochs,
        early=not experience.requires_batch("actor"),
        critic_early=not experience.requires_batch("critic"),
        skipped_share=skipped_share if expects_skips(config) else 0.0,
        bubbles=_bubbles(config, lengths, prompt_tokens),
    )
    kinds = tuple(kind for kind in experience.kinds if kind in PASSES)
    own = any(kind in kinds for kind in experience.fused_into_first_update)
    scoring = Scoring(
        kinds=kinds,
        deferred=bool(experience.deferred),
        by_update=own,
        loss_only="old_log_prob" in experience.loss_only,
    )
    limit = max(costs.kv_tokens, prompt_tokens + max(lengths))
    return workload_from_costs(
        replace(costs, kv_tokens=limit),
        engines,
        tuple(lengths),
        group=group,
        baselines=experience.traits.needs_baseline and group > 1,
        prompt_tokens=prompt_tokens,
        scoring=scoring,
        training=training,
        credit_samples=config.fusion.credit_samples,
        lockstep="all" if config.lockstep else "gradients" if config.lockstep_backward else "none",
        length_history_sigma=history,
    )


def responses_per_prompt(config: Config) -> int:
    """Return the number of responses that are generated for a prompt, with the baseline."""
    return config.rollout.n + traits_of(config.algorithm.adv_estimator).needs_baseline


def _bubbles(config: Config, lengths: Sequence[int], prompt_tokens: int) -> float | None:
    """Return the bubbles of 1F1B relative to its work; fused models share them, virtual stages divide them."""
    if (stages := config.training.pipeline_parallel_size) == 1:
        return None
    fused = config.uses_critic and config.fusion.training == "fused"
    count = micro_batches(config, config.actor.ppo_mini_batch_size, sum(lengths) / len(lengths) + prompt_tokens)
    return (stages - 1) / count / config.training.virtual_pipeline_model_parallel_size / (2 if fused else 1)


def micro_batches(config: Config, prompts: int, context: float) -> int:
    """Return the number of micro-batches of these prompts per rank, or per pipeline. `context`: mean tokens of a row.
    Packing wastes half a row of a rank's token budget on average."""
    actor, stages = config.actor, config.training.pipeline_parallel_size
    rows = prompts * config.rollout.n / config.mesh.copies
    budget, most = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    if stages > 1:
        return max(ceil(rows * context / budget), min(2 * stages, ceil(rows)))
    filled = min(max(budget - context / 2, min(context, budget)), most * context if most else inf)
    return max(1, ceil(rows * context / filled))


def finished_lengths(spans: Sequence[Span]) -> tuple[tuple[int, ...], int]:
    """Return response lengths ordered by prompt and rollout, and the mean number of prompt tokens."""
    found = {tuple(map(int, name.split("/")[1:])): lengths for name, lengths in lengths_of(spans).items()}
    prompts, responses = zip(*(found[key] for key in sorted(found)), strict=True)
    return tuple(max(1, tokens) for tokens in responses), max(1, round(float(np.mean(prompts))))
