"""Operations of pipeline schedules, shared by search, executor and plots. Plain data."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W", "H"]


class Operation(NamedTuple):
    """The work of one stage of one pipeline of a model on one micro-batch.

    kind: `F` forward; `B` backward (of inputs only, if the backward pass is split); `W` gradients of weights, if it is
    split; `H` forward and backward of one share of a head that all devices of a pipeline compute jointly. stage: of the
    pipeline, or chunk-stage if devices hold several chunks; for `H`, the first stage of the device.
    """

    model: str
    pipeline: int
    stage: int
    micro_batch: int
    kind: Kind


def direction_of(model: str, split: bool) -> Literal["down", "up"]:
    """Return the direction of a model's pipelines.

    Actor and critic run in opposite directions, so that the first stages of one fill the bubbles of the other's last
    stages. The reference model uses the direction with shorter searched schedules, for 2 to 8 stages and 1x or 2x as
    many micro-batches: `up` (by about 10 %) if the backward pass is split, else `down`.
    """
    return "up" if model == "critic" or (model == "ref" and split) else "down"


def place_of(stage: int, stages: int, placement: str) -> int:
    """Return the device of a (chunk-)stage, relative to that of stage 0, for a pipeline on `stages` devices.

    `placement`: `v`, V-shaped (Qi et al. 2024, arXiv 2405.15362), or `interleaved` (Narayanan et al. 2021,
    arXiv 2104.04473). Example: on 2 devices, stages 0 .. 3 are on 0, 1, 1, 0 (`v`) or on 0, 1, 0, 1 (`interleaved`).
    """
    turn, place = divmod(stage, stages)
    return place if placement == "interleaved" or turn % 2 == 0 else stages - 1 - place


def shared_head(head: Operation) -> Operation:
    """Return the key shared by the `H` of all devices that compute one head jointly."""
    return head._replace(stage=0)


Rows = tuple[tuple[Operation, ...], ...]  # device -> its operations in the order in which it runs them
