"""Jobs submitted to a running Ray cluster: a head with dashboard and token authentication, on free ports."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlfuse.observe.tracking import read_metrics
from rlfuse.observe.wandb_log import history

REWARD = """\
from helpers.parity import is_even

def even(completions, **columns):
    return [sum(is_even(word) for word in text.split()) / 16 for text in completions]
"""
SHADOWS = ("deepspeed.py", "json.py", "ray.py", "torch.py", "vllm.py")
"""Modules named like installed ones that are inside a package."""
PARITY = "def is_even(word):\n    return word[1:].isdigit() and int(word[1:]) % 2 == 0\n"


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start a head with two slots on loopback; yield (address, token file)."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("a1b2c3d4" * 8)
    token.chmod(0o600)
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # socket paths have at most 107 characters
    port, dashboard, agent, agent_grpc, metrics, environment = free_ports(6)
    ray = Path(sys.executable).with_name("ray")
    command = [ray, "start", "--head", "--block", "--num-cpus=2", "--resources", '{"slot": 2}', f"--port={port}"]
    command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"]
    command += [f"--metrics-export-port={metrics}", f"--runtime-env-agent-port={environment}"]
    command += [f"--temp-dir={folder}", "--disable-usage-stats", "--object-store-memory=200000000"]
    log = (token.parent / "head.log").open("w")
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    settings = {"RAY_prestart_worker_first_driver": "0"}  # no prestart of a worker per core
    # Without this process's Ray settings: a head that kills its children does not see the exit status of jobs.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = plain | secret | settings
    head = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment)
    try:
        _wait_for(dashboard, head, Path(log.name))
        yield f"127.0.0.1:{dashboard}", token
    finally:
        os.killpg(head.pid, signal.SIGKILL)  # a graceful stop of the head takes half a minute
        head.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(port: int, head: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert head.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0 and "started" in log.read_text():
                return
        time.sleep(0.5)
    pytest.fail(f"the head did not start:\n{log.read_text()}")


@pytest.fixture(scope="module")
def job(tiny_model, tmp_path_factory):
    """Write a user's folder; return it and the arguments of a small job with relative paths."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "helpers").mkdir()
    (folder / "helpers" / "parity.py").write_text(PARITY)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"w{3 + i} w{50 + i} w{7 + i % 5}"} for i in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "algorithm": "grpo",
        "model.path": tiny_model,
        "model.dtype": "float32",
        "data.train_files": "[train.jsonl]",
        "data.max_prompt_length": 16,
        "data.max_response_length": 16,
        "data.train_batch_size": 1,
        "actor.ppo_mini_batch_size": 1,
        "rollout.n": 2,
        "rollout.name": "transformers",  # starts fastest
        "rollout.kv_cache_memory_mb": 32,
        "reward.functions": "[reward.py:even]",
        "trainer.total_training_steps": 1,
        "trainer.save_freq": 0,
        "trainer.timeline_freq": 0,
        "trainer.logger": "[console]",
        "cluster.device": "cpu",
        "cluster.timeout_s": 300,
    }
    return folder, [f"{key}={value}" for key, value in settings.items()]


@pytest.fixture(scope="module")
def submit(cluster, job):
    """Return a function that starts `rlfuse submit ...` in the user's folder."""
    address, token = cluster

    def start(*words):
        where = ["--address", address, "--token-file", str(token)]
        at = 1 if words[0] in ("status", "logs", "stop") else 0
        command = [sys.executable, "-m", "rlfuse.cli", "submit", *words[:at], *where, *words[at:]]
        return subprocess.Popen(
            command, cwd=job[0], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    return start


def finish(process, seconds=240):
    """Return (exit status, output); assert that nothing follows the final message."""
    out, _ = process.communicate(timeout=seconds)
    assert not re.search("Traceback|nanobind|Exception ignored|never retrieved|Unclosed", out), out
    return process.returncode, out


def submitted(line: str) -> str:
    return re.search(r"submitted (\S+)", line)[1]


def test_a_submitted_job_survives_its_terminal_until_it_is_stopped(submit, job, cluster, write_shadows):
    folder, words = job
    shadows = write_shadows(folder)
    included = [word for name in ("helpers", *SHADOWS) for word in ("--include", name)]
    settings = ["trainer.total_training_steps=10000", "trainer.experiment_name=far", "trainer.logger=[console,wandb]"]
    sender = submit(*included, *words, *settings)
    lines = []
    while not (lines and lines[-1].startswith("submitted ")):
        lines.append(sender.stdout.readline())
        assert lines[-1], "".join(lines)
    assert f"the job: {', '.join(sorted(['helpers/parity.py', 'job.yaml', 'reward.py', *SHADOWS]))}" in lines[0]
    os.killpg(sender.pid, signal.SIGKILL)
    sender.communicate()
    name = submitted(lines[-1])
    reader = submit("logs", name)
    bare = subprocess.run(
        [sys.executable, "-m", "rlfuse.cli", "submit", "status", "--address", cluster[0]],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert bare.returncode == 2 and "--token-file" in bare.stderr, "a client without the token is not refused"
    metrics, until = folder / "runs" / "rlfuse" / "far" / "metrics.jsonl", time.monotonic() + 240
    while time.monotonic() < until and not read_metrics(metrics):
        time.sleep(0.2)
    status, out = finish(submit("stop", name))
    assert status == 0 and f"{name} stopped" in out, out
    status, out = finish(reader)
    assert status != 0 and "SIGTERM: stopped after step" in out and f"{name} stopped" in out, out
    assert 0 <= read_metrics(metrics)[0]["critic/score/mean"] <= 1, (
        "the uploaded helper module was not used on the cluster"
    )
    logged = [row for path in metrics.parent.glob("wandb/offline-run-*/*.wandb") for row in history(path)]
    logged = [int(row["training/global_step"]) for row in logged if "critic/score/mean" in row]
    assert sorted(logged) == [row["step"] for row in read_metrics(metrics)], "the logs of wandb's process are missing"
    assert not shadows.exists(), shadows.read_text()
    status, out = finish(submit("status"))
    assert status == 0 and re.search(rf"{name}  stopped  [\d,]+ s  rlfuse/far", out), out
    status, out = finish(submit("stop", name))
    assert status == 0 and f"{name} has already ended: stopped" in out, out
    status, out = finish(submit("logs", "nobody-knows-me"))
    assert status == 2 and "check --address" in out


def test_errors_found_on_the_cluster_have_the_exit_status_of_train(submit, job):
    status, out = finish(submit(*job[1], "model.path=/absent/model", "trainer.experiment_name=wrong"))
    assert status == 2, out
    assert "model.path=/absent/model: the folder does not exist" in out and " failed" in out
