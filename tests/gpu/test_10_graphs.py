"""Passes as CUDA graphs: log-probs and gradients of eager passes, with few launches, and memory that is released.

(10) of README.md. On CPUs tests/unit/test_cuda_graphs.py runs the same code with emulated graphs.
"""

import pytest

pytest.importorskip("omegaconf")
import torch
from small import make_rows, policy_folder, settings

from rlfuse.engines.trainer.cuda_graphs import PassGraphs
from rlfuse.engines.trainer.micro_batch_losses import actor_loss, log_probs
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import load_policy
from rlfuse.events import Recorder

SIZES = (512, 1024)
WORKSPACES = 256 << 20
"""Bytes of cuBLAS workspaces of the capture streams, which are not released."""


def _pass(config, model, batch):
    """Return log-probs, and the accumulated gradients of two passes."""
    for parameter in model.parameters():
        parameter.grad = None
    with torch.no_grad():
        found = [log_probs(config, model, batch).clone()]
    for _ in range(2):
        actor_loss(config, model, batch)[0].backward()
    return found + [parameter.grad.clone() for parameter in model.parameters()]


def _launches(body, *arguments):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        body(*arguments)
    return sum(each.count for each in profile.key_averages() if each.key in ("cudaLaunchKernel", "cudaGraphLaunch"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graph_passes_equal_eager_passes(device, tmp_path, dtype):
    if device == "cpu":
        pytest.skip("there are no CUDA graphs on CPUs")
    config = settings(policy_folder(tmp_path), dtype)
    config.actor.use_kl_loss = False
    model = load_policy(str(tmp_path), config.model).to(device)
    batches = [collate(make_rows(count), True, device, shared=True, sizes=SIZES) for count in (6, 12, 16)]
    assert {batch.inputs["input_ids"].shape[1] for batch in batches} <= set(SIZES)
    expected = [_pass(config, model, batch) for batch in batches]
    launched = _launches(_pass, config, model, batches[0])
    before = torch.cuda.memory_allocated()
    graphs = PassGraphs({"actor": model}, SIZES, Recorder("trainer/0"))
    for _ in range(2):
        found = [_pass(config, model, batch) for batch in batches]
        assert graphs.sizes == SIZES, "a pass could not be captured"
        pairs = [pair for both in zip(found, expected, strict=True) for pair in zip(*both, strict=True)]
        worst = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
        assert worst <= {"float32": 1e-5, "bfloat16": 2e-2}[dtype], worst
    replayed = _launches(_pass, config, model, batches[0])
    more = torch.cuda.memory_allocated() - before
    print(f"{dtype}: {launched} launches, {replayed} with graphs; {more} bytes more; numbers differ by {worst:.1e}")
    assert replayed < launched / 3
    graphs.stop("the test ends")
    del found, pairs
    assert torch.cuda.memory_allocated() <= before + WORKSPACES
