"""CUDA graphs for decoder passes of small models, which replace thousands of kernel launches by two.

A pass is captured when a size first occurs and replayed later; head, loss and batches of other sizes are launched as
usual. Graphs are dropped when weights have moved, as addresses are fixed. All graphs share one memory pool, so only
one pass at a time may be between its forward and backward. If capture fails or the first replay differs, `stop` turns
graphs off and logs the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from rlfuse.cluster import watchdog
from rlfuse.config.graph_checks import graph_sizes, no_graphs_reason
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.attention import Layout, SegmentTable
from rlfuse.engines.trainer.dropout import TOLERANCE
from rlfuse.events import Recorder


class CudaRecording:
    """Capture of CUDA graphs on a GPU."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Run the body on a side stream before capture, to load kernels; raise if it synchronizes with the device."""
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self._stream):
                torch.cuda.set_sync_debug_mode("error")
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture the body. Other threads of the process may use the GPU meanwhile."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                yield graph
        finally:
            torch.cuda.set_stream(stream)  # torch leaves its capture stream current if a capture fails


@dataclass(slots=True)
class _Pass:
    """Captured pass: its input and output tensors, and the addresses of the weights it reads."""

    inputs: dict[str, Tensor]
    hidden: Tensor
    forward: torch.cuda.CUDAGraph
    addresses: list[int]
    gradient: Tensor | None = None
    backward: torch.cuda.CUDAGraph | None = None


def record_passes(
    config: Config, models: Mapping[str, PreTrainedModel], device: str, recorder: Recorder, by_layout: bool
) -> tuple[PassGraphs | None, str | None]:
    """Return the graphs of a rank's models, None if they are off, and a line for the log, None on CPU hosts.

    `by_layout`: True if all models attend by layouts to packed batches.
    """
    if device == "cpu":
        return None, None
    largest = max(map(_layer_parameters, models.values()))
    if (
        why := no_graphs_reason(config, largest)
        if by_layout
        else "a model does not attend by layouts to packed batches"
    ):
        return None, f"CUDA graphs: off ({why})"
    sizes = graph_sizes(config)
    return PassGraphs(models, sizes, recorder), f"CUDA graphs: batches of {', '.join(map(str, sizes))} tokens"


def _layer_parameters(model: PreTrainedModel) -> float:
    """Return the mean parameters per decoder layer; of mixtures of experts, all experts count."""
    body = model.base_model
    embedding = sum(each.numel() for each in body.get_input_embeddings().parameters())
    layers = model.config.get_text_config().num_hidden_layers
    return (sum(each.numel() for each in body.parameters()) - embedding) / layers


class PassGraphs:
    """CUDA graphs of a rank's models; `sizes` is empty once graphs are off."""

    def __init__(self, models: Mapping[str, PreTrainedModel], sizes: tuple[int, ...], recorder: Recorder):
        self.sizes, self.recorder, self.recording, self.replays = sizes, recorder, CudaRecording(), 0
        self._decoders = [_Decoder(name, model.base_model, self) for name, model in models.items()]

    def stop(self, why: str) -> None:
        """Turn graphs off, free their memory and log the reason."""
        if self.sizes:
            watchdog.say(f"{self.recorder.where}: CUDA graphs: off ({why})")
        self.sizes = ()
        for decoder in self._decoders:
            decoder.drop()


class _Decoder:
    """Captured passes of one model, by (number of tokens, whether gradients are computed)."""

    def __init__(self, name: str, module: nn.Module, graphs: PassGraphs):
        self.graphs, self._name, self._module, self._launch = graphs, name, module, module.forward
        self._weights = [*module.parameters(), *module.buffers()]
        self.trained = [each for each in module.parameters() if each.requires_grad]
        self.gradients: list[Tensor | None] = []
        """Gradients of `trained`, shared by all passes; None for parameters without one."""
        self._passes: dict[tuple[int, bool], _Pass] = {}
        module.forward = self._forward

    def drop(self) -> None:
        self.gradients, self._passes = [], {}

    def _forward(self, *positional: Any, **inputs: Any) -> Any:
        layout = inputs.get("layout")
        if positional or not self.graphs.sizes or not isinstance(getattr(layout, "segments", None), SegmentTable):
            return self._launch(*positional, **inputs)
        with_gradients = torch.is_grad_enabled() and bool(self.trained)
        key = inputs["input_ids"].shape[1], with_gradients
        if key not in self._passes:
            try:
                with self.graphs.recorder.span("record", cause=self._name, attributes={"tokens": key[0]}):
                    self._passes[key] = self._record(inputs, with_gradients)
            except RuntimeError as error:
                self.graphs.stop(f"a pass of the {self._name} cannot be captured: {str(error).strip().splitlines()[0]}")
        found = self._passes.get(key)
        if found and found.addresses != self._addresses():
            self.graphs.stop("weights have moved since passes were captured")
            found = None
        if found is None:
            return self._launch(**inputs)
        for name, tensor in _tensors(inputs).items():
            found.inputs[name].copy_(tensor)
        return self._output(_Replay.apply(self, found, *self.trained) if with_gradients else self.replay(found))

    def replay(self, recorded: _Pass) -> Tensor:
        """Replay a pass and return its hidden states, valid until the next replay of any pass."""
        self.graphs.replays += 1
        recorded.forward.replay()
        return recorded.hidden.detach()

    def _record(self, inputs: Mapping[str, Any], with_gradients: bool) -> _Pass:
        copies = {name: tensor.clone() for name, tensor in _tensors(inputs).items()}
        static_inputs = dict(inputs, **copies)
        static_inputs["layout"] = Layout(SegmentTable(static_inputs.pop("table")))
        training, graph = self._module.training, self.graphs.recording
        self._module.eval()  # otherwise layers may be recomputed in the backward pass; dropout is 0 in any case
        try:
            with graph.warm_up():
                hidden = self._hidden(static_inputs)
                expected, gradient = [hidden.detach()], torch.ones_like(hidden) if with_gradients else None
                if with_gradients:
                    found = torch.autograd.grad(hidden, self.trained, gradient, allow_unused=True)
                    self.gradients = self.gradients or [each if each is None else each.clone() for each in found]
                    expected += [each for each in found if each is not None]
            with graph.capture() as forward:
                hidden = self._hidden(static_inputs)
            recorded = _Pass(copies, hidden.detach(), forward, self._addresses(), gradient)
            kept_gradients = [each for each in self.gradients if each is not None] if with_gradients else []
            if with_gradients:
                with graph.capture() as recorded.backward:
                    found = torch.autograd.grad(hidden, self.trained, gradient, allow_unused=True)
                    torch._foreach_copy_(kept_gradients, [each for each in found if each is not None])
        finally:
            self._module.train(training)
        results = [self.replay(recorded)]
        if with_gradients:
            recorded.backward.replay()
        _check_replayed(results + kept_gradients, expected)
        return recorded

    def _hidden(self, inputs: Mapping[str, Any]) -> Tensor:
        output = self._launch(**inputs)
        if {name for name, value in output.items() if value is not None} != {"last_hidden_state"}:
            raise RuntimeError(f"{type(self._module).__name__} returns more than hidden states")
        self._output = lambda hidden: type(output)(last_hidden_state=hidden)
        return output.last_hidden_state

    def _addresses(self) -> list[int]:
        return [each.data_ptr() for each in self._weights]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decoder: _Decoder, recorded: _Pass, *_: Tensor) -> Tensor:
        hidden = decoder.replay(recorded)
        ctx.decoder, ctx.recorded, ctx.replays = decoder, recorded, decoder.graphs.replays
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.replays != ctx.decoder.graphs.replays:
            raise RuntimeError("Another pass was replayed before this one's backward and overwrote its saved tensors.")
        ctx.recorded.gradient.copy_(gradient)
        ctx.recorded.backward.replay()
        return None, None, *ctx.decoder.gradients


def _check_replayed(found: list[Tensor], expected: list[Tensor]) -> None:
    """Raise RuntimeError if hidden states (first of each list) or gradients differ between a replay and a launched
    pass."""
    for some, others in ((found[:1], expected[:1]), (found[1:], expected[1:])):
        scale = max((float(each.abs().max()) for each in others), default=0.0)
        worst = max((float((one - other).abs().max()) for one, other in zip(some, others, strict=True)), default=0.0)
        if worst > TOLERANCE[found[0].dtype] * scale:  # False if both are NaN
            raise RuntimeError(f"a replay differs from a launched pass by {worst:g} at a scale of {scale:g}")


def _tensors(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the input tensors that change from batch to batch."""
    found = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return found | {"table": inputs["layout"].segments.rows}
