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

HERE, THERE, SPARE = (Node(id * 8, f"10.0.0.{id}", 1, {}) for id in "123")


class Prober:
    """Ranks of which the second takes twice as long."""

    async def probe(self):
        return [2.0, 1.0, 2.0, None]


def draining(count=4, drained=()):
    engines = SimpleNamespace(rollout=[None] * count, trainer=Prober())
    return Draining(engines, Tuning(Costs(), Lengths(100), Settings(), Rates(count, set(drained))))


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Of four slots on two nodes; the run's process is on the first."""
    monkeypatch.setattr(slot_requests, "LOOK_S", 0.01)
    monkeypatch.setattr(slot_requests, "this_node_id", lambda: HERE.id)
    monkeypatch.setattr(placement, "spare_nodes", lambda slots: [SPARE])
    status.begin(tmp_path, "project/name", time.time())
    said = []
    log = SimpleNamespace(folder=tmp_path, say=said.append, stopping=Stopping(0.0, print), said=said)
    log.journal = SimpleNamespace(recorder=Recorder("driver"))
    log.stopping.step, log.total_steps = 7, 9
    return SlotRequests(log, placement.Slots(None, 4, "cpu", nodes=(HERE, THERE)), draining(), 1)


def asked(desk, *commands):
    """Return the output of commands that are entered one after the other during the run."""
    told = []

    def type_them():
        for words in commands:
            try:
                slots.main([*words, str(desk.log.folder)])
            except SlotRefused as why:
                told.append(str(why))
            else:
                told.append(None)

    async def run():
        typing = threading.Thread(target=type_them)
        typing.start()
        while typing.is_alive():
            await asyncio.sleep(0.01)

    asyncio.run(desk.serve(run()))
    return told


def test_a_slot_is_drained_and_restored_while_the_run_goes_on(desk, capsys):
    assert asked(desk, ["drain", "1"], []) == [None, None]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "slot 1 is drained until it is restored" == desk.log.said[0]
    assert [line.split()[-2] for line in out[2:]] == ["working", "drained", "working", "working"]
    assert desk.draining.drained == {1}
    assert asked(desk, ["restore", "1"], []) == [None, None]
    assert "drained" not in capsys.readouterr().out and desk.draining.drained == set()
    spans = asyncio.run(desk.draining.drain())
    assert [(span.kind, span.attributes) for span in spans] == [("drained", {"slot": 1})] and spans[0].seconds > 0
    assert [(span.kind, span.attributes["do"]) for span in desk.log.journal.recorder.drain()] == [
        ("request", "drain"), ("request", "restore"),
    ]  # fmt: skip
    left = [path.name for path in (desk.log.folder / disk.FOLDER).iterdir()]
    assert left == [disk.STATE], "nothing is left of requests and answers"


@pytest.mark.slow
def test_what_can_not_be_done_is_refused_with_what_is_valid(desk):
    assert asked(
        desk, ["drain", "4"], ["drain", "-1"], ["restore", "2"], ["drain", "0"], ["drain", "0"], ["drain", "2"],
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
    assert desk.log.said[-1].endswith(
        f"All slots of node {THERE} are drained; before removing the node: rlfuse slots leave 3"
    )


def test_a_run_that_does_not_go_on_is_not_asked(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="not a run folder, as it has no status"):
        slots.main(["drain", "1", str(tmp_path)])
    status.begin(tmp_path / "..", "project/name", 1.0)
    status.end(tmp_path / "..", "finished")
    with pytest.raises(RunError, match=r"the run is not running \(finished\)"):
        slots.main([str(tmp_path / "..")])


def test_the_only_run_that_goes_on_needs_no_name(tmp_path, monkeypatch):
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


def test_a_request_that_is_not_taken_in_time_is_withdrawn(tmp_path):
    began = time.monotonic()
    with pytest.raises(SlotRefused, match=r"did not accept the request within 0\.2 s, so it is withdrawn"):
        disk.send_request(tmp_path, "drain", 1, patience=0.2)
    assert time.monotonic() - began < 60 and disk.take_requests(tmp_path) == []


def test_a_request_whose_sender_is_gone_is_not_carried_out(desk):
    (desk.log.folder / disk.FOLDER).mkdir()
    old = {"id": "x", "do": "drain", "slot": 1, "until": time.time() - 1}
    (desk.log.folder / disk.FOLDER / f"x{disk.REQUEST}").write_text(json.dumps(old))
    (desk.log.folder / disk.FOLDER / f"y{disk.REQUEST}").write_text('{"half of')
    assert asked(desk, ["drain", "2"]) == [None] and desk.draining.drained == {2}


def test_a_folder_that_can_not_be_written_to_costs_the_run_nothing(desk):
    (desk.log.folder / disk.FOLDER).write_text("a file")

    async def run():
        while not desk.log.said:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    asyncio.run(desk.serve(run()))
    assert len(desk.log.said) == 1 and "can't be used" in desk.log.said[0]


@pytest.mark.slow
def test_whatever_fails_in_a_request_is_answered_and_those_behind_it_are_carried_out(desk, monkeypatch):
    monkeypatch.setattr(placement, "spare_nodes", lambda slots: 1 / 0)
    assert asked(desk, ["leave", "2"], ["drain", "2"]) == [
        "nothing was done (ZeroDivisionError: division by zero)",
        None,
    ]
    assert not desk.log.stopping.is_requested and desk.draining.drained == {2}


# Nodes that leave ----------------------------------------------------------------------------------------------------


def test_a_node_leaves_after_the_step_under_way_where_another_takes_its_place(desk):
    assert asked(desk, ["leave", "3"]) == [None]
    freed = f"node {THERE} (slot 2, slot 3)"
    assert desk.log.said == [f"after step 7, which is saved, the run continues on {SPARE} instead of {freed}"]
    stopping = desk.log.stopping
    assert stopping.is_requested and stopping.by is None
    left = stopping.stop_error(7)
    assert isinstance(left, NodeLeft) and left.nodes == (THERE.id,)
    assert "the run already ends after the current step" in asked(desk, ["leave", "3"])[0]


def test_no_node_leaves_after_the_last_step_as_nothing_goes_on(desk):
    desk.log.stopping.step = desk.log.total_steps
    assert "the run already ends after the current step" in asked(desk, ["leave", "3"])[0]
    assert not desk.log.stopping.is_requested


def test_a_node_without_which_the_run_has_too_few_slots_stays(desk, monkeypatch):
    monkeypatch.setattr(placement, "spare_nodes", lambda slots: [])
    (here, there) = asked(desk, ["leave", "0"], ["leave", "2"])
    assert here.startswith(f"node {HERE} runs the driver process, so it can't leave during the run.")
    assert there.startswith(
        f"node {THERE} can't leave: the run needs 4 slots, 2 on each of 2 nodes, and no other node has 2 free."
    )
    assert not desk.log.stopping.is_requested


@pytest.mark.parametrize(("drained", "expected"), [({0, 2, 3}, NodeLeft), ({0, 2}, NodeLost)])
def test_a_node_that_goes_by_itself_is_no_failure_where_all_its_slots_were_drained(desk, drained, expected):
    desk.draining.drained.update(drained)

    async def lose():
        raise NodeLost("lost node", (THERE.id,))

    with pytest.raises(NodeLost) as lost:
        asyncio.run(desk.serve(lose()))
    assert type(lost.value) is expected and lost.value.nodes == (THERE.id,)
    assert desk.draining.drained == {0}, "what comes in its place is another device"


def test_a_spare_node_has_room_for_all_slots_of_one_that_leaves(monkeypatch):
    nodes = [Node(name, f"10.0.0.{n}", 1, {"slot": free, "CPU": 4}) for n, (name, free) in enumerate(
        [("a", 0), ("b", 0), ("c", 1), ("d", 2)], 1)]  # fmt: skip
    monkeypatch.setattr(placement, "answering_nodes", lambda: nodes)
    monkeypatch.setattr(placement, "this_node_id", lambda: "a")
    slots = placement.Slots(None, 4, "cpu", nodes=tuple(nodes[:2]))
    assert placement.spare_nodes(slots) == nodes[3:]
    slots = placement.Slots(None, 4, "cuda", nodes=tuple(nodes[:2]))
    assert placement.spare_nodes(slots) == [], "GPUs are needed"


# Rates ---------------------------------------------------------------------------------------------------------------


def test_drained_slots_are_probed_before_a_board_begins_and_compared_with_those_that_work(desk):
    part = desk.draining
    asyncio.run(part.slot_table())
    assert [part.rate(slot) for slot in range(4)] == [1.0] * 4, "nobody is drained"
    part.drain_slot(1)
    table = asyncio.run(part.slot_table())
    assert part.rate(1) == 2.0 and [slot.drained for slot in table.slots] == [False, True, False, False]
    assert desk.states()[1] == SlotState(1, str(HERE), "CPU", "drained", 2.0)
    assert slots.table(desk.states(), [("generate", 3), ("drained", 0), ("idle", 0)]).splitlines() == [
        "slot  node                 device  rate  state    activity",
        "0     10.0.0.1 (11111111)  CPU     1.00  working  generate, 3 samples",
        "1     10.0.0.1 (11111111)  CPU     2.00  drained  drained",
        "2     10.0.0.2 (22222222)  CPU     1.00  working  idle",
        "3     10.0.0.2 (22222222)  CPU     1.00  working  -",
    ]


def test_one_that_is_drained_until_it_is_well_is_back_then(capsys):
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
    assert part.drained == {2}, "whoever drained the other wants it for something else"
    assert "Slot 1 is back to normal speed; resuming work on it." in capsys.readouterr().out and rates.current[1] == 1.0


@pytest.mark.parametrize("measured", [True, False])
def test_a_slot_of_which_nothing_was_seen_is_drained_until_probes_find_it_well(measured):
    drained, returning = set(), set()
    rates = Rates(4, drained, returning, measured=measured)
    rates.drain(1, until_recovered=True)
    for attempt in (rates, Rates(4, drained, returning, measured=measured)):  # the run may have been started anew
        for _ in range(4):
            attempt.record_probe(1, 2.0)
        assert drained == returning == {1}
    for _ in range(2):
        attempt.record_probe(1, 1.05)
    assert not drained and not returning and attempt.current[1] == 1.0


def test_who_is_drained_for_good_does_not_come_back_as_it_was_to_once():
    rates = Rates(2)
    rates.drain(1, until_recovered=True)
    rates.drain(1)
    for _ in range(4):
        rates.record_probe(1, 1.0)
    assert rates.drained == {1}


def test_a_rate_needs_a_slot_that_works_and_was_measured():
    assert relative_times([4.0, 2.0, None], drained={1}) == {1: 2.0}
    assert relative_times([None, 2.0], drained={1}) == {}


def test_slots_of_wide_engines_are_numbered_as_people_see_them(desk):
    wide = SlotRequests(desk.log, placement.Slots(None, 8, "cuda", nodes=(HERE, THERE)), draining(), 2)
    assert [(each.node, each.device) for each in wide.states()] == [
        (str(node), "2 GPUs") for node in (HERE, HERE, THERE, THERE)
    ]
