"""Model sizes and activations in `rlfuse plan`, compared with real models and with the tensors that torch saves."""

from itertools import accumulate

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    LlamaConfig,
    MixtralConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3VLConfig,
    VideoLlama3Config,
)

from rlfuse.config.schema import Config
from rlfuse.engines.memory import tracing
from rlfuse.engines.memory.estimate import (
    GIB,
    Budget,
    memory_of,
)
from rlfuse.engines.memory.model_sizes import Cache, read_shape
from rlfuse.engines.memory.residency import TRAINING
from rlfuse.engines.memory.tracing import SequenceLengths, _row
from rlfuse.engines.trainer.micro_batch_losses import OBJECTIVES
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import prepare_for_training
from rlfuse.errors import ConfigError

SMALL = dict(
    vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
)  # fmt: skip
FAMILIES = {
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=False),
}


def job(slots=8, **changes) -> Config:
    config = Config()
    config.trainer.n_gpus_per_node, config.cluster.device = slots, "cuda"
    config.data.train_batch_size, config.rollout.n = 64, 4
    for name, value in changes.items():
        node, *rest, last = config, *name.split("__")
        for part in rest:
            node = getattr(node, part)
        setattr(node, last, value)
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_counts_match_the_real_model(tmp_path, family):
    config = FAMILIES[family]
    config.save_pretrained(tmp_path)
    policy, critic = (read_shape(str(tmp_path), "model.path", value=value) for value in (False, True))
    real = AutoModelForCausalLM.from_config(config)
    assert policy.parameters == sum(p.numel() for p in real.parameters())
    config = type(config).from_pretrained(tmp_path, num_labels=1)
    values = AutoModelForTokenClassification.from_config(config)
    assert critic.parameters == sum(p.numel() for p in values.parameters())
    assert sum(policy.layers) == sum(p.numel() for p in real.model.layers.parameters()) and policy.active == 1
    tied = policy.head if family == "tied" else 0
    ends = policy.embedding + policy.head + policy.hidden
    assert policy.parameters == sum(policy.layers) + ends - tied


@pytest.mark.parametrize("kind", [Qwen2_5_VLConfig, Qwen3VLConfig, VideoLlama3Config])
def test_text_part_and_tower_of_a_video_model_add_up_to_the_whole(tmp_path, kind):
    text = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    text |= dict(num_key_value_heads=2, bos_token_id=1, eos_token_id=1)
    vision = dict(hidden_size=32, intermediate_size=64)
    if kind is Qwen2_5_VLConfig:
        vision |= dict(depth=2, num_heads=2, out_hidden_size=64, fullatt_block_indexes=[1])
    elif kind is Qwen3VLConfig:
        vision |= dict(depth=2, num_heads=2, out_hidden_size=64, deepstack_visual_indexes=[0])
    else:
        vision |= dict(num_hidden_layers=2, num_attention_heads=2)
        text["model_type"] = "qwen2"
    config = kind(text_config=text, vision_config=vision)
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path), "model.path")
    whole = AutoModelForImageTextToText.from_config(config)
    assert shape.parameters + shape.tower == sum(p.numel() for p in whole.parameters()) and shape.tower > 0
    assert shape.embedded == 64 * (1 + (kind is Qwen3VLConfig)), "includes the features of a deepstack layer"
    assert read_shape(str(tmp_path), "critic.path", value=True).vocabulary == 1


def test_mixture_of_experts_counts_only_active_parameters(tmp_path):
    sizes = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes)
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path), "model.path")
    model = AutoModelForCausalLM.from_config(config)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert shape.passed == pytest.approx(sum(shape.layers) - 3 / 4 * experts)


SAMPLES = SequenceLengths(((20, 30), (40, 12), (8, 50)))
WIDE = dict(num_hidden_layers=4, vocab_size=96, hidden_size=64, num_attention_heads=4)
NARROW = WIDE | dict(intermediate_size=112, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0)
SLIDING = NARROW | dict(head_dim=16, sliding_window=16)
SPARSE = NARROW | dict(num_experts=8, num_experts_per_tok=4, moe_intermediate_size=32)
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
LATENT = dict(kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=24)
TRACED = {
    "llama": ("LlamaConfig", NARROW), "mistral": ("MistralConfig", SLIDING), "qwen3": ("Qwen3Config", NARROW),
    "gemma2": ("Gemma2Config", SLIDING), "gemma3": ("Gemma3TextConfig", SLIDING | {"layer_types": MIXED}),
    "phi3": ("Phi3Config", NARROW), "olmo2": ("Olmo2Config", NARROW), "granite": ("GraniteConfig", NARROW),
    "stablelm": ("StableLmConfig", NARROW), "opt": ("OPTConfig", WIDE | {"ffn_dim": 112, "word_embed_proj_dim": 64}),
    "gpt2": ("GPT2Config", WIDE), "gpt_bigcode": ("GPTBigCodeConfig", WIDE), "falcon": ("FalconConfig", WIDE),
    "bloom": ("BloomConfig", WIDE), "mixtral": ("MixtralConfig", NARROW | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", SPARSE | {"shared_expert_intermediate_size": 48}),
    "deepseek_v2": ("DeepseekV2Config", SPARSE | LATENT | {"n_group": 1, "topk_group": 1, "n_routed_experts": 8,
                                                           "first_k_dense_replace": 1, "head_dim": 16}),
}  # fmt: skip


def real_pass(config, model, backward):
    """Return the bytes that torch saves in the trainer's forward pass, or the peak of forward and backward."""
    batch = collate([_row(*each) for each in SAMPLES.lengths], "position_ids" in model.forward.__annotations__)
    weights = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found = {}

    def record(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = tensor, storage.nbytes()  # a reference prevents reuse of the address
        return tensor

    if not backward:
        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            OBJECTIVES["actor"](config, model, batch)
        return sum(size for _, size in found.values())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss, _ = OBJECTIVES["actor"](config, model, batch)
        loss.backward()
    moves = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(accumulate(each.nbytes() for each in sorted(moves, key=lambda each: each.start_ns())))


@pytest.mark.slow
@pytest.mark.parametrize("family", TRACED)
def test_planned_activations_match_what_torch_saves(tmp_path, family):
    kind, sizes = TRACED[family]
    given, config = getattr(transformers, kind)(**sizes), Config()
    given.save_pretrained(tmp_path)
    config.model.dtype = "bfloat16" if family in ("qwen3", "opt", "mixtral") else "float32"
    shape = read_shape(str(tmp_path), "model.path")
    model = AutoModelForCausalLM.from_config(given, dtype=getattr(torch, config.model.dtype))
    assert shape.parameters == sum(p.numel() for p in model.parameters()) and len(shape.layers) == 4
    model = prepare_for_training(model, config.model).train()
    planned = shape.model.work(config, "actor", SAMPLES, "cpu")
    assert planned.kept == pytest.approx(real_pass(config, model, backward=False), rel=0.1)
    if family in ("llama", "gpt2"):
        assert planned.peak == pytest.approx(real_pass(config, model, backward=True), rel=0.1)
        config.model.enable_gradient_checkpointing = True
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        again = shape.model.work(config, "actor", SAMPLES, "cpu")
        assert (
            again.peak == pytest.approx(real_pass(config, model, backward=True), rel=0.1) and again.peak < planned.peak
        )


def test_kv_cache_sizes_match_vllm(tmp_path):
    def cache(kind, **more):
        getattr(transformers, kind)(**more).save_pretrained(tmp_path)
        return read_shape(str(tmp_path), "model.path").cache

    assert cache("FalconConfig", **WIDE).bytes_of(10, 2) == cache("GPTBigCodeConfig", **WIDE).bytes_of(10, 2, width=4)
    assert cache("FalconConfig", **WIDE) == Cache(1, 32, 4) and cache("GPT2Config", **WIDE) == Cache(4, 32, 4)
    latent = cache("DeepseekV2Config", **TRACED["deepseek_v2"][1])
    assert latent.bytes_of(10, 2) == latent.bytes_of(10, 2, width=4) == 10 * 4 * (32 + 16) * 2
    mixed = cache("Gemma3TextConfig", **TRACED["gemma3"][1])
    assert mixed == Cache(2, 32, 1, 3, 16)
    assert mixed.bytes_of(1000, 2, step_tokens=50) == 2 * 32 * 2 * (1000 + 3 * 66)
    assert cache("MistralConfig", **SLIDING).bytes_of(1000, 2, step_tokens=50) == 2 * 32 * 2 * 4 * 66


ODD = {
    "frozen": ("Ernie4_5_MoeConfig", SPARSE | {"moe_num_experts": 8, "moe_k": 2}),
    "widths": ("Gemma3nTextConfig", {
        "num_hidden_layers": 5, "num_kv_shared_layers": 0, "vocab_size": 96, "vocab_size_per_layer_input": 96,
        "hidden_size": 64, "hidden_size_per_layer_input": 16, "intermediate_size": [96, 112, 128, 96, 96],
        "layer_types": [*MIXED, "full_attention"], "activation_sparsity_pattern": [0.0] * 5,
    }),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD)
def test_frozen_parameters_and_per_layer_widths_are_planned(tmp_path, kind):
    name, sizes_of = ODD[kind]
    getattr(transformers, name)(**sizes_of).save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path), "model.path")
    config = job(actor__ppo_max_token_len_per_gpu=1024)
    assert memory_of(config, {"actor": shape}, Budget("cuda", 80 * GIB)).total(TRAINING) > 0
    assert any(not each.requires_grad for each in shape.model.model.parameters()) == (kind == "frozen")
    assert shape.intermediate == 128 or kind == "frozen"


@pytest.mark.parametrize(
    ("name", "why"),
    [("Gemma4TextConfig", "head_dim"), ("ReformerConfig", "is_decoder"), ("Lfm2MoeConfig", "NoneType")],
)
def test_family_whose_code_fails_is_reported_with_the_reason(tmp_path, name, why):
    getattr(transformers, name)().save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_shape(str(tmp_path), "ref.path")
    assert f"ref.path={tmp_path}: the sizes of a {name} can't be computed: " in str(caught.value) and why in str(
        caught.value
    )


def test_gradient_of_indexed_rows_is_counted_once():
    """Count it as autograd does without hooks: accumulated in place into the zeros."""
    with tracing._MemoryCounter(torch.nn.Module()) as live:
        whole = torch.zeros(100, 10, device="meta", requires_grad=True)
        whole[torch.zeros(3, dtype=torch.int64, device="meta")].sum().backward()
    assert 8000 < live.peak < 10000
