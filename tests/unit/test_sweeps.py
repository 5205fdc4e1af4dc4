"""Sweeps: names of runs, the result table, and complete sweeps."""

import io
import json
import math
import os
import signal
import sys
import types

import pytest
import yaml
from omegaconf import OmegaConf

from rlfuse import application
from rlfuse.config.compose import load, read_command
from rlfuse.errors import ConfigError
from rlfuse.run.sweeps import LONGEST_NAME, Trial, print_table, sweep_name, swept_values
from rlfuse.stopping import Stopped


def names(words, *jobs, params=None):
    several = swept_values(words, params or {})
    return [sweep_name("a", dict(zip(several, values, strict=True)), several) for values in jobs]


def test_names_contain_only_varied_keys():
    words = [
        "algorithm=ppo,grpo",
        "+lengths@_global_=long,short",
        "data.seed=1",
        "job_file=given",
        "hydra.verbose=true",
    ]
    assert names(words, ("grpo", "long")) == ["a-algorithm=grpo-lengths=long"]
    assert names(["actor.optim.lr=1e-6,1e-5"], ("1e-6",)) == ["a-actor.lr=1e-6"]
    assert names(["trainer.experiment_name=a,b", "rollout.n=range(2,4)"], ("2",)) == ["a-rollout.n=2"]
    assert names([], ("8",), params={"rollout.n": "8,16", "data.seed": "3"}) == ["a-rollout.n=8"]
    assert list(swept_values(["rollout.n=interval(1,9)", "experiment=glob(*)"], {})) == ["rollout.n", "experiment"]


def test_keys_with_the_same_group_and_leaf_are_distinguished():
    words = ["rollout.temperature=1,2", "rollout.val_kwargs.temperature=0,1"]
    assert names(words, ("1", "0")) == ["a-rollout.temperature=1-rollout.val_kwargs.temperature=0"]


@pytest.mark.parametrize(
    "values",
    [
        ["[a/x.py:f]", "[a_x.py:f]", "[a.x.py:f]"],
        [f"[data/{'very/' * 9}{name}.parquet]" for name in "abc"],
        ["'a b'", "'a  b'", "a_b"],
    ],
)
def test_no_two_jobs_have_the_same_name(values):
    found = names([f"data.train_files={','.join(values)}"], *((value,) for value in values))
    assert len(set(found)) == len(values) and max(map(len, found)) < 64
    assert found == names([f"data.train_files={','.join(values)}"], *((value,) for value in values)), (
        "names are stable across starts"
    )


def test_names_of_many_keys_fit_the_length_limit_of_folders():
    words = [f"rollout.engine_kwargs.option_{number}=1,2" for number in range(20)]
    found = names(words, ("1",) * 20, ("1",) * 19 + ("2",))
    assert len(set(found)) == 2 and max(map(len, found)) <= LONGEST_NAME


def test_the_table_is_sorted_by_score_and_tolerates_damaged_summaries(tmp_path):
    trials = []
    for number, score in enumerate([0.25, 0.75, None, math.nan]):
        folder = tmp_path / f"a-{number}"
        folder.mkdir()
        (folder / "config.yaml").write_text(
            "trainer: {nnodes: 1, n_gpus_per_node: 1}\nrollout: {tensor_model_parallel_size: 1}"
        )
        text = json.dumps({"val_after": score, "reward_first": 0, "reward_last": number, "seconds": 5.2})
        (folder / "summary.json").write_text(text if number != 2 else text[:9])
        trials.append(Trial(folder.name, {"rollout.n": str(number)}, folder, "finished"))
    trials.append(Trial("a-4", {}, tmp_path / "a-4", error="rollout 0 died"))
    out = io.StringIO()
    print_table(trials, out)
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines[2:7]] == ["1", "0", "3", "2", "4"]
    assert lines[-2] == "job 4 failed: rollout 0 died"
    assert lines[-1].endswith(" ".join(["rlfuse report", *(str(tmp_path / f"a-{number}") for number in (1, 0, 3, 2))]))


def test_sweeps_accept_lists_of_one_entry():
    swept = read_command(["data.train_files=a.jsonl,b.jsonl", "trainer.logger=console,[wandb]", "-m"]).overrides
    assert swept == ["data.train_files=[a.jsonl],[b.jsonl]", "trainer.logger=[console],[wandb]"]
    one, other = (read_command([f"data.val_files={text}"]).overrides for text in ("${x.y}", "${oc.env:HOME}/a.jsonl"))
    assert one == ["data.val_files=${x.y}"] and other == ["data.val_files=[${oc.env:HOME}/a.jsonl]"]


@pytest.mark.slow
def test_a_sweep_has_a_folder_per_job_and_continues_after_a_failure(job, ran, monkeypatch, capsys):
    monkeypatch.chdir(job.parent)
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    argv = ["-m", "trainer.experiment_name=a", str(job), "rollout.n=1,2,4", "actor.optim.weight_decay=0.1"]
    assert application.main(argv) == 2
    assert [config.rollout.n for config in ran] == [2, 4]
    assert [config.run_folder.name for config in ran] == ["a-rollout.n=2", "a-rollout.n=4"], "named by varied keys"
    assert ran.groups == ["a", "a"] and "WANDB_RUN_GROUP" not in os.environ
    output = capsys.readouterr()
    assert output.err.count("rollout.n=1: ") == 1 and "a-rollout.n=1 failed; see its message above" in output.err
    table = output.out[output.out.index("job ") :].splitlines()
    assert table[0].split() == ["job", "rollout.n", "state", "reward", "held", "out", "s/step", "folder"]
    assert [line.split() for line in table[1:4]] == [
        ["2", "4", "finished", "0.100", "->", "0.200", "0.500", "1.500", "runs/rlfuse/a-rollout.n=4"],
        ["1", "2", "finished", "0.100", "->", "0.200", "0.250", "1.500", "runs/rlfuse/a-rollout.n=2"],
        ["0", "1", "refused", "-", "-", "-", "-"],
    ], "sorted by score"
    assert table[-2].startswith("job 0 refused: rollout.n=1: must be 2 or more")
    assert table[-1] == "compare  rlfuse report runs/rlfuse/a-rollout.n=4 runs/rlfuse/a-rollout.n=2"


@pytest.mark.slow
def test_a_sweep_over_custom_groups(job, ran, capsys):
    (job.parent / "lengths").mkdir()
    (job.parent / "lengths" / "long.yaml").write_text("# @package _global_\ndata:\n  max_response_length: 32\n")
    (job.parent / "lengths" / "short.yaml").write_text("data:\n  max_response_length: 16\n")
    argv = ["--config-dir", str(job.parent), str(job), "+lengths=short,long", "-m", "algorithm=rloo"]
    assert application.main(argv) == 0
    assert [(config.data.max_response_length, config.algorithm.adv_estimator) for config in ran] == [
        (16, "rloo"),
        (32, "rloo"),
    ]
    assert [config.run_folder.name for config in ran] == ["mine-lengths=short", "mine-lengths=long"]
    assert application.main(argv) == 0 and len(ran) == 2, "a completed job is not trained again"
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[-3:-1]] == [
        ["0", "short", "finished"],
        ["1", "long", "finished"],
    ]
    with pytest.raises(ConfigError, match="lengths=lang: preset not found; presets: long, short; did you mean"):
        load(["--config-dir", str(job.parent), str(job), "lengths=lang"])


@pytest.mark.slow
def test_a_preempted_job_stops_its_sweep(job, monkeypatch):
    started = []

    def leave(config):
        started.append(config)
        raise Stopped("SIGTERM", signal.SIGTERM)

    monkeypatch.setitem(sys.modules, "rlfuse.run.build", types.SimpleNamespace(run=leave))
    assert application.main(["-m", str(job), "rollout.n=2,4"]) == application.PREEMPTED and len(started) == 1


@pytest.mark.slow
def test_ctrl_c_in_the_last_step_of_a_job_stops_its_sweep(job, ran, monkeypatch):
    monkeypatch.setattr(application, "stop_signal", lambda: signal.SIGINT)
    assert application.main(["-m", str(job), "rollout.n=2,4"]) == application.INTERRUPTED and len(ran) == 1


@pytest.mark.slow
def test_an_optimizing_sweeper_receives_the_last_validation_score(job, ran, capsys):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install hydra-optuna-sweeper")
    argv = ["-m", str(job), "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2"]
    argv += ["hydra.sweeper.sampler.seed=1", "rollout.n=choice(1,2,4)"]
    argv += ["hydra.sweeper.direction=maximize", f"data.val_files=[{job.parent}/train.jsonl]"]
    assert application.main([*argv, "hydra.sweeper.max_failure_rate=1"]) == 0
    assert [config.rollout.n for config in ran] == [2, 4], "rollout.n=1 is refused, 4 is trained once"
    found = yaml.safe_load((job.parent / "runs" / "rlfuse" / "optimization_results.yaml").read_text())
    assert found == {"name": "optuna", "best_params": {"rollout.n": 4}, "best_value": 0.5}
    table = capsys.readouterr().out.partition("job  rollout.n")[2].splitlines()
    assert [line.split()[:3] for line in table[1:5]] == [
        ["2", "4", "finished"],
        ["3", "4", "finished"],
        ["0", "2", "finished"],
        ["1", "1", "refused"],
    ]


def test_an_invalid_optimizing_sweeper_is_rejected_before_a_job_starts(job):
    config, sweeper = load([str(job)]), OmegaConf.create({"_target_": "a.B", "direction": "minimize"})
    with pytest.raises(ConfigError) as error:
        application.check_sweeper(sweeper, config)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "data.val_files=[]",
        "hydra.sweeper.direction=minimize",
    ]
    application.check_sweeper(
        OmegaConf.create({"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"}), config
    )
