"""`rlfuse workspace`: the saved view of a wandb project, and messages without wandb or a valid project."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from import_graph import MODULES, ROOT, strings

from rlfuse.errors import UserError
from rlfuse.observe.tracking import read_metrics
from rlfuse.tools import workspace
from rlfuse.tools.workspace import CHARTS

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style")


@pytest.mark.slow
def test_charts_show_metrics_that_runs_log():
    recorded = {name for row in read_metrics(ROOT / "notebooks" / "data" / "run" / "metrics.jsonl") for name in row}
    metrics = [metric for charts in CHARTS.values() for each in charts.values() for metric in each]
    named = {text for module in MODULES if module != "rlfuse.tools.workspace" for text in strings(module)}
    assert [metric for metric in metrics if metric[0] != "^" and metric not in recorded | named] == []
    assert sum(map(len, CHARTS.values())) == 10 and len(set(metrics)) == len(metrics)


def test_the_view_has_each_chart_over_the_training_step(capsys):
    pytest.importorskip("wandb_workspaces")
    workspace.main(["me/rlfuse", "--name", "first look", "--dry-run"])
    view = json.loads(capsys.readouterr().out)
    assert (view["entity"], view["project"], view["displayName"]) == ("me", "rlfuse", "first look")
    section = view["spec"]["section"]
    assert section["settings"]["xAxis"] == "training/global_step"
    sections = {
        each["name"]: {panel["config"]["chartTitle"]: panel["config"] for panel in each["panels"]}
        for each in section["panelBankConfig"]["sections"]
    }
    assert {name: [*panels] for name, panels in sections.items()} == {
        name: [*charts] for name, charts in CHARTS.items()
    }
    for name, charts in CHARTS.items():
        for title, metrics in charts.items():
            chart = sections[name][title]
            assert chart["xAxis"] == "training/global_step"
            assert chart.get("metrics") == list(metrics) or [chart["metricRegex"]] == list(metrics)


@pytest.mark.parametrize("given", ["rlfuse", "/rlfuse", "me/"])
def test_a_project_without_an_entity_is_rejected(given, capsys):
    with pytest.raises(SystemExit):
        workspace.main([given])
    assert "must be ENTITY/PROJECT" in capsys.readouterr().err


def test_a_missing_package_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setattr(workspace.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'rlfuse\[workspace\]'"):
        workspace.main(["me/rlfuse"])


@pytest.mark.slow
def test_a_view_that_wandb_rejects_is_one_message(monkeypatch):
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(UserError, match=r"rlfuse workspace me/rlfuse: not saved \(.*wandb login"):
        workspace.main(["me/rlfuse"])


class Server(BaseHTTPRequestHandler):
    """A fake wandb server that answers the two requests of the command."""

    views: ClassVar[list[dict]] = []

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "upsertView" in request["query"]:
            self.views.append(request["variables"])
        viewer = {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
        saved = {"view": {"id": "2", "name": "nw-abc-v"}, "inserted": True}
        answer = json.dumps({"data": {"viewer": viewer, "upsertView": saved}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_the_command_saves_the_view_and_prints_its_url():
    pytest.importorskip("wandb_workspaces")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    command = [sys.executable, "-m", "rlfuse.cli", "workspace", "me/rlfuse"]
    environment = os.environ | {"WANDB_BASE_URL": address, "WANDB_API_KEY": "k" * 40}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    server.shutdown()
    server.server_close()
    assert (done.returncode, done.stdout) == (0, f"saved {address}/me/rlfuse?nw=abc\n"), done.stderr
    (view,) = Server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("me", "rlfuse", "rlfuse")
    sections = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    assert {each["name"]: len(each["panels"]) for each in sections} == {
        name: len(each) for name, each in CHARTS.items()
    }
