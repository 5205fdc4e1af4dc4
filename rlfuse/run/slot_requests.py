"""Serve requests of `rlfuse slots` during a run: drain and restore slots, release nodes.

    slots/ID.request.json --> drain, restore --> step.draining --> the running board
                         '--> leave: the current step ends --> checkpoint --> NodeLeft --> `run_with_restarts`: other nodes

Every accepted request is answered. A drained node that disappears is no failure. A folder that cannot be written to
costs the answers, never the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlfuse import clock
from rlfuse.cluster import placement
from rlfuse.cluster.nodes import Node, this_node_id
from rlfuse.errors import NodeLeft, NodeLost, SlotRefused
from rlfuse.events import Span
from rlfuse.observe.run_log import RunLog
from rlfuse.run_folder import slots as disk
from rlfuse.step.draining import Draining

LOOK_S = 1.0


@dataclass
class SlotRequests:
    """Of one attempt of a run. `width`: ranks of a slot, as policies and people see it."""

    log: RunLog
    slots: placement.Slots
    draining: Draining
    width: int
    _told: list[disk.SlotState] = field(default_factory=list)
    _problem: str = ""

    async def serve(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the `work`, and what is asked for meanwhile. NodeLeft in place of the loss of a node that may leave."""
        looking = asyncio.create_task(self._look())
        try:
            await work
        except NodeLost as error:
            expected, left = self._leave_behind(error.nodes), error
            if expected and not isinstance(error, NodeLeft):
                left = NodeLeft(str(error), error.nodes)
            raise left from error.__cause__
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    def _leave_behind(self, gone: Sequence[str]) -> bool:
        planned = self.log.stopping.relocation
        announced = planned.nodes if isinstance(planned, NodeLeft) else ()
        left = [node for node in self.slots.nodes if node.id in gone]
        expected = all(node.id in announced or set(self._on(node)) <= self.draining.drained for node in left)
        for node in left:
            self.draining.drained.difference_update(self._on(node))
        return expected

    async def _look(self) -> None:
        while True:
            try:
                if not self._told:
                    await asyncio.to_thread(disk.begin, self.log.folder)
                for request in await asyncio.to_thread(disk.take_requests, self.log.folder):
                    await self._serve(request)
                await self._publish()
            except Exception as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    where = self.log.folder / disk.FOLDER
                    self.log.say(f"rlfuse slots: {where} can't be used ({type(error).__name__}: {error})")
            await asyncio.sleep(LOOK_S)

    async def _serve(self, request: disk.Request) -> None:
        try:
            if time.time() > request.until:
                raise SlotRefused("the request came too late: its sender is gone, or its host's clock is behind")
            told = await self._do(request)
        except Exception as why:  # also what Ray says, or a file that is no command's: whoever asked waits
            told = str(why) if isinstance(why, SlotRefused) else f"nothing was done ({type(why).__name__}: {why})"
            return await asyncio.to_thread(disk.answer, self.log.folder, request, told, False)
        self.log.say(told)
        now, what = clock.now(), {"slot": request.slot, "do": request.do}
        self.log.journal.recorder.add(Span("request", "driver", now, now, cause=told, attributes=what))
        with suppress(OSError):  # told when it fails again, at the look's end
            await self._publish()  # first: whoever has the answer may look at once
        await asyncio.to_thread(disk.answer, self.log.folder, request, told, True)

    async def _publish(self) -> None:
        if (states := self.states()) != self._told:
            await asyncio.to_thread(disk.publish, self.log.folder, states)
            self._told = states

    async def _do(self, request: disk.Request) -> str:
        slot, draining = request.slot, self.draining
        if request.do == "leave":
            return await self._leave(slot)
        if request.do == "restore":
            draining.restore_slot(slot)
            return f"slot {slot} works again"
        samples = draining.drain_slot(slot, request.until_recovered)
        moved = f", its {samples} samples end soon or go on elsewhere" if samples else ""
        node, more = self._node(slot), ""
        if len(self.slots.nodes) > 1 and set(self._on(node)) <= draining.drained:
            more = f". No slot of node {node} works now; before it goes: rlfuse slots leave {slot}"
        until = "as fast as the others" if request.until_recovered else "restored"
        return f"slot {slot} is drained: it gets no work until it is {until}{moved}{more}"

    async def _leave(self, slot: int) -> str:
        self.draining.require_slot(slot, "freed")
        node, stopping = self._node(slot), self.log.stopping
        spare = await asyncio.to_thread(placement.spare_nodes, self.slots)
        if stopping.is_requested or stopping.step == self.log.total_steps:
            raise SlotRefused("the run ends after the step under way already, and starts anew elsewhere or not at all")
        if why := self._why_not(node, spare):
            raise SlotRefused(why)
        freed = f"node {node} ({', '.join(f'slot {each}' for each in self._on(node))})"
        stopping.relocation = NodeLeft(f"{freed} leaves the run, as it was asked to", (node.id,))
        when = "the step under way" if stopping.step is None else f"step {stopping.step}"
        return f"after {when}, which is saved, the run goes on without {freed}, on {spare[0]} in its place"

    def _why_not(self, node: Node, spare: list[Node]) -> str:
        per_node, nodes = self.slots.count // len(self.slots.nodes), len(self.slots.nodes)
        if node.id == this_node_id():
            return (
                f"node {node} has the run's own process: it can't leave while the run goes on. End the run (Ctrl-C), "
                "which saves it, and start it elsewhere"
            )
        if spare:
            return ""
        return (
            f"node {node} can't leave: the run needs {self.slots.count} slots, {per_node} on each of {nodes} nodes, "
            f"and no node beside its own has {per_node} free. Add one and ask again. If this one goes all the same, "
            "the run goes on from its last checkpoint as soon as another is there (cluster.timeout_s)"
        )

    def states(self) -> list[disk.SlotState]:
        return [self._state(slot) for slot in range(self.draining.count)]

    def _state(self, slot: int) -> disk.SlotState:
        board, drained, rate = self.draining.board, slot in self.draining.drained, self.draining.rate(slot)
        alive = board is None or board.slots[slot].alive
        state = "lost" if not alive else "drained" if drained else "working"
        return disk.SlotState(slot, str(self._node(slot)), self._device(slot), state, round(rate, 3))

    def _device(self, slot: int) -> str:
        cores = self.slots.cores
        if cores is not None:
            return f"core {cores[slot]}"
        kind = "GPU" if self.slots.device == "cuda" else "CPU"
        return kind if self.width == 1 else f"{self.width} {kind}s"

    def _node(self, slot: int) -> Node:
        return self.slots.nodes[slot * self.width * len(self.slots.nodes) // self.slots.count]

    def _on(self, node: Node) -> list[int]:
        return [slot for slot in range(self.draining.count) if self._node(slot) == node]
