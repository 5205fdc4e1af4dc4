"""The effect of each changed key on resume."""

import dataclasses

import pytest

from rlfuse.config.declare import Effect
from rlfuse.config.documentation import by_name
from rlfuse.config.schema import Config
from rlfuse.run.resume.changes import differences

OTHER = {"bool": True, "int": 7, "float": 0.125, "str": "other", "list": ["other"], "dict": {"other": 1}}


def config(**settings):
    """Return the contents of config.yaml with these settings: `a__b=1` for a.b."""
    found = dataclasses.asdict(Config())
    for name, value in settings.items():
        *groups, leaf = name.split("__")
        node = found
        for group in groups:
            node = node[group]
        node[leaf] = value
    return found


def other(key):
    """Return a value of the key's type that differs from its default."""
    value = OTHER[next(kind for kind in OTHER if by_name()[key].type.startswith(kind))]
    return not value if value is by_name()[key].default else value


@pytest.mark.parametrize("key", by_name())
def test_a_change_of_every_key_has_the_declared_effect(key):
    declared, now = by_name()[key].resume, other(key)
    (change,) = differences(config(), config(**{key.replace(".", "__"): now}))
    expected = declared.sometimes if key == "algorithm.adv_estimator" else declared
    assert (change.key, change.was, change.now) == (key, by_name()[key].default, now)
    assert (change.effect, change.resume.reason) == (expected.effect, expected.reason)


@pytest.mark.parametrize(
    ("was", "now", "effects"),
    [
        ({"algorithm__adv_estimator": "grpo"}, {"algorithm__adv_estimator": "rloo"}, [Effect.EXPERIMENT]),
        ({"algorithm__adv_estimator": "grpo"}, {"algorithm__adv_estimator": "gae"}, [Effect.FIXED]),
        ({"trainer__nnodes": 2}, {"trainer__n_gpus_per_node": 2}, [Effect.NEXT_STEP] * 2),
        ({}, {"trainer__n_gpus_per_node": 2}, [Effect.NEXT_STEP]),
        ({"actor__zero_stage": 1}, {"actor__zero_stage": 3}, [Effect.NEXT_STEP]),
        ({}, {"training__tensor_model_parallel_size": 2, "trainer__n_gpus_per_node": 2}, [Effect.NEXT_STEP] * 2),
        ({}, {"training__pipeline_parallel_size": 2}, [Effect.NEXT_STEP]),
        ({}, {"actor__strategy": "fsdp2"}, [Effect.NEXT_STEP]),
        ({}, {"model__dtype": "float32"}, [Effect.FIXED]),
        (
            {"training__pipeline_parallel_size": 2, "trainer__n_gpus_per_node": 2},
            {"training__pipeline_parallel_size": 4, "trainer__n_gpus_per_node": 4},
            [Effect.NEXT_STEP] * 2,
        ),
        (
            {"training__pipeline_parallel_size": 4, "trainer__n_gpus_per_node": 4},
            {
                "training__pipeline_parallel_size": 2,
                "training__tensor_model_parallel_size": 2,
                "trainer__n_gpus_per_node": 4,
            },
            [Effect.NEXT_STEP] * 2,
        ),
    ],
)
def test_the_effect_of_a_change_can_depend_on_its_values(was, now, effects):
    assert [change.effect for change in differences(config(**was), config(**now))] == effects


def test_missing_keys_have_defaults_and_relative_paths_equal_absolute_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    older = config()
    del older["alerts"], older["actor"]["optim"]["weight_decay"]
    assert differences(older, config()) == []
    (change,) = differences(older, config(actor__optim__weight_decay=0.5))
    assert (change.was, change.now) == (0.01, 0.5)
    assert differences(config(data__val_files=["a.jsonl"]), config(data__val_files=[f"{tmp_path}/a.jsonl"])) == []
