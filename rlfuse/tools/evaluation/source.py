"""Find the model to evaluate: a checkpoint, the newest one of a run, a Hugging Face folder or a hub name.

Samples of a checkpoint of step N have the ids of the validation after step N, those of any other model the ids of step
0; their seeds are the same.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rlfuse.config.rewards import MODEL_PART
from rlfuse.errors import ConfigError
from rlfuse.run_folder import checkpoints

POLICY, REWARD_MODEL, WEIGHTS = "actor", MODEL_PART, "huggingface"
"""Subfolders of a checkpoint: policy, reward model, and the loadable model within each."""


@dataclass(frozen=True, slots=True)
class Source:
    """Model to evaluate."""

    path: str
    step: int = 0
    run: Path | None = None

    @property
    def answers(self) -> bool:
        """True for a policy, judged by the name of its folder."""
        return not self.run or Path(self.path).parent.name == POLICY

    @property
    def name(self) -> str:
        return f"global_step_{self.step}" if self.run else self.path.rstrip("/").replace("\\", "/").split("/")[-1]

    def __str__(self) -> str:
        return f"step {self.step} of {self.run}" if self.run else self.path


def find(given: str | None, run: Path | None, base: str) -> Source:
    """Return the model `given`, else the newest checkpoint of `run`, else `base`. Raises ConfigError."""
    if given is None:
        whole = checkpoints.complete(run) if run else []
        return _of_checkpoint(whole[-1]) if whole else Source(base)
    folder = Path(os.path.expanduser(given))
    if not folder.is_dir():
        if folder.exists() or given.startswith((".", "/", "~")) or given.count("/") > 1:
            raise _error(given, "the folder does not exist")
        return Source(given)
    folder = folder.absolute()
    if folder.name == WEIGHTS and _is_checkpoint(folder.parents[1]):
        folder = folder.parents[1]
    if _is_checkpoint(folder):
        return _of_checkpoint(folder)
    if whole := checkpoints.complete(folder):
        return _of_checkpoint(whole[-1])
    if (folder / "config.json").is_file():
        return Source(str(folder))
    if (folder / "config.yaml").is_file():
        raise _error(given, "the run has no complete checkpoint yet (trainer.save_freq)")
    raise _error(given, "the folder has neither config.json nor a complete global_step_N")


def _is_checkpoint(folder: Path) -> bool:
    return re.fullmatch(r"global_step_\d+", folder.name) is not None


def _of_checkpoint(folder: Path) -> Source:
    if not (folder / checkpoints.MARKER).exists():
        others = ", ".join(path.name for path in checkpoints.complete(folder.parent)) or "none"
        raise _error(str(folder), f"the checkpoint is incomplete (no {checkpoints.MARKER}); complete ones: {others}")
    weights = [folder / trained / WEIGHTS for trained in (POLICY, REWARD_MODEL)]
    found = next((each for each in weights if (each / "config.json").is_file()), None)
    if found is None:
        raise _error(str(folder), f"the checkpoint has neither {POLICY}/{WEIGHTS} nor {REWARD_MODEL}/{WEIGHTS}")
    return Source(str(found), checkpoints.read_state(folder)["step"], folder.parent)


def _error(given: str, why: str) -> ConfigError:
    return ConfigError(
        [f"CHECKPOINT {given}: {why}; use a global_step_N folder, a run folder, a Hugging Face folder or a hub name"]
    )
