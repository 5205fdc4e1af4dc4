"""Tensor parallelism over two and four real ranks gives the passes, gradients, steps and weights of whole layers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_probe import (
    BETA,
    VOCABULARY,
    Probe,
    assert_skipping_changes_nothing,
    distance,
    lengths,
    make_rows,
    only_the_policy_loss,
    scores_of,
    settings,
)
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=True,
)  # fmt: skip
FAMILIES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config),
}
"""Covers column biases, per-head norms with partial gradients, and row biases, which are added once."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Save models of four query and two key/value heads; four ranks have to replicate the latter."""
    found = {}
    for name, (model, config) in FAMILIES.items():
        torch.manual_seed(0)
        found[name] = str(tmp_path_factory.mktemp(name))
        model(config(**SIZES)).save_pretrained(found[name])
    return found


class Shared(Probe):
    """Ranks whose degrees can be changed and whose full gradients can be read."""

    async def gradients(self, model="actor"):
        def read(rank, model):
            from deepspeed.utils import safe_get_full_optimizer_state

            engine, found = rank.engines[model].engine, {}
            for name, parameter in engine.module.named_parameters():
                if rank.config.actor.zero_stage == 0:
                    moment = engine.optimizer.state[parameter]["exp_avg"]
                else:
                    moment = safe_get_full_optimizer_state(parameter, "exp_avg")
                if rank.tensor and hasattr(parameter, "partition_dim"):
                    moment = rank.tensor.gather_whole(moment, parameter.partition_dim)
                found[name] = moment / (1 - BETA)
            return found

        calls = [rank.__ray_call__.remote(read, model) for rank in self.ranks]
        return (await asyncio.gather(*calls))[0]

    async def take(self, config):
        await self.meet(config)
        self._buckets = {}
        return await super().take(config)


@pytest.fixture(scope="module")
async def group(folders, four_whole):
    return await Shared.of(four_whole, job(folders["qwen2"]))


def job(folder, width=1, cut=1, stage=1, **more):
    config = settings(folder, stage, **more)
    config.trainer.n_gpus_per_node, config.rollout.update_weights_bucket_mb = 4, 0  # one layer per bucket
    config.training.tensor_model_parallel_size, config.training.ulysses_sequence_parallel_size = width, cut
    return config


async def everything(group, rows, folder):
    """Return scores, metrics and gradients of a step of both models, scores after it, and the weights."""
    await group.drain()
    scores = [await scores_of(group, "actor", rows), await scores_of(group, "ref", rows)]
    metrics = await group.update("critic", rows) | await group.update("actor", rows)
    gradients = [await group.gradients(model) for model in ("critic", "actor")]
    scores += [await scores_of(group, "critic", rows), await scores_of(group, "actor", rows)]
    assert len(await group.bucket_plan()) > 1
    return scores, metrics, gradients, await group.exported(folder), await group.drain()


def assert_same(found, expected, rows):
    for have, want in zip(found[0], expected[0], strict=True):
        assert [len(each) for each in have] == lengths(rows)
        np.testing.assert_allclose(np.concatenate(have), np.concatenate(want), atol=1e-5, rtol=2e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-4)
    for have, want in zip(found[2], expected[2], strict=True):
        assert distance(have, want) < 1e-5
    assert found[3].keys() == expected[3].keys()
    for name, want in expected[3].items():
        assert found[3][name].shape == want.shape
        if not name.endswith("k_proj.bias"):  # the gradient is rounding only, whose sign decides AdamW's first step
            assert (found[3][name] - want).abs().mean() < 2e-6, name
    for kind in ("old_log_prob", "ref", "values", "forward", "backward"):
        tokens, wanted = (sum(span.tokens for span in part[4] if span.kind == kind) for part in (found, expected))
        assert tokens == wanted > 0


@pytest.mark.parametrize(
    "family, width, cut, stage, packed",
    [
        ("qwen2", 4, 1, 1, False),
        ("qwen2", 2, 2, 1, True),
        ("qwen3", 4, 1, 0, True),
        ("starcoder2", 2, 1, 1, True),
    ],
)
async def test_sharded_layers_give_the_results_of_whole_layers(
    group, folders, tmp_path, family, width, cut, stage, packed
):
    """Clipped, with activations recomputed for padded rows; rows longer than the budget are sharded if allowed."""
    rows, results = make_rows(12), []
    for number, degrees in enumerate(((1, 1), (width, cut))):
        config = job(folders[family], *degrees, stage=stage, clip=0.05, budget=24)
        config.model.use_remove_padding, config.model.enable_gradient_checkpointing = packed, not packed
        await group.take(config)
        results.append(await everything(group, rows, tmp_path / str(number)))
    assert results[0][1]["actor/grad_norm"] > 0.05 < results[0][1]["critic/grad_norm"]
    assert_same(results[1], results[0], rows)


@pytest.mark.parametrize("width, cut, stage", [(4, 1, 1), (2, 2, 0)])
async def test_rows_without_advantage_can_be_skipped(group, folders, tmp_path, width, cut, stage):
    config = only_the_policy_loss(job(folders["qwen2"], width, cut, stage, alone=True))
    await assert_skipping_changes_nothing(lambda: group.take(config), tmp_path)


async def test_norms_count_replicated_parameters_once_in_bfloat16(group, folders):
    """DeepSpeed's bfloat16 optimizer without ZeRO computes norms differently; they have to equal those of ZeRO 1."""
    rows, norms = make_rows(8), []
    for stage in (0, 1):
        await group.take(job(folders["qwen2"], 2, stage=stage, dtype="bfloat16"))
        metrics = await group.update("critic", rows) | await group.update("actor", rows)
        norms.append([metrics[f"{model}/grad_norm"] for model in ("actor", "critic")])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1])
async def test_training_resumes_from_a_hugging_face_checkpoint(group, folders, tmp_path, stage):
    """Weights and optimizer state are restored exactly; the Hugging Face folder holds whole layers."""
    rows, config, ends = make_rows(8), job(folders["qwen2"], 2, stage=stage), []
    await group.take(config)
    await group.update("actor", rows)
    await group.save(tmp_path / "saved")
    for number in range(2):
        await group.update("actor", rows[:5])
        ends.append(await group.exported(tmp_path / str(number)))
        await group.take(config)
        await group.load(tmp_path / "saved")
    assert all(torch.equal(ends[1][name], each) for name, each in ends[0].items())
    weights = await group.exported(tmp_path / "loaded")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "actor" / "huggingface")
    assert all(torch.equal(each, weights[name]) for name, each in model.named_parameters())
    assert Path(tmp_path, "saved", "critic", "huggingface", "config.json").is_file()


async def test_a_slot_with_a_whole_model_works_alone(group, folders):
    """With engines as wide as the tensor parallel group, each slot scores and trains alone, as with whole models."""
    rows, config = make_rows(9), job(folders["qwen2"], 2)
    config.rollout.tensor_model_parallel_size = 2
    assert not config.lockstep and not config.lockstep_backward
    await group.take(config)
    expected = await scores_of(group, "actor", rows)
    found = await asyncio.gather(
        *(scores_of(group, "actor", part, slot) for slot, part in enumerate((rows[:4], rows[4:])))
    )
    np.testing.assert_allclose(np.concatenate([*found[0], *found[1]]), np.concatenate(expected), atol=1e-5)
    whole = await group.update("actor", rows)
    await group.take(config)
    await asyncio.gather(*(group.accumulate(("actor",), part, slot) for slot, part in enumerate((rows[:2], rows[2:]))))
    assert (await group.step("actor", lengths(rows)))["actor/grad_norm"] == pytest.approx(
        whole["actor/grad_norm"], rel=1e-5
    )
    config.rollout.tensor_model_parallel_size = 1
    assert config.lockstep
    with pytest.raises(ValueError, match="2 ranks share each layer: a call on slot 0 alone"):
        await scores_of(group, "actor", rows, 0)
