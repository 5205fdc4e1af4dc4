"""Dynamic sampling trains on a full batch of groups with unequal rewards, or ends the run with a report of counts."""

import asyncio

import pytest
from worlds.playing import PATIENCE_S, World
from worlds.scenes import Scene

from rlfuse.errors import DataError
from rlfuse.samples import Reward
from rlfuse.simulate.clock import run_virtual

JOB = {"batch": 4, "mini_batch": 2, "prompts": 13, "siblings": 2}


class Unequal(World):
    """World where only every `every`-th prompt has unequal rewards; `limit` is max_num_gen_batches."""

    def __init__(self, every: int, limit: int, **job):
        super().__init__(Scene(batches=limit, **JOB, **job))
        self.every = every

    async def score(self, samples):
        self.scored["reward"].update(sample.id for sample in samples)
        return [Reward(float(self.every and not s.prompt.index % self.every and s.rollout_index)) for s in samples]

    def play(self) -> "Unequal":
        run_virtual(asyncio.wait_for(self.run(), PATIENCE_S))
        return self


@pytest.mark.parametrize("policy", ["serial", "adaptive"])
@pytest.mark.parametrize(
    ("every", "limit", "message"),
    [
        (0, 3, "found 0 groups .* 4 are needed .* 12 prompts in 3 batches .*max_num_gen_batches=3 was reached"),
        (6, 2, r"found [12] groups .* 4 are needed .* 8 prompts in 2 batches .*max_num_gen_batches=2 was reached"),
        (5, 0, r"found [1-3] groups .* 4 are needed .* 1[23] prompts in .* has no more prompts"),
        (0, 0, r"found 0 groups .* 4 are needed .* 1[23] prompts in .* has no more prompts"),
    ],
)
def test_too_few_groups_with_unequal_rewards_end_the_run_before_an_update(policy, every, limit, message):
    world = Unequal(every, limit, policy=policy)
    with pytest.raises(DataError, match=f"Step 1: dynamic sampling {message}"):
        world.play()
    assert not world.learned and not world.trainer.steps["actor"]


@pytest.mark.parametrize("limit", [0, 3])
def test_enough_groups_make_a_full_batch(limit):
    (groups,) = Unequal(2, limit).play().learned
    assert len(groups) == 4 and not any(group.prompt.index % 2 for group in groups)
