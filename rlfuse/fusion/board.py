"""The board of one step: where each sample stands, from waiting to trained. Bookkeeping only, no effects.

Role: the executor writes what happened, the policy reads a `Snapshot`.

    waiting --start(Generate)--> flying --finished--> unscored --scored--> (group complete) --prepare--> ready
       ^                          |   ^                                                                    |
       +------ lost ------<-------+   +-- Move: parted, landed                      Accumulate, Step <-----+

Invariants: a sample is generated once, scored once per kind and accumulated once per pass over the step; mini-batches
are fixed by prompt order before anything runs (where groups are chosen late, by `keep` or because a draw ends with the
first so many, nothing is trained on before). Updates are O(1) per sample, so that a step of many thousands of samples
stays cheap to decide on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from rlfuse.fusion.decisions import (
    ON_WEIGHTS,
    Accumulate,
    Decision,
    Generate,
    Move,
    Score,
    Settings,
    Snapshot,
    Step,
    Switch,
    Train,
)
from rlfuse.fusion.deferred_passes import DeferredPasses
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.mini_batches import MiniBatchProgress
from rlfuse.fusion.scoring_queue import ScoringQueue
from rlfuse.fusion.selection import Draw
from rlfuse.fusion.slot_table import SlotTable
from rlfuse.samples import Group, Partial, Response, Reward, RewardFailure, Sample

GENERATION = "generation"


class Board:
    """`kinds`: kinds of scoring every sample needs; `models`: those the step trains, in order (none while testing).

    `passes`: how often it goes over the samples; `purpose`: what caused the work, for its events; `draw`: how many of
    the groups have to be finished, where not all; `deferred`: kinds that can wait for their mini-batch
    (`DeferredPasses`), if it is known from the start.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        slot_table: SlotTable,
        kinds: Sequence[str],
        models: Sequence[str] = (),
        passes: int = 1,
        mini_batch_groups: int = 1,
        purpose: str = "training",
        settings: Settings | None = None,
        lengths: Lengths | None = None,
        draw: Draw | None = None,
        deferred: Sequence[str] = (),
        now: float = 0.0,
    ):
        self.slot_table, self.purpose, self.kinds = slot_table, purpose, tuple(kinds)
        self.settings, self.lengths = settings or Settings(), lengths or Lengths(slot_table.costs.max_tokens)
        self.groups, self.samples = list[Group](), dict[str, Sample]()
        self.partials: dict[str, Partial] = dict(draw.partials) if draw else {}
        self.batches = 0
        self._of: dict[str, int] = {}
        self._backlog = ScoringQueue(kinds, now)
        self._slot_kinds = sum(kind != "reward" for kind in kinds)
        self._passes_left = dict.fromkeys(kinds, 0)
        self._lacking: list[dict[str, int]] = []  # per group: samples not generated yet, and without each kind of score
        self._complete: list[int] = []
        some = draw is not None and draw.enough < len(groups)
        self._among, self._enough = (draw.among, draw.enough) if some else (inf, inf)
        self._whole: list[int] = []
        self._left: set[int] = set()
        self._surplus: list[tuple[int, list[str]]] = []
        self._open = 0
        self._to_score, self._together = 0.0, False
        self._kept: set[int] | None = None
        self._held_back: dict[str, list[int]] = {}
        self.mini_batches = {model: MiniBatchProgress(passes) for model in models}
        self._deferral = DeferredPasses(() if some else deferred, self.mini_batches.get("actor"))
        self.needed = tuple(kind for kind in kinds if kind not in self._deferral.kinds)
        """Kinds without which a group can't be prepared."""
        self._mini_batch_groups = mini_batch_groups
        self.extend(groups, now)

    def extend(self, groups: Sequence[Group], now: float) -> None:
        """Add a batch of groups to the step; samples that were finished in an earlier step count as just finished."""
        self.batches += 1
        self._kept = None
        first = len(self.groups)
        for number, group in enumerate(groups, first):
            size, prompt_tokens = len(group.samples), len(group.prompt.token_ids)
            self.groups.append(group)
            self.samples |= {sample.id: sample for sample in group.samples}
            self._of |= {sample.id: number for sample in group.samples}
            self._lacking.append(dict.fromkeys((GENERATION, *self.needed), size))
            self._open += size
            for kind in self.kinds:
                self._passes_left[kind] += size
            expected = self.lengths.expect(group.prompt.index)
            begun = {s.id: len(self.partials[s.id].token_ids) if s.id in self.partials else 0 for s in group.samples}
            fresh = {sample.id: begun[sample.id] for sample in group.samples if sample.response is None}
            self.slot_table.queue(number, fresh, prompt_tokens, expected, ahead=number >= self._among)
            self._to_score += size * self._slot_kinds * (prompt_tokens + expected)
        self._together = (
            sum(prompt - each for prompt, each in map(self.slot_table.expected, range(len(self.groups)))) > 0
        )
        self.slot_table.known = all(self.lengths.knows(group.prompt.index) for group in self.groups)
        self.slot_table.replan()
        self._divide()
        for sample in (sample for group in groups for sample in group.samples if sample.response is not None):
            if self._of[sample.id] not in self._left:
                self._note_finished(sample, now)

    # What happens: generation ----------------------------------------------------------------------------------------

    def start(self, decision: Decision, now: float) -> None:
        """A decision is being carried out."""
        if isinstance(decision, Generate):
            self.slot_table.admit(decision.slot, decision.groups, now)
        elif isinstance(decision, Move):
            self.slot_table.start_move(decision.samples, decision.source, decision.target, now)
        elif isinstance(decision, Switch):
            self.slot_table.occupy(decision.slot)
        elif isinstance(decision, Score):
            self._start_scoring(decision.kind, decision.samples)
            self.slot_table.occupy(*self._slots(decision))
        elif isinstance(decision, Accumulate):
            self.mini_batches[decision.model].start(decision.samples)
            self.slot_table.occupy(*self._slots(decision))
        elif isinstance(decision, Train):
            for model, names in decision.samples.items():
                self.mini_batches[model].start(names)
            for kind, names in decision.passes.items():
                self._start_scoring(kind, names)
            self.slot_table.occupy(*range(len(self.slot_table.slots)))
        else:
            self.slot_table.occupy(*range(len(self.slot_table.slots)))

    def _slots(self, decision: Score | Accumulate) -> Iterable[int]:
        if isinstance(decision, Score) and decision.kind == "reward":
            return ()
        return range(len(self.slot_table.slots)) if decision.slot is None else (decision.slot,)

    def finished(self, name: str, response: Response, now: float) -> None:
        """A rollout engine returned a whole sample."""
        sample, group = self.samples[name], self._of[name]
        self.slot_table.finish(name, group, len(response.token_ids), now)
        sample.response = response
        if group not in self._left:
            self._note_finished(sample, now)

    def _note_finished(self, sample: Sample, now: float) -> None:
        group = self._of[sample.id]
        self._open -= 1
        self._to_score += self._slot_kinds * (sample.tokens - sum(self.slot_table.expected(group)))
        awaited = self._together and self._lacking[group][GENERATION] > 1
        self._backlog.finish(self.needed, sample.id, sample.tokens, now, group, awaited)
        if self._deferral.kinds:
            self._deferral.finish(sample.id, group, sample.tokens)
        self._settle(group, GENERATION)
        if self._lacking[group][GENERATION] == 0 and group < self._among:
            self._whole.append(group)
            if len(self._whole) == self._enough:
                self._leave_the_rest()

    def _leave_the_rest(self) -> None:
        """Enough groups are finished: the step ends without the others."""
        late, self._kept = self._late, set(self._whole)
        self._left = set(range(len(self.groups))) - self._kept
        self._surplus = self.slot_table.forget(self._left)
        for group in self._left:
            lacking, names = self._lacking[group], [sample.id for sample in self.groups[group].samples]
            self._open -= lacking[GENERATION]
            for kind in self.kinds:
                self._passes_left[kind] -= lacking[kind]
                self._backlog.drop(kind, names)
        self._to_score = float(sum(tokens for kind, tokens in self._backlog.tokens.items() if kind != "reward"))
        if late:
            self._divide()
            for model, held_back in self._held_back.items():
                self.prepared(model, held_back)

    def take_surplus(self) -> list[tuple[int, list[str]]]:
        """(slot, samples) that are to leave their engines now, since the last call."""
        surplus, self._surplus = self._surplus, []
        return surplus

    def left(self) -> tuple[list[Group], dict[str, Partial]]:
        """Groups that the step did not need, and what their unfinished samples have."""
        groups = [self.groups[number] for number in sorted(self._left)]
        return groups, {s.id: self.partials[s.id] for g in groups for s in g.samples if s.id in self.partials}

    def parted(self, name: str, partial: Partial, now: float) -> int | None:
        """A sample left its engine unfinished; returns the slot it goes on at, if any."""
        self.partials[name] = partial
        return self.slot_table.leave(name, self._of[name], len(partial.token_ids), now)

    def landed(self, name: str, slot: int, now: float) -> Partial:
        """A moved sample goes on at its new slot."""
        self.slot_table.arrive(name, slot, now)
        return self.partials.pop(name)

    def lost(self, slot: int, now: float) -> None:
        """An engine is gone: its samples wait again, from their beginning; its rank can still score and train."""
        self.slot_table.lose(slot, now)

    def switched(self, slot: int, role: str) -> None:
        """A slot has its new role."""
        self.slot_table.slots[slot].role = role
        self.slot_table.release(slot)

    # What happens: scoring and training ------------------------------------------------------------------------------

    def _start_scoring(self, kind: str, names: Iterable[str]) -> None:
        self._backlog.begin(kind)
        for name in names:
            tokens = self._deferral.take(kind, name, self._of[name])
            if tokens is None:
                tokens = self._backlog.take(kind, name)
            if kind != "reward":
                self._to_score -= tokens

    def scored(self, decision: Score, now: float) -> None:
        """A scoring call returned; its results are on the samples."""
        self._end_scoring(decision.kind, decision.samples, now)
        self.slot_table.release(*self._slots(decision))

    def _end_scoring(self, kind: str, names: Iterable[str], now: float) -> None:
        self._backlog.end(kind, now)
        for name in names:
            if (group := self._of[name]) in self._left:
                continue
            self._passes_left[kind] -= 1
            if kind == "reward" and isinstance(self.samples[name].reward, RewardFailure):
                for progress in self.mini_batches.values():
                    progress.drop(group)
            if kind in self._deferral.kinds:
                self._deferral.scored(kind, name)
            else:
                self._settle(group, kind)

    def _settle(self, group: int, what: str) -> None:
        """A sample of the group is generated, or has one more kind of score that it needs."""
        lacking = self._lacking[group]
        lacking[what] -= 1
        if not any(lacking.values()):
            self._complete.append(group)

    def take_complete(self) -> list[int]:
        """Groups that have all they need to be prepared, since the last call."""
        complete, self._complete = self._complete, []
        return complete

    def prepared(self, model: str, groups: Iterable[int]) -> None:
        """The losses of these groups' samples can be computed, once they have what is deferred."""
        if self._late:
            self._held_back.setdefault(model, []).extend(groups)
            return
        live = ((g, s) for g in groups if self._in(g) for s in self.groups[g].samples if isinstance(s.reward, Reward))
        progress = self._deferral if model == "actor" else self.mini_batches[model]
        progress.prepare({sample.id: (group, sample.tokens) for group, sample in live})

    def accumulated(self, decision: Accumulate) -> None:
        """A call that added gradients returned."""
        self.mini_batches[decision.model].finish(decision.samples)
        self.slot_table.release(*self._slots(decision))

    def trained(self, decision: Train, now: float) -> None:
        """A schedule that added gradients of several models, and scored beside that, ran to its end."""
        for model, names in decision.samples.items():
            self.mini_batches[model].finish(names)
        for kind, names in decision.passes.items():
            self._end_scoring(kind, names, now)
        self.slot_table.release(*range(len(self.slot_table.slots)))

    def stepped(self, decision: Step) -> None:
        """An optimizer step was taken."""
        self.mini_batches[decision.model].step()
        self.slot_table.release(*range(len(self.slot_table.slots)))

    def keep(self, groups: Sequence[int], at_most: int) -> None:
        """Train on the first `at_most` of these groups only."""
        self._kept = set(groups[:at_most])
        self._divide()

    @property
    def _late(self) -> bool:
        """Which groups the step learns from is not known yet: those of `_among` that finish first."""
        return self._kept is None and self._enough < self._among

    def _in(self, group: int) -> bool:
        return group < self._among if self._kept is None else group in self._kept

    def _divide(self) -> None:
        """Mini-batches of consecutive groups, in prompt order."""
        chosen = [number for number in range(len(self.groups)) if self._in(number)]
        of = {number: position // self._mini_batch_groups for position, number in enumerate(chosen)}
        count = -(-len(chosen) // self._mini_batch_groups)
        sizes, tokens = [0] * count, [0.0] * count
        for number, part in of.items():
            live = sum(not isinstance(s.reward, RewardFailure) for s in self.groups[number].samples)
            sizes[part] += live
            tokens[part] += live * sum(self.slot_table.expected(number))
        for progress in self.mini_batches.values():
            progress.divide(of, sizes, tokens)

    # What stands -----------------------------------------------------------------------------------------------------

    def snapshot(self, now: float) -> Snapshot:
        """What a policy may know; O(1), but for the plan that now and then is due."""
        slot_table, costs = self.slot_table, self.slot_table.costs
        for kind, samples in self._deferral.due():
            self._backlog.add(kind, samples, now)
        to_score = max(0.0, self._to_score)
        to_train = sum(max(0.0, progress.left_tokens) for progress in self.mini_batches.values())
        slot_table.plan(now, to_score / costs.score_tokens_per_s + to_train / costs.train_tokens_per_s)
        return Snapshot(
            now=now,
            slots=slot_table.slots,
            waiting=slot_table.waiting,
            expected=slot_table.expected,
            shortest_first=slot_table.shortest_first,
            deadline=slot_table.deadline,
            unfinished=self._open,
            unscored=self._backlog.unscored,
            deferred=self._deferral.waiting,
            backlog=self._backlog.tokens,
            oldest=self._backlog.oldest,
            ready={model: progress.ready for model, progress in self.mini_batches.items()},
            steppable=[model for model, progress in self.mini_batches.items() if self._steppable(model, progress)],
            scoring=self._backlog.under_way(),
            to_score=to_score,
            to_train=to_train,
            flying=slot_table.flying,
            context=slot_table.context,
            busy=slot_table.busy,
            free=slot_table.free,
            resting=slot_table.resting,
            open=slot_table.open,
            together=self._together,
            costs=costs,
            settings=self.settings,
        )

    def _steppable(self, model: str, progress: MiniBatchProgress) -> bool:
        return progress.accumulated and self._passes_left.get(ON_WEIGHTS[model], 0) == 0

    @property
    def all_scored(self) -> bool:
        """Every sample is generated and has every score it needs; calls for samples that were left are over, too."""
        left = any(self._passes_left[kind] for kind in self.needed)
        return self._open == 0 and not left and not self._backlog.under_way(self.needed)

    @property
    def quiet(self) -> bool:
        """Nothing is under way."""
        return not self.slot_table.flying and not self.slot_table.busy and not self._backlog.under_way()

    @property
    def done(self) -> bool:
        """All scored, and trained as often as asked."""
        return self.all_scored and self.quiet and all(progress.done for progress in self.mini_batches.values())

    def failures(self) -> list[tuple[Sample, RewardFailure]]:
        """Samples without a reward; they are left out of their groups."""
        return [(s, s.reward) for s in self.samples.values() if isinstance(s.reward, RewardFailure)]

    def kept(self, numbers: Iterable[int] | None = None) -> list[Group]:
        """Groups to train on (of these numbers), with the samples that have a reward; empty groups are gone."""
        numbers = range(len(self.groups)) if numbers is None else numbers
        kept = [
            Group(self.groups[n].prompt, [s for s in self.groups[n].samples if isinstance(s.reward, Reward)])
            for n in numbers
            if self._in(n)
        ]
        return [group for group in kept if group.samples]

    def whole(self) -> list[Sample]:
        """Samples of the groups that the step did not leave."""
        return [s for number, group in enumerate(self.groups) if number not in self._left for s in group.samples]

    def generated(self) -> Mapping[int, list[int]]:
        """Prompt -> lengths of its responses."""
        return {
            group.prompt.index: [len(s.response.token_ids) for s in group.samples]
            for number, group in enumerate(self.groups)
            if number not in self._left
        }
