"""What a pipeline schedule is made of: words that the search, the executor and pictures have in common. Plain data."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W", "H"]


class Operation(NamedTuple):
    """One stage of one pipeline of a model works on one micro-batch.

    kind: `F` forward; `B` backward, of inputs alone where the backward pass is split, else whole; `W` the gradients of
    weights, where it is split; `H` a share of the head, where all devices of a pipeline have one: they compute it
    together, forward and backward. stage: of the pipeline, or chunk-stage where devices hold several chunks; of `H` the
    device's first.
    """

    model: str
    pipeline: int
    stage: int
    micro_batch: int
    kind: Kind


def direction_of(model: str, split: bool) -> Literal["down", "up"]:
    """Opposite for actor and critic, so that one's first stages fill the bubbles of the other's last ones.

    For the reference the one in which it fills more beside the actor: searched for 2 to 8 stages and as many or
    twice as many micro-batches, `up` is shorter by about a tenth where weights' gradients are apart, else `down`.
    """
    return "up" if model == "critic" or (model == "ref" and split) else "down"


def place_of(stage: int, stages: int, placement: str) -> int:
    """Of a (chunk-)stage, the device, counted from that of stage 0; a pipeline has as many devices as `stages`.

    `placement`: `v`, there and back (Qi et al. 2024, arXiv 2405.15362), or `interleaved`, round and round (Narayanan et
    al. 2021, arXiv 2104.04473). Example: of 2 devices stages 0 .. 3 stand on 0, 1, 1, 0 or on 0, 1, 0, 1.
    """
    turn, place = divmod(stage, stages)
    return place if placement == "interleaved" or turn % 2 == 0 else stages - 1 - place


def shared_head(head: Operation) -> Operation:
    """What names the `H` of all devices that compute one head together."""
    return head._replace(stage=0)


Rows = tuple[tuple[Operation, ...], ...]  # device -> its operations in the order in which it runs them
