"""Read a model's sizes from its config.json: its classes are built on the meta device, nothing is downloaded.

The KV cache is as vLLM has it: one latent vector per token with MLA, one head for all queries with multi-query.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlfuse.config.facts import EXPERTS, EXPERTS_USED
from rlfuse.config.rewards import JUDGE
from rlfuse.config.schema import Config, ModelConfig
from rlfuse.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from rlfuse.engines.memory.tracing import MetaModel

LATENT = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash"})
"""Families that vLLM serves with multi-head latent attention."""
ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
HYBRID = ("layers_block_type", "block_types", "attn_type_list", "hybrid_override_pattern", "linear_attn_config")
"""Where configurations of hybrid models name the kind of each layer."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of a token in one layer of an engine."""

    heads: int  # that tensor-parallel devices divide, or copy where there are too few
    numbers: int  # of each head
    full: int  # layers that keep all tokens
    sliding: int = 0  # layers that keep `window` tokens
    window: int = 0

    def bytes_of(self, tokens: int, item: int, width: int = 1, step_tokens: int = 0) -> int:
        """Return a sample's bytes on each of `width` tensor-parallel devices. `step_tokens`: the most that the engine
        takes in one step. vLLM keeps layers in groups of one size, and a window's tokens beside those of a step."""
        token = max(1, self.heads // width) * self.numbers * item
        windowed = min(tokens, self.window + step_tokens)
        if not self.sliding or not self.full:
            return token * (self.full * tokens + self.sliding * windowed)
        group = min(self.full, self.sliding)
        if max(self.full, self.sliding) < 1.25 * group:
            group = max(self.full, self.sliding)
        return token * group * (-(-self.full // group) * tokens + -(-self.sliding // group) * windowed)


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """One model; sizes of parts are numbers of parameters."""

    parameters: int  # all that the trainer holds, without a vision tower
    layers: tuple[int, ...]  # of each decoder layer
    embedding: int
    head: int  # of the output layer; that of the embedding again where the two are one tensor
    active: float  # share of the layers' parameters that a token passes: below 1 in mixtures of experts
    hidden: int
    intermediate: int  # width of the widest part of a layer; of experts all that a token passes
    heads: int
    head_width: int
    vocabulary: int  # outputs of the head: words, or 1 of a value model
    cache: Cache
    model: MetaModel | None = field(repr=False)  # None for a model that only serves
    experts: int = 0  # in each layer of a mixture, and how many of them a token passes
    experts_used: int = 0
    modules: int = 0  # with parameters of their own
    tower: int = 0  # of a video model's tower and projector
    sight: tuple[int, int, int] = (0, 0, 0)  # the tower's layers, hidden size and intermediate size
    embedded: int = 0  # numbers of a visual token's embedding, for all layers that are fed

    def share(self, width: int) -> Shape:
        """What each of `width` ranks holds, which share the layers. The same shape for the same width."""
        return self if width == 1 else _share(self, width)

    @property
    def expert_share(self) -> float:
        """Share of the layers' parameters that are experts'."""
        return (1 - self.active) / (1 - self.experts_used / self.experts) if self.active < 1 else 0.0

    def tower_activation_bytes(self, tokens: int, item: int) -> int:
        """Bytes that a tower that learns leaves for its backward pass, of a unit of so many tokens of four patches. An
        estimate of gated layers: a tower's code reads the numbers of its grid, and can't run without them."""
        layers, hidden, intermediate = self.sight
        return 4 * tokens * layers * (2 * hidden * (4 + 2 * item) + 4 * (hidden + intermediate) * item)

    @property
    def passed(self) -> float:
        """Parameters of the layers that every token is multiplied by; the head comes on top for those that predict."""
        return sum(self.layers) * self.active


@functools.cache
def _share(shape: Shape, width: int) -> Shape:
    mine = shape.model.share(width)
    layers = tuple(sum(each.numel() for each in layer.parameters()) for layer in mine.stack)
    held = shape.parameters - sum(shape.layers) + sum(layers)
    return replace(shape, parameters=held, layers=layers, heads=shape.heads // width, model=mine)


def read_shape(path: str, key: str, trust_remote_code: bool = False, value: bool = False) -> Shape:
    """The policy at `path`, or the value model made of it. Raises ConfigError, naming `key`."""
    from transformers import AutoConfig

    from rlfuse.engines.memory.tracing import MetaModel, first_line
    from rlfuse.engines.trainer.models import prepare_for_training
    from rlfuse.errors import VideoError

    config = None
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        tower = _tower(config)
        model = _on_paper(config, trust_remote_code, value)
        traced = MetaModel(prepare_for_training(model, ModelConfig()), _stack(model))
        return replace(_shape_of(traced, value), **tower)
    except VideoError as error:
        raise ConfigError([f"{key}={path}: {error}"]) from error
    except Exception as error:  # whatever a family's own code raises for a configuration that it can't take
        family = f" of a {type(config).__name__}" if config is not None else ""
        raise ConfigError([f"{key}={path}: the sizes{family} can't be told: {first_line(error)}"]) from error


def shapes_of(config: Config) -> dict[str, Shape]:
    """`actor`, and `critic` and `reference` where the job has them."""
    path, trust = config.model.path, config.model.trust_remote_code
    shapes = {"actor": read_shape(path, "model.path", trust)}
    if config.uses_critic:
        shapes["critic"] = read_shape(config.critic.path or path, "critic.path", trust, value=True)
    if config.uses_reference:
        other = config.ref.path not in (None, path)
        shapes["reference"] = read_shape(config.ref.path, "ref.path", trust) if other else shapes["actor"]
    return shapes


def served_shapes(config: Config, device: str) -> dict[str, Shape]:
    """Of reward models and judges, where they are on the slots' GPUs."""
    if device == "cpu" or config.reward.device == "cpu":
        return {}
    paths, trust = {}, config.model.trust_remote_code
    if config.reward.model_path:
        paths["reward.model_path"] = config.reward.model_path
    for number, entry in enumerate(config.reward.functions):
        if isinstance(entry, dict) and entry.get("path") == JUDGE:
            paths[f"reward.functions[{number}].kwargs.model"] = entry["kwargs"]["model"]
    return {key: read_shape(path, key, trust, value=key == "reward.model_path") for key, path in paths.items()}


def _on_paper(config: PreTrainedConfig, trust_remote_code: bool, value: bool) -> PreTrainedModel:
    """The model that trainer ranks load, without memory; of video models that are trained in part, that part."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlfuse.engines.trainer.families import value_class
    from rlfuse.video.models.base import register_language_models

    register_language_models(config)
    own = type(config) in AutoModelForCausalLM._model_mapping or bool(getattr(config, "auto_map", None))
    trained = config if own else config.get_text_config()
    with torch.device("meta"):
        if not value:
            return AutoModelForCausalLM.from_config(trained, trust_remote_code=trust_remote_code)
        trained.num_labels = 1
        return value_class(trained, trust_remote_code)._from_config(trained)


def _tower(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of `Shape`, of a video model. Raises VideoError for one that can't be used, as `rlfuse train` does."""
    import torch

    from rlfuse.video.models.base import embedding_width
    from rlfuse.video.video_model import supported_family

    family = supported_family(config)
    if family is None:
        return {}
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in family(config).parameters())
    return {"tower": size, "sight": family.sizes(config), "embedded": embedding_width(config)}


def _stack(model: PreTrainedModel) -> Any:
    import torch

    count, name = model.config.get_text_config().num_hidden_layers, type(model).__name__
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"a {name} has no list of {count} layers (num_hidden_layers)")


def _shape_of(traced: MetaModel, value: bool) -> Shape:
    model, stack = traced.model, traced.stack
    text = model.config.get_text_config()
    layers = tuple(sum(each.numel() for each in layer.parameters()) for layer in stack)
    experts = sum(p.numel() for layer in stack for name, p in layer.named_parameters() if "experts" in name.split("."))
    used, count = _first(text, EXPERTS_USED), _first(text, EXPERTS)
    outputs = 1 if value else text.vocab_size
    heads = text.num_attention_heads
    return Shape(
        parameters=sum(each.numel() for each in model.parameters()),
        layers=layers,
        modules=sum(any(True for _ in each.parameters(recurse=False)) for each in model.modules()),
        embedding=model.get_input_embeddings().weight.numel(),
        head=text.hidden_size * outputs,
        active=1 - (experts * (1 - used / count) / sum(layers) if experts and used and count else 0.0),
        experts=count if experts and used and count else 0,
        experts_used=used if experts and used and count else 0,
        hidden=text.hidden_size,
        intermediate=_widest(text, used if experts else None),
        heads=heads,
        head_width=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=outputs,
        cache=_cache(text, model._is_stateful),
        model=traced,
    )


def _first(text: PreTrainedConfig, names: Sequence[str]) -> int | None:
    return next((found for name in names if (found := getattr(text, name, None))), None)


def _widest(text: PreTrainedConfig, used: int | None) -> int:
    dense = _first(text, ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")) or 4 * text.hidden_size
    if isinstance(dense, Sequence):  # one for each layer
        dense = max(dense)
    if used is None:
        return dense
    narrow = getattr(text, "moe_intermediate_size", None)
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return max(dense, used * narrow + shared) if narrow else used * dense


def _cache(text: PreTrainedConfig, stateful: bool) -> Cache:
    """As vLLM's `ModelArchConfigConvertor` reads the configuration.

    ValueError if a layer has a recurrent state, for which vLLM adds blocks and pads those of attention. `stateful`:
    transformers says so of the model; families without `layer_types` name their layers in one of `HYBRID`.
    """
    layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    other = sorted({*kinds} - ATTENDING) or [name for name in HYBRID if getattr(text, name, None)]
    if other or stateful:
        raise ValueError(f"layers with {', '.join(other) or 'recurrent states'} keep states that no plan knows")
    if text.model_type in LATENT:
        return Cache(1, text.kv_lora_rank + text.qk_rope_head_dim, layers)
    heads = text.num_attention_heads
    shared = getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False)
    keys = 1 if shared else _first(text, ("n_head_kv", "num_kv_heads", "num_key_value_heads")) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    window = getattr(text, "sliding_window", None) or 0
    every = window and not getattr(text, "layer_types", None)
    sliding = layers if every else kinds.count("sliding_attention") if window else 0
    return Cache(keys, 2 * width, layers - sliding, sliding, window)
