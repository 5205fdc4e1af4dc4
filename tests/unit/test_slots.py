"""`rlfuse slots`: drains and restores a slot of a running job through files in its run folder."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest

from rlfuse.cluster import placement
from rlfuse.cluster.nodes import Node
from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.errors import NodeLeft, NodeLost, RunError, SlotRefused
from rlfuse.events import Recorder
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.tuning import Tuning
from rlfuse.run import slot_requests
from rlfuse.run.slot_requests import SlotRequests
from rlfuse.run_folder import slots as disk
from rlfuse.run_folder import status
from rlfuse.run_folder.slots import SlotState
from rlfuse.step.draining import Draining, relative_times
from rlfuse.stopping import Stopping
from rlfuse.tools import slots

DRIVER_NODE, OTHER_NODE, SPARE = (Node(id * 8, f"10.0.0.{id}", 1, {}) for id in "123")


class Prober:
    """Trainer ranks with fixed probe times (seconds)."""

    async def probe(self):
        return [2.0, 1.0, 2.0, None]


def draining(count=4, drained=()):
    engines = SimpleNamespace(rollout=[None] * count, trainer=Prober())
    return Draining(engines, Tuning(Costs(), Lengths(100), Settings(), Rates(count, set(drained))))


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """Return slot requests for four slots on two nodes; the driver runs on the first."""
    monkeypatch.setattr(slot_requests, "LOOK_S", 0.01)
    monkeypatch.setattr(slot_requests, "this_node_id", lambda: DRIVER_NODE.id)
    monkeypatch.setattr(placement, "spare_nodes", lambda slots: [SPARE])
    status.begin(tmp_path, "project/name", time.time())
    messages = []
    log = SimpleNamespace(folder=tmp_path, say=messages.append, stopping=Stopping(0.0, print), messages=messages)
    log.journal = SimpleNamespace(recorder=Recorder("driver"))
    log.stopping.step, log.total_steps = 7, 9
    return SlotRequests(log, placement.Slots(None, 4, "cpu", nodes=(DRIVER_NODE, OTHER_NODE)), draining(), 1)


def run_commands(requests, *commands):
    """Run commands in sequence during the run; return the refusal of each, or None."""
    refusals = []

    def run_all():
        for words in commands:
            try:
                slots.main([*words, str(requests.log.folder)])
            except SlotRefused as error:
                refusals.append(str(error))
            else:
                refusals.append(None)

    async def run():
        commands_thread = threading.Thread(target=run_all)
        commands_thread.start()
        while commands_thread.is_alive():
            await asyncio.sleep(0.01)

    asyncio.run(requests.serve(run()))
    return refusals


def test_a_slot_is_drained_and_restored_during_the_run(requests, capsys):
    assert run_commands(requests, ["drain", "1"], []) == [None, None]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "slot 1 is drained until it is restored" == requests.log.messages[0]
    assert [line.split()[-2] for line in out[2:]] == ["working", "drained", "working", "working"]
    assert requests.draining.drained == {1}
    assert run_commands(requests, ["restore", "1"], []) == [None, None]
    assert "drained" not in capsys.readouterr().out and requests.draining.drained == set()
    spans = asyncio.run(requests.draining.drain())
    assert [(span.kind, span.attributes) for span in spans] == [("drained", {"slot": 1})] and spans[0].seconds > 0
    assert [(span.kind, span.attributes["do"]) for span in requests.log.journal.recorder.drain()] == [
        ("request", "drain"), ("request", "restore"),
    ]  # fmt: skip
    remaining = [path.name for path in (requests.log.folder / disk.FOLDER).iterdir()]
    assert remaining == [disk.STATE], "requests and answers are removed"


@pytest.mark.slow
def test_invalid_requests_are_rejected_with_the_valid_values(requests):
    assert run_commands(
        requests, ["drain", "4"], ["drain", "-1"], ["restore", "2"], ["drain", "0"], ["drain", "0"], ["drain", "2"],
        ["drain", "3"], ["drain", "1"], ["restore", "1"],
    ) == [
        "slot 4 cannot be drained: this run has slots 0 to 3",
        "slot -1 cannot be drained: this run has slots 0 to 3",
        "slot 2 is not drained; drained slots: none",
        None,
        "slot 0 is already drained. To restore it, run `rlfuse slots restore 0`.",
        None,
        None,
        "slot 1 is the last working slot of 4 (drained: 0, 2, 3); a run needs one",
        "slot 1 is not drained; drained slots: 0, 2, 3",
    ]  # fmt: skip
    assert requests.log.messages[-1].endswith(
        f"All slots of node {OTHER_NODE} are drained; before removing the node: rlfuse slots leave 3"
    )


def test_requests_to_a_run_that_ended_are_errors(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="not a run folder, as it has no status"):
        slots.main(["drain", "1", str(tmp_path)])
    status.begin(tmp_path / "..", "project/name", 1.0)
    status.end(tmp_path / "..", "finished")
    with pytest.raises(RunError, match=r"the run is not running \(finished\)"):
        slots.main([str(tmp_path / "..")])


def test_the_only_running_run_needs_no_folder_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="runs: no such folder"):
        slots.main([])
    for name in ("one", "two"):
        (tmp_path / "runs" / "rlfuse" / name).mkdir(parents=True)
        status.begin(tmp_path / "runs" / "rlfuse" / name, "project/name", 1.0)
    with pytest.raises(RunError, match="2 running jobs: runs/rlfuse/one, runs/rlfuse/two; give the run folder"):
        slots.main([])
    status.end(tmp_path / "runs" / "rlfuse" / "two", "stopped")
    with pytest.raises(RunError, match=f"one/{disk.FOLDER}/{disk.STATE} does not exist; a run writes it after startup"):
        slots.main([])


def test_a_request_not_accepted_in_time_is_withdrawn(tmp_path):
    began = time.monotonic()
    with pytest.raises(SlotRefused, match=r"did not accept the request within 0\.2 s, so it is withdrawn"):
        disk.send_request(tmp_path, "drain", 1, patience=0.2)
    assert time.monotonic() - began < 60 and disk.take_requests(tmp_path) == []


def test_an_expired_request_is_ignored(requests):
    (requests.log.folder / disk.FOLDER).mkdir()
    old = {"id": "x", "do": "drain", "slot": 1, "until": time.time() - 1}
    (requests.log.folder / disk.FOLDER / f"x{disk.REQUEST}").write_text(json.dumps(old))
    (requests.log.folder / disk.FOLDER / f"y{disk.REQUEST}").write_text('{"half of')
    assert run_commands(requests, ["drain", "2"]) == [None] and requests.draining.drained == {2}


def test_an_unwritable_folder_does_not_fail_the_run(requests):
    (requests.log.folder / disk.FOLDER).write_text("a file")

    async def run():
        while not requests.log.messages:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    asyncio.run(requests.serve(run()))
    assert len(requests.log.messages) == 1 and "can't be used" in requests.log.messages[0]


@pytest.mark.slow
def test_a_failed_request_is_answered_and_later_ones_are_processed(requests, monkeypatch):
    monkeypatch.setattr(placement, "spare_nodes", lambda slots: 1 / 0)
    assert run_commands(requests, ["leave", "2"], ["drain", "2"]) == [
        "nothing was done (ZeroDivisionError: division by zero)",
        None,
    ]
    assert not requests.log.stopping.is_requested and requests.draining.drained == {2}


# Planned departure of nodes -------------------------------------------------------------------------------------------


def test_a_node_leaves_after_the_current_step_if_a_spare_node_replaces_it(requests):
    assert run_commands(requests, ["leave", "3"]) == [None]
    freed = f"node {OTHER_NODE} (slot 2, slot 3)"
    assert requests.log.messages == [f"after step 7, which is saved, the run continues on {SPARE} instead of {freed}"]
    stopping = requests.log.stopping
    assert stopping.is_requested and stopping.by is None
    error = stopping.stop_error(7)
    assert isinstance(error, NodeLeft) and error.nodes == (OTHER_NODE.id,)
    assert "the run already ends after the current step" in run_commands(requests, ["leave", "3"])[0]


def test_no_node_leaves_after_the_last_step(requests):
    requests.log.stopping.step = requests.log.total_steps
    assert "the run already ends after the current step" in run_commands(requests, ["leave", "3"])[0]
    assert not requests.log.stopping.is_requested


def test_a_node_that_the_run_needs_cannot_leave(requests, monkeypatch):
    monkeypatch.setattr(placement, "spare_nodes", lambda slots: [])
    (driver_answer, other_answer) = run_commands(requests, ["leave", "0"], ["leave", "2"])
    assert driver_answer.startswith(f"node {DRIVER_NODE} runs the driver process, so it can't leave during the run.")
    assert other_answer.startswith(
        f"node {OTHER_NODE} can't leave: the run needs 4 slots, 2 on each of 2 nodes, and no other node has 2 free."
    )
    assert not requests.log.stopping.is_requested


@pytest.mark.parametrize(("drained", "expected"), [({0, 2, 3}, NodeLeft), ({0, 2}, NodeLost)])
def test_the_loss_of_a_fully_drained_node_is_a_planned_departure(requests, drained, expected):
    requests.draining.drained.update(drained)

    async def lose():
        raise NodeLost("lost node", (OTHER_NODE.id,))

    with pytest.raises(NodeLost) as lost:
        asyncio.run(requests.serve(lose()))
    assert type(lost.value) is expected and lost.value.nodes == (OTHER_NODE.id,)
    assert requests.draining.drained == {0}, "the replacement is another device"


def test_a_spare_node_has_free_slots_for_the_leaving_node(monkeypatch):
    nodes = [Node(name, f"10.0.0.{n}", 1, {"slot": free, "CPU": 4}) for n, (name, free) in enumerate(
        [("a", 0), ("b", 0), ("c", 1), ("d", 2)], 1)]  # fmt: skip
    monkeypatch.setattr(placement, "answering_nodes", lambda: nodes)
    monkeypatch.setattr(placement, "this_node_id", lambda: "a")
    slots = placement.Slots(None, 4, "cpu", nodes=tuple(nodes[:2]))
    assert placement.spare_nodes(slots) == nodes[3:]
    slots = placement.Slots(None, 4, "cuda", nodes=tuple(nodes[:2]))
    assert placement.spare_nodes(slots) == [], "a spare node needs GPUs"


# Rates of drained slots -----------------------------------------------------------------------------------------------


def test_drained_slots_are_probed_before_each_step_and_compared_with_working_slots(requests):
    part = requests.draining
    asyncio.run(part.slot_table())
    assert [part.rate(slot) for slot in range(4)] == [1.0] * 4, "no slot is drained"
    part.drain_slot(1)
    table = asyncio.run(part.slot_table())
    assert part.rate(1) == 2.0 and [slot.drained for slot in table.slots] == [False, True, False, False]
    assert requests.states()[1] == SlotState(1, str(DRIVER_NODE), "CPU", "drained", 2.0)
    assert slots.table(requests.states(), [("generate", 3), ("drained", 0), ("idle", 0)]).splitlines() == [
        "slot  node                 device  rate  state    activity",
        "0     10.0.0.1 (11111111)  CPU     1.00  working  generate, 3 samples",
        "1     10.0.0.1 (11111111)  CPU     2.00  drained  drained",
        "2     10.0.0.2 (22222222)  CPU     1.00  working  idle",
        "3     10.0.0.2 (22222222)  CPU     1.00  working  -",
    ]


def test_a_slot_drained_until_recovery_is_restored_after_recovery(capsys):
    part, speeds = draining(), [2.0, 1.0, 2.0, 2.0]
    rates = part._tuning.rates
    for slot in (0, 1, 2, 3) * 4:
        rates.observe(slot, "decode", 2.0 if slot == 1 else 1.0, 1.0)

    async def probe():
        return speeds

    part._engines.trainer.probe = probe
    part.drain_slot(1, until_recovered=True)
    part.drain_slot(2)
    asyncio.run(part.slot_table())
    assert part.drained == {1, 2}
    speeds[1] = 1.9
    for _ in range(2):
        asyncio.run(part.slot_table())
    assert part.drained == {2}, "the other slot was drained without until_recovered"
    assert "Slot 1 is back to normal speed; resuming work on it." in capsys.readouterr().out and rates.current[1] == 1.0


@pytest.mark.parametrize("measured", [True, False])
def test_an_unmeasured_slot_is_drained_until_probes_are_fast(measured):
    drained, returning = set(), set()
    rates = Rates(4, drained, returning, measured=measured)
    rates.drain(1, until_recovered=True)
    for attempt in (rates, Rates(4, drained, returning, measured=measured)):  # the run may have restarted
        for _ in range(4):
            attempt.record_probe(1, 2.0)
        assert drained == returning == {1}
    for _ in range(2):
        attempt.record_probe(1, 1.05)
    assert not drained and not returning and attempt.current[1] == 1.0


def test_a_permanent_drain_overrides_a_drain_until_recovery():
    rates = Rates(2)
    rates.drain(1, until_recovered=True)
    rates.drain(1)
    for _ in range(4):
        rates.record_probe(1, 1.0)
    assert rates.drained == {1}


def test_relative_times_need_a_measured_working_slot():
    assert relative_times([4.0, 2.0, None], drained={1}) == {1: 2.0}
    assert relative_times([None, 2.0], drained={1}) == {}


def test_slots_of_tensor_parallel_engines_are_numbered_by_engine(requests):
    wide = SlotRequests(requests.log, placement.Slots(None, 8, "cuda", nodes=(DRIVER_NODE, OTHER_NODE)), draining(), 2)
    assert [(each.node, each.device) for each in wide.states()] == [
        (str(node), "2 GPUs") for node in (DRIVER_NODE, DRIVER_NODE, OTHER_NODE, OTHER_NODE)
    ]
