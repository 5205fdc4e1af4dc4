"""Order nodes so that a plan's exchanges take least time over links that differ (Pipette, arXiv 2405.18093)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Annotated

import yaml

from rlfuse.config.input_files import AtLeastZero, InputError, Positive, Schema, read_yaml
from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import ITEM
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.files import write_atomically
from rlfuse.tools.planning.exchanges import parameters_per_rank

MAX_EXHAUSTIVE_NODES = 7  # nodes of which every order is tried
TRIES, STARTS = 4000, 4  # changes of an order, and orders that are begun from
FINAL_TEMPERATURE = 1e-3  # share of the first order's seconds at which annealing ends


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """Between every two nodes, either way."""

    names: tuple[str, ...]
    bytes_per_s: tuple[tuple[float, ...], ...]
    seconds: tuple[tuple[float, ...], ...]  # until the first byte is there


@dataclass(frozen=True, slots=True)
class NodeTraffic:
    """What a step sends between nodes: bytes, and how many messages wait for one another."""

    ring_bytes: float  # of a device on each link of a ring of ranks that have the same stage
    ring_hops: int
    stage_bytes: float  # from stage to stage of a pipeline
    stage_messages: int
    nodes: int  # that are used, the first of an order
    nodes_per_pipeline: int = 1


def node_traffic(config: Config, shape: Shape, tokens: int) -> NodeTraffic:
    """Return what a step over `tokens` sends of one model. Each micro-batch scatters sharded gradients and gathers
    sharded weights twice; otherwise it is once per mini-batch."""
    training, actor, item = config.training, config.actor, ITEM[config.model.dtype]
    stages, each = training.pipeline_parallel_size, config.trainer.n_gpus_per_node
    pipeline = config.slots // config.mesh.copies  # its devices
    wide, mine = max(1, pipeline // each), tokens / (config.slots // pipeline)
    chunks = training.virtual_pipeline_model_parallel_size
    mini_batches = -(-config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
    micro_batches = max(mini_batches, -(-mine * actor.ppo_epochs // actor.ppo_max_token_len_per_gpu))
    times = micro_batches + mini_batches if config.sharded_gradients else 2 * mini_batches
    times = 3 * micro_batches if config.sharded_weights else times
    nodes = config.trainer.nnodes
    around = parameters_per_rank(config, shape) * item / stages / max(1, each // pipeline) * times
    return NodeTraffic(
        ring_bytes=around,
        ring_hops=int(times * max(0, nodes // wide - 1)),
        stage_bytes=2 * chunks * mine * shape.hidden * item if wide > 1 else 0.0,
        stage_messages=int(2 * chunks * micro_batches) if wide > 1 else 0,
        nodes=nodes,
        nodes_per_pipeline=wide,
    )


def exchange_seconds(order: Sequence[int], links: NodeLinks, sent: NodeTraffic) -> float:
    """Of the slowest ring and the slowest pipeline, over nodes in this order."""
    used, wide = order[: sent.nodes], sent.nodes_per_pipeline
    rings = [_slowest(path, links, sent.ring_bytes, sent.ring_hops) for path in _rings(used, wide)]
    lines = [_slowest(path, links, sent.stage_bytes, sent.stage_messages) for path in _pipelines(used, wide)]
    return max(rings, default=0.0) + max(lines, default=0.0)


def _slowest(path: Sequence[int], links: NodeLinks, size: float, messages: int) -> float:
    return max(
        (size / links.bytes_per_s[a][b] + messages * links.seconds[a][b] for a, b in pairwise(path)), default=0.0
    )


def _rings(order: Sequence[int], wide: int) -> Iterator[list[int]]:
    for place in range(wide):
        nodes = list(order[place::wide])
        if len(nodes) > 1:
            yield [*nodes, nodes[0]]


def _pipelines(order: Sequence[int], wide: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(order), wide):
        yield order[first : first + wide]


def best_order(links: NodeLinks, sent: NodeTraffic, seed: int = 0) -> tuple[int, ...]:
    """Nodes by their places in `links`, the order that takes least."""
    given = tuple(range(len(links.names)))
    if len(given) <= MAX_EXHAUSTIVE_NODES:
        return min(permutations(given), key=lambda order: exchange_seconds(order, links, sent))
    draw = random.Random(seed)
    found = [_annealed(given, links, sent, draw)]
    found += [_annealed(draw.sample(given, len(given)), links, sent, draw) for _ in range(STARTS - 1)]
    return min((given, *found), key=lambda order: exchange_seconds(order, links, sent))


def _annealed(start: Sequence[int], links: NodeLinks, sent: NodeTraffic, draw: random.Random) -> tuple[int, ...]:
    """Reverse stretches or swap nodes; accept slower orders with falling probability."""
    now = best = list(start)
    taken = least = exchange_seconds(now, links, sent)
    for tried in range(TRIES):
        temperature = taken * FINAL_TEMPERATURE ** ((tried + 1) / TRIES) / 4
        other = _changed(now, draw)
        seconds = exchange_seconds(other, links, sent)
        if seconds <= taken or draw.random() < math.exp((taken - seconds) / max(temperature, 1e-12)):
            now, taken = other, seconds
            if taken < least:
                best, least = now, taken
    return tuple(best)


def _changed(order: Sequence[int], draw: random.Random) -> list[int]:
    first, last = sorted(draw.sample(range(len(order)), 2))
    other = list(order)
    if draw.random() < 0.5:
        other[first : last + 1] = other[first : last + 1][::-1]
    else:
        other[first], other[last] = other[last], other[first]
    return other


Text = Annotated[str, Schema(type="string", minLength=1)]


class LinksError(InputError):
    """A file of links that can't be used, or links that can't be measured."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two nodes, of which each sends as much as it receives."""

    first: Text
    second: Text
    gbs: Positive  # gB/s of one process on each, while no other sends
    us: AtLeastZero  # microseconds of an empty message


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """What the file holds."""

    over: Text  # `gloo` or `nccl`
    nodes: tuple[Text, ...]  # addresses, or ids where they share one: names for cluster.node_order
    pairs: tuple[Pair, ...]

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise LinksError(*problems)

    def _problems(self) -> Iterator[str]:
        wanted = {frozenset(pair) for pair in combinations(self.nodes, 2)}
        given = [frozenset((pair.first, pair.second)) for pair in self.pairs]
        if len(set(self.nodes)) < len(self.nodes):
            yield "nodes: a name stands there twice; name each node once"
        if strange := set(given) - wanted:
            yield f"pairs: {_named(strange)} are no two of the nodes; name nodes as in the list"
        if missing := wanted - set(given):
            yield f"pairs: {_named(missing)} were not measured; `rlfuse calibrate --links` measures all"
        if len(set(given)) < len(given):
            yield "pairs: one stands there twice; name each once"

    def scaled(self, fastest_bytes_per_s: float) -> NodeLinks:
        most = max(pair.gbs for pair in self.pairs)
        of = {frozenset((pair.first, pair.second)): pair for pair in self.pairs}
        rates, waits = [], []
        for a in self.nodes:
            row = [of.get(frozenset((a, b))) for b in self.nodes]
            rates.append(tuple(fastest_bytes_per_s * pair.gbs / most if pair else float("inf") for pair in row))
            waits.append(tuple(pair.us * 1e-6 if pair else 0.0 for pair in row))
        return NodeLinks(self.nodes, tuple(rates), tuple(waits))


def _named(pairs: Iterable[frozenset[str]]) -> str:
    return ", ".join(sorted("-".join(sorted(pair)) for pair in pairs))


def write_links(links: MeasuredLinks, path: Path) -> None:
    """Write them as YAML. NotWritable where no file can be made there."""
    given = asdict(links) | {"nodes": list(links.nodes), "pairs": [asdict(pair) for pair in links.pairs]}
    write_atomically(path, yaml.safe_dump(given, sort_keys=False, default_flow_style=None, width=100))


def read_links(path: Path) -> MeasuredLinks:
    """Raises LinksError, naming the file and each field that is wrong."""
    return read_yaml(path, MeasuredLinks, LinksError, "`rlfuse calibrate --links` writes such a file")
