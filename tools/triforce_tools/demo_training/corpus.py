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

from triforce_core.demo import weights_dir
from triforce_tools.bench.prompts import HELD_OUT

Tokens = npt.NDArray[np.unsignedinteger]  # 16 bits, if they suffice for the vocabulary
EOS = 0

COPIES = {"python": 4}  # its files are the prompts of benchmarks: its held-out ones should look familiar
HELD_OUT_PERCENT = 2
_SUFFIXES = {".py", ".pyi", ".md", ".rst"}
_SKIPPED_FOLDERS = {"test", "tests", "testing", "_vendor", "site-packages", "dist-packages", ".."}
_MAX_FILE_BYTES = 600_000
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
class Corpus:
    """The tokenised corpus: the sorted files of each package, each under a header line, with `EOS` between packages."""

    tokens: Tokens  # [tokens], memory-mapped
    packages: tuple[dict[str, str], ...]  # name, version, licence
    digest: str  # sha256 of the tokens


def demo_tokenizer() -> Tokenizer:
    """The tokenizer of the installed demo pair; every pair is trained with it."""
    return Tokenizer.from_file(str(weights_dir("target") / "tokenizer.json"))


def permissive_licence(dist: metadata.Distribution) -> str | None:
    """A package's licence as its metadata states it, if that names MIT, BSD, Apache or PSF and no reciprocal licence;
    else None.
    """
    meta = dist.metadata
    expression = "".join(meta.get_all("License-Expression") or [])
    classifiers = [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    field = "".join(meta.get_all("License") or []).strip().splitlines()
    words = expression or "; ".join(c for c in classifiers if c != "OSI Approved") or (field[0] if field else "")
    return words if _PERMISSIVE.search(words) and not _RECIPROCAL.search(words) else None


def find_packages() -> list[Package]:
    """The standard library and every permissively licensed installed package, sorted by name."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(stdlib) for path in stdlib.rglob("*"))
    packages = [Package("python", sysconfig.get_python_version(), "PSF-2.0", stdlib, _kept(files))]
    for dist in metadata.distributions():
        licence, root, kept = permissive_licence(dist), Path(str(dist.locate_file(""))), _kept(dist.files or ())
        if licence is not None and kept:
            packages.append(Package(dist.metadata["Name"], dist.version, licence, root, kept))
    return sorted(packages, key=lambda package: package.name.lower())


def _kept(paths: Iterable[PurePath]) -> tuple[str, ...]:
    """The paths of source and documentation, without tests and copies of other projects."""
    kept = (p for p in paths if p.suffix in _SUFFIXES and not _SKIPPED_FOLDERS & set(p.parts))
    return tuple(sorted(p.as_posix() for p in kept if not p.parts[0].endswith(".dist-info")))


def is_held_out(package: str, path: str) -> bool:
    """Whether a file is never trained on: a prompt of the benchmarks, or chosen by a fixed hash of its name."""
    # Python 3.12 moved the code of datetime.py into _pydatetime.py.
    if package == "python" and {path, path.removeprefix("_py")} & {*HELD_OUT}:
        return True
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def build_corpus(folder: Path, packages: Sequence[Package] | None = None) -> Corpus:
    """The corpus in `folder`. If there is none yet, it is made from `packages`, by default `find_packages`."""
    index_file = folder / "corpus.json"
    if not index_file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        packages = find_packages() if packages is None else packages
        about = {
            "digest": _tokenise(packages, folder / "train.bin"),
            "packages": [{"name": p.name, "version": p.version, "licence": p.licence} for p in packages],
        }
        partial = index_file.with_suffix(".partial")
        partial.write_text(json.dumps(about, indent=1), encoding="utf-8")
        partial.replace(index_file)  # last: its presence shows that the array is complete
    index = json.loads(index_file.read_text(encoding="utf-8"))
    tokens = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
    return Corpus(tokens, tuple(index["packages"]), index["digest"])


def _tokenise(packages: Sequence[Package], path: Path) -> str:
    """Write the tokens of the packages into a file; returns their digest."""
    tokenizer, digest = demo_tokenizer(), hashlib.sha256()
    with path.open("wb") as file:
        for package, texts in itertools.groupby(_training_texts(packages), key=lambda item: item[0]):
            ids = itertools.chain.from_iterable(tokenizer.encode(text).ids for _, text in texts)
            written = np.fromiter(itertools.chain(ids, [EOS]), np.uint16).tobytes() * COPIES.get(package, 1)
            file.write(written)
            digest.update(written)
    return digest.hexdigest()


def _training_texts(packages: Sequence[Package]) -> Iterator[tuple[str, str]]:
    """(package, text under a header line with its path) of each file that is trained on, no text twice."""
    files = [(package, path, is_held_out(package.name, path)) for package in packages for path in package.files]
    seen: set[str] = set()
    for package, path, held_out in sorted(files, key=lambda file: not file[2]):  # so no copy of a held-out text passes
        source = package.root / path
        if not source.is_file() or source.stat().st_size > _MAX_FILE_BYTES:
            continue
        text = source.read_bytes().decode("utf-8", errors="ignore")
        digest = hashlib.sha256(text.encode()).hexdigest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            if not held_out:
                yield package.name, f"# {path}\n{text}\n"
