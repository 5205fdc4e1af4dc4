"""Start, wait for and inspect whole jobs in separate processes."""

import os
import signal
import subprocess
import time
from contextlib import suppress

import psutil

from rlfuse.observe.tracking import read_metrics

REWARD = '''
import re

def even(data_source, solution_str, ground_truth, extra_info=None, api_key="", judge=""):
    """Return the share of words with an even number; the keys have to be passed."""
    assert (api_key, judge) in (("", ""), ("marked-secret-1", "marked-secret-2"))
    words = re.findall("w([0-9]+)", solution_str)
    return {"score": sum(int(word) % 2 == 0 for word in words) / max(1, len(words)), "words": len(words)}

def half_flat(data_source, solution_str, ground_truth, extra_info=None):
    """As `even`, but equal for all responses to every second prompt; some responses can't be scored."""
    words = re.findall("w([0-9]+)", solution_str)
    if len(words) % 8 == 1:
        raise RuntimeError("unlucky")
    return 0.5 if int(ground_truth) % 2 else sum(int(word) % 2 == 0 for word in words) / max(1, len(words))
'''
ENVIRONMENT = {"WANDB_MODE": "offline", "JUDGE_TOKEN": "marked-secret-2"}
SECRETS = "kwargs: {api_key: marked-secret-1, judge: ${oc.env:JUDGE_TOKEN}}"


def start(command, name, *more, cwd=None, **variables):
    return subprocess.Popen(
        [*command, f"trainer.experiment_name={name}", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | ENVIRONMENT | variables,
        cwd=cwd,
        start_new_session=True,
    )


def finish(process, expected, timeout=400):
    text, _ = process.communicate(timeout=timeout)
    assert process.returncode == expected, text
    return text


def wait_for(condition, what, process, timeout=300):
    deadline = time.time() + timeout
    while time.time() < deadline:
        assert process.poll() is None, process.communicate()[0]
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError(f"waiting for {what} timed out after {timeout} s")


def wait_for_step(folder, step, process):
    wait_for(
        lambda: any(row["step"] >= step for row in read_metrics(folder / "metrics.jsonl")), f"step {step}", process
    )


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


def listening_on_the_network(processes):
    """Return (address, process) of every socket that listens on a network interface."""
    return [
        (each.laddr, " ".join(process.cmdline()))
        for process in map(lambda each: psutil.Process(each.pid), processes)
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN and each.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    ]


def hang_up(process, workers):
    """Send SIGHUP to all workers in the job's process group, as a closed terminal does; return their number."""
    count = 0
    for each in workers:
        with suppress(ProcessLookupError):
            if os.getpgid(each.pid) == process.pid:
                os.kill(each.pid, signal.SIGHUP)
                count += 1
    return count


def all_gone(processes, timeout=120):
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
