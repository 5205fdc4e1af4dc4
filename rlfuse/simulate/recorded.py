"""Turn a run folder into workloads: what each step generated, at the costs that its events measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlfuse.algorithms.experience import Experience
from rlfuse.config.input_files import WorkloadError
from rlfuse.config.run_groups import TrainerConfig
from rlfuse.config.schema import Config
from rlfuse.engines.scoring import PASSES
from rlfuse.events import Span, read_events
from rlfuse.fusion.costs import Costs
from rlfuse.parsing import parse_yaml
from rlfuse.simulate.fitting import Fit, fit, slot_rates
from rlfuse.simulate.workload import Scoring, Training, Workload, of_costs


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded step."""

    number: int
    start: float
    seconds: float
    workload: Workload
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class Recording:
    """A run: its steps, the costs fitted to all of them, the policy it ran under."""

    policy: str
    fit: Fit
    steps: list[Step]
    rates: tuple[float, ...] = ()  # of each slot; empty where none is slow
    by_rates: bool = True  # whether work was shared out by measured rates: not with trainer.deterministic


def read_run(folder: Path) -> Recording:
    """Raises WorkloadError where the folder holds no run, or its events tell no costs; RunError for damaged events."""
    config, spans = generating(folder), read_events(folder / "events.jsonl")
    fitted, rates = fit_run(config, spans)
    if "decoding" not in fitted.accuracy:
        raise WorkloadError(
            f"{folder / 'events.jsonl'}: no `decode` spans of its engines to fit costs to; run a step with this version"
        )
    steps = [
        Step(
            span.step,
            span.start,
            span.seconds,
            recorded_workload(config, fitted.costs, rates, inside),
            inside,
        )
        for span in spans
        if span.kind == "step" and (inside := spans_within(spans, span))
    ]
    if not steps:
        raise WorkloadError(f"{folder / 'events.jsonl'}: no step is complete; let the run finish one")
    return Recording(config.fusion.policy, fitted, steps, rates, not config.trainer.deterministic)


def fit_run(config: Config, spans: Sequence[Span]) -> tuple[Fit, tuple[float, ...]]:
    """Return the costs of a typical slot of the run, and the rate of each slot where some are slow."""
    before = Costs(max_sequences=config.rollout.max_num_seqs, max_tokens=config.data.max_response_length)
    width, together = config.rollout.tensor_model_parallel_size, config.lockstep or config.lockstep_backward
    rates = slot_rates(spans, config.slots // width, width, together)
    return fit(spans, before, rates, width), rates


def recorded_workload(config: Config, costs: Costs, rates: Sequence[float], step: Sequence[Span]) -> Workload:
    """Return a recorded step, each slot at its own speed."""
    engines = config.slots // config.rollout.tensor_model_parallel_size
    found = workload_of(config, costs, engines, *whole_samples(step))
    return replace(found, slot_speed=tuple(1 / rate for rate in rates))


def config_of(path: Path) -> Config:
    """Of a run's `config.yaml`, but for rewards, whose secrets may not be here. WorkloadError if it can't be read."""
    try:
        written = parse_yaml(path.read_text(), OmegaConf.create)
        if isinstance(written, DictConfig):
            written.pop("reward", None)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), written))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}; give the folder of a run, as its last lines name it") from error
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: {error}; was it written by another version?") from error
    assert isinstance(config, Config)
    return config


def generating(folder: Path) -> Config:
    """The configuration of a run. WorkloadError for one that only trains a reward model, or can't be read."""
    config = config_of(folder / "config.yaml")
    if config.trainer.task == "reward_model":
        raise WorkloadError(
            f"{folder}: trains a reward model (trainer.task=reward_model), so its events have no decoding and no "
            f"scoring that costs could be fitted to; give the folder of a run with trainer.task={TrainerConfig.task}"
        )
    return config


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
