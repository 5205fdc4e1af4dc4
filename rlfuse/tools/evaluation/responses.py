"""File of responses that is written row by row and continued after an interruption.

A second file records its settings (model, data, sampling), so that a file never mixes two models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlfuse.errors import ConfigError
from rlfuse.files import RowFile, json_safe, read_rows, write_atomically
from rlfuse.observe.tracking import sample_row
from rlfuse.run_folder.response_store import FILE, ResponseStore
from rlfuse.samples import Group, Response, Reward, RewardFailure, Sample


class Responses:
    """Responses as JSON lines at `path`. `scored`: a sample is complete only with its reward. `draft_bytes`: maximum
    size of the file of drafts for later evaluations."""

    def __init__(self, path: Path, scored: bool, draft_bytes: int = 0):
        self.path, self._scored, self._draft_bytes = path, scored, draft_bytes
        self._store: ResponseStore | None = None
        self._file: RowFile | None = None
        self._open: list[Sample] = []
        self.total = 0

    @property
    def made_from(self) -> Path:
        """Path of the file with the settings of the responses."""
        return self.path.with_name(f"{self.path.name}.made_from.json")

    def differs(self, made_from: Mapping[str, Any]) -> list[str]:
        """Return the differences between these settings and those of an existing file; [] if there is no file."""
        if not self.path.exists():
            return []
        try:
            before = json.loads(self.made_from.read_text())
        except (OSError, ValueError):
            return [f"{self.made_from.name} is missing or can't be read"]
        now = json.loads(json.dumps(made_from))
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return [f"{name} (was {before.get(name)}, is {now.get(name)})" for name in names]

    def begin(self, made_from: Mapping[str, Any], groups: Sequence[Group]) -> list[Group]:
        """Open the file and return the remaining groups. Raises ConfigError if its settings differ."""
        if differs := self.differs(made_from):
            raise ConfigError(
                [f"--out {self.path}: the file has responses with other settings: {'; '.join(differs)}. Choose another "
                 "file, or remove it"]
            )  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.made_from, json.dumps(made_from, indent=2))
        known = {row["id"]: row for row in read_rows(self.path)}
        self._file = RowFile(self.path)
        if self._draft_bytes:
            self._store = ResponseStore(self.path.with_name(FILE), self._draft_bytes)
        for sample in (sample for group in groups for sample in group.samples):
            if (row := known.get(sample.id)) is None:
                self._open.append(sample)
            elif row["prompt"] != sample.prompt.text:
                raise ConfigError([f"{self.path}: response {sample.id} belongs to another prompt; choose another file"])
            else:
                _restore(sample, row)
        left, self.total = {sample.id for sample in self._open}, sum(len(group.samples) for group in groups)
        groups = [Group(group.prompt, [s for s in group.samples if s.id in left]) for group in groups]
        return [group for group in groups if group.samples]

    @property
    def written(self) -> int:
        return self.total - len(self._open)

    def write(self) -> list[Sample]:
        finished = [s for s in self._open if s.response is not None and (s.reward is not None or not self._scored)]
        if finished:
            done = {sample.id for sample in finished}
            self._open = [sample for sample in self._open if sample.id not in done]
            self._file.append(json_safe(sample_row(sample)) for sample in finished)
            if self._store is not None:
                for sample in finished:
                    self._store.add(sample.step, sample.draft_key, sample.response.token_ids)
        return finished

    def close(self) -> None:
        """Write finished samples, sync the file to disk and close it."""
        if self._file is not None:
            try:
                self.write()
                self._file.sync()
            finally:
                self._file.close()
                if self._store is not None:
                    self._store.close()


def _restore(sample: Sample, row: Mapping[str, Any]) -> None:
    tokens, log_probs = np.zeros(row["response_tokens"], np.int32), np.empty(0, np.float32)
    sample.response = Response(tokens, log_probs, row["finish"], sample.step, row["response"])
    if row["reward"] is not None:
        sample.reward = Reward(row["reward"], row["parts"], row["note"], pred=row.get("pred"))
    elif row["note"] is not None:
        function, _, message = row["note"].partition(": ")
        sample.reward = RewardFailure(function, message)
