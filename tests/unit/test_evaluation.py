"""Evaluation without engines: model selection, arguments, and resumed files."""

import json
import os
from dataclasses import replace

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from test_evaluation_scores import answered, prompts_of

from rlfuse.cli import main as rlfuse
from rlfuse.config.compose import compose_job
from rlfuse.config.documentation import keys
from rlfuse.errors import ConfigError
from rlfuse.files import read_rows, write_lock
from rlfuse.run_folder.response_store import FILE, StoredResponses
from rlfuse.samples import Reward, RewardFailure, make_groups
from rlfuse.tools.evaluation import scores
from rlfuse.tools.evaluation.arguments import made_from, read, run_config_of, split_checkpoint
from rlfuse.tools.evaluation.display import Display
from rlfuse.tools.evaluation.evaluate import REPORT_FILE, RESPONSES_FILE, folder_of, report_of
from rlfuse.tools.evaluation.responses import Responses
from rlfuse.tools.evaluation.source import Source, find

# Which model ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """Return a run folder with checkpoints of steps 2 and 4, and an incomplete one."""
    folder = tmp_path / "runs" / "rlfuse" / "sweep-actor.lr=1e-5"
    for step, whole in ((2, True), (4, True), (6, False)):
        weights = folder / f"global_step_{step}" / "actor" / "huggingface"
        weights.mkdir(parents=True)
        (weights / "config.json").write_text('{"max_position_embeddings": 64, "num_attention_heads": 2}')
        (weights / "tokenizer.json").write_text("{}")
        if whole:
            (weights.parents[1] / "run.json").write_text(json.dumps({"step": step}))
            (weights.parents[1] / "COMPLETE").touch()
    return folder


def test_a_checkpoint_can_be_given_by_its_folder_its_run_or_its_weights(run):
    newest = run / "global_step_4" / "actor" / "huggingface"
    for given in (run, run / "global_step_4", newest):
        assert find(str(given), None, "base") == Source(str(newest), 4, run)
    assert find(None, run, "base").step == 4 and find(None, None, "base") == Source("base")
    assert find(None, run / "nothing", "base") == Source("base")
    assert find("Qwen/Qwen2.5-0.5B", run, "base") == Source("Qwen/Qwen2.5-0.5B")
    assert (
        find("Qwen/Qwen2.5-0.5B", run, "base").name == "Qwen2.5-0.5B"
        and find(str(run), None, "").name == "global_step_4"
    )


def test_invalid_checkpoints_are_reported(run, tmp_path):
    cases = {
        run
        / "global_step_6": "the checkpoint is incomplete (no COMPLETE); complete ones: global_step_2, global_step_4",
        tmp_path / "nothing": "the folder does not exist",
        tmp_path: "neither config.json nor a complete global_step_N",
    }
    for given, message in cases.items():
        with pytest.raises(ConfigError) as error:
            find(str(given), None, "base")
        assert message in str(error.value)


def test_arguments_are_split_into_checkpoint_settings_and_job_file(run):
    words = ["my_job.yaml", "rollout.n=4", str(run), "experiment=quickstart"]
    assert split_checkpoint(words) == (str(run), [word for word in words if word != str(run)])
    assert split_checkpoint(["my_job.yaml"]) == (None, ["my_job.yaml"])
    with pytest.raises(ConfigError, match="only one CHECKPOINT is allowed"):
        split_checkpoint(["a/b", "c/d"])


@pytest.fixture
def job(run, tmp_path):
    """Return a job file whose training data, critic and reference model do not exist."""
    (tmp_path / "val.jsonl").write_text('{"prompt": "w5", "answer": "1"}\n')
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {{path: {run}/global_step_2/actor/huggingface}}\n"
        f"data: {{train_files: [gone.parquet], val_files: [{tmp_path}/val.jsonl], max_prompt_length: 8, "
        "max_response_length: 8}\n"
        "critic: {path: ./gone}\nref: {path: ./gone}\nreward: {functions: ['gone.py:score']}\n"
        f"trainer: {{default_local_dir: {tmp_path}/runs, experiment_name: {run.name}}}\n"
    )
    return path


@pytest.mark.slow
def test_keys_used_only_for_training_are_not_checked(job, run):
    config, source = read([str(job), "rollout.val_kwargs.temperature=1"], scored=False)
    assert source.step == 4 and config.model.path == source.path and config.rollout.val_kwargs.temperature == 1
    with pytest.raises(ConfigError) as error:
        read([str(job)])
    assert "gone.py" in str(error.value) and len(error.value.problems) == 1
    with pytest.raises(ConfigError, match=r"data.val_files=\[\]"):
        read([str(job), "data.val_files=[]"])
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length=80"):
        read([str(job), "data.max_prompt_length=80"], scored=False)


@pytest.mark.slow
@pytest.mark.parametrize("key", [key.name for key in keys() if key.custom and key.name != "model.video_family"])
def test_custom_functions_used_only_for_training_may_be_missing(job, key):
    value = "absent.py:f" if key != "trainer.metrics" else "[absent.py:f,other/absent.py:f]"
    with pytest.raises(ConfigError) as error:
        read([str(job), f"{key}={value}"])
    assert "gone.py" in str(error.value) and len(error.value.problems) == 1
    config, source = read([str(job), f"{key}={value}"], scored=False)
    assert config.model.path == source.path and made_from(config, source, scored=False)["step"] == 4


def test_engines_on_other_nodes_find_a_custom_video_family(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    config, _ = read([str(job), "model.video_family=mine.py:Mine"], scored=False)
    assert config.model.video_family == f"{tmp_path}/mine.py:Mine"


@pytest.mark.slow
def test_a_job_without_a_name_selects_its_last_run(job, run):
    job.write_text(job.read_text().replace(f", experiment_name: {run.name}", ""))
    assert read([str(job)], scored=False)[1].run is None
    plain = compose_job([str(job)])
    plain.trainer.experiment_name = run.name
    (run / "config.yaml").write_text(OmegaConf.to_yaml(plain))
    (run / "metrics.jsonl").write_text('{"step": 4}\n')
    assert read([str(job), "rollout.val_kwargs.temperature=1"], scored=False)[1].step == 4
    assert read([str(job), "data.seed=5"], scored=False)[1].run is None


def test_a_run_folder_provides_its_job(job, run):
    (run / "config.yaml").write_text(job.read_text())
    assert run_config_of(str(run / "global_step_2")) == [str(run / "config.yaml")]
    config, source = read([str(run / "global_step_2")], scored=False)
    assert source.step == 2 and config.trainer.experiment_name == run.name


@pytest.mark.slow
def test_invalid_arguments_are_reported_before_slow_imports(job, run, tmp_path, capsys):
    out = f"{tmp_path}/x.jsonl"
    cases = {
        ("eval", str(job), "./nothing"): "CHECKPOINT ./nothing: the folder does not exist",
        ("eval", str(job), "trainer.task=reward_model"): "use the job of a policy",
        ("eval", str(job), "~critic.path"): "keys can't be removed",
        ("eval", str(job), "~algorithm=ppo"): "write algorithm=ppo",
        ("eval", str(job), "~nobody.here/run"): "CHECKPOINT ~nobody.here/run: the folder does not exist",
        ("eval", "--config-dir", "~nobody.here", str(job)): "--config-dir ~nobody.here: the folder does not exist",
        ("generate", str(job), "--out", f"{tmp_path}/x.csv"): "it must be a file name that ends in .jsonl",
        ("generate", str(job), "--out", out, "--prompts", "gone.jsonl", "data.seed=2"): "`gone.jsonl` does not exist",
    }
    for words, message in cases.items():
        assert rlfuse(list(words)) == 2
        text = capsys.readouterr().err
        assert message in text and "Traceback" not in text and "data.seed=2" not in text, text
        assert text.count("gone.jsonl") < 2, "the problem is reported once"


# Files ---------------------------------------------------------------------------------------------------------------


def test_an_interrupted_file_is_resumed(tmp_path):
    settings = {"model": "a", "temperature": 0.0, "files": ("val.jsonl",)}
    groups = make_groups(prompts_of("sums", "words"), 2, 0, 3)
    responses = Responses(tmp_path / "out" / "responses.jsonl", scored=True, draft_bytes=1 << 20)
    assert responses.begin(settings, groups) == groups
    rewards = [Reward(1 / 3, {"f/acc": 0.1}, "a note"), RewardFailure("f", "timed: out"), None, None]
    answered(groups, rewards)
    groups[1].samples[1].response = None
    assert [sample.id for sample in responses.write()] == ["3/0/0", "3/0/1"] and responses.write() == []
    responses.close()
    stored = StoredResponses(responses.path.with_name(FILE))
    assert stored.count == 2 and stored.find(groups[0].samples[1].draft_key).step == 3
    with responses.path.open("a") as file:
        file.write('{"id": "3/1/0", "resp')

    again = make_groups(prompts_of("sums", "words"), 2, 0, 3)
    responses = Responses(responses.path, scored=True)
    with pytest.warns(match="skipping the last row"):
        left = responses.begin(settings, again)
    assert [sample.id for group in left for sample in group.samples] == ["3/1/0", "3/1/1"]
    restored = again[0].samples
    assert restored[0].reward == Reward(1 / 3, {"f/acc": 0.1}, "a note") and len(restored[0].response.token_ids) == 1
    assert restored[1].reward == RewardFailure("f", "timed: out")
    answered(left, [Reward(1.0), Reward(0.0)])
    responses.close()
    assert [row["id"] for row in read_rows(responses.path)] == ["3/0/0", "3/0/1", "3/1/0", "3/1/1"]


def test_a_file_of_another_model_is_rejected(tmp_path):
    path, groups = tmp_path / "responses.jsonl", make_groups(prompts_of("sums"), 1, 0, 0)
    responses = Responses(path, scored=False)
    responses.begin({"model": "a", "temperature": 0.0}, groups)
    responses.close()
    with pytest.raises(ConfigError, match=r"model \(was a, is b\). Choose another file"):
        Responses(path, scored=False).begin({"model": "b", "temperature": 0.0}, groups)
    answered(groups, [None])
    responses = Responses(path, scored=False)
    responses.begin({"model": "a", "temperature": 0.0}, groups)
    responses.close()
    other = make_groups([replace(groups[0].prompt, text="how few?")], 1, 0, 0)
    with pytest.raises(ConfigError, match="response 0/0/0 belongs to another prompt"):
        Responses(path, scored=False).begin({"model": "a", "temperature": 0.0}, other)
    (tmp_path / "responses.jsonl.made_from.json").unlink()
    with pytest.raises(ConfigError, match="is missing or can't be read"):
        Responses(path, scored=False).begin({"model": "a", "temperature": 0.0}, groups)


@pytest.mark.slow
def test_evaluations_are_not_overwritten_and_interrupted_ones_are_resumed(job, run, tmp_path):
    config, source = read([str(job)], scored=False)
    settings = made_from(config, source, scored=True)
    first = run / "eval" / "global_step_4"
    assert folder_of(source, config, settings) == first
    responses = Responses(first / RESPONSES_FILE, scored=True)
    responses.begin(settings, make_groups(prompts_of("sums"), 1, 0, 4))
    responses.close()
    assert folder_of(source, config, settings) == first
    assert folder_of(source, config, settings | {"temperature": 1.0}) == run / "eval" / "global_step_4-2"
    (family := tmp_path / "mine.py").write_text("class Mine: ...\n")
    others = ("reward.overlong_buffer.len=4", "video.max_tokens=4096", "model.dtype=float32")
    for setting in (*others, f"model.video_family={family}:Mine"):
        other, _ = read([str(job), setting], scored=False)
        assert len(responses.differs(made_from(other, source, scored=True))) == 1, setting
    (first / REPORT_FILE).write_text("{}")
    assert folder_of(source, config, settings) == run / "eval" / "global_step_4-2"
    assert folder_of(Source("org/name"), config, settings) == run.parent / "eval" / "name"


@pytest.mark.slow
def test_locked_files_are_rejected_or_avoided(job, run, tmp_path, capsys):
    reward = "reward.functions=[rlfuse.rewards.verifiers.exact:score]"
    places = {
        tmp_path / "x.jsonl": ["generate", str(job), "--out", f"{tmp_path}/x.jsonl"],
        tmp_path / "eval" / RESPONSES_FILE: ["eval", str(job), reward, "--out", f"{tmp_path}/eval"],
    }
    for path, words in places.items():
        with write_lock(path):
            assert rlfuse(words) == 2
        assert capsys.readouterr().err.startswith(f"{path}: process {os.getpid()} on ")
        assert not path.exists()
    config, source = read([str(job)], scored=False)
    with write_lock(run / "eval" / "global_step_4" / RESPONSES_FILE):
        assert folder_of(source, config, {}) == run / "eval" / "global_step_4-2"


def test_a_report_is_valid_json_with_its_settings(job):
    config, source = read([str(job)], scored=False)
    groups = answered(make_groups(prompts_of("sums"), 2, 0, 4), [Reward(1.0), RewardFailure("f", "gone")])
    report = report_of(config, source, groups, scores.statistics_by_source(groups, 0.5), 0.5, 1.0)
    again = json.loads(json.dumps(report), parse_constant=lambda name: pytest.fail(name))
    assert again["made_from"]["model"] == source.path and again["passed"] == "reward above 0.5"
    assert again["metrics"]["val-core/sums/reward/mean@2"] == 1.0
    assert again["by_data_source"]["sums"]["pass@k"] == {"1": 1.0}


def test_progress_without_a_terminal_is_printed_as_occasional_lines(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rlfuse.tools.evaluation.display.time.monotonic", lambda: now[0])
    console = Console(record=True, width=80, force_terminal=False)
    display = Display(console)
    with display.part("engine 1 of 1"):
        now[0] += 12
    with display.generating(10, 2):
        for _ in range(4):
            now[0] += 20
            display.add(1, 100)
    now[0] += 1000
    assert display.speed == 5, "time without running requests is not counted"
    lines = console.export_text().splitlines()
    assert lines == ["✓ engine 1 of 1  12.0 s", "4 of 10 responses, 5 tokens/s", "6 of 10 responses, 5 tokens/s"]
