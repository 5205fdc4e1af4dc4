"""Presets on the command line override the job file, also in sweeps and for job files of `plan --search`."""

import io

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from rlfuse import application
from rlfuse.config.compose import CONF, compose_job
from rlfuse.config.documentation import by_name
from rlfuse.config.presets import contents
from rlfuse.errors import ConfigError
from rlfuse.tools.planning.planned_job import write_job

ALGORITHMS, POLICIES = (sorted(path.stem for path in (CONF / name).glob("*.yaml")) for name in ("algorithm", "fusion"))
POLICY, DATA, TRAINING = "fusion.policy", "fusion.data", "fusion.training"
ESTIMATOR, N, KL = "algorithm.adv_estimator", "rollout.n", "algorithm.use_kl_in_reward"


@pytest.fixture
def folder(tmp_path):
    """Return a folder with custom presets."""
    files = {
        "lengths/long": "data: {max_response_length: 4096}\nactor: {ppo_mini_batch_size: 8}",
        "lengths/short": "data: {max_response_length: 16}",
        "groups/large": "rollout: {n: 64}",
        "experiment/mine": "defaults: [/algorithm/rloo, _self_]\nrollout: {n: 5}",
        "experiment/hydras": "defaults: [{override /algorithm: rloo}]\nrollout: {n: 5}",
        "fusion/halves": "policy: stream\ntraining: serial",
    }
    for name, text in files.items():
        (path := tmp_path / f"{name}.yaml").parent.mkdir(exist_ok=True)
        path.write_text(("" if name.startswith("fusion") else "# @package _global_\n") + text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "file", "words", "cycle"),
    [
        ({"experiment/a": "b", "experiment/b": "a"}, None, "experiment=a", "experiment/a -> experiment/b"),
        ({"experiment/a": "b", "experiment/b": "a"}, "experiment: a", "", "experiment/a -> experiment/b"),
        ({"experiment/a": "a"}, None, "experiment=a", "experiment/a"),
        ({"experiment/a": "/own/c", "own/c": "{/own: d}", "own/d": "c"}, None, "experiment=a", "own/c -> own/d"),
        ({"own/c": "d", "own/d": "/own/c"}, None, "+own=c", "own/c -> own/d"),
    ],
    ids=str,
)
def test_presets_that_include_each_other_are_refused(files, file, words, cycle, tmp_path):
    for name, included in files.items():
        (path := tmp_path / f"{name}.yaml").parent.mkdir(exist_ok=True)
        path.write_text(f"# @package _global_\ndefaults: [{included}, _self_]\nrollout: {{n: 4}}")
    with pytest.raises(ConfigError, match=f"{cycle} -> {cycle.split()[0]}: presets include each other"):
        composed(tmp_path, file, words)


def composed(folder, file, words):
    if file is not None:
        (folder / "job.yaml").write_text(file)
    return compose_job(["--config-dir", str(folder), *words.split(), *([str(folder / "job.yaml")] if file else [])])


CASES = [
    ("fusion: {policy: serial}", "fusion=rlhfuse", {POLICY: "rlhfuse", TRAINING: "fused"}),
    ("fusion: {policy: serial, training: serial}", "fusion=rlhfuse", {POLICY: "rlhfuse", TRAINING: "fused"}),
    ("fusion: {data: partial_rollout}", "fusion=serial", {POLICY: "serial", DATA: "exact", TRAINING: "serial"}),
    ("fusion.policy: serial", "fusion=adaptive", {POLICY: "adaptive"}),
    ("fusion: serial\nfusion.policy: stream", "fusion=over_sampling", {POLICY: "adaptive", DATA: "over_sampling"}),
    ("fusion: serial", "", {POLICY: "serial", TRAINING: "serial"}),
    ("fusion: serial\nfusion.policy: stream", "", {POLICY: "stream", TRAINING: "serial"}),
    ("fusion: {policy: serial}", "fusion=rlhfuse fusion.policy=stream", {POLICY: "stream", TRAINING: "fused"}),
    ("fusion: {policy: serial}", "fusion={policy:stream}", {POLICY: "stream"}),
    ("fusion: {policy: serial}", "fusion=stream fusion=rlhfuse", {POLICY: "rlhfuse"}),
    ("fusion: {policy: serial}", '+fusion="rlhfuse"', {POLICY: "rlhfuse"}),
    ("algorithm: {adv_estimator: gae}", "algorithm=grpo", {ESTIMATOR: "grpo", N: 8, "actor.use_kl_loss": True}),
    ("algorithm: {adv_estimator: gae}\nrollout: {n: 2}", "algorithm=grpo rollout.n=4", {ESTIMATOR: "grpo", N: 4}),
    ("algorithm: {adv_estimator: grpo}\nrollout: {n: 3}", "algorithm=ppo", {ESTIMATOR: "gae", N: 3}),
    ("algorithm: gspo\nactor: {clip_ratio_high: 9}", "algorithm=grpo", {"actor.clip_ratio_high": None}),
    ("defaults: [{override /algorithm: gspo}]", "algorithm=rloo", {N: 4, "actor.loss_mode": "vanilla"}),
    ("defaults: [{algorithm: dapo}]\nrollout: {n: 2}", "", {N: 2, "actor.clip_ratio_high": 0.28}),
    ("experiment: quickstart\nalgorithm: grpo", "", {ESTIMATOR: "grpo", N: 8, KL: False}),
    ("experiment: quickstart\nalgorithm: {lam: 0.5}", "algorithm=grpo", {ESTIMATOR: "grpo", "algorithm.lam": 0.5}),
    ("experiment: images\nalgorithm: ppo", "", {ESTIMATOR: "gae", "data.max_prompt_length": 64}),
    ("experiment: hydras\nrollout: {n: 7}", "", {ESTIMATOR: "rloo", N: 7}),
    ("experiment: mine", "experiment=judge experiment=images", {ESTIMATOR: "grpo", N: 8}),
    ("\ufefffusion: serial\r\nrollout:\r\n  n: 3\r\n", "fusion=stream", {POLICY: "stream", N: 3}),
    ("experiment: null", "fusion=stream", {POLICY: "stream"}),
    ("defaults: [{experiment: null}, {optional algorithm: grpo}, {/fusion: serial}]", "", {N: 8, POLICY: "serial"}),
    ("defaults: {algorithm: grpo}\nfusion: {<<: {policy: serial}}", "fusion=stream", {N: 8, POLICY: "stream"}),
    ("algorithm: &a grpo\nfusion: *a", "fusion=stream", {N: 8, POLICY: "stream"}),
    ("experiment: quickstart", "experiment=null", {"data.max_prompt_length": 512}),
    ("algorithm: rloo\nrollout: {n: 3}", "experiment=quickstart", {ESTIMATOR: "gae", N: 2, KL: True}),
    ("data: {seed: 3}\nrollout: {n: 3}", "experiment=judge", {"data.seed": 3, N: 2, "trainer.job_name": "judge"}),
    ("rollout: {n: 3}", "algorithm=ppo experiment=images", {ESTIMATOR: "gae", N: 8}),
    (None, "algorithm=grpo experiment=quickstart", {ESTIMATOR: "grpo", N: 8, KL: False}),
    (None, "experiment=hydras", {ESTIMATOR: "rloo", N: 5, KL: True}),
    (None, "experiment=hydras algorithm=ppo", {ESTIMATOR: "gae", N: 5, KL: False}),
    ("data: {max_response_length: 9}", "lengths=long", {"data.max_response_length": 4096}),
    ("defaults: [{lengths: long}]\ndata: {max_response_length: 9}", "", {"data.max_response_length": 9}),
    ("defaults: [{lengths: long}]", "lengths=short", {"data.max_response_length": 16, "actor.ppo_mini_batch_size": 64}),
    ("rollout: {n: 3}", "groups=large algorithm=grpo rollout.n=6", {N: 6, ESTIMATOR: "grpo"}),
    ("defaults: [{groups: large}]\nalgorithm: grpo\nrollout: {n: 6}", "", {N: 6}),
    ("defaults: [{groups: large}]", "algorithm=grpo", {N: 8}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "words", "values"), CASES, ids=[f"{file}-{words}" for file, words, _ in CASES])
def test_command_line_overrides_the_file_and_settings_override_presets(file, words, values, folder):
    job = composed(folder, file, words)
    assert {key: OmegaConf.select(job, key) for key in values} == values


REFUSED = [
    ("", "groups=large algorithm=grpo", "rollout.n: groups=large sets 64, algorithm=grpo sets 8; set rollout.n=64 or"),
    ("defaults: [{groups: large}]\nalgorithm: grpo", "", "rollout.n: groups=large sets 64, algorithm=grpo sets 8"),
    ("rollout: {n: 3}", "experiment=hydras", "overrides `algorithm` below the job file; write /algorithm/rloo"),
    ("", "-m fusion=serial,rlhfuse fusion.policy=stream", "but fusion=serial,rlhfuse varies it; remove one of them"),
    ("", "-m algorithm=ppo,grpo algorithm.adv_estimator=rloo", "algorithm.adv_estimator: is set for all jobs"),
    ("", "-m experiment=mine,images algorithm.adv_estimator=gae", "algorithm.adv_estimator: is set for all jobs"),
    ("", "fusion=null", "fusion=null: null is not a preset; remove it, the default is fusion=adaptive"),
    ("", "algorithm=ppo,null -m", "algorithm=ppo,null: null is not a preset"),
    ("", "fusion=[serial,stream]", "write fusion=serial,stream --multirun"),
    ("", "fusion=serial,stream", "fusion=serial,stream: several values; add --multirun to run one job for each"),
    ("fusion: {policy: serial}", "fusion=rlhfuze", "preset not found; presets: adaptive, "),
    ("fusion: rlhfuze", "", "did you mean rlhfuse?"),
    ("fusion: {policy: serial}", "fusion=halves", "conf file fusion/halves: policy: unknown key"),
    ("", "+hydra.sweeper.params.fusion=serial,stream -m", "write swept values as KEY=VALUE,VALUE with --multirun"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "words", "part"), REFUSED, ids=[f"{file}-{words}" for file, words, _ in REFUSED])
def test_presets_that_cannot_apply_completely_are_refused(file, words, part, folder):
    with pytest.raises(ConfigError) as error:
        composed(folder, file, words)
    assert part in str(error.value)


OF_ONE_LOSS = "actor.kl_cov_ratio", "actor.ppo_kl_coef"
"""Keys that only actor.loss_mode=kl_cov reads, so other presets need not reset them."""


def test_presets_of_a_group_set_the_same_keys():
    for group, names in (("algorithm", ALGORITHMS), ("fusion", POLICIES)):
        keys = [contents(group, name, [CONF]).keys() - {N, *OF_ONE_LOSS} for name in names]
        assert all(each == keys[0] for each in keys) and keys[0] <= by_name().keys()


@pytest.mark.slow
def test_overridden_settings_are_reported_with_their_location(folder, capsys):
    composed(folder, "# a job\nrollout:\n  n: 3\nfusion: {policy: serial}\n", "algorithm=grpo fusion=serial")
    messages = capsys.readouterr().err.splitlines()
    assert messages == [f"{folder}/job.yaml:3: rollout.n=3 is overridden: algorithm=grpo sets 8"]
    composed(folder, None, "experiment=quickstart algorithm=grpo rollout.n=4")
    assert capsys.readouterr().err.count("overridden") == 1, "algorithm.use_kl_in_reward"


@pytest.mark.slow
@pytest.mark.parametrize("before", ALGORITHMS)
def test_job_file_of_plan_search_accepts_any_preset(before, folder):
    given = compose_job([f"algorithm={before}", "fusion=over_sampling", "model.path=x", "data.train_files=[y]"])
    planned = OmegaConf.to_object(given)
    write_job(folder / "best.yaml", given, {}, planned, Console(file=io.StringIO()))
    assert OmegaConf.to_object(compose_job([str(folder / "best.yaml"), "trainer.job_name=null"])) == planned
    name = ("dapo", "ppo", "reinforce_plus_plus")[ALGORITHMS.index(before) % 3]
    job = compose_job([str(folder / "best.yaml"), f"algorithm={name}", "fusion=serial"])
    values = contents("algorithm", name, [CONF]) | contents("fusion", "serial", [CONF])
    assert {key: OmegaConf.select(job, key) for key in values} == values


SWEEPS = [
    (["fusion=serial,rlhfuse"], "", POLICY, ["serial", "rlhfuse"], "fusion={}"),
    (["'fusion=choice(serial,rlhfuse)'"], "", POLICY, ["serial", "rlhfuse"], "fusion={}"),
    (["fusion=glob(s*)"], "", POLICY, ["serial", "stream"], "fusion={}"),
    ([], 'hydra: {sweeper: {params: {fusion: "serial,rlhfuse"}}}', POLICY, ["serial", "rlhfuse"], "fusion={}"),
    (["algorithm=grpo,rloo", "rollout.n=6"], "", ESTIMATOR, ["grpo", "rloo"], "algorithm={}"),
    (["experiment=mine,images", "data.train_batch_size=4"], "", ESTIMATOR, ["rloo", "grpo"], None),
    ([], "hydra: {sweeper: {params: {fusion: [serial, stream]}}}", POLICY, ["serial", "stream"], "fusion={}"),
    ([], "hydra: {sweeper: {params: {experiment: 'mine,images'}}}", ESTIMATOR, ["rloo", "grpo"], None),
    (["lengths=short,long"], "", "data.max_response_length", [16, 4096], None),
    ([], 'hydra: {sweeper: {params: {rollout.n: "2,4"}}}', N, [2, 4], "rollout.n={}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "more", "key", "values", "label"), SWEEPS, ids=[str(each[:2]) for each in SWEEPS])
def test_sweep_jobs_are_named_after_their_values(words, more, key, values, label, folder, monkeypatch, capsys):
    text = "fusion: {policy: adaptive, training: serial}\nalgorithm: {adv_estimator: gae}\nrollout: {n: 3}\n"
    (folder / "job.yaml").write_text(f"{text}data: {{max_response_length: 9}}\n{more}\n")
    jobs = []

    def run(job, trial, _):
        jobs.append((OmegaConf.select(job, key), trial.name, dict(trial.settings)))

    monkeypatch.setattr(application, "_run", run)
    argv = ["-m", "--config-dir", str(folder), str(folder / "job.yaml"), *(word.strip("'") for word in words)]
    assert application.main([*argv, f"trainer.default_local_dir={folder / 'runs'}"]) == 0
    assert [value for value, _, _ in jobs] == values
    assert len({name for _, name, _ in jobs}) == 2 and len({str(settings) for *_, settings in jobs}) == 2
    if label is not None:
        assert [name.partition("-")[2] for _, name, _ in jobs] == [label.format(value) for value in values]
