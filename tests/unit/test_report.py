"""HTML reports of generated run folders, parsed as a browser would."""

import json
import tracemalloc
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import yaml

from rlfuse.cli import main as rlfuse
from rlfuse.events import EventLog, Span
from rlfuse.run_folder.reader import open_run
from rlfuse.tools.report.charts import colours, curves
from rlfuse.tools.report.gather import gather

NASTY = "</script><img src=x onerror=\"document.title='broken'\"><!-- & 'it' {{ 1 }}"
PLOTS = {"chart-lengths-0", "chart-time-0", "timeline-0", "data"}


def spans_of(step, count, at):
    def span(where, kind, start, end, *samples, **attributes):
        return Span(kind, where, at + start, at + end, step, samples, attributes=attributes)

    yield span("driver", "step", 0, 10)
    yield span("driver", "gen", 0, 6, slot=0)
    for number in range(count):
        name, length = f"{step}/{number}/0", 10 + number + step % 7
        generation = Span("generate", f"rollout/{number % 2}", at, at + 1 + 5 * number / count, step, (name,), length)
        yield generation
    yield span("rollout/0", "decode", 0, 6, batch=count, context=10)
    yield span("reward/0", "reward", 5, 6.5, f"{step}/0/0")
    yield span("trainer/1", "backward", 7, 9, f"{step}/0/0", model="actor")
    yield span("rollout/0", "generate", 11, 14, f"{step}/999/0", carried_tokens=5000)  # validation


def run_folder(path, steps=4, count=6, metrics=3, lr=1e-6):
    path.mkdir()
    config = {
        "data": {"seed": 1},
        "model": {"path": NASTY, "dtype": "float32"},
        "algorithm": {"adv_estimator": "grpo"},
        "rollout": {"tensor_model_parallel_size": 1, "top_p": 1.0, "top_k": -1},
        "fusion": {"policy": "adaptive", "data": "exact"},
        "actor": {"optim": {"lr": lr}},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 2, "log_samples": 2},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    log = EventLog(path / "events.jsonl")
    for step in range(1, steps + 1):
        log.write(list(spans_of(step, count, 1e9 + 20 * step)))
    log.close()
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(0, steps + 1):
            row = {"step": step, "val-core/x/acc/mean@1": 0.5} if step == 0 else {
                "step": step, "critic/score/mean": step / steps, "rewards/f/mean": 0.5,
                "actor/reward_kl_penalty": float("nan"),
                "busy/generate": 3.0, "idle/tail": 7.0, "idle/start_up": 100.0 if step == 1 else 0.0,
            } | {f"some/metric_{number}": step * 0.123456789 + number for number in range(metrics)}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    (path / "sheet.png").write_bytes(b"\x89PNG")
    status = {"state": "failed", "name": f"rlfuse/{path.name}", "command": "rlfuse train my_job.yaml",
              "commit": "abc123+", "sweep": "", "host": "here", "pid": 1,
              "started": 1e9, "ended": 1e9 + 75, "error": "out of luck"}  # fmt: skip
    (path / "status.json").write_text(json.dumps(status))
    with (path / "samples.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            for number in range(2):
                row = {
                    "step": step, "id": f"{step}/{number}/0", "data_source": "x", "prompt": NASTY,
                    "response": "long " * 2000, "finish": "stop", "prompt_tokens": 3, "response_tokens": 9,
                    "reward": [0.5, None][number], "parts": {"f/<i>": float("nan")}, "note": NASTY, "ground_truth": [1],
                    "contact_sheet": ["sheet.png", "../../secret.png"][number],
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
    return path


class Page(HTMLParser):
    """Tags with their attributes, and the contents of data scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.data, self._open, self.text = [], {}, None, ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self._open = dict(attributes).get("id", "code")

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, text):
        if self._open == "code":
            return
        if self._open:
            self.data[self._open] = self.data.get(self._open, "") + text
        else:
            self.text += text


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return run_folder(folder / "a<b>", lr=1e-6), run_folder(folder / "other", steps=2, lr=5e-7)


@pytest.fixture(scope="module")
def one_run_page(runs):
    return page_of(runs[0].parent / "alone.html", runs[0])


@pytest.fixture(scope="module")
def two_run_page(runs):
    return page_of(runs[0].parent / "both.html", *runs)


def page_of(out, *folders):
    assert rlfuse(["report", *map(str, folders), "--out", str(out)]) == 0
    return Page(out.read_text())


def values(page, run, name):
    """Return the steps and values of a metric."""
    run_data = json.loads(page.data["data"])["runs"][run]
    steps, numbers = run_data["series"][name]
    return run_data["steps"][steps], numbers


@pytest.mark.slow
def test_a_page_contains_the_run_and_escapes_its_texts(one_run_page):
    data = json.loads(one_run_page.data["data"])
    assert one_run_page.data.keys() >= PLOTS
    assert not [tag for tag, _ in one_run_page.tags if tag in ("img", "link", "iframe")]
    assert not [value for _, each in one_run_page.tags for name, value in each.items() if name in ("src", "href")
                and not value.startswith("#")]  # fmt: skip
    assert NASTY in one_run_page.text, "the model's name"
    (run,) = data["runs"]
    assert run["name"] == "a<b>" and values(one_run_page, 0, "critic/score/mean") == (
        [1, 2, 3, 4],
        [0.25, 0.5, 0.75, 1.0],
    )
    assert values(one_run_page, 0, "actor/reward_kl_penalty")[1] == [None] * 4
    first, second = data["samples"][:2]
    assert first["prompt"] == NASTY and "more characters" in first["response"] and first["reward"] == 0.5
    assert second["reward"] is None and first["parts"] == {"f/<i>": None}
    assert first["picture"].startswith("data:image/png;base64,") and second["picture"] is None
    assert "idle slots" not in one_run_page.text, "too few steps"
    assert "5000" not in one_run_page.text, "validation samples are not samples of the step"


def test_dashes_of_metrics_and_colours_of_runs_are_stable(tmp_path):
    critic = {"step": 1, "critic/grad_norm": 1.0}
    both = critic | {"actor/grad_norm": 2.0}
    (alone,), (together,) = (curves([SimpleNamespace(rows=[row])]) for row in (critic, both))
    assert alone.lines == (("critic/grad_norm", "2,3"),) and together.lines[1] == alone.lines[0]
    assert len(set(colours(30))) == 30 and colours(30)[:2] == colours(2)


@pytest.mark.slow
def test_charts_show_each_step_and_cause(one_run_page):
    bars = {bar["name"]: bar for bar in json.loads(one_run_page.data["timeline-0"])["data"] if bar["type"] == "bar"}
    assert bars["busy/generate"]["x"] == [6.0] and bars["busy/generate"]["y"] == ["slot 0"]
    assert bars["busy/train"]["base"] == [7.0] and bars["busy/reward"]["y"] == ["rewards"]
    assert bars["idle/tail"]["y"] == ["slot 1"]
    for label in ("idle share of slot time", "all causes", "waiting for the longest responses"):
        assert f"{label}70.0 %" in one_run_page.text, "start-up is excluded"
    assert {bar["name"] for bar in json.loads(one_run_page.data["chart-time-0"])["data"]} == {
        "busy/generate",
        "idle/tail",
    }


@pytest.mark.slow
def test_runs_side_by_side(two_run_page):
    data = {name: json.loads(text) for name, text in two_run_page.data.items() if name != "data"}
    data_script = json.loads(two_run_page.data["data"])
    assert [run["name"] for run in data_script["runs"]] == ["a<b>", "other"] and {
        row["run"] for row in data_script["samples"]
    } == {
        0,
        1,
    }
    assert two_run_page.text.index("actor.optim.lr") < two_run_page.text.index("Overview"), (
        "differing settings come first"
    )
    assert (
        "1.0e-06" in two_run_page.text and "5.0e-07" in two_run_page.text and two_run_page.text.count("top_p") == 2
    ), "only differing settings"
    for chart in ("chart-lengths", "chart-time"):
        first, second = (data[f"{chart}-{number}"]["layout"] for number in (0, 1))
        assert (
            first["xaxis"]["range"] == second["xaxis"]["range"] and first["yaxis"]["range"] == second["yaxis"]["range"]
        )


@pytest.mark.slow
def test_differing_settings_include_changes_during_a_run(tmp_path):
    changed, plain = run_folder(tmp_path / "changed", lr=1e-7), run_folder(tmp_path / "plain", lr=4e-7)
    (changed / "changes.jsonl").write_text(
        json.dumps({"step": 2, "key": "actor.optim.lr", "was": 5e-7, "is": 2e-7})
        + "\n"
        + json.dumps({"step": 4, "key": "actor.optim.lr", "was": 2e-7, "is": 1e-7})  # no step of it yet
        + "\n"
        + json.dumps({"step": 4, "key": "data.seed", "was": 1, "is": 2})
        + "\n"
    )
    text = page_of(tmp_path / "page.html", changed, plain).text
    text = text[text.index("Settings that differ") : text.index("Overview")]
    assert "5.0e-07, from step 3 on 2.0e-07" in text and "4.0e-07" in text
    assert "1.0e-07" not in text and "data.seed" not in text


@pytest.mark.slow
def test_one_report_for_all_runs_of_a_project(tmp_path, capsys):
    for number in range(5):
        run_folder(tmp_path / f"run{number}", steps=2, lr=number * 1e-6)
    run_folder(tmp_path / "more", steps=1).rename(tmp_path / "runs")
    assert rlfuse(["report", str(tmp_path)]) == 0
    assert f"{tmp_path}/report.html  (6 runs" in capsys.readouterr().out
    page = Page((tmp_path / "report.html").read_text())
    assert [run["name"] for run in json.loads(page.data["data"])["runs"]] == [*(f"run{n}" for n in range(5)), "runs"]
    settings = page.text[page.text.index("Settings that differ") :]
    assert "run4 runs  actor.optim.lr0.0" in settings[: settings.index("Overview")], "a key is a row, however many runs"
    assert len([1 for tag, each in page.tags if "timeline-choice" in each.get("class", "")]) == 6


@pytest.mark.slow
def test_runs_of_the_same_name_are_distinguished(tmp_path):
    for project in ("a", "b"):
        (tmp_path / project).mkdir()
        run_folder(tmp_path / project / "run", steps=1)
    page = page_of(tmp_path / "page.html", tmp_path / "a", tmp_path / "b" / "run", tmp_path / "a" / "run")
    assert [run["name"] for run in json.loads(page.data["data"])["runs"]] == ["a/run", "b/run"], "each once"


@pytest.mark.slow
def test_validation_shows_the_same_prompts_at_each_step(tmp_path):
    folder = run_folder(tmp_path / "run", steps=1)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    with (folder / "validation.jsonl").open("w") as file:
        for step in range(0, 100, 2):
            for number in range(60):
                row = rows[0] | {"step": step, "id": f"{step}/{number}/0", "prompt": "the same words, of other clips"}
                file.write(json.dumps(row) + "\n")
    samples = json.loads(page_of(tmp_path / "page.html", folder).data["data"])["samples"]
    assert sum(bool(row["picture"]) for row in samples) == 1, "answers share their picture"
    samples = [(row["step"], row["id"].split("/")[1]) for row in samples if row.get("validation")]
    steps, prompts = ({each[place] for each in samples} for place in (0, 1))
    assert len(samples) == len(steps) * len(prompts) <= 400 and len(steps) == 12 and {0, 98} <= steps


@pytest.mark.slow
def test_a_run_without_steps_has_a_page(tmp_path):
    folder = run_folder(tmp_path / "new", steps=0)
    for name in ("events.jsonl", "metrics.jsonl", "samples.jsonl"):
        (folder / name).unlink()
    (folder / "status.json").unlink()
    page = page_of(tmp_path / "page.html", folder)
    assert "not finished" in page.text and "timeline-0" not in page.data


@pytest.mark.parametrize(
    ("name", "content"),
    [("summary.json", '{"steps": 3, "met'), ("summary.json", "[1]"), ("config.yaml", ""), ("config.yaml", "data: {a")],
)
def test_truncated_files_are_reported(tmp_path, capsys, name, content):
    folder = run_folder(tmp_path / "new", steps=1)
    (folder / name).write_text(content)
    assert rlfuse(["report", str(folder)]) == 2
    message = capsys.readouterr().err
    assert str(folder / name) in message and "Traceback" not in message


@pytest.mark.slow
def test_a_report_of_many_steps_is_small(tmp_path):
    folder = run_folder(tmp_path / "long", steps=800, count=2, metrics=40)
    page = page_of(tmp_path / "page.html", folder)
    assert (tmp_path / "page.html").stat().st_size < 20e6
    assert len(json.loads(page.data["data"])["samples"]) <= 400
    assert page.text.count("idle slots") == 2, "reported once, as in the run: in the overview and with its text"
    assert "idle slots (step 5)" in page.text
    steps, numbers = values(page, 0, "some/metric_1")
    assert len(steps) == len(numbers) == 400 and steps[0] == 2 and steps[-1] == 800, "means over neighbours"
    assert all(isinstance(step, int) for step in steps)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps(tmp_path):
    peaks = []
    for steps in (200, 600):
        run, found = open_run(run_folder(tmp_path / str(steps), steps=steps, count=40, metrics=60)), []
        for _ in range(3):  # threads of other tests also allocate
            tracemalloc.start()
            gathered = gather(run, "run")
            found.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        peaks.append(min(found))
        assert list(gathered.lengths) == list(range(1, steps + 1)) and len(gathered.slowest) == 15
    assert peaks[1] < 1.3 * peaks[0]
