"""Tensor parallelism: supported models, shards of each rank, and their memory in plans."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPT2Config,
    MixtralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config, ModelConfig
from rlfuse.engines.memory.estimate import GIB, Budget, memory_of, parameters_on
from rlfuse.engines.memory.model_sizes import read_shape
from rlfuse.engines.trainer.models import prepare_for_training
from rlfuse.engines.trainer.tensor_parallel import MemoryOnlyGroup, check_shardable, shard_layers
from rlfuse.errors import EngineError
from rlfuse.tools.planning.cluster_file import Cluster
from rlfuse.tools.planning.space import VOCABULARY, axes_of, structures
from rlfuse.tools.planning.tables import placements, stage_note

SIZES = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def small(config=Qwen2Config, **more):
    return config(**{**SIZES, "num_key_value_heads": 2, **more})


def sharded(config, width):
    """Return the model of the first rank and the complete model."""
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(config) for _ in range(2)]
    return shard_layers(prepare_for_training(models[0], ModelConfig()), MemoryOnlyGroup(width)), models[1]


@pytest.mark.parametrize(
    ("config", "width", "message"),
    [
        (small(num_attention_heads=6), 4, "=4 must divide the 6 attention heads of a qwen2"),
        (small(num_attention_heads=12, num_key_value_heads=3), 2, "be a multiple of its 3 heads of keys and values"),
        (small(intermediate_size=50), 4, "=4 must divide the 50 numbers between a qwen2's MLPs"),
        (small(Olmo2Config), 2, "plan of a olmo2 has colwise_gather_output, rowwise_split_input layers"),
        (small(MixtralConfig), 2, "the tensor-parallel plan of a mixtral has"),
        (GPT2Config(), 2, "transformers has no tensor-parallel plan for a gpt2"),
    ],
)
def test_models_that_cannot_be_sharded_are_rejected(config, width, message):
    with pytest.raises(EngineError, match=message):
        check_shardable(config, width)


def test_parameters_outside_the_tensor_parallel_plan_are_rejected():
    # Norms per head would receive the gradients of only some heads.
    with pytest.raises(EngineError, match=r"q_norm\.weight is in no tensor-parallel plan\. Set it to 1"):
        sharded(small(CohereConfig, use_qk_norm=True), 2)


@pytest.mark.parametrize("width", [2, 4])
def test_a_rank_has_its_shard_of_layers_and_complete_other_parameters(width):
    mine, full = sharded(small(Qwen3Config, head_dim=8), width)
    sizes = dict(full.named_parameters())
    assert dict(mine.named_parameters()).keys() == sizes.keys()
    for name, parameter in mine.named_parameters():
        is_head_shared = width == 4 and ("k_proj" in name or "v_proj" in name)
        is_cut = "_proj" in name and not is_head_shared
        assert parameter.numel() == sizes[name].numel() // (width if is_cut else 1), name
        assert hasattr(parameter, "partition_dim") == is_cut


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small().save_pretrained(folder)
    return read_shape(str(folder), "model.path")


def job(width, stage=1):
    config = Config()
    config.trainer.n_gpus_per_node, config.algorithm.adv_estimator = 8, "grpo"
    config.actor.zero_stage, config.training.tensor_model_parallel_size = stage, width
    return config


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_plan_counts_parameters_and_activations_of_a_rank(shape, stage):
    # Embedding, head and norms are complete on each rank.
    full, halves = (
        {
            part.what: part.size
            for part in memory_of(job(width, stage), {"actor": shape}, Budget("cuda", 80 * GIB)).parts
            if part.role == "actor"
        }
        for width in (1, 2)
    )
    held, layers = shape.share(2).parameters, sum(shape.layers)
    ends = shape.parameters - layers
    assert ends + layers / 2 < held < ends + 0.52 * layers, "norms are not sharded"
    for what in ("parameters", "gradients"):
        assert halves[what] / full[what] == pytest.approx(held / shape.parameters)
    copies = 2 if stage == 1 else 1  # the optimizer state is divided by half as many ranks
    assert halves["optimizer"] / full["optimizer"] == pytest.approx(copies * held / shape.parameters)
    assert 0.5 * full["activations"] < halves["activations"] < full["activations"]


def test_a_plan_reports_stages_of_sharded_layers(shape):
    # Two stages of one layer each, on two ranks each; the head, complete on both last ranks, counts twice.
    config = job(2)
    config.trainer.n_gpus_per_node, config.training.pipeline_parallel_size = 4, 2
    found = [place.trainer for place in placements(config, {"actor": shape})]
    assert [note.split(": ")[1] for note in found] == ["actor layers 0-0"] * 2 + ["actor layers 1-1"] * 2
    assert sum(parameters_on(config, shape.share(2), "actor", at) for at in (0, 1)) == shape.share(2).parameters
    notes = [stage_note(job(width), shape) for width in (1, 2)]
    counts = [float(note.split("counts as ")[1].split()[0]) for note in notes]
    assert counts[1] == pytest.approx(2 * counts[0], rel=0.2)


def test_the_search_combines_stages_and_sharded_layers(shape):
    keys = ("training.pipeline_parallel_size", "training.tensor_model_parallel_size", VOCABULARY)
    axes = axes_of(job(1), shape, Cluster(1, 4, 80, device="cuda", peak_tflops=100.0))
    facts = Facts(attention_heads=shape.heads, layers=2, vocabulary=60, cuda=True)
    some = {tuple(dict(each)[key] for key in keys) for each in structures(job(1), facts, axes, shape)}
    assert {(stages, width) for stages, width, _ in some} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)}
    assert {width for _, width, head in some if head} <= {1}, "stages share only complete heads"
