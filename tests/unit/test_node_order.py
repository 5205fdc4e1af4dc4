"""Node order with minimal exchange time: optimal for few nodes, and never worse than the given order."""

import random
from itertools import permutations

import pytest

from rlfuse.tools.planning import node_order
from rlfuse.tools.planning.node_order import NodeLinks, NodeTraffic, best_order, exchange_seconds

RING = NodeTraffic(ring_bytes=1e9, ring_hops=10, stage_bytes=0.0, stage_messages=0, nodes=99)
PIPELINES = NodeTraffic(ring_bytes=1e8, ring_hops=4, stage_bytes=1e9, stage_messages=16, nodes=99, nodes_per_pipeline=2)
FOUR = NodeTraffic(ring_bytes=1e9, ring_hops=10, stage_bytes=0.0, stage_messages=0, nodes=4)


def random_links(count, seed):
    """Draw links whose bandwidths have a long tail of slow ones."""
    draw = random.Random(seed)
    rates = {(a, b): 25e9 / (1 + draw.paretovariate(1.5) - 1) for a in range(count) for b in range(a)}
    speed = tuple(tuple(rates.get((a, b), rates.get((b, a), 1e12)) for b in range(count)) for a in range(count))
    return NodeLinks(tuple(f"n{n}" for n in range(count)), speed, ((2e-5,) * count,) * count)


def brute_force(links, sent):
    return min(exchange_seconds(order, links, sent) for order in permutations(range(len(links.names))))


@pytest.mark.parametrize("sent", [RING, PIPELINES, FOUR])
@pytest.mark.parametrize("seed", range(3))
def test_order_of_few_nodes_is_optimal(seed, sent):
    links = random_links(6, seed)
    order = best_order(links, sent)
    assert sorted(order) == list(range(6)) and exchange_seconds(order, links, sent) == brute_force(links, sent)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [RING, PIPELINES])
def test_annealing_finds_the_optimum(sent, monkeypatch):
    monkeypatch.setattr(node_order, "MAX_EXHAUSTIVE_NODES", 0)
    links = random_links(6, 7)
    assert exchange_seconds(best_order(links, sent), links, sent) == pytest.approx(brute_force(links, sent))


@pytest.mark.slow
@pytest.mark.parametrize("sent", [RING, PIPELINES])
def test_order_of_many_nodes_is_better_than_the_given_order(sent):
    links = random_links(16, 3)
    order = best_order(links, sent)
    assert sorted(order) == list(range(16))
    assert exchange_seconds(order, links, sent) < 0.7 * exchange_seconds(range(16), links, sent), (
        "slow links are avoided"
    )


def test_ring_time_is_that_of_its_slowest_link_including_the_closing_one():
    links = random_links(3, 1)
    pairs = [(0, 1), (1, 2), (2, 0)]
    expected = max(RING.ring_bytes / links.bytes_per_s[a][b] + RING.ring_hops * links.seconds[a][b] for a, b in pairs)
    assert exchange_seconds((0, 1, 2), links, RING) == expected


def test_stages_exchange_data_only_within_their_pipeline():
    speed = ((1e12, 1e9, 1e6, 1e6), (1e9, 1e12, 1e6, 1e6), (1e6, 1e6, 1e12, 1e9), (1e6, 1e6, 1e9, 1e12))
    links = NodeLinks(("a", "b", "c", "d"), speed, ((0.0,) * 4,) * 4)
    sent = NodeTraffic(ring_bytes=0.0, ring_hops=0, stage_bytes=1e9, stage_messages=1, nodes=4, nodes_per_pipeline=2)
    assert exchange_seconds((0, 1, 2, 3), links, sent) == 1.0 and exchange_seconds((0, 2, 1, 3), links, sent) == 1000.0
    assert exchange_seconds(best_order(links, sent), links, sent) == 1.0
