"""Sampling parameters of training and validation responses."""

from __future__ import annotations

from rlfuse.config.rollout import RolloutConfig, ValKwargs
from rlfuse.config.schema import Config
from rlfuse.protocols import Sampling


def training(config: Config) -> Sampling:
    """Return the sampling parameters of training responses."""
    return _sampling(config.rollout, config)


def validation(config: Config) -> Sampling:
    """Return the sampling parameters of validation, in a run and in `rlfuse eval`."""
    return _sampling(config.rollout.val_kwargs, config)


def _sampling(drawn: RolloutConfig | ValKwargs, config: Config) -> Sampling:
    longest, stop = config.data.max_response_length, tuple(config.rollout.stop)
    return Sampling(drawn.temperature, drawn.top_p, drawn.top_k, longest, drawn.min_p, stop)
