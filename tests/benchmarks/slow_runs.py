"""Whether `rlfuse whatif` knows what a slow slot costs a real run: what it says, next to how much longer the run takes.

    python tests/benchmarks/slow_runs.py [--beside 1 2] [--repeats 2] [--steps 4]

Jobs of `slow_ranks.py step` with `fusion=serial` and `trainer.deterministic`, so that all of them generate and train
the same on the same slots: without anybody beside, then with one, two ... programs that compute on the second slot's
core, and without again. *Took* is a run's time of a step over that of the runs without; *told* is what `whatif` makes
of the slowed run alone, `S_machine`. Nobody tells it which slot was slowed: `slowest` is whom it ranks first. The first
step is left out of both. The programs take the core from what isn't bound to a slot, too: the driver and Ray move to
the first slot's, which works more slowly then, and no analysis of the slowed run can see that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from slow_ranks import JOB, beside, larger_policy, prepare


def slowdown(folder: str, policy: str, steps: int, count: int) -> dict:
    """What `whatif --out` writes of a job with so many programs beside its second slot."""
    core, name = sorted(os.sched_getaffinity(0))[1], f"beside-{count}"
    more = (f"model.path={policy}", f"trainer.default_local_dir={folder}", f"trainer.experiment_name={name}")
    same = ("fusion=serial", "trainer.deterministic=true", f"trainer.total_training_steps={1 + steps}")
    command = [sys.executable, "-m", "rlfuse.cli"]
    with beside(core, count) if count else nullcontext():
        subprocess.run([*command, "train", *JOB, *more, *same], check=True, stdout=subprocess.DEVNULL)
    run, out = Path(folder, "rlfuse", name), Path(folder, "found.json")
    told = [*command, "whatif", str(run), "--steps", str(steps), "--out", str(out)]
    subprocess.run(told, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def main() -> None:
    """Run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    prepare()
    policy = larger_policy()
    print("| beside | a step, alone | a step | took | told | slowest |\n" + "|---" * 6 + "|", flush=True)
    for _ in range(options.repeats):
        found = {}
        for turn, count in enumerate((0, *options.beside, 0)):
            with tempfile.TemporaryDirectory() as folder:
                found[turn] = slowdown(folder, policy, options.steps, count)
        alone = statistics.mean(found[turn]["measured"] for turn in (0, len(options.beside) + 1))
        for turn, count in enumerate(options.beside, 1):
            took, told = found[turn]["measured"] / alone, found[turn]["S_machine"]
            who, seconds = next(iter(found[turn]["workers"])), found[turn]["measured"]
            print(f"| {count} | {alone:.2f} s | {seconds:.2f} s | {took:.2f} | {told:.2f} | {who} |", flush=True)


if __name__ == "__main__":
    main()
