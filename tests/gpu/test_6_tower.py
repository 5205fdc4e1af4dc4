"""Vision towers on the device: embeddings and gradients of the CPU, bitwise equal for any split of a clip.

(6) of README.md. Needs torch and transformers. Patches are embedded by a convolution, which GPUs compute in TF32
by default: hence the tolerance, and `tf32` in what is printed.
"""

import pytest
import torch

from rlfuse.tasks.small_video_models import SmallModel, write_small_qwen25_vl, write_small_video_llama3
from rlfuse.video.towers import Tower

WRITERS = {"video_llama3": write_small_video_llama3, "qwen25_vl": write_small_qwen25_vl}


def write_tower(folder, family):
    """Save a small video model of the family."""
    return WRITERS[family](folder, SmallModel(heads=4, tower_heads=4, tower_layers=2, spread=0.05))


@pytest.fixture(scope="module", params=WRITERS)
def folder(request, tmp_path_factory):
    return write_tower(tmp_path_factory.mktemp(request.param), request.param)


def _frames(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 84, 112, 3), dtype=torch.uint8, generator=generator)


def _difference(ours, theirs):
    return float((ours.float().cpu() - theirs.float()).norm() / theirs.float().norm())


def test_embeddings_equal_those_of_the_cpu(device, folder):
    frames, home = _frames(6), Tower(folder)
    expected = home.encode(frames)
    for dtype, limit in (("float32", 2e-3), ("bfloat16", 5e-2)):
        tower = Tower(folder, device, dtype, step=2)
        found = tower.encode(frames)
        print(f"{dtype}: differ by {_difference(found, expected):.1e}; tf32 {torch.backends.cudnn.allow_tf32}")
        assert found.device.type == device and _difference(found, expected) < limit
    assert Tower(folder, device).version == home.version


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_clip_split_in_two_is_bitwise_equal(device, folder, dtype):
    tower, frames = Tower(folder, device, dtype, step=2), _frames(12)
    cut = tower.shape.cut
    whole, halves = tower.encode(frames), [tower.encode(part) for part in (frames[:cut], frames[cut:])]
    assert torch.equal(whole, torch.cat(halves))


def test_gradients_equal_those_of_the_cpu(device, folder):
    frames, gradients = _frames(4), []
    for where in (device, "cpu"):
        tower = Tower(folder, where, trainable=True)
        tower.encode(frames).square().sum().backward()
        gradients.append({name: each.grad for name, each in tower.module.named_parameters()})
    differences = {
        name: _difference(gradients[0][name], each) for name, each in gradients[1].items() if each.norm() > 1e-3
    }
    print(f"gradients differ by at most {max(differences.values()):.1e}")
    assert len(differences) > 10 and max(differences.values()) < 2e-2
