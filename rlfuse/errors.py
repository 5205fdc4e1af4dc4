"""Exceptions whose message is all that a user needs, each with its exit status.

Role: raised by any module; `rlfuse.application.run_command` prints the message and returns the status. Every other
exception is a defect and keeps its traceback. All of them can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

OK, FAILED, USER_ERROR, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130
"""Exit statuses. PREEMPTED is EX_TEMPFAIL of sysexits.h: the same command may succeed later."""
LONGEST = 1500
"""Maximum number of characters shown of a problem."""


class RlfuseError(Exception):
    """A failure that is reported by its message, without a traceback."""

    status = FAILED


class UserError(RlfuseError, ValueError):
    """Invalid user input. The message names the value, the valid range, and what to change."""

    status = USER_ERROR


class ConfigError(UserError):
    """An invalid configuration. `problems`: one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = [_one_line(problem) for problem in problems]
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"The configuration has a problem:\n  {self.problems[0]}"
        numbered = (f"{number:>3}. {problem}" for number, problem in enumerate(self.problems, 1))
        return "\n".join([f"The configuration has {len(self.problems)} problems:", *numbered])


def _one_line(problem: str) -> str:
    """Return the problem on one line, with the middle of a long one cut out."""
    problem = " ".join(problem.splitlines())
    return problem if len(problem) <= LONGEST else f"{problem[: LONGEST // 2]} ... {problem[-LONGEST // 2 :]}"


def first_error(error: BaseException) -> BaseException:
    """Return the first error of a group: the others follow from it, in workers that waited for the same result."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class ErrorCollector:
    """Collect user errors from independent parts of a job (reward code, data, ...) to report them together."""

    def __init__(self) -> None:
        self._found: list[UserError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect a UserError that the body raises."""
        try:
            yield
        except UserError as error:
            self._found.append(error)

    def raise_all(self) -> None:
        """Raise a single error unchanged, several as one ConfigError."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            each = (error.problems if isinstance(error, ConfigError) else [str(error)] for error in self._found)
            raise ConfigError([problem for problems in each for problem in problems])


class FunctionError(UserError):
    """A custom function that can't be used. The message names it, and has the user's frames if it raised an error."""


class DataError(UserError):
    """Invalid data. The message names the file, the row, the field, and what to do."""


class RewardError(UserError):
    """An unusable reward function or reward model. The message names it, the reason, and what to change."""


class RunError(UserError):
    """A run folder that cannot be read."""


class NotWritable(UserError, OSError):
    """A path given by the user that cannot be written to. The message names it, the reason, and what to do."""

    def __init__(self, path: object, why: str):
        super().__init__(f"{path}: can't be written ({why}). Choose another path.")


class VideoError(UserError):
    """An unusable clip, or a prompt that does not fit it. The message names the file, the problem and the remedy."""

    def __init__(self, problem: str, remedy: str, file: str = ""):
        super().__init__(problem, remedy, file)
        self.problem = problem
        self.remedy = remedy
        self.file = file

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        return f"{where}{self.problem}. {self.remedy}."

    def of(self, file: str) -> VideoError:
        """Return a copy that names the clip's file."""
        return VideoError(self.problem, self.remedy, file)


class SlotRefused(UserError):
    """A slot that cannot be drained or restored at present. The message names the reason and what to do."""


class NotWritten(RlfuseError, OSError):
    """Rows or a file that could not be written because the disk is full. The message names the file and what to do."""


class EngineError(RlfuseError, RuntimeError):
    """A worker failed. The message names the worker, its task and what to do; `__cause__` is the original error."""


class WorkerLost(EngineError):
    """A process died, hangs or ran out of memory; the request itself is valid and may be retried elsewhere."""

    before_first_step = False
    """True if no step of the run, or of its restart, had begun."""


class NodeLost(WorkerLost):
    """Nodes were lost, with all processes on them; `nodes`: their ids."""

    def __init__(self, text: str, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.nodes = nodes


class NodeLeft(NodeLost):
    """Raised instead of NodeLost for a planned drain: the run continues without these nodes, nothing failed."""


class EngineLost(WorkerLost):
    """A rollout engine was lost. The run can continue: other engines generate its samples."""


class EngineFailed(EngineLost):
    """A rollout engine failed with an error that may also end its replacement."""


class NotSaved(EngineError):
    """A checkpoint could not be written. All processes are unaffected, and the run can continue without it."""
