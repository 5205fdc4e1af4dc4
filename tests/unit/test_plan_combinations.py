"""Valid combinations of values: equal to the filtered product, without enumerating it."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from rlfuse.config.checks import check, checks
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config
from rlfuse.engines.memory.remedies import changed
from rlfuse.tools.planning.space import combinations

VALUES = {
    "trainer.nnodes": (2, 1),
    "trainer.n_gpus_per_node": (4,),
    "rollout.tensor_model_parallel_size": (3, 1, 2),
    "training.pipeline_parallel_size": (16, 1, 2),
    "training.virtual_pipeline_model_parallel_size": (1, 2),
    "training.tensor_model_parallel_size": (1, 2),
    "training.ulysses_sequence_parallel_size": (1, 4),
    "actor.zero_stage": (0, 1, 3),
    "actor.offload_optimizer": (False, True),
    "model.enable_activation_offload": (False, True),
}
FACTS = Facts(attention_heads=8, layers=12, cuda=True)


def whole_product(config, values, refusals):
    for each in product(*values.values()):
        settings = dict(zip(values, each, strict=True))
        if not any(refusal(changed(config, settings.items())) for refusal in refusals):
            yield settings


@pytest.mark.parametrize("seed", range(3))
def test_combinations_equal_the_filtered_product(seed):
    """Use refusals that read keys through properties, and in an order that depends on values read before."""
    draw = Random(seed)
    names = draw.sample(list(VALUES), len(VALUES))
    values = {name: VALUES[name] for name in names}
    reads = [
        lambda config: config.lockstep and config.actor.offload_optimizer,
        lambda config: config.slots == 8 and config.training.pipeline_parallel_size == 2 and not config.uses_critic,
        lambda config: config.actor.zero_stage == 0 if config.trainer.nnodes == 1 else config.lockstep_backward,
        lambda config: config.data.train_batch_size == 0,
    ]
    config, refusals = Config(), draw.sample(reads, 3)
    found = list(combinations(config, values, refusals))
    assert found == list(whole_product(config, values, refusals)) and found


def test_combinations_with_every_config_check():
    config, few = (
        Config(),
        {key: values[-2 if key.startswith(("training", "actor")) else -1 :] for key, values in VALUES.items()},
    )
    known = set(check(config, FACTS))

    def new(lines):
        return any(line not in known for line in lines)

    refusals = [lambda config, find=find: new(find(config, FACTS)) for find in checks(config)]
    found = list(combinations(config, few, refusals))
    assert found == list(whole_product(config, few, [lambda config: new(check(config, FACTS))])) and found


def test_a_refusal_is_evaluated_once_per_values_read():
    """Check that refused combinations are not extended."""
    evaluated = []

    def refuses(config):
        evaluated.append(zero := config.actor.zero_stage)
        return zero == 3

    found = list(combinations(Config(), VALUES, [refuses]))
    assert sorted(evaluated) == [0, 1, 3] and {each["actor.zero_stage"] for each in found} == {0, 1}


def test_all_or_no_combinations_are_refused():
    few = {"actor.zero_stage": (0, 1)}
    assert list(combinations(Config(), few, [lambda config: config.actor.zero_stage < 2])) == []
    assert list(combinations(Config(), few, [])) == [{"actor.zero_stage": 0}, {"actor.zero_stage": 1}]
    assert list(combinations(Config(), {}, [])) == [{}]
