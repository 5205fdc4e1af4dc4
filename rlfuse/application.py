"""The Hydra application behind `rlfuse train` and `python -m rlfuse.train key=value ...`.

Role: command line -> checked `Config` -> `rlfuse.run.build.run`. Errors become one message and an exit status: 2 for
invalid configuration, data or reward functions, 1 for a failed worker, 75 for SIGTERM or SIGHUP, 130 for Ctrl-C
(`stopping`). RLFUSE_TRACEBACK=1 shows the traceback. Hydra provides presets, `--cfg job` and `--multirun`; sweepers may
optimise the value that `run_job` returns. Invariant: torch, Ray and Transformers are imported only after all key names
were checked.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable

from rlfuse.config.secrets import hidden_text
from rlfuse.console import prepare_streams
from rlfuse.error_file import write_error
from rlfuse.errors import FAILED, INTERRUPTED, OK, PREEMPTED, USER_ERROR, RlfuseError
from rlfuse.stopping import Stopped, stop_signal
from rlfuse.user_folders import SAFE_PATH, append_modules, redirect_caches

HELP = """\
Train a job:
  rlfuse train experiment=quickstart actor.optim.lr=1e-6    a preset of conf/experiment with one override
  rlfuse train my_job.yaml rollout.n=8                      your own YAML file with the keys below
  rlfuse train --config-dir DIR --config-name my_job        the same with Hydra's options
  rlfuse train my_job.yaml actor_rollout_ref.rollout.n=8    verl's names, where they mean the same (rlfuse translate)
  rlfuse train --config-dir DIR my_job.yaml +lengths=long   a custom preset, DIR/lengths/long.yaml
  rlfuse train -m my_job.yaml actor.optim.lr=1e-6,1e-5      a sweep: one job per value in one wandb group, then a table
  rlfuse train -m my_job.yaml hydra/sweeper=optuna hydra.sweeper.direction=maximize 'rollout.n=choice(4,8,16)'
                                                            maximise the last validation score (hydra-optuna-sweeper)
  rlfuse train --cfg job my_job.yaml                        print the composed job without running it; --info: its files
  rlfuse train --help WORD                                  keys that match WORD; --help --markdown: conf/KEYS.md
  rlfuse train --help --json-schema > job.schema.json       JSON schema of a job file, for editors
Presets:
  algorithm={algorithm}
  fusion={fusion}
  experiment={experiment}
"""


def main(argv: list[str] | None = None) -> int:
    """Run the job or jobs that `argv` describes; return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        return run_command(lambda: show_help([word for word in argv if word not in ("--help", "-h")]))
    return run_command(lambda: launch(argv))


def launch(argv: list[str]) -> None:
    """Check all key names, then let Hydra compose and run the job or jobs."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from rlfuse.config.compose import conf_folder, explain_failure, read_command
    from rlfuse.errors import ConfigError
    from rlfuse.run.sweeps import Sweep

    command = read_command(argv)
    command.print_notes()
    sweep = Sweep(command.overrides)

    def one(job) -> float | None:
        return run_job(job, sweep)

    application = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(one)
    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [arguments[0], *command.options, *command.overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra would print and exit; raised, errors are reported in one line
    try:
        application()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([explain_failure(error, command.overrides)]) from error
    finally:
        sweep.end()
        sys.argv = arguments
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error


class JobFailed(RlfuseError):
    """A failed job of a sweep, whose message was already printed."""

    def __init__(self, name: str, status: int):
        super().__init__(f"{name} failed; see its message above")
        self.status = status


def run_job(job, sweep) -> float | None:
    """Run one composed job; in a sweep, return its last validation score.

    A failing job raises JobFailed in a sweep, so that Hydra's launchers continue with the other jobs; otherwise it ends
    the process, because Hydra adds lines to exceptions. A stop signal ends the whole sweep.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra, trial = HydraConfig.get(), None
    if hydra.mode == RunMode.MULTIRUN:
        stem = job.trainer.experiment_name or job.trainer.job_name or "run"
        trial = sweep.begin(stem, list(hydra.overrides.task), hydra.sweeper)
        job.trainer.experiment_name = trial.name
    status = run_command(lambda: _run(job, trial, hydra.sweeper))
    ended = (PREEMPTED, INTERRUPTED)
    if trial is not None:
        trial.state = {OK: "finished", USER_ERROR: "refused"}.get(status, "stopped" if status in ended else "failed")
    if trial is not None and status == OK and stop_signal() is not None:  # during its last step, so that it finished
        raise SystemExit(stopped_by(stop_signal()))
    if status == OK:
        return trial and trial.numbers().get("val_after")
    if trial is not None and status not in ended:
        raise JobFailed(trial.name, status)
    raise SystemExit(status)


def _run(job, trial, sweeper) -> None:
    """Run the job. `trial`: its record in a sweep, None for a single job; `sweeper`: Hydra's settings."""
    from rlfuse import __version__
    from rlfuse.cluster import fork_server
    from rlfuse.cluster.child_processes import keep_hangup_from_children
    from rlfuse.cluster.garbage import importing
    from rlfuse.cluster.scratch import keep_temporary_files
    from rlfuse.config.compose import to_config
    from rlfuse.progress import part, quiet_libraries
    from rlfuse.run import WORKER_IMPORTS
    from rlfuse.run.resume.acceptance import NothingToDo, accept

    try:
        config = to_config(job)
        if trial is not None:
            check_sweeper(sweeper, config)
            trial.folder = config.run_folder
        config = accept(config).config  # before importing torch, which takes seconds
        quiet = "console" not in config.trainer.logger
        if not quiet:
            print(f"rlfuse {__version__}: {config.run_folder}", flush=True)
        keep_temporary_files()  # before importing libraries that read the folder once
        keep_hangup_from_children()
        fork_server.start_early(config, WORKER_IMPORTS)
        quiet_libraries()
        with part("libraries", quiet), importing():
            if config.trainer.is_offline:
                from rlfuse.run.offline.training import run
            else:
                from rlfuse.run.build import run
        run(config)
    except NothingToDo as end:
        print(end)
    except Exception as error:
        if trial is not None:
            trial.error = first_line(error)
        raise


def first_line(error: Exception) -> str:
    """Return the first line of an error, for a table."""
    if problems := getattr(error, "problems", None):
        return hidden_text(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))
    return hidden_text(next(iter(str(error).splitlines()), type(error).__name__))


def check_sweeper(sweeper, config) -> None:
    """Raise ConfigError for an optimising sweeper without validation data, or one that minimises the score."""
    from rlfuse.errors import ConfigError

    problems, optimises = [], not sweeper._target_.endswith(".BasicSweeper")
    if optimises and not config.data.val_files:
        problems.append("data.val_files=[]: the sweeper optimises the last validation score; set held-out data")
    if str(sweeper.get("direction", "maximize")).endswith("minimize"):
        problems.append("hydra.sweeper.direction=minimize: higher validation scores are better; set it to maximize")
    if problems:
        raise ConfigError(problems)


def run_command(action: Callable[[], None]) -> int:
    """Run `action` and return the exit status; print known errors as one message, others with their traceback."""
    prepare_streams()
    os.environ.update(SAFE_PATH)
    append_modules(os.getcwd())
    if redirected := redirect_caches():
        print(redirected, file=sys.stderr, flush=True)
    try:
        action()
    except KeyboardInterrupt:
        _trace()
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    except Stopped as end:
        _trace()
        print(end, file=sys.stderr)
        return stopped_by(end.by)
    except BrokenPipeError:  # for example `rlfuse train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else OK if error.code is None else FAILED
    except Exception as error:
        is_raised, status = write_error(error), known_failure(error)  # by the program that started this process
        if not _trace(always=status is None and not is_raised) and not is_raised:
            text = hidden_text(_explained(error))
            print(f"{text}\n(RLFUSE_TRACEBACK=1 shows the traceback)" if status == FAILED else text, file=sys.stderr)
        return FAILED if status is None else status
    return OK


def _trace(always: bool = False) -> bool:
    """Print the current traceback, with those of workers, if requested; return whether it was printed."""
    shown = always or os.environ.get("RLFUSE_TRACEBACK") == "1"
    if shown:
        print(hidden_text(traceback.format_exc()), file=sys.stderr)
    return shown


def stopped_by(number: signal.Signals) -> int:
    """Return the exit status for a run that a signal ended."""
    return INTERRUPTED if number == signal.SIGINT else PREEMPTED


def known_failure(error: Exception) -> int | None:
    """Return the exit status of an error that is reported by its message; None for a defect."""
    if isinstance(error, RlfuseError):
        return error.status
    return FAILED if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) else None


def _explained(error: Exception) -> str:
    """Return the message of a known error, or of a full disk."""
    if isinstance(error, RlfuseError):
        return str(error)
    return (
        f"{error.filename or 'A file'} could not be written: {error.strerror}. Free disk space where runs and "
        "temporary files are written (df -h shows the free space), and rerun the command."
    )


def show_help(words: list[str]) -> None:
    """Print usage, presets and all keys, the keys that match `words`, or the JSON schema of a job file."""
    from rlfuse.config.compose import conf_folder
    from rlfuse.config.documentation import print_help
    from rlfuse.config.job_schema import OPTION, job_schema
    from rlfuse.config.keys import PRESET_GROUPS

    presets = {group: sorted(path.stem for path in (conf_folder() / group).glob("*.yaml")) for group in PRESET_GROUPS}
    if OPTION in words:
        print(json.dumps(job_schema(presets), indent=1))
        return
    if not words:
        print(HELP.format(**{group: "|".join(names) for group, names in presets.items()}))
    print_help([word.lower() for word in words])


if __name__ == "__main__":
    sys.exit(main())
