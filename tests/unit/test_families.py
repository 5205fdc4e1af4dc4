"""Critics of every model family are loaded, trained, saved and resumed; unsupported models are refused."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_models import SMALL, rows
from transformers import AutoModelForCausalLM, Qwen2ForSequenceClassification, Qwen2ForTokenClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from rlfuse.config.schema import Config, ModelConfig
from rlfuse.engines.pipeline.loading import load_stage
from rlfuse.engines.pipeline.partition import parts
from rlfuse.engines.trainer.families import training_problems
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import head_inputs, load_critic, packs_exactly, response_values
from rlfuse.engines.trainer.saving import CheckpointWriter
from rlfuse.engines.weights.exporting import Exporter
from rlfuse.errors import ConfigError
from rlfuse.run import build

FLOAT32 = ModelConfig(dtype="float32")
HEADS = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
GPT = dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
MIXTURE = SMALL | dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
NO_WIDTH = {name: size for name, size in SMALL.items() if name != "head_dim"} | dict(pad_token_id=0)
FAMILIES = {
    "Bloom": GPT,
    "Falcon": HEADS,
    "GPT2": GPT | dict(n_positions=64),
    "GPTNeoX": HEADS | dict(intermediate_size=64),
    "Gemma2": SMALL,
    "Gemma3Text": SMALL,
    "Granite": SMALL,
    "Mixtral": MIXTURE,
    "OPT": HEADS | dict(ffn_dim=64, word_embed_proj_dim=16),
    "Olmo2": SMALL,
    "Olmoe": MIXTURE,
    "Phi3": NO_WIDTH,
    "Qwen2": SMALL,
    "Qwen3Moe": MIXTURE,
}
SIZES = FAMILIES | {"Mamba": dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)}


def saved_policy(folder, family="Qwen2"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def export(model, folder):
    """Save a model as a trainer rank does."""
    exporter, files = Exporter(model, 0), CheckpointWriter()
    exporter.save_pretrained(folder, [[name for name, _ in exporter.sizes()]], files)
    assert files.problem is None
    return str(folder)


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_is_initialised_from_a_policy_of_any_family(tmp_path, family):
    path = saved_policy(tmp_path / "policy", family)
    critic, policy = load_critic(path, FLOAT32), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert same(critic.base_model, policy.base_model) and not critic.score.weight.any() and not critic.score.bias.any()
    batch = rows()
    assert not response_values(critic, collate(batch, packed=False)).any(), "initial values are zero"
    torch.nn.init.normal_(critic.score.weight)
    values = response_values(critic, collate(batch, packed=False))
    alone = torch.cat([response_values(critic, collate([row], packed=False)) for row in batch])
    torch.testing.assert_close(values, alone, atol=1e-5, rtol=1e-5)
    values.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in critic.parameters())
    again = load_critic(export(critic, tmp_path / "saved"), FLOAT32)
    assert same(again, critic) and type(again).__name__ == type(critic).__name__ == critic.config.architectures[0]


def test_packing_support_of_a_new_critic_is_detected(tmp_path):
    """Compare the inputs of its head, since the values of a new critic are all 0."""
    for family, packs in (("Qwen2", True), ("Mamba", False)):
        critic = load_critic(saved_policy(tmp_path / family, family), FLOAT32)
        assert packs_exactly(critic, 64, torch.float32, "cpu", head_inputs) == packs, family


@pytest.mark.parametrize("name", ["v_head.summary", "v_head", "value_head.summary", "value_head", "classifier"])
def test_value_heads_with_other_names_are_loaded(tmp_path, name):
    """Save them as `score`, the name in transformers, and load them in a pipeline stage as well."""
    critic = load_critic(saved_policy(tmp_path / "policy"), FLOAT32)
    torch.nn.init.normal_(critic.score.weight)
    folder = tmp_path / "theirs"
    file = next((tmp_path / "theirs").glob("*.safetensors")) if export(critic, folder) else None
    tensors = {key.replace("score", name): tensor for key, tensor in load_file(file).items() if key != "score.bias"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    found = load_critic(str(folder), FLOAT32)
    assert same(found, critic)
    assert same(Qwen2ForTokenClassification.from_pretrained(export(found, tmp_path / "ours")), critic)
    assert same(load_stage(str(folder), FLOAT32, "cpu", *parts([2]), value=True), critic)


def test_a_critic_can_be_initialised_from_a_reward_model(tmp_path):
    config = transformers.Qwen2Config(**SMALL, num_labels=1, pad_token_id=0)
    reward_model = Qwen2ForSequenceClassification(config)
    reward_model.save_pretrained(tmp_path)
    critic = load_critic(str(tmp_path), FLOAT32)
    assert torch.equal(critic.score.weight, reward_model.score.weight) and critic.score.weight.any()
    assert not critic.score.bias.any(), "reward models have no bias"


REMOTE_CODE = """
import torch
from transformers import Qwen2Config, Qwen2Model, Qwen2PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

class Values(Qwen2PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model, self.value_head = Qwen2Model(config), torch.nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, **inputs):
        return TokenClassifierOutput(logits=self.value_head(self.model(**inputs).last_hidden_state))
"""


def test_a_remote_code_class_is_used_if_trusted(tmp_path):
    """Load its weights into the value model of rlfuse without trust_remote_code."""
    config = transformers.Qwen2Config(**SMALL, auto_map={"AutoModelForTokenClassification": "values.Values"})
    config.save_pretrained(tmp_path)
    (tmp_path / "values.py").write_text(REMOTE_CODE)
    theirs = get_class_from_dynamic_module("values.Values", str(tmp_path))(config)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    trusted = load_critic(str(tmp_path), ModelConfig(dtype="float32", trust_remote_code=True))
    assert same(trusted, theirs) and trusted.is_remote_code() and theirs.value_head.weight.any()
    assert packs_exactly(trusted, 64, torch.float32, "cpu", head_inputs)
    ours = load_critic(str(tmp_path), FLOAT32)
    assert torch.equal(ours.score.weight, theirs.value_head.weight) and not ours.is_remote_code()


def test_pipeline_stages_of_a_family_without_a_value_class(tmp_path):
    path = saved_policy(tmp_path, "Granite")
    whole = load_critic(path, FLOAT32)
    first, last = (load_stage(path, FLOAT32, "cpu", part, value=True) for part in parts([1, 1]))
    assert first.state_dict().keys() | last.state_dict().keys() == whole.state_dict().keys()
    assert type(first).__name__ == type(whole).__name__ == "GraniteValueModel"


def test_an_unsupported_critic_is_refused_with_its_key(tmp_path):
    config, mamba = Config(), str(tmp_path / "mamba")
    saved_policy(mamba, "Mamba")
    config.model.path = saved_policy(tmp_path / "policy")
    assert config.uses_critic and training_problems(config) == []
    config.critic.path = mamba
    (problem,) = training_problems(config)
    assert problem.startswith(f"critic.path={mamba}: models of type mamba have recurrent state")
    config.reward.functions = ["rlfuse.rewards.verifiers.exact:score"]
    config.trainer.default_local_dir, config.trainer.experiment_name = str(tmp_path / "runs"), "one"
    with pytest.raises(
        ConfigError, match=r"critic\.path=.*mamba"
    ):  # before data is loaded, Ray starts or a run folder is created
        build.run(config)
    assert not (tmp_path / "runs").exists()
    config.critic.path, config.model.path = None, mamba
    assert [problem.split("=")[0] for problem in training_problems(config)] == ["model.path", "critic.path"]
    config.algorithm.adv_estimator, config.actor.use_kl_loss, config.ref.path = "grpo", True, config.model.path
    config.model.path = str(tmp_path / "policy")
    assert [problem.split("=")[0] for problem in training_problems(config)] == ["ref.path"]
