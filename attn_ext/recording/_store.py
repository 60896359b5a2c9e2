"""Where recorded tensors are kept: in memory, or in a file.

The file is NumPy's ``.npz``, written as it goes: a zip without compression of one ``.npy`` a tensor, named
``what/layer/call.npy``, and ``record.json``, which says in which order the layers were called. It carries
its name only once it is whole.
"""

import contextlib
import json
import os
import zipfile
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch
from torch import Tensor

from ._files import cannot_write, part_of

INDEX = "record.json"


def numpy() -> ModuleType:
    try:
        import numpy
    except ImportError:
        raise ImportError(
            "recorded weights in a file take NumPy; to have it: pip install 'attn_ext[record]'"
        ) from None
    return numpy


class MemoryStore:
    """Tensors by what they are, layer and call, in memory."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, str], list[Tensor]] = {}

    def append(self, what: str, layer: str, tensor: Tensor) -> None:
        self.tensors.setdefault((what, layer), []).append(tensor)

    def read(self, what: str, layer: str) -> list[Tensor]:
        return list(self.tensors.get((what, layer), []))

    def close(self, index: dict[str, Any]) -> None:
        """Nothing to finish."""

    def abandon(self) -> None:
        """What was recorded stays."""


class FileStore:
    """Tensors in a file, which can be read once it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: dict[tuple[str, str], int] = {}
        self._dtypes: dict[str, str] = {}
        self._part = part_of(path, self)
        self._file: IO[bytes] | None = None
        self._zip: zipfile.ZipFile | None = None

    @classmethod
    def create(cls, path: Path) -> "FileStore":
        """A store that writes beside ``path``, in a file of a passing name.

        Raises:
            OSError: it cannot be written there.
        """
        numpy()
        store = cls(path)
        if path.is_dir():
            raise IsADirectoryError(f"cannot write {path}: it is a folder")
        try:
            store._file = open(store._part, "xb")  # noqa: SIM115 (open until the record is closed)
        except OSError as error:
            raise cannot_write(path, error) from error
        store._zip = zipfile.ZipFile(store._file, "w", zipfile.ZIP_STORED, allowZip64=True)
        return store

    def append(self, what: str, layer: str, tensor: Tensor) -> None:
        if self._zip is None:
            raise OSError(f"cannot write {self.path}: it was given up")
        number = self.counts.get((what, layer), 0)
        name = f"{what}/{layer}/{number}.npy"
        if tensor.dtype == torch.bfloat16:  # NumPy has none; float32 holds the same numbers
            self._dtypes[name] = "bfloat16"
            tensor = tensor.float()
        try:
            with self._zip.open(name, "w", force_zip64=True) as member:
                numpy().lib.format.write_array(member, tensor.contiguous().numpy(), allow_pickle=False)
        except OSError as error:
            self.abandon()
            raise cannot_write(self.path, error) from error
        self.counts[what, layer] = number + 1

    def close(self, index: dict[str, Any]) -> None:
        """Write the index and give the file its name."""
        if self._zip is None or self._file is None:
            return
        counts = [[what, layer, count] for (what, layer), count in self.counts.items()]
        try:
            self._zip.writestr(INDEX, json.dumps(index | {"counts": counts, "dtypes": self._dtypes}))
            self._zip.close()
            self._file.close()
            os.replace(self._part, self.path)
        except OSError as error:
            self.abandon()
            raise cannot_write(self.path, error) from error
        self._zip = self._file = None

    def abandon(self) -> None:
        """Remove what was written."""
        if self._zip is None or self._file is None:
            return
        self._zip.fp = None  # so that it writes no directory when it is collected
        with contextlib.suppress(OSError):  # what was still buffered finds no place either
            self._file.close()
        self._zip = self._file = None
        self._part.unlink(missing_ok=True)

    def read(self, what: str, layer: str) -> list[Tensor]:
        if self._zip is not None:
            raise RuntimeError(f"{self.path} can be read after the with block, when it is whole")
        count = self.counts.get((what, layer), 0)
        tensors: list[Tensor] = []
        if count == 0:
            return tensors
        with zipfile.ZipFile(self.path) as archive:
            for number in range(count):
                name = f"{what}/{layer}/{number}.npy"
                with archive.open(name) as member:
                    tensor = torch.from_numpy(numpy().lib.format.read_array(member, allow_pickle=False))
                tensors.append(tensor.bfloat16() if name in self._dtypes else tensor)
        return tensors

    @classmethod
    def open(cls, path: Path) -> "tuple[FileStore, dict[str, Any]]":
        """A whole file and its index.

        Raises:
            ValueError: it is no record.
            OSError: it cannot be read.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                index = json.loads(archive.read(INDEX))
        except (zipfile.BadZipFile, KeyError, json.JSONDecodeError):
            raise ValueError(f"{path} is not a record of attn_ext.record(to=…), or not a whole one") from None
        store = cls(path)
        store.counts = {(what, layer): count for what, layer, count in index["counts"]}
        store._dtypes = index["dtypes"]
        return store, index
