"""Presets of devices in cluster files: what a file leaves out, and how much of the device's peak is believed."""

import pytest
import yaml

from rlfuse.planning.cluster_file import ClusterError, read_cluster
from rlfuse.planning.presets import PRESETS


def cluster(folder, **fields):
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(fields))
    return read_cluster(path)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_the_file_leaves_out(name, tmp_path):
    known, found = PRESETS[name], cluster(tmp_path, nodes=4, preset=name)
    assert found.devices == 4 * known.fields["devices_per_node"] and found.device == "cuda"
    hardware = found.hardware()
    assert hardware.train_flops == pytest.approx(known.fields["peak_tflops"] * 1e12 * found.utilization)
    assert hardware.links.within_bytes_per_s == known.fields["links"]["within_gbs"] * 1e9
    assert "arXiv" in known.source


def test_what_the_file_says_counts_also_of_one_link(tmp_path):
    found = cluster(tmp_path, nodes=1, preset="mi250x", device_memory_gb=60, links={"between_gbs": 25})
    assert (found.device_memory_gb, found.links.between_gbs, found.links.within_gbs) == (60, 25, 50)


def test_a_devices_own_published_share_of_its_peak_bounds_what_is_believed(tmp_path):
    with pytest.raises(ClusterError, match=r"utilization=0.45: nobody published more than 0.384 of mi250x; lower it"):
        cluster(tmp_path, nodes=1, preset="mi250x", utilization=0.45)
    assert cluster(tmp_path, nodes=1, preset="ascend910", utilization=0.45).utilization == 0.45


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preset": "mi300"}, r"preset='mi300': needs one of mi250x, ascend910"),
        ({"preset": ["mi250x"]}, r"preset=\['mi250x'\]: needs one of"),
        ({"preset": "mi250x", "links": 3}, r"links=3: needs an object with within_gbs"),
    ],
)
def test_what_is_wrong_is_named(fields, message, tmp_path):
    with pytest.raises(ClusterError, match=message):
        cluster(tmp_path, nodes=1, **fields)
