import dataclasses
import re

import pytest

from rlfuse.config import other_frameworks
from rlfuse.config.compose import compose_job, read_command
from rlfuse.config.declare import SAVING, declared
from rlfuse.config.declare import key as declare
from rlfuse.config.documentation import COLUMNS, by_name, help_text, keys, print_help
from rlfuse.config.keys import explain_override, explain_value, is_free, nearest
from rlfuse.config.schema import Config


def test_every_key_is_documented_and_the_number_of_keys_is_limited():
    assert len(keys()) <= 234
    assert [key.name for key in keys() if not key.text] == []
    assert len({key.name for key in keys()}) == len(keys())


def test_documented_keys_match_the_dataclasses():
    def leaves(node, prefix=""):
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if dataclasses.is_dataclass(value):
                yield from leaves(value, f"{prefix}{field.name}.")
            else:
                yield prefix + field.name, value

    assert {key.name: key.default for key in keys()} == dict(leaves(Config()))


def test_help_fits_the_column_width_and_can_be_filtered(capsys):
    assert max(map(len, help_text(keys()).splitlines())) <= COLUMNS
    print_help(["warmup"])
    shown = capsys.readouterr().out
    assert "actor.optim.lr_warmup_steps" in shown and "rollout.n" not in shown


def test_defaults_are_valid_and_every_number_has_a_range():
    for each in keys():
        if each.choices:
            default = each.default if isinstance(each.default, list) else [each.default]
            assert set(default) <= {*each.names, *[None] * each.optional}
        assert bool(each.range) == (each.type.split(" ")[0] in ("int", "float")), each.name
        assert not each.range or (each.optional and each.default is None) or each.in_range(each.default)


def test_a_key_without_documentation_or_effect_on_resume_cannot_be_declared():
    with pytest.raises(TypeError, match="resume"):
        declare(1)
    bare = dataclasses.make_dataclass("Bare", [("k", int, declare(1, SAVING))])
    with pytest.raises(TypeError, match=r"^k has no help text; add a string below the field"):
        declared(bare)
    with pytest.raises(TypeError, match=r"^k is not a declared key; declare it as key\("):
        declared(dataclasses.make_dataclass("Plain", [("k", int, 1)]))


@pytest.mark.parametrize(
    "text", ["rollout.n=4", "critic.optim.lr=1", "algorithm=grpo", "rollout.engine_kwargs.a=1", "hydra/launcher=x"]
)
def test_valid_names_are_accepted(text):
    assert explain_override(text) is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("actor.lr=3", "actor.optim.lr"),
        ("trainer.totl_epochs=3", "trainer.total_epochs"),
        ("rollout.temprature=1", "rollout.temperature"),
        ("seed=3", "data.seed"),
        ("data.trainfiles=[a]", "data.train_files"),
        ("actor.optim.learning_rate=1e-4", "actor.optim.lr"),
        ("critic.learning_rate=1e-4", "critic.optim.lr"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(typed, meant):
    assert f"did you mean {meant} " in explain_override(typed)


def test_a_leaf_of_two_groups_lists_both():
    assert [key.name for key in nearest("lr")] == ["actor.optim.lr", "critic.optim.lr"]
    assert [key.name for key in nearest("critic.lr")] == ["critic.optim.lr"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor.ppo_mini_batch_size=4"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor.optim.lr=1e-6"),
        ("actor_rollout_ref.rollout.n=8", "rollout.n=8"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=1", "rollout.val_kwargs.temperature=1"),
        ("actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", "model.path=Qwen/Qwen3-0.6B"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.seed=1", "rollout.engine_kwargs.seed=1"),
        ("critic.model.path=x", "critic.path=x"),
        ("trainer.max_actor_ckpt_to_keep=3", "trainer.max_ckpt_to_keep=3"),
        ("num_generations=8", "rollout.n=8"),
        ("n_samples_per_prompt=8", "rollout.n=8"),
    ],
)
def test_keys_of_other_trainers_are_translated(theirs, ours):
    assert explain_override(theirs).endswith(f"write {ours}")
    name = ours.partition("=")[0]
    assert explain_override(ours) is None and (name in by_name() or is_free(name))


@pytest.mark.parametrize(
    ("theirs", "part"),
    [
        ("custom_reward_function.path=f.py", "reward.functions=[path/file.py:function]"),
        ("kl_target=6", "with algorithm.kl_ctrl.type=adaptive"),
        ("critic.ppo_epochs=2", "`actor.ppo_epochs`"),
        ("init_kl_coef=0.1", "algorithm.kl_ctrl.kl_coef"),
        ("actor_rollout_ref.rollout.enforce_eager=true", "rollout.engine_kwargs.enforce_eager"),
        ("actor_rollout_ref.actor.strategy=fsdp", "deepspeed, sharded by actor.zero_stage"),
        (
            "actor_rollout_ref.actor.megatron.context_parallel_size=2",
            "without a counterpart in rlfuse: training uses DeepSpeed",
        ),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2", "actor.ppo_max_token_len_per_gpu"),
        ("actor_rollout_ref.actor.something_new=2", "without a counterpart in rlfuse"),
    ],
)
def test_keys_with_another_value_or_without_counterpart_are_reported(theirs, part):
    assert part in explain_override(theirs)


def test_translations_of_other_trainers_are_existing_keys():
    known = frozenset(by_name())
    targets = {
        key
        for table in (other_frameworks.VERL, other_frameworks.TRL, other_frameworks.OPENRLHF)
        for key, _ in table.values()
        if key
    }
    assert targets <= known
    assert [name for name in other_frameworks.VERL if name in known] == [], "these are keys of rlfuse"
    for name, (key, _) in other_frameworks.VERL.items():
        assert other_frameworks.counterpart(name, known).keys == ((key,) if key else ())
    for name, _ in other_frameworks.NO_COUNTERPART:
        assert other_frameworks.counterpart(name, known).keys == () and name not in known


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("+new.key=1", "`+` adds keys only below free dictionaries such as rollout.engine_kwargs"),
        ("+actor.optim.lr=1", "write it without the plus: actor.optim.lr=1"),
        ("~rollout.n", "can't be removed"),
        ("actor=3", "is a group; set one of its keys: actor."),
        ("rollout.n", "write rollout.n=VALUE"),
        ("quickstart", "experiment=quickstart"),
        ("zzqqxx=1", "Groups: data, model"),
    ],
)
def test_unsupported_syntax_is_refused_with_a_remedy(text, part):
    assert part in explain_override(text)


def test_a_value_of_the_wrong_type_is_reported_with_the_required_type():
    assert "needs a number; the default is actor.optim.lr=1e-06" in explain_value("actor.optim.lr", "abc")
    assert "reward.functions=[a:b]" in explain_value("reward.functions", "a:b")
    assert "a whole number or null" in explain_value("trainer.total_training_steps", "many")


ADVICE = re.compile(r"(?<![\w.=])(\+{0,2}[a-z_]+(?:[./][a-z_]+)*=(?:\[[^\]]*\]|[^\s;,()`]+))")
"""The overrides KEY=VALUE that a message suggests."""
MISTAKES = {
    "removed": lambda key: explain_override(f"~{key.name}"),
    "bare": lambda key: explain_override(key.name),
    "added": lambda key: None if key.free else explain_override(f"+{key.name}={key.default_text}"),
    "of another type": lambda key: explain_value(key.name, "[x,{y: 1}]"),
    "one for a list": lambda key: explain_value(key.name, "x.parquet") if key.type.startswith("list[str") else None,
}


VALUES = {"int": "1", "float": "1", "bool": "true", "str": "a", "list": "[]", "dict": "{}"}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_suggested_overrides_are_accepted(mistake):
    advised = 0
    for key in keys():
        message = (MISTAKES[mistake](key) or "").replace(key.text.rstrip("."), "")
        value = next(value for kind, value in VALUES.items() if key.type.startswith(kind))
        for typed in ADVICE.findall(message.partition(": ")[2]):
            assert read_command([typed.replace("VALUE", value)]).overrides, message
            advised += 1
    assert advised >= 4


@pytest.mark.slow
def test_suggestions_about_presets_and_files_are_accepted():
    for typed in ("~experiment", "~algorithm", "~fusion", "quickstart", "rollout.n"):
        for advice in ADVICE.findall(explain_override(typed).partition(": ")[2]):
            assert compose_job([advice.replace("VALUE", "1")])
    assert "experiment=null" in explain_override("~experiment")
    assert explain_override("~rollout.engine_kwargs.seed") is None, "Hydra supports it"
