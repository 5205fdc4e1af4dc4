"""Small configurations, ragged rows, and a trainer group whose gradients can be read."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlfuse.config.schema import Config
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.samples import Row

VOCABULARY, LR, BETA = 60, 1e-3, 0.9


def make_rows(count=7, seed=3):
    """Return ragged rows with all tensors that the two losses read."""
    rng = np.random.default_rng(seed)

    def row(i):
        prompt, response = (rng.integers(3, VOCABULARY, rng.integers(2, most)).astype(np.int32) for most in (8, 24))
        draw = lambda loc: rng.normal(loc, 0.3, len(response)).astype(np.float32)  # noqa: E731
        tensors = {"old_log_probs": draw(-4), "advantages": draw(0), "ref_log_probs": draw(-4)}
        return Row(prompt, response, tensors | {"values": draw(0), "returns": draw(0.2)}, id=str(i))

    return [row(i) for i in range(count)]


def lengths(rows):
    return [len(row.response_ids) for row in rows]


def settings(folder, zero_stage=1, mode="token-mean", dtype="float32", budget=64, clip=0.0, alone=False):
    """Return a small configuration; `alone`: without a critic, whose setup takes a third of the time."""
    config = Config()
    config.algorithm.adv_estimator = "grpo" if alone else "gae"
    config.model.path, config.model.dtype = folder, dtype
    config.data.max_response_length = 32
    config.trainer.n_gpus_per_node = 2
    config.cluster.timeout_s = 300
    actor = config.actor
    actor.strategy = "fsdp2" if zero_stage == "fsdp2" else "deepspeed"
    actor.zero_stage, actor.loss_agg_mode = 1 if zero_stage == "fsdp2" else zero_stage, mode
    actor.grad_clip, actor.ppo_max_token_len_per_gpu = clip, budget
    actor.optim.lr = config.critic.optim.lr = LR
    config.critic.optim.weight_decay = 0.0
    actor.optim.weight_decay, actor.use_kl_loss, actor.kl_loss_coef, actor.entropy_coeff = 0.0, True, 0.1, 0.01
    return config


class Probe(TrainerGroup):
    """Derives the gradient of the first AdamW step from its first moment, (1 - beta1) * gradient, at any ZeRO stage."""

    async def gradients(self, model="actor"):
        def read(rank, model):
            from deepspeed.utils import safe_get_full_optimizer_state

            sharded = rank.engines[model]
            if rank.config.actor.strategy == "fsdp2":
                moments = ((n, sharded.optimizer.state[p]["exp_avg"]) for n, p in sharded.module.named_parameters())
                return {name: moment.full_tensor() / (1 - BETA) for name, moment in moments}
            engine = sharded.engine
            names = dict(engine.module.named_parameters())
            if rank.config.actor.zero_stage == 0:
                found = engine.optimizer
                groups = zip(getattr(found, "fp16_groups", ()), getattr(found, "fp32_groups", ()), strict=True)
                masters = {id(p): master for pair in groups for p, master in zip(*pair, strict=True)}  # of bfloat16
                state = found.optimizer.state if masters else found.state
                return {name: state[masters.get(id(p), p)]["exp_avg"] / (1 - BETA) for name, p in names.items()}
            return {name: safe_get_full_optimizer_state(p, "exp_avg") / (1 - BETA) for name, p in names.items()}

        calls = [rank.__ray_call__.remote(read, model) for rank in self.ranks]
        return (await asyncio.gather(*calls))[0]

    @classmethod
    async def of(cls, ranks, config):
        """Return what `start` returns, for existing ranks."""
        group = cls(config, ranks)
        await group.meet(config)
        facts = (await group._all("setup", "load its models", None))[0]
        group.shares_prompts = facts["shares_prompts"]
        return group

    async def meet(self, config):
        """Create process groups for other degrees of tensor and sequence parallelism."""

        def regroup(rank, config):
            rank.config = config
            rank.meet_groups()

        await asyncio.gather(*(rank.__ray_call__.remote(regroup, config) for rank in self.ranks))

    async def take(self, config):
        """Load models under another configuration in the same processes, whose start takes longest."""

        def reload(rank, config):
            rank.config = config
            rank.setup()

        self.config = config
        self._accumulated = {"actor": [], "critic": []} if config.uses_critic else {"actor": []}
        self._buckets = {}
        await asyncio.gather(*(rank.__ray_call__.remote(reload, config) for rank in self.ranks))
        return self

    async def fill_padding(self, value):
        """Fill the padding of ZeRO 3's last shards, which DeepSpeed leaves uninitialised."""

        def fill(rank, value):
            filled = 0
            for sharded in rank.engines.values():
                for each in sharded.module.parameters():
                    shard = each.ds_tensor.data.view(-1)
                    padding = shard[max(0, each.ds_numel - torch.distributed.get_rank() * len(shard)) :]
                    filled += len(padding.fill_(value))
            return filled

        return sum(await asyncio.gather(*(rank.__ray_call__.remote(fill, value) for rank in self.ranks)))

    async def exported(self, folder):
        """Return {name: weight} of the actor, as engines would receive them."""
        folder.mkdir()
        for number, names in enumerate(await self.bucket_plan()):
            await self.export_bucket(names, str(folder / f"{number}.safetensors"))
        return {name: each for file in sorted(folder.iterdir()) for name, each in load_file(file).items()}

    async def update(self, model, rows):
        await self.accumulate((model,), rows)
        return await self.step(model, lengths(rows))


WITHOUT_ADVANTAGE = (set(range(7)), {0, 2, 5}, set(range(7)), {1, 6})
"""Rows without advantage in each of four mini-batches of seven rows; the first step has no moments yet."""


def only_the_policy_loss(config):
    """Disable entropy and KL terms. A large eps keeps AdamW from amplifying the rounding of elements next to zero."""
    config.actor.use_kl_loss, config.actor.entropy_coeff, config.actor.optim.eps = False, 0.0, 1e-4
    config.actor.optim.weight_decay = 0.01
    return config


def mini_batches_without_advantage():
    """Return the rows of each mini-batch, and the indices of those without advantage."""
    for seed, zero in enumerate(WITHOUT_ADVANTAGE):
        rows = make_rows(7, seed)
        none = [row.tensors | {"advantages": np.zeros_like(row.tensors["advantages"])} for row in rows]
        yield [replace(row, tensors=none[i]) if i in zero else row for i, row in enumerate(rows)], zero


async def steps_that(skip, group, folder):
    """Run the steps; return their metrics, weights and moments after them, and the number of rows run in each."""
    metrics, ran = [], []
    await group.drain()
    for rows, zero in mini_batches_without_advantage():
        kept = [row for i, row in enumerate(rows) if not (skip and i in zero)]
        if kept:
            await group.accumulate(("actor",), kept)
        left_out = [len(row.response_ids) for i, row in enumerate(rows) if skip and i in zero]
        metrics.append(await group.step("actor", lengths(rows), skipped=left_out))
        passes = [span for span in await group.drain() if span.kind == "forward"]
        ran.append(len({name for span in passes for name in span.samples}))
    return metrics, await group.exported(folder), await group.gradients(), ran


async def assert_skipping_changes_nothing(group, folder, tolerance=1e-6):
    """Assert that weights, moments, norms and losses equal those of a group that runs all rows; `tolerance` 0: bitwise.

    `group`: a coroutine function that reloads the models.
    """
    expected, found = [await steps_that(skip, await group(), folder / str(skip)) for skip in (False, True)]
    assert expected[3] == [7, 7, 7, 7] and found[3] == [7 - len(zero) for zero in WITHOUT_ADVANTAGE]
    for one, other in zip(found[0], expected[0], strict=True):
        for name in {"actor/grad_norm", "actor/pg_loss", "actor/lr"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name
    for whole, some in (found[0][:2], found[0][2:]):
        assert whole == {"actor/pg_loss": 0.0, "actor/grad_norm": 0.0, "actor/lr": LR} and some["actor/entropy"] > 0
    for have, want in zip(found[1:3], expected[1:3], strict=True):
        assert have.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(have[name], tensor, atol=tolerance, rtol=tolerance)


def distance(found, expected):
    """Return the distance of two gradients, relative to the norm of `expected`."""
    assert found.keys() == expected.keys()
    one, other = (torch.cat([tensors[name].flatten() for name in expected]) for tensors in (found, expected))
    return float((one - other).norm() / other.norm())


async def scores_of(trainer, model, rows, slot=None):
    """Return the log-probs or values of each row."""
    return (await trainer.score((model,), rows, slot))[model].arrays
