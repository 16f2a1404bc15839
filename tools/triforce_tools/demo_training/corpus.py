"""The corpus: source text of permissively licensed installed packages and of the standard library, as token ids.

Nothing is downloaded or copied into the repository: the files are read where they are installed, tokenised once, and
kept as a memory-mapped array in the cache folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePath

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from triforce_tools.demo_training.settings import CorpusSettings

Tokens = npt.NDArray[np.unsignedinteger]  # 16 bits, if they suffice for the vocabulary
EOS = 0

_PERMISSIVE = re.compile(r"\b(MIT|BSD|0BSD|Apache|PSF|Python Software Foundation)\b", re.IGNORECASE)
_RECIPROCAL = re.compile(r"GPL|GNU|MPL|Mozilla|EPL|CDDL|EUPL|Proprietary", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Package:
    """One installed package whose licence allows training on its text."""

    name: str
    version: str
    licence: str
    root: Path
    files: tuple[str, ...]  # relative to root, posix


@dataclass(frozen=True, slots=True)
class Document:
    """One held-out file: where its tokens lie in the held-out array."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """The tokenised corpus: the sorted files of each package, each under a header line, with `EOS` between packages."""

    train: Tokens  # [train tokens], memory-mapped
    held_out: Tokens  # [held-out tokens], memory-mapped
    documents: tuple[Document, ...]  # held-out files, longest first
    packages: tuple[dict[str, str], ...]  # name, version, licence
    digest: str  # sha256 of the two arrays

    def document(self, document: Document) -> Tokens:
        return self.held_out[document.start : document.stop]


def permissive_licence(dist: metadata.Distribution) -> str | None:
    """A package's licence as its metadata states it, if that names MIT, BSD, Apache or PSF and no reciprocal licence;
    else None.
    """
    meta = dist.metadata
    expression = "".join(meta.get_all("License-Expression") or [])
    classifiers = [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    field = "".join(meta.get_all("License") or []).strip().splitlines()
    words = expression or "; ".join(c for c in classifiers if c != "OSI Approved") or (field[0] if field else "")
    if not _PERMISSIVE.search(words) or _RECIPROCAL.search(words):
        return None
    return words


def find_packages(settings: CorpusSettings) -> list[Package]:
    """The standard library and every permissively licensed installed package, sorted by name."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(stdlib) for path in stdlib.rglob("*"))
    packages = [Package("python", sysconfig.get_python_version(), "PSF-2.0", stdlib, _kept(files, settings))]
    for dist in metadata.distributions():
        licence = permissive_licence(dist)
        if licence is None:
            continue
        if kept := _kept(dist.files or (), settings):
            root = Path(str(dist.locate_file("")))
            packages.append(Package(dist.metadata["Name"], dist.version, licence, root, kept))
    return sorted(packages, key=lambda package: package.name.lower())


def _kept(paths: Iterable[PurePath], settings: CorpusSettings) -> tuple[str, ...]:
    return tuple(
        sorted(
            path.as_posix()
            for path in paths
            if path.suffix in settings.suffixes
            and not {*settings.skipped_folders, ".."} & set(path.parts)
            and not path.parts[0].endswith(".dist-info")
        )
    )


def is_held_out(package: str, path: str, settings: CorpusSettings) -> bool:
    """Whether a file is never trained on: a fixed hash of its name, or one of the named standard-library files."""
    # Python 3.12 moved the code of datetime.py into _pydatetime.py.
    if package == "python" and {path, path.removeprefix("_py")} & {*settings.held_out_stdlib}:
        return True
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 100 < settings.held_out_percent


def build_corpus(
    settings: CorpusSettings, tokenizer_path: Path, folder: Path, packages: Sequence[Package] | None = None
) -> Corpus:
    """The corpus in `folder`. If there is none yet, it is made from `packages`, by default `find_packages`."""
    if not (folder / "corpus.json").is_file():
        chosen = find_packages(settings) if packages is None else packages
        _tokenise(chosen, settings, Tokenizer.from_file(str(tokenizer_path)), folder)
    return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    """A corpus that `build_corpus` made; the arrays are memory-mapped.

    Raises:
        FileNotFoundError: there is no corpus in `folder`.
    """
    index = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    return Corpus(
        train=_mapped(folder / "train.bin"),
        held_out=_mapped(folder / "held_out.bin"),
        documents=tuple(Document(**document) for document in index["documents"]),
        packages=tuple(index["packages"]),
        digest=index["digest"],
    )


def _mapped(path: Path) -> Tokens:
    """The array in a file, memory-mapped unless the file is empty, which cannot be mapped."""
    return np.memmap(path, dtype=np.uint16, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint16)


def _tokenise(packages: Sequence[Package], settings: CorpusSettings, tokenizer: Tokenizer, folder: Path) -> None:
    seen: set[bytes] = set()  # digests of texts: held-out files first, so that no copy of one is trained on
    held_out = list(_texts(packages, settings, seen, held_out=True))
    train = list(_texts(packages, settings, seen, held_out=False))
    folder.mkdir(parents=True, exist_ok=True)
    documents: list[Document] = []
    digest = hashlib.sha256()
    start = 0
    with (folder / "held_out.bin").open("wb") as file:
        for path, ids in _encode(tokenizer, held_out):
            documents.append(Document(path, start, start + len(ids)))
            start += len(ids)
            file.write(ids.tobytes())
            digest.update(ids.tobytes())
    with (folder / "train.bin").open("wb") as file:
        for package, texts in itertools.groupby(train, key=lambda item: item[0].partition("/")[0]):
            ids = np.concatenate([*(ids for _, ids in _encode(tokenizer, list(texts))), np.array([EOS], np.uint16)])
            for _ in range(settings.copies.get(package, 1)):
                file.write(ids.tobytes())
                digest.update(ids.tobytes())
    index = {
        "digest": digest.hexdigest(),
        "packages": [{"name": p.name, "version": p.version, "licence": p.licence} for p in packages],
        "documents": [
            {"path": d.path, "start": d.start, "stop": d.stop}
            for d in sorted(documents, key=lambda d: (d.start - d.stop, d.path))
        ],
    }
    partial = folder / "corpus.json.partial"
    partial.write_text(json.dumps(index, indent=1), encoding="utf-8")
    partial.replace(folder / "corpus.json")  # last: its presence shows that the arrays are complete


def _texts(
    packages: Sequence[Package], settings: CorpusSettings, seen: set[bytes], *, held_out: bool
) -> Iterator[tuple[str, str]]:
    """(package/path, text under a header line with the path) of each file whose text was not seen before."""
    for package in packages:
        for path in package.files:
            source = package.root / path
            if is_held_out(package.name, path, settings) != held_out or not source.is_file():
                continue
            if source.stat().st_size > settings.max_file_bytes:
                continue
            text = source.read_bytes().decode("utf-8", errors="ignore")
            digest = hashlib.sha256(text.encode()).digest()
            if text.strip() and digest not in seen:
                seen.add(digest)
                yield f"{package.name}/{path}", f"# {path}\n{text}\n"


def _encode(tokenizer: Tokenizer, texts: list[tuple[str, str]], batch: int = 256) -> Iterator[tuple[str, Tokens]]:
    for first in range(0, len(texts), batch):
        part = texts[first : first + batch]
        for (path, _), encoding in zip(part, tokenizer.encode_batch([text for _, text in part]), strict=True):
            yield path, np.array(encoding.ids, dtype=np.uint16)
