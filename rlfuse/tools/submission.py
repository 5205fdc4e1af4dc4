"""`rlfuse submit`: run the job of `rlfuse train` on a running Ray cluster and follow its log.

    rlfuse submit --compose, check, pack--> Ray Jobs (HTTP, token) --> driver on the head: rlfuse.train --> slots
          <--log lines, status-------------------/

The job does not depend on this terminal: `ray job logs`, `status` and `stop` take its name. Exit status: that of the
job, or 130 on Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import ClientError

from rlfuse.cluster.worker_environment import MODULES, SUBMITTED
from rlfuse.config.compose import compose_job, read_command, to_config
from rlfuse.config.facts import Facts
from rlfuse.errors import ConfigError, UserError
from rlfuse.run.acceptance import named
from rlfuse.tools.job_package import Package, pack
from rlfuse.user_folders import home

CALL_S = 60.0
STOP_S = 60.0
GRACE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray's own variable: seconds from the SIGTERM of a stop to SIGKILL; 3 where a job says nothing."""
PORT = 8265
ENTRYPOINT = f"cd {SUBMITTED} && python -P -m rlfuse.train job.yaml"


class SubmitError(UserError):
    """The cluster can't be reached, or does not do what it is asked; the message says what to change."""


def main(argv: Sequence[str]) -> None:
    """Do what the arguments say. Raises ConfigError or SubmitError; SystemExit with the job's status."""
    arguments, words = _parser().parse_known_args(argv)
    if read_command(words).options:
        raise ConfigError([f"{' '.join(read_command(words).options)}: rlfuse submit takes files and key=value only"])
    config = named(to_config(compose_job(words), lambda _: Facts()))  # files and devices are the cluster's
    variables = _variables(arguments.env)
    with tempfile.TemporaryDirectory(prefix="rlfuse-job-") as folder:
        package = pack(config, Path(folder), Path.cwd(), arguments.include, arguments.with_code)
        for note in package.notes:
            print(note, flush=True)  # before Ray tells of its upload
        client = _connect(arguments)
        variables = {GRACE: str(int(config.trainer.preemption_grace_s + STOP_S / 2))} | variables
        job = _send(client, package, variables, config.trainer.experiment_name)
    place = f"--address {arguments.address} {job}"
    print(f"submitted {job}\nIt runs without this terminal: ray job logs|status|stop {place}", flush=True)
    if not arguments.detach:
        _follow(client, job)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlfuse submit",
        usage="rlfuse submit [options] [my_job.yaml] key=value ...",
        description="Send a job to a running Ray cluster, and follow its log.",
        allow_abbrev=False,
    )
    address = os.environ.get("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{PORT}")
    text = f"of Ray's dashboard; default: RAY_API_SERVER_ADDRESS, or port {PORT} of this machine"
    parser.add_argument("--address", default=address, type=full_address, metavar="HOST[:PORT]", help=text)
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="the cluster's token; default: as Ray finds it")
    parser.add_argument("--detach", action="store_true", help="don't follow the log")
    parser.add_argument("--include", type=Path, action="append", default=[], metavar="PATH", help="a file or folder "
                        "that reward functions need beside their own file")  # fmt: skip
    parser.add_argument(
        "--with-code", action="store_true", help="bring this checkout's rlfuse instead of the cluster's"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for the job, by "
                        "default with its value here; Ray shows it to everyone who sees the cluster")  # fmt: skip
    return parser


def full_address(address: str) -> str:
    """`host` -> `http://host:8265`."""
    address = address if "://" in address else f"http://{address}"
    return address if re.search(r":\d+/?$", address) or address.startswith("https") else f"{address}:{PORT}"


def _variables(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals and name not in os.environ:
            raise SubmitError(f"--env {name}: is not set here; export it, or write --env {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _connect(arguments: argparse.Namespace) -> Any:
    token = arguments.token_file
    if token is not None:
        if not token.is_file():
            raise SubmitError(f"--token-file {token}: there is no such file")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token.absolute())
    if token or "RAY_AUTH_TOKEN" in os.environ or os.path.isfile(home() / ".ray" / "auth_token"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.job_submission import JobSubmissionClient

    return _bounded(lambda: JobSubmissionClient(arguments.address), f"connect to {arguments.address}")


def _bounded(call: Callable[[], Any], what: str) -> Any:
    """Return its result within CALL_S: Ray's client has no time limit."""
    from ray.exceptions import RayError

    from rlfuse.cluster.joining import request

    try:
        return request(call).result(CALL_S)
    except TimeoutError as error:
        raise SubmitError(f"could not {what}: no answer in {CALL_S:g} s; is the address right?") from error
    except (RayError, RuntimeError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        denied = re.search(r"401|403|[Uu]nauthenticated|[Uu]nauthorized|token", text)
        remedy = "give the cluster's token: --token-file, or RAY_AUTH_TOKEN_PATH" if denied else (
            "check --address, that `ray start --head` runs there with its dashboard, and the name of the job"
        )  # fmt: skip
        raise SubmitError(f"could not {what}: {text[:400]}; {remedy}") from error


def _send(client: Any, package: Package, variables: dict[str, str], experiment: str) -> str:
    name = re.sub(r"[^\w.-]+", "_", experiment)
    job = f"{name}-{secrets.token_hex(3)}"
    variables = {"PYTHONUNBUFFERED": "1", MODULES: SUBMITTED} | variables
    environment = {"working_dir": str(package.folder), "env_vars": variables}
    return _bounded(
        lambda: client.submit_job(
            entrypoint=ENTRYPOINT, submission_id=job, runtime_env=environment, metadata={"rlfuse": package.experiment}
        ),
        "submit the job",
    )


def _follow(client: Any, job: str) -> None:
    """Show the job's log until it ends; SystemExit with its status."""
    try:
        asyncio.run(_show(client.tail_job_logs(job)))
    except KeyboardInterrupt:
        print(f"\nNo longer following; {job} continues (ray job stop {job} ends it)")
        raise SystemExit(130) from None
    except (RuntimeError, OSError, ClientError) as error:
        raise SubmitError(f"lost the log of {job}, which continues: {error}; ray job logs --follow {job}") from error
    info = _bounded(lambda: client.get_job_info(job), f"get the status of {job}")
    why = f": {info.message.splitlines()[0]}" if info.status.value == "FAILED" and info.message else ""
    print(f"{job} {info.status.value.lower()}{why}")
    raise SystemExit(status_of(info.status.value, info.driver_exit_code))


async def _show(log: AsyncIterator[str]) -> None:
    async for text in log:
        print(text, end="", flush=True)


def status_of(status: str, driver: int | None) -> int:
    """Return the exit status for a job that ended: the driver's own where that says more than failure."""
    return 0 if status == "SUCCEEDED" else driver if driver in (1, 2, 75, 130) else 1
