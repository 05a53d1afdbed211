"""Where training text comes from: files of text, JSON lines, Parquet, or a Hugging Face dataset on disk.

Documents come in a fixed order: files by relative path, rows as they lie in them.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadmaster.errors import InvalidInput

__all__ = ["Documents", "find_documents"]

TEXT = (".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cc", ".cpp", ".rs", ".go", ".js", ".ts", ".java", ".html")
JSON_LINES, PARQUET, ARROW = (".jsonl", ".ndjson"), (".parquet",), (".arrow",)
STDLIB = "stdlib"  # the sources of the interpreter that runs: real text on every machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Files of text in a fixed order.

    Attributes:
        root: what the user named; files: below it, sorted.
        text_field: column or key that holds the text in JSON lines, Parquet and Arrow.
    """

    root: str
    files: tuple[Path, ...]
    text_field: str = "text"

    @property
    def num_bytes(self) -> int:
        """Size of the files."""
        return sum(path.stat().st_size for path in self.files)

    def fingerprint(self) -> str:
        """Changes when a file is added, removed or rewritten (names, sizes, and modification times)."""
        digest = hashlib.blake2b(digest_size=12)
        for path in self.files:
            status = path.stat()
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        digest.update(self.text_field.encode())
        return digest.hexdigest()

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            yield from _read(path, self.text_field)


def find_documents(source: str, *, text_field: str = "text") -> Documents:
    """The documents of a file, a folder (every known file below it), or ``stdlib``.

    Raises:
        InvalidInput: nothing there, or nothing that can be read.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts)]
    elif Path(source).is_file():
        return Documents(root=source, files=(Path(source),), text_field=text_field)
    elif Path(source).is_dir():
        root = Path(source)
        files = _dataset_files(root) or [p for p in root.rglob("*") if p.suffix.lower() in _suffixes() and p.is_file()]
    else:
        raise InvalidInput("data", source, "is no file or folder", f"give text files, or {STDLIB}")
    files = sorted((p for p in files if p.stat().st_size), key=lambda p: p.relative_to(root).parts)
    if not files:
        raise InvalidInput("data", source, "holds no text", f"put files there that end in {', '.join(_suffixes())}")
    return Documents(root=source, files=tuple(files), text_field=text_field)


def _suffixes() -> tuple[str, ...]:
    return (*TEXT[:4], *JSON_LINES, *PARQUET, *ARROW, *TEXT[4:])


def _dataset_files(root: Path) -> list[Path]:
    """Arrow files of `Dataset.save_to_disk`, in its own order; of a dictionary of splits, the one called train."""
    if (root / "dataset_dict.json").is_file() and (root / "train").is_dir():
        root = root / "train"
    state = root / "state.json"
    if not state.is_file():
        return []
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput("data", str(state), f"is no dataset's state ({error})", "save it again") from None
    return [root / name for name in names]


def _read(path: Path, text_field: str) -> Iterator[str]:
    suffix = path.suffix.lower()
    try:
        if suffix in JSON_LINES:
            yield from _read_json_lines(path, text_field)
        elif suffix in PARQUET or suffix in ARROW:
            yield from _read_columns(path, text_field)
        else:
            yield path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidInput("data", str(path), f"cannot be read ({error.strerror or error})", "check the file") from None


def _read_json_lines(path: Path, text_field: str) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidInput("data", f"{path}:{number}", f"is no JSON ({error})", "one object a line") from None
            if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
                have = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise InvalidInput(
                    "data", f"{path}:{number}", f"has no text under {text_field!r} (it has {have})",
                    "name the field with --text-field",
                )  # fmt: skip
            yield row[text_field]


def _read_columns(path: Path, text_field: str) -> Iterator[str]:
    for batch, names in _batches(path, text_field):
        if text_field not in names:
            raise InvalidInput(
                "data", str(path), f"has no column {text_field!r} (it has {', '.join(names)})",
                "name the column with --text-field",
            )  # fmt: skip
        for value in batch.column(text_field).to_pylist():
            if value is not None and not isinstance(value, str):
                raise InvalidInput("data", str(path), f"column {text_field!r} holds no text", "name another one")
            yield value or ""


def _batches(path: Path, text_field: str) -> Iterator[tuple[Any, list[str]]]:
    """Record batches of a Parquet or Arrow file; only the text column of a Parquet file is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix.lower() in PARQUET:
            with pq.ParquetFile(path) as file:
                names = list(file.schema_arrow.names)
                columns = [text_field] if text_field in names else names[:1]
                for batch in file.iter_batches(columns=columns):
                    yield batch, names
        else:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
                for batch in stream:
                    yield batch, batch.schema.names
    except pa.ArrowInvalid as error:
        raise InvalidInput("data", str(path), f"is damaged or of another format ({error})", "write it again") from None
