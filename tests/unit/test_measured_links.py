"""Files of measured links between nodes: validation, rounds of pairs, and use in cluster files."""

from collections import Counter
from itertools import chain, combinations

import pytest
import yaml
from test_plan_search import CLUSTER

from rlfuse.tools.planning.cluster_file import ClusterError, read_cluster
from rlfuse.tools.planning.link_probe import SIZES, _fitted, rounds_of
from rlfuse.tools.planning.node_order import LinksError, MeasuredLinks, Pair, read_links, write_links

THREE = MeasuredLinks(
    "gloo", ("a", "b", "c"), (Pair("a", "b", 10.0, 20.0), Pair("c", "a", 2.0, 50.0), Pair("b", "c", 5.0, 30.0))
)


@pytest.mark.parametrize("count", range(2, 10))
def test_rounds_contain_every_pair_once_and_no_node_twice_per_round(count):
    rounds = rounds_of(count)
    assert sorted(chain(*rounds)) == list(combinations(range(count), 2))
    assert len(rounds) == count - 1 + count % 2
    assert all(max(Counter(chain(*pairs)).values()) == 1 for pairs in rounds)


def test_latency_and_bandwidth_are_fitted_from_several_message_sizes():
    latency, rate = _fitted([2e-4 + size / 5e8 for size in SIZES])
    assert latency == pytest.approx(2e-4) and rate == pytest.approx(5e8)


def test_file_round_trip_and_scaling_to_the_fastest_pair(tmp_path):
    write_links(THREE, tmp_path / "links.yaml")
    assert read_links(tmp_path / "links.yaml") == THREE
    links = THREE.scaled(100e9)
    assert links.bytes_per_s[0][1] == links.bytes_per_s[1][0] == 100e9
    assert links.bytes_per_s[0][2] == 20e9 and links.seconds[2][0] == pytest.approx(50e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": [{"first": "a", "second": "b", "gbs": 1, "us": 1}]}, "a-c, b-c are missing"),
        ({"nodes": ["a", "b", "c", "a"]}, "a node is listed twice"),
        ({"pairs": [{"first": "a", "second": "x", "gbs": 1, "us": 1}]}, "a-x have nodes that are not in `nodes`"),
        ({"pairs": [{"first": "a", "second": "b", "gbs": 0, "us": 1}]}, "pairs[0].gbs=0"),
        ({"over": 3}, "over=3"),
    ],
)
def test_errors_are_reported_with_file_and_field(tmp_path, change, message):
    path = tmp_path / "links.yaml"
    write_links(THREE, path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(LinksError) as caught:
        read_links(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_cluster_file_refers_to_links_by_relative_path_and_uses_the_best_ring(tmp_path):
    write_links(THREE, tmp_path / "links.yaml")
    path = tmp_path / "cluster.yaml"
    given = CLUSTER | {"nodes": 3, "links": {"measured": "links.yaml", "between_gbs": 40}}
    path.write_text(yaml.safe_dump(given))
    links = read_cluster(path).hardware().links
    assert links.between_bytes_per_s == pytest.approx(8e9), "with three nodes, every ring contains all pairs"
    assert links.between_s == pytest.approx(50e-6)
    path.write_text(yaml.safe_dump(given | {"nodes": 4}))
    with pytest.raises(ClusterError, match="has 3 nodes, but nodes=4; measure the nodes that you plan for"):
        read_cluster(path).hardware()
