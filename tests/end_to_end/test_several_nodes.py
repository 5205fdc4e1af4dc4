"""Jobs on two nodes of a Ray cluster, both on this machine: placement, weights, clips, and lost nodes."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from driven_job import settings_of
from intruder import reached
from job_processes import descendants, finish, wait_for_step
from leftovers import weights_left

from rlfuse.cli import main as rlfuse
from rlfuse.cluster import scratch
from rlfuse.events import read_events
from rlfuse.observe.tracking import read_metrics
from rlfuse.run_folder import status
from rlfuse.tasks.clips import SIGNS, WORDS, Clips, Kind, write_task
from rlfuse.tasks.small_video_models import SmallModel, byte_tokenizer, write_small_video_llama3
from rlfuse.tools.planning.node_order import read_links

EARLY = """
def early(data_source, solution_str, ground_truth, extra_info=None):
    return (ord(solution_str[0]) % 7) / 7 if solution_str else 0.0
"""
"""A reward that varies over random responses."""
STEPS = 3
ELSEWHERE = ["TrainerRank", "TransformersEngine", "WeightStaging"]
"""Actor classes on a slot's node without the driver."""
AUTHENTICATED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a1b2c3d4" * 8}
OF_A_LAUNCHER = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "PMI_RANK": "3",
    "SLURM_PROCID": "3",
    "WORLD_SIZE": "4",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
"""Variables set by mpirun, srun or torchrun; DeepSpeed fails on the first, torch on the last."""
NO_METRICS = {"RAY_enable_metrics_collection": "0", "AUTOSCALER_METRIC_PORT": "-1", "DASHBOARD_METRIC_PORT": "-1"}
"""As jobs/clusters.md recommends."""
OF_A_CLUSTER = NO_METRICS | {"RAY_prestart_worker_first_driver": "0"}
"""Disables Ray's prestart of a worker per core."""


@pytest.fixture(scope="module")
def cluster():
    """Yield (address, the raylets' processes, a function that adds a node and returns its raylet)."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    folder = tempfile.TemporaryDirectory(dir="/tmp")  # private, and short because of socket paths
    command = [sys.executable, Path(__file__).with_name("two_nodes.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = plain | OF_A_LAUNCHER | AUTHENTICATED | OF_A_CLUSTER | {"TMPDIR": folder.name}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    found = json.loads(process.stdout.readline())
    everyone = psutil.Process(process.pid).children(recursive=True)

    def add():
        process.stdin.write("one more\n")
        process.stdin.flush()
        return psutil.Process(int(process.stdout.readline()))

    yield found["address"], [psutil.Process(pid) for pid in found["raylets"]], add
    everyone += psutil.Process(process.pid).children(recursive=True)
    for each in (process, *everyone):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    folder.cleanup()


def command_line(process) -> str:
    """Return the command line, or an empty one if the process is ending."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def actor_classes(raylet):
    """Return the class names of the actors on a node."""
    lines = [command_line(child) for child in raylet.children(recursive=True)]
    names = [match[1] for line in lines if (match := re.match(r"ray::(\w+)", line))]
    return sorted(name for name in names if name not in ("IDLE", "DashboardAgent", "RuntimeEnvAgent"))


def embeddings(raylets):
    """Return the folders of the embedding caches on these nodes."""
    caches = [
        each for node in raylets for each in node.children(recursive=True) if "EmbeddingCache" in command_line(each)
    ]
    files = [Path(file.path) for each in caches for file in each.open_files()]
    return {file.parent for file in files if file.parent.name.startswith(scratch.EMBEDDINGS)}


def kill_node(raylet):
    """Kill a node with all its processes."""
    for each in (raylet, *raylet.children(recursive=True)):
        each.kill()


@pytest.fixture
def started():
    """Yield a function that starts a job and returns its process and run folder; kill the jobs afterwards."""
    processes = []

    def start(folder, name, settings):
        words = [f"{key}={value}" for key, value in (settings | {"trainer.experiment_name": name}).items()]
        command = [sys.executable, "-m", "rlfuse.train", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=os.environ | AUTHENTICATED, cwd=folder, **pipes))
        return processes[-1], folder / "runs" / "rlfuse" / name

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def slots_command(capsys):
    """Return a function that runs `rlfuse slots` and returns its output and exit status."""

    def command(run, *words):
        capsys.readouterr()
        status = rlfuse(["slots", *words, str(run)])
        return "".join(capsys.readouterr()), status

    return command


def on_two_nodes(folder, model, address):
    """Return the settings of a job for tests of lost nodes, with the backend that starts fastest."""
    return settings_of(folder, model) | {
        "cluster.ray_address": address,
        "cluster.max_restarts": 1,
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 500,
        "trainer.save_freq": 1,
        "trainer.logger": "[console]",
        "data.train_batch_size": 4,
        "actor.ppo_mini_batch_size": 4,
        "actor.zero_stage": 3,
        "rollout.update_weights_bucket_mb": 1,
        "data.max_response_length": 24,
        "rollout.name": "transformers",
    }


def write_images_as_bytes(folder):
    """Write an image task whose rows contain the image bytes."""
    folder.mkdir()
    file, _ = write_task(folder, Clips(train=8, val=2, kinds=(Kind.PLACE,)))
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        row["images"] = [{"bytes": (folder / each["image"]).read_bytes()} for each in row["images"]]
    pq.write_table(pa.Table.from_pylist(rows), file)


def with_clips(folder):
    """Return the settings of a job whose prompts have clips, images as bytes, or text only."""
    write_images_as_bytes(folder / "images")
    (folder / "text.jsonl").write_text("".join(json.dumps({"prompt": word, "answer": ""}) + "\n" for word in WORDS[:8]))
    write_task(folder, Clips(train=8, val=2, kinds=(Kind.ORDER, Kind.LOCATE), shortest_s=10, longest_s=30))
    small = SmallModel(heads=4, layers=2, tower_heads=2)
    (folder / "early.py").write_text(EARLY)
    model = write_small_video_llama3(folder / "model", small, byte_tokenizer([*WORDS, *SIGNS]))
    return settings_of(folder, model) | {
        "data.train_files": f"[{folder}/train.parquet,{folder}/images/train.parquet,{folder}/text.jsonl]",
        "data.max_prompt_length": 600,
        "data.max_response_length": 8,
        "data.train_batch_size": 8,
        "actor.ppo_mini_batch_size": 8,
        "fusion": "serial",
        "reward.functions": "[early:early]",
        "rollout.kv_cache_memory_mb": 64,
        "video.levels": "[4]",
        "video.sampling": "seed_vl",
        "video.max_tokens": 128,
        "video.cache_mb": 64,
    }


def test_slots_follow_cluster_node_order(cluster):
    command = [sys.executable, Path(__file__).with_name("ordered_nodes.py"), cluster[0]]
    done = subprocess.run(command, env=os.environ | AUTHENTICATED, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ordered"] == found["usual"][::-1]
    assert "cluster.node_order: no node is called 10.9.8.7; Ray nodes: " in found["absent"]
    holder = rf"0 of 2 slot, .* CPU, held by job \w{{8}} \(process {found['holder']} of [\d.]+: .*ordered_nodes"
    assert re.search(holder, found["busy"]), found["busy"]
    assert "Other jobs hold them: wait longer" in found["busy"] and "(cluster.timeout_s)" in found["busy"]
    assert "--resources" not in found["busy"]
    waited = r"Waited \d of at most 60 s for trainer.n_gpus_per_node=1 slots"
    assert re.search(waited, done.stderr) and re.search(holder, done.stderr), done.stderr
    assert "did not answer as a Ray head within 1 s" in found["silent"]


def test_links_between_the_nodes_are_measured(cluster, tmp_path):
    out = tmp_path / "links.yaml"
    command = [sys.executable, "-m", "rlfuse.cli", "calibrate", "--links", "--address", cluster[0], "--out", str(out)]
    done = subprocess.run(command, env=os.environ | AUTHENTICATED, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = read_links(out)
    assert found.over == "gloo" and len(found.nodes) == 2 and len(found.pairs) == 1
    assert 0.01 < found.pairs[0].gbs < 1000 and found.pairs[0].us < 1e6
    assert "fastest: " in done.stdout and "1 of 1 rounds" in done.stdout


def test_a_job_with_clips_has_the_same_curves_on_one_and_two_nodes(cluster, started, tmp_path, write_shadows):
    """One node: one slot in a private cluster. Two nodes: clips are encoded ahead, long rows are sharded over ranks.

    The second job is stopped by Ctrl-C, which also works in a cluster that the job did not start.
    """
    address, raylets, _ = cluster
    settings, seen, shadows = with_clips(tmp_path), {}, write_shadows(tmp_path)
    shared = {
        "training.ulysses_sequence_parallel_size": 2,
        "actor.ppo_max_token_len_per_gpu": 256,
        "video.encode_ahead": "true",
        "cluster.ray_address": address,
    }
    for nodes, steps, more in ((1, STEPS, {}), (2, 400, shared)):
        where = more | {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": 1, "trainer.total_training_steps": steps}
        process, run = started(tmp_path, f"on_{nodes}", settings | where)
        wait_for_step(run, 1, process)
        used = raylets if nodes == 2 else [psutil.Process(process.pid)]
        lives, folders = [actor_classes(each) for each in used], embeddings(used)
        assert len(folders) == nodes and all(folder.exists() for folder in folders)
        if steps > STEPS:
            processes = [*descendants(process), *raylets[0].parent().children(recursive=True)]
            found = reached([psutil.Process(process.pid), *processes], tmp_path)
            assert not found, "\n".join(found)
            wait_for_step(run, STEPS, process)
            process.send_signal(signal.SIGINT)
        finish(process, expected=130 if steps > STEPS else 0, timeout=300)
        assert not any(folder.exists() for folder in folders)
        seen[nodes] = [row for row in read_metrics(run / "metrics.jsonl") if row["step"]]
    assert not shadows.exists(), shadows.read_text()
    for kind in ("EmbeddingCache", "EncoderRank", "RolloutWorker", "TrainerRank"):
        assert all(names.count(kind) == 1 for names in lives), (kind, lives)
    assert any(row["actor/grad_norm"] > 0 for row in seen[1])
    assert len(seen[1]) == STEPS
    for one, two in zip(seen[1], seen[2], strict=False):
        curves = {name for name in one if name.startswith(("actor/", "critic/", "response_length/"))}
        assert len(curves) > 10
        for name in curves - {"actor/lr"}:
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
        assert two["training/rollout_probs_diff_max"] < 1e-4, "engines and ranks disagree on the clips"
        assert one["video/sequence_parallel_degree"] == 1 < two["video/sequence_parallel_degree"] < 2, (
            "the mean degree of a step's micro-batches"
        )
        assert two["video/cache_bytes"] >= 2 * one["video/cache_bytes"], "there is no copy on each node"
        assert two["video/encoded_over_unique_tokens"] == 1.0 and one["video/cache_received_bytes"] == 0
        assert two["video/cache_received_bytes"] >= one["video/cache_bytes"], "embeddings were not transferred once"
    assert (
        sum(row["video/encoded_ahead_tokens"] for row in seen[2])
        > 0
        == sum(row["video/encoded_ahead_tokens"] for row in seen[1])
    )


def wait_for_hand_over(run, process):
    """Wait until the run continues without the leaving node."""
    until = time.monotonic() + 240
    while not any(span.kind == "hand_over" for span in read_events(run / "events.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "the run did not continue"
        time.sleep(0.2)


def wait_for_restart(run, process):
    """Wait until the run has continued after a loss; return the first row of metrics that counts it."""
    until = time.monotonic() + 240
    while not (again := [row for row in read_metrics(run / "metrics.jsonl") if row.get("fault/restarts")]):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "the run did not continue"
        time.sleep(0.2)
    return again[0]


def assert_losses_are_reported(text):
    """Assert that the output reports the drained node, the lost node and the rank that ended the run."""
    assert text.count("on other nodes.") == 1, text
    assert "trainer/" in text and "died" in text and "resume" in text, text
    assert "No restart: 1 of at most cluster.max_restarts=1 restarts were made." in text
    assert re.search(r"lost node [\d.]+ \(\w{8}\), which ran rollout/1, trainer/1", text)
    assert re.search(r"The run resumes from global_step_\d+ \(restart 1 of at most 1\)", text)
    assert "Traceback" not in text


def test_a_job_survives_lost_nodes_and_ends_with_a_lost_rank(cluster, started, tiny_model, tmp_path, slots_command):
    """A node drained by command costs no step; another is lost without notice, which restarts the run."""
    address, raylets, add = cluster
    process, run = started(tmp_path, "two_nodes", on_two_nodes(tmp_path, tiny_model, address))
    wait_for_step(run, 2, process)
    here, there = (actor_classes(raylet) for raylet in raylets)
    assert there == ELSEWHERE and here == ["RewardWorker", *ELSEWHERE], "reward functions run on the driver's node"

    output, status = slots_command(run, "leave", "1")
    assert status == 2 and "the run needs 2 slots, 1 on each of 2 nodes" in output, output
    third = add()
    output, status = slots_command(run, "leave", "1")
    assert status == 0 and "which is saved, the run continues on" in output, output
    after = int(re.search(r"after step (\d+),", output)[1])
    wait_for_hand_over(run, process)
    wait_for_step(run, after + 1, process)
    steps = [span.step for span in read_events(run / "events.jsonl") if span.kind == "step"]
    assert len(set(steps)) == len(steps), "a step was repeated"
    assert actor_classes(third) == ELSEWHERE

    kill_node(third)
    successor = add()
    wait_for_step(run, wait_for_restart(run, process)["step"] + 1, process)
    assert actor_classes(successor) == ELSEWHERE
    victim = next(each for each in successor.children(recursive=True) if "TrainerRank" in command_line(each))
    victim.kill()
    assert_losses_are_reported(finish(process, expected=1, timeout=240))
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 1e-3, "engines of both nodes do not have the trainer's weights"
    assert not weights_left()
    until = time.monotonic() + 120
    while (left := actor_classes(raylets[0]) + actor_classes(successor)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == [], "the slots were not released"


def test_a_dead_head_ends_runs_with_a_message(cluster, started, tiny_model, tmp_path):
    """One run waits for slots, another has them. Without rlfuse, Ray would end both processes after 60 s."""
    address, raylets, _ = cluster
    command = [sys.executable, Path(__file__).with_name("ordered_nodes.py"), address, "hold"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen(command, env=os.environ | AUTHENTICATED, **pipes)
    try:
        assert holder.stdout.readline() == "held\n"
        process, run = started(tmp_path, "waiting", on_two_nodes(tmp_path, tiny_model, address))
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("Waited ") for line in lines)
        [head] = [each for each in raylets[0].parent().children() if each.name() == "gcs_server"]
        head.kill()
        text = finish(process, expected=1, timeout=240)
        lost = f"lost the head of the Ray cluster at {address}: it does not accept connections"
        assert lost in text and "Traceback" not in text and "Failed to connect to GCS" not in text, text
        assert f"Ray could not join the cluster at cluster.ray_address={address} (nothing accepts" in text, text
        assert status.read(run).state == "failed"
        assert holder.wait(240) == 0 and lost in holder.stdout.read()
    finally:
        holder.kill()
