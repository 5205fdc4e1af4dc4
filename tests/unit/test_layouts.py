"""Dtypes, first updates and planned memory agree for all layouts of models over two ranks.

Two processes load and train one layout after the other; the tests check the results.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
from pipelines import serial
from processes import in_ranks

from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import models_of
from rlfuse.engines.memory.model_sizes import shapes_of
from rlfuse.samples import MicroBatch, Row

RANKS, ROWS, RATE = 2, 8, 1e-3
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@dataclass(frozen=True)
class Layout:
    """How models are spread over the ranks."""

    zero_stage: int = 1
    tensor: int = 1
    stages: int = 1
    dtype: str = "bfloat16"
    reward_model: bool = False

    def config(self, folder):
        config = Config()
        config.algorithm.adv_estimator = "gae"
        config.model.path, config.model.dtype = folder, self.dtype
        config.data.max_response_length, config.trainer.n_gpus_per_node = 32, RANKS
        config.actor.zero_stage, config.actor.grad_clip, config.actor.use_kl_loss = self.zero_stage, 0.0, True
        config.actor.optim.lr = config.critic.optim.lr = RATE
        config.actor.optim.weight_decay = config.critic.optim.weight_decay = 0.0
        config.training.tensor_model_parallel_size, config.training.pipeline_parallel_size = self.tensor, self.stages
        return config


LAYOUTS = {f"ZeRO {stage}": Layout(stage) for stage in range(4)} | {"ZeRO 3, float32": Layout(3, dtype="float32")}
LAYOUTS |= {f"tensor parallel, ZeRO {stage}": Layout(stage, tensor=2) for stage in range(2)}
LAYOUTS |= {"stages": Layout(stages=2)}
LAYOUTS |= {f"reward model, ZeRO {stage}": Layout(stage, reward_model=True) for stage in range(4)}


# On each rank ---------------------------------------------------------------------------------------------------------


def in_all_layouts(device, folder, out):
    """Return {layout: results of this rank}."""
    import deepspeed

    from rlfuse.engines.deepspeed import optimizer

    optimizer.REDUCE_BUCKET_ELEMENTS = 4096  # else ZeRO's buffers are 200 MB each
    deepspeed.init_distributed("gloo", verbose=False)
    found = {}
    for name, layout in LAYOUTS.items():
        found[name] = in_layout(layout, layout.config(folder), Path(out) / name)
    return found


def in_layout(layout, config, out):
    """Load all models, update the trained ones with the same rows, and save them."""
    rank = started(layout, config)
    trained = [name for name in rank.engines if name != "ref"]
    modules = {name: getattr(engine, "module", engine) for name, engine in rank.engines.items()}
    modules |= {f"ref/{i}": module for i, module in enumerate(rank.extra_modules)}
    held = [
        (name, getattr(each, "ds_tensor", each)) for name, module in modules.items() for each in module.parameters()
    ]
    before = {name: weights(rank, name) for name in trained}
    accumulate(rank, layout, trained)
    for name in trained:
        rank.step(name, 100.0)
    after = {name: weights(rank, name) for name in trained}
    save(rank, trained, out)
    return {
        "dtypes": {each.dtype for _, each in held},
        "parameters": {role: sum(each.nbytes for name, each in held if name.startswith(role)) for role in ROLES},
        "optimizer": {name: bytes_of_optimizer(rank.engines[name]) for name in trained},
        "buffers": {key: each.numpy() for key, each in modules[trained[0]].named_buffers() if each.is_floating_point()},
        "updates": {f"{name}/{key}": after[name][key] - each for name in trained for key, each in before[name].items()},
    }


ROLES = {"actor": "actor", "critic": "critic", "ref": "reference"}
"""Names of models -> roles in the memory plan."""


def started(layout, config):
    import torch.distributed as dist

    from rlfuse.engines.pipeline.layout import Pipelines
    from rlfuse.engines.pipeline.pipeline_rank import PipelineRank
    from rlfuse.engines.trainer.reward_model_rank import RewardModelRank
    from rlfuse.engines.trainer.trainer_rank import TrainerRank

    kind = PipelineRank if layout.stages > 1 else RewardModelRank if layout.reward_model else TrainerRank
    rank = kind(config, dist.get_rank(), RANKS, "cpu")
    if layout.stages > 1:
        rank.setup([Pipelines(role, layout.stages, width=layout.tensor) for role in ROLES])
        return rank
    rank.meet_groups()
    rank.setup(*([0, ["score"]] if layout.reward_model else []))
    return rank


def accumulate(rank, layout, trained):
    """Accumulate gradients of this rank's share of the rows, in micro-batches of two."""
    sharers = layout.tensor * layout.stages
    share = ROWS // (RANKS // sharers)
    rows = make_rows()[rank.rank // sharers * share :][:share]
    micro_batches = [MicroBatch(tuple(rows[i : i + 2])) for i in range(0, share, 2)]
    if layout.stages == 1:
        for name in trained:
            rank.accumulate((name,), micro_batches)
        return
    layouts = [each for name, each in rank.layout.items() if name in trained]
    rank.run(serial(layouts, dict.fromkeys(trained, len(micro_batches))), dict.fromkeys(trained, micro_batches))


def make_rows():
    """Return rows with equal advantages: their gradients add up and are far above bfloat16 rounding."""
    rng = np.random.default_rng(3)
    ids = [rng.integers(3, 64, 12).astype(np.int32) for _ in range(ROWS)]
    fill = {"old_log_probs": -4.0, "ref_log_probs": -4.0, "advantages": 1.0, "values": 0.0, "returns": 1.0}
    fill |= {"margin": 0.0, "label": 0.0}
    tensors = {name: np.full(8, value, np.float32) for name, value in fill.items()}
    return [Row(each[:4], np.repeat(each[4:5], 8), tensors, str(i)) for i, each in enumerate(ids)]


def weights(rank, name):
    """Return {name: float32 values} of this rank's parameters, gathered; every rank must call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine, found = rank.engines[name].engine, {}
    masters = engine.basic_optimizer.param_groups[0]["params"]
    for i, (key, parameter) in enumerate(engine.module.named_parameters()):
        value = masters[i] if engine.zero_optimization_stage() == 0 else safe_get_full_fp32_param(parameter)
        if rank.tensor and hasattr(parameter, "partition_dim"):
            value = rank.tensor.gather_whole(value, parameter.partition_dim)
        found[key.split(".", 1)[1] if key[0].isdigit() else key] = value.detach().clone().numpy()  # of a stage
    return found


def bytes_of_optimizer(model):
    """Return the size of master weights and moments in bytes."""
    from rlfuse.engines.trainer.offloading import _of_optimizer, _storages

    late = _of_optimizer(model)
    return sum(storage.nbytes() for storage in _storages(model) if storage.data_ptr() in late)


def save(rank, trained, out):
    """Write `huggingface/` of each model."""
    import torch.distributed as dist

    from rlfuse.engines.trainer.trainer_rank import TrainerRank

    if isinstance(rank, TrainerRank):
        assert rank.save(out, {name: [list(rank.exporters[name].tensors)] for name in trained}) is None
    else:
        assert rank.save_metadata(out) is None
        dist.barrier()
        for name in trained:
            folder = out / name / "huggingface"
            [stage] = rank.layout[name].stages_on(rank.at["pp"])
            rank.save_bucket(name, stage, list(rank._exporter(name, stage).tensors), folder / f"{stage}.safetensors")
    dist.barrier()


# Results --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a random Llama that splits into two stages of equal size."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    more = dict(num_key_value_heads=2, initializer_range=0.005, tie_word_embeddings=False, pad_token_id=0)
    LlamaForCausalLM(LlamaConfig(**sizes, **more)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def ran(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("saved")
    return out, in_ranks(RANKS, in_all_layouts, "cpu", folder, str(out))


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_checkpoints_and_model_configs_have_the_configured_dtype(ran, name):
    (out, ranks), dtype = ran, LAYOUTS[name].dtype
    assert [rank[name]["dtypes"] for rank in ranks] == [{getattr(torch, dtype)}] * RANKS
    configs = sorted((out / name).glob("*/huggingface/config.json"))
    assert [json.loads(each.read_text())["dtype"] for each in configs] == [dtype] * (
        1 + (not LAYOUTS[name].reward_model)
    )
    files = [safe_open(each, "pt") for each in (out / name).glob("*/huggingface/*.safetensors")]
    saved = {file.get_tensor(key).dtype for file in files for key in file.keys()}  # noqa: SIM118
    assert saved == {getattr(torch, dtype)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_buffers_stay_in_float32(ran, name):
    """Compare rotary frequencies, which in bfloat16 would be off by whole radians at distant positions."""
    expected = ran[1][0]["ZeRO 0"]["buffers"]
    found = ran[1][0][name]["buffers"]
    assert found and {key.rpartition(".")[2] for key in found} == {key.rpartition(".")[2] for key in expected}
    for key, each in found.items():
        [want] = {each.tobytes() for name, each in expected.items() if name.endswith(key.rpartition(".")[2])}
        assert each.dtype == np.float32 and each.tobytes() == want, key


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.dtype == "bfloat16"])
def test_first_update_matches_zero_1(ran, name):
    base = "reward model, ZeRO 1" if LAYOUTS[name].reward_model else "ZeRO 1"
    found, expected = (
        {key: each for rank in ran[1] for key, each in rank[of]["updates"].items()} for of in (name, base)
    )
    assert found.keys() == expected.keys()
    for model in {key.split("/")[0] for key in expected}:
        one, other = (
            np.concatenate([of[key].ravel() for key in expected if key.startswith(model)]) for of in (found, expected)
        )
        assert one @ other >= 0.998 * np.linalg.norm(one) * np.linalg.norm(other) > 0
        assert np.abs(one).max() == pytest.approx(RATE, rel=1e-3)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if not layout.reward_model])
def test_planned_bytes_match_the_ranks(ran, folder, name):
    config = LAYOUTS[name].config(folder)
    planned = {(part.role, part.what): part.size for part in models_of(config, shapes_of(config), "cuda")}
    for role, its in ROLES.items():
        held = [[rank[name][what].get(role, 0) for rank in ran[1]] for what in ("parameters", "optimizer")]
        assert max(held[0]) == pytest.approx(planned[its, "parameters"], rel=0.02)
        assert max(held[1]) == pytest.approx(planned.get((its, "optimizer"), 0), rel=0.02)
