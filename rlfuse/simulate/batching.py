"""Closed-form model of continuous batching on one engine.

Each step adds one token per sequence to the context: k steps of b sequences that start with c cached tokens take
k * (step without context) + step_per_context_token_s * (k * c + b * k * (k - 1) / 2) seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from rlfuse.costs.model import Costs

EPSILON = 1e-9  # in steps: an interruption this close to the end of a step counts as its end


class SimulationError(AssertionError):
    """Violated invariant of the simulated machine: a bug in the controller, a policy or the simulator."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample on an engine."""

    name: str
    prompt: Hashable  # samples of the same prompt share its cache
    prompt_tokens: int
    total: int  # response tokens when finished
    done: int = 0  # response tokens when last admitted; initially those of the partial
    cached: bool = False  # True if its KV cache was transferred with it
    since: int = 0  # step at which it was admitted
    ends: int = -1  # step at which it finishes; -1 while it does not run

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.done


@dataclass(slots=True)
class Batch:
    """Running sequences of one engine, newest last, and its first-in-first-out queue of waiting ones."""

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
        """Return the number of steps done once the step in progress after `seconds` of cost has ended."""
        size, per_token = len(self.running), self.costs.step_per_context_token_s
        curve = per_token * size / 2
        slope = self.costs.decode_step(size, self.context) - curve
        root = math.sqrt(slope * slope + 4 * curve * seconds)
        return max(0, math.ceil(2 * seconds / (slope + root) - EPSILON))

    def steps_until_change(self) -> int:
        """Return the steps until the first sequence finishes or the cache is full; at least 1."""
        while self._ends[0][2].ends != self._ends[0][0]:  # removed or pre-empted since
            heapq.heappop(self._ends)
        return min(self._ends[0][0] - self.step, (self.costs.kv_tokens - self.context) // len(self.running))

    def run(self, steps: int) -> list[Sequence]:
        """Run `steps` steps; remove and return the finished sequences."""
        self.step += steps
        self.context += steps * len(self.running)
        if self.context > self.costs.kv_tokens:
            raise SimulationError(f"the KV cache holds {self.context} tokens of {self.costs.kv_tokens}")
        completed = []
        while self._ends and self._ends[0][0] <= self.step:
            ends, _, sequence = heapq.heappop(self._ends)
            if sequence.ends == ends:
                self._leave(sequence)
                completed.append(sequence)
        return completed

    def admit(self) -> int:
        """Admit sequences in order while there is room; return the tokens to prefill. A prompt is prefilled once."""
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
        to_prefill = 0 if sequence.cached else sequence.done + (0 if sharing else sequence.prompt_tokens)
        sequence.cached = False  # a transferred cache is lost on pre-emption
        return to_prefill

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.name]
        generated = self.step - sequence.since
        self.context -= sequence.tokens + generated
        sequence.done += generated
        sequence.ends = -1
        self._sharing[sequence.prompt] -= 1
        if not self._sharing[sequence.prompt]:
            del self._sharing[sequence.prompt]

    def preempt(self) -> int:
        """Preempt the newest sequences until the others have room for one step; return their number."""
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
