"""Kill processes of every kind of a run at random moments, and compare the run with an undisturbed one.

    python tests/benchmarks/chaos.py [--seed 1] [--times 2] [--jobs quickstart video] [--steps 60 20] [--folder chaos]

The quickstart runs on two nodes of a Ray cluster on this machine, the video job on two slots of one node. The same
command restarts a killed driver, and another node replaces a killed one. In some restarts, chosen by the seed, another
process is killed before the restart has completed. An undisturbed run in `--folder` is reused. Under `fusion=serial` in
float32, the final weights must be bitwise equal, and each sample of every step must occur exactly once. Afterwards no
process, file in the run folder, shared memory, temporary file or lock may remain. Prints the seed, every kill and the
differences; exits with status 1 if there is one. `tests/end_to_end/test_faults.py` compares a short run with faults at
fixed moments in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from safetensors.numpy import load_file

from rlfuse.cluster import scratch
from rlfuse.observe.tracking import read_metrics
from rlfuse.run_folder import status
from rlfuse.tools import leftovers

END_TO_END = Path(__file__).resolve().parents[1] / "end_to_end"
TITLES = {
    "engine": "ray::RolloutWorker",
    "rank": "ray::TrainerRank",
    "reward worker": "ray::RewardWorker",
    "encoder rank": "ray::EncoderRank",
}
"""Kind -> prefix of the titles of its processes; a decode worker is a child of an encoder rank."""
OF_RAY = re.compile("dashboard|runtime_?env|ray::IDLE", re.IGNORECASE)
"""Titles of processes that belong to a Ray node instead of a run, or stay for a minute."""
RESTARTING = ("rank", "node", "driver")
"""Kinds whose loss restarts the run; others are replaced while it continues."""
STARTING_S = 30.0
"""Maximum time after such a kill at which the restart is struck, too."""
EXACT = {"fusion": "serial", "model.dtype": "float32", "trainer.deterministic": "true"}
"""Settings under which the final weights do not depend on time."""
LOGGED = {
    "trainer.save_freq": 1,
    "trainer.max_ckpt_to_keep": 2,
    "trainer.log_samples": 100_000,
    "trainer.logger": "[console]",
    "cluster.max_restarts": 100,
}
STEP_S, END_S = 900.0, 60.0
"""Limits for a step including restarts, and for processes to end."""


@dataclass(frozen=True)
class Strike:
    """Kills a process of this kind `delay_s` after this step or a later one; None: after the previous strike."""

    kind: str
    step: int | None
    delay_s: float


def plan(kinds: Sequence[str], times: int, steps: int, seed: int, longest_s: float) -> list[Strike]:
    """Return the strikes of a run: `times` of each kind, each after another step, and more of them in restarts."""
    chance = random.Random(seed)
    order = [kind for kind in kinds for _ in range(times)]
    chance.shuffle(order)
    after = sorted(chance.sample(range(1, 3 * steps // 4), len(order)))
    strikes = []
    for kind, step in zip(order, after, strict=True):
        strikes.append(Strike(kind, step, chance.uniform(0, longest_s)))
        if kind in RESTARTING and chance.random() < 0.5:
            strikes.append(Strike(chance.choice(kinds), None, chance.uniform(0, STARTING_S)))
    return strikes


@dataclass
class Chaos:
    """A run by `command` in `folder`, whose processes descend from its driver and `others`."""

    command: list[str]
    folder: Path
    others: Sequence[psutil.Process] = ()
    replace_node: Callable[[], None] = lambda: None
    environment: dict[str, str] = field(default_factory=dict)
    kills: list[str] = field(default_factory=list)
    seen: set[psutil.Process] = field(default_factory=set)
    files: set[Path] = field(default_factory=set)
    _before: set[psutil.Process] = field(default_factory=set)
    """Live workers when the last process was killed."""
    _driver: subprocess.Popen | None = None

    def run(self, strikes: Sequence[Strike]) -> None:
        """Start the run, carry out all strikes and wait for its end. Raises RuntimeError if it fails or is too slow."""
        reached = 0
        self._start()
        for strike in strikes:
            if strike.step is not None:
                self._wait(lambda: self._done() >= max(strike.step, reached + 1), f"step {strike.step}")  # noqa: B023
            time.sleep(strike.delay_s)
            self._kill(strike)
            reached = self._done()
        self._wait(lambda: self._driver.poll() is not None, "its end")
        if self._driver.returncode != 0:
            raise RuntimeError(f"the run failed; see {self._log}")

    @property
    def _log(self) -> Path:
        return self.folder.with_suffix(".log")

    def _start(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            self._driver = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=os.environ | self.environment, start_new_session=True
            )

    def _done(self) -> int:
        """Return the last completed step; 0 if there is none."""
        return max((row["step"] for row in read_metrics(self.folder / "metrics.jsonl")), default=0)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + STEP_S
        while not condition():
            ended = self._driver.poll() is not None
            if time.monotonic() > until or (ended and not condition()):
                raise RuntimeError(f"the run has not reached {what}; see {self._log}")
            self._living()
            time.sleep(0.2)

    def _kill(self, strike: Strike) -> None:
        """Kill a process; in a restart, one that was started by it."""
        old = self._before if strike.step is None else set()
        found: list[psutil.Process] = []

        def find() -> bool:
            found[:] = [each for each in self._processes(strike.kind) if each not in old]
            return bool(found)

        self._wait(find, f"a moment with a {strike.kind}")
        self._before = {each for each in self._living() if each.pid != self._driver.pid} - {*self.others}
        victim = random.Random(strike.delay_s).choice(sorted(found, key=lambda each: each.pid))
        with suppress(psutil.NoSuchProcess):
            victim.kill()
        when = " in a restart" if strike.step is None else ""
        self.kills.append(f"{strike.kind} (process {victim.pid}), after step {self._done()}{when}")
        print(f"killed {self.kills[-1]}", flush=True)
        if strike.kind == "node":
            self.replace_node()
        if strike.kind == "driver":
            self._driver.wait(END_S)
            self._start()

    def _processes(self, kind: str) -> list[psutil.Process]:
        """Return the live processes of a kind."""
        living = self._living()
        if kind == "driver":
            return [psutil.Process(self._driver.pid)]
        if kind == "node":
            return [each for each in self.others[1:] if _title(each)][-1:]
        if kind == "decode worker":
            ranks = [each for each in living if _title(each).startswith(TITLES["encoder rank"])]
            return [each for rank in ranks for each in _children(rank) if "spawn_main" in _title(each)]
        return [each for each in living if _title(each).startswith(TITLES[kind])]

    def _living(self) -> list[psutil.Process]:
        """Return all live processes; record them, their semaphores, and their folders of temporary files and memory."""
        roots = [psutil.Process(self._driver.pid)] if self._driver.poll() is None else []
        living = [each for root in (*roots, *self.others) for each in (root, *_children(root))]
        mine = [each for each in living if each not in self.others and not OF_RAY.search(_title(each))]
        self.seen |= set(mine)
        self.files |= scratch.held_by(mine)
        for each in mine:
            with suppress(psutil.Error):
                opened = (Path(file.path) for file in each.open_files())
                self.files |= {path.parent for path in opened if path.name == "lock" and "rlfuse-" in path.parent.name}
        return living

    def left(self) -> list[str]:
        """Return what the run has left: processes, files outside its folder, and leftovers of a crash inside."""
        _, alive = psutil.wait_procs(self.seen, timeout=END_S)
        living = [title for each in alive if (title := _title(each)) and not OF_RAY.search(title)]
        files = [
            *(path for path in self.files if path.exists()),
            # Every run of a video model keeps text_parts.
            *(each.path for each in leftovers.leftovers_of_run(self.folder) if each.path.name != "text_parts"),
        ]
        return living + [str(path) for path in files]


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _title(process: psutil.Process) -> str:
    """Return the command line, or an empty one if the process has ended or is a zombie."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def differences(expected: Path, found: Path) -> list[str]:
    """Return how the weights after the last step, and the samples of all steps, of two runs differ."""
    lines = []
    last = max((int(path.name.rpartition("_")[2]) for path in expected.glob("global_step_*[0-9]")), default=0)
    files = sorted(
        path.relative_to(expected) for path in expected.glob(f"global_step_{last}/*/huggingface/*.safetensors")
    )
    if not files:
        lines.append(f"{expected} has no weights")
    for file in files:
        want, have = load_file(expected / file), load_file(found / file)
        for name in want:
            if want[name].tobytes() != have[name].tobytes():
                far = np.abs(want[name].astype(np.float64) - have[name].astype(np.float64)).max()
                lines.append(f"{file.parts[1]}: {name} differs by at most {far:.3g}")
    rows = [[json.loads(line) for line in (run / "samples.jsonl").open()] for run in (expected, found)]
    want, have = (Counter((row["step"], row["id"]) for row in some) for some in rows)
    lines += [
        f"sample {id} of step {step} occurs {have[step, id]} times" for step, id in want | have if have[step, id] != 1
    ]
    text = [{(row["step"], row["id"]): row["response"] for row in some} for some in rows]
    other = sorted(key for key in text[0] if text[1].get(key) != text[0][key])
    return lines + ([f"{len(other)} of {len(text[0])} responses differ, first {other[0]}"] if other else [])


# The jobs ------------------------------------------------------------------------------------------------------------


def command_of(settings: dict, name: str) -> list[str]:
    words = settings | EXACT | LOGGED | {"trainer.experiment_name": name}
    experiment = [f"experiment={words.pop('experiment')}"] if "experiment" in words else []
    return [sys.executable, "-m", "rlfuse.train", *experiment, *(f"{key}={value}" for key, value in words.items())]


def quickstart(folder: Path, steps: int, address: str) -> dict:
    if not Path(".cache/rlfuse/remainder/model").exists():
        subprocess.run([sys.executable, "-m", "rlfuse.cli", "prepare", "quickstart"], check=True)
    return {
        "experiment": "quickstart",
        "cluster.ray_address": address,
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": "false",
        "trainer.test_freq": -1,
        "trainer.default_local_dir": folder,
    }


def video(folder: Path, steps: int) -> dict:
    from rlfuse.tasks.clips import SIGNS, WORDS, Clips, Kind, write_task
    from rlfuse.tasks.small_video_models import SmallModel, byte_tokenizer, write_small_video_llama3

    task = folder / "task"
    task.mkdir(parents=True, exist_ok=True)
    files, _ = write_task(task, Clips(train=16, val=2, kinds=(Kind.ORDER,), shortest_s=10, longest_s=30))
    small = SmallModel(heads=4, layers=2, tower_heads=2)
    (task / "reward.py").write_text(  # steps take seconds, so that the run lasts until the strikes
        "import time\n\n\ndef early(data_source, solution_str, ground_truth, extra_info=None):\n    time.sleep(0.25)\n"
        "    return (ord(solution_str[0]) % 7) / 7 if solution_str else 0.0\n"
    )
    return {
        "algorithm": "grpo",
        "model.path": write_small_video_llama3(task / "model", small, byte_tokenizer([*WORDS, *SIGNS])),
        "data.train_files": f"[{files}]",
        "data.max_prompt_length": 600,
        "data.max_response_length": 8,
        "data.train_batch_size": 8,
        "actor.ppo_mini_batch_size": 8,
        "rollout.n": 2,
        "rollout.kv_cache_memory_mb": 64,
        "reward.functions": f"[{task}/reward.py:early]",
        "video.sampling": "seed_vl",
        "video.levels": "[4]",
        "video.max_tokens": 128,
        "video.cache_mb": 64,
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": folder,
    }


KINDS = {
    "quickstart": ("engine", "rank", "reward worker", "node", "driver"),
    "video": ("engine", "rank", "reward worker", "encoder rank", "decode worker", "driver"),
}


@contextmanager
def two_nodes() -> Iterator[tuple[str, list[psutil.Process], Callable[[], None]]]:
    """Yield (address, raylet processes, function that adds a node) of a Ray cluster."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, END_TO_END / "two_nodes.py"], **pipes)
    found = json.loads(process.stdout.readline())
    raylets = [psutil.Process(pid) for pid in found["raylets"]]

    def add() -> None:
        process.stdin.write("one more\n")
        process.stdin.flush()
        raylets.append(psutil.Process(int(process.stdout.readline())))

    try:
        yield found["address"], raylets, add
    finally:
        for each in (*_children(psutil.Process(process.pid)), process):
            with suppress(psutil.Error):
                each.send_signal(signal.SIGKILL)
        process.wait()


def disturbed(job: str, kinds: Sequence[str], folder: Path, steps: int, times: int, seed: int) -> list[str]:
    """Run a job undisturbed and with kills of these kinds; return the differences and leftovers of the second."""
    with two_nodes() if job == "quickstart" else _no_cluster() as (address, raylets, add):
        settings = quickstart(folder, steps, address) if job == "quickstart" else video(folder, steps)
        runs = folder / "rlfuse"
        calm = Chaos(command_of(settings, f"{job}_calm"), runs / f"{job}_calm", raylets)
        if (found := status.read(calm.folder)) is None or (found.state, found.total) != ("finished", steps):
            calm.run([])
        took = [row["perf/time_per_step"] for row in read_metrics(calm.folder / "metrics.jsonl") if row["step"]]
        print(f"{job}: undisturbed, {median(took):.1f} s a step", flush=True)
        name = f"{job}_{seed}"
        chaos = Chaos(command_of(settings, name), runs / name, raylets, add)
        began = time.monotonic()
        chaos.run(plan(kinds, times, steps, seed, longest_s=median(took)))
        print(f"{job}: {len(chaos.kills)} kills, {time.monotonic() - began:.0f} s", flush=True)
        return differences(calm.folder, chaos.folder) + [f"left: {what}" for what in chaos.left()]


@contextmanager
def _no_cluster() -> Iterator[tuple[str, list, Callable[[], None]]]:
    yield "", [], lambda: None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=2, help="kills of each kind")
    parser.add_argument("--jobs", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--kinds", nargs="+", default=sum(KINDS.values(), ()), help="of processes; default: all")
    parser.add_argument("--steps", nargs="+", type=int, default=[60, 20], help="of each job")
    parser.add_argument("--folder", type=Path, default=Path("chaos"))
    arguments = parser.parse_args()
    wrong = []
    for job, steps in zip(arguments.jobs, arguments.steps, strict=False):
        print(f"{job}: {steps} steps, seed {arguments.seed}", flush=True)
        kinds = [kind for kind in KINDS[job] if kind in arguments.kinds]
        wrong += disturbed(job, kinds, arguments.folder.absolute(), steps, arguments.times, arguments.seed)
    print("\n".join(wrong) or "no difference, nothing left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
