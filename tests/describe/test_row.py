"""Rows of measured runs become values, or say why not."""

from pathlib import Path

import pytest

import loadmaster as lm
from loadmaster.describe.row import MemoryKind, describe_row, read_rows

VALIDATION = Path(__file__).parents[2] / "validation"


def first(table, **where):
    return next(r for r in read_rows(VALIDATION / table) if all(r[k] == v for k, v in where.items()))


def test_a_megatron_row():
    row = describe_row(first("simumax_b200.tsv", row_id="SM-0001"))
    assert row.layout == lm.Layout(dp_shard=4, pp=2, zero=1, precision="bf16-master")
    assert row.model.num_params == 12369207296
    assert (row.stack.name, row.stage, row.memory_kind) == ("megatron", "worst", MemoryKind.ALLOCATED)
    assert row.workload == lm.Workload(global_batch_size=16, seq_len=4096, loss="fused")
    assert row.cluster.num_devices == 8
    assert row.complete
    assert not row.failed


def test_every_row_is_described_or_says_why():
    rows, refused = 0, []
    for table in sorted(VALIDATION.glob("*.tsv")):
        for row in read_rows(table):
            rows += 1
            try:
                described = describe_row(row)
            except (lm.LoadmasterError, ModuleNotFoundError) as error:
                refused.append(str(error))
                continue
            assert described.cluster.num_devices == described.layout.world_size
    assert rows > 5000
    # the losses that the reader names are ones the workload knows
    assert not [reason for reason in refused if "workload.loss" in reason]


def test_missing_column_is_refused(tmp_path):
    (tmp_path / "x.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(lm.InvalidInput, match="no row_id column"):
        list(read_rows(tmp_path / "x.tsv"))


@pytest.mark.parametrize("cell", ["abc", "-1", "nan", "inf", "1,2", "0", "3.5"])
@pytest.mark.parametrize("column", ["layers", "tp", "micro_batch", "n_gpus"])
def test_an_absurd_cell_is_refused_by_name(column, cell):
    row = {**first("simumax_b200.tsv", row_id="SM-0001"), column: cell}
    with pytest.raises(lm.InvalidInput, match=f"row.{column}"):
        describe_row(row)


def test_a_table_may_lack_columns():
    row = {k: v for k, v in first("simumax_b200.tsv", row_id="SM-0001").items() if v}
    assert describe_row(row).model.num_params == 12369207296
    with pytest.raises(lm.InvalidInput, match=r"row\.layers"):
        describe_row({"row_id": "mine"})
