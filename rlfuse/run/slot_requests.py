"""Serve requests of `rlfuse slots` during a run: drain and restore slots, release nodes.

    slots/ID.request.json --> drain, restore --> step.draining --> the running slot table
                         '--> leave: end of step --> checkpoint --> NodeLeft --> `run_with_restarts`: other nodes

The loss of a drained node is not a failure. If the folder is not writable, answers are lost, but the run continues.
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
    """Server of slot requests during one attempt of a run. `width`: ranks per slot (the tensor-parallel size)."""

    log: RunLog
    slots: placement.Slots
    draining: Draining
    width: int
    _published: list[disk.SlotState] = field(default_factory=list)
    _problem: str = ""

    async def serve(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` and serve requests meanwhile. Raises NodeLeft instead of NodeLost for a planned drain."""
        serving = asyncio.create_task(self._serve_requests())
        try:
            await work
        except NodeLost as error:
            expected, left = self._remove_nodes(error.nodes), error
            if expected and not isinstance(error, NodeLeft):
                left = NodeLeft(str(error), error.nodes)
            raise left from error.__cause__
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    def _remove_nodes(self, lost: Sequence[str]) -> bool:
        planned = self.log.stopping.relocation
        announced = planned.nodes if isinstance(planned, NodeLeft) else ()
        left = [node for node in self.slots.nodes if node.id in lost]
        expected = all(node.id in announced or set(self._on(node)) <= self.draining.drained for node in left)
        for node in left:
            self.draining.drained.difference_update(self._on(node))
        return expected

    async def _serve_requests(self) -> None:
        while True:
            try:
                if not self._published:
                    await asyncio.to_thread(disk.open_requests, self.log.folder)
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
                raise SlotRefused("the request has expired: its sender is gone, or the clock of its host is behind")
            message = await self._execute(request)
        except Exception as why:  # including errors of Ray and malformed requests: the sender waits for an answer
            message = str(why) if isinstance(why, SlotRefused) else f"nothing was done ({type(why).__name__}: {why})"
            return await asyncio.to_thread(disk.answer, self.log.folder, request, message, False)
        self.log.say(message)
        now, attributes = clock.now(), {"slot": request.slot, "do": request.do}
        self.log.journal.recorder.add(Span("request", "driver", now, now, cause=message, attributes=attributes))
        with suppress(OSError):  # reported if it fails again in `_serve_requests`
            await self._publish()  # before the answer, as its receiver may read the states at once
        await asyncio.to_thread(disk.answer, self.log.folder, request, message, True)

    async def _publish(self) -> None:
        if (states := self.states()) != self._published:
            await asyncio.to_thread(disk.publish_states, self.log.folder, states)
            self._published = states

    async def _execute(self, request: disk.Request) -> str:
        slot, draining = request.slot, self.draining
        if request.do == "leave":
            return await self._leave(slot)
        if request.do == "restore":
            draining.restore_slot(slot)
            return f"slot {slot} is restored"
        samples = draining.drain_slot(slot, request.until_recovered)
        moved = f"; its {samples} samples finish soon or move to other slots" if samples else ""
        node, more = self._node(slot), ""
        if len(self.slots.nodes) > 1 and set(self._on(node)) <= draining.drained:
            more = f". All slots of node {node} are drained; before removing the node: rlfuse slots leave {slot}"
        until = "as fast as the others" if request.until_recovered else "restored"
        return f"slot {slot} is drained until it is {until}{moved}{more}"

    async def _leave(self, slot: int) -> str:
        self.draining.require_slot(slot, "freed")
        node, stopping = self._node(slot), self.log.stopping
        spare = await asyncio.to_thread(placement.spare_nodes, self.slots)
        if stopping.is_requested or stopping.step == self.log.total_steps:
            raise SlotRefused("the run already ends after the current step")
        if why := self._why_not(node, spare):
            raise SlotRefused(why)
        freed = f"node {node} ({', '.join(f'slot {each}' for each in self._on(node))})"
        stopping.relocation = NodeLeft(f"{freed} leaves the run, as requested", (node.id,))
        when = "the current step" if stopping.step is None else f"step {stopping.step}"
        return f"after {when}, which is saved, the run continues on {spare[0]} instead of {freed}"

    def _why_not(self, node: Node, spare: list[Node]) -> str:
        per_node, nodes = self.slots.count // len(self.slots.nodes), len(self.slots.nodes)
        if node.id == this_node_id():
            return (
                f"node {node} runs the driver process, so it can't leave during the run. Stop the run (Ctrl-C), which "
                "saves a checkpoint, and resume it elsewhere"
            )
        if spare:
            return ""
        return (
            f"node {node} can't leave: the run needs {self.slots.count} slots, {per_node} on each of {nodes} nodes, "
            f"and no other node has {per_node} free. Add a node and retry. If this node is lost anyway, the run "
            "resumes from its last checkpoint once another node is available (cluster.timeout_s)"
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
