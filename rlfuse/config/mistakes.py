"""Mistakes of a person in different parts of a job, told together: in its reward's code and in its data, say.

Role: `rlfuse.run.build` looks at one part after the other with `noted`, and `tell`s before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlfuse.errors import ConfigError


class Mistakes:
    """Those that were found so far."""

    def __init__(self) -> None:
        self._found: list[ValueError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A mistake in the body ends it, and is kept; errors that are not the project's own for a person are raised."""
        try:
            yield
        except ValueError as error:
            if type(error).__module__.partition(".")[0] != "rlfuse":
                raise
            self._found.append(error)

    def tell(self) -> None:
        """Raise the only one as it is, several as one ConfigError."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            each = (error.problems if isinstance(error, ConfigError) else [str(error)] for error in self._found)
            raise ConfigError([problem for problems in each for problem in problems])
