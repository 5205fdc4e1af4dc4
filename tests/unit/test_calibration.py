"""Calibration: fits recover known hardware, and the error of predictions is measured."""

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import Qwen2Config

from rlfuse.cli import main
from rlfuse.config.input_files import WorkloadError
from rlfuse.costs.spans import lengths_of
from rlfuse.engines.memory.model_sizes import shapes_of
from rlfuse.events import Span, read_events
from rlfuse.simulate.job_step import micro_batches
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.workload import parse
from rlfuse.tools.planning.calibrate import read_work
from rlfuse.tools.planning.calibration import CROSS_DEVICE_ERROR, fit_hardware, held_out, mean_errors, scaled
from rlfuse.tools.planning.costs import costs_of
from rlfuse.tools.planning.exchanges import step_traffic
from rlfuse.tools.planning.features import Work, forward_flops, predicted_seconds, work_of_run
from rlfuse.tools.planning.hardware import (
    END_LAYERS,
    Calibration,
    CalibrationError,
    Coefficients,
    Errors,
    Hardware,
    Source,
    read_calibration,
    rounded_coefficients,
    write,
)
from rlfuse.tools.planning.probe import Probe
from rlfuse.tools.planning.step_time import StepTimes
from rlfuse.tools.simulate.recorded import config_of, read_run

RECORDED = Path(__file__).parent / "recorded_runs"
TRUE = Hardware(
    pass_flops=70e9,
    train_flops=50e9,
    decode_flops=32e9,
    bytes_per_s=4e9,
    pass_call_s=0.012,
    train_call_s=0.02,
    decode_step_s=0.008,
    decode_sequence_s=2e-4,
    decode_attention_s=3e-5,
    layer_s=0.001,
    hidden_bytes_per_s=6e7,
    optimizer_s=0.02,
    step_s=0.3,
    update_bytes_per_s=5e8,
    copied_bytes_per_s=3e8,
    gather_s=0.001,
    sent_bytes_per_s=4e8,
    crowding=0.125,
)


def synthetic_work(hardware=TRUE, noise=0.0, sizes=((2, 128), (6, 256), (8, 512)), seed=0, sharded=False):
    """Return the work of runs with models of these depths and widths on this hardware. With `sharded`, every second run
    has a busy peer and uses ZeRO 1 or 3."""
    draw, works = np.random.default_rng(seed), []
    for number, (layers, hidden) in enumerate(sizes):
        weights = 12 * layers * hidden**2
        for part in range(5):
            common = (f"{layers}x{hidden}", part, 0.0)
            works += [Work("step", *common, moved=8 * weights), Work("copying", *common, copied=4 * weights)]
            shared, gathered = sharded * (number % 2), sharded * (number % 2) * (part % 2)
            moved, sent = 16 * weights / (1 + shared), 4 * weights * (shared - gathered)
            works += [Work("training", *common, moved=moved, copied=8 * weights, optimizer_steps=1, sent=sent)] * 4
            for _ in range(40):
                steps, batch, context = map(int, draw.integers((1, 1, 10), (30, 64, 300)))
                attended = steps * batch * layers
                read, computed = steps * weights * 4, 2 * steps * batch * weights
                moved, prompts = steps * batch * context * layers * hidden * 8, 2 * weights * int(draw.integers(0, 50))
                amounts = steps, batch, attended, read, computed, moved
                works.append(Work("generating", *common, 0, 0, 0.0, prompts, *amounts))
            for kind, times in (("scoring", 1), ("training", 3)):
                for _ in range(12):
                    batches, tokens = map(int, draw.integers((1, 100), (8, 3000)))
                    launches, flops = times * batches, times * 2 * weights * tokens * (1 + draw.random() / 4)
                    hid, sent = times * layers * hidden * tokens * 4, gathered * launches * 2 * weights
                    modules = gathered * launches * (9 * layers + 2)
                    launches *= layers + END_LAYERS
                    works.append(Work(kind, *common, 1, launches, hid, flops, sent=sent, gathers=modules))
        busy_peers = sharded * (number % 2)
        works = [replace(work, busy_peers=busy_peers) if work.source == common[0] else work for work in works]
    timed = [replace(work, seconds=predicted_seconds(work, hardware)) for work in works]
    return [replace(work, seconds=work.seconds * max(0.2, 1 + noise * draw.standard_normal())) for work in timed]


# Fitting -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [True, False])
def test_fit_recovers_the_hardware_coefficients(overlaps):
    device = replace(TRUE, decode_overlaps=overlaps)
    found = fit_hardware(synthetic_work(device, sharded=overlaps))
    unseen = {"errors", "links", "host_bytes_per_s"}
    if not overlaps:
        unseen |= {"crowding", "gather_s", "sent_bytes_per_s"}
    for name, true in asdict(device).items():
        if name not in unseen:
            assert getattr(found, name) == pytest.approx(true, rel=0.01), name


@pytest.mark.slow
def test_noise_is_reported_as_error_and_does_not_bias_predictions():
    """Check predictions of other work instead of coefficients, which may compensate for each other."""
    errors = mean_errors(held_out(synthetic_work(noise=0.1))[0])
    assert all(0.01 < error < 0.2 for error in asdict(errors).values()), errors
    found = fit_hardware(synthetic_work(noise=0.1))
    other = synthetic_work(sizes=((4, 384),), seed=1)
    for kind in ("generating", "scoring", "training"):
        same_kind = [work for work in other if work.kind == kind]
        measured, predicted = sum(w.seconds for w in same_kind), sum(predicted_seconds(w, found) for w in same_kind)
        assert predicted == pytest.approx(measured, rel=0.08), kind


@pytest.mark.slow
def test_work_outside_the_cost_model_has_a_large_error():
    """Make each run take 3x the time of the previous one, independent of its work."""
    works = synthetic_work()
    sources = list(dict.fromkeys(work.source for work in works))
    odd = [replace(work, seconds=work.seconds * 3.0 ** sources.index(work.source)) for work in works]
    found, words = held_out(odd)
    errors = mean_errors(found)
    assert all(error > 0.3 for error in asdict(errors).values()), errors
    assert words == "each of 3 runs predicted from the others"


@pytest.mark.slow
def test_steps_of_one_run_are_held_out_in_folds():
    works = synthetic_work(sizes=((6, 256),))
    found, words = held_out(works)
    assert words == "each of 5 folds of the steps predicted from the others"
    assert len(found) == 15 and max(total.error for total in found) < 0.05
    with pytest.raises(CalibrationError, match="only one step after the first, none can be held out"):
        held_out([work for work in works if work.part == 0])
    with pytest.raises(
        CalibrationError, match=r"too few measurements .*: generating \(0\); .* use a run with more steps"
    ):
        fit_hardware([work for work in works if work.kind != "generating"])


@pytest.mark.slow
def test_a_constant_number_of_devices_gives_no_contention():
    works = [replace(work, busy_peers=1) for work in synthetic_work(replace(TRUE, crowding=0.0))]
    found = fit_hardware(works)
    assert found.crowding == 0 and found.train_flops == pytest.approx(TRUE.train_flops, rel=0.01)


def test_contention_slows_all_local_work():
    with_busy_peers = TRUE.with_busy_peers(3)
    longer = 1 + 3 * TRUE.crowding
    assert with_busy_peers.train_flops == TRUE.train_flops / longer and with_busy_peers.layer_s == TRUE.layer_s * longer
    assert (
        with_busy_peers.step_s == TRUE.step_s
        and with_busy_peers.with_busy_peers(3) == with_busy_peers
        and TRUE.with_busy_peers(0) == TRUE
    )


@pytest.mark.slow
def test_scoring_without_measurements_is_as_fast_as_training():
    found = fit_hardware([work for work in synthetic_work(sizes=((2, 128), (6, 256))) if work.kind != "scoring"])
    assert found.pass_flops == found.train_flops == pytest.approx(TRUE.train_flops, rel=0.05)


def test_a_scaled_device_has_larger_errors():
    near = replace(TRUE, errors={"training": 0.08})
    far = scaled(near, 10.0, 4.0)
    assert far.train_flops == 10 * TRUE.train_flops and far.bytes_per_s == 4 * TRUE.bytes_per_s
    assert far.decode_step_s == TRUE.decode_step_s, "host times are not scaled"
    assert far.errors["training"] == pytest.approx((0.08**2 + CROSS_DEVICE_ERROR**2) ** 0.5)
    with pytest.raises(CalibrationError, match="flops_ratio=0: needs a number above 0"):
        scaled(near, 0.0, 1.0)


def test_flops_of_a_pass_count_layers_attention_and_the_head_of_responses():
    class Small:
        passed, head, layers, heads, head_width = 1000.0, 50, (500, 500), 2, 8

    expected = 2 * (1000 * 30 + 50 * 18) + 2 * 2 * 2 * 8 * (10**2 + 20**2)
    assert forward_flops(Small, [4, 8], [6, 12]) == expected


def test_length_of_a_moved_sample_is_read_from_its_last_span():
    at = {"prompt_tokens": 7}
    spans = [
        Span("generate", "rollout/0", 0, 1, samples=("1/2/0",), tokens=5, attributes=at),
        Span("generate", "rollout/1", 1, 2, samples=("1/2/0",), tokens=4, attributes=at | {"carried_tokens": 5}),
    ]
    assert lengths_of(spans) == {"1/2/0": (7, 9)}


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def calibration():
    return Calibration(
        "runs", "a core", 2, "0.1", rounded_coefficients(TRUE), Errors(0.1, None, 0.2), "each run",
        (Source("one", 1000, 2, 8, 4.0, 80.5, 164, 2, 10, 0, 20),), ("links",),
    )  # fmt: skip


def test_calibration_files_round_trip(calibration, tmp_path):
    path = tmp_path / "calibration.yaml"
    write(calibration, path)
    assert read_calibration(path) == calibration
    assert calibration.as_hardware() == replace(TRUE, errors={"generating": 0.1, "training": 0.2})


def test_invalid_files_are_reported_by_field_line_value_and_range(calibration, tmp_path):
    path = tmp_path / "calibration.yaml"
    write(calibration, path)
    data = yaml.safe_load(path.read_text())
    data["hardware"]["pass_flops"], data["errors"]["scorn"] = -3, 0.1
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    with pytest.raises(CalibrationError) as error:
        read_calibration(path)
    assert f"{path}:6: hardware.pass_flops=-3: needs a number above 0" in str(error.value)
    assert "errors.scorn: unknown field; did you mean errors.scoring?" in str(error.value)
    with pytest.raises(CalibrationError, match=r"nowhere\.yaml: can\'t be read as YAML: .*No such file"):
        read_calibration(tmp_path / "nowhere.yaml")
    path.write_text("a: [")
    with pytest.raises(CalibrationError, match="can't be read as YAML"):
        read_calibration(path)


# The command ---------------------------------------------------------------------------------------------------------


def test_invalid_inputs_of_a_calibration_are_reported(tmp_path, capsys):
    def error_output(*arguments):
        assert main(["calibrate", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "needs exactly one of RUN_DIR, --probe and --links" in error_output()
    assert "needs exactly one of RUN_DIR, --probe and --links" in error_output("--probe", "some")
    assert "No such file" in error_output(tmp_path / "none") and "none/config.yaml" in error_output(tmp_path / "none")
    assert "training.pipeline_parallel_size=2" in error_output(RECORDED / "pipelines")
    assert "is given twice" in error_output(tmp_path, tmp_path)
    assert "--picture a.pdf: the name must end in .png" in error_output("--probe", "--picture", "a.pdf")
    assert "the folder does not exist" in error_output("--probe", "--out", tmp_path / "no/c.yaml")
    assert "no config.json in this folder" in error_output("--probe", "--model", tmp_path)


@pytest.mark.parametrize("read", [read_run, lambda folder: read_work(folder, "run")])
def test_runs_of_a_reward_model_are_refused(tmp_path, read):
    """Cover `rlfuse plan --from` and `rlfuse calibrate`."""
    (tmp_path / "config.yaml").write_text("{data: {train_files: [a]}, model: {path: m}, trainer: {task: reward_model}}")
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(WorkloadError, match=r"task=reward_model\), .* no decoding .* a run with trainer.task=rl"):
        read(tmp_path)


@pytest.fixture
def run(tmp_path):
    """Return a run folder with four equal simulated steps on two slots."""
    Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    config = {
        "data": {"train_files": ["a"], "val_files": ["b"]},
        "model": {"path": str(tmp_path / "model")},
        "trainer": {"n_gpus_per_node": 2},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    spans = simulate(parse(WORKLOAD), "stream").spans
    step_seconds = max(span.end for span in spans)
    steps = [
        replace(span, start=span.start + n * step_seconds, end=span.end + n * step_seconds)
        for n in range(4)
        for span in spans
    ]
    steps += [Span("step", "driver", n * step_seconds, (n + 1) * step_seconds, n + 1) for n in range(4)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(asdict(span)) + "\n" for span in steps))
    return tmp_path


WORKLOAD = {
    "slots": 2,
    "response_tokens": {"lognormal": {"median": 60, "sigma": 1.0}, "cap": 400, "count": 64},
    "prompt_tokens": 20,
    "engine": {"step_base_s": 0.01, "step_per_sequence_s": 4e-4, "flat_batch": 16, "prefill_tokens_per_s": 3300},
    "scoring": {"tokens_per_s": 3000, "call_s": 0.03},
    "training": {"tokens_per_s": 2000, "call_s": 0.05, "mini_batches": 4, "optimizer_s": 0.07},
    "step_s": 0.4,
}


@pytest.mark.slow
def test_a_run_gives_a_calibration_file(run, capsys):
    out, picture = run / "c.yaml", run / "c.png"
    assert main(["calibrate", str(run), "--out", str(out), "--picture", str(picture), "--device", "a slot"]) == 0
    calibration = read_calibration(out)
    hardware = calibration.as_hardware()
    assert calibration.device == "a slot" and calibration.count == 2
    assert calibration.fitted_on[0].layers == 2 and calibration.fitted_on[0].prompt_tokens == 20
    assert any("other model sizes" in line for line in calibration.not_measured)
    expected = step_traffic(config_of(run / "config.yaml"), calibration.fitted_on[0].parameters, calibration.count)
    assert expected.seconds(hardware) == pytest.approx(0.07, rel=0.1)
    assert max(hardware.errors.values()) < 0.15, "all steps are equal"
    assert picture.stat().st_size > 10_000 and "generating" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [entry.name for entry in fields(Coefficients) if entry.name not in ("host_bytes_per_s", "sent_bytes_per_s")]
)
def test_every_coefficient_affects_the_costs_of_a_plan(run, name):
    config, shorter = config_of(run / "config.yaml"), name == "crowding" or re.search(r"(?<!per)_s$", name)
    config.actor.zero_stage = 3 if name == "gather_s" else config.actor.zero_stage
    slower = name != "decode_overlaps" and getattr(TRUE, name) * (5 if shorter else 0.2)
    slow = replace(TRUE, **{name: slower})
    before, after = (costs_of(config, shapes_of(config), hardware, 200.0) for hardware in (TRUE, slow))
    rates = [entry.name for entry in fields(before) if entry.name.endswith("per_s")]
    seconds = [entry.name for entry in fields(before) if entry.name.endswith("_s") and entry.name not in rates]
    worse = [each for each in rates if getattr(after, each) < getattr(before, each)]
    assert worse + [each for each in seconds if getattr(after, each) > getattr(before, each)]


@pytest.mark.slow
@pytest.mark.parametrize("long_calls", [False, True], ids=["a micro-batch a call", "several"])
def test_launch_latency_is_measured_and_slows_small_micro_batches(run, long_calls):
    """Compare with micro-batches of 1/16 of the tokens, which are launched 16x as often."""
    launch_s, call_s, token_s, at, draw = 0.03, 0.02, 1e-4, 0.0, np.random.default_rng(0)
    config, events = config_of(run / "config.yaml"), read_events(run / "events.jsonl")
    spans = [span for span in events if span.kind in ("generate", "decode", "step")]
    step_seconds = spans[-1].end - spans[-1].start
    for step in range(4):
        at = step * step_seconds
        for _ in range(8):
            began, at = at, at + call_s
            for rows in draw.integers(1, 20, 1 + 2 * long_calls).tolist():
                seconds = launch_s + token_s * 50 * rows
                half, done = at + seconds / 3, at + seconds
                common = {"samples": ("a",) * rows, "tokens": 50 * rows, "attributes": {"model": "actor"}}
                spans += [
                    Span("forward", "trainer/0", at, half, **common),
                    Span("backward", "trainer/0", half, done, **common),
                ]
                at = done
            spans.append(Span("update_actor", "driver", began, at))
    assert at < 4 * step_seconds, "calls end within the steps"
    shapes = {"actor": shapes_of(config)["actor"]}
    hardware = fit_hardware(work_of_run("one", config, shapes, spans))
    assert 3 * (2 + END_LAYERS) * hardware.layer_s == pytest.approx(launch_s, rel=0.02)
    assert hardware.train_call_s == pytest.approx(call_s, rel=0.02)
    config.data.train_batch_size = config.actor.ppo_mini_batch_size = 128
    steps = {}
    for budget in (4096, 256):
        config.actor.ppo_max_token_len_per_gpu = budget
        costs = replace(costs_of(config, shapes, hardware, 100.0), kv_tokens=1 << 20)
        steps[budget] = StepTimes(shapes, [80] * 128, 20).simulated(config, costs, policy="serial").training
    more = micro_batches(config, 128, 100.0) - 2  # of 6,400 tokens on each of two ranks
    assert more == 30 and steps[256] - steps[4096] == pytest.approx(2 * more * launch_s, rel=0.02), (
        "for critic and actor"
    )


@pytest.mark.slow
def test_a_probe_measures_a_model_and_restores_the_thread_count(run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        probe = Probe(lines.append, min_measure_s=0.0, tokens=(16, 64))
        probe.measure(str(run / "model"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    hardware = fit_hardware(probe.works)
    assert hardware.pass_flops > 1e6 and hardware.decode_step_s < 1
    assert {"generating", "scoring", "training"} <= {work.kind for work in probe.works}
    assert [len(shape.layers) for shape in probe.shapes.values()] == [2, 4]
    assert probe.copy_bytes_per_s > 1e8 and probe.product_flops > 1e8 and lines[0].startswith("matrix products")
    assert set(asdict(mean_errors(held_out(probe.works)[0])).values()).isdisjoint({None})
