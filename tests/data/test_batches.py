"""Batches hold what a row-by-row reading gives, from any position, for any threads, over any ranks."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recsys_offload.data import Batch, DataSettings, Encoding, ParquetBatches
from recsys_offload.data.config import PARTS, HashSplit, Shares
from tests.data.tables import expected_rows, open_batches, part_in_python, rows_of, write_files

WORDS = ["red", "green", "blue", "", "ünïcode", "a" * 40, "7"]


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, dict[str, Any]]:
    """A random table and the settings that read it."""
    rows = draw(st.integers(1, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nulls = draw(st.booleans())

    def some(values: list[Any]) -> list[Any]:
        # The first value stays: a column of nothing but nulls is refused.
        return [None if nulls and index and random.random() < 0.25 else value for index, value in enumerate(values)]

    def lists(values: list[Any]) -> list[Any]:
        sizes = random.integers(0, 4, rows)
        sizes[0] = 2
        return some([some([values[i] for i in random.integers(0, len(values), size)]) for size in sizes])

    whole_type = draw(st.sampled_from([pa.int8(), pa.int32()]))
    real_type = draw(st.sampled_from([pa.float32(), pa.float64()]))
    label_type = draw(st.sampled_from([pa.int8(), pa.int64(), pa.float32()]))
    word_type = draw(st.sampled_from([pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]))
    width = draw(st.sampled_from([pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()]))
    list_type = draw(st.sampled_from([pa.list_, pa.large_list]))
    bags = lists(list(range(50)))
    weights = [
        None if bag is None else [None if i is None else float(np.float32(random.normal())) for i in bag]
        for bag in bags
    ]
    pairs = some([some(random.integers(0, 9, 2).tolist()) for _ in range(rows)])
    user_weights = [float(np.float32(random.normal())) for _ in range(rows)]
    words = some([WORDS[i] for i in random.integers(0, len(WORDS), rows)])
    word_lists = lists(WORDS)
    table = pa.table(
        {
            "label": pa.array(random.integers(0, 2, rows), label_type),
            "sample_weight": pa.array(random.random(rows).astype(np.float32)),
            "whole": pa.array(some(random.integers(0, 100, rows).tolist()), whole_type),
            "real": pa.array(some((random.normal(size=rows) * 50).tolist()), real_type),
            "user": pa.array(some(random.integers(0, 100, rows).tolist()), width),
            "user_weights": pa.array(user_weights, pa.float64()),
            "pair": pa.array(pairs, pa.list_(pa.int64(), 2)),
            "bag": pa.array(bags, list_type(pa.int32())),
            "bag_weights": pa.array(weights, list_type(pa.float32())),
            "word": pa.array(words, word_type),
            "words": pa.array(word_lists, list_type(pa.string())),
        }
    )  # fmt: skip
    policy = draw(st.sampled_from(["skip", 3]))
    content = {
        "label": "label",
        "sample_weight": "sample_weight",
        "dense": {
            "whole": {"transform": draw(st.sampled_from(["none", "log1p", "standardize"])), "fill": 0.5},
            "real": {"transform": draw(st.sampled_from(["none", "log1p", "standardize"])), "fill": -1},
        },
        "sparse": {
            "user": {"num_embeddings": 100, "nulls": policy}
            | ({"weights": "user_weights"} if draw(st.booleans()) else {}),
            "pair": {"num_embeddings": 9, "nulls": draw(st.sampled_from(["skip", 8]))},
            "bag": {"num_embeddings": 50, "nulls": policy}
            | ({"weights": "bag_weights"} if draw(st.booleans()) else {}),
            "hashed": {"column": "word", "encoding": "hash", "num_embeddings": 11, "nulls": policy},
            "hashed_user": {"column": "user", "encoding": "hash", "num_embeddings": 13},
            "word": {"encoding": "vocabulary", "num_embeddings": draw(st.integers(4, 9)), "nulls": policy},
            "words": {"encoding": "vocabulary", "num_embeddings": 9},
        },
        "hash_seed": draw(st.integers(0, 5)),
        "read_ahead": draw(st.integers(1, 4)),
        "threads": draw(st.integers(1, 3)),
    }
    return table, content


@settings(max_examples=40)
@given(
    data=tables(),
    row_group_rows=st.integers(1, 20),
    files=st.integers(1, 3),
    batch_size=st.integers(1, 50),
    seed=st.integers(0, 9),
)
def test_batches_hold_what_reading_row_by_row_gives(
    tmp_path_factory: pytest.TempPathFactory,
    data: tuple[pa.Table, dict[str, Any]],
    row_group_rows: int,
    files: int,
    batch_size: int,
    seed: int,
) -> None:  # fmt: skip
    table, content = data
    sizes = np.diff(np.linspace(0, table.num_rows, files + 1).astype(int)).tolist()
    paths = write_files(tmp_path_factory.mktemp("data"), table, sizes, row_group_rows)
    chosen = DataSettings.model_validate(content | {"train": paths, "shuffle": {"buffer_rows": seed * 5}})
    encoding = Encoding.fit(chosen)
    expected = expected_rows(table, chosen, encoding)
    batches = ParquetBatches(chosen, encoding, "train", batch_size)
    read = list(batches)
    assert [len(batch) for batch in read[:-1]] == [batch_size] * (len(read) - 1)
    assert len(read) == batches.steps_per_epoch
    assert list(rows_of(read)) == expected
    shuffled = ParquetBatches(chosen, encoding, "train", batch_size, shuffle=True, seed=seed)
    assert sorted(map(repr, rows_of(shuffled))) == sorted(map(repr, expected))
    # Cut in parts, some row groups have no row of a part, or none at all.
    split = HashSplit(shares=Shares(train=0.4, validation=0.3, test=0.3), seed=seed)
    chosen = chosen.model_copy(update={"split": split})
    encoding = dataclasses.replace(encoding, rows={})
    for part in PARTS:
        rows = [row for number, row in enumerate(expected) if part_in_python(number, split) == part]
        if rows:
            encoding.rows[part] = len(rows)
            assert list(rows_of(ParquetBatches(chosen, encoding, part, batch_size))) == rows


def simple_settings(folder: Path, rows: int = 103, **changes: Any) -> DataSettings:
    random = np.random.default_rng(0)
    table = pa.table(
        {
            "label": random.integers(0, 2, rows),
            "number": pa.array(range(rows), pa.int64()),
            "day": random.integers(0, 10, rows),
        }
    )
    paths = write_files(folder, table, [rows // 2, rows // 3, rows - rows // 2 - rows // 3], 8)
    content = {"train": paths, "dense": {"day": {}}, "sparse": {"number": {"num_embeddings": rows}}}
    return DataSettings.model_validate(content | changes)


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.sparse.values().tolist()]


def test_every_epoch_has_its_own_order_which_threads_do_not_change(tmp_path: Path) -> None:
    chosen = simple_settings(tmp_path, shuffle={"buffer_rows": 30})
    batches = open_batches(chosen, shuffle=True, seed=4)
    first, second = numbers(batches), numbers(batches)
    assert batches.epoch == 2
    assert first != second and sorted(first) == sorted(second) == list(range(103))
    for read_ahead, threads in ((1, 1), (5, 3)):
        other = chosen.model_copy(update={"read_ahead": read_ahead, "threads": threads})
        again = open_batches(other, shuffle=True, seed=4)
        assert (numbers(again), numbers(again)) == (first, second)
    assert numbers(open_batches(chosen, shuffle=True, seed=5)) != first


@pytest.mark.parametrize(("files", "row_groups"), [(True, False), (False, True), (False, False)])
def test_what_is_shuffled_can_be_chosen(tmp_path: Path, files: bool, row_groups: bool) -> None:
    shuffle = {"files": files, "row_groups": row_groups, "buffer_rows": 0}
    read = numbers(open_batches(simple_settings(tmp_path, shuffle=shuffle), shuffle=True, seed=1))
    assert sorted(read) == list(range(103))
    file_of = np.digitize(read, [51, 85])
    in_file_order = np.flatnonzero(np.diff(file_of)).size == 2
    assert in_file_order
    assert (file_of.tolist() == sorted(file_of)) == (not files) or files
    if not files and not row_groups:
        assert read == list(range(103))
    if row_groups:
        assert (read != list(range(103)) and read[:8] != sorted(read)[:8]) or read[:51] != list(range(51))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_the_rows_evenly(tmp_path: Path, world_size: int, shuffle: bool) -> None:
    chosen = simple_settings(tmp_path, shuffle={"buffer_rows": 20})
    shares = []
    for rank in range(world_size):
        batches = open_batches(chosen, shuffle=shuffle, rank=rank, world_size=world_size)
        read = list(batches)
        assert len(read) == batches.steps_per_epoch
        shares.append(numbers(read))
    assert sorted(number for share in shares for number in share) == list(range(103))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("buffer_rows", [0, 20, 1000])
@pytest.mark.parametrize("split", [False, True])
def test_any_position_can_be_restored(tmp_path: Path, buffer_rows: int, split: bool) -> None:
    changes: dict[str, Any] = {"shuffle": {"buffer_rows": buffer_rows}}
    if split:
        changes["split"] = {"by": "hash", "shares": {"train": 0.7, "validation": 0.2, "test": 0.1}}
    chosen = simple_settings(tmp_path, **changes)
    part = "train" if split else "all"
    batches = open_batches(chosen, part, shuffle=True, seed=3)
    states, epochs = [batches.state_dict()], []
    for _ in range(2):
        epoch = []
        for batch in batches:
            epoch.append(batch)
            states.append(batches.state_dict())
        epochs.append(epoch)
    for done, state in enumerate(json.loads(json.dumps(states))[: len(epochs[0]) + 1]):
        resumed = open_batches(chosen, part, shuffle=True, seed=3)
        resumed.load_state_dict(state)
        assert_equal(list(resumed), epochs[0][done:])
        assert_equal(list(resumed), epochs[1])


@settings(max_examples=40)
@given(data=tables(), draw=st.data())
def test_the_exact_rest_of_an_epoch_follows_a_position(
    tmp_path_factory: pytest.TempPathFactory, data: tuple[pa.Table, dict[str, Any]], draw: st.DataObject
) -> None:
    table, content = data
    cut = draw.draw(st.integers(0, table.num_rows))
    folder = tmp_path_factory.mktemp("data")
    paths = write_files(folder, table, [cut, table.num_rows - cut], draw.draw(st.integers(1, 20)))
    shuffle = {
        "files": draw.draw(st.booleans()),
        "row_groups": draw.draw(st.booleans()),
        "buffer_rows": draw.draw(st.integers(0, 50)),
    }
    chosen = DataSettings.model_validate(content | {"train": paths, "shuffle": shuffle})
    encoding = Encoding.fit(chosen)
    part = draw.draw(st.sampled_from(["all", "train", "test"]))
    split = HashSplit(shares=Shares(train=0.5, validation=0.1, test=0.4))
    sizes = Counter(part_in_python(row, split) for row in range(table.num_rows))
    chosen = chosen.model_copy(update={"split": split})
    encoding = dataclasses.replace(encoding, rows=dict(sizes))
    assume(part == "all" or sizes[part])
    world_size = draw.draw(st.integers(1, 3))
    options = {
        "seed": draw.draw(st.integers(0, 3)),
        "shuffle": draw.draw(st.booleans()),
        "drop_last": draw.draw(st.booleans()),
        "rank": draw.draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
    }
    batch_size = draw.draw(st.integers(1, 30))
    whole = ParquetBatches(chosen, encoding, part, batch_size, **options)
    first, second = list(whole), list(whole)
    taken = draw.draw(st.integers(0, len(first)))
    stopped = ParquetBatches(chosen, encoding, part, batch_size, **options)
    assert_equal(list(itertools.islice(stopped, taken)), first[:taken])
    state = json.loads(json.dumps(stopped.state_dict()))
    changed = chosen.model_copy(update={"read_ahead": draw.draw(st.integers(1, 5)), "threads": 2})
    resumed = ParquetBatches(changed, encoding, part, batch_size, **options)
    resumed.load_state_dict(state)
    assert_equal(list(resumed), first[taken:])
    assert_equal(list(resumed), second)
    # The one that was stopped goes on where it was, too.
    assert_equal(list(stopped), first[taken:])
    assert stopped.state_dict() == {**state, "epoch": 1, "group": 0, "row": 0}


def assert_equal(read: list[Batch], expected: list[Batch]) -> None:
    assert len(read) == len(expected)
    for one, other in zip(read, expected, strict=True):
        for here, there in zip(tensors(one), tensors(other), strict=True):
            assert (here is None and there is None) or torch.equal(here, there)  # type: ignore[arg-type]
        assert one.origin == other.origin


def tensors(batch: Batch) -> list[torch.Tensor | None]:
    ids = batch.sparse
    return [batch.dense, batch.labels, batch.weights, ids.values(), ids.lengths(), ids.offsets(), ids.weights_or_none()]


def test_a_position_in_other_files_is_refused(tmp_path: Path) -> None:
    batches = open_batches(simple_settings(tmp_path))
    (tmp_path / "other").mkdir()
    other = open_batches(simple_settings(tmp_path / "other", rows=104))
    with pytest.raises(ValueError, match="the data has changed since the position was saved"):
        other.load_state_dict(batches.state_dict())
    # Neither can another order be gone on with.
    chosen = simple_settings(tmp_path, shuffle={"buffer_rows": 10})
    state = open_batches(chosen, shuffle=True).state_dict()
    open_batches(chosen, shuffle=True).load_state_dict(state)
    smaller = simple_settings(tmp_path, shuffle={"buffer_rows": 9})
    for changed in (
        open_batches(chosen, shuffle=True, seed=1),
        open_batches(smaller, shuffle=True),
        open_batches(chosen),
        open_batches(chosen, shuffle=True, world_size=2),
    ):
        with pytest.raises(ValueError, match="the data has changed since the position was saved"):
            changed.load_state_dict(state)


def test_drop_last_and_origin(tmp_path: Path) -> None:
    chosen = simple_settings(tmp_path)
    batches = open_batches(chosen, batch_size=10, drop_last=True)
    read = list(batches)
    assert [len(batch) for batch in read] == [10] * 10 == [10] * batches.steps_per_epoch
    assert read[6].origin == f"row 9 of {chosen.train[1]}"


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("batches", "decode", "shuffle"))]


def test_no_thread_outlives_its_loop(tmp_path: Path) -> None:
    batches = open_batches(simple_settings(tmp_path), shuffle=True)
    for _ in batches:
        break
    assert not reading_threads() or (gc.collect() >= 0 and not reading_threads())
    with pytest.raises(KeyError, match="stop"):
        for _ in batches:
            raise KeyError("stop")
    gc.collect()
    assert not reading_threads()
    iterator = iter(batches)
    next(iterator)
    batches.close()
    assert not reading_threads()
    abandoned = iter(open_batches(simple_settings(tmp_path)))
    next(abandoned)
    del abandoned
    gc.collect()
    assert not reading_threads()
    assert len(numbers(open_batches(simple_settings(tmp_path)))) == 103


def test_a_new_loop_ends_the_one_before(tmp_path: Path) -> None:
    batches = open_batches(simple_settings(tmp_path), shuffle=True, batch_size=10)
    whole = numbers(open_batches(simple_settings(tmp_path), shuffle=True, batch_size=10))
    first = iter(batches)
    begun = [next(first), next(first)]
    rest = list(batches)
    assert list(first) == [] and not reading_threads()
    assert numbers(begun) + numbers(rest) == whole and batches.epoch == 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_error_ends_every_thread_and_comes_again(tmp_path: Path, shuffle: bool) -> None:
    table = pa.table({"label": [0] * 95 + [3] * 5, "id": range(100)})
    paths = write_files(tmp_path, table, [100], 5)
    content = {"train": paths, "sparse": {"id": {"num_embeddings": 100}}, "shuffle": {"buffer_rows": 15}}
    batches = open_batches(DataSettings.model_validate(content), batch_size=4, shuffle=shuffle)
    for _ in range(2):
        with pytest.raises(ValueError, match="label column 'label': 3 in row 95"):
            list(batches)
        assert not reading_threads()
        assert batches.epoch == 0


def test_an_error_in_a_late_row_group_comes_after_the_good_batches(tmp_path: Path) -> None:
    labels = [0] * 50 + [2] + [1] * 9
    paths = write_files(tmp_path, pa.table({"label": labels, "id": range(60)}), [60], 10)
    chosen = DataSettings.model_validate({"train": paths, "sparse": {"id": {"num_embeddings": 60}}})
    batches = open_batches(chosen, batch_size=10)
    read = []
    with pytest.raises(ValueError, match=rf"label column 'label': 2 in row 50 of {paths[0]}; a label is 0 or 1"):
        for batch in batches:
            read.append(batch)
    assert len(read) == 5
    assert not reading_threads()


def test_a_label_is_needed_only_where_it_is_read(tmp_path: Path) -> None:
    paths = write_files(tmp_path, pa.table({"id": range(5)}), [5], 10)
    chosen = DataSettings.model_validate({"train": paths, "sparse": {"id": {"num_embeddings": 5}}})
    encoding = Encoding({}, {}, None, {"train": 5})
    (batch,) = ParquetBatches(chosen, encoding, "all", 10, require_label=False)
    assert batch.labels.shape == (0,) and len(batch) == 5
    with pytest.raises(ValueError, match="no column 'label'"):
        ParquetBatches(chosen, encoding, "all", 10)
