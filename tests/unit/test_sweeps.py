"""What runs of a sweep are called, and the table at its end. Whole sweeps are in test_compose.py."""

import io
import json

import pytest

from rlfuse.config.compose import read_command
from rlfuse.sweeps import LONGEST_NAME, Trial, sweep_name, tell, varied


def names(words, *jobs, params=None):
    several = varied(words, params or {})
    return [sweep_name("a", dict(zip(several, values, strict=True)), several) for values in jobs]


def test_names_say_what_varies_and_nothing_else():
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
    assert list(varied(["rollout.n=interval(1,9)", "experiment=glob(*)"], {})) == ["rollout.n", "experiment"]


def test_keys_with_the_same_group_and_leaf_are_told_apart():
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
    assert found == names([f"data.train_files={','.join(values)}"], *((value,) for value in values)), "at every start"


def test_many_keys_stay_below_what_a_folder_can_be_called():
    words = [f"rollout.engine_kwargs.option_{number}=1,2" for number in range(20)]
    found = names(words, ("1",) * 20, ("1",) * 19 + ("2",))
    assert len(set(found)) == 2 and max(map(len, found)) <= LONGEST_NAME


def test_the_table_has_the_best_first_and_survives_damage(tmp_path):
    trials = []
    for number, score in enumerate([0.25, 0.75, None]):
        folder = tmp_path / f"a-{number}"
        folder.mkdir()
        (folder / "config.yaml").write_text(
            "trainer: {nnodes: 1, n_gpus_per_node: 1}\nrollout: {tensor_model_parallel_size: 1}"
        )
        text = json.dumps({"val_after": score, "reward_first": 0, "reward_last": number, "seconds": 5.2})
        (folder / "summary.json").write_text(text if number != 2 else text[:9])
        trials.append(Trial(folder.name, {"rollout.n": str(number)}, folder, "finished"))
    trials.append(Trial("a-3", {}, tmp_path / "a-3", error="rollout 0 died"))
    out = io.StringIO()
    tell(trials, out)
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["1", "0", "2", "3"]
    assert lines[-2] == "job 3 failed: rollout 0 died"
    assert lines[-1].endswith(f"rlfuse report {tmp_path / 'a-1'} {tmp_path / 'a-0'} {tmp_path / 'a-2'}")


def test_a_sweep_over_lists_of_one_entry():
    swept = read_command(["data.train_files=a.jsonl,b.jsonl", "trainer.logger=console,[wandb]", "-m"]).overrides
    assert swept == ["data.train_files=[a.jsonl],[b.jsonl]", "trainer.logger=[console],[wandb]"]
    one, other = (read_command([f"data.val_files={text}"]).overrides for text in ("${x.y}", "${oc.env:HOME}/a.jsonl"))
    assert one == ["data.val_files=${x.y}"] and other == ["data.val_files=[${oc.env:HOME}/a.jsonl]"]
