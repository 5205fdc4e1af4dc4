"""Read tables of training jobs in the format of a published straggler study (arXiv 2505.05713, section 3).

params-all-gather --> first forward of the chunk      last backward --> layernorm, embedding, grads, clip, step
forward-recv --> forward-compute --> forward-send       backward likewise; operations of a stream run in order
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from rlfuse.errors import UserError
from rlfuse.tools.whatif.operations import NO_GROUP, Operations

FORWARD, BACKWARD = "forward", "backward"
COMPUTE = ("forward-compute", "backward-compute", "gc", "first-op")  # operations of the compute stream
P2P = ("forward-send", "forward-recv", "backward-send", "backward-recv")
DATA = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce")  # collectives over data ranks
CLIP, EMBEDDING = "optimizer-clip-main-grad", "embedding-grads-all-reduce"
TAIL = (
    "layernorm-grads-all-reduce",
    EMBEDDING,
    *DATA[1:],
    CLIP,
    "optimizer",
)  # operations after the last backward, in this order
KINDS = (*COMPUTE, *P2P, DATA[0], *TAIL)
COMMUNICATION = (*P2P, *DATA, CLIP, EMBEDDING, "layernorm-grads-all-reduce")
NEEDED = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
NUMBERS = {"seq_id": 0, "mc": 0, "mb_id": 0, "gmc": None}
"""Optional columns and their defaults; `gmc` (global model chunk) defaults to the stage for a single chunk."""
CLOCK_S = 5e-4  # clock tolerance between hosts


class TraceError(UserError):
    """Invalid table of operations."""


def read(path: Path) -> pd.DataFrame:
    """Return the rows of a `.parquet` or `.csv` file. Raises TraceError for missing columns or invalid values."""
    if path.suffix not in (".parquet", ".csv"):
        raise TraceError(f"--trace {path}: must be a .parquet or .csv file")
    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise TraceError(f"--trace {path}: {error}") from error
    if missing := [name for name in NEEDED if name not in table.columns]:
        raise TraceError(
            f"--trace {path}: missing columns {', '.join(missing)}; the file has {', '.join(map(str, table.columns))}"
        )
    if table.empty:
        raise TraceError(f"--trace {path}: the table has no rows")
    if unknown := sorted(set(table["optype"].astype(str)) - set(KINDS)):
        raise TraceError(f"--trace {path}: optype {', '.join(unknown)} is unknown; valid: {', '.join(KINDS)}")
    for name in ("start_ts", "duration"):
        values = pd.to_numeric(table[name], errors="coerce")
        if wrong := int((~np.isfinite(values) | (values < 0 if name == "duration" else False)).sum()):
            raise TraceError(f"--trace {path}: {name} is not a valid number of seconds in {wrong} of {len(table)} rows")
    return table


def operations_of(table: pd.DataFrame) -> Operations:
    """Return the operations of a table with their dependencies. Raises TraceError for unmatched sends and receives."""
    return _Builder(_sorted(table)).operations()


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    stages = int(table["stage"].max()) + 1
    columns = {name: table[name] for name in NEEDED}
    for name, default in NUMBERS.items():
        given = table[name] if name in table.columns else pd.Series(np.nan, index=table.index)
        columns[name] = pd.to_numeric(given, errors="coerce").fillna(-1 if default is None else default)
    sorted_ = pd.DataFrame(columns)
    sorted_["optype"] = pd.Categorical(sorted_["optype"].astype(str), categories=KINDS).codes
    sorted_["gmc"] = np.where(sorted_["gmc"] < 0, sorted_["mc"] * stages + sorted_["stage"], sorted_["gmc"])
    sorted_["step"] = pd.factorize(sorted_["step"], sort=True)[0]
    return sorted_.sort_values(["step", "dp_rank", "stage", "start_ts", "seq_id", "optype"]).reset_index(drop=True)


@cache
def _members(names: tuple[str, ...]) -> np.ndarray:
    return np.isin(KINDS, names)


@dataclass(slots=True)
class _Worker:
    step: int
    rank: int
    stage: int
    kinds: np.ndarray  # int [n]: kinds of the operations from index `first`
    first: int

    def of(self, *names: str) -> np.ndarray:
        return self.first + np.flatnonzero(_members(names)[self.kinds])

    def __str__(self) -> str:
        return f"stage {self.stage} of data rank {self.rank} in step {self.step}"


class _Builder:
    def __init__(self, table: pd.DataFrame):
        self.numbers = table[["step", "dp_rank", "stage"]].to_numpy()
        self.kinds, self.start = table["optype"].to_numpy(), table["start_ts"].to_numpy(float)
        self.end = self.start + table["duration"].to_numpy(float)
        self.chunk, self.global_chunk = table["mc"].to_numpy(), table["gmc"].to_numpy()
        self.micro_batch = table["mb_id"].to_numpy()
        self.stages, self.chunks = int(table["stage"].max()) + 1, int(table["gmc"].max()) + 1
        self.waits: list[tuple[np.ndarray, np.ndarray]] = []
        self.pairs: list[np.ndarray] = []
        self.groups: dict[tuple, list[int]] = defaultdict(list)
        self.sends: dict[tuple, np.ndarray] = {}  # (step, rank, receiving stage, direction) -> sends, in order
        self.receives: dict[tuple, np.ndarray] = {}

    def operations(self) -> Operations:
        for worker in self._workers():
            for stream in (COMPUTE, *((kind,) for kind in P2P), DATA[:2]):
                self._chain(worker.of(*stream))
            for direction in (FORWARD, BACKWARD):
                self._pipeline(worker, direction)
            self._data_parallel(worker)
            self._micro_batches(worker)
        self._pair()
        group = np.full(len(self.kinds), NO_GROUP)
        for number, members in enumerate(self.groups.values()):
            group[members] = number
        waits = [np.stack([np.atleast_1d(each) for each in pair], axis=1) for pair in self.waits]
        step, rank, stage = self.numbers.T
        return Operations(
            kind=self.kinds,
            kinds=KINDS,
            step=step,
            stage=stage,
            rank=rank,
            start=self.start,
            end=self.end,
            waits=np.concatenate([np.empty((0, 2), np.int64), *waits]),
            group=group,
            pairs=np.concatenate([np.empty((0, 3), np.int64), *self.pairs]),
        )

    def _workers(self) -> Iterator[_Worker]:
        starts = np.flatnonzero(np.any(np.diff(self.numbers, axis=0, prepend=-1) != 0, axis=1))
        for first, end in zip(starts, [*starts[1:], len(self.numbers)], strict=True):
            step, rank, stage = map(int, self.numbers[first])
            yield _Worker(step, rank, stage, self.kinds[first:end], int(first))

    def _chain(self, operations: np.ndarray) -> None:
        self.waits.append((operations[1:], operations[:-1]))

    def _pipeline(self, worker: _Worker, direction: str) -> None:
        """Receive, compute, send; a receive starts when the previous computation has ended."""
        computed = worker.of(f"{direction}-compute")
        if self.stages == 1 or not len(computed):
            return
        chunk = self.global_chunk[computed]
        first, last = (0, self.chunks - 1) if direction == FORWARD else (self.chunks - 1, 0)
        received, takes = self._matched(worker, f"{direction}-recv", computed, chunk != first)
        sent, gives = self._matched(worker, f"{direction}-send", computed, chunk != last)
        self.waits += [(computed[takes], received), (sent, computed[gives])]
        later = takes > 0
        self.waits.append((received[later], computed[takes[later] - 1]))
        towards = 1 if direction == FORWARD else -1
        real = chunk[takes] != first
        self.receives[worker.step, worker.rank, worker.stage, direction] = received[real]
        real = chunk[gives] != last
        self.sends[worker.step, worker.rank, (worker.stage + towards) % self.stages, direction] = sent[real]

    def _matched(
        self, worker: _Worker, kind: str, computed: np.ndarray, needed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the transfers of a kind, and the index in `computed` of the computation of each. Profilers may record
        a transfer for every computation, or for all but the first, and some before or after all computations."""
        transfers, receives = worker.of(kind), kind.endswith("recv")
        if receives:
            transfers = transfers[self.start[transfers] <= self.start[computed].max() + CLOCK_S]
        else:
            transfers = transfers[self.end[transfers] >= self.end[computed].min() - CLOCK_S]
        positions = np.arange(len(computed))
        for candidates in (positions[needed], positions, *([positions[1:]] if receives else [])):
            if len(candidates) == len(transfers):
                return transfers, candidates
        raise TraceError(f"{worker}: {len(transfers)} {kind} operations, but {int(needed.sum())} computations need one")

    def _micro_batches(self, worker: _Worker) -> None:
        """Pair forward and backward of each chunk and micro-batch, by `mb_id` or by order."""
        both = [worker.of(f"{direction}-compute") for direction in (FORWARD, BACKWARD)]
        for chunk in np.unique(self.global_chunk[np.concatenate(both)]):
            mine = [each[self.global_chunk[each] == chunk] for each in both]
            forward, backward = (each[np.argsort(self.micro_batch[each], kind="stable")] for each in mine)
            if len(forward) == len(backward) and (self.micro_batch[forward] == self.micro_batch[backward]).all():
                self.pairs.append(np.stack([forward, backward, np.full(len(forward), int(chunk))], axis=1))

    def _data_parallel(self, worker: _Worker) -> None:
        """Add dependencies of parameter gathers (before the first forward of a chunk) and the tail (after backward)."""
        stream, chunk = worker.of(*COMPUTE), self.chunk
        gathered = {int(chunk[operation]): operation for operation in worker.of(DATA[0])}
        for operation in worker.of("forward-compute"):
            if (before := gathered.pop(int(chunk[operation]), None)) is not None:
                self.waits.append((operation, before))
        reduced, backward = worker.of("grads-reduce-scatter"), worker.of("backward-compute")
        overlapped = bool(len(reduced) and len(backward)) and (
            self.start[reduced[0]] < self.end[backward].max() - CLOCK_S
        )
        if overlapped:
            for operation in reduced:
                own = backward[chunk[backward] == chunk[operation]]
                self.waits.append((operation, own[-1] if len(own) else backward[0]))
        kinds = [kind for kind in TAIL if not (overlapped and kind == "grads-reduce-scatter")]
        tail = np.concatenate([worker.of(kind) for kind in kinds])
        if len(tail):
            self._chain(tail)
            before = [stream[-1:], reduced[-1:] if overlapped else reduced[:0]]
            self.waits += [(np.full(len(each), tail[0]), each) for each in before]
        self._collectives(worker)

    def _collectives(self, worker: _Worker) -> None:
        shared = {**dict.fromkeys(DATA, (worker.stage,)), EMBEDDING: (worker.rank,), CLIP: ()}
        for kind, by in shared.items():
            for number, operation in enumerate(worker.of(kind)):
                self.groups[kind, worker.step, *by, number].append(int(operation))

    def _pair(self) -> None:
        for key, received in self.receives.items():
            sent = self.sends.get(key, received[:0])
            if len(sent) != len(received):
                step, rank, stage, direction = key
                raise TraceError(
                    f"step {step}, data rank {rank}: {len(received)} {direction}-recv on stage {stage}, but its "
                    f"neighbour has {len(sent)} sends"
                )
            for number, pair in enumerate(zip(sent, received, strict=True)):
                self.groups["p2p", *key, number] = [int(each) for each in pair]
