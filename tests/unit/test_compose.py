import itertools
import re
import subprocess
import sys
import types
from datetime import datetime
from pathlib import Path

import pytest

from rlfuse import application, cli
from rlfuse.config.compose import CONF, compose_job, load, read_command
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError


@pytest.mark.slow
def test_a_short_job_file_is_valid_and_the_command_line_overrides_it(job):
    config = load([str(job), "rollout.n=8", "rollout.engine_kwargs.max_num_batched_tokens=512"])
    assert type(config) is Config and type(config.actor.optim.lr) is float
    assert (config.algorithm.adv_estimator, config.fusion.policy, config.rollout.n) == ("grpo", "stream", 8)
    assert config.rollout.engine_kwargs == {"enforce_eager": True, "max_num_batched_tokens": 512}
    assert (config.actor.optim.lr, config.actor.optim.weight_decay, config.actor.use_kl_loss) == (1e-5, 0.01, True)


@pytest.mark.slow
def test_config_dir_and_config_name_load_the_same_job(job):
    assert load(["--config-dir", str(job.parent), "--config-name", "my_job"]) == load([str(job)])
    text = job.read_text().replace("algorithm: grpo\n", "defaults: [config, {override /algorithm: grpo}, _self_]\n")
    job.write_text(text)
    assert load([f"--config-dir={job.parent}", "--config-name=my_job"]).algorithm.adv_estimator == "grpo"


@pytest.mark.slow
def test_a_custom_folder_of_experiments(job):
    (job.parent / "experiment").mkdir()
    experiment = job.parent / "experiment" / "long.yaml"
    experiment.write_text("# @package _global_\nrollout:\n  n: 6\ntrainer:\n  total_epochs: 9\n")
    config = load(["--config-dir", str(job.parent), "experiment=long", str(job)])
    assert (config.trainer.total_epochs, config.rollout.n) == (9, 6), "the command line has precedence"
    job.write_text(f"experiment: long\n{job.read_text()}")
    config = load(["--config-dir", str(job.parent), str(job)])
    assert (config.trainer.total_epochs, config.rollout.n) == (9, 4), "the file overrides its experiment"
    experiment.write_text("# @package _global_\nrollout:\n  m: 6\n")
    with pytest.raises(ConfigError, match=r"conf file experiment/long: rollout\.m: unknown key"):
        load(["--config-dir", str(job.parent), "experiment=long", str(job)])


@pytest.mark.slow
def test_unknown_names_in_a_job_file_are_reported_together_with_their_lines(job):
    job.write_text(job.read_text() + "actor:\n  lr: 3\ncritic.optim.lrr: 1\n")
    with pytest.raises(ConfigError) as error:
        load([str(job), "+new.key=1"])
    first, second, third = error.value.problems
    assert f"{job}:17: actor.lr: unknown key; did you mean actor.optim.lr" in first
    assert f"{job}:18: critic.optim.lrr: unknown key; did you mean critic.optim.lr" in second
    assert "+new.key=1" in third


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("actor.optim.lr=abc", "actor.optim.lr=abc: needs a number"),
        ("rollout.n=1.5", "rollout.n=1.5: needs a whole number"),
        ("lengths@data=long", "lengths@data=long: unknown key"),
        ("data.levels=1", "data.levels=1: unknown key"),
        ("video.levels=1", "video.levels=[1]"),
        ("rollout.n=[1", "rollout.n=[1: the value can't be parsed"),
        ("rollout.n=2,3", "rollout.n=2,3: several values; add --multirun to run one job for each"),
        ("data.val_files=a,b", "for a list write data.val_files=[a,b], add --multirun to run one job for each"),
        ("algorithm=grop", "algorithm=grop: preset not found"),
        ("fusion=", "fusion=: preset not found; presets: adaptive, "),
        ("trainer.experiment_name=${absent}", "correct the expression in"),
        ("reward.functions=[{path: a.py:f, kwargs: {t: 'a ${b}'}}]", "key 'b' not found; correct the expression in ${"),
        ("rollout.val_kwargs={m: 3}", "rollout.val_kwargs.m: unknown key"),
    ],
)
def test_errors_of_hydra_are_reported_in_one_line(job, override, part):
    with pytest.raises(ConfigError) as error:
        load([str(job), override])
    assert part in str(error.value) and len(error.value.problems) == 1
    assert "\n" not in error.value.problems[0]


def test_a_tilde_needs_no_quotes():
    assert compose_job(["model.path=~/models/q", "critic.model.path=~/c"]).model.path == "~/models/q"


def test_missing_keys_are_reported_with_all_other_problems():
    with pytest.raises(ConfigError) as error:
        load(["algorithm=grpo", "rollout.n=1", "rollout.top_p=2"])
    text = str(error.value)
    for part in (
        "data.train_files: is required",
        "model.path: is required",
        "reward.functions=[]",
        "rollout.n=1",
        "top_p",
    ):
        assert part in text
    assert len(error.value.problems) == 5


def test_interpolation_and_the_date(job):
    config = load([str(job), "trainer.project_name=${now:%Y}", "critic.optim.lr=${actor.optim.lr}"])
    assert config.trainer.project_name == f"{datetime.now():%Y}" and config.critic.optim.lr == 1e-5


@pytest.mark.parametrize("preset", sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml")))
def test_every_algorithm_preset_is_valid(job, preset):
    job.write_text(job.read_text().replace("algorithm: grpo\n", "").replace("  n: 4\n", ""))
    config = load([str(job), f"algorithm={preset}", *[f"ref.path={job.parent / 'model'}"] * (preset == "distill")])
    assert config.uses_critic == (preset == "ppo")


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(path.stem for path in (CONF / "fusion").glob("*.yaml")))
def test_every_fusion_preset_is_valid_or_names_the_required_setting(job, preset):
    needs_correction = preset in ("partial_rollout", "one_step_off")
    if needs_correction:
        with pytest.raises(ConfigError, match=r"set algorithm\.rollout_correction\.rollout_is=token"):
            load([str(job), f"fusion={preset}"])
    corrected = f"algorithm.rollout_correction.rollout_is={'token' if needs_correction else 'null'}"
    fusion = load([str(job), f"fusion={preset}", corrected]).fusion
    assert preset in (fusion.policy, fusion.data)


@pytest.mark.slow
def test_one_command_runs_one_job(job, ran, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = {*Path().iterdir()}
    assert cli.main(["train", str(job), "rollout.n=2"]) == 0
    assert [config.rollout.n for config in ran] == [2]
    assert {*Path().iterdir()} - before == {Path("runs")}, "Hydra writes no folder"


@pytest.mark.parametrize(
    "option", [["--cfg", "job"], ["--cfg=job"], ["-m"], ["--info"], ["-i", "config"], ["-p", "data"]]
)
def test_options_settings_and_the_file_are_accepted_in_any_order(job, option):
    parts = [option, [str(job)], ["rollout.n=8", "algorithm=rloo"]]
    commands = [read_command([word for part in order for word in part]) for order in itertools.permutations(parts)]
    assert all(command == commands[0] for command in commands)
    assert commands[0].overrides[-2:] == ["rollout.n=8", "algorithm=rloo"] and len(commands[0].options) == 1
    between = read_command(["rollout.n=8", str(job), *option, "algorithm=rloo"])
    assert between == commands[0]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["-m", "--cfg", "job"], "--multirun --cfg: can't be combined"),
        (["--resolve"], "write --cfg job --resolve"),
        (["--multi-run"], "unrecognized arguments: --multi-run"),
        (["--cfg", "jobs"], "invalid choice: 'jobs' (choose from"),
        (["--config-path", "x"], "give your folder with --config-dir"),
        (["a.yaml", "b.yaml"], "only one job file is allowed"),
        (["hydra/launcher=joblib"], "needs a package that is not installed; pip install hydra-joblib-launcher"),
        (["hydra/sweeper=ax"], "pip install hydra-ax-sweeper"),
        (
            ["hydra/launcher=slurm"],
            "plugin not found; plugins: basic, joblib (pip install hydra-joblib-launcher)",
        ),
    ],
)
def test_invalid_options_are_reported_with_valid_ones(words, part, job, ran, capsys):
    assert application.main([*words, *([] if "a.yaml" in words else [str(job)])]) == 2
    output = capsys.readouterr().err
    assert part in output and "Traceback" not in output and ran == []


@pytest.mark.slow
def test_failures_of_a_run_and_their_exit_status(job, monkeypatch, capsys):
    from rlfuse.errors import EngineError

    def fail(error):
        def run(config):
            raise error

        monkeypatch.setitem(sys.modules, "rlfuse.run.build", types.SimpleNamespace(run=run))
        return application.main([str(job)]), capsys.readouterr().err

    assert fail(EngineError("rollout 0 died")) == (1, "rollout 0 died\n(RLFUSE_TRACEBACK=1 shows the traceback)\n")
    assert application.known_failure(ConfigError(["x"])) == 2 and fail(KeyboardInterrupt())[0] == 130
    status, text = fail(ZeroDivisionError("a defect"))
    assert status == 1 and text.count("Traceback") == 1
    monkeypatch.setenv("RLFUSE_TRACEBACK", "1")
    assert "Traceback" in fail(EngineError("rollout 0 died"))[1]


@pytest.mark.slow
def test_rewards_can_be_composed_in_a_job_file_and_on_the_command_line(job):
    folder, functions = job.parent, 'reward.functions: ["{}/rewards.py:score"]\n'
    composed = """\
reward:
  functions:
    - {{path: "rlfuse.rewards.reasoning_tags:format_gate", gate: true}}
    - {{path: "{}/rewards.py:score", sources: [openai/gsm8k, "math.v1*"], kwargs: {{a.b: 1, c: '\\${{d}}'}}}}
  num_workers: 2
actor.use_kl_loss: true
algorithm.kl_coef_by_source: {{"math.v1*": 0, openai/gsm8k: 1e-5}}
"""
    text = job.read_text().replace(functions.format(folder), composed.format(folder))
    job.write_text(text.replace("algorithm: grpo\n", "defaults: [{override /algorithm: grpo}]\n"))
    config = load([str(job)])
    assert config.reward.functions[0] == {"path": "rlfuse.rewards.reasoning_tags:format_gate", "gate": True}
    assert config.reward.functions[1]["sources"] == ["openai/gsm8k", "math.v1*"]
    assert config.reward.functions[1]["kwargs"] == {"a.b": 1, "c": "${d}"}
    assert config.algorithm.kl_coef_by_source == {"math.v1*": 0.0, "openai/gsm8k": 1e-5}
    typed = f"reward.functions=[{{path: {folder}/rewards.py:score, weight: 0.5, sources: [chat*]}}]"
    changed = load([str(job), typed, "algorithm.kl_coef_by_source={chat: 0.1}"])
    assert changed.reward.functions == [{"path": f"{folder}/rewards.py:score", "weight": 0.5, "sources": ["chat*"]}]
    assert changed.algorithm.kl_coef_by_source["chat"] == 0.1
    with pytest.raises(ConfigError, match=r"functions\.wieght: unknown key of an entry; did you mean weight"):
        load([str(job), typed.replace("weight", "wieght")])
    with pytest.raises(ConfigError, match=r"kl_coef_by_source\.chat=much: invalid value for this dictionary"):
        load([str(job), "algorithm.kl_coef_by_source.chat=much"])


def test_the_command_lists_subcommands_and_suggests_corrections(capsys):
    assert cli.main([]) == 0 and "rlfuse train" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert cli.main(["trian"]) == 2 and "did you mean `rlfuse train`?" in capsys.readouterr().err
    assert cli.main(["rollout.n=2"]) == 2 and "did you mean `rlfuse train rollout.n=2`?" in capsys.readouterr().err
    assert cli.main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "experiment=quickstart" in out and "trainer.default_local_dir" in out and "dr_grpo" in out
    assert cli.main(["train", "--help", "sources"]) == 0
    assert "reward.functions[].sources: list[str] = []" in capsys.readouterr().out


@pytest.mark.slow
def test_a_mistyped_key_is_reported_before_slow_imports():
    code = "import sys; from rlfuse.application import main; s = main(['actor.lr=3']); "
    code += "print(s, sorted({'torch', 'ray', 'transformers', 'vllm', 'deepspeed'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 []\n" and "did you mean actor.optim.lr" in done.stderr


@pytest.mark.slow
def test_all_problems_of_a_job_are_reported_together(job):
    job.write_text(job.read_text() + "critic: {optim: {lr: fast}}\nvideo.levels: [1, x]\n")
    words = ["data.seed=[1]", "rollout.n=two", "rollout.top_p=3", "critic.optimlr=3", "data.val_files=absent.parquet"]
    with pytest.raises(ConfigError) as error:
        load([str(job), *words])
    keys = [problem.removeprefix(f"{job}:").lstrip("0123456789: ") for problem in error.value.problems]
    reported = [re.match(r"[\w.]+", key)[0] for key in keys]
    assert reported == ["critic.optim.lr", "video.levels", "data.seed", "rollout.n", "critic.optimlr", "rollout.top_p",
                     "data.val_files"]  # fmt: skip


def test_a_list_of_one_entry_may_be_given_as_the_entry(job):
    job.write_text(job.read_text().replace("[{", "{").replace("train_files: [", "train_files: ").replace("l]", "l"))
    folder = job.parent
    config = load([str(job), f"data.val_files={folder}/train.jsonl", "trainer.logger=console"])
    assert config.data.train_files == config.data.val_files == [f"{folder}/train.jsonl"]
    assert config.trainer.logger == ["console"]
