"""`rlfuse submit`: run a job on a running Ray cluster and follow its log.

    rlfuse submit --compose, check, pack--> Ray Jobs (HTTP, token) --> driver on the head --> slots
          <--log lines, status-------------------/

The job runs independently of this terminal. Exit status: that of the job (0, 1, 2), or 130 on Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlfuse.cluster.worker_environment import MODULES, SUBMITTED
from rlfuse.config.compose import compose_job, read_command, to_config
from rlfuse.config.facts import Facts
from rlfuse.errors import ConfigError, UserError
from rlfuse.run.resume.acceptance import with_run_name
from rlfuse.tools.job_package import Package, pack
from rlfuse.user_folders import home

CALL_S = 60.0
OUTAGE_S = 600.0
STOP_S = 60.0
GRACE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Variable of Ray: seconds from SIGTERM to SIGKILL when a job is stopped; 3 by default."""
POLL_S = 10.0
RETRY_S = 2.0
PORT = 8265
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
ENTRYPOINT = f"cd {SUBMITTED} && python -P -m rlfuse.application job.yaml"
KEY = "rlfuse_experiment"


class SubmitError(UserError):
    """The cluster can't be reached or rejected a request."""


def main(argv: Sequence[str]) -> None:
    """Run the command. Raises ConfigError or SubmitError; SystemExit with the status of the job."""
    commands = {"status": _status, "logs": _logs, "stop": _stop}
    if argv and argv[0] in commands:
        arguments = _job_parser(argv[0]).parse_args(argv[1:])
        commands[argv[0]](_connect(arguments), arguments.job)
        return
    arguments, words = _parser().parse_known_args(argv)
    if read_command(words).options:
        raise ConfigError([f"{' '.join(read_command(words).options)}: rlfuse submit takes files and key=value only"])
    config = with_run_name(
        to_config(compose_job(words), lambda _: Facts())
    )  # files and devices are those of the cluster
    variables = _variables(arguments.env)
    with tempfile.TemporaryDirectory(prefix="rlfuse-job-") as folder:
        package = pack(config, Path(folder), Path.cwd(), arguments.include, arguments.with_code)
        for note in package.notes:
            print(note, flush=True)  # before the upload messages of Ray
        client = _connect(arguments)
        variables = {GRACE: str(int(config.trainer.preemption_grace_s + STOP_S / 2))} | variables
        job = _send(client, package, variables, config.trainer.experiment_name)
    print(f"submitted {job}\n{_follow_up(arguments.address, job)}", flush=True)
    if not arguments.detach:
        _follow(client, job)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlfuse submit",
        usage="rlfuse submit [options] [my_job.yaml] key=value ...\n       rlfuse submit status|logs|stop JOB",
        description="Send a job to a running Ray cluster and follow its log.",
        allow_abbrev=False,
    )
    _add_cluster(parser)
    parser.add_argument("--detach", action="store_true", help="do not follow the log")
    parser.add_argument("--include", type=Path, action="append", default=[], metavar="PATH", help="additional file "
                        "or folder that custom functions need")  # fmt: skip
    parser.add_argument(
        "--with-code", action="store_true", help="send the rlfuse of this checkout instead of using the installed one"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="environment variable "
                        "of the job, by default with its value here; visible to all users of the cluster")  # fmt: skip
    return parser


def _job_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"rlfuse submit {command}", allow_abbrev=False)
    _add_cluster(parser)
    parser.add_argument("job", metavar="JOB", nargs="?" if command == "status" else None)
    return parser


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    address = os.environ.get("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{PORT}")
    text = f"address of the Ray dashboard; default: RAY_API_SERVER_ADDRESS, or port {PORT} of this machine"
    parser.add_argument("--address", default=address, type=full_address, metavar="HOST[:PORT]", help=text)
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="token of the cluster; default: as Ray finds it"
    )


def full_address(address: str) -> str:
    """Return the address with scheme and port: `host` -> `http://host:8265`."""
    address = address if "://" in address else f"http://{address}"
    return address if re.search(r":\d+/?$", address) or address.startswith("https") else f"{address}:{PORT}"


def _variables(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals and name not in os.environ:
            raise SubmitError(f"--env {name}: not set here; export it, or use --env {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _connect(arguments: argparse.Namespace) -> Any:
    token = arguments.token_file
    if token is not None:
        if not token.is_file():
            raise SubmitError(f"--token-file {token}: no such file")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token.absolute())
        os.environ.pop("RAY_AUTH_TOKEN", None)  # which Ray would use instead of the file
    if token or "RAY_AUTH_TOKEN" in os.environ or os.path.isfile(home() / ".ray" / "auth_token"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.job_submission import JobSubmissionClient

    return _bounded(lambda: JobSubmissionClient(arguments.address), f"connect to {arguments.address}")


def _bounded(call: Callable[[], Any], what: str) -> Any:
    """Return the result of `call` within `CALL_S`, as the client of Ray has no timeout."""
    from ray.exceptions import RayError

    from rlfuse.cluster.joining import request

    try:
        return request(call).result(CALL_S)
    except TimeoutError as error:
        raise SubmitError(f"could not {what}: no answer in {CALL_S:g} s; check --address") from error
    except (RayError, RuntimeError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        denied = re.search(r"401|403|[Uu]nauthenticated|[Uu]nauthorized|token", text)
        remedy = "check --address, the dashboard of `ray start --head` there, and the name of the job"
        if denied:
            remedy = "pass the token of the cluster: --token-file, or RAY_AUTH_TOKEN_PATH"
        elif "No available agent" in text:
            remedy = (
                "the agent of the head node does not run, usually because another cluster there has its port: "
                "restart it as `ray start --head --dashboard-agent-listen-port=PORT`"
            )
        raise SubmitError(f"could not {what}: {text[:400]}; {remedy}") from error


def _send(client: Any, package: Package, variables: dict[str, str], experiment: str) -> str:
    name = re.sub(r"[^\w.-]+", "_", experiment)
    job = f"{name}-{secrets.token_hex(3)}"
    variables = {"PYTHONUNBUFFERED": "1", MODULES: SUBMITTED} | variables
    environment = {"working_dir": str(package.folder), "env_vars": variables}
    return _bounded(
        lambda: client.submit_job(
            entrypoint=ENTRYPOINT, submission_id=job, runtime_env=environment, metadata={KEY: package.experiment}
        ),
        "submit the job",
    )


def _follow_up(address: str, job: str) -> str:
    where = "" if address == f"http://127.0.0.1:{PORT}" else f" --address {address}"
    return f"The job runs independently of this terminal: rlfuse submit logs|status|stop{where} {job}"


def _follow(client: Any, job: str) -> None:
    try:
        asyncio.run(follow(client, job, lambda text: print(text, end="", flush=True)))
    except KeyboardInterrupt:
        print(f"\nStopped following; {job} continues (rlfuse submit stop {job} ends it)")
        raise SystemExit(130) from None
    info = _bounded(lambda: client.get_job_info(job), f"ask for {job}")
    print(f"{job} {_end(info)}")
    raise SystemExit(status_of(info.status.value, info.driver_exit_code))


def _end(info: Any) -> str:
    why = f": {info.message.splitlines()[0]}" if info.status.value == "FAILED" and info.message else ""
    return f"{info.status.value.lower()}{why}"


def status_of(status: str, driver: int | None) -> int:
    """Return the exit status for an ended job: 0, that of the driver if it is a known one, else 1."""
    return 0 if status == "SUCCEEDED" else driver if driver in (1, 2, 75, 130) else 1


async def follow(client: Any, job: str, show: Callable[[str], None]) -> None:
    """Show the log of the job until it ends. SubmitError if the cluster is unreachable for `OUTAGE_S`."""
    from aiohttp import ClientError

    log, reached = _Log(show), time.monotonic()
    while True:
        try:
            ended = await _ended(client, job)
            reached = time.monotonic()
            await _tail(client, job, log)
            if ended:
                return
        except (SubmitError, RuntimeError, OSError, ClientError) as error:
            if time.monotonic() - reached > OUTAGE_S:
                raise SubmitError(f"cluster unreachable for {OUTAGE_S:g} s while following {job}: {error}") from error
        await asyncio.sleep(RETRY_S)


class _Log:
    """Log that is shown once, although every connection sends it from the beginning."""

    def __init__(self, show: Callable[[str], None]):
        self._show, self._shown, self._seen = show, 0, 0

    def again(self) -> None:
        self._seen = 0

    def take(self, text: str) -> None:
        self._seen += len(text)
        if self._seen > self._shown:
            self._show(text[max(0, len(text) - (self._seen - self._shown)) :])
            self._shown = self._seen


async def _tail(client: Any, job: str, log: _Log) -> None:
    log.again()
    stream = client.tail_job_logs(job)
    upcoming = asyncio.ensure_future(anext(stream, None))
    try:
        while True:
            done, _ = await asyncio.wait({upcoming}, timeout=POLL_S)
            if not done:
                if await _ended(client, job):
                    return
                continue
            text = upcoming.result()
            if text is None:
                return
            log.take(text)
            upcoming = asyncio.ensure_future(anext(stream, None))
    finally:  # closed here, so that its error is not printed at exit
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)
        await stream.aclose()


async def _ended(client: Any, job: str) -> bool:
    return await asyncio.to_thread(_state, client, job) in ENDED


def _state(client: Any, job: str) -> str:
    return _bounded(lambda: client.get_job_status(job), f"ask for {job}").value


def _status(client: Any, job: str | None) -> None:
    jobs = _bounded(client.list_jobs, "list the jobs")
    mine = [each for each in jobs if each.submission_id and KEY in (each.metadata or {})]
    wanted = [each for each in mine if job is None or each.submission_id == job]
    if job is not None and not wanted:
        known = ", ".join(each.submission_id for each in mine) or "none"
        raise SubmitError(f"{job}: no such job on the cluster; jobs: {known}")
    if not mine:
        print("The cluster has no jobs of `rlfuse submit`.")
    for each in sorted(wanted, key=lambda each: each.start_time or 0):
        end = (each.end_time or time.time() * 1000) / 1000
        seconds = f"{end - each.start_time / 1000:,.0f} s" if each.start_time else "not started"
        print(f"{each.submission_id}  {each.status.value.lower()}  {seconds}  {each.metadata[KEY]}")
        if job is not None and each.message:
            print(each.message)


def _logs(client: Any, job: str) -> None:
    _state(client, job)  # fails immediately for an unknown job
    _follow(client, job)


def _stop(client: Any, job: str) -> None:
    info = _bounded(lambda: client.get_job_info(job), f"ask for {job}")
    if info.status.value in ENDED:
        print(f"{job} has already ended: {_end(info)}")
        return
    limit = STOP_S + float(((info.runtime_env or {}).get("env_vars") or {}).get(GRACE, 0))
    _bounded(lambda: client.stop_job(job), f"stop {job}")
    print(f"stopping {job}; the current step may finish and be saved, for at most {limit:g} s", flush=True)
    until = time.monotonic() + limit
    while not asyncio.run(_ended(client, job)):
        if time.monotonic() > until:
            raise SubmitError(f"{job} has not stopped in {limit:g} s; retry, or check the dashboard")
        time.sleep(0.5)
    name = (info.metadata or {}).get(KEY, "").rpartition("/")[2]
    after = _state(client, job).lower()
    print(f"{job} {after}; `rlfuse submit ... trainer.experiment_name={name}` resumes from its last checkpoint")
