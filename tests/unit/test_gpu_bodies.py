"""Run the test functions of tests/gpu on a CPU: same names, shapes and logic, with all tensors in host memory.

A test function that is skipped or never called fails here.
"""

import ast
import sys
from pathlib import Path

import deepspeed  # noqa: F401  # if it is missing, the modules below would skip this whole file
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "gpu"))
import small
import test_1_moves as moves
import test_2_ipc as ipc
import test_3_pipeline as pipeline
import test_4_sums as sums
import test_5_attention as attention
import test_6_tower as tower

GPU_ONLY = {
    "test_the_device",
    "test_flash_attention_of_the_flash_attn_package_agrees",
    "test_engine_and_trainer_alternate_on_the_device",
    "test_graph_passes_equal_eager_passes",
    "test_the_quickstart_learns",
}
"""Tests that need a GPU, or a whole engine or job, which tests/end_to_end covers on CPUs."""
INTERPRETED = ("test_9_log_probs.py", "test_11_drafts.py", "test_12_draft_engines.py")
"""These need Triton's interpreter; test_fused_log_probs.py and test_acceptance_rule.py run them in it."""


def assert_runs(body, *arguments):
    """Call a test function with its arguments; fail if it is skipped."""
    try:
        body(*arguments)
    except pytest.skip.Exception as skipped:
        pytest.fail(f"{body.__name__}{arguments} was not run: {skipped}")


def test_every_gpu_test_runs_here_or_only_on_a_gpu():
    files = sorted(Path(small.__file__).parent.glob("test_*.py"))
    files = [file for file in files if file.name not in INTERPRETED]
    names = [node.name for file in files for node in ast.walk(ast.parse(file.read_text()))
             if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]  # fmt: skip
    bodies = {name for name in names if name.startswith("test_")}
    calls = [node for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Call)]
    called = [call.args[0] for call in calls if getattr(call.func, "id", "") == "assert_runs"]
    ran = {body.attr for body in called if isinstance(body, ast.Attribute)}
    assert ran | GPU_ONLY == bodies and not ran & GPU_ONLY


def test_assert_runs_fails_on_a_skip():
    def skips(device):
        pytest.skip(f"no GPU, {device}")

    with pytest.raises(pytest.fail.Exception, match=r"skips\('cpu',\) was not run: no GPU, cpu"):
        assert_runs(skips, "cpu")


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")  # each pytest process that starts ranks repeats their imports
def test_ranks(tmp_path):
    assert_runs(moves.test_a_trained_model_leaves_the_device_and_comes_back, "cpu", 1, "bfloat16")
    for stage, residency in ((1, "step"), (2, "forecast"), (3, "forecast")):
        assert_runs(moves.test_an_optimizer_can_be_moved_after_the_weights, "cpu", stage, residency)
    assert_runs(moves.test_a_frozen_model_is_moved_to_the_host_and_back, "cpu", 1)
    assert_runs(moves.test_activations_are_offloaded, "cpu", tmp_path / "host", "host")
    assert_runs(moves.test_activations_are_offloaded, "cpu", tmp_path / "disk", "disk")
    assert_runs(sums.test_bfloat16_gradients_add_up_in_float32, "cpu", 1)
    assert_runs(pipeline.test_two_processes_give_the_gradients_of_one, "cpu", tmp_path, True)
    assert_runs(attention.test_sequence_parallelism_of_degree_1_changes_nothing, "cpu", str(tmp_path))


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_weight_transfer_to_another_process():
    assert_runs(ipc.test_weights_arrive_in_another_process_and_their_memory_comes_back, "cpu")
    assert_runs(ipc.test_tensors_of_host_memory_are_refused, "cpu")


@pytest.mark.slow
def test_attention_layouts(tmp_path):
    folder = small.policy_folder(tmp_path)
    assert attention.TOLERANCE
    for dtype in attention.TOLERANCE:
        assert_runs(attention.test_packed_padded_and_shared_prompts_agree, "cpu", folder, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["video_llama3", "qwen25_vl"])
def test_towers(tmp_path, family):
    folder = tower.write_tower(tmp_path, family)
    assert_runs(tower.test_embeddings_equal_those_of_the_cpu, "cpu", folder)
    assert_runs(tower.test_a_clip_split_in_two_is_bitwise_equal, "cpu", folder, "float32")
    assert_runs(tower.test_gradients_equal_those_of_the_cpu, "cpu", folder)
