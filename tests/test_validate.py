"""Published runs priced by `validate`: errors within what the laws promise, and its own tables read like ours."""

import json
from pathlib import Path

import pytest

import loadmaster as lm
from loadmaster.cli.main import main
from loadmaster.report.validation import score_files, summarise

VALIDATION = Path(__file__).parents[1] / "validation"


@pytest.fixture(scope="module")
def summary():
    tables = [
        VALIDATION / f"{name}.tsv" for name in ("simumax_b200", "megatron_lm_golden", "fms_acceleration", "papers")
    ]
    return summarise(list(score_files(tables)))


def complete(summary, source):
    return summary["memory"]["by_source"][source]["complete"]


def test_simumax_rows(summary):
    rows = [r for r in score_files([VALIDATION / "simumax_b200.tsv"]) if r.memory_error is not None]
    dense = [abs(r.memory_error) for r in rows if r.run.layout.cp == 1 and r.run.layout.ep == 1]
    context = [abs(r.memory_error) for r in rows if r.run.layout.cp > 1]
    mixture = [abs(r.memory_error) for r in rows if r.run.layout.ep > 1]
    assert (len(dense), len(context), len(mixture)) == (12, 4, 12)
    assert sum(dense) / 12 < 0.003
    assert sum(context) / 4 < 0.006
    assert sum(mixture) / 12 < 0.01


def test_functional_tests_of_megatron(summary):
    assert complete(summary, "megatron_lm_golden")["median"] < 0.015


def test_fine_tuning_under_trainer(summary):
    assert complete(summary, "fms_acceleration")["median"] < 0.01


def test_a_failed_row_is_never_called_sure(summary):
    assert summary["fits"]["all"]["failed_called_surely_fitting"] == 0


def test_command_prints_one_document(capsys, tmp_path):
    lines = (VALIDATION / "simumax_b200.tsv").read_text().splitlines()
    table = tmp_path / "mine.tsv"
    table.write_text("\n".join([*lines[:3], lines[3].replace("\tllama3-70b\t", "\tunheard-of\t")]) + "\n")
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit) as stop:
        main(["validate", str(table), "--json", "--markdown", str(page)])
    assert stop.value.code == 0
    document = json.loads(capsys.readouterr().out)
    priced = [row["priced"] for row in document["rows"]]
    assert priced == [True, True, False]
    assert document["rows"][2]["reason"]
    assert {"row_id", "memory_bytes", "step_seconds", "tokens_per_second_per_device", "mfu", "fits",
            "out_of_memory_probability", "memory_low", "memory_high"} <= document["rows"][0].keys()  # fmt: skip
    assert page.read_text().startswith("# Scoreboard")


def test_missing_table_is_one_message(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["validate", "nowhere.tsv"])
    assert stop.value.code == 2
    assert "nowhere.tsv" in capsys.readouterr().err


def test_exclusions_are_few():
    named = {row.row_id for row in score_files([VALIDATION / "bigscience.tsv"]) if row.excluded}
    assert named == {"BS-0048"}
    assert isinstance(lm.Stack.named("megatron"), lm.Stack)
