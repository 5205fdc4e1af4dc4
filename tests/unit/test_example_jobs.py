"""Each algorithm preset has an example job, which composes and passes all checks."""

import re
from pathlib import Path

import pytest
import yaml

from rlfuse.config.compose import compose_job, to_config
from rlfuse.config.facts import Facts, reward_functions
from rlfuse.config.prepared import FOLDERS
from rlfuse.rewards.api.entries import load_entries

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "jobs" / "algorithms"
PRESETS = sorted(path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml"))


def test_every_preset_has_an_example_job():
    assert sorted(path.stem for path in JOBS.glob("*.yaml")) == PRESETS


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_example_job_passes_all_checks_and_prepares_its_data(name):
    file = JOBS / f"{name}.yaml"
    config, given = to_config(compose_job([str(file)]), lambda _: Facts()), yaml.safe_load(file.read_text())
    assert given["algorithm"] == name and config.trainer.job_name == name
    commands = re.findall(r"^#   (rlfuse .*)$", file.read_text(), re.MULTILINE)
    prepared = [command.removeprefix("rlfuse prepare ") for command in commands if "prepare" in command]
    assert f"rlfuse train jobs/algorithms/{name}.yaml" in commands
    for path in (*config.data.train_files, *config.data.val_files, config.model.path):
        assert any(Path(path).is_relative_to(FOLDERS[task]) for task in prepared)
    assert len(load_entries(config.reward.functions, config.reward.weights)[0]) == len(reward_functions(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_example_job_overrides_no_setting_of_the_preset(name):
    preset = yaml.safe_load((ROOT / "conf" / "algorithm" / f"{name}.yaml").read_text())
    config = to_config(compose_job([str(JOBS / f"{name}.yaml")]), lambda _: Facts())
    assert config.algorithm.adv_estimator == preset["algorithm"]["adv_estimator"]
    assert config.actor.loss_mode == preset["actor"]["loss_mode"]
    assert config.actor.use_kl_loss == preset["actor"]["use_kl_loss"]
