"""Write and read the file of measured links between nodes (`rlfuse calibrate --links`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated

import yaml

from rlfuse.config.input_files import AtLeastZero, InputError, Positive, Schema, read
from rlfuse.files import write_whole
from rlfuse.parsing import parse_yaml
from rlfuse.planning.node_order import NodeLinks

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
        """With the fastest pair at this rate and the others in proportion."""
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
    write_whole(path, yaml.safe_dump(given, sort_keys=False, default_flow_style=None, width=100))


def read_links(path: Path) -> MeasuredLinks:
    """Raises LinksError, naming the file and each field that is wrong."""
    try:
        data = parse_yaml(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LinksError(f"{path}: can't be read: {error}; `rlfuse calibrate --links` writes such a file") from error
    try:
        return read(MeasuredLinks, data, LinksError)
    except LinksError as error:
        raise LinksError(*(f"{path}: {problem}" for problem in error.problems)) from None
