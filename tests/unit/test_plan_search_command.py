"""`rlfuse plan --search`: cluster files, refused input, and the job file of the best plan."""

from __future__ import annotations

import json
import re
from itertools import combinations

import pytest
import yaml
from test_plan import SEVEN_B
from test_plan_search import CLUSTER, read_of

from rlfuse.cli import main
from rlfuse.config.checks import value_of
from rlfuse.config.compose import compose_job, to_config
from rlfuse.config.documentation import keys
from rlfuse.config.facts import planning_facts
from rlfuse.fusion.policies import POLICIES
from rlfuse.tools.planning import search_command
from rlfuse.tools.planning.cluster_file import ClusterError, read_cluster
from rlfuse.tools.planning.node_order import MeasuredLinks, Pair, write_links
from rlfuse.tools.planning.search import TIMED_OUT, Neighbour
from rlfuse.tools.planning.step_time import Seconds
from rlfuse.tools.planning.tables import table_console

TOKEN = "${oc.env:SERVICE_TOKEN}"


def test_all_errors_of_a_cluster_file_are_reported_at_once(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: 0\ndevice_per_node: 8\npeak_tflops: x\ndevice_memory_gb: 80\n")
    with pytest.raises(ClusterError) as caught:
        read_cluster(path)
    message = str(caught.value)
    assert "nodes=0: needs a whole number of at least 1" in message and "did you mean devices_per_node?" in message
    assert "peak_tflops='x'" in message and message.count(str(path)) == len(message.splitlines())
    with pytest.raises(ClusterError, match="neither is given"):
        read_of({key: value for key, value in CLUSTER.items() if key != "peak_tflops"})
    with pytest.raises(ClusterError, match="No such file"):
        read_cluster(tmp_path / "none.yaml")


@pytest.fixture
def files(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SEVEN_B | {"num_hidden_layers": 4}))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER | {"device_memory_gb": 48, "peak_tflops": 300}))
    words = ["algorithm=grpo", f"model.path={tmp_path / 'model'}", "data.train_files=[nowhere.parquet]"]
    words += ["reward.functions=[rlfuse.rewards.verifiers.numeric:score]", "rollout.n=2", "data.train_batch_size=8"]
    words += ["actor.ppo_mini_batch_size=8"]
    return tmp_path, ["plan", "--search", "--cluster", str(tmp_path / "cluster.yaml"), *words]


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--search", "--seconds", "0.1"], []])
def test_search_needs_no_rewards_data_or_secrets(files, monkeypatch, capsys, options):
    folder, words = files
    monkeypatch.delenv("SERVICE_TOKEN", raising=False)
    functions = [{"path": "gone.py:f", "kwargs": {"key": TOKEN, "of": {"more": [TOKEN]}, "n": 3}}, "no_such.rewards:f"]
    given, out = folder / "job.yaml", folder / "best.yaml"
    given.write_text(yaml.safe_dump({"reward": {"functions": functions}}))
    words = [word for word in words[2:] if not word.startswith("reward.")]
    words += ["trainer.n_gpus_per_node=2", "actor.ppo_max_token_len_per_gpu=4096"]
    options = [*options, "--out", str(out)] if options else options
    assert main(["plan", *options, *words, str(given)]) == 0
    assert "required for the run: nowhere.parquet, gone.py, the package no_such" in capsys.readouterr().out
    if options:
        assert yaml.safe_load(out.read_text())["reward"]["functions"] == functions
    assert main(["plan", *options, *[word for word in words if not word.startswith("data.train_files")]]) == 0
    assert "not set, required for the run: data.train_files, reward.functions" in capsys.readouterr().out


@pytest.mark.slow
def test_plan_reads_memory_speed_and_links_from_a_cluster_file(files, capsys):
    folder, words = files
    plan = ["plan", *words[2:], "trainer.n_gpus_per_node=2", "actor.ppo_max_token_len_per_gpu=4096"]
    assert main(plan) == 0
    out = capsys.readouterr().out
    assert "GPU with 45.6 GiB" in out and "assumed: reward functions and Ray calls take no time" in out
    assert "a device achieves 120 TFLOP/s in scoring and training (peak_tflops=300 x utilization=0.4)" in out
    peak = ["--device-memory", "45.6", "--peak-tflops"]
    assert main(["plan", *plan[3:], *peak, "300"]) == 0
    assert "(peak_tflops=300 x utilization=0.4)" in capsys.readouterr().out, "--peak-tflops has the same meaning"
    assert main(["plan", *plan[3:], *peak, "-1"]) == 2 and "--peak-tflops: peak_tflops=-1" in capsys.readouterr().err
    assert main([*plan, "--peak-tflops", "125", "--device-memory", "80"]) == 2
    err = capsys.readouterr().err
    assert "--peak-tflops and --cluster: each gives the costs" in err and "both give the memory" in err
    assert main([*plan, "trainer.nnodes=4"]) == 2
    assert "trainer.nnodes=4: the cluster file has nodes=2; change one of the two" in capsys.readouterr().err
    assert main(["plan", "--cluster", str(folder / "none.yaml"), *words[4:]]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_job_file_has_placeholders_if_only_model_and_cluster_are_given(files, capsys):
    folder, words = files
    out = folder / "best.yaml"
    few = [word for word in words if not word.startswith(("data.train_files", "reward."))]
    assert main([*few, "--seconds", "0.5", "--out", str(out)]) == 0
    assert "replace the placeholders in it: data.train_files, reward.functions" in capsys.readouterr().out
    assert "# Placeholders to replace: data.train_files, reward.functions." in out.read_text()
    assert main(["plan", str(out), "--cluster", str(folder / "cluster.yaml")]) == 0
    assert "not set, required for the run: data.train_files, reward.functions" in capsys.readouterr().out


@pytest.mark.slow
def test_nodes_are_ordered_by_their_links(files, capsys):
    folder, words = files
    pairs = [Pair(a, b, 1.0 if {a, b} in ({"a", "b"}, {"c", "d"}) else 20.0, 20.0) for a, b in combinations("abcd", 2)]
    write_links(MeasuredLinks("gloo", tuple("abcd"), tuple(pairs)), folder / "links.yaml")
    cluster = yaml.safe_load((folder / "cluster.yaml").read_text()) | {"nodes": 4, "links": {"measured": "links.yaml"}}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    out = folder / "best.yaml"
    kept = ["--keep", "trainer.nnodes", "trainer.nnodes=4"]  # all nodes form one ring for gradients
    kept += ["--keep", "training.pipeline_parallel_size", "training.pipeline_parallel_size=1"]
    assert main([*words, *kept, "--seconds", "0.5", "--out", str(out)]) == 0
    assert "s of inter-node communication per step" in capsys.readouterr().out
    order = yaml.safe_load(out.read_text())["cluster"]["node_order"]
    assert sorted(order) == list("abcd")
    ring = [{one, next_one} for one, next_one in zip(order, [*order[1:], order[0]], strict=True)]
    assert {"a", "b"} not in ring and {"c", "d"} not in ring


@pytest.mark.slow
def test_plan_accepts_the_job_file_of_the_best_plan(files, capsys, monkeypatch):
    folder, words = files
    monkeypatch.setenv("COLUMNS", "100")
    out, picture = folder / "best.yaml", folder / "plans.png"
    assert main([*words, "--seconds", "0.5", "--out", str(out), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^simplest  (the best plan: |.*equal within the error\)$)", printed, re.M)
    assert "Neighbours of the best plan" in printed and picture.stat().st_size > 5000
    assert re.search(r"^ *\w+ \((the fastest|equal within the error)\) +[\d.]+ *$", printed, re.M)
    assert "(assumed; run `rlfuse calibrate` to measure them)" in printed and "data.train_files" not in printed
    assert main(["plan", str(out), "--device-memory", "48"]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kinds", "line"),
    [
        ((6.0, 1.0, 3.0), "generating takes 60% of the step, so shorter responses"),
        ((1.0, 2.0, 1.0), "scoring takes 50% of the step, so algorithm.old_log_probs=engine"),
        ((1.0, 2.0, 5.0), "training takes 62% of the step, so fewer or shorter samples"),
    ],
)
def test_longest_work_on_one_device_gives_the_recommendation(kinds, line):
    assert line in search_command.bottleneck_line(Seconds(*kinds))


def test_invalid_neighbours_are_only_counted_and_keys_are_not_truncated(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    key = "training.virtual_pipeline_model_parallel_size"
    neighbours = [Neighbour((key, 2), None, TIMED_OUT), Neighbour(("actor.zero_stage", 9), None, "must be 3 or less")]
    table_console().print(search_command._neighbours_table(None, neighbours, {}))
    printed = capsys.readouterr().out
    assert f"{key}=2" in printed and "zero_stage" not in printed
    assert "1 more changes are invalid or do not fit" in printed


@pytest.mark.slow
@pytest.mark.parametrize("batch, group, stages", [(8, 2, 1), (256, 4, 1), (32, 2, 2)])
def test_plan_predicts_the_step_time_of_the_search(files, capsys, monkeypatch, batch, group, stages):
    """Use few samples, so many that only a part is simulated, and a pipeline schedule."""
    folder, words = files
    monkeypatch.setenv("COLUMNS", "100")
    out, kept = folder / "best.yaml", "training.pipeline_parallel_size"
    more = [f"data.train_batch_size={batch}", f"rollout.n={group}", f"{kept}={stages}", "--keep", kept]
    more += ["--seconds", "1", "--out", str(out)]
    assert main([*[word for word in words if not word.startswith(("data.train_batch", "rollout.n"))], *more]) == 0
    shown = capsys.readouterr().out
    searched = dict(re.findall(r"^ *(\w+)(?: \([a-z ]+\))? +([\d.]+) *$", shown, re.M))
    plans = [line.split() for line in shown.splitlines() if re.match(r" *(= )?\dx\d", line)]
    assert main(["plan", str(out), "--cluster", str(folder / "cluster.yaml")]) == 0
    printed = capsys.readouterr().out
    of_job = to_config(compose_job([str(out)]), planning_facts).fusion.policy
    found = re.findall(r"^ *step(?: under (\w+) \([^)]*\))?(?:, [a-z ]+)? +([\d.]+) *$", printed, re.M)
    assert (
        len(found) == len(POLICIES) and {policy or of_job: step for policy, step in found}.items() <= searched.items()
    )
    assert plans[0][-2] == searched[of_job], "the first plan of the table is that of the job file"
    assert [float(plan[-2]) for plan in plans] == sorted(float(plan[-2]) for plan in plans)


@pytest.mark.slow
def test_ctrl_c_during_refinement_shows_the_plans(files, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(search_command, "refine", interrupted)
    _, words = files
    assert main([*words, "--seconds", "0.5"]) == 0 and "under each policy" in capsys.readouterr().out


@pytest.mark.slow
def test_if_nothing_fits_the_nearest_plan_is_shown(files, capsys):
    folder, words = files
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER | {"device_memory_gb": 4}))
    assert main(words) == 3
    assert "no plan fits" in (printed := capsys.readouterr().out) and "needs" in printed


@pytest.mark.slow
def test_keep_requires_a_searched_key(files, capsys):
    _, words = files
    assert main([*words, "--keep", "actor.zero_stag"]) == 2
    assert "did you mean" in (printed := capsys.readouterr().err) and "actor.zero_stage" in printed


@pytest.mark.slow
def test_job_file_changes_only_the_keys_of_the_plan(files, monkeypatch, capsys):
    folder, words = files
    monkeypatch.setenv("SERVICE_TOKEN", "not-for-files")
    job = {
        "algorithm": {"adv_estimator": "grpo"},
        "model": {"path": str(folder / "model")},
        "data": {"train_files": ["a b.parquet"], "train_batch_size": 8, "max_response_length": 64},
        "actor": {"ppo_mini_batch_size": "${data.train_batch_size}", "clip_ratio_c": None},
        "rollout": {"n": 2, "stop": ["\n\n", "yes", "a: b"], "engine_kwargs": {"seed": 3}},
        "reward": {"functions": [{"path": "rlfuse.rewards.verifiers.numeric:score", "kwargs": {"key": TOKEN}}]},
        "trainer": {"n_gpus_per_node": 3, "total_epochs": "${trainer.n_gpus_per_node}", "experiment_name": "e: #1"},
    }
    (given, out) = folder / "job.yaml", folder / "best.yaml"
    given.write_text(yaml.safe_dump(job))
    assert main([*words[:4], str(given), "--seconds", "0.1", "--out", str(out)]) == 0
    best = capsys.readouterr().out.partition("best  ")[2].partition("\n")[0]
    shown = {word.partition("=")[0] for word in best.split()}
    before, after = (to_config(compose_job([str(path)]), planning_facts) for path in (given, out))
    changes = {key.name for key in keys() if value_of(before, key.name) != value_of(after, key.name)}
    assert changes == shown >= {"trainer.n_gpus_per_node", "cluster.device"}
    assert after.trainer.total_epochs == 3 and "not-for-files" not in out.read_text()


@pytest.mark.parametrize(
    "more, message",
    [
        (["--out", "CLUSTER"], "would overwrite an input file"),
        (["--keep", "trainer.nnodes", "trainer.nnodes=3"], "trainer.nnodes=3: the cluster file has nodes=2"),
        (["--response-tokens", "inf"], "--response-tokens inf: needs a number above 0"),
        (["--response-tokens", "800"], "--response-tokens 800: exceeds data.max_response_length=512"),
        (["--seconds", "nan"], "--seconds nan: needs a number above 0"),
        (["trainer.task=reward_model"], "--search supports only trainer.task=rl"),
    ],
)
def test_invalid_searches_are_refused(files, capsys, more, message):
    folder, words = files
    assert main([*words, *(word.replace("CLUSTER", str(folder / "cluster.yaml")) for word in more)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_small_batch_uses_fewer_devices_than_the_cluster_has(files, capsys):
    _, words = files
    few = ["data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "rollout.n=2", "--seconds", "0.1"]
    kept = ["fusion.policy=serial", "--keep", "fusion.policy"]
    assert main([*words, *few, *kept]) == 0
    assert "1x2 " in (printed := capsys.readouterr().out) and "2x2 " not in printed
    assert "serial (the fastest)" in printed and "adaptive" not in printed
