"""Lets a CUDA build of torchvision load next to a CPU build of torch.

Role: torchvision's Python modules refer to operators that its compiled library registers. A CUDA build's library can't
be loaded by a CPU torch, and the first such reference ends the import, with it transformers and vLLM's vision models.
This module declares the operators' signatures instead. Declared, not implemented: image transforms work, calling a
detection operator raises. jobs/install.sh puts it into site-packages with a .pth file, only where the import fails.
Invariants: costs nothing until something imports torchvision; leaves a torch with CUDA alone.
"""

import importlib.abc
import sys

ROI = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
ROI_GRAD = "Tensor grad, Tensor rois, {}float spatial_scale, SymInt pooled_height, SymInt pooled_width"
SIZE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
PAIR = "SymInt {0}_h, SymInt {0}_w"
DEFORM = ", ".join(
    [*map(PAIR.format, ("stride", "pad", "dilation")), "SymInt groups, SymInt offset_groups, bool use_mask"]
)
WITH_MAP = ROI_GRAD.format("Tensor channel_mapping, ")
WITH_ARGMAX = ROI_GRAD.format("Tensor argmax, ")

SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({ROI}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward({ROI_GRAD.format('')}, {SIZE}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({ROI}) -> (Tensor, Tensor)",
    f"_roi_pool_backward({WITH_ARGMAX}, {SIZE}) -> Tensor",
    f"ps_roi_align({ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward({WITH_MAP}, int sampling_ratio, {SIZE}) -> Tensor",
    f"ps_roi_pool({ROI}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward({WITH_MAP}, {SIZE}) -> Tensor",
    f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {DEFORM}) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "_cuda_version() -> int",
)


class DeclareOnImport(importlib.abc.MetaPathFinder):
    """Finds no module; takes the first search for torchvision as the moment to declare the operators."""

    library = None  # a collected Library takes its declarations with it

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            self.declare()
        return None

    @classmethod
    def declare(cls):
        import torch

        if torch.version.cuda is not None:
            return
        cls.library = torch.library.Library("torchvision", "FRAGMENT")
        for signature in SIGNATURES:
            try:
                cls.library.define(signature)
            except RuntimeError:  # declared already, by a torchvision that did load
                continue


sys.meta_path.insert(0, DeclareOnImport())
