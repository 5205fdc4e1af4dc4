"""What tests/gpu does on a card, done on a CPU: names, shapes and logic are the same, only nothing lies elsewhere."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "gpu"))
import small
import test_1_moves as moves
import test_2_ipc as ipc
import test_3_pipeline as pipeline
import test_5_attention as attention
import test_6_tower as tower


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")  # whichever process of pytest starts ranks imports for them anew
def test_what_ranks_do(tmp_path):
    moves.test_a_trained_model_leaves_the_device_and_comes_back("cpu", 1, "bfloat16")
    moves.test_a_frozen_model_leaves_the_device_and_comes_back("cpu", 1)
    pipeline.test_two_processes_give_the_gradients_of_one("cpu", tmp_path, True)
    attention.test_sequence_parallelism_among_one_rank_changes_nothing("cpu", str(tmp_path))


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_weights_go_to_another_process():
    ipc.test_weights_arrive_in_another_process_and_their_memory_comes_back("cpu")
    ipc.test_tensors_of_host_memory_are_refused("cpu")


def test_attention_by_layouts(tmp_path):
    folder = small.policy_folder(tmp_path)
    for dtype in attention.TOLERANCE:
        attention.test_packed_padded_and_shared_prompts_give_the_same("cpu", folder, dtype)


@pytest.mark.parametrize("family", tower.WRITERS)
def test_towers(tmp_path, family):
    folder = tower.write_tower(tmp_path, family)
    tower.test_embeddings_are_those_of_the_cpu("cpu", folder)
    tower.test_a_clip_cut_in_two_gives_the_same_bits("cpu", folder, "float32")
    tower.test_gradients_are_those_of_the_cpu("cpu", folder)
