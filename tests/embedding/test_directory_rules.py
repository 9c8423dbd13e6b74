"""The directory against dictionaries that say the same, and what it promises about whose slot is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recsys_offload.embedding import directory as directory_module
from recsys_offload.embedding.config import SparseOptimizerSettings
from recsys_offload.embedding.directory import FIRST_SCORE, HALF_LIFE_IN_FILLS, Admission, Directory
from recsys_offload.embedding.kernels import host_directory as kernels
from recsys_offload.embedding.store import HostTables
from recsys_offload.embedding.threads import KernelThreads

Batches = list[list[int]]
Coming = Sequence[tuple[int, list[int]]]

THREADS = {count: KernelThreads(count) for count in (1, 2, 4)}
# The table of sums has 16 steps per unit of log2, and the slope there is at most a half.
SCORE_ERROR_OF_A_USE = 1 / 32 + 1 / kernels.SCORE_UNIT
# Victims are queued in buckets of scores, in units of log2.
ORDER_WITHIN = 1 / 64


def array(rows: Sequence[int]) -> np.ndarray:
    return np.array(rows, np.int64)


def arrays_of(directory: Directory) -> dict[str, np.ndarray]:
    """Copies of all that a directory remembers in arrays."""
    return {name: value.copy() for name, value in vars(directory).items() if isinstance(value, np.ndarray)}


def same_arrays(directory: Directory, before: dict[str, np.ndarray]) -> bool:
    now = arrays_of(directory)
    return now.keys() == before.keys() and all(np.array_equal(now[name], before[name]) for name in now)


def next_use(row: int, coming: Coming) -> float:
    """The first of the coming batches that needs a row; infinity for none."""
    return min((number for number, rows in coming if row in rows), default=math.inf)


class Checked:
    """A directory, and beside it what it has to say. Every answer is compared.

    After an admission, ``victims`` are the rows that gave up a slot, and ``kept`` those that might have instead.
    """

    def __init__(self, rows: int, slots: int, threads: int = 1) -> None:
        self.directory = Directory(rows, slots, THREADS[threads])
        self.rows, self.slots = rows, slots
        self.slot_of: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self.uses: dict[int, set[int]] = {row: set() for row in range(rows)}
        self.uses_here: dict[int, set[int]] = {}
        self.unfinished: list[int] = []
        self.flushed = -1
        self.half_life: float | None = None
        self.next = 0
        self.planned: dict[int, np.ndarray] = {}
        self.victims: list[int] = []
        self.kept: list[int] = []
        self.check()

    @property
    def oldest(self) -> int:
        return min(self.unfinished, default=self.next)

    def held(self) -> set[int]:
        """The rows that a batch uses which is unfinished, or later than one that is."""
        return {row for row in self.slot_of if self.last_use[row] >= self.oldest}

    def score(self, row: int) -> float:
        """How much a row has been used; a use counts half after each half-life."""
        assert self.half_life is not None
        newest = max(self.uses[row])
        past = sum(2.0 ** ((use - newest) / self.half_life) for use in self.uses[row])
        return newest / self.half_life + math.log2(past)

    def begin(self) -> int:
        """The number of a new batch."""
        self.next += 1
        self.unfinished.append(self.next - 1)
        return self.next - 1

    def plan(self, number: int, rows: list[int]) -> np.ndarray:
        """A batch's rows, in the same array whenever the batch is named, as a pipeline has them."""
        return self.planned.setdefault(number, array(rows))

    def admit(self, rows: list[int], number: int, coming: Coming = ()) -> Admission | int:
        before = dict(self.slot_of)
        if self.half_life is None and rows:
            self.half_life = HALF_LIFE_IN_FILLS * max(1.0, self.slots / len(rows))
        for row in set(rows) & before.keys():
            self.last_use[row] = max(self.last_use[row], number)
            self.uses[row].add(number)
            self.uses_here[row].add(number)
        held = self.held()
        missing = [position for position, row in enumerate(rows) if row not in before]
        room = self.slots - len(held)
        later = [(batch, self.plan(batch, batch_rows)) for batch, batch_rows in coming]
        admission = self.directory.admit(self.plan(number, rows), number, self.oldest, later)
        if len(missing) > room:
            assert admission == len(missing) - room
            self.check()
            return admission
        assert isinstance(admission, Admission)
        assert [admission.slots.dtype, admission.fetch.dtype] == [np.int32, np.int32]
        assert [admission.write_back_rows.dtype, admission.write_back_slots.dtype] == [np.int64, np.int64]
        assert len(admission.slots) == len(rows) and sorted(admission.fetch.tolist()) == missing
        slots = dict(zip(rows, admission.slots.tolist(), strict=True))
        assert all(slots[row] == before[row] for row in rows if row in before)
        row_in = {slot: row for row, slot in before.items()}
        self.victims = [row_in[slots[rows[position]]] for position in missing if slots[rows[position]] in row_in]
        self.kept = [row for row in before if row not in held and row not in self.victims]
        assert len(set(self.victims)) == len(self.victims) == max(0, len(missing) - (self.slots - len(before)))
        assert not held.intersection(self.victims)
        written_back = list(zip(admission.write_back_rows.tolist(), admission.write_back_slots.tolist(), strict=True))
        changed = [(row, before[row]) for row in self.victims if self.last_use[row] > self.flushed]
        assert sorted(written_back) == sorted(changed)
        assert admission.newest_use == max((self.last_use[row] for row in self.victims), default=-1)
        for row in self.victims:
            del self.slot_of[row], self.last_use[row], self.uses_here[row]
        for position in missing:
            row = rows[position]
            self.slot_of[row], self.last_use[row], self.uses_here[row] = slots[row], number, {number}
            self.uses[row].add(number)
        self.check()
        return admission

    def check(self) -> None:
        slots = list(self.slot_of.values())
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(self.slots))
        found = self.directory.find(np.arange(self.rows))
        assert found.dtype == np.int32
        assert found.tolist() == [self.slot_of.get(row, -1) for row in range(self.rows)]
        assert self.directory.slots == self.slots
        assert self.directory.residents == len(self.slot_of)
        assert self.directory.held(self.oldest) == len(self.held())

    def flush(self) -> None:
        rows, slots = self.directory.flush(self.oldest)
        assert [self.slot_of[row] for row in rows.tolist()] == slots.tolist()
        flushed = set(rows.tolist())
        assert len(flushed) == len(rows)
        earlier = range(self.flushed + 1, self.oldest)
        assert flushed >= {row for row in self.slot_of if not self.uses_here[row].isdisjoint(earlier)}
        assert flushed <= {row for row in self.slot_of if self.last_use[row] > self.flushed}
        self.flushed = self.oldest - 1

    def grow(self, slots: int) -> None:
        self.directory.grow(slots)
        self.slots = slots
        self.check()

    def forget(self) -> None:
        self.unfinished.clear()
        forgotten = self.directory.forget()
        assert forgotten.dtype == np.int64 and forgotten.size == 0
        self.slot_of.clear()
        self.last_use.clear()
        self.uses_here.clear()
        self.check()


@dataclass
class Step:
    """One batch, what finishes before it, and what is done after it."""

    rows: list[int]
    finish: int
    depth: int
    then: str
    grows: bool


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Checked, list[Step]]:
    rows = draw(st.integers(1, 24), "rows")
    slots = draw(st.integers(1, 16), "slots")
    threads = draw(st.sampled_from(list(THREADS)), "threads")
    step = st.builds(
        Step,
        st.lists(st.integers(0, rows - 1), unique=True, max_size=8),
        st.integers(0, 15),
        st.integers(0, 4),
        st.sampled_from(["", "", "", "flush", "grow", "forget"]),
        st.booleans(),
    )
    return Checked(rows, slots, threads), draw(st.lists(step, min_size=1, max_size=25), "steps")


@settings(max_examples=80)
@given(scripts())
def test_slots_are_given_held_and_written_back_as_dictionaries_say(script: tuple[Checked, list[Step]]) -> None:
    checked, steps = script
    for index, step in enumerate(steps):
        unfinished = checked.unfinished  # some of them finish, in any order
        checked.unfinished = [one for place, one in enumerate(unfinished) if place > 3 or not step.finish >> place & 1]
        number = checked.begin()
        coming = [(number + 1 + ahead, later.rows) for ahead, later in enumerate(steps[index + 1 :][: step.depth])]
        admission = checked.admit(step.rows, number, coming)
        if isinstance(admission, int):
            assert checked.admit(step.rows, number, coming) == admission
            if not step.grows:
                checked.unfinished = [number]
                admission = checked.admit(step.rows, number, coming)
            if isinstance(admission, int):
                checked.grow(checked.slots + admission)
                admission = checked.admit(step.rows, number, coming)
            assert isinstance(admission, Admission)
        if step.then == "flush":
            checked.flush()
        elif step.then == "grow":
            checked.grow(checked.slots + step.depth)
        elif step.then == "forget":
            checked.forget()


def least_used_first(checked: Checked, coming: Coming) -> bool:
    """Whether no row that could have gone had been used less than one that went, but for the scores' precision."""
    needless = [row for row in checked.kept if next_use(row, coming) == math.inf]
    gone = [row for row in checked.victims if next_use(row, coming) == math.inf]
    if not needless or not gone:
        return True
    least, most = min(needless, key=checked.score), max(gone, key=checked.score)
    error = SCORE_ERROR_OF_A_USE * (len(checked.uses[least]) + len(checked.uses[most])) + ORDER_WITHIN
    return checked.score(most) <= checked.score(least) + error


@st.composite
def traces(draw: st.DrawFn) -> tuple[int, int, Batches, int, int]:
    """Slots, rows, batches, how many are known ahead, and how many are unfinished."""
    slots = draw(st.integers(1, 24) | st.integers(25, 200), "slots")
    rows = slots + draw(st.integers(1, 60), "more rows")
    unfinished = draw(st.integers(0, 3), "unfinished")
    skew, seed = draw(st.floats(0, 4), "skew"), draw(st.integers(0, 2**32 - 1), "seed")
    random = np.random.default_rng(seed)
    largest = min(slots // (unfinished + 1), 8)
    sizes = random.integers(0, largest + 1, 60)
    ids = [(rows * random.random(size) ** (1 + skew)).astype(int).tolist() for size in sizes]
    fill = [list(range(first, min(first + 7, slots))) for first in range(0, slots, 7)] if largest >= 7 else []
    batches = [*fill, *(list(dict.fromkeys(batch)) for batch in ids)]
    return slots, rows, batches, draw(st.integers(0, 6), "depth"), unfinished


def replay(trace: tuple[int, int, Batches, int, int]) -> Iterator[tuple[Checked, Coming]]:
    """Sends batches through a directory; hands it out after each, with the batches that were known to come."""
    slots, rows, batches, depth, unfinished = trace
    checked = Checked(rows, slots)
    for batch in batches:
        checked.unfinished = checked.unfinished[len(checked.unfinished) - unfinished :] if unfinished else []
        number = checked.begin()
        coming = [(later, batches[later]) for later in range(number + 1, min(number + 1 + depth, len(batches)))]
        if isinstance(checked.admit(batch, number, coming), int):
            checked.unfinished = [number]
            assert isinstance(checked.admit(batch, number, coming), Admission)
        yield checked, coming


@settings(max_examples=100)
@given(traces())
def test_a_row_that_is_coming_stays_while_another_can_go(trace: tuple[int, int, Batches, int, int]) -> None:
    for checked, coming in replay(trace):
        for victim in checked.victims:
            # Where all are needed, the one that is needed last goes.
            assert all(next_use(row, coming) <= next_use(victim, coming) for row in checked.kept)


@settings(max_examples=80)
@given(traces())
def test_the_least_used_row_goes_first(trace: tuple[int, int, Batches, int, int]) -> None:
    for checked, coming in replay(trace):
        assert least_used_first(checked, coming)


def admitted(directory: Directory, rows: Sequence[int], number: int, oldest: int, coming: Coming = ()) -> Admission:
    later = [(batch, array(batch_rows)) for batch, batch_rows in coming]
    admission = directory.admit(array(rows), number, oldest, later)
    assert isinstance(admission, Admission)
    return admission


def victims_of(directory: Directory, rows: Sequence[int], number: int, oldest: int, coming: Coming = ()) -> list[int]:
    """The rows that give up their slots; nothing is flushed in between, so that all of them are written back."""
    return sorted(admitted(directory, rows, number, oldest, coming).write_back_rows.tolist())


def test_of_many_rows_used_alike_and_one_used_less_that_one_goes_first() -> None:
    """The others are more than the list of victims has room for."""
    directory = Directory(rows=6, slots=4)
    admitted(directory, [0, 1, 2, 3], 0, 0)
    admitted(directory, [0, 1, 2], 1, 1)
    victims = victims_of(directory, [4, 5], 2, 2)
    assert 3 in victims and len(victims) == 2


def test_the_least_used_goes_first_then_the_one_used_longest_ago() -> None:
    directory = Directory(rows=20, slots=4)
    for number, rows in enumerate([[0, 1, 2, 3], [2], [1], [0], [0]]):
        admitted(directory, rows, number, number)
    # Uses: row 3 once, 2 and 1 twice, 2 the longer ago, 0 three times.
    for number, (row, victim) in enumerate([(10, 3), (11, 10), (12, 11)], 5):
        assert victims_of(directory, [row], number, number) == [victim]
    assert victims_of(directory, [13, 14], 8, 8) == [2, 12]
    assert victims_of(directory, [15, 16, 17], 9, 9) == [1, 13, 14]


def test_a_row_that_comes_back_is_not_a_stranger() -> None:
    directory = Directory(rows=10, slots=2)
    for number in range(6):
        admitted(directory, [0], number, number)
    admitted(directory, [1], 6, 6)
    assert victims_of(directory, [2, 3], 7, 7) == [0, 1]  # both places were needed at once
    assert victims_of(directory, [0], 8, 8)[0] in (2, 3)
    for number, row in enumerate([4, 5, 6, 7], 9):
        assert 0 not in victims_of(directory, [row], number, number)


def full_of_rows(slots: int, passes: int) -> Directory:
    """A directory whose slots hold the rows 0, 1, and so on, each used once per pass, one batch after the other."""
    directory = Directory(rows=2 * slots, slots=slots)
    for number in range(passes * slots):
        admitted(directory, [number % slots], number, number)
    return directory


def test_a_row_that_has_been_used_since_others_went_is_passed_over() -> None:
    directory = full_of_rows(128, passes=1)
    assert victims_of(directory, [200], 128, 128) == [0]
    assert victims_of(directory, [1], 129, 129) == []
    assert victims_of(directory, [201], 130, 130) == [2]
    assert victims_of(directory, [202], 131, 131, coming=[(132, [3])]) == [4]


def test_a_row_placed_last_goes_before_rows_that_are_used_more() -> None:
    directory = full_of_rows(128, passes=2)
    assert victims_of(directory, [200], 256, 256) == [0]
    assert victims_of(directory, [201], 257, 257) == [200]
    assert victims_of(directory, [202], 258, 257) == [1]  # batch 257 holds row 201
    assert victims_of(directory, [203], 259, 259, coming=[(260, [201])]) == [202]


def test_a_needed_row_stays_as_soon_as_another_has_been_released() -> None:
    """One of those needed had to go before, when all others were held."""
    directory = Directory(rows=300, slots=128)
    needed, others = list(range(100, 128)), list(range(100))
    admitted(directory, needed, 0, 0)
    admitted(directory, others, 1, 1)
    last = (4, needed)
    assert victims_of(directory, [200], 2, 1, coming=[(3, [201]), last])[0] in needed  # batch 1 holds all others
    assert victims_of(directory, [201], 3, 3, coming=[last])[0] not in needed


def test_where_all_rows_are_needed_the_next_use_of_each_decides() -> None:
    directory = Directory(rows=3, slots=2)
    admitted(directory, [0, 1], 0, 0)
    assert victims_of(directory, [2], 1, 1, coming=[(2, [0]), (3, [1]), (4, [0])]) == [1]


def test_where_all_rows_are_needed_the_one_needed_last_goes_though_an_earlier_batch_saw_less_far() -> None:
    checked = Checked(rows=6, slots=3)
    batches = [[0, 1, 2], [3], [4], [1], [0], [2], [3]]
    for number, depth, victims in [(0, 5, []), (1, 4, [2]), (2, 4, [3])]:
        checked.unfinished = []
        coming = [(later, batches[later]) for later in range(number + 1, number + 1 + depth)]
        assert isinstance(checked.admit(batches[number], checked.begin(), coming), Admission)
        assert checked.victims == victims


def test_a_needed_row_stays_though_it_lost_its_slot_and_got_another_since_it_was_first_known_to_come() -> None:
    checked = Checked(rows=5, slots=2)
    batches = [[3]] * 6 + [[0], [1, 2], [0], [3], [4], [0]]
    for number, batch in enumerate(batches):
        checked.unfinished = []
        coming = list(enumerate(batches))[number + 1 : number + 5]
        assert isinstance(checked.admit(batch, checked.begin(), coming), Admission)
        if number == 10:
            assert checked.victims == [3]


@pytest.mark.parametrize("overtaken", [False, True])
def test_trying_a_batch_again_counts_no_use_twice(overtaken: bool) -> None:
    """Another batch may have been admitted since the first try."""
    directory = Directory(rows=20, slots=4)
    for number, rows in enumerate([[0, 1, 2, 3], [1, 2]]):
        admitted(directory, rows, number, number)
    too_large = array([0, 10, 11, 12, 13])
    assert directory.admit(too_large, 2, 2) == 1
    if overtaken:
        admitted(directory, [0], 3, 2)
    for _ in range(30):
        assert directory.admit(too_large, 2, 2) == 1
    for number in range(4, 8):
        admitted(directory, [1], number, number)
    # Uses: row 3 once, 2 twice, 0 two or three times, 1 six times.
    assert victims_of(directory, [14, 15, 16], 8, 8) == [0, 2, 3]


def test_a_later_batch_that_overtakes_one_that_did_not_fit_holds_its_slots() -> None:
    checked = Checked(rows=12, slots=4)
    checked.admit([0, 1], checked.begin())
    waiting, overtaking = checked.begin(), checked.begin()
    assert checked.admit([1, 2, 3, 4], waiting) == 1
    assert isinstance(checked.admit([1, 5], overtaking), Admission)
    assert checked.admit([1, 2, 3, 4], waiting) == 2
    checked.unfinished.remove(0)
    assert checked.admit([1, 2, 3, 4], waiting) == 1
    checked.unfinished.remove(overtaking)
    checked.grow(5)
    assert isinstance(checked.admit([1, 2, 3, 4], waiting), Admission)


def test_a_batch_that_was_overtaken_and_given_up_leaves_the_other_its_slots() -> None:
    checked = Checked(rows=12, slots=4)
    waiting, overtaking = checked.begin(), checked.begin()
    assert checked.admit([0, 1, 2, 3, 4], waiting) == 1
    assert isinstance(checked.admit([0, 1], overtaking), Admission)
    assert checked.admit([0, 1, 2, 3, 4], waiting) == 1
    checked.unfinished.remove(waiting)
    assert checked.admit([5, 6, 7], checked.begin()) == 1
    checked.unfinished.remove(overtaking)
    assert isinstance(checked.admit([5, 6, 7], checked.next - 1), Admission)


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=30))
def test_scores_are_the_logarithm_of_the_sum_of_uses_that_fade(gaps: list[tuple[int, bool]]) -> None:
    """Whether the row has kept its slot in between or not."""
    directory = Directory(rows=100, slots=3)
    uses, others = [0], iter(range(1, 100))
    half_life = HALF_LIFE_IN_FILLS * 3
    admitted(directory, [0], 0, 0)
    for gap, evicted in gaps:
        number = uses[-1] + gap + 2
        if evicted:
            crowd = [next(others) for _ in range(3)]
            assert 0 in victims_of(directory, crowd, number - 1, number - 1) or len(uses) == 1
        admitted(directory, [0], number, number)
        uses.append(number)
    sum_of_uses = sum(2.0 ** ((use - uses[-1]) / half_life) for use in uses)
    expected = FIRST_SCORE + uses[-1] / half_life + math.log2(sum_of_uses)
    score = directory._records[directory.find(array([0]))[0], kernels.SCORE] / kernels.SCORE_UNIT
    assert abs(score - expected) <= SCORE_ERROR_OF_A_USE * len(uses)


def random_trace(seed: int, rows: int, batches: int, size: int, longest_gap: int) -> list[tuple[int, np.ndarray]]:
    """Numbers and distinct rows of batches."""
    random = np.random.default_rng(seed)
    numbers = np.cumsum(random.integers(1, longest_gap + 1, batches)).tolist()
    return [
        (number, random.permutation(np.unique((rows * random.random(size) ** 4).astype(int)))) for number in numbers
    ]


def admissions_of(directory: Directory, trace: list[tuple[int, np.ndarray]]) -> list[list[object]]:
    """What a directory answers; batches hold their slots while the next is admitted."""
    answers: list[list[object]] = []
    for place, (number, rows) in enumerate(trace):
        oldest = trace[max(0, place - 1)][0]
        admission = directory.admit(rows, number, oldest, trace[place + 1 : place + 3])
        assert isinstance(admission, Admission)
        answers.append(
            [value.tolist() if isinstance(value, np.ndarray) else value for value in vars(admission).values()]
        )
    return answers


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_lowering_all_scores_together_changes_no_order(seed: int) -> None:
    """Between two batches there is up to a half-life."""
    slots, rows = 8, 30
    random = np.random.default_rng(seed)
    checked = Checked(rows, slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory_module, "HIGHEST_SCORE", (FIRST_SCORE + 2) * kernels.SCORE_UNIT)
        for _ in range(50):
            checked.unfinished = []
            checked.next += int(random.integers(0, HALF_LIFE_IN_FILLS * slots))
            batch = sorted({int(rows * random.random() ** 3) for _ in range(random.integers(1, 3))})
            assert isinstance(checked.admit(batch, checked.begin()), Admission)
            assert least_used_first(checked, ())
    assert checked.directory._records[:, kernels.SCORE].max() < (FIRST_SCORE + 8) * kernels.SCORE_UNIT
    assert checked.directory._rebased > 4 * kernels.SCORE_UNIT


def test_lowering_scores_leaves_each_at_0_at_least_and_strangers_strangers() -> None:
    scores = [0, 10, 11, 5000]
    slot_of_row = np.array([kernels.GHOST - score for score in scores] + [kernels.ABSENT, 0, 3], np.int32)
    records = np.full((4, kernels.RECORD_COLUMNS), 7, np.int32)
    records[:, kernels.SCORE] = scores
    kernels.rebase_scores(10, slot_of_row, records)
    assert records[:, kernels.SCORE].tolist() == [0, 0, 1, 4990]
    assert slot_of_row.tolist() == [kernels.GHOST - score for score in (0, 0, 1, 4990)] + [kernels.ABSENT, 0, 3]
    assert (np.delete(records, kernels.SCORE, 1) == 7).all()


def test_answers_do_not_depend_on_the_number_of_threads() -> None:
    """The batches are long enough for every thread to have rows to look up, some of them ahead of the memory."""
    trace = random_trace(0, rows=20_000, batches=25, size=4000, longest_gap=1)
    answers = {count: admissions_of(Directory(20_000, 6000, threads), trace) for count, threads in THREADS.items()}
    assert answers[2] == answers[1]
    assert answers[4] == answers[1]


def test_long_batches_get_their_slots_as_short_ones_do() -> None:
    trace = random_trace(1, rows=3000, batches=12, size=800, longest_gap=1)
    checked = Checked(3000, 1000, threads=2)
    for _, rows in trace:
        checked.unfinished = []
        assert isinstance(checked.admit(rows.tolist(), checked.begin()), Admission)
    checked.flush()


def test_finding_rows_changes_nothing() -> None:
    checked = Checked(rows=9, slots=3)
    checked.admit([0, 1, 2], checked.begin())
    checked.unfinished = []
    checked.admit([3, 4], checked.begin())
    before = arrays_of(checked.directory)
    assert checked.directory.find(array([4, 8, 4, 0])).tolist() == [checked.slot_of[4], -1, checked.slot_of[4], -1]
    assert checked.directory.find(array([])).tolist() == []
    assert same_arrays(checked.directory, before)
    checked.check()


def test_one_slot_serves_one_row_after_the_other() -> None:
    checked = Checked(rows=3, slots=1)
    for row in (0, 1, 1, 2, 0):
        checked.unfinished = []
        assert isinstance(checked.admit([row], checked.begin()), Admission)
        assert checked.slot_of == {row: 0}
    assert checked.admit([1], checked.begin()) == 1
    checked.unfinished = []
    assert checked.admit([0, 1], checked.begin()) == 1
    checked.flush()


@pytest.mark.parametrize("slots", [0, 1])
def test_tables_without_rows_take_batches_without_rows(slots: int) -> None:
    checked = Checked(rows=0, slots=slots)
    for _ in range(3):
        assert isinstance(checked.admit([], checked.begin()), Admission)
    checked.flush()
    checked.forget()
    assert checked.directory.warm(np.empty(0, np.float32)).tolist() == []


def test_a_row_is_written_back_once_per_change() -> None:
    directory = Directory(rows=20, slots=4)
    admitted(directory, [0, 1, 2, 3], 0, 0)
    rows, slots = directory.flush(1)
    assert sorted(zip(rows.tolist(), slots.tolist(), strict=True)) == [(row, row) for row in range(4)]
    assert [part.tolist() for part in directory.flush(1)] == [[], []]
    admitted(directory, [2, 3], 1, 1)
    admission = admitted(directory, [4, 5, 6], 2, 2)  # rows 0 and 1, and one of those used since
    (written_back,) = admission.write_back_rows.tolist()
    assert written_back in (2, 3) and admission.write_back_slots.tolist() == [written_back]
    assert admission.newest_use == 1


def test_a_row_in_use_while_all_are_flushed_counts_as_changed_afterwards() -> None:
    directory = Directory(rows=20, slots=3)
    admitted(directory, [0, 1], 0, 0)
    admitted(directory, [1], 1, 0)
    assert set(directory.flush(1)[0].tolist()) == {0, 1}  # batch 1 has not finished: its update is still to come
    assert directory.flush(2)[0].tolist() == [1]
    assert directory.flush(2)[0].tolist() == []


def test_growth_keeps_what_is_there_and_makes_room() -> None:
    checked = Checked(rows=30, slots=2)
    checked.admit([0, 1], checked.begin())
    checked.unfinished = []
    number = checked.begin()
    assert checked.admit([1, 2, 3, 4], number) == 2
    checked.grow(3)
    assert checked.admit([1, 2, 3, 4], number) == 1
    checked.grow(6)
    assert isinstance(checked.admit([1, 2, 3, 4], number), Admission)
    assert checked.victims == [] and checked.slot_of.keys() == {0, 1, 2, 3, 4}
    checked.grow(6)
    checked.unfinished = []
    assert isinstance(checked.admit([5, 6], checked.begin()), Admission)
    assert checked.victims == [0]


def test_growth_keeps_the_slots_that_were_free() -> None:
    checked = Checked(rows=400, slots=100)
    checked.admit(list(range(10)), checked.begin())
    checked.grow(300)
    assert isinstance(checked.admit(list(range(10, 300)), checked.begin()), Admission)
    assert len(checked.slot_of) == 300 and checked.victims == []


def test_a_directory_that_has_forgotten_writes_nothing_back() -> None:
    checked = Checked(rows=20, slots=4)
    checked.admit([3, 1, 2], checked.begin())
    checked.forget()
    assert checked.directory.flush(checked.next)[0].size == 0
    admission = checked.admit([1, 9, 3, 4], checked.begin())
    assert isinstance(admission, Admission) and admission.fetch.tolist() == [0, 1, 2, 3]
    assert admission.write_back_rows.size == 0 and admission.newest_use == -1


@settings(max_examples=60)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=30), st.integers(1, 20))
def test_a_warm_start_places_the_rows_used_most(eighths: list[int], slots: int) -> None:
    uses = np.array(eighths, np.float32) / 8
    directory = Directory(len(uses), slots)
    placed = directory.warm(uses)
    count = min(slots, np.count_nonzero(uses))
    assert placed.dtype == np.int64 and len(set(placed.tolist())) == len(placed) == count == directory.residents
    assert directory.find(placed).tolist() == list(range(count))
    assert sorted(uses[placed].tolist(), reverse=True) == sorted(uses.tolist(), reverse=True)[:count]
    assert directory.flush(0)[0].size == 0
    everything = np.arange(min(len(uses), slots))
    admission = admitted(directory, everything.tolist(), 0, 0)
    assert sorted(everything[admission.fetch].tolist()) == sorted(set(everything.tolist()) - set(placed.tolist()))
    assert admission.write_back_rows.size == 0  # training has changed none of those that went
    assert admission.newest_use == -1


def test_a_warm_start_counts_as_past_uses_of_every_row() -> None:
    def victim(warm: bool, row: int) -> int:
        """Which of rows 0 and 1 gives up its slot to ``row``, and whether ``row`` then outlives the other one."""
        directory = Directory(rows=5, slots=2)
        if warm:
            directory.warm(np.array([0.9, 0.5, 0.6, 0.6, 0.0], np.float32))
        admitted(directory, [0, 1], 0, 0)
        admitted(directory, [1], 1, 1)
        before = set(np.flatnonzero(directory.find(np.arange(5)) >= 0).tolist())
        admitted(directory, [row], 2, 2)
        (gone,) = before - set(np.flatnonzero(directory.find(np.arange(5)) >= 0).tolist())
        return gone

    assert victim(warm=False, row=4) == 0  # used less in training
    assert victim(warm=True, row=4) == 1  # but more before


def test_a_row_without_a_slot_keeps_what_the_warm_start_counted() -> None:
    directory = Directory(rows=5, slots=2)
    assert directory.warm(np.array([0.9, 0.5, 0.8, 0.0, 0.0], np.float32)).tolist() == [0, 2]
    admitted(directory, [1], 0, 0)  # row 2 goes
    admitted(directory, [3], 1, 1)  # row 1 goes: half of the batches used it, nine tenths use row 0
    assert directory.find(np.arange(5)).tolist() == [0, -1, -1, 1, -1]
    admitted(directory, [1], 2, 2)  # in place of row 3, which nobody knows
    admitted(directory, [4], 3, 3)
    assert directory.find(np.arange(5)).tolist() == [0, -1, -1, -1, 1]


def nbytes(directory: Directory) -> int:
    """Of its arrays; a view of another one takes nothing."""
    arrays = sorted(
        (one for one in vars(directory).values() if isinstance(one, np.ndarray)), key=lambda one: -one.nbytes
    )
    return sum(
        one.nbytes
        for place, one in enumerate(arrays)
        if not any(np.may_share_memory(one, other) for other in arrays[:place])
    )


def used_directory(rows: int, slots: int) -> Directory:
    """One through which batches have gone that replaced many rows, and some few."""
    directory = Directory(rows, slots)
    for number, size in enumerate([slots, slots // 2, slots // 2, 1, 2, 3]):
        admitted(directory, range(100 * number, 100 * number + size), number, number)
    return directory


def test_a_row_takes_4_bytes_here_and_4_in_the_plan() -> None:
    few, many = 10_000, 50_000
    here = nbytes(used_directory(many, 32)) - nbytes(used_directory(few, 32))
    tables = [
        HostTables([EmbeddingBagConfig(rows, 1, "a")], SparseOptimizerSettings(name="sgd"), 0, THREADS[1], pin=False)
        for rows in (few, many)
    ]
    planned = [sum(group.last_number.nbytes for group in one.groups) for one in tables]
    assert here == 4 * (many - few)
    assert planned == [4 * few, 4 * many]


def test_a_slot_takes_about_45_bytes() -> None:
    few, many = 20_000, 100_000
    assert nbytes(Directory(100, many)) - nbytes(Directory(100, few)) <= 46 * (many - few)
