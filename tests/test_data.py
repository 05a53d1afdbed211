"""Documents, tokens and the global order of sequences."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from loadmaster.errors import InvalidInput
from loadmaster.runtime.data import Sequences, open_sequences, shuffled
from loadmaster.runtime.documents import find_documents

TEXTS = ["one", "zwei", "trois"]


def write(folder: Path, form: str) -> None:
    folder.mkdir()
    match form:
        case "txt":
            for i, text in enumerate(TEXTS):
                (folder / f"{i}.txt").write_text(text)
        case "jsonl":
            (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS) + "\n\n")
        case "parquet":
            pq.write_table(pa.table({"id": [1, 2, 3], "text": TEXTS}), folder / "a.parquet")
        case "arrow":  # as Dataset.save_to_disk leaves it
            table = pa.table({"text": TEXTS})
            path = str(folder / "data-00000-of-00001.arrow")
            with pa.OSFile(path, "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
                stream.write_table(table)
            (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
            (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("form", ["txt", "jsonl", "parquet", "arrow"])
def test_every_form_gives_the_same_tokens(tmp_path: Path, form: str) -> None:
    write(tmp_path / "data", form)
    train, held = open_sequences(str(tmp_path / "data"), "bytes", tmp_path / "ids", seq_len=2, vocab_size=256, seed=0)
    assert bytes(train.tokens.ids) == b"one\0zwei\0trois\0"
    assert train.tokens.num_documents == 3
    assert held is None
    assert train.count == 7


def test_a_hugging_face_tokenizer_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"one": 0, "zwei": 1, "trois": 2, "</s>": 3}, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "data", "txt")
    args = {"seq_len": 2, "vocab_size": 4, "seed": 0}
    train, _ = open_sequences(str(tmp_path / "data"), str(tmp_path), tmp_path / "ids", **args)
    assert train.tokens.ids.tolist() == [0, 3, 1, 3, 2, 3]
    with pytest.raises(InvalidInput, match="beyond the model's vocabulary"):
        open_sequences(str(tmp_path / "data"), str(tmp_path), tmp_path / "other", **{**args, "vocab_size": 3})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000, 4097])
def test_the_order_is_a_permutation(size: int) -> None:
    first, again, other = (shuffled(np.arange(size), size, seed) for seed in (1, 1, 2))
    assert sorted(first) == list(range(size))
    assert (first == again).all()
    assert size < 17 or (first != other).any()


def sequences(count: int = 50, seq_len: int = 4) -> Sequences:
    from loadmaster.runtime.tokens import TokenFile

    ids = np.arange(count * seq_len, dtype=np.uint16)
    tokens = TokenFile(ids=ids, fingerprint="", entropy=0.0, num_documents=1)
    return Sequences(tokens=tokens, seq_len=seq_len, seed=3, first=0, count=count)


@pytest.mark.parametrize(("dp", "micro_batch_size"), [(1, 12), (2, 3), (3, 1), (5, 2), (12, 1)])
def test_the_global_batch_does_not_depend_on_the_ranks(dp: int, micro_batch_size: int) -> None:
    data = sequences()
    for position in (0, 36, 48, 131):  # 48: reaches into the second epoch
        whole = data.window(position, global_batch_size=12, data_rank=0, dp=1, micro_batch_size=12)[0]["input_ids"]
        parts = [
            micro["input_ids"]
            for rank in range(dp)
            for micro in data.window(
                position, global_batch_size=12, data_rank=rank, dp=dp, micro_batch_size=micro_batch_size
            )
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_an_epoch_reads_every_sequence_once() -> None:
    data = sequences()
    first, second = (data.at(np.arange(k * 50, k * 50 + 50)) for k in (0, 1))
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(0, 200, 4))
    assert not torch.equal(first, second)


def test_held_out_sequences_are_disjoint(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    train, held = open_sequences(
        str(tmp_path / "a.txt"), "bytes", tmp_path / "ids", seq_len=5, vocab_size=256, seed=0, held_out=0.25
    )
    assert held is not None
    seen = set(train.at(np.arange(train.count)).flatten().tolist())
    kept = set(held.at(np.arange(held.count)).flatten().tolist())
    assert len(kept) == 25
    assert not seen & kept


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "picture.png").write_bytes(b"x")
    for name in ("empty", "other"):
        with pytest.raises(InvalidInput, match="holds no text"):
            find_documents(str(tmp_path / name))
    with pytest.raises(InvalidInput, match="is no file or folder"):
        find_documents(str(tmp_path / "nowhere"))
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(InvalidInput, match=r"has no text under 'text' \(it has body\)"):
        list(find_documents(str(tmp_path / "a.jsonl")))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(InvalidInput, match="is damaged"):
        list(find_documents(str(tmp_path / "a.parquet")))
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(InvalidInput, match="less than one sequence"):
        open_sequences(str(tmp_path / "short.txt"), "bytes", tmp_path / "ids", seq_len=99, vocab_size=256, seed=0)
    with pytest.raises(InvalidInput, match="is no tokenizer file"):
        open_sequences(
            str(tmp_path / "short.txt"), str(tmp_path / "a.jsonl"), tmp_path, seq_len=1, vocab_size=9, seed=0
        )


def test_the_standard_library_is_text() -> None:
    documents = find_documents("stdlib")
    assert documents.num_bytes > 5_000_000
