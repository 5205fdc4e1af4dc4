"""A model's sizes from its config.json alone: its real classes are built without memory, and nothing is downloaded.

Role: `read_shape` is called by `rlfuse plan` for actor, critic and reference; what follows from a `Shape` is pure.
Invariant: `parameters` is what the loaded model has, a tensor shared by embedding and head counted once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlfuse.config.checks import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """One model; sizes of parts are numbers of parameters."""

    parameters: int
    """All that the trainer holds, without a vision tower."""
    layers: tuple[int, ...]
    """Of each decoder layer."""
    embedding: int
    head: int
    """Of the output layer; that of the embedding again where the two are one tensor."""
    active: float
    """Share of the layers' parameters that a token passes: below 1 in mixtures of experts."""
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    """Outputs of the head: words, or 1 of a value model."""
    norms_queries: bool
    tower: int = 0
    """Of a video model's tower and projector."""

    @property
    def passed(self) -> float:
        """Parameters of the layers that every token is multiplied by; the head comes on top for those that predict."""
        return sum(self.layers) * self.active

    def kv_bytes_per_token(self, item: int, width: int = 1) -> int:
        """Of the KV cache on each of `width` tensor-parallel devices, which copy heads they can't divide."""
        return 2 * len(self.layers) * max(1, self.kv_heads // width) * self.head_width * item

    def kept_per_token(self, item: int) -> int:
        """Bytes that one token leaves in one layer for its backward pass; attention keeps no scores.

        Of each norm its float32 input and both its outputs, then queries, keys, values, attention's output, and four
        tensors of the gated MLP. Tests compare it with what torch really saves.
        """
        norms = 2 * self.hidden * (4 + 2 * item)
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_width * item + 4 * self.heads
        if self.norms_queries:
            attention += (self.heads + self.kv_heads) * self.head_width * (4 + item)
        return norms + attention + 4 * self.intermediate * item


def read_shape(path: str, key: str, trust_remote_code: bool = False, value: bool = False) -> Shape:
    """The policy at `path`, or the value model made of it. Raises ConfigError, naming `key`."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification

    from rlfuse.video import language_models  # noqa: F401, makes transformers' auto classes know Qwen2.5-VL

    kind = AutoModelForTokenClassification if value else AutoModelForCausalLM
    labels = {"num_labels": 1} if value else {}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **labels)
        text = config.get_text_config()
        text.num_labels = 1 if value else text.num_labels
        with torch.device("meta"):
            own = type(config) in kind._model_mapping or bool(getattr(config, "auto_map", None))
            model = kind.from_config(config if own else text, trust_remote_code=trust_remote_code)
            tower = 0
            if hasattr(config, "vision_config"):
                bare = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
                tower = sum(p.numel() for n, p in bare.named_parameters() if "language_model" not in n)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError([f"{key}={path}: its sizes can't be told: {str(error).strip().splitlines()[0]}"]) from error
    return shape_of(model, text, tower, value)


def shape_of(model, text, tower: int = 0, value: bool = False) -> Shape:
    """The sizes of a model, on any device, with this text configuration."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = [0] * text.num_hidden_layers
    experts = 0
    for name, size in sizes.items():
        parts = name.split(".")
        if "layers" in parts and parts[parts.index("layers") + 1].isdigit():
            layers[int(parts[parts.index("layers") + 1])] += size
            experts += size if "experts" in parts else 0
    embedding = model.get_input_embeddings().weight.numel()
    outputs = 1 if value else text.vocab_size
    used = getattr(text, "num_experts_per_tok", None)
    count = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    sparse = experts * (1 - used / count) if used and count else 0.0
    return Shape(
        parameters=sum(sizes.values()),
        layers=tuple(layers),
        embedding=embedding,
        head=text.hidden_size * outputs,
        active=1 - sparse / max(1, sum(layers)),
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_width=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocabulary=outputs,
        norms_queries=any("q_norm" in name for name in sizes),
        tower=tower,
    )
