"""What is raised for a clip that can't be used, whoever finds out."""

from __future__ import annotations


class VideoError(ValueError):
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
