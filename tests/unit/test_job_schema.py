"""The JSON schema of job files accepts all bundled jobs and presets, and rejects what `rlfuse train` rejects."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from rlfuse.cli import main
from rlfuse.config import job_file
from rlfuse.config.documentation import by_name, groups
from rlfuse.parsing import parse_yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for pattern in ("conf/**/*.yaml", "jobs/**/*.yaml")
    for path in ROOT.glob(pattern)
    if not {"clusters", "tasks"} & {*path.parts} and "kuberay" not in path.name
)


@pytest.fixture(scope="module")
def schema():
    with redirect_stdout(StringIO()) as printed:
        assert main(["train", "--help", "--json-schema"]) == 0
    found = json.loads(printed.getvalue())
    Draft7Validator.check_schema(found)
    return found


def content_of(text):
    return OmegaConf.to_container(parse_yaml(text, OmegaConf.create))


def problems(schema, content):
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(content)]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_bundled_jobs_and_presets_are_valid(schema, file):
    assert not problems(schema, content_of(file.read_text()))


def test_bundled_files_are_found():
    assert {"grpo.yaml", "ppo_7b.yaml", "dapo.yaml", "quickstart.yaml", "config.yaml"} <= {file.name for file in FILES}


def test_every_key_has_a_description_and_accepts_its_default(schema):
    for name, key in by_name().items():
        definition = schema["definitions"][name]
        assert definition["description"].startswith(key.text)
        assert key.required or (definition["default"] == key.default and not problems(schema, {name: key.default})), (
            name
        )
    assert {*groups()} <= schema["properties"].keys()


VALID = (
    "rollout: {n: 4}",
    "rollout.n: 4",
    "actor: {optim.lr: 1e-6}",
    "actor.optim: {lr: 1e-6}",
    "algorithm: grpo",
    "algorithm: {adv_estimator: my/estimator.py:mine}",
    "experiment: null",
    "data: {train_files: rows.parquet}",
    "data: {train_files: [a.parquet, b.json]}",
    "reward: {functions: [my_reward.py:score, {path: my_reward.py:score, weight: 0.5}]}",
    "actor: {ppo_mini_batch_size: '${data.train_batch_size}', clip_ratio_low: null, clip_ratio: 1}",
    "trainer: {logger: [console], test_freq: -1}",
    "rollout: {engine_kwargs: {enforce_eager: true}}",
    "rollout: {engine_kwargs.enforce_eager: true}",
    "algorithm.adv_estimator_kwargs.a.b: 1",
    "defaults: [{algorithm: rloo}]",
    "hydra: {sweeper: {params: {rollout.n: '2,4'}}}",
)
INVALID = (
    "rolout: {n: 4}",
    "rollout: {m: 4}",
    "rollout.m: 4",
    "rollout.n.m: 4",
    "rollout: {n: many}",
    "rollout: {n: 0}",
    "rollout: {n: null}",
    "rollout: {n: 1.5}",
    "actor: {use_kl_loss: 1}",
    "actor: {loss_agg_mode: mean}",
    "rollout: {top_p: 1.1}",
    "rollout: {top_k: 0}",
    "trainer: {logger: [consol]}",
    "algorithm: grppo",
    "reward: {functions: [{weight: 1}]}",
    "algorithm: [grpo]",
    "rollout: {engine_kwargs.enforce_eager: true, m: 4}",
)
UNKNOWN = {
    "rolout: {n: 4}": "rolout",
    "rollout.m: 4": "rollout.m",
    "rollout: {m: 4}": "m",
    "algorithm: {lambda: 1}": "lambda",
    "actor: {optim: {learning_rate: 1}}": "learning_rate",
}
"""A job -> its unknown key."""


@pytest.mark.parametrize(
    ("text", "is_valid"), [*((text, True) for text in VALID), *((text, False) for text in INVALID)]
)
def test_valid_and_invalid_jobs(schema, text, is_valid, tmp_path):
    (tmp_path / "job.yaml").write_text(text)
    assert (not problems(schema, content_of(text))) is is_valid
    if is_valid:
        assert not job_file.read(tmp_path / "job.yaml").problems


@pytest.mark.parametrize(("text", "name"), UNKNOWN.items())
def test_the_message_for_an_unknown_key_names_it(schema, text, name):
    [problem] = problems(schema, content_of(text))
    assert problem.endswith(f": Additional properties are not allowed ('{name}' was unexpected)")
