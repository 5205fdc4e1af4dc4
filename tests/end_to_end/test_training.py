"""DeepSpeed ranks against plain torch: the same gradient for every loss, ZeRO stage, rank count and micro-batching."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.algorithms.losses import AGG_MODES
from rlfuse.config.schema import Config
from rlfuse.engines.protocols import EngineError
from rlfuse.engines.trainer import TrainerGroup
from rlfuse.samples import Row

VOCABULARY, LR, BETA = 60, 1e-3, 0.9


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    """A random Qwen2 of four tensors' worth of layers: small enough to differentiate by hand in a test."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy")
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.05,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def make_rows(count=7, seed=3):
    """Ragged rows with everything that the two losses read."""
    rng = np.random.default_rng(seed)

    def row(i):
        prompt, response = (rng.integers(3, VOCABULARY, rng.integers(2, most)).astype(np.int32) for most in (8, 24))
        draw = lambda loc: rng.normal(loc, 0.3, len(response)).astype(np.float32)  # noqa: E731
        tensors = {"old_log_probs": draw(-4), "advantages": draw(0), "ref_log_probs": draw(-4)}
        return Row(prompt, response, tensors | {"values": draw(0), "returns": draw(0.2)}, id=str(i))

    return [row(i) for i in range(count)]


def settings(folder, zero_stage=1, mode="token-mean", dtype="float32", budget=64, clip=0.0):
    config = Config()
    config.model.path, config.model.dtype = folder, dtype
    config.data.max_response_length = 32
    config.trainer.n_gpus_per_node = 2
    config.cluster.timeout_s = 300
    actor = config.actor
    actor.zero_stage, actor.loss_agg_mode, actor.grad_clip, actor.ppo_max_token_len_per_gpu = (
        zero_stage,
        mode,
        clip,
        budget,
    )
    actor.optim.lr = config.critic.optim.lr = LR
    actor.optim.weight_decay, actor.use_kl_loss, actor.kl_loss_coef, actor.entropy_coeff = 0.0, True, 0.1, 0.01
    return config


def reference(config, rows):
    """{name: gradient} in one process, one sequence at a time, the whole loss written out."""
    model = Qwen2ForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    per_row = []
    for row in rows:
        ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1]
        log_p = logits.log_softmax(-1)
        logp = log_p.gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0]
        t = {name: torch.from_numpy(array) for name, array in row.tensors.items()}
        ratio = (logp - t["old_log_probs"]).exp()
        plain, clipped = -t["advantages"] * ratio, -t["advantages"] * ratio.clamp(0.8, 1.2)
        surrogate = torch.maximum(plain, clipped)
        surrogate = torch.where(t["advantages"] < 0, torch.minimum(surrogate, -3.0 * t["advantages"]), surrogate)
        entropy = -(log_p.exp() * log_p).sum(-1)
        log_r = t["ref_log_probs"] - logp
        per_row.append(surrogate - 0.01 * entropy + 0.1 * (log_r.exp() - log_r - 1))
    tokens, sequences, mode = sum(map(len, per_row)), len(per_row), config.actor.loss_agg_mode
    loss = {
        "token-mean": lambda: sum(x.sum() for x in per_row) / tokens,
        "seq-mean-token-sum": lambda: sum(x.sum() for x in per_row) / sequences,
        "seq-mean-token-mean": lambda: sum(x.mean() for x in per_row) / sequences,
        "seq-mean-token-sum-norm": lambda: sum(x.sum() for x in per_row) / 32 / sequences,
    }[mode]()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


class Probe(TrainerGroup):
    """Reads the gradient of the first AdamW step out of its first moment: (1 - beta1) * gradient, at any ZeRO stage."""

    async def gradients(self, model="actor"):
        def read(rank, model):
            from deepspeed.utils import safe_get_full_optimizer_state

            engine = rank.engines[model]
            state = engine.optimizer.state if not hasattr(engine.optimizer, "bit16_groups") else None
            names = dict(engine.module.named_parameters())
            if rank.config.actor.zero_stage == 0:
                return {name: state[p]["exp_avg"] / (1 - BETA) for name, p in names.items()}
            return {name: safe_get_full_optimizer_state(p, "exp_avg") / (1 - BETA) for name, p in names.items()}

        calls = [rank.__ray_call__.remote(read, model) for rank in self.ranks]
        return (await asyncio.gather(*calls))[0]

    async def take(self, config):
        """Load fresh models under another configuration, in the same processes: starting those is what costs."""

        def reload(rank, config):
            rank.config = config
            rank.setup(10)

        self.config = config
        await asyncio.gather(*(rank.__ray_call__.remote(reload, config) for rank in self.ranks))
        return self


@pytest.fixture(scope="module")
async def group(policy_folder, slots):
    """Two ranks, ready to take configurations."""
    return (await Probe.start(settings(policy_folder), slots, optimizer_steps=10))[0]


async def assert_gradients_match(group, rows):
    metrics = await group.update_actor(rows)
    gradients = await group.gradients()
    expected = reference(group.config, rows)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5)
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["actor/lr"] == LR


@pytest.mark.parametrize("mode", AGG_MODES)
async def test_gradients_equal_single_process_torch_for_every_aggregation(group, policy_folder, mode):
    await assert_gradients_match(await group.take(settings(policy_folder, 1, mode)), make_rows())


@pytest.mark.parametrize("stage", [0, 2, 3])
async def test_gradients_equal_single_process_torch_at_every_zero_stage(group, policy_folder, stage):
    await assert_gradients_match(await group.take(settings(policy_folder, stage)), make_rows())


@pytest.mark.parametrize("budget, count", [(10_000, 7), (16, 7), (64, 1)])
async def test_gradients_do_not_depend_on_micro_batches_and_idle_ranks(group, policy_folder, budget, count):
    """One micro-batch, one per row, and a rank that has nothing but fillers."""
    await assert_gradients_match(await group.take(settings(policy_folder, 1, budget=budget)), make_rows(count))


async def test_padded_rows_train_as_packed_ones(group, policy_folder):
    config = settings(policy_folder)
    config.model.use_remove_padding = False
    await assert_gradients_match(await group.take(config), make_rows())


async def test_one_rank_gives_what_two_give(policy_folder, slots):
    config = settings(policy_folder)
    config.trainer.n_gpus_per_node = 1
    alone, _ = await Probe.start(config, replace(slots, count=1), optimizer_steps=10)
    try:
        await assert_gradients_match(alone, make_rows())
    finally:
        ray.kill(alone.ranks[0])


@pytest.mark.parametrize("stage", [0, 1, 3])
async def test_clipping_scales_the_step_by_the_global_norm(group, policy_folder, stage):
    """The clipped gradient is the whole one times limit / norm, whichever engine does it."""
    limit = 0.05
    rows = make_rows()
    metrics = await (await group.take(settings(policy_folder, stage, clip=limit))).update_actor(rows)
    clipped = await group.gradients()
    expected = reference(group.config, rows)
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    assert norm > limit and metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(clipped[name], gradient * (limit / norm), atol=1e-5, rtol=1e-3)


async def test_log_probs_values_and_reference_of_a_bfloat16_zero3_job(group, policy_folder):
    """Every pass runs where weights are sharded and half wide, close to the float32 numbers of one process."""
    config = settings(policy_folder, 3, dtype="bfloat16")
    await group.take(config)
    rows = make_rows()
    actor, reference_log_probs = [await group.log_probs(model, rows) for model in ("actor", "ref")]
    model = Qwen2ForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    for row, found, same in zip(rows, actor, reference_log_probs, strict=True):
        ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        want = logits.gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0].numpy()
        np.testing.assert_allclose(found, want, atol=0.05)
        np.testing.assert_array_equal(found, same)
    assert all(not values.any() for values in await group.values(rows))  # a fresh value head starts at 0
    metrics = await group.update_critic(rows)
    assert metrics["critic/vf_loss"] > 0 and np.isfinite(metrics["critic/grad_norm"])
    assert any(values.any() for values in await group.values(rows))


@pytest.mark.parametrize("stage", [1, 3])
async def test_resumed_training_is_bitwise_the_uninterrupted_one(group, policy_folder, stage, tmp_path):
    rows = make_rows()

    async def two_steps():
        metrics = [await group.update_actor(rows) | await group.update_critic(rows) for _ in range(2)]
        return metrics, await group.log_probs("actor", rows)

    await group.take(settings(policy_folder, stage, clip=1.0))
    await two_steps()
    await group.save(tmp_path / "checkpoint")
    expected, expected_log_probs = await two_steps()
    await group.take(settings(policy_folder, stage, clip=1.0))
    await group.load(tmp_path / "checkpoint")
    found, found_log_probs = await two_steps()
    assert found == expected
    for want, have in zip(expected_log_probs, found_log_probs, strict=True):
        np.testing.assert_array_equal(have, want)
    saved, report = Qwen2ForCausalLM.from_pretrained(
        tmp_path / "checkpoint" / "actor" / "huggingface", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and saved.config.tie_word_embeddings


async def test_resuming_under_another_zero_stage_says_what_differs(group, policy_folder, tmp_path):
    await group.take(settings(policy_folder, 1))
    await group.save(tmp_path / "checkpoint")
    await group.take(settings(policy_folder, 2))
    with pytest.raises(EngineError, match=r"zero_stage.*same.*model.path=.*huggingface"):
        await group.load(tmp_path / "checkpoint")
