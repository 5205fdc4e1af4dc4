"""Draw batches in the order of a custom sampler: `data.sampler`, for example a curriculum.

Role: a `PromptSource` whose rows the user's class selects. It is iterated once per epoch, one batch at a time, and
receives the finished samples of each step before the next batch is drawn. Its state is saved with each checkpoint.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlfuse.config.custom_errors import function_error
from rlfuse.config.custom_functions import SAMPLER
from rlfuse.config.custom_modules import load
from rlfuse.config.schema import DataConfig
from rlfuse.data.prompts import PromptSource
from rlfuse.errors import ConfigError, DataError
from rlfuse.samples import Group, Prompt, Sample


class SamplerSource(PromptSource):
    """Batches in the order of `data.sampler`. Raises ConfigError or FunctionError for a class that can't be used.

    `describe`: converts a finished sample to what `update` receives.
    """

    def __init__(self, prompts: Sequence[Prompt], data: DataConfig, describe: Callable[[Sample], Any]):
        super().__init__(prompts, data.train_batch_size, data.shuffle, data.seed)
        self._name, self._describe, self._epoch = f"{SAMPLER}={data.sampler}", describe, 0
        sampler = load(SAMPLER, str(data.sampler))
        with self._errors(sampler):
            self._sampler = sampler(prompts, data, **data.sampler_kwargs)
        self._learns = hasattr(self._sampler, "update")
        self._saves = hasattr(self._sampler, "state_dict") and hasattr(self._sampler, "load_state_dict")
        if self._learns and not self._saves:
            raise ConfigError(
                [f"{self._name}: has `update` but not `state_dict` and `load_state_dict`, which restore what it "
                 "learned when a run is resumed; add them"]
            )  # fmt: skip
        self._drawn = 0
        """Batches drawn in this epoch."""
        self.state_dict()  # raises an error now instead of at the first checkpoint
        self._rows = self._begin_epoch()

    @property
    def steps_per_epoch(self) -> int:
        with self._errors(self._sampler):
            rows = len(self._sampler) if hasattr(self._sampler, "__len__") else len(self.prompts)
        return max(1, rows // self.batch_size)

    @property
    def epoch(self) -> int:
        return self._epoch

    def next_batch(self) -> list[Prompt]:
        rows = self._take()
        if rows is None:
            self._epoch, self._drawn = self._epoch + 1, 0
            self._rows = self._begin_epoch()
            rows = self._take()
        if rows is None:
            raise DataError(
                f"{self._name}: an epoch has fewer rows than data.train_batch_size={self.batch_size}. Yield more rows, "
                "or lower it."
            )
        self.taken += 1
        self._drawn += 1
        return [self.prompts[row] for row in rows]

    def upcoming(self) -> list[Prompt]:
        """Return no prompts: the next batch is unknown until the sampler has received the samples of this step."""
        return []

    def update(self, groups: Sequence[Group]) -> None:
        if self._learns:
            samples = [self._describe(sample) for group in groups for sample in group.samples]
            with self._errors(self._sampler.update):
                self._sampler.update(samples)

    def state_dict(self) -> dict[str, Any]:
        own = None
        if self._saves:
            with self._errors(self._sampler.state_dict):
                own = self._sampler.state_dict()
            try:
                own = _json_values(own)
            except (TypeError, ValueError) as error:
                problem = f"{self._name}: `state_dict` must return JSON values ({error}); convert them"
                raise ConfigError([problem]) from None
        return {"taken": self.taken, "epoch": self._epoch, "drawn": self._drawn, "sampler": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sampler, whose iterator continues then; without a state, skip the rows drawn in the epoch."""
        self.taken, self._epoch, self._drawn = state["taken"], state["epoch"], state.get("drawn", 0)
        saved = state.get("sampler") if self._saves else None
        self._rows = self._begin_epoch(saved)
        for _ in range(self._drawn if saved is None else 0):
            self._take()

    def _begin_epoch(self, saved: Any = None) -> Iterator[Any]:
        """Return the iterator of the epoch. `saved`: state of the sampler within the epoch."""
        with self._errors(self._sampler):
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(self._epoch)
            if saved is not None:
                self._sampler.load_state_dict(saved)
            return iter(self._sampler)

    def _take(self) -> list[int] | None:
        """Return the rows of a batch; None at the end of the epoch, whose incomplete last batch is dropped."""
        rows: list[int] = []
        while len(rows) < self.batch_size:
            try:
                row = next(self._rows)
            except StopIteration:
                return None
            except (Exception, SystemExit) as error:
                raise function_error(self._name, error, self._sampler) from error
            if not isinstance(row, numbers.Integral) or not 0 <= row < len(self.prompts):
                raise DataError(f"{self._name}: yielded {row!r}; yield row numbers from 0 to {len(self.prompts) - 1}.")
            if row in rows:
                raise DataError(f"{self._name}: yielded row {row} twice in a batch; repeat it in a later batch.")
            rows.append(int(row))
        return rows

    @contextmanager
    def _errors(self, function: Any) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            raise function_error(self._name, error, function) from error


def _json_values(state: Any) -> Any:
    """Return the state as it is after a resume. TypeError or ValueError for other values than JSON's."""
    if isinstance(state, dict) and (others := [key for key in state if not isinstance(key, str)]):
        raise TypeError(f"key {others[0]!r} is not a string")
    if isinstance(state, dict):
        return {key: _json_values(each) for key, each in state.items()}
    return [*map(_json_values, state)] if isinstance(state, list | tuple) else json.loads(json.dumps(state))
