"""Code examples in the READMEs of packages."""

import re
from pathlib import Path
from types import SimpleNamespace

from rlfuse.tools.doctor.examine import show
from rlfuse.tools.report.charts import curves

ROOT = Path(__file__).resolve().parents[2]


def code_of(page):
    return re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1]


def test_notebook_readme_scores_and_measures_a_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    exec(code_of(ROOT / "rlfuse/tools/notebook/README.md"), names)
    table, scored = names["table"], names["scored"]
    assert (scored["reward"] < 1).all() and ((scored["reward"] > 0) == (table["reward"] == 1)).mean() > 0.99
    assert names["agreement"].loc["all", "samples"] == len(table)
    best = table.groupby(["step", "group"])["reward"].max().groupby("step").mean()
    assert names["by_step"]["solved"].tolist() == best.tolist()


def test_doctor_readme_check_reports_a_finding(capsys):
    names = {}
    exec(code_of(ROOT / "rlfuse/tools/doctor/README.md"), names)
    show([names["check_swap"](3 << 30), names["check_swap"](1 << 20)])
    output = capsys.readouterr().out
    assert "3,072 MiB used" in output and "end other processes" in output and "1 MiB used" in output


def test_custom_metrics_have_panels_in_the_report():
    rows = [{"step": 1, "custom/sums/right": 0.5, "custom/count": 3.0, "val-custom/count": 2.0, "other/x": 1.0}]
    panels = curves([SimpleNamespace(rows=rows)])
    assert [(panel.title, panel.lines) for panel in panels] == [
        ("custom metrics", (("custom/count", ""),)),
        ("custom metrics", (("custom/sums/right", ""),)),
        ("custom metrics, validation", (("val-custom/count", ""),)),
    ]
