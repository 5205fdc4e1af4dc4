"""Two stages of a policy, each in its own process on one GPU, against the whole model in one process.

(3) of README.md. NCCL rejects two ranks on one device, and gloo's send and recv need host memory: the ranks use
gloo, and `ThroughHost` passes tensors between stages through host memory. Schedule, posting of
receives, stages and gradients are those of a run; NCCL is not covered, as it needs two GPUs.
"""

import pytest

pytest.importorskip("omegaconf")
from numpy.linalg import norm
from processes import in_ranks
from small import make_rows, policy_folder, settings

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.loading import load_stage
from rlfuse.engines.pipeline.partition import parts
from rlfuse.engines.pipeline.schedule_executor import ScheduleExecutor
from rlfuse.engines.pipeline.stages import Stage
from rlfuse.engines.trainer.micro_batch_losses import actor_loss
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import load_policy
from rlfuse.fusion.schedules.operations import Operation
from rlfuse.samples import MicroBatch

LAYERS, COUNT = (2, 1), 4


class ThroughHost:
    """A stage that exchanges tensors with its neighbours in host memory."""

    device = "cpu"

    def __init__(self, stage):
        self.stage, self.dtype, self.shape = stage, stage.dtype, stage.shape
        self.weight_gradients = stage.weight_gradients

    def forward(self, micro_batch, received, training):
        return self._home(self.stage.forward(micro_batch, self._there(received), training))

    def backward(self, micro_batch, gradient, whole):
        return self._home(self.stage.backward(micro_batch, self._there(gradient), whole))

    def _there(self, tensor):
        return None if tensor is None else tensor.to(self.stage.device)

    @staticmethod
    def _home(tensor):
        return None if tensor is None else tensor.cpu()


def _micro_batches():
    rows = make_rows(2 * COUNT, seed=1)
    return [MicroBatch(rows[2 * i : 2 * i + 2], 1.0) for i in range(COUNT)]


def _rows(split):
    """Return the 1F1B rows of two stages, with W right after its B if the backward pass is split."""

    def operation(stage, number, kind):
        return Operation("actor", 0, stage, number, kind)

    def backward(stage, number):
        return [operation(stage, number, kind) for kind in ("BW" if split else "B")]

    first, last = [operation(0, 0, "F")], []
    for i in range(COUNT):
        first += [operation(0, i + 1, "F")] * (i + 1 < COUNT) + backward(0, i)
        last += [operation(1, i, "F"), *backward(1, i)]
    return tuple(first), tuple(last)


def _stage_gradients(device, folder, split):
    layout = [Pipelines("actor", 2)]
    executor, config = ScheduleExecutor(layout, timeout=120.0), settings(folder)
    part = parts(LAYERS)[executor.device]
    model = load_stage(folder, config.model, device, part, False).train()
    stage = Stage(config, "actor", model, part, True, device)
    stage.begin(_micro_batches())
    timed = executor.run(_rows(split), {("actor", executor.device): ThroughHost(stage)})
    executor.close()
    return _gradients(model), {name: float(value) for name, value in stage.sums.items()}, len(timed)


def _whole_gradients(device, folder):
    config = settings(folder)
    model = load_policy(folder, config.model).to(device).train()
    for micro_batch in _micro_batches():
        actor_loss(config, model, collate(micro_batch.rows, True, device))[0].backward()
    return _gradients(model)


def _gradients(model):
    return {name: parameter.grad.cpu().numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("split", [False, True])
def test_two_processes_give_the_gradients_of_one(device, tmp_path, split):
    folder = policy_folder(tmp_path, layers=sum(LAYERS))
    first, last = in_ranks(2, _stage_gradients, device, folder, split)
    expected = _whole_gradients(device, folder)
    found = first[0] | last[0]
    assert found.keys() == expected.keys() and not first[0].keys() & last[0].keys()
    difference = max(float(norm(found[name] - each) / norm(each)) for name, each in expected.items())
    print(f"split {split}: gradients differ by at most {difference:.1e} of their norm")
    assert difference < 1e-5
    assert last[1] and first[2] == last[2] == COUNT * (3 if split else 2)
