"""Every failure whose message says all that a person needs, in one hierarchy with the exit status of each.

Role: raised by any module, told and turned into an exit status by `rlfuse.train.run_command`; whatever else ends a command
is a defect, and keeps its traceback. They travel between processes whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

OK, FAILED, USER_ERROR, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130
"""Exit statuses. PREEMPTED is EX_TEMPFAIL of sysexits.h: the same command may succeed later."""
LONGEST = 1500
"""Characters of a problem that are shown."""


class RlfuseError(Exception):
    """A failure that is told with its message alone."""

    status = FAILED


class UserError(RlfuseError, ValueError):
    """What a person named can't be used as it is: the message says what, what would be valid, and what to change."""

    status = USER_ERROR


class ConfigError(UserError):
    """The configuration can't be run. `problems` has one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = [_one_line(problem) for problem in problems]
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"The configuration has a problem:\n  {self.problems[0]}"
        numbered = (f"{number:>3}. {problem}" for number, problem in enumerate(self.problems, 1))
        return "\n".join([f"The configuration has {len(self.problems)} problems:", *numbered])


def _one_line(problem: str) -> str:
    """A problem without the line breaks of a value that is shown in it, and without the middle of a long one."""
    problem = " ".join(problem.splitlines())
    return problem if len(problem) <= LONGEST else f"{problem[: LONGEST // 2]} ... {problem[-LONGEST // 2 :]}"


def first_error(error: BaseException) -> BaseException:
    """The first error of a group: the others are its echo in workers that waited for the same thing."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class ErrorCollector:
    """Those of a person in different parts of a job, told together: in its reward's code and in its data, say."""

    def __init__(self) -> None:
        self._found: list[UserError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """A UserError in the body ends it, and is kept."""
        try:
            yield
        except UserError as error:
            self._found.append(error)

    def raise_all(self) -> None:
        """Raise the only one as it is, several as one ConfigError."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            each = (error.problems if isinstance(error, ConfigError) else [str(error)] for error in self._found)
            raise ConfigError([problem for problems in each for problem in problems])


class DataError(UserError):
    """Data that can't be used: which file, which row, which field, and what to do."""


class RewardError(UserError):
    """A reward function or reward model can't be used. The message says which, why and what to change."""


class RunError(UserError):
    """A run folder that can't be read. The message is for the person who named it."""


class NotWritable(UserError, OSError):
    """A place that a person named can't be written to. The message names it, the reason, and what to do."""

    def __init__(self, path: object, why: str):
        super().__init__(f"{path}: can't be written ({why}). Choose another path.")


class VideoError(UserError):
    """A clip or its prompt can't be used: which file, what is wrong, what to do. Travels between processes whole."""

    def __init__(self, problem: str, remedy: str, file: str = ""):
        super().__init__(problem, remedy, file)
        self.problem = problem
        self.remedy = remedy
        self.file = file

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        return f"{where}{self.problem}. {self.remedy}."

    def of(self, file: str) -> VideoError:
        """The same, naming the clip's file."""
        return VideoError(self.problem, self.remedy, file)


class SlotRefused(UserError):
    """A slot of a run can't be drained or restored now. The message says why, and what can be done."""


class NotWritten(RlfuseError, OSError):
    """Rows or a file that a full disk keeps from being written. The message names it, the reason, and what to do."""


class EngineError(RlfuseError, RuntimeError):
    """A worker failed. The message says which one, what it was doing and what to do; `__cause__` is the original."""


class WorkerLost(EngineError):
    """A process died, hangs or ran out of memory, nothing is wrong with what it was asked: another may do it."""

    before_first_step = False
    """Whether the run, or its restart, had begun no step."""


class NodeLost(WorkerLost):
    """Nodes are gone, with what lived there; `nodes`: their ids."""

    def __init__(self, text: str, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.nodes = nodes


class NodeLeft(NodeLost):
    """Nodes whose slots were drained are gone, or may go now: the run goes on without them, and nothing failed."""


class EngineLost(WorkerLost):
    """A rollout engine is gone, and the run can go on without it: its samples are generated elsewhere."""


class EngineFailed(EngineLost):
    """A rollout engine failed with an exception, not from outside: one that takes its place may end so, too."""


class NotSaved(EngineError):
    """A checkpoint could not be written. Every process is as before, and the run can go on without it."""
