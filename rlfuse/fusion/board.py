"""The board of one step: the state of every sample, from waiting to trained. Bookkeeping only, without side effects.

    WAITING --Generate--> GENERATING --finished--> FINISHED --scored--> SCORED (group COMPLETE) --prepared--> ready
       ^                    |    ^                                                                              |
       +------- lost -------+    +-- Move: evicted, arrived                        Accumulate, OptimizerStep <--+

Invariants: a sample is generated once, scored once per kind and accumulated once per epoch; mini-batches are fixed by
prompt order before the step starts. Updates are O(1) per sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from rlfuse.fusion.decisions import (
    PASS_BEFORE_STEP,
    Accumulate,
    Decision,
    Generate,
    Move,
    OptimizerStep,
    Role,
    Score,
    Settings,
    Snapshot,
    Switch,
    Train,
)
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.mini_batches import MiniBatchProgress
from rlfuse.fusion.scoring_queue import ScoringQueue
from rlfuse.fusion.selection import Draw
from rlfuse.fusion.slot_table import SlotTable
from rlfuse.fusion.states import GroupRecord, GroupState, SampleRecord, SampleState
from rlfuse.samples import Group, Partial, Response, Reward, RewardFailure, Sample


class Board:
    """Bookkeeping of the samples, slots and mini-batches of one step.

    kinds: kinds of scoring that every sample needs. models: models to train, in order of their steps. passes: PPO
    epochs. purpose: cause of the recorded spans. draw: how many groups must finish, if not all. deferred: kinds that
    may wait for their mini-batch. loss_only: kinds that advantages do not wait for. fused_into_first_update: kinds that
    the first mini-batch does not need. skipped_share: expected share of samples whose actor passes are skipped.
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
        loss_only: Sequence[str] = (),
        fused_into_first_update: Sequence[str] = (),
        skipped_share: float = 0.0,
        now: float = 0.0,
    ):
        self.slot_table, self.purpose, self.kinds = slot_table, purpose, tuple(kinds)
        self.settings, self.lengths = settings or Settings(), lengths or Lengths(slot_table.costs.max_tokens)
        self.groups, self.samples = list[Group](), dict[str, Sample]()
        self.partials: dict[str, Partial] = dict(draw.partials) if draw else {}
        self.batches = self._unfinished = 0
        self.records: dict[str, SampleRecord] = {}
        self.group_records = slot_table.groups
        shares = {"actor": skipped_share}
        self.mini_batches = {model: MiniBatchProgress(passes, shares.get(model, 0.0)) for model in models}
        self._mini_batch_groups, self._fused_into_first_update = mini_batch_groups, frozenset(fused_into_first_update)
        self._eligible, self._needed_groups = inf, inf
        deferred, loss_only = (tuple(kinds) if "actor" in models else () for kinds in (deferred, loss_only))
        if draw is not None and draw.needed < len(groups):
            self._eligible, self._needed_groups, deferred = draw.eligible, draw.needed, ()
        self._queue = ScoringQueue(kinds, now, deferred, self.mini_batches.get("actor"), loss_only)
        self.needed, self._loss_only = self._queue.needed, frozenset((*deferred, *loss_only))
        self._passes_left = dict.fromkeys(kinds, 0)
        self._complete, self._generated, self._surplus = list[int](), list[int](), list[tuple[int, list[str]]]()
        self._tokens_to_score, self._prompts_dominate, self._decided = 0.0, False, False
        """The groups to train on are chosen: by `train_on`, or as the first to finish."""
        self._prepared_early: dict[str, list[int]] = {}
        self.extend(groups, now)

    def extend(self, groups: Sequence[Group], now: float) -> None:
        """Add a batch of groups to the step. Samples that finished in an earlier step count as just finished."""
        self.batches, self._decided = self.batches + 1, False
        for record in self.group_records:
            record.chosen = record.number < self._eligible
        for group in groups:
            self._add(group)
        self._prompts_dominate = sum(record.prompt_tokens - record.expected for record in self.group_records) > 0
        known = all(self.lengths.knows(group.prompt.index) for group in self.groups)
        self.slot_table.set_lengths_known(known, self.settings.max_sequences)
        self._assign_mini_batches()
        for sample in (sample for group in groups for sample in group.generated if sample.response is not None):
            self._record_finished(self.records[sample.id], now)

    def _add(self, group: Group) -> None:
        number, size, prompt_tokens = len(self.groups), len(group.generated), len(group.prompt.token_ids)
        expected, next_step = self.lengths.expect(group.prompt.index), number >= self._eligible
        record = GroupRecord(number, group, prompt_tokens, expected, size, size, not next_step, next_step=next_step)
        kinds = [
            kind
            for kind in self.kinds
            if number >= self._mini_batch_groups or kind not in self._fused_into_first_update
        ]
        for sample in group.generated:
            state = SampleState.WAITING if sample.response is None else SampleState.FINISHED
            begun = len(self.partials[sample.id].token_ids) if sample.id in self.partials else 0
            self.samples[sample.id] = sample
            needed = {"reward"} if sample.is_baseline else set(kinds)
            self.records[sample.id] = each = SampleRecord(sample, sample.id, record, begun, needed, state)
            each.trains = not sample.is_baseline
            record.samples.append(each)
            for kind in needed:
                self._passes_left[kind] += 1
        self.groups.append(group)
        self.group_records.append(record)
        self.slot_table.queue(record, (each for each in record.samples if each.state is SampleState.WAITING))
        self._unfinished += size
        self._tokens_to_score += len(group.samples) * len({*kinds} - {"reward"}) * (prompt_tokens + expected)

    def start(self, decision: Decision, now: float) -> None:
        """Record that a decision is being executed."""
        if isinstance(decision, Generate):
            self.slot_table.admit(decision.slot, decision.groups, now)
        elif isinstance(decision, Move):
            self.slot_table.start_move(decision.samples, decision.source, decision.target)
        else:
            self.slot_table.occupy(*self._slots(decision))
            if isinstance(decision, Score):
                started = [self._start_scoring(kind, decision.samples) for kind in decision.kinds]
                self.slot_table.begin_call(decision, started, now)
            elif isinstance(decision, Accumulate):
                started = [self.mini_batches[model].start(decision.samples) for model in decision.models]
                self.slot_table.begin_call(decision, started, now)
            elif isinstance(decision, Train):
                for model, names in decision.samples.items():
                    self.mini_batches[model].start(names)
                for kind, names in decision.passes.items():
                    self._start_scoring(kind, names)

    def _slots(self, decision: Switch | Score | Accumulate | Train | OptimizerStep) -> Iterable[int]:
        if isinstance(decision, Score) and decision.kind == "reward":
            return ()
        slot = None if isinstance(decision, Train | OptimizerStep) else decision.slot
        return range(len(self.slot_table.slots)) if slot is None else (slot,)

    def finished(self, name: str, response: Response, now: float) -> None:
        """Record the complete response of a sample."""
        record = self.records[name]
        self.slot_table.finish(record, len(response.token_ids), now)
        record.sample.response = response
        self._record_finished(record, now)

    def _record_finished(self, record: SampleRecord, now: float) -> None:
        group, sample = record.group, record.sample
        if group.unneeded:
            return
        self._unfinished -= 1
        self._tokens_to_score += len(record.missing - {"reward"}) * (
            sample.tokens - (group.prompt_tokens + group.expected)
        )
        baseline_missing = group.group.baseline is not None and group.group.baseline.response is None
        awaited = self._prompts_dominate and group.unfinished > 1 + baseline_missing
        self._queue.finish(record, sample.tokens, now, awaited)
        last = group.finish()
        if record.missing <= self._loss_only:
            self._record_scored(record)
        if last and not group.next_step:
            self._generated.append(group.number)
            if len(self._generated) == self._needed_groups:
                self._drop_the_rest()

    def _drop_the_rest(self) -> None:
        """Choose the finished groups for training and drop all others."""
        late, self._decided, chosen = self._awaits_first_finished, True, set(self._generated)
        for group in self.group_records:
            group.chosen = group.number in chosen
        rest = [group for group in self.group_records if not group.chosen]
        for group in rest:
            group.transition_to(GroupState.UNNEEDED)
            self._unfinished -= group.unfinished
            for kind in self.kinds:
                self._passes_left[kind] -= sum(kind in sample.missing for sample in group.samples)
                self._queue.drop(kind, [sample.id for sample in group.samples])
        self._surplus = self.slot_table.drop(rest)
        self._tokens_to_score = float(sum(tokens for kind, tokens in self._queue.tokens.items() if kind != "reward"))
        if late:
            self._assign_mini_batches()
            for model, held_back in self._prepared_early.items():
                self.prepared(model, held_back)

    def take_surplus(self) -> list[tuple[int, list[str]]]:
        """Return the samples that became surplus since the last call and must be evicted, as (slot, sample ids)."""
        surplus, self._surplus = self._surplus, []
        return surplus

    def unneeded_groups(self) -> tuple[list[Group], dict[str, Partial]]:
        """Return the groups that the step did not use, and the partial responses of their samples."""
        groups = [record.group for record in self.group_records if record.unneeded]
        return groups, {s.id: self.partials[s.id] for g in groups for s in g.generated if s.id in self.partials}

    def evicted(self, name: str, partial: Partial, now: float) -> int | None:
        """Record that a sample left its engine. Return the slot that it moves to, or None if it waits."""
        self.partials[name] = partial
        return self.slot_table.evict(self.records[name], len(partial.token_ids), now)

    def arrived(self, name: str, slot: int, now: float) -> Partial:
        """Record that a moved sample enters an engine, and return its partial response."""
        self.slot_table.arrive(self.records[name], slot, now, self.partials[name].kv_key is not None)
        return self.partials.pop(name)

    def engine_lost(self, slot: int, now: float) -> None:
        self.slot_table.lose_engine(slot, now)

    def switched(self, slot: int, role: Role) -> None:
        self.slot_table.slots[slot].role = role
        self.slot_table.release(slot)

    def _start_scoring(self, kind: str, names: Iterable[str]) -> int:
        self._queue.begin(kind)
        tokens = sum(self._queue.take(kind, name, self.records[name].group.number) for name in names)
        self._tokens_to_score -= 0 if kind == "reward" else tokens
        return tokens

    def scored(self, decision: Score, now: float) -> None:
        for kind in decision.kinds:
            self._end_scoring(kind, decision.samples, now)
        self.slot_table.release(*self._slots(decision), now=now)

    def _end_scoring(self, kind: str, names: Iterable[str], now: float) -> None:
        self._queue.end(kind, now)
        for name in names:
            record = self.records[name]
            if (group := record.group).unneeded:
                continue
            self._passes_left[kind] -= 1
            if kind == "reward" and isinstance(record.sample.reward, RewardFailure):
                self._exclude(group.samples if record.sample.is_baseline else [record])
            record.missing.remove(kind)
            if kind in self._loss_only:
                if record.prepared and not record.missing and not record.skipped:
                    self.mini_batches["actor"].prepare({name: (group.number, record.sample.tokens)})
            elif record.missing <= self._loss_only:
                self._record_scored(record)

    def _exclude(self, records: Iterable[SampleRecord]) -> None:
        """Exclude samples from training, because their reward or that of their baseline failed."""
        for record in (each for each in records if each.trains):
            record.trains = False
            for progress in self.mini_batches.values():
                progress.drop(record.group.number)

    def _record_scored(self, record: SampleRecord) -> None:
        record.transition_to(SampleState.SCORED)
        if record.group.score():
            self._complete.append(record.group.number)

    def take_complete(self) -> list[int]:
        """Return the groups that became completely scored since the last call."""
        complete, self._complete = self._complete, []
        return complete

    def prepared(self, model: str, groups: Iterable[int], skipped: Iterable[str] = ()) -> None:
        """Record that the advantages of these groups are computed. Samples may still wait for scores of their loss.

        `skipped`: samples whose actor passes are skipped, those of their scores that no call has started included.
        """
        for name in skipped:
            self.records[name].skipped = True
        if self._awaits_first_finished:
            self._prepared_early.setdefault(model, []).extend(groups)
            return
        chosen = (group for number in groups if (group := self.group_records[number]).chosen)
        for record in (record for group in chosen for record in group.samples):
            if record.trains:
                record.prepared |= model == "actor"
                if model == "actor" and record.skipped:
                    self._skip(record)
                elif not record.missing or model != "actor":
                    self.mini_batches[model].prepare({record.id: (record.group.number, record.sample.tokens)})

    def _skip(self, record: SampleRecord) -> None:
        self._discard_scores(record)
        self.mini_batches["actor"].skip(record.id, record.group.number, record.sample.tokens)

    def _discard_scores(self, record: SampleRecord) -> None:
        """Discard the scores that only the loss of a sample reads, unless a call has started."""
        for kind in record.missing & self._loss_only:
            if tokens := self._queue.discard(kind, record.id, record.group.number):
                self._tokens_to_score -= tokens
                self._passes_left[kind] -= 1
                record.missing.remove(kind)

    @property
    def skipped_share(self) -> float:
        """Return the share of the actor's samples whose passes are skipped."""
        trained = [
            each.skipped for group in self.group_records if group.chosen for each in group.samples if each.trains
        ]
        return sum(trained) / len(trained) if trained else 0.0

    def accumulated(self, decision: Accumulate, now: float) -> None:
        for model in decision.models:
            self.mini_batches[model].finish(decision.samples)
        self.slot_table.release(*self._slots(decision), now=now)

    def trained(self, decision: Train, now: float) -> None:
        for model, names in decision.samples.items():
            self.mini_batches[model].finish(names)
        for kind, names in decision.passes.items():
            self._end_scoring(kind, names, now)
        self.slot_table.release(*self._slots(decision))

    def stepped(self, decision: OptimizerStep) -> None:
        for model in decision.models:
            self.mini_batches[model].step()
        self.slot_table.release(*self._slots(decision))

    def train_on(self, groups: Sequence[int], at_most: int) -> None:
        """Choose the first `at_most` of these groups for training; the others are not chosen later either."""
        self._decided, chosen = True, set(groups[:at_most])
        for record in self.group_records:
            record.chosen = record.number in chosen
            for sample in () if record.chosen else record.samples:
                self._discard_scores(sample)
        self._assign_mini_batches()

    @property
    def _awaits_first_finished(self) -> bool:
        """Return whether the groups to train on are still open: the first of the eligible groups to finish."""
        return not self._decided and self._needed_groups < self._eligible

    def _assign_mini_batches(self) -> None:
        chosen = [group for group in self.group_records if group.chosen]
        of = {group.number: position // self._mini_batch_groups for position, group in enumerate(chosen)}
        count = -(-len(chosen) // self._mini_batch_groups)
        sizes, tokens = [0] * count, [0.0] * count
        for group in chosen:
            live = sum(each.trains for each in group.samples)
            sizes[of[group.number]] += live
            tokens[of[group.number]] += live * (group.prompt_tokens + group.expected)
        for progress in self.mini_batches.values():
            progress.set_mini_batches(of, sizes, tokens)

    def snapshot(self, now: float) -> Snapshot:
        """Return the snapshot for a policy. O(1), except when the slots are replanned."""
        slot_table, costs = self.slot_table, self.slot_table.costs
        self._queue.add_due(now)
        tokens_to_score = max(0.0, self._tokens_to_score)
        tokens_to_train = sum(max(0.0, progress.remaining_tokens) for progress in self.mini_batches.values())
        slot_table.plan(now, tokens_to_score / costs.score_tokens_per_s + tokens_to_train / costs.train_tokens_per_s)
        return Snapshot(
            now=now,
            slots=slot_table.slots,
            waiting=slot_table.waiting,
            expected=slot_table.expected,
            shortest_first=slot_table.shortest_first,
            deadline=slot_table.deadline,
            unfinished=self._unfinished,
            finished=slot_table.take_finished(),
            unscored=self._queue.unscored,
            deferred=self._queue.deferred,
            backlog=self._queue.tokens,
            waiting_since=self._queue.waiting_since,
            ready={model: progress.ready for model, progress in self.mini_batches.items()},
            ready_to_step=[
                model for model, progress in self.mini_batches.items() if self._is_ready_to_step(model, progress)
            ],
            scoring=self._queue.under_way(),
            tokens_to_score=tokens_to_score,
            tokens_to_train=tokens_to_train,
            in_flight=slot_table.in_flight,
            context=slot_table.context,
            busy=slot_table.busy,
            idle_trainers=slot_table.idle_trainers,
            all_ranks_idle=slot_table.all_ranks_idle,
            idle_engines=slot_table.idle_engines,
            engines_with_room=slot_table.engines_with_room,
            generating=slot_table.generating,
            slow_engines=slot_table.slow_engines,
            effective_slots=slot_table.effective_slots,
            ends=slot_table.ends,
            prompts_dominate=self._prompts_dominate,
            costs=costs,
            settings=self.settings,
        )

    def _is_ready_to_step(self, model: str, progress: MiniBatchProgress) -> bool:
        return progress.accumulated and not any(map(self._passes_left.get, ("reward", PASS_BEFORE_STEP[model])))

    @property
    def all_scored(self) -> bool:
        """Return whether every sample is generated and scored, and no scoring call is running."""
        left = any(self._passes_left[kind] for kind in self.needed)
        return self._unfinished == 0 and not left and not self._queue.under_way(self.needed)

    @property
    def idle(self) -> bool:
        return not self.slot_table.in_flight and not self.slot_table.busy and not self._queue.under_way()

    @property
    def done(self) -> bool:
        return self.all_scored and self.idle and all(progress.done for progress in self.mini_batches.values())

    def failures(self) -> list[tuple[Sample, RewardFailure]]:
        """Return the samples whose reward failed; they are excluded from training."""
        return [(s, s.reward) for s in self.samples.values() if isinstance(s.reward, RewardFailure)]

    def groups_to_train(self, numbers: Iterable[int] | None = None) -> list[Group]:
        """Return the groups to train on (of `numbers`, if given), without samples whose reward failed or is awaited."""
        records = self.group_records if numbers is None else [self.group_records[number] for number in numbers]
        kept = []
        for group in (record for record in records if record.chosen):
            trained = [each.sample for each in group.samples if self._is_trainable(each)]
            kept.append(Group(group.group.prompt, trained, group.group.baseline))
        return [group for group in kept if group.samples]

    def _is_trainable(self, record: SampleRecord) -> bool:
        """Return whether a sample is scored, or needs no reward, and none failed."""
        sample, needs_reward = record.sample, "reward" in self.kinds
        return record.trains and (isinstance(sample.reward, Reward) if needs_reward else sample.response is not None)

    def needed_samples(self) -> list[Sample]:
        return [sample for record in self.group_records if not record.unneeded for sample in record.group.samples]

    def response_lengths(self) -> Mapping[int, list[int]]:
        return {
            record.group.prompt.index: [len(s.response.token_ids) for s in record.group.samples if s.response]
            for record in self.group_records
            if not record.unneeded
        }
