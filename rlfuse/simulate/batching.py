"""Continuous batching in closed form: what one engine decodes, and how long its next steps take.

The context grows by the batch with every step: k steps of b sequences that begin with c cached tokens take k * (step
without context) + step_per_context_token_s * (k * c + b * k * (k - 1) / 2) seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from rlfuse.costs.model import Costs

EPSILON = 1e-9  # steps: an interruption this short before the end of a step belongs to its end


class SimulationError(AssertionError):
    """An engine was asked for what no machine can do: a defect of the controller, a policy or the simulator."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample on an engine."""

    name: str
    prompt: Hashable  # siblings have the same, and share its cache
    prompt_tokens: int
    total: int  # response tokens in the end
    done: int = 0  # response tokens when it was last admitted; before that, those it came with
    cached: bool = False  # its KV cache came with it
    since: int = 0  # step at which it was admitted
    ends: int = -1  # step at which it is whole; -1 while it doesn't run

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.done


@dataclass(slots=True)
class Batch:
    """The sequences of one engine that run, newest last, and those that wait for room, first come first served."""

    costs: Costs
    step: int = 0
    context: int = 0  # tokens in the KV cache
    running: dict[str, Sequence] = field(default_factory=dict)
    waiting: deque[Sequence] = field(default_factory=deque)
    _ends: list[tuple[int, int, Sequence]] = field(default_factory=list)
    _entries: int = 0
    _sharing: dict[Hashable, int] = field(default_factory=dict)

    def seconds(self, steps: int) -> float:
        """Return the cost of the next `steps` steps if no sequence joins or leaves."""
        size = len(self.running)
        grown = self.context + size * (steps - 1) / 2
        return steps * self.costs.decode_step(size, grown)

    def steps_after(self, seconds: float) -> int:
        """Return the steps done when the one in progress after `seconds` of cost ends."""
        size, per_token = len(self.running), self.costs.step_per_context_token_s
        curve = per_token * size / 2
        slope = self.costs.decode_step(size, self.context) - curve
        root = math.sqrt(slope * slope + 4 * curve * seconds)
        return max(0, math.ceil(2 * seconds / (slope + root) - EPSILON))

    def steps_until_change(self) -> int:
        """Return the steps until the first sequence is whole or the cache is full; at least 1."""
        while self._ends[0][2].ends != self._ends[0][0]:  # left or pre-empted since
            heapq.heappop(self._ends)
        return min(self._ends[0][0] - self.step, (self.costs.kv_tokens - self.context) // len(self.running))

    def run(self, steps: int) -> list[Sequence]:
        """Run the steps; remove and return the sequences that are whole now."""
        self.step += steps
        self.context += steps * len(self.running)
        if self.context > self.costs.kv_tokens:
            raise SimulationError(f"the KV cache holds {self.context} tokens of {self.costs.kv_tokens}")
        whole = []
        while self._ends and self._ends[0][0] <= self.step:
            ends, _, sequence = heapq.heappop(self._ends)
            if sequence.ends == ends:
                self._leave(sequence)
                whole.append(sequence)
        return whole

    def admit(self) -> int:
        """Admit sequences in order while there is room; return the tokens to prefill. Siblings share a prompt."""
        prefill = 0
        while self.waiting and len(self.running) < self.costs.max_sequences:
            sequence = self.waiting[0]
            if self.context + sequence.tokens + len(self.running) + 1 > self.costs.kv_tokens:
                break
            self.waiting.popleft()
            prefill += self._enter(sequence)
        return prefill

    def _enter(self, sequence: Sequence) -> int:
        sequence.since, sequence.ends = self.step, self.step + sequence.total - sequence.done
        self.running[sequence.name] = sequence
        self.context += sequence.tokens
        self._entries += 1
        heapq.heappush(self._ends, (sequence.ends, self._entries, sequence))
        sharing = self._sharing.get(sequence.prompt, 0)
        self._sharing[sequence.prompt] = sharing + 1
        missing = 0 if sequence.cached else sequence.done + (0 if sharing else sequence.prompt_tokens)
        sequence.cached = False  # once it is pre-empted, what it came with is gone
        return missing

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.name]
        gained = self.step - sequence.since
        self.context -= sequence.tokens + gained
        sequence.done += gained
        sequence.ends = -1
        self._sharing[sequence.prompt] -= 1
        if not self._sharing[sequence.prompt]:
            del self._sharing[sequence.prompt]

    def preempt(self) -> int:
        """Preempt the newest sequences until the others have room for one step; return how many."""
        count = 0
        while self.context + len(self.running) > self.costs.kv_tokens:
            newest = self.running[next(reversed(self.running))]
            self._leave(newest)
            self.waiting.appendleft(newest)
            count += 1
        return count

    def remove(self, sequence: Sequence) -> bool:
        if sequence.ends >= 0:
            self._leave(sequence)
            return True
        self.waiting.remove(sequence)
        return False
