"""The engine core's step by part, and the kernels of a step: imported by vLLM's workers for `gpu_profile.py`.

With one device the workers are in the engine core's process, whose own parts do not exist yet at import.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from part_times import collected, kernel_rows, noted, spent, timed
from torch.profiler import ProfilerActivity, profile
from vllm.v1.engine.core import EngineCore
from vllm.v1.serial_utils import MsgpackEncoder

from rlfuse.engines.vllm.worker_extension import WorkerExtension

STEP, DEVICE = "engine core: a step", "device: first to last kernel of a step"
RUNNER = ("add_requests", "update_requests", "gather_batch_req_state", "prepare_inputs", "prepare_attn", "sample",
          "postprocess_sampled")  # fmt: skip
kernels_at: list[list[Any]] = []
"""CUDA events around the kernels of each step."""


def instrument_core() -> None:
    gc.callbacks.append(collected)
    timed(MsgpackEncoder, "encode_into", "output thread: encode")
    with suppress(ImportError):  # the second model runner
        _instrument_runner()
    for name in ("step", "step_with_batch_queue"):
        setattr(EngineCore, name, _stepped(getattr(EngineCore, name)))


def _instrument_runner() -> None:
    from vllm.v1.worker.gpu import async_utils, cudagraph_utils, model_runner

    for name in RUNNER:
        timed(model_runner.GPUModelRunner, name, f"    runner.{name}")
    timed(cudagraph_utils.ModelCudaGraphManager, "run_fullgraph", "    runner.run_fullgraph (launch)")
    get = async_utils.AsyncOutput.get_output

    def get_output(self: Any) -> Any:
        with noted("  wait for the device"):
            self.copy_event.synchronize()
        return get(self)

    async_utils.AsyncOutput.get_output = get_output


def _stepped(inner: Callable) -> Callable:
    def stepped(self: Any) -> Any:
        if Extension.core is None:
            Extension.core = self
            for name in ("schedule", "update_from_output"):
                timed(self.scheduler, name, f"  {name}")
            for name in ("execute_model", "sample_tokens"):
                timed(self.model_executor, name, f"  {name} (host side)")
                call = getattr(self.model_executor, name)
                setattr(self.model_executor, name, _marked(call, last=name == "sample_tokens"))
        with noted(STEP):
            return inner(self)

    return stepped


def _marked(call: Callable, last: bool) -> Callable:
    """Record a CUDA event before the first and after the last operation of a step."""

    def marked(*arguments: Any, **named: Any) -> Any:
        if not torch.cuda.is_available():
            return call(*arguments, **named)
        event = torch.cuda.Event(enable_timing=True)
        if not last:
            event.record()
            kernels_at.append([event])
        try:
            return call(*arguments, **named)
        finally:
            if last:
                event.record()
                kernels_at[-1].append(event)

    return marked


class Extension(WorkerExtension):
    """Methods of the engine's workers."""

    core: Any = None

    def profile_report(self) -> str:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        device = sum(pair[0].elapsed_time(pair[1]) for pair in kernels_at if len(pair) == 2) / 1e3
        found = dict(spent) | {DEVICE: [device, 0.0, len(kernels_at)]}
        spent.clear()
        kernels_at.clear()
        return json.dumps(found)

    def profile_short_path(self, on: bool) -> str:
        Extension.core.scheduler._has_short_path = on
        return json.dumps(on)

    def profile_trace(self, on: bool) -> str:
        if on:
            self.trace, self.first = profile(activities=[ProfilerActivity.CUDA]), spent[STEP][2]
            self.trace.__enter__()
            return json.dumps(None)
        self.trace.__exit__(None, None, None)
        steps = max(1, spent[STEP][2] - self.first)
        return json.dumps([steps, kernel_rows(self.trace, steps)])


instrument_core()
