"""Check at startup whether vLLM supports the model on the job's device.

Reads vLLM's tables from its source, because importing vLLM takes ten seconds; tests compare every limit with vLLM.
Sliding windows and both values of model.dtype are supported on all devices.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from rlfuse.config.facts import on_gpus
from rlfuse.config.rewards import map_judge_paths
from rlfuse.config.rollout import HISTORY
from rlfuse.config.schema import Config

CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's CPU attention is compiled for."""
CPU_BLOCK = 32
"""On CPUs, block_size must be a multiple of this number of tokens."""
BYPASSES_RELOAD = {"gpt_oss", "mimo_v2_flash", "step3_text", "step3p5"}
"""Model types whose `load_weights` bypasses vLLM's layerwise reload; `receiver` detects others in the first push."""
DRAFT_CONFLICTS = {"speculative_config", "pipeline_parallel_size", "data_parallel_size", "logits_processors"}
"""Keys of rollout.engine_kwargs that exclude drafts. Custom logits processors may depend on earlier tokens, which are
not updated between the draft tokens of a step."""
NUMERICS_DIFFER = {
    "bloom": "vLLM computes its exact GELU, transformers the tanh approximation that it was trained with"
}
"""Model type -> why log-probs of engine and trainer differ by more than rounding."""
NIXL_ON_GPUS = (
    "on GPUs a sleeping engine frees the memory that NIXL registered and wakes with other memory, which nothing "
    "registers again"
)
ALTERNATIVES = "choose another model, a machine with GPUs"


def unsupported_reasons(config: Config, trains: bool = True) -> list[str]:
    """Return why vLLM cannot generate with the policy or, if it `trains`, receive its weights; each with its key."""
    path = config.model.path
    if (model := _model_config(config, path)) is None:
        return [*_connector(config), *_drafting(config), *_draft_conflicts(config)]
    given = f"model.path={path}"
    found = [*_connector(config), *_drafting(config), *_draft_conflicts(config)]
    found += _latent_attention(given, config, model)
    found += _training_limits(given, config, model) if trains else ()
    if "hf_overrides" in config.rollout.engine_kwargs:  # vLLM uses a modified configuration
        return found
    return [
        *(f"{each}, or rollout.name=transformers" for each in _architecture(given, model)),
        *(f"{each}, or rollout.name=transformers" for each in _head_size(given, config, model)),
        *_shared_heads(config, model),
        *_arguments(config, model),
        *found,
    ]


def unplannable_reasons(config: Config, device: str) -> list[str]:
    """Return why vLLM cannot run this job on any machine with `device`, regardless of the sizes of model and cache."""
    planned = replace(config, cluster=replace(config.cluster, device=device))
    found, model = [*_reward_device(planned)], _model_config(config, config.model.path)
    if config.rollout.name != "vllm" or config.trainer.is_offline or model is None:
        return found
    given = f"model.path={config.model.path}"
    if device == "cuda":  # packages may be installed on a machine with CPUs
        found += [*_connector(planned), *_drafting(planned)]
    return [
        *found,
        *_draft_conflicts(planned),
        *_latent_attention(given, planned, model),
        *_training_limits(given, planned, model),
    ]


def unsupported_judge_reasons(config: Config) -> list[str]:
    """Return why vLLM cannot run a judge or a reward model."""
    judges = _judges(config)
    models = {path: _model_config(config, path) for path in judges}
    given = {path: f"reward.functions: model={path}" for path in models}
    found = [
        problem
        for path, model in models.items()
        if model is not None
        for problem in (*_architecture(given[path], model), *_head_size(given[path], config, model))
    ]
    return [*found, *_reward_device(config)]


def _judges(config: Config) -> list[str]:
    found = list[str]()
    map_judge_paths(config.reward.functions, lambda path: found.append(path) or path)
    return found


def _reward_device(config: Config) -> Iterator[str]:
    reward = config.reward
    served = _judges(config) or (reward.model_path and reward.model_backend == "vllm")
    if served and reward.device == "cpu" and on_gpus(config):
        yield "reward.device=cpu: in this job vLLM serves judges and reward models on GPUs; set reward.device=auto"


def _model_config(config: Config, path: str) -> PreTrainedConfig | None:
    """Return the configuration at `path`; None if it is unreadable, which `checks` and `training_problems` report."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, KeyError, StrictDataclassError):
        return None


def _architecture(given: str, model: PreTrainedConfig) -> Iterator[str]:
    names, known = model.architectures or [], architectures()
    own = getattr(model, "auto_map", None) or _plugins()
    if known and names and not own and not any(name in known or _has_transformers_backend(name) for name in names):
        yield (
            f"{given}: vLLM has no architecture {' or '.join(names)}, and can't run it with its transformers "
            "backend; choose another model"
        )


def _head_size(given: str, config: Config, model: PreTrainedConfig) -> Iterator[str]:
    text = model.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or not heads or getattr(text, "kv_lora_rank", None) is not None:
        return
    size = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // heads
    if on_gpus(config) is False and size and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        yield (f"{given}: its attention head size is {size}, but vLLM on CPUs supports {sizes}; {ALTERNATIVES}")


def _connector(config: Config) -> Iterator[str]:
    if config.rollout.kv_transfer == "nixl" and on_gpus(config):
        yield f"rollout.kv_transfer=nixl: {NIXL_ON_GPUS}; set rollout.kv_transfer=auto"
    elif config.rollout.kv_transfer == "nixl" and importlib.util.find_spec("nixl") is None:
        remedy = "pip install 'rlfuse[nixl]', or set rollout.kv_transfer=shm"
        yield f"rollout.kv_transfer=nixl: the package nixl is not installed; {remedy}"


def _drafting(config: Config) -> Iterator[str]:
    if config.rollout.draft != "suffix" or not config.fusion.tail_speculation:
        return
    if on_gpus(config):
        yield "rollout.draft=suffix: vLLM has no suffix decoding in its model runner for GPUs; set rollout.draft=ngram"
    elif importlib.util.find_spec("arctic_inference") is None:
        remedy = "pip install arctic-inference==0.1.1, or set rollout.draft=ngram"
        yield f"rollout.draft=suffix: the package arctic-inference is not installed; {remedy}"


def _draft_conflicts(config: Config) -> Iterator[str]:
    threshold = config.fusion.tail_speculation
    drafting, value, remedy = "fusion.tail_speculation", threshold, "set fusion.tail_speculation=0"
    if config.rollout.draft == HISTORY:
        if threshold:
            valid = f"must be 0 with rollout.draft={HISTORY}, which drafts for every number of samples"
            yield f"fusion.tail_speculation={threshold}: {valid}; set it to 0, or rollout.draft=ngram"
        drafting, value, remedy = "rollout.draft", HISTORY, "set rollout.draft=ngram"
    if value and (clash := DRAFT_CONFLICTS & set(config.rollout.engine_kwargs)):
        yield f"{drafting}={value}: conflicts with rollout.engine_kwargs.{min(clash)}; remove it, or {remedy}"


def _latent_attention(given: str, config: Config, model: PreTrainedConfig) -> Iterator[str]:
    if getattr(model.get_text_config(), "kv_lora_rank", None) is not None and on_gpus(config) is False:
        why = "vLLM's kernels for CPUs compute latent attention differently from transformers"
        yield f"{given}: {why}; {ALTERNATIVES}, or rollout.name=transformers"


def _training_limits(given: str, config: Config, model: PreTrainedConfig) -> Iterator[str]:
    kind = model.get_text_config().model_type
    if kind in BYPASSES_RELOAD:
        yield (
            f"{given}: vLLM would keep some initial weights of a {kind}, because it loads them outside its "
            "layerwise reload; choose another model"
        )
    if (why := NUMERICS_DIFFER.get(kind)) and config.rollout.on_mismatch == "stop":
        yield f"{given}: {why}; choose another model, or set rollout.on_mismatch=alert"


def _shared_heads(config: Config, model: PreTrainedConfig) -> Iterator[str]:
    text, path = model.get_text_config(), config.model.path
    heads = getattr(text, "num_attention_heads", None) or 1
    width, key = config.rollout.tensor_model_parallel_size, "rollout.tensor_model_parallel_size"
    shared = getattr(text, "num_key_value_heads", None) or heads
    if width > 1 and shared % width and width % shared:
        fitting = max(n for n in range(1, width) if not heads % n and (not shared % n or not n % shared))
        yield (
            f"{key}={width}: must divide the {shared} key-value heads of {path}, or be a multiple of them; "
            f"set {key}={fitting}"
        )


def _arguments(config: Config, model: PreTrainedConfig) -> Iterator[str]:
    """Check arguments that are passed to vLLM unchanged."""
    given, name = config.rollout.engine_kwargs, "rollout.engine_kwargs"
    text, max_model_len = model.get_text_config(), given.get("max_model_len")
    longest, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # also those per kind of layer
    scaled = any(each.get("rope_type", "default") != "default" for each in ropes)  # RoPE scaling extends the context
    free = scaled or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").strip().lower() in ("1", "true")
    longest = longest and max(longest, getattr(model, "model_max_length", None) or 0)
    if isinstance(max_model_len, int) and longest is not None and max_model_len > longest and not free:
        bound = f"must be at most {longest}, the context of {config.model.path}"
        yield f"{name}.max_model_len={max_model_len}: {bound}; lower it"
    block = given.get("block_size")
    if on_gpus(config) is False and isinstance(block, int) and (block < CPU_BLOCK or block % CPU_BLOCK):
        yield f"{name}.block_size={block}: must be a multiple of {CPU_BLOCK} on CPUs; set {CPU_BLOCK}, or leave it out"


@functools.cache
def architectures() -> frozenset[str]:
    """Return the architectures of the installed vLLM; empty if its table is not found."""
    package = importlib.util.find_spec("vllm")
    source = Path(package.origin or "").parent / "model_executor" / "models" / "registry.py" if package else Path()
    if not source.is_file():
        return frozenset()
    tables = {
        node.targets[0].id: node.value
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name)
    }
    used = tables["_VLLM_MODELS"].values if "_VLLM_MODELS" in tables else []  # {**_TEXT_GENERATION_MODELS, ...}
    keys = [key for table in used if isinstance(table, ast.Name) for key in tables[table.id].keys]
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant))


def _plugins() -> bool:
    """Return whether other packages may register architectures."""
    return any(not each.value.startswith("vllm.") for each in entry_points(group="vllm.general_plugins"))


def _has_transformers_backend(name: str) -> bool:
    """Return whether vLLM's transformers backend can run this class."""
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return False
    return kind.is_backend_compatible() or kind._can_set_attn_implementation()
