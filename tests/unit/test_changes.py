"""The table of what may change in a run that is resumed: every key of the schema stands in one class of it."""

import dataclasses
from collections import Counter

import pytest

from rlfuse.config.changes import TABLE, Effect, differences, rule
from rlfuse.config.documentation import by_name
from rlfuse.config.schema import Config

OTHER = {"bool": True, "int": 7, "float": 0.125, "str": "other", "list": ["other"], "dict": {"other": 1}}


def config(**settings):
    """As it stands in config.yaml, with these settings: `a__b=1` for a.b."""
    found = dataclasses.asdict(Config())
    for name, value in settings.items():
        *groups, leaf = name.split("__")
        node = found
        for group in groups:
            node = node[group]
        node[leaf] = value
    return found


def other(key):
    """A value of this key's type that is not its default."""
    value = OTHER[next(kind for kind in OTHER if by_name()[key].type.startswith(kind))]
    return not value if value is by_name()[key].default else value


@pytest.mark.parametrize("key", by_name())
def test_every_key_is_in_one_class_and_a_change_of_it_is_judged_by_that(key):
    effect, reason = rule(key)
    assert [
        effect for effect, _, names in TABLE if any(key == n or key.startswith(n + ".") for n in names.split())
    ] == [effect], "one entry of the table"
    now = other(key)
    (change,) = differences(config(), config(**{key.replace(".", "__"): now}))
    if key == "algorithm.adv_estimator":
        effect, reason = Effect.FIXED, "with a critic or without: the checkpoint is of the other"
    assert (change.key, change.was, change.now) == (key, by_name()[key].default, now)
    assert (change.effect, change.reason) == (effect, reason)


def test_no_entry_of_the_table_is_of_no_key_and_none_is_twice():
    names = Counter(name for _, _, names in TABLE for name in names.split())
    assert {name for name in names if not any(key == name or key.startswith(name + ".") for key in by_name())} == set()
    assert set(names.values()) == {1}


@pytest.mark.parametrize(
    ("was", "now", "effects"),
    [
        ({"algorithm__adv_estimator": "grpo"}, {"algorithm__adv_estimator": "rloo"}, [Effect.EXPERIMENT]),
        ({"algorithm__adv_estimator": "grpo"}, {"algorithm__adv_estimator": "gae"}, [Effect.FIXED]),
        ({"trainer__nnodes": 2}, {"trainer__n_gpus_per_node": 2}, [Effect.NEXT_STEP] * 2),
        ({}, {"trainer__n_gpus_per_node": 2}, [Effect.FIXED]),
        ({"actor__zero_stage": 1}, {"actor__zero_stage": 3}, [Effect.FIXED]),
        ({"actor__zero_stage": 1}, {"actor__zero_stage": 2}, [Effect.NEXT_STEP]),
        ({}, {"training__tensor_model_parallel_size": 2, "trainer__n_gpus_per_node": 2}, [Effect.FIXED, Effect.FIXED]),
        ({}, {"training__pipeline_parallel_size": 2}, [Effect.FIXED]),
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
def test_where_values_decide(was, now, effects):
    assert [change.effect for change in differences(config(**was), config(**now))] == effects


def test_an_older_run_has_defaults_and_the_same_file_has_one_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    older = config()
    del older["alerts"], older["actor"]["optim"]["weight_decay"]
    assert differences(older, config()) == []
    (change,) = differences(older, config(actor__optim__weight_decay=0.5))
    assert (change.was, change.now) == (0.01, 0.5)
    assert differences(config(data__val_files=["a.jsonl"]), config(data__val_files=[f"{tmp_path}/a.jsonl"])) == []
