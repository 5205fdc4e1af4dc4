"""Load one stage of a Hugging Face causal language or value model, as the model's class without other stages' modules.

Role: called by pipeline ranks. Parameters keep their names, and only the stage's tensors are read. Tested with Qwen2,
Llama and Qwen3. A family needs `embed_tokens`, `layers`, `norm` and `rotary_emb` in its base model, embeddings that
reach the first layer unchanged (`stages.check_first_layer`), and checkpoints with the tensor names of its modules.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file

from rlfuse.config.schema import Config, ModelConfig
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.partition import LayerCosts, Part, logits_fraction, modelled_costs, parts
from rlfuse.engines.trainer.dropout import zero_fields
from rlfuse.engines.trainer.families import head_name, value_class
from rlfuse.engines.trainer.models import prepare_for_training
from rlfuse.tensor_files import map_tensors
from rlfuse.video.models.base import register_language_models

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class MissingLayer(torch.nn.Module):
    """Placeholder for a module on another stage; returns its input (as vLLM's PPMissingLayer)."""

    def forward(self, hidden_states: torch.Tensor, *_, **__) -> torch.Tensor:
        return hidden_states


def layer_costs(path: str, job: Config, pipelines: Pipelines) -> LayerCosts:
    """Return the modelled layer costs of the model at `path` per rank, for rows of the job's maximum lengths."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=job.model.trust_remote_code).get_text_config()
    outputs = 1 if pipelines.model == "critic" else config.vocab_size
    return modelled_costs(config, outputs, logits_fraction(job.data), pipelines.width)


def partition(path: str, job: Config, pipelines: Pipelines) -> list[Part]:
    """Return the stages of the model at `path`, balanced unless the layout sets the number of layers."""
    costs = layer_costs(path, job, pipelines)
    layers = pipelines.layers or pipelines.balanced(costs)
    if sum(layers) != len(costs[0]):
        raise ValueError(f"layers={layers} has {sum(layers)} layers, but {path} has {len(costs[0])}.")
    return parts(layers, pipelines.head_degree)


def load_stage(path: str, settings: ModelConfig, device: str, part: Part, value: bool) -> PreTrainedModel:
    """Return a stage of the policy at `path`, or of the value model, whose head is zero unless `path` has one.

    Raises ValueError if the family can't be split into stages, or `path` lacks a tensor of the stage.
    """
    trust, labels = settings.trust_remote_code, {"num_labels": 1} if value else {}
    config, dtype = AutoConfig.from_pretrained(path, trust_remote_code=trust, **labels), getattr(torch, settings.dtype)
    register_language_models(config)
    zero_fields(config)
    with torch.device("meta"):
        if value:
            model = value_class(config, trust)._from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust, dtype=dtype)
    _prune(model, part)
    _fill(model, path, part)
    return prepare_for_training(model.to(device), settings)


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether head and embedding of this model are one tensor, on the same stage or not."""
    return HEAD in (model.all_tied_weights_keys or ())


def _prune(model: PreTrainedModel, part: Part) -> None:
    base = model.base_model
    if missing := [name for name in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(base, name)]:
        raise ValueError(
            f"{type(model).__name__} has no {', '.join(missing)} and can't be split into stages. Train it without "
            "pipeline parallelism."
        )
    for index in range(len(base.layers)):
        if index not in part.layers:
            base.layers[index] = MissingLayer()
    if not part.first:
        base.embed_tokens = MissingLayer()
    if not part.last:
        base.norm = MissingLayer()
    if part.head is None:
        setattr(model, "score" if hasattr(model, "score") else "lm_head", MissingLayer())
    elif part.shares_head:
        model.lm_head = _share_of(model, *part.head)


def _share_of(model: PreTrainedModel, share: int, head_degree: int) -> torch.nn.Linear:
    """Return an uninitialized share of the head; its `first_id` is the token of the first row."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.out_features % head_degree:
        raise ValueError(
            f"training.vocabulary_parallel=true: the head of a {type(model).__name__} must be a linear layer with a "
            f"number of tokens divisible by {head_degree} stages, but is {head}; set it to false."
        )
    rows = head.out_features // head_degree
    with torch.device("meta"):
        share_of_head = torch.nn.Linear(head.in_features, rows, head.bias is not None, dtype=head.weight.dtype)
    share_of_head.first_id = share * rows
    return share_of_head


def _rows(model: PreTrainedModel) -> slice:
    """Return the rows of the head that this share has."""
    return slice(model.lm_head.first_id, model.lm_head.first_id + model.lm_head.out_features)


def _fill(model: PreTrainedModel, path: str, part: Part) -> None:
    """Load the weights at `path` in place of meta tensors, and compute the rotary table."""
    names = set(model.state_dict())
    found = _tensors(path)
    aliases = {name: name for name in names}
    if is_tied(model) and HEAD not in found:
        aliases[HEAD] = EMBEDDING
    aliases |= {alias: name for name in found if (alias := head_name(name)) in names}
    dtypes = dict.fromkeys(names, model.dtype) | {name: each.dtype for name, each in model.named_buffers()}
    state: dict[str, torch.Tensor] = {}
    share = {name for name in names if part.shares_head and name.startswith("lm_head.")}
    for name in names:
        if (saved := found.get(aliases[name])) is not None:
            state[name] = (saved[_rows(model)] if name in share else saved).to(dtypes[name], copy=True)
    for name in names - state.keys():
        if name.startswith("score."):
            state[name] = torch.zeros(model.get_parameter(name).shape, dtype=dtypes[name])
    if missing := sorted(names - state.keys()):
        raise ValueError(
            f"{path} has no tensor {missing[0]} ({len(missing)} missing). Its names must match the model's."
        )
    model.load_state_dict(state, assign=True)
    model.base_model.rotary_emb = type(model.base_model.rotary_emb)(config=model.config)
    if share:
        for parameter in model.lm_head.parameters():  # attributes of DeepSpeed and Megatron
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0
    elif is_tied(model) and EMBEDDING in names and HEAD in names:
        model.lm_head.weight = model.base_model.embed_tokens.weight
    if left := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]:
        raise ValueError(
            f"{type(model).__name__} does not store {left[0]} in checkpoints, so its stages can't be loaded."
        )


def _tensors(path: str) -> dict[str, torch.Tensor]:
    """Return all tensors at `path`, mapped into memory."""
    quiet = {"_raise_exceptions_for_missing_entries": False}
    if index := cached_file(path, "model.safetensors.index.json", **quiet):
        shards = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
        return {name: tensor for shard in shards for name, tensor in map_tensors(cached_file(path, shard))}
    if whole := cached_file(path, "model.safetensors", **quiet):
        return dict(map_tensors(whole))
    raise FileNotFoundError(f"{path} has no model.safetensors, which pipeline stages need. Convert the checkpoint.")
