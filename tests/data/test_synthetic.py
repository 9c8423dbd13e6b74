"""The synthetic click logs: their columns follow the stated laws, and no choice of pieces changes a value."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from recsys_offload.data import DataSettings
from recsys_offload.data.click_log import BASE_RATE, ClickLog, OptimalModel
from recsys_offload.data.criteo import DENSE_NAMES, SCHEMAS, SPARSE_NAMES, Schema
from recsys_offload.data.synthetic import main
from recsys_offload.data.synthetic_kernels import fill_ids

SMALL = Schema(cardinalities=(1, 2, 50, *(1000,) * 23), hotness=(1, 3, *(1,) * 23, 20))


def make(log: ClickLog, rows: int, pieces: Sequence[int] = ()) -> tuple[pa.Table, np.ndarray]:
    """The first rows of a log and their probabilities, made in pieces that end at the given rows."""
    batches, probabilities = [], []
    with ThreadPoolExecutor(2) as pool:
        bounds = [0, *pieces, rows]
        for first, end in itertools.pairwise(bounds):
            batch, probability = log.finish(log.start(pool, first, end - first), first)
            batches.append(batch)
            probabilities.append(probability)
    return pa.Table.from_batches(batches).combine_chunks(), np.concatenate(probabilities)


def draw(size: int, skew: float, rows: int) -> np.ndarray:
    ids, is_null = np.empty(rows, np.int32), np.empty(rows, np.bool_)
    effect, factor = np.empty(rows, np.float32), np.empty(rows, np.float32)
    fill_ids(np.uint64(11), 0, rows, size, 1, skew, 0.0, 1, 0, ids, is_null, effect, factor)
    return ids


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("size", [1, 2, 300])
def test_ids_follow_the_finite_zipf_law(size: int, skew: float) -> None:
    rows = 400_000
    probability = np.arange(1, size + 1) ** -skew
    expected = rows * probability / probability.sum()
    counts = np.bincount(draw(size, skew, rows), minlength=size)
    assert len(counts) == size
    # The statistic has mean size - 1 and variance 2 (size - 1).
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic <= size - 1 + 5 * math.sqrt(2 * (size - 1))


def test_the_tail_of_a_large_table_has_its_share() -> None:
    size, skew, rows = 40_000_000, 1.05, 400_000
    ids = draw(size, skew, rows)
    assert ids.min() >= 0 and ids.max() < size

    def mass(first: float, last: float) -> float:  # the sum of rank^-skew, up to a relative error of 1 / first
        return (last ** (1 - skew) - first ** (1 - skew)) / (1 - skew)

    head = (np.arange(1, 1001) ** -skew).sum()
    total = head + mass(1000.5, size + 0.5)
    for limit in (1e5, 1e6, 1e7):
        share = mass(limit + 0.5, size + 0.5) / total
        assert np.mean(ids >= limit) == pytest.approx(share, abs=5 * math.sqrt(share / rows))


def test_scattered_ids_are_the_same_law_in_another_order() -> None:
    by_frequency, _ = make(ClickLog(SMALL, scatter_ids=False, null_rate=0.0), 20_000)
    scattered, _ = make(ClickLog(SMALL, scatter_ids=True, null_rate=0.0), 20_000)
    for name in SPARSE_NAMES[3:25]:
        one = np.bincount(by_frequency[name].to_numpy(), minlength=1000)
        other = np.bincount(scattered[name].to_numpy(), minlength=1000)
        assert sorted(one) == sorted(other)
        hottest = np.argsort(other)[-20:]
        assert one.argmax() == 0 and hottest.max() > 500


@pytest.mark.parametrize("schema", [SMALL, SCHEMAS["criteo-kaggle"].scaled(1e-3)])
def test_pieces_do_not_change_a_value(schema: Schema) -> None:
    log = ClickLog(schema, seed=3)
    whole, probability = make(log, 3001)
    for pieces in ([1], [1000, 1001, 2048], [3000]):
        table, again = make(ClickLog(schema, seed=3), 3001, pieces)
        assert table.equals(whole)
        assert np.array_equal(again, probability)
    assert not make(ClickLog(schema, seed=4), 3001)[0].equals(whole)


def test_columns_nulls_and_multi_hot_sizes() -> None:
    rows, null_rate = 20_000, 0.1
    table, _ = make(ClickLog(SMALL, null_rate=null_rate), rows)
    assert table.column_names == ["label", *DENSE_NAMES, *SPARSE_NAMES]
    for name in (*DENSE_NAMES, *SPARSE_NAMES):
        assert table[name].null_count / rows == pytest.approx(null_rate, abs=5 * math.sqrt(null_rate / rows))
    for name in DENSE_NAMES:
        values = table[name].drop_null().to_numpy()
        assert values.min() >= 0 and values.mean() > np.median(values)  # counts, with a long tail to the right
    for name, size, hotness in zip(SPARSE_NAMES, SMALL.cardinalities, SMALL.hotness, strict=True):
        column = table[name]
        if hotness > 1:
            assert pc.unique(pc.list_value_length(column).drop_null()).to_pylist() == [hotness]
            column = pc.list_flatten(column)
        ids = column.drop_null().to_numpy()
        assert ids.min() == 0 and ids.max() == size - 1
    full, _ = make(ClickLog(SMALL, null_rate=0.0), 1000)
    assert all(full[name].null_count == 0 for name in full.column_names)


def test_schemas_have_the_true_cardinalities() -> None:
    kaggle, terabyte = SCHEMAS["criteo-kaggle"], SCHEMAS["criteo-1tb-multihot"]
    assert sum(kaggle.cardinalities) == 33_762_577
    assert sum(terabyte.cardinalities) == 204_184_588
    assert sum(terabyte.hotness) == 214
    small = kaggle.scaled(0.01)
    assert [small.cardinalities[column] for column in (1, 2, 8)] == [583, 101_312, 3]


def exact_auc(score: np.ndarray, labels: np.ndarray) -> float:
    ranks = np.empty(len(score))
    ranks[np.argsort(score)] = np.arange(1, len(score) + 1)
    positives = labels.sum()
    return (ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))


def test_planted_clicks_have_their_rate_and_optimal_auc() -> None:
    rows = 100_000
    table, probability = make(ClickLog(SCHEMAS["criteo-kaggle"].scaled(0.01)), rows)
    labels = table["label"].to_numpy().astype(int)
    assert labels.mean() == pytest.approx(BASE_RATE, abs=0.01)
    assert probability.mean() == pytest.approx(labels.mean(), abs=0.006)
    optimum = OptimalModel()
    for part in np.array_split(np.arange(rows), 7):
        optimum.add(probability[part], labels[part])
    assert optimum.auc == pytest.approx(exact_auc(probability, labels), abs=1e-5)
    assert 0.74 < optimum.auc < 0.82
    assert optimum.base_rate == labels.mean()
    # Within a tenth of the rows, of like probability, the clicks have that probability.
    for tenth in np.array_split(np.argsort(probability), 10):
        assert labels[tenth].mean() == pytest.approx(probability[tenth].mean(), abs=0.025)


def test_ids_and_counts_predict_clicks() -> None:
    rows = 60_000
    table, _ = make(ClickLog(SCHEMAS["criteo-kaggle"].scaled(0.01)), rows)
    labels = table["label"].to_numpy().astype(int)
    train = np.arange(rows) < rows // 2
    # Naive Bayes: the log-odds of each id and each count's octave, smoothed, from one half; scored on the other.
    score = np.zeros(rows)
    for name in (*DENSE_NAMES, *SPARSE_NAMES):
        values = pc.fill_null(table[name], -1).to_numpy().astype(np.int64) + 1
        groups = np.log2(values + 1).astype(int) if name in DENSE_NAMES else values
        clicks = np.bincount(groups[train], labels[train], groups.max() + 1)
        seen = np.bincount(groups[train], minlength=groups.max() + 1)
        rate = (clicks + 20 * BASE_RATE) / (seen + 20)
        score += np.log(rate / (1 - rate))[groups]
    assert exact_auc(score[~train], labels[~train]) > 0.66


def test_command_writes_a_data_set_ready_to_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "log"
    main(f"--out {out} --rows 10001 --scale 0.001 --files 3 --row-group-rows 1500 --seed 5".split())
    assert {path.name for path in out.iterdir()} == {
        "dataset.yaml", "generator.json", "part-00000.parquet", "part-00001.parquet", "part-00002.parquet",
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    metadata = pq.ParquetFile(out / "part-00000.parquet").metadata
    assert metadata.num_rows == 3333
    assert [metadata.row_group(group).num_rows for group in range(3)] == [1500, 1500, 333]
    assert metadata.row_group(0).column(1).compression == "ZSTD"
    expected, _ = make(ClickLog(SCHEMAS["criteo-kaggle"].scaled(0.001), seed=5), 10001)
    written = pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("*.parquet"))])
    assert written.equals(expected)
    data = yaml.safe_load((out / "dataset.yaml").read_text())["data"]
    assert list(data["dense"]) == list(DENSE_NAMES) and list(data["sparse"]) == list(SPARSE_NAMES)
    report = json.loads((out / "generator.json").read_text())
    assert f"optimal AUC {report['optimal_auc']:.4f}" in capsys.readouterr().out


def test_settings_of_a_data_set_are_valid(tmp_path: Path) -> None:
    out = tmp_path / "log"
    main(f"--out {out} --rows 500 --scale 0.0001 --schema criteo-1tb-multihot --files 1".split())
    settings = DataSettings(**yaml.safe_load((out / "dataset.yaml").read_text())["data"])
    assert settings.sparse["cat_20"].num_embeddings == 4000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rows 0", "rows must be at least 1, not 0"),
        ("--rows 3 --files 4", "3 rows cannot be spread over 4 files"),
        ("--scale 0", "scale must be a positive number, not 0.0"),
        ("--null-rate 1.5", "null_rate must be between 0 and 1, not 1.5"),
        ("--skew -1", "skew must be between 0 and 10, not -1.0"),
        ("--scale 1000", "a column has between 1 and 2^31 - 1 distinct ids, not 10131227000"),
        ("--cardinality 0", "a column has between 1 and 2^31 - 1 distinct ids, not 0"),
    ],
)
def test_wrong_numbers_are_refused(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--out", str(tmp_path / "log"), *arguments.split()])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--out", str(tmp_path)])
    assert caught.value.code == 2
    assert "exists already: remove it or name another folder with --out" in capsys.readouterr().err


MEASURE = """
import resource, sys
from recsys_offload.data.synthetic import main
main(["--out", sys.argv[1], "--rows", sys.argv[2], "--scale", "0.01", "--row-group-rows", "20000", "--files", "2"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for rows in (40_000, 400_000):  # 360,000 rows more are 56 MB more of columns
        command = [sys.executable, "-c", MEASURE, str(tmp_path / str(rows)), str(rows)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks.append(int(output.splitlines()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 28
