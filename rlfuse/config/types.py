"""Values of the wrong type, found one by one before OmegaConf merges them: it stops at the first.

Role: `explain_type` is asked for every setting of a job file and of the command line (job_file.py, compose.py). What a
type takes is OmegaConf's to say: each value is tried on the schema. Imports nothing heavy.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config.documentation import as_typed, by_name
from rlfuse.config.keys import explain_value
from rlfuse.config.schema import Config

SEVERAL = ("data.train_files", "data.val_files", "reward.functions", "trainer.logger")
"""Lists that may be given as their only entry."""
REFERENCE = re.compile(r"\$\{[^${}:]+\}")
"""To another key, which may be a list; of what has more to it the value is a text."""


@functools.cache
def _tried() -> DictConfig:
    """What values are tried on, one over the other: a copy for each would take a quarter of a second."""
    return OmegaConf.structured(Config)


def explain_type(name: str, value: Any) -> str | None:
    """One line about a value that the key can't have; None for a fitting one, and for a name that is no key."""
    if name not in by_name():
        return None
    try:
        OmegaConf.update(_tried(), name, listed(name, value))
    except (OmegaConfBaseException, ValueError):
        return explain_value(name, as_typed(value))
    return None


def listed(name: str, value: Any) -> Any:
    """`value`, in a list where it is the only entry of one: data.train_files=x.parquet, as in verl."""
    alone = name in SEVERAL and isinstance(value, str | dict) and not REFERENCE.fullmatch(str(value))
    return [value] if alone else value
