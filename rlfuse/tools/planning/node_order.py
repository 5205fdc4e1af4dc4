"""Order nodes to minimize the communication time of a plan over unequal links (Pipette, arXiv 2405.18093)."""

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

MAX_EXHAUSTIVE_NODES = 7  # up to this many nodes, all orders are tried
TRIES, STARTS = 4000, 4  # steps of simulated annealing, and initial orders
FINAL_TEMPERATURE = 1e-3  # final temperature, as a share of the seconds of an order


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """Bandwidth and latency between every two nodes, symmetric."""

    names: tuple[str, ...]
    bytes_per_s: tuple[tuple[float, ...], ...]
    seconds: tuple[tuple[float, ...], ...]  # latency


@dataclass(frozen=True, slots=True)
class NodeTraffic:
    """Inter-node traffic of a step: bytes, and numbers of sequential messages."""

    ring_bytes: float  # per device on each link of a data-parallel ring
    ring_hops: int
    stage_bytes: float  # between consecutive pipeline stages
    stage_messages: int
    nodes: int  # number of nodes used: the first of an order
    nodes_per_pipeline: int = 1


def node_traffic(config: Config, shape: Shape, tokens: int) -> NodeTraffic:
    """Return the inter-node traffic of one model in a step over `tokens`. Each micro-batch reduces sharded gradients
    and gathers sharded weights twice; otherwise ranks communicate once per mini-batch."""
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
    """Return the seconds of the slowest ring plus the slowest pipeline, with the nodes in this order."""
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
    """Return the fastest order of the nodes, as indices into `links`."""
    given = tuple(range(len(links.names)))
    if len(given) <= MAX_EXHAUSTIVE_NODES:
        return min(permutations(given), key=lambda order: exchange_seconds(order, links, sent))
    draw = random.Random(seed)
    found = [_annealed(given, links, sent, draw)]
    found += [_annealed(draw.sample(given, len(given)), links, sent, draw) for _ in range(STARTS - 1)]
    return min((given, *found), key=lambda order: exchange_seconds(order, links, sent))


def _annealed(start: Sequence[int], links: NodeLinks, sent: NodeTraffic, draw: random.Random) -> tuple[int, ...]:
    """Anneal an order by reversing segments or swapping nodes; slower orders are accepted with falling probability."""
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
    """Invalid file of links."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Measured full-duplex link between two nodes."""

    first: Text
    second: Text
    gbs: Positive  # GB/s of one process per node, without other traffic
    us: AtLeastZero  # latency in microseconds


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """Contents of `links.yaml`."""

    over: Text  # `gloo` or `nccl`
    nodes: tuple[Text, ...]  # addresses, or node ids if nodes share one; as in cluster.node_order
    pairs: tuple[Pair, ...]

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise LinksError(*problems)

    def _problems(self) -> Iterator[str]:
        expected = {frozenset(pair) for pair in combinations(self.nodes, 2)}
        given = [frozenset((pair.first, pair.second)) for pair in self.pairs]
        if len(set(self.nodes)) < len(self.nodes):
            yield "nodes: a node is listed twice; list each node once"
        if unknown := set(given) - expected:
            yield f"pairs: {_named(unknown)} have nodes that are not in `nodes`; use the names listed there"
        if missing := expected - set(given):
            yield f"pairs: {_named(missing)} are missing; measure all pairs with `rlfuse calibrate --links`"
        if len(set(given)) < len(given):
            yield "pairs: a pair is listed twice; list each pair once"

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
    """Write measured links as YAML. Raises NotWritable."""
    given = asdict(links) | {"nodes": list(links.nodes), "pairs": [asdict(pair) for pair in links.pairs]}
    write_atomically(path, yaml.safe_dump(given, sort_keys=False, default_flow_style=None, width=100))


def read_links(path: Path) -> MeasuredLinks:
    """Read and validate a file of links. Raises LinksError, naming each invalid field."""
    return read_yaml(path, MeasuredLinks, LinksError, "`rlfuse calibrate --links` writes such a file")
