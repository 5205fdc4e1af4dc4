"""Health agents on this machine: samples of real processes, overhead, and detection of a repeatedly stopped process.

GPUs: NVML calls match the signatures of the package."""

import ast
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from rlfuse.cluster import watchdog
from rlfuse.cluster.nodes import Node
from rlfuse.cluster.placement import Slots
from rlfuse.cluster.watchdog import Registered, registered
from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.events import Recorder, Span
from rlfuse.health import agent, sampling
from rlfuse.health.agent import Agent, AgentHandle
from rlfuse.health.monitor import Monitor
from rlfuse.health.sampling import PROBE_S, Sampler, node_counters, process_trees, round_trip
from rlfuse.run.job import start_health_monitor

LOOP = "import time\nprint('up', flush=True)\nwhile True: sum(range(50_000)), time.sleep(0.01)"
SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(60)"
PARENT = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {LOOP!r}]).wait()"
WORKER = """import sys, time
with open(sys.argv[1], "a", buffering=1) as spans:
    while True:
        began = time.time()
        time.sleep(0.02)
        spans.write(f"{began} {time.time()}\\n")
"""


@contextmanager
def running(script, *arguments):
    with subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            if "print" in script:
                process.stdout.readline()
            yield process
        finally:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()


@pytest.mark.slow
def test_sampler_measures_process_trees():
    with running(PARENT) as parent, running(SLEEPER) as sleeper:
        workers = [Registered("rollout/0", parent.pid, ""), Registered("trainer/0", sleeper.pid, "")]
        assert list(map(len, process_trees(workers).values())) == [2, 1]
        both = [Registered("rollout/0", os.getpid(), ""), *workers[1:]]
        assert sleeper.pid not in process_trees(both)[both[0]], "a registered child has its own tree"
        sampler = Sampler("node/a", workers=lambda: workers)
        sampler.sample()
        time.sleep(1.0)
        samples = {sample.worker: sample for sample in sampler.sample()}
        assert samples["rollout/0"].amounts["cpu"] > 0.01 > samples["trainer/0"].amounts["cpu"]
        assert samples["rollout/0"].seconds > 0.9 and samples["rollout/0"].amounts["memory_gb"] > 0.005
        assert samples["rollout/0"].amounts.keys() >= {"cpu", "page_faults", "core_wait", "disk_mb"}
        assert samples["node/a"].amounts.keys() >= {"retransmits"}
    assert "node/a" in {sample.worker for sample in sampler.sample()}, "sampling stopped when the workers ended"


def test_registered_processes_on_this_host_are_found(tmp_path, monkeypatch):
    assert registered() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with watchdog.watching(tmp_path, Recorder("driver"), print):
        assert registered() == [Registered("driver", os.getpid(), "3")]


def test_round_trip_to_an_unreachable_node_times_out():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlfuse.health.sampling.PROBE_S", 0.1)
        began = time.monotonic()
        assert round_trip("192.0.2.1", 9) == 0.1 and time.monotonic() - began < 20, "an unassigned address"
    assert PROBE_S < agent.PERIOD_S


async def drained(handle, enough):
    """Return the samples and the failure once `enough` accepts them; fail after 30 s."""
    collected, until = [], time.monotonic() + 30
    while time.monotonic() < until:
        samples, failure = await handle.drain()
        collected += samples
        if enough(collected, failure):
            return collected, failure
        time.sleep(0.05)
    raise AssertionError(f"received only {collected}")


@pytest.mark.slow
async def test_agent_samples_periodically_and_reports_failures(monkeypatch):
    monkeypatch.setattr(agent, "PERIOD_S", 0.05)
    workers = [Registered("rollout/0", os.getpid(), "")]
    handle = AgentHandle("node/a", Agent("node/a", sampler=Sampler("node/a", workers=lambda: workers)), remote=False)
    samples, failure = await drained(handle, lambda samples, _: len({sample.worker for sample in samples}) == 2)
    assert not failure and {sample.worker for sample in samples} == {"rollout/0", "node/a"}
    monkeypatch.setattr(Sampler, "sample", lambda _: 1 / 0)
    _, failure = await drained(handle, lambda _, failure: failure)
    assert failure == "ZeroDivisionError: division by zero"
    handle.close()
    assert not handle._agent._thread.is_alive()


@pytest.mark.slow
async def test_one_agent_per_machine_unless_slow_worker_s_is_null(tmp_path, monkeypatch):
    here, other = Node("a", "127.0.0.1", 1, {}), Node("b", "127.0.0.1", 2, {})
    monkeypatch.setattr(agent, "this_node_id", lambda: "a")
    monkeypatch.setattr(agent, "PERIOD_S", 0.05)
    slots, log = Slots(None, 2, "cpu", nodes=(here, other)), SimpleNamespace(folder=tmp_path, say=print)
    log.loggers = SimpleNamespace(alert=print)
    with closing(start_health_monitor(Config(), slots, log)) as monitor:
        (only,) = monitor.agents
        samples, _ = await drained(only, lambda samples, _: samples)
        assert only.node == "node/127.0.0.1" and samples[0].worker == only.node
        assert [await monitor.check_step(step, [], Costs()) for step in (1,)] == [{}], "warm-up"
        assert (await monitor.check_step(2, [], Costs()))["health/alarms"] == 0
    config = Config()
    config.alerts.slow_worker_s = None
    assert await start_health_monitor(config, slots, log).check_step(1, [], Costs()) == {}


@pytest.mark.slow
def test_agent_uses_less_than_one_percent_of_a_core():
    workers = [Registered(f"worker/{i}", pid, "") for i, pid in enumerate(psutil.pids()[-12:])]
    sampler = Sampler("node/a", workers=lambda: workers)
    sampler.sample()
    began, repeats = time.thread_time(), 20
    for _ in range(repeats):
        sampler.sample()
    each = (time.thread_time() - began) / repeats
    print(f"{1e3 * each:.2f} ms of CPU per sample of {sum(map(len, sampler._process_trees.values()))} processes")
    assert each < 0.01 * agent.PERIOD_S or agent.SHARE <= 0.01, "otherwise it samples less often"


@pytest.mark.slow
async def test_repeatedly_stopped_process_is_reported(tmp_path):
    """Stop one of three real workers for two thirds of the time, from the tenth second on.

    Runs in real time, so it fails if other programs starve another worker for as long.
    """
    alerts, read = [], [0, 0, 0]
    with ExitStack() as stack:
        workers = [stack.enter_context(running(WORKER, str(tmp_path / str(i)))) for i in range(3)]
        known = [Registered(f"rollout/{i}", worker.pid, "") for i, worker in enumerate(workers)]
        handle = AgentHandle("node/a", Agent("node/a", sampler=Sampler("node/a", workers=lambda: known)), remote=False)
        monitor = Monitor(tmp_path, [handle], 6.0, 1, lambda step, alert: alerts.append((step, alert)), print)
        stack.callback(monitor.close)
        for step in range(1, 36):
            until = time.monotonic() + 1.0
            while (left := until - time.monotonic()) > 0:
                if step > 10:
                    workers[1].send_signal(signal.SIGSTOP)
                    time.sleep(0.08)
                    workers[1].send_signal(signal.SIGCONT)
                time.sleep(min(left, 0.04))
            values = await monitor.check_step(step, new_spans(tmp_path, read), Costs())
            if alerts:
                break
    (step, alert), *rest = alerts
    assert alert.title == "slow worker: rollout/1" and step > 12 and not rest
    assert values["health/slowness/rollout/max"] > 1 and values["health/agents"] == 1


def new_spans(folder, read):
    """Return the spans of the workers since the last call; `read`: characters read so far."""
    work = {"steps": 1, "batch": 1, "context": 1, "prefill_tokens": 0}
    spans = []
    for i in range(len(read)):
        text = (folder / str(i)).read_text()[read[i] :] if (folder / str(i)).exists() else ""
        complete = text[: text.rfind("\n") + 1]
        read[i] += len(complete)
        times = (map(float, line.split()) for line in complete.splitlines())
        spans += [Span("decode", f"rollout/{i}", start, end, tokens=1, attributes=work) for start, end in times]
    return spans


# GPUs -----------------------------------------------------------------------------------------------------------------


def nvml():
    """Return pynvml, or vLLM's copy of it, without importing the rest of vLLM."""
    if importlib.util.find_spec("pynvml"):
        return importlib.import_module("pynvml")
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    spec = importlib.util.spec_from_file_location("nvml", Path(folder) / "third_party" / "pynvml.py")
    module = sys.modules["nvml"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_containers_without_disk_counters_are_sampled(monkeypatch):
    none = NotImplementedError("neither /proc/diskstats nor /sys/block")
    monkeypatch.setattr(psutil, "disk_io_counters", Mock(side_effect=none))
    assert not {"disk_s", "disk_operations"} & node_counters().keys()


def test_nvml_calls_match_its_signatures():
    module, tree, called = nvml(), ast.parse(inspect.getsource(sampling)), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.lower().startswith("nvml"):
            assert hasattr(module, node.attr), node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("nvml"):
            inspect.signature(getattr(module, node.func.attr)).bind(*node.args)
            called.append(node.func.attr)
    assert len(called) == 6 and "nvmlInit" in called
    assert "gpu" in dict(module.c_nvmlUtilization_t._fields_) and issubclass(module.NVMLError, Exception)


def test_no_gpus_without_a_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert sampling.open_gpus() is None, "no package"
    if not Path("/dev/nvidiactl").exists():
        monkeypatch.setitem(sys.modules, "pynvml", nvml())
        assert sampling.open_gpus() is None, "no driver"
