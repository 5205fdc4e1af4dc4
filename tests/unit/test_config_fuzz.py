"""Arbitrary keys and values result in a configuration or a `ConfigError`, never in another exception."""

import copy
import functools

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config import job_file
from rlfuse.config.compose import explain_failure, load, read_command, to_config
from rlfuse.config.documentation import by_name, groups
from rlfuse.config.facts import Facts, read_facts
from rlfuse.config.keys import explain_override
from rlfuse.config.other_frameworks import counterpart
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError

KEYS = st.sampled_from(sorted(by_name()))
LETTERS = st.sampled_from("abcdefghijklmnopqrstuvwxyz_")
MANY, FEW = settings(max_examples=200, deadline=None), settings(max_examples=40, deadline=None)
EDITS = {
    "drop": lambda name, at, _: name[:at] + name[at + 1 :],
    "double": lambda name, at, _: name[:at] + name[at] + name[at:],
    "swap": lambda name, at, _: name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :],
    "insert": lambda name, at, letter: name[:at] + letter + name[at:],
}


@pytest.mark.slow
@MANY
@given(KEYS, st.sampled_from(sorted(EDITS)), st.floats(0, 1, exclude_max=True), LETTERS)
@example("trainer.logger", "drop", 0.8, "a")
@example("data.val_files", "drop", 0.99, "a")
def test_a_typo_in_a_key_suggests_the_key(name, edit, place, letter):
    typed = EDITS[edit](name, int(place * len(name)), letter)
    assume(typed not in by_name() and counterpart(typed, frozenset(by_name())) is None)
    assert name in explain_override(f"{typed}=1")


@pytest.mark.slow
@MANY
@given(KEYS, st.sampled_from(["", "foo.", "foo.bar.", *(f"{group}." for group in groups())]))
def test_a_leaf_in_the_wrong_group_suggests_a_key_with_it(name, group):
    leaf = by_name()[name].leaf
    typed = group + leaf
    assume(typed not in by_name() and typed not in groups() and counterpart(typed, frozenset(by_name())) is None)
    problem = explain_override(f"{typed}=1")
    assert "did you mean" in problem and leaf in problem.partition("did you mean")[2]


@pytest.mark.parametrize("typed", ["trainer.foo=1", "loger=wandb", "val_file=x", "=1", "..=1", "a..b=1", "trainer.=1"])
def test_malformed_names_are_reported(typed):
    with pytest.raises(ConfigError) as error:
        read_command([typed])
    assert "rlfuse train --help" in str(error.value)


# Values --------------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -(10**330), 2**63, float("inf"), float("nan"), 1e308, "", "a\nb", "a\0b", "\ud800", "~"]),
    st.sampled_from(["~nobody_/x", "x" * 5000, "???", "${rollout.n}", "${model}", "${a.b}", "${oc.env:NOT_SET}", "${"]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["path", "a", "b", 1]), inner, max_size=2)
    ),
    max_leaves=3,
)


@functools.cache
def job():
    structured = OmegaConf.structured(Config)
    structured.model.path, structured.data.train_files, structured.reward.functions = (
        "/absent",
        ["train.parquet"],
        ["rewards.py:score"],
    )
    return structured


@pytest.mark.slow
@FEW
@given(KEYS, VALUES)
@example("data.train_files", [["a"]])
@example("data.train_files", ["???"])
@example("data.max_response_length", 10**330)
@example("algorithm.kl_coef_by_source", "${rollout.n}")
@example("algorithm.kl_coef_by_source", {"a": {"b": 1}})
@example("reward.weights", [{"a": 1}])
@example("video.levels", [{"a": 1}])
@example("trainer.logger", [[1]])
@example("video.levels", ["${"])
@example("algorithm.kl_coef_by_source", {"path": "${"})
@example("trainer.resume_mode", "~nobody_/x")
@example("trainer.resume_mode", "x" * 5000)
def test_any_value_results_in_a_configuration_or_one_line_naming_the_key(name, value):
    composed = copy.deepcopy(job())
    try:
        try:
            OmegaConf.update(composed, name, value, merge=True)
        except OmegaConfBaseException as error:  # as Hydra raises it
            raise ConfigError([explain_failure(error, [f"{name}={value}"])]) from error
        except OverflowError:  # an integer too large for a float, which is refused before Hydra reads it
            return
        config = to_config(composed, read_facts if name == "trainer.resume_mode" else lambda _: Facts())
    except ConfigError as error:
        assert any(name in problem for problem in error.problems) or name == "reward.functions", error
        assert all(len(problem.splitlines()) == 1 and len(problem) < 2000 for problem in error.problems)
    else:
        assert isinstance(config, Config)


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("actor.clip_ratio=[1]", "actor.clip_ratio=[1]: needs a number"),
        ("actor.clip_ratio=1" + "0" * 330, "actor.clip_ratio: must be a 64-bit whole number"),
        ("rollout.n=" + "9" * 5000, "the value can't be parsed"),
        ("trainer.logger=" + "[" * 90 + "]" * 90, "brackets are nested more than"),
        ("trainer.logger=" + "[" * 300 + "]" * 300, "brackets are nested more than"),
        ('rollout.n="a', "the value can't be parsed; close all brackets"),
        ("data.truncation=${model}", "data.truncation: needs a string"),
    ],
    ids=lambda text: text[:24],
)
def test_invalid_values_on_the_command_line_are_reported(word, part):
    with pytest.raises(ConfigError) as error:
        load(["model.path=absent/a/b", "data.train_files=[absent.parquet]", word])
    assert part in str(error.value) and len(str(error.value)) < 8000


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: " + "[" * 5000, "nested too deep"),
        ("a: " + "{a: " * 5000, "nested too deep"),
        ("trainer.logger: " + "[" * 90 + "]" * 90, "nested more than"),
        ("a: &a [*a]", "nested too deep"),
        ("defaults: 5", "defaults entry `5` is not"),
        ("defaults: [{1: 2}]", "1"),
        ("defaults: [[1]]", "defaults entry `[1]` is not"),
        ("1: 2", "unknown key"),
        ("null: 2", "Incompatible key type"),
        ("loger: wandb", "did you mean trainer.logger"),
        ("rollout: {n: 1" + "0" * 40 + "}", "rollout.n: must be a 64-bit whole number"),
        ("rollout: 5", "job.yaml:1: rollout=5: `rollout` is a group; set one of its keys: rollout.name"),
        ("algorithm: [grpo]", "job.yaml:1: algorithm=[grpo]: `algorithm` is a group"),
        ("\0", "is not valid YAML"),
        ("algorithm: null", "job.yaml:1: algorithm=null: `algorithm` is a group"),
        ("algorithm: grpo\nalgorithm: ppo", "is not valid YAML"),
        ("---\nfusion: serial\n---\nfusion: stream", "is not valid YAML"),
        ("fusion: true", "job.yaml:1: fusion=true: `fusion` is a group"),
        ("experiment: ''", "experiment=: preset not found"),
        ("algorithm: 'grpo '", "did you mean grpo?"),
        ("defaults: [{algorithm: [grpo, ppo]}]", "is not `group: preset`"),
        ("defaults: [{algorithm: null}]", "is not `group: preset`"),
        ("defaults: [{algorithm: 3}]", "algorithm=3: preset not found"),
        ("defaults: [{a: b, c: d}]", "is not `group: preset`"),
        ("defaults: [null]", "is not `group: preset`"),
        ("defaults: [algorithm/grpo]", "is not `group: preset`"),
        ("job_file: given", "job_file: unknown key"),
        ("rollout: {n: .nan}", "rollout.n=nan: needs a whole number"),
        ("hydra: 3", "job.yaml:1: hydra: must be Hydra settings"),
        ("hydra: null", "hydra: must be Hydra settings"),
        ("# a job\nhydra: {sweeper: 3}", "job.yaml:2: hydra: must be Hydra settings"),
        ("hydra: {sweeper: {params: [fusion]}}", "hydra: must be Hydra settings"),
    ],
    ids=lambda text: text[:24],
)
def test_invalid_values_in_a_job_file_are_reported(text, part, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load([str(path)])
    assert part in str(error.value)


@pytest.mark.slow
@FEW
@given(st.dictionaries(st.one_of(KEYS, st.sampled_from(sorted(groups())), st.text(max_size=4)), VALUES, max_size=3))
def test_any_job_file_is_parsed_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create({str(k).replace("\ud800", ""): None for k in content})))
    try:
        read = job_file.read(path)
    except ConfigError:
        return
    assert all(str(path) in problem for problem in read.problems) and isinstance(read.presets, dict)
