"""A step of a job as a workload: its configuration, its costs and the lengths of its responses.

Role: `learning` simulates the steps of a running job by it, `rlfuse plan` and `rlfuse whatif` planned and
recorded ones. Pure functions of spans and the configuration.
Invariant: only samples that are whole and were generated inside the step's own span count; validation does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf

import numpy as np

from rlfuse.algorithms.experience import Experience
from rlfuse.config.schema import Config
from rlfuse.events import Span
from rlfuse.fusion.costs import Costs
from rlfuse.simulate.workload import Scoring, Training, Workload, of_costs
from rlfuse.step.scoring import PASSES


def spans_within(spans: Sequence[Span], step: Span) -> list[Span]:
    """What happened during the step; nothing if it generated nothing."""
    inside = [span for span in spans if span.start >= step.start and span.end <= step.end]
    return inside if any(span.kind == "generate" for span in inside) else []


def workload_of(
    config: Config, costs: Costs, engines: int, lengths: Sequence[int], prompt_tokens: int, history: float | None = None
) -> Workload:
    """A step of this job with responses of these lengths, in prompt order; `history`: as `length_history_sigma`."""
    actor, experience = config.actor, Experience(config)
    group = config.rollout.n if len(lengths) % config.rollout.n == 0 else 1
    prompts = len(lengths) // group
    training = Training(
        mini_batches=-(-prompts // actor.ppo_mini_batch_size),
        models=("critic", "actor") if config.uses_critic else ("actor",),
        epochs=actor.ppo_epochs,
        early=not experience.reads_batch("actor"),
        critic_early=not experience.reads_batch("critic"),
        bubbles=_bubbles(config, lengths, prompt_tokens),
    )
    kinds = tuple(kind for kind in experience.kinds if kind in PASSES)
    own = any(kind in kinds for kind in experience.by_update)
    scoring = Scoring(kinds=kinds, deferred=bool(experience.deferred), by_update=own)
    limit = max(costs.kv_tokens, prompt_tokens + max(lengths))
    return of_costs(
        replace(costs, kv_tokens=limit),
        engines,
        tuple(lengths),
        group=group,
        prompt_tokens=prompt_tokens,
        scoring=scoring,
        training=training,
        credit_samples=config.fusion.credit_samples,
        lockstep="all" if config.lockstep else "gradients" if config.lockstep_backward else "none",
        length_history_sigma=history,
    )


def _bubbles(config: Config, lengths: Sequence[int], prompt_tokens: int) -> float | None:
    """Those of 1F1B over its work, as `Training.bubbles`; fused models share them, chunks divide them."""
    if (stages := config.training.pipeline_parallel_size) == 1:
        return None
    fused = config.uses_critic and config.fusion.training == "fused"
    count = micro_batches(config, config.actor.ppo_mini_batch_size, sum(lengths) / len(lengths) + prompt_tokens)
    return (stages - 1) / count / config.training.virtual_pipeline_model_parallel_size / (2 if fused else 1)


def micro_batches(config: Config, prompts: int, context: float) -> int:
    """Of so many prompts' rows on each rank, or in each pipeline, as the trainer cuts them; `context`: tokens of a row
    in the mean. Where nothing evens them out, the row that is one too many leaves half its room of a rank's budget."""
    actor, stages = config.actor, config.training.pipeline_parallel_size
    rows = prompts * config.rollout.n / (config.slots // stages // config.training.tensor_model_parallel_size)
    budget, most = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    if stages > 1:
        return max(ceil(rows * context / budget), min(2 * stages, ceil(rows)))
    filled = min(max(budget - context / 2, min(context, budget)), most * context if most else inf)
    return max(1, ceil(rows * context / filled))


def whole_samples(spans: Sequence[Span]) -> tuple[tuple[int, ...], int]:
    """Lengths by prompt and sibling, and the mean number of prompt tokens, from `generate` spans. A sample that moved
    has a span on each engine; the last one tells all its tokens, those it came with too."""
    tokens: dict[tuple[int, int], int] = {}
    prompts = []
    for span in spans:
        if span.kind == "generate":
            _, prompt, sibling = map(int, span.samples[0].split("/"))
            whole = span.tokens + span.attributes.get("carried_tokens", 0)
            tokens[prompt, sibling] = max(tokens.get((prompt, sibling), 1), whole)
            prompts.append(span.attributes.get("prompt_tokens", 1))
    return tuple(tokens[key] for key in sorted(tokens)), max(1, round(float(np.mean(prompts))))
