"""Compute a model's sizes from its config.json by building its classes on the meta device, without weights.

The KV cache follows vLLM: one latent vector per token with MLA, one head for all queries with multi-query attention.
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

MLA_FAMILIES = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash"}
)
"""Families that vLLM serves with multi-head latent attention."""
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
HYBRID = ("layers_block_type", "block_types", "attn_type_list", "hybrid_override_pattern", "linear_attn_config")
"""Fields in which configurations of hybrid models list the kind of each layer."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Layout of an engine's KV cache."""

    heads: int  # split over tensor-parallel devices, or copied if there are too few
    numbers: int  # elements per token and head, keys and values
    full: int  # number of layers that cache all tokens
    sliding: int = 0  # number of layers that cache `window` tokens
    window: int = 0

    def bytes_of(self, tokens: int, item: int, width: int = 1, step_tokens: int = 0) -> int:
        """Return a sample's bytes on each of `width` tensor-parallel devices. `step_tokens`: maximum tokens of an
        engine step. vLLM groups layers into groups of equal size, and caches a window plus the tokens of a step."""
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
    """Sizes of a model, in numbers of parameters."""

    parameters: int  # of the trained model, without a vision tower
    layers: tuple[int, ...]  # of each decoder layer
    embedding: int
    head: int  # of the output layer, also if tied to the embedding
    active: float  # fraction of the layers' parameters used per token: below 1 in mixtures of experts
    hidden: int
    intermediate: int  # width of the widest part of a layer; of all experts used per token
    heads: int
    head_width: int
    vocabulary: int  # outputs of the head: vocabulary size, or 1 for a value model
    cache: Cache
    model: MetaModel | None = field(repr=False)  # None for a model that is only served
    experts: int = 0  # per layer of a mixture of experts
    experts_used: int = 0
    modules: int = 0  # number of modules with parameters
    tower: int = 0  # of a video model's tower and projector
    sight: tuple[int, int, int] = (0, 0, 0)  # the tower's layers, hidden size and intermediate size
    embedded: int = 0  # size of a visual token's embedding, for all layers that receive it

    def share(self, width: int) -> Shape:
        """Return the shape on each of `width` tensor-parallel ranks; cached by width."""
        return self if width == 1 else _share(self, width)

    @property
    def expert_share(self) -> float:
        """Fraction of the layers' parameters that belong to experts."""
        return (1 - self.active) / (1 - self.experts_used / self.experts) if self.active < 1 else 0.0

    def tower_activation_bytes(self, tokens: int, item: int) -> int:
        """Return the activation bytes of a trained tower for a unit of `tokens` tokens of four patches. An estimate for
        gated layers, since a tower's code depends on grid values and can't run on meta tensors."""
        layers, hidden, intermediate = self.sight
        return 4 * tokens * layers * (2 * hidden * (4 + 2 * item) + 4 * (hidden + intermediate) * item)

    @property
    def passed(self) -> float:
        """Number of layer parameters used per token, without the head."""
        return sum(self.layers) * self.active


@functools.cache
def _share(shape: Shape, width: int) -> Shape:
    mine = shape.model.share(width)
    layers = tuple(sum(each.numel() for each in layer.parameters()) for layer in mine.stack)
    held = shape.parameters - sum(shape.layers) + sum(layers)
    return replace(shape, parameters=held, layers=layers, heads=shape.heads // width, model=mine)


def read_shape(path: str, key: str, trust_remote_code: bool = False, value: bool = False) -> Shape:
    """Return the shape of the policy at `path`, or of a value model initialized from it. Raises ConfigError that names
    `key`."""
    from transformers import AutoConfig

    from rlfuse.engines.memory.tracing import MetaModel, first_line
    from rlfuse.engines.trainer.models import prepare_for_training
    from rlfuse.errors import VideoError

    config = None
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        tower = _tower(config)
        model = _meta_model(config, trust_remote_code, value)
        traced = MetaModel(prepare_for_training(model, ModelConfig()), _stack(model))
        return replace(_shape_of(traced, value), **tower)
    except VideoError as error:
        raise ConfigError([f"{key}={path}: {error}"]) from error
    except Exception as error:  # model code may raise anything for an invalid configuration
        family = f" of a {type(config).__name__}" if config is not None else ""
        raise ConfigError([f"{key}={path}: the sizes{family} can't be computed: {first_line(error)}"]) from error


def shapes_of(config: Config) -> dict[str, Shape]:
    """Return the shapes of `actor`, and of `critic` and `reference` if the job has them."""
    path, trust = config.model.path, config.model.trust_remote_code
    shapes = {"actor": read_shape(path, "model.path", trust)}
    if config.uses_critic:
        shapes["critic"] = read_shape(config.critic.path or path, "critic.path", trust, value=True)
    if config.uses_reference:
        other = config.ref.path not in (None, path)
        shapes["reference"] = read_shape(config.ref.path, "ref.path", trust) if other else shapes["actor"]
    return shapes


def served_shapes(config: Config, device: str) -> dict[str, Shape]:
    """Return the shapes of reward models and judges that run on the slots' GPUs, by key."""
    if device == "cpu" or config.reward.device == "cpu":
        return {}
    paths, trust = {}, config.model.trust_remote_code
    if config.reward.model_path:
        paths["reward.model_path"] = config.reward.model_path
    for number, entry in enumerate(config.reward.functions):
        if isinstance(entry, dict) and entry.get("path") == JUDGE:
            paths[f"reward.functions[{number}].kwargs.model"] = entry["kwargs"]["model"]
    return {key: read_shape(path, key, trust, value=key == "reward.model_path") for key, path in paths.items()}


def _meta_model(config: PreTrainedConfig, trust_remote_code: bool, value: bool) -> PreTrainedModel:
    """Return the model of trainer ranks on the meta device; for video models with an untrained tower, the text
    model."""
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
    """Return the fields of `Shape` of a video model's tower. Raises VideoError for an unsupported one, as `rlfuse
    train` does."""
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
    if isinstance(dense, Sequence):  # one per layer
        dense = max(dense)
    if used is None:
        return dense
    narrow = getattr(text, "moe_intermediate_size", None)
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return max(dense, used * narrow + shared) if narrow else used * dense


def _cache(text: PreTrainedConfig, stateful: bool) -> Cache:
    """Return the cache layout as vLLM's `ModelArchConfigConvertor` reads it from the configuration.

    Raises ValueError if a layer has a recurrent state, for which vLLM adds blocks and pads attention blocks.
    `stateful`: of the transformers class; families without `layer_types` list their layers in one of `HYBRID`.
    """
    layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    other = sorted({*kinds} - ATTENTION_KINDS) or [name for name in HYBRID if getattr(text, name, None)]
    if other or stateful:
        raise ValueError(
            f"layers with {', '.join(other) or 'recurrent states'} have states that memory plans do not support"
        )
    if text.model_type in MLA_FAMILIES:
        return Cache(1, text.kv_lora_rank + text.qk_rope_head_dim, layers)
    heads = text.num_attention_heads
    shared = getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False)
    keys = 1 if shared else _first(text, ("n_head_kv", "num_kv_heads", "num_key_value_heads")) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    window = getattr(text, "sliding_window", None) or 0
    every = window and not getattr(text, "layer_types", None)
    sliding = layers if every else kinds.count("sliding_attention") if window else 0
    return Cache(keys, 2 * width, layers - sliding, sliding, window)
