"""Training passes of every family run without dropout; modules with other randomness are refused by name."""

import pytest
import torch
from test_moves import group  # noqa: F401
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    XGLMConfig,
)

from rlfuse.config.schema import Config, ModelConfig
from rlfuse.engines.pipeline import pipeline_rank
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.trainer import reward_model_rank, trainer_rank
from rlfuse.engines.trainer.dropout import check_repeatable, zero_fields
from rlfuse.engines.trainer.models import load_critic, load_policy, load_reward_model, prepare_for_training
from rlfuse.errors import EngineError

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0)
HALF = dict(attention_dropout=0.5, hidden_dropout=0.5)
FAMILIES = {
    "opt": OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5, layerdrop=0.5),
    "xglm": XGLMConfig(
        vocab_size=64, d_model=32, num_layers=2, attention_heads=2, ffn_dim=48, dropout=0.5, attention_dropout=0.5,
        activation_dropout=0.5, layerdrop=0.5,
    ),
    "biogpt": BioGptConfig(
        **SIZES, intermediate_size=48, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5,
        activation_dropout=0.5, layerdrop=0.5,
    ),
    "falcon": FalconConfig(**SIZES, **HALF),
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2, **HALF),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=48, **HALF),
    "phi": PhiConfig(**SIZES, intermediate_size=48, resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5),
    "mixtral": MixtralConfig(
        **SIZES, intermediate_size=48, num_key_value_heads=2, num_local_experts=2, attention_dropout=0.5,
        router_jitter_noise=0.5,
    ),
}  # fmt: skip
IDS = torch.arange(4, 12)[None]


def passes(model):
    """Return the logits of two passes in training mode, without gradients."""
    model.train()
    with torch.no_grad():
        return [model(input_ids=IDS, use_cache=False).logits for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_training_passes_of_a_loaded_policy_are_deterministic(tmp_path, family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    assert not torch.equal(*passes(model)), "the family has dropout by default"
    model.save_pretrained(tmp_path)
    assert torch.equal(*passes(load_policy(str(tmp_path), ModelConfig(dtype="float32"))))
    prepare_for_training(model, ModelConfig())  # built from a configuration, as for plans
    assert torch.equal(*passes(model))


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_critic, load_reward_model])
def test_training_passes_of_critics_and_reward_models_are_deterministic(tmp_path, load):
    """Cover the additional dropout before the head of these models."""
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=1, n_head=2, pad_token_id=0, classifier_dropout=0.5, summary_first_dropout=0.5
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load(str(tmp_path), ModelConfig(dtype="float32"), *([["score"]] if load is load_reward_model else []))
    for head in model.parameters():
        nn.init.normal_(head)  # a new head returns zeros
    assert torch.equal(*passes(model))


def test_dropout_fields_of_nested_configurations_are_zeroed():
    config = Qwen2_5_VLConfig(text_config={"attention_dropout": 0.1, "num_hidden_layers": 2})
    config.vision_config.drop_path_rate = 0.2
    config.text_config.extra = {"ffn_dropout": 0.3, "drop_tokens": True, "rope_theta": 0.5}
    zero_fields(config)
    assert config.text_config.attention_dropout == config.vision_config.drop_path_rate == 0
    assert config.text_config.extra == {"ffn_dropout": 0.0, "drop_tokens": True, "rope_theta": 0.5}


# Noise of unknown modules ---------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Module that adds noise to its output or to its child's input, or that randomly skips its child."""

    def __init__(self, child, where):
        super().__init__()
        self.child, self.where, self.rate = child, where, 0.5

    def forward(self, x):
        if self.where == "skips":
            return self.child(x) if not self.training or torch.rand(()) < self.rate else x
        noise = lambda each: nn.functional.dropout(each, self.rate, self.training)  # noqa: E731
        return self.child(noise(x)) if self.where == "input" else noise(self.child(x))


def skips_once(seed):
    """Return whether exactly one of two passes skips the child."""
    return int((torch.rand(2, generator=torch.Generator().manual_seed(seed)) < 0.5).sum()) == 1


def with_noise(model, where):
    layer = model.base_model.layers[0]
    layer.mlp = Noisy(layer.mlp, where)
    return model


def small():
    torch.manual_seed(0)
    return prepare_for_training(
        AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, num_key_value_heads=2, intermediate_size=48)),
        ModelConfig(),
    )


@pytest.mark.parametrize("where", ["input", "output", "skips"])
def test_a_noisy_module_is_refused_by_name(where):
    model = with_noise(small(), where).eval()
    torch.manual_seed(next(seed for seed in range(99) if skips_once(seed)))
    before = torch.get_rng_state()
    run = lambda: model(input_ids=IDS, use_cache=False)  # noqa: E731
    with pytest.raises(EngineError, match=r"The critic's model\.layers\.0\.mlp, a Noisy, returned different values"):
        check_repeatable(model, run, "critic")
    assert torch.equal(torch.get_rng_state(), before) and not model.training
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    model.base_model.layers[0].mlp.rate = 0.0 if where != "skips" else 1.0
    check_repeatable(model, run, "critic")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    small().save_pretrained(path)
    return str(path)


def of_actor(config):
    trainer_rank.TrainerRank(config, 0, 1, "cpu").setup()


def of_reward_model(config):
    reward_model_rank.RewardModelRank(config, 0, 1, "cpu").setup(0, ["score"])


def of_stages(config):
    pipeline_rank.PipelineRank(config, 0, 1, "cpu").setup([Pipelines("actor", 1)])


KINDS = [(of_actor, trainer_rank, "load_policy", stage, "actor") for stage in (1, 3)]
KINDS += [(of_reward_model, reward_model_rank, "load_reward_model", 1, "reward model")]
KINDS += [(of_stages, pipeline_rank, "load_stage", 1, "actor")]


@pytest.mark.slow
@pytest.mark.parametrize("setup, module, load, stage, role", KINDS)
def test_every_kind_of_rank_refuses_noise_at_setup(monkeypatch, folder, setup, module, load, stage, role):
    config = Config()
    config.algorithm.adv_estimator, config.model.path, config.actor.zero_stage = "grpo", folder, stage
    loaded = getattr(module, load)
    monkeypatch.setattr(module, load, lambda *arguments: with_noise(loaded(*arguments), "output"))
    if module is not pipeline_rank:
        monkeypatch.setattr(trainer_rank.TrainerRank, "parallel", None, raising=False)
        monkeypatch.setattr(trainer_rank.TrainerRank, "tensor", None, raising=False)
    with pytest.raises(EngineError, match=rf"The {role}'s model\.layers\.0\.mlp, a Noisy, returned different values"):
        setup(config)
