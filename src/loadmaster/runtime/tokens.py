"""Text to one flat file of token ids, made once a run and memory-mapped by every rank."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loadmaster.errors import InvalidInput
from loadmaster.runtime.documents import Documents

__all__ = ["ByteTokenizer", "FileTokenizer", "TokenFile", "Tokenizer", "load_tokenizer", "prepare_tokens"]

BATCH = 256  # documents encoded at once


class Tokenizer(Protocol):
    """Text to ids; `name` enters the fingerprint of the token file."""

    name: str
    vocab_size: int

    def encode(self, texts: list[str]) -> Iterator[npt.NDArray[Any]]:
        """Ids of each text, its end marked."""
        ...


class ByteTokenizer:
    """UTF-8 bytes; 0, which no text holds, ends a document.

    >>> [ids.tolist() for ids in ByteTokenizer().encode(["hé"])]
    [[104, 195, 169, 0]]
    """

    name, vocab_size = "bytes", 256

    def encode(self, texts: list[str]) -> Iterator[npt.NDArray[Any]]:
        """Bytes of each text and a 0."""
        for text in texts:
            yield np.frombuffer(text.encode("utf-8", errors="replace") + b"\0", dtype=np.uint8)


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``, or the folder that holds it."""

    ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|endofsequence|>")

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Encoder

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            text = file.read_text(encoding="utf-8")
            self.encoder = Encoder.from_str(text)
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            raise InvalidInput(
                "tokenizer", str(path), f"is no tokenizer file ({error})", "give a tokenizer.json, its folder, or bytes"
            ) from None
        self.name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.vocab_size = int(self.encoder.get_vocab_size(with_added_tokens=True))
        self.end = self._end_id(file.parent / "tokenizer_config.json")

    def _end_id(self, config: Path) -> int | None:
        named: Any = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
        named = named.get("content") if isinstance(named, dict) else named
        ids = (self.encoder.token_to_id(token) for token in (named, *self.ENDS) if token)
        return next((i for i in ids if i is not None), None)

    def encode(self, texts: list[str]) -> Iterator[npt.NDArray[Any]]:
        """Ids of each text, and the end-of-text id where the tokenizer has one."""
        tail = [] if self.end is None else [self.end]
        for encoding in self.encoder.encode_batch(texts, add_special_tokens=False):
            yield np.asarray([*encoding.ids, *tail], dtype=np.uint32)


def load_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or a path to a Hugging Face tokenizer file or folder.

    Raises:
        InvalidInput: no such file, or no tokenizer in it.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if not Path(name).exists():
        raise InvalidInput("tokenizer", name, "does not exist", "give a tokenizer.json, its folder, or bytes")
    return FileTokenizer(Path(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """Ids end to end.

    Attributes:
        ids: memory-mapped, of the smallest unsigned type that holds the vocabulary.
        fingerprint: of documents and tokenizer together.
        entropy: nats a token of the ids taken one by one, H = -sum p ln p: what a model that knows only
            frequencies reaches.
    """

    ids: npt.NDArray[Any]
    fingerprint: str
    entropy: float
    num_documents: int

    def __len__(self) -> int:
        return int(self.ids.shape[0])


def prepare_tokens(documents: Documents, tokenizer: Tokenizer, folder: Path, *, vocab_size: int) -> TokenFile:
    """Encode `documents` into `folder`, or open what is there already; a crash leaves no half file.

    Raises:
        InvalidInput: the tokenizer has ids that the model does not.
    """
    dtype = np.dtype(np.uint8 if tokenizer.vocab_size <= 256 else np.uint16 if tokenizer.vocab_size <= 65536 else "u4")
    key = hashlib.blake2b(f"{documents.fingerprint()} {tokenizer.name}".encode(), digest_size=8).hexdigest()
    data, about = folder / f"{key}.ids", folder / f"{key}.json"
    if not about.is_file():
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput("--out", str(folder), f"cannot be made ({error.strerror})", "choose another") from None
        part = folder / f"{key}.{os.getpid()}.part"
        try:
            facts = _encode(documents, tokenizer, part, dtype)
            if facts["largest_id"] >= vocab_size:
                raise InvalidInput(
                    "tokenizer", facts["largest_id"], f"is an id beyond the model's vocabulary of {vocab_size}",
                    "use the model's own tokenizer, or a model with a larger vocabulary",
                )  # fmt: skip
            part.rename(data)
            part.write_text(json.dumps(facts), encoding="utf-8")
            part.rename(about)
        except BaseException:
            part.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # one of them holds something else by now
                for path in made:
                    path.rmdir()
            raise
    facts = json.loads(about.read_text(encoding="utf-8"))
    ids = np.memmap(data, dtype=dtype, mode="r")
    assert len(ids) == facts["num_tokens"], (data, len(ids), facts)
    return TokenFile(ids=ids, fingerprint=key, entropy=facts["entropy"], num_documents=facts["num_documents"])


def _encode(documents: Iterable[str], tokenizer: Tokenizer, path: Path, dtype: np.dtype[Any]) -> dict[str, Any]:
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    num_documents, rest = 0, iter(documents)
    with path.open("wb") as out:
        while batch := list(islice(rest, BATCH)):
            ids = np.concatenate(list(tokenizer.encode(batch))).astype(dtype)
            counts += np.bincount(ids, minlength=len(counts))
            out.write(ids.tobytes())
            num_documents += len(batch)
    total = int(counts.sum())
    shares = counts[counts > 0] / max(total, 1)
    return {
        "num_tokens": total, "num_documents": num_documents,
        "entropy": float(-(shares * np.log(shares)).sum()), "largest_id": int(np.flatnonzero(counts).max(initial=0)),
    }  # fmt: skip
