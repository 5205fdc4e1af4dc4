"""Calibration file: costs fitted to measured curves, and a tiny measurement on a CPU."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu_curves
from calibration import FORMAT, STATES_BYTES, Facts, Point, calibration, costs_of

from rlfuse.costs.model import Costs

TRUE = Costs(
    step_base_s=0.012,
    step_per_sequence_s=3e-5,
    step_per_context_token_s=2e-8,
    flat_batch=64,
    prefill_tokens_per_s=40_000.0,
    score_tokens_per_s=60_000.0,
    score_call_s=0.004,
    train_tokens_per_s=20_000.0,
    train_call_s=0.01,
)
FACTS = Facts(parameters=1_000_000, kv_bytes_per_token=512, kv_tokens=1 << 20, max_sequences=256)


def curve(unit, sizes, seconds):
    """Return three runs per point, with the spread of real measurements."""
    return [Point({unit: size}, tuple(seconds(size) * noise for noise in (0.99, 1.0, 1.01))) for size in sizes]


def curves_of(costs):
    """Return the measurements of a GPU with these costs; copies of 10 GB/s and 20 GB/s, 1e9 parameters per second."""
    tokens = (512, 1024, 2048, 4096, 8192)
    decode = [
        Point({"batch": batch, "context": context}, (costs.decode_step(batch, batch * context),) * 3)
        for batch, context in gpu_curves.Settings().decode
    ]
    return {
        "prefill": curve("tokens", tokens, lambda n: 0.002 + n / costs.prefill_tokens_per_s),
        "decode": decode,
        "score": curve("tokens", tokens, lambda n: costs.score_call_s + n / costs.score_tokens_per_s),
        "train": curve("tokens", tokens, lambda n: costs.train_call_s + n / costs.train_tokens_per_s),
        "optimizer": curve("parameters", (1 << 20, 1 << 24), lambda n: 1e-5 + n / 1e9),
        "to_host": curve("bytes", (1 << 20, 1 << 30), lambda n: n / 1e10),
        "to_device": curve("bytes", (1 << 20, 1 << 30), lambda n: n / 2e10),
    }


def test_fit_recovers_the_costs_that_generated_the_curves():
    fitted = costs_of(curves_of(TRUE), FACTS)
    measured = [name for name, value in asdict(TRUE).items() if value != getattr(Costs(), name)]
    for name in measured:
        assert getattr(fitted.costs, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    assert fitted.costs.optimizer_s == pytest.approx(1e-3, rel=0.01)
    assert fitted.costs.switch_s == pytest.approx(1e6 * (STATES_BYTES / 1e10 + 2 / 2e10))
    assert fitted.costs.link_bytes_per_s == pytest.approx(1 / (1 / 1e10 + 1 / 2e10))
    assert (fitted.costs.kv_tokens, fitted.costs.max_sequences) == (1 << 20, 256)
    assert fitted.accuracy.keys() == {"decoding", "prefill", "scoring", "training"}
    assert all(abs(each.total) < 0.02 for each in fitted.accuracy.values())


def test_one_slow_run_does_not_change_the_median():
    slow = curves_of(TRUE)
    slow["to_host"] = [replace(point, seconds=(*point.seconds[:2], 9.0)) for point in slow["to_host"]]
    assert costs_of(slow, FACTS).costs.switch_s == pytest.approx(costs_of(curves_of(TRUE), FACTS).costs.switch_s, 0.02)
    [shown, _] = calibration(slow, FACTS, {})["curves"]["to_host"]
    assert shown["least"] < shown["seconds"] < 1 < shown["most"] == 9.0


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_measurement_writes_costs_that_policies_accept(tmp_path, capsys):
    out = tmp_path / "costs.json"
    arguments = ["--device", "cpu", "--tiny", "--through", "transformers", "--repeats", "2", "--out", str(out)]
    gpu_curves.main(gpu_curves.options_of(arguments))
    found = json.loads(out.read_text())
    assert found["format"] == FORMAT and found["made"]["through"] == "transformers" and found["made"]["versions"]
    assert set(found["curves"]) == {*curves_of(TRUE), "on_device", "to_process"}
    for curve in found["curves"].values():
        assert len(curve) >= 2 and all(0 < point["least"] <= point["seconds"] <= point["most"] for point in curve)
    costs = Costs(**found["costs"])
    assert costs.decode_step(8, 256) > 0 and costs.train_tokens_per_s > 0 and costs.kv_bytes_per_token == 512
    assert "train {'tokens': 256}" in capsys.readouterr().out
