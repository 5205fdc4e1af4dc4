"""Find all problems of a typed configuration before any process starts.

`check` is a pure function of the configuration and of `Facts`; `compose` raises all problems together. A message gives
the key, the value received, the valid range and what to change. Ranges of single values are declared in the schema.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator
from functools import partial

from rlfuse.config.custom_functions import METRICS, SAMPLER
from rlfuse.config.declare import CUSTOM, Key, as_typed, did_you_mean
from rlfuse.config.documentation import by_name, keys
from rlfuse.config.estimators import ESTIMATORS, Traits
from rlfuse.config.facts import Facts, reward_file
from rlfuse.config.graph_checks import graph_problems
from rlfuse.config.parallelism import (
    activation_problems,
    divisors,
    pipeline_problems,
    sequence_parallel_problems,
    strategy_problems,
    tensor_parallel_problems,
    value_of,
)
from rlfuse.config.parallelism import problem as _problem
from rlfuse.config.prepared import command_for
from rlfuse.config.quantization import quantization_problems
from rlfuse.config.rewards import names_code, read_entries
from rlfuse.config.rollout import HISTORY
from rlfuse.config.schema import Config

Check = Callable[[Config, Facts], Iterator[str]]
ENGINE_COUNTS = frozenset(
    {"block_size", "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override"}
)
CORRECTION = "algorithm.rollout_correction"
ENGINE_SHARE = "gpu_memory_utilization"


def check(config: Config, facts: Facts) -> list[str]:
    """Return one line per problem: first single values in the order of the schema, then combinations."""
    return [problem for find in checks(config) for problem in find(config, facts)]


def checks(config: Config) -> list[Check]:
    """Return the checks that apply to the task of `config`: one per key, then those of combinations of keys."""
    shared = (
        _files,
        _optimizers,
        _lengths,
        _devices,
        _engine_sizes,
        strategy_problems,
        activation_problems,
        graph_problems,
        _logging,
        _resume,
    )
    alone = _OFFLINE.get(config.trainer.task, _OF_SAMPLES)
    return [*(partial(_value, key) for key in keys()), *shared, *alone]


def _value(key: Key, config: Config, facts: Facts) -> Iterator[str]:
    value = value_of(config, key.name)
    shown = f"{key.name}={as_typed(value)}"
    if value is None and key.optional:
        return
    for given in (value if isinstance(value, list) else [value]) if key.choices else ():
        if why := key.rejected.get(given):
            yield f"{shown}: {why}; use one of {', '.join(key.names)}"
        elif not key.accepts(given):
            custom = f"; or {CUSTOM} for a custom one" if key.custom else ""
            valid = ", ".join((*key.names, *["null"] * key.optional))
            yield f"{shown}: `{given}` is not one of {valid}{custom}{did_you_mean(given, key.names)}"
    if not key.in_range(value):
        yield f"{shown}: must be {key.limits}; {key.remedy or f'the default is {key.name}={key.default_text}'}"


def _files(config: Config, facts: Facts) -> Iterator[str]:
    if not config.data.train_files:
        yield "data.train_files: is required; give at least one file, as data.train_files=[path/train.parquet]"
    for name in ("data.train_files", "data.val_files"):
        for path in value_of(config, name):
            if path in facts.missing:
                remedy = _made_by(path) or "correct the path (relative ones start at the working folder)"
                yield f"{name}: `{path}` does not exist; {remedy}"
    if config.data.media_root in facts.missing:
        yield _problem(config, "data.media_root", "does not exist", "give the folder of the clips and images of rows")
    if not config.model.path:
        yield "model.path: is required; give a Hugging Face folder or a hub name"
    for name, why in facts.model_problems.items():
        remedy = "give the folder of a Hugging Face model, or a hub name that can be reached"
        yield _problem(config, name, why, _made_by(value_of(config, name)) or remedy)


def _made_by(path: str) -> str | None:
    command = command_for(path)
    return f"run `{command}` to create it" if command else None


def _optimizers(config: Config, facts: Facts) -> Iterator[str]:
    for model in ("actor", "critic"):
        name, betas = f"{model}.optim.betas", value_of(config, f"{model}.optim.betas")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield _problem(config, name, "must be two numbers of 0 or more and below 1", f"set {name}=[0.9,0.999]")


def _lengths(config: Config, facts: Facts) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    context = facts.context_length
    if context is not None and prompt + response > context:
        yield (
            f"data.max_prompt_length={prompt} + data.max_response_length={response} = {prompt + response}: must be at "
            f"most {context}, the context of {config.model.path}; shorten {_which(prompt, response, context)}"
        )
    buffer = config.reward.overlong_buffer.len
    if buffer > 0 and buffer >= response:
        valid = f"must be below data.max_response_length={response}"
        yield _problem(config, "reward.overlong_buffer.len", valid, "shorten it, or set 0 to disable the penalty")


def _which(prompt: int, response: int, context: int) -> str:
    over = prompt + response - context
    return f"one by {over}" if over < max(prompt, response) else f"both, by {over} together"


def _batches(config: Config, facts: Facts) -> Iterator[str]:
    batch, mini, n = config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n
    if min(batch, mini, n, config.slots) < 1:
        return  # reported as single values
    sizes = divisors(batch)
    name, enough = "actor.ppo_mini_batch_size", [d for d in sizes if d * n >= config.slots]
    near = f"{name}={min(enough or sizes, key=lambda d: abs(d - mini))}"
    if batch % mini:
        yield _problem(config, name, f"must divide data.train_batch_size={batch}", f"for instance {near}")
    if mini * n < config.slots:
        least = math.ceil(config.slots / n)
        yield (
            f"{name}={mini} * rollout.n={n} = {mini * n} samples: must be at least the "
            f"{config.slots} slots (trainer.nnodes * trainer.n_gpus_per_node), one sample for each; "
            + (f"set {near}" if enough else f"set {name}={least} and data.train_batch_size={least}")
        )


def _traits(config: Config, facts: Facts) -> Traits | None:
    return ESTIMATORS.get(config.algorithm.adv_estimator, facts.estimator)


def _advantages(config: Config, facts: Facts) -> Iterator[str]:
    estimator, n = config.algorithm.adv_estimator, config.rollout.n
    traits = _traits(config, facts)
    yield from facts.function_problems
    if traits and traits.needs_groups and n == 1:
        valid = f"must be 2 or more with algorithm.adv_estimator={estimator}, which compares the samples of a group"
        yield _problem(config, "rollout.n", valid, "set rollout.n=8, or algorithm=ppo")
    if config.algorithm.filter_groups.enable and n == 1:
        valid = "must be false with rollout.n=1, where every group's rewards are equal"
        yield _problem(config, "algorithm.filter_groups.enable", valid, "set rollout.n=8, or false here")
    if config.trainer.critic_warmup > 1 and traits and not traits.needs_critic:
        valid = f"must be 0 with algorithm.adv_estimator={estimator}, which has no critic"
        yield _problem(config, "trainer.critic_warmup", valid, "set trainer.critic_warmup=0, or algorithm=ppo")
    lower, upper = config.actor.clip_cov_lb, config.actor.clip_cov_ub
    if config.actor.loss_mode == "clip_cov" and lower >= upper:
        yield _problem(config, "actor.clip_cov_lb", f"must be below actor.clip_cov_ub={upper:g}", "lower it")
    adaptive = config.algorithm.kl_ctrl.type == "adaptive"
    if adaptive and not config.algorithm.use_kl_in_reward:
        valid = "has an effect only with algorithm.use_kl_in_reward=true"
        yield _problem(
            config,
            "algorithm.kl_ctrl.type",
            valid,
            "set algorithm.use_kl_in_reward=true, or algorithm.kl_ctrl.type=fixed",
        )
    samples = config.data.train_batch_size * config.rollout.n
    if adaptive and 0 < config.algorithm.kl_ctrl.horizon <= 0.2 * samples:  # `algorithms.kl` clips errors to 0.2
        valid = f"must be above {0.2 * samples:g}: a step of {samples} samples could turn the coefficient negative"
        yield _problem(
            config, "algorithm.kl_ctrl.horizon", valid, f"set it to {10 * samples}, or reduce the samples per step"
        )
    validation = config.rollout.val_kwargs
    if validation.temperature == 0 and validation.n > 1:
        valid = "must be 1 with rollout.val_kwargs.temperature=0, where all responses to a prompt are equal"
        yield _problem(config, "rollout.val_kwargs.n", valid, "set it to 1, or a temperature above 0")


def _fusion(config: Config, facts: Facts) -> Iterator[str]:
    data = config.fusion.data
    if data in ("partial_rollout", "one_step_off") and not config.algorithm.rollout_correction.is_enabled:
        valid = "generates with older weights, so it requires importance correction"
        remedy = "set algorithm.rollout_correction.rollout_is=token, or fusion.data=exact"
        yield _problem(config, "fusion.data", valid, remedy)
    if data != "exact" and config.algorithm.filter_groups.enable:
        valid = "selects the groups of a step itself, so it can't be combined with algorithm.filter_groups"
        remedy = "set algorithm.filter_groups.enable=false, or fusion.data=exact"
        yield _problem(config, "fusion.data", valid, remedy)
    yield from _history(config)
    required = {"fusion.policy": "serial", "fusion.data": "exact", "fusion.tail_speculation": 0}
    required |= {"training.pipeline_parallel_size": 1, "training.ulysses_sequence_parallel_size": 1}
    for name, value in required.items() if config.trainer.deterministic else ():
        if value_of(config, name) != value:
            valid = "depends on measured times, e.g. in the order of summation; not allowed with trainer.deterministic"
            yield _problem(config, name, valid, f"set {name}={as_typed(value)}, or trainer.deterministic=false")


def _history(config: Config) -> Iterator[str]:
    if config.rollout.draft != HISTORY:
        return
    otherwise = "set rollout.draft=ngram"
    if config.fusion.data != "exact":
        valid = "requires fusion.data=exact: with equal seeds in each step, the same responses would be cut off again"
        yield _problem(config, "rollout.draft", valid, "set fusion.data=exact, or rollout.draft=ngram")
    if not config.rollout.draft_store_mb:
        valid = "must be above 0 with rollout.draft=history, whose drafts are stored there"
        yield _problem(config, "rollout.draft_store_mb", valid, f"leave it out, or {otherwise}")
    if config.trainer.deterministic:
        valid = "verifies several tokens at once, which rounds differently; not allowed with trainer.deterministic"
        yield _problem(config, "rollout.draft", valid, f"{otherwise}, or trainer.deterministic=false")


def _log_probs(config: Config, facts: Facts) -> Iterator[str]:
    if config.algorithm.old_log_probs != "engine":
        return
    for name in (f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"):
        if value_of(config, name) is not None:
            valid = "corrects the mismatch between engine and trainer, so it requires algorithm.old_log_probs=trainer"
            yield _problem(config, name, valid, "set algorithm.old_log_probs=trainer, or null here")
    for name, whole in (("rollout.top_p", 1.0), ("rollout.top_k", -1), ("rollout.min_p", 0.0)):
        if value_of(config, name) != whole:
            valid = "must be {} with algorithm.old_log_probs=engine: the engine's log-probs are of the truncated "
            valid = valid.format(as_typed(whole)) + "distribution, the trainer's are not"
            yield _problem(config, name, valid, f"set {name}={as_typed(whole)}, or algorithm.old_log_probs=trainer")


def _correction(config: Config, facts: Facts) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    for kind in ("is", "rs"):
        method, upper, lower = (f"rollout_{kind}{end}" for end in ("", "_threshold", "_threshold_lower"))
        most, least = getattr(correction, upper), getattr(correction, lower)
        if getattr(correction, method) is None:
            for name in (upper, lower):
                if getattr(correction, name) != by_name()[f"{CORRECTION}.{name}"].default:
                    valid = f"has no effect with {CORRECTION}.{method}=null"
                    yield _problem(config, f"{CORRECTION}.{name}", valid, f"remove it, or set {method}")
        elif most is None:
            valid = f"is required with {CORRECTION}.{method}={correction.rollout_rs}"
            yield _problem(config, f"{CORRECTION}.{upper}", valid, "give a bound, for example 2")
        elif least is not None and least >= most:
            yield _problem(config, f"{CORRECTION}.{lower}", f"must be below {upper}={most:g}", "lower it, or null")
    rejection, lower = correction.rollout_rs, correction.rollout_rs_threshold_lower
    if rejection is not None and not rejection.endswith("_k1"):
        if lower is not None:
            valid = f"applies to k1 only; {rejection} has no lower bound"
            yield _problem(config, f"{CORRECTION}.rollout_rs_threshold_lower", valid, "set null")
    elif rejection is not None and lower is None and 0 < (correction.rollout_rs_threshold or 2) <= 1:
        valid = "must be above 1 for k1 without a lower bound, which is 1 / rollout_rs_threshold then"
        yield _problem(config, f"{CORRECTION}.rollout_rs_threshold", valid, "raise it, or set the lower bound")


def _devices(config: Config, facts: Facts) -> Iterator[str]:
    parallel, slots = config.rollout.tensor_model_parallel_size, config.slots
    name = "rollout.tensor_model_parallel_size"
    nodes, local, heads = config.trainer.nnodes, config.trainer.n_gpus_per_node, facts.attention_heads
    if parallel >= 1 and slots >= 1 and local % parallel:
        where = f"must divide the {local} slots" + (
            " of a node, because an engine does not span nodes" if nodes > 1 else ""
        )
        yield _problem(config, name, where, f"set {name}={math.gcd(parallel, local, heads or 0)}")
    if parallel >= 1 and heads and heads % parallel:
        valid = f"must divide the {heads} attention heads of {config.model.path}"
        yield _problem(config, name, valid, f"set {name}={math.gcd(parallel, heads, max(0, local))}")
    if config.cluster.device == "cuda" and facts.gpus == 0:
        valid = "this machine has no GPU (no /dev/nvidia*)"
        yield _problem(
            config, "cluster.device", valid, "set auto or cpu, or cluster.ray_address for a cluster with GPUs"
        )
    elif facts.cuda and facts.gpus and local > facts.gpus:
        valid = f"this machine has {facts.gpus} GPUs"
        yield _problem(config, "trainer.n_gpus_per_node", valid, f"set {facts.gpus}, or cluster.device=cpu")
    if config.actor.offload_optimizer and facts.cuda is False:
        valid = "needs GPUs; on CPU hosts the optimizer state is already in host memory"
        yield _problem(config, "actor.offload_optimizer", valid, "set actor.offload_optimizer=false")
    if config.actor.optimizer_residency in ("forecast", "step") and facts.cuda is False:
        valid = "needs GPUs; on CPU hosts engine and trainer rank share the host memory, and nothing is offloaded"
        yield _problem(config, "actor.optimizer_residency", valid, "set actor.optimizer_residency=training")
    if config.rollout.weight_transfer == "ipc" and facts.cuda is False:
        yield _problem(config, "rollout.weight_transfer", "needs GPUs", "set rollout.weight_transfer=auto")


def _engine_sizes(config: Config, facts: Facts) -> Iterator[str]:
    """Check sizes that the memory plan uses. vLLM reads 0 bytes of KV cache as "not given", None as its default."""
    for name, value in config.rollout.engine_kwargs.items():
        key, number = f"rollout.engine_kwargs.{name}={value}", isinstance(value, int | float)
        if name in ENGINE_COUNTS and value is not None and not (number and value >= 1 and value == value // 1):
            yield f"{key}: must be a whole number of 1 or more; correct it, or remove it for the default"
        if name == ENGINE_SHARE and not (number and 0 < value <= 1):
            yield f"{key}: must be above 0 and 1 or less; correct it, or set rollout.{ENGINE_SHARE}"


def _disaggregated(config: Config, facts: Facts) -> Iterator[str]:
    name, nodes = "rollout.disaggregate", config.trainer.nnodes
    if config.rollout.disaggregate != "on":
        return
    engines = config.slots // max(1, config.rollout.tensor_model_parallel_size)
    if engines < 2:
        valid = f"on needs at least two engines, one to prefill and one to decode; this job has {engines}"
        yield _problem(config, name, valid, "set auto or off, or more trainer.n_gpus_per_node")
    if nodes > 1:
        valid = f"on needs KV cache transfers between all engines, within one node; this job has {nodes} nodes"
        yield _problem(config, name, valid, "set auto or off")
    if config.trainer.deterministic:
        valid = "depends on measured times; not allowed with trainer.deterministic"
        yield _problem(config, name, valid, "set off, or trainer.deterministic=false")


def _drained(config: Config, facts: Facts) -> Iterator[str]:
    drained, count = config.cluster.drain, config.slots // max(1, config.rollout.tensor_model_parallel_size)
    if len({slot for slot in drained if 0 <= slot < count}) < len(drained):
        valid = f"must list slots of this job, 0 to {count - 1}, without duplicates"
        yield _problem(config, "cluster.drain", valid, "remove the others")
    elif len(drained) >= count > 0:
        remedy = f"list at most {count - 1} slots" if count > 1 else "leave it empty"
        yield _problem(config, "cluster.drain", f"must leave at least one of the {count} slots undrained", remedy)


def _video(config: Config, facts: Facts) -> Iterator[str]:
    levels, budget = config.video.levels, config.video.max_tokens
    if not levels or min(levels) < 1 or levels != sorted(set(levels), reverse=True):
        valid = "must be whole numbers of at least 1 in descending order, without duplicates"
        yield _problem(config, "video.levels", valid, "for instance video.levels=[640,512,384,256,160,128]")
    elif config.video.sampling == "seed_vl" and budget < levels[-1]:
        valid = f"must be at least the smallest of video.levels, {levels[-1]}"
        yield _problem(config, "video.max_tokens", valid, "raise it, or add a smaller level to video.levels")
    if not facts.video:
        return
    if config.algorithm.filter_groups.enable:
        name = "algorithm.filter_groups.enable"
        valid = "must be false with a video model (clips are encoded before each step)"
        yield _problem(config, name, valid, f"set {name}=false")


def _tower(config: Config, facts: Facts) -> Iterator[str]:
    if config.video.freeze_vision_tower:
        return
    for name, off in (("video.disk_cache", "null"), ("video.encode_ahead", "false")):
        if value_of(config, name):
            valid = "keeps embeddings, which become stale when the vision tower is trained"
            yield _problem(config, name, valid, f"set it to {off}, or video.freeze_vision_tower=true")
    if config.training.pipeline_parallel_size > 1:
        valid = "can't be false with pipeline parallelism, where no stage has a vision tower to train"
        yield _problem(
            config, "video.freeze_vision_tower", valid, "set it to true, or training.pipeline_parallel_size=1"
        )
    if config.training.tensor_model_parallel_size > 1:
        valid = "can't be false with tensor parallelism, where no rank has a whole vision tower to train"
        yield _problem(
            config, "video.freeze_vision_tower", valid, "set it to true, or training.tensor_model_parallel_size=1"
        )
    if config.fusion.data in ("partial_rollout", "one_step_off"):
        valid = f"can't be false with fusion.data={config.fusion.data}, which trains on clips encoded by older towers"
        yield _problem(config, "video.freeze_vision_tower", valid, "set it to true, or fusion.data=exact")


def _reward(config: Config, facts: Facts) -> Iterator[str]:
    reward = config.reward
    entries, problems = read_entries(reward.functions, reward.weights, reward.model_path, config.uses_rewards)
    yield from problems
    if reward.model_head is not None and reward.model_path is None:
        yield _problem(config, "reward.model_head", "is the head of a reward model", "set reward.model_path")
    if reward.device == "cuda" and facts.cuda is False:
        yield _problem(config, "reward.device", "needs GPUs in the job's slots", "set reward.device=auto")
    for function in (entry.path for entry in entries if names_code(entry.path)):
        if not isinstance(function, str):
            yield f"reward.functions: got {function!r}; an entry must be a string or a dictionary with a path"
            continue
        source, colon, name = function.rpartition(":")
        file = reward_file(function)
        if not colon or not name.isidentifier():
            form = f"{'path/file.py' if file else 'package.module'}:function, or a reward model as reward.model_path"
            yield f"reward.functions: `{function}` has no function name; write it as {form}"
        if file is not None and file in facts.missing:
            yield f"reward.functions: the file `{file}` does not exist; correct the path"
        elif source.split(".")[0] in facts.unknown_modules:
            yield f"reward.functions: no Python package `{source.split('.')[0]}`; install it, or give a .py file"


def _logging(config: Config, facts: Facts) -> Iterator[str]:
    if facts.unwritable:
        yield _problem(config, "trainer.default_local_dir", facts.unwritable, "give a writable folder")
    if facts.wandb:
        remedy = "run `wandb login` once, set WANDB_API_KEY, or set trainer.wandb_mode=offline"
        yield _problem(config, "trainer.wandb_mode", facts.wandb, remedy)
    for name in facts.missing_loggers.intersection(config.trainer.logger):
        remedy = f"pip install 'rlfuse[{name}]', or remove it"
        yield _problem(config, "trainer.logger", f"the package {name} is not installed", remedy)


def _kl(config: Config, facts: Facts) -> Iterator[str]:
    by_source, name = config.algorithm.kl_coef_by_source, "algorithm.kl_coef_by_source"
    for source, value in by_source.items():
        if not (math.isfinite(value) and value >= 0):
            yield f"{name}.{source}={value}: must be 0 or more, as the coefficient of a penalty"
    if by_source and not config.uses_reference:
        valid = (
            "has no effect without a KL penalty or loss; set algorithm.use_kl_in_reward=true or actor.use_kl_loss=true"
        )
        yield f"{name}: {valid}, or remove it"
    if by_source and config.algorithm.kl_ctrl.type == "adaptive":
        valid = "adapts one coefficient, but algorithm.kl_coef_by_source sets several"
        yield _problem(
            config, "algorithm.kl_ctrl.type", valid, "set it to fixed, or remove algorithm.kl_coef_by_source"
        )
    if (traits := _traits(config, facts)) and traits.each_reward and config.algorithm.use_kl_in_reward:
        valid = (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} normalises the reward functions, without the "
        )
        valid += "KL penalty per token"
        yield _problem(
            config,
            "algorithm.use_kl_in_reward",
            valid,
            "set actor.use_kl_loss=true and algorithm.use_kl_in_reward=false",
        )


def _distillation(config: Config, facts: Facts) -> Iterator[str]:
    if not (traits := _traits(config, facts)) or traits.needs_rewards:
        return
    estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    if config.algorithm.adv_estimator in ESTIMATORS and config.ref.path is None:
        valid = f"must be the teacher's model folder or hub name with {estimator}"
        yield _problem(config, "ref.path", valid, "set it to a model with the vocabulary of model.path")
    ignored = (
        ("algorithm.use_kl_in_reward", False),
        ("algorithm.filter_groups.enable", False),
        ("reward.overlong_buffer.len", 0),
    )
    for name, off in ignored:
        if value_of(config, name) != off:
            valid = f"has no effect on advantages with {estimator}, which ignores rewards"
            yield _problem(config, name, valid, f"set it to {as_typed(off)}, or use another estimator")
    if config.data.val_files and not config.uses_rewards:
        yield (
            "reward.functions=[]: validation (data.val_files) needs a reward; give at least one function, as "
            "reward.functions=[path/file.py:function], or set data.val_files=[]"
        )


def _reference(config: Config, facts: Facts) -> Iterator[str]:
    if not config.ref.sync_ref_model:
        return
    name, off = "ref.sync_ref_model", "set ref.sync_ref_model=false"
    if not config.uses_reference and config.trainer.is_offline:
        yield _problem(config, name, f"trainer.task={config.trainer.task} has no reference policy", off)
    elif not config.uses_reference:
        valid = "has no effect without a KL penalty or loss"
        yield _problem(config, name, valid, f"set actor.use_kl_loss=true or algorithm.use_kl_in_reward=true, or {off}")
    if config.training.pipeline_parallel_size > 1:
        valid = "can't be combined with pipeline parallelism, where a device has other layers of actor and reference"
        yield _problem(config, name, valid, f"set training.pipeline_parallel_size=1, or {off}")
    if facts.video:
        yield _problem(config, name, "is not supported for video models", off)


def _offline(config: Config, facts: Facts) -> Iterator[str]:
    task = f"trainer.task={config.trainer.task}"
    single = ["pipeline_parallel_size"]
    if config.trainer.task == "reward_model":
        single += ["tensor_model_parallel_size", "ulysses_sequence_parallel_size"]
    for name in (f"training.{leaf}" for leaf in single):
        if value_of(config, name) > 1:
            yield _problem(config, name, f"must be 1 with {task}", f"set {name}=1")
    if config.cluster.drain:
        yield _problem(
            config, "cluster.drain", f"must be empty with {task}, where all ranks train together", "remove it"
        )
    if config.trainer.metrics:
        valid = f"must be empty with {task}, which has no samples"
        yield _problem(config, METRICS, valid, "remove it; the metrics of the task are always logged")
    if 1 <= config.data.train_batch_size < config.slots:
        valid = f"must be at least {config.slots}, one row per slot"
        yield _problem(config, "data.train_batch_size", valid, f"set {config.slots} or more")
    if config.data.sampler is not None:
        yield _problem(config, SAMPLER, f"must be null with {task}", "remove it")
    if facts.video:
        yield _problem(config, "model.path", f"{task} does not support training on clips", "give a text model")


def _reward_model(config: Config, facts: Facts) -> Iterator[str]:
    for name in ("data.apply_chat_template_kwargs", "data.prompt_is_chat"):
        if value_of(config, name) != by_name()[name].default:
            valid = "has no effect with trainer.task=reward_model, which formats pairs as reward models score them"
            yield _problem(config, name, valid, "remove it")


def _offline_policy(config: Config, facts: Facts) -> Iterator[str]:
    name = "rollout.temperature"
    if value_of(config, name) != 1:
        valid = f"must be 1 with trainer.task={config.trainer.task}, whose loss is of unscaled log-probs"
        yield _problem(config, name, valid, "remove it")


def _resume(config: Config, facts: Facts) -> Iterator[str]:
    mode = config.trainer.resume_mode
    if mode in facts.missing:
        near = difflib.get_close_matches(mode, ("auto", "disable"), n=1)
        remedy = f"did you mean {near[0]}?" if near else "correct the path"
        valid = "must be auto, disable or the path of a global_step_N folder; that folder does not exist"
        yield _problem(config, "trainer.resume_mode", valid, remedy)


def _sampling(config: Config, facts: Facts) -> Iterator[str]:
    for text in config.rollout.stop:
        if not text:
            yield _problem(config, "rollout.stop", "an empty string would stop every response", "remove it")
        elif re.fullmatch(r"(\\[nrt])+", text):
            valid = f"`{text}` is read as a backslash and a letter, not as a line break"
            yield _problem(config, "rollout.stop", valid, 'write it into the job file, as stop: ["\\n\\n"]')


_OF_SAMPLES = (
    _batches,
    _advantages,
    _log_probs,
    _correction,
    quantization_problems,
    _sampling,
    _fusion,
    _disaggregated,
    pipeline_problems,
    tensor_parallel_problems,
)
_OF_SAMPLES += (sequence_parallel_problems, _drained, _video, _tower, _reward, _kl, _reference, _distillation)
_POLICY = (_offline, _offline_policy, _reference, tensor_parallel_problems, sequence_parallel_problems)
_OFFLINE: dict[str, tuple[Check, ...]] = {
    "sft": _POLICY,
    "dpo": _POLICY,
    "reward_model": (_offline, _reward_model, _reference),
}
"""Offline task -> its checks, instead of those of samples."""
