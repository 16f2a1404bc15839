"""The documentation: the site builds without a warning, has the reference, and pages name what exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import BaseModel

from deploy.openai_api.errors import ANSWERS
from tests.packages import REPOSITORY
from triforce_core.config import Settings

DOCS = REPOSITORY / "docs"
SOURCES = [path for folder in ("triforce_core", "actors", "deploy") for path in (REPOSITORY / folder).rglob("*.py")]
PAGES = ("index", "quickstart", "how-it-works", "models", "operations", "tour")


# -- the site ----------------------------------------------------------------------------------------------------------


def build(repository: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # With --quiet, --strict would count no warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    built = build(REPOSITORY, site)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return site


class Loads(HTMLParser):
    """What a page loads by itself: scripts, styles, pictures and fonts; links that a reader may follow do not count."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert "mermaid" not in (given.get("class") or "").split(), "the theme loads mermaid from elsewhere"
        if tag in ("script", "link", "img", "iframe", "source"):
            self.found += [address for name in ("src", "href") if (address := given.get(name))]


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    loaded = {address for page in pages for address in Loads(page).found}
    assert len(pages) > 40
    assert any(address.endswith(".css") for address in loaded)
    assert not [address for address in loaded if re.match(r"(\w+:)?//", address)]


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("reference/settings", "kv_pool_tokens"),
        ("reference/cli", "triforce bench sweep"),
        ("reference/http", "POST /v1/chat/completions"),
        ("reference/http", "truncate_prompt_tokens"),
        ("reference/grpc", "GenerateStream"),
        ("reference/sdk", "resume_token_ids"),
        ("metrics", "triforce_kv_cache_kept_tokens"),
    ],
)
def test_the_site_has_the_reference(site: Path, page: str, name: str) -> None:
    """None of these names is in the page's source."""
    assert name not in (DOCS / f"{page}.md").read_text()
    assert name in (site / page / "index.html").read_text()


def test_the_http_page_lists_every_error() -> None:
    listed = re.findall(r"^\| (\d+) \| `(\w+)` \|", (DOCS / "reference/http.md").read_text(), re.MULTILINE)
    assert {(str(answer.status), answer.code) for answer in ANSWERS.values()} <= set(listed)


def test_the_site_names_files_that_it_does_not_have(site: Path) -> None:
    page = (site / "tour" / "index.html").read_text()
    assert "<code>triforce_core/speculation/decoder.py</code>" in page
    assert 'href="../triforce_core' not in page


def replace(page: str, old: str, new: str) -> Callable[[Path], None]:
    def change(docs: Path) -> None:
        text = (docs / page).read_text()
        assert old in text
        (docs / page).write_text(text.replace(old, new))

    return change


@pytest.mark.ci
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace("index.md", "(models.md)", "(nothing.md)"), "'nothing.md', but the target is not found"),
        (replace("index.md", "#who-may-reach-what", "#nothing"), "does not contain an anchor '#nothing'"),
        (
            replace("tour.md", "(../triforce_core/speculation/decoder.py)", "(../nothing.py)"),
            "../nothing.py, which does not exist",
        ),
        (replace("quickstart.md", "sdk_client.py", "nothing.py"), "nothing.py' could not be found"),
        (lambda docs: (docs / "lost.md").write_text("# Lost\n"), 'not included in the "nav" configuration'),
    ],
)
def test_a_mistake_fails_the_build(tmp_path: Path, change: Callable[[Path], None], said: str) -> None:
    for path in REPOSITORY.iterdir():  # links that leave docs/ find their files
        if path.name not in ("docs", "site", "build") and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(DOCS, tmp_path / "docs")
    change(tmp_path / "docs")
    built = build(tmp_path, tmp_path / "built")
    assert built.returncode != 0
    assert said in built.stderr


# -- names -------------------------------------------------------------------------------------------------------------


def words_of(page: str) -> list[str]:
    """The words that the page has in backticks."""
    text = (DOCS / f"{page}.md").read_text()
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    paths = [
        word for word in words_of(page) if re.fullmatch(r"(tests|scripts|docs|protos|triforce_core)/[\w./-]+", word)
    ]
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_the_tour_names_what_its_files_have() -> None:
    text = (DOCS / "tour.md").read_text()
    links = re.findall(r"\]\(\.\./([\w./]+)\)", text)
    assert len(links) > 30
    code = "\n".join((REPOSITORY / path).read_text() for path in links)
    names = [word for word in words_of("tour") if word.isidentifier()]
    assert len(names) >= 8
    assert [name for name in names if not re.search(rf"\b(class|def|message) {name}\b", code)] == []


def setting_names(section: type[BaseModel], path: str = "") -> set[str]:
    names = set[str]()
    for name, field in section.model_fields.items():
        names.add(path + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names |= setting_names(field.annotation, f"{path}{name}.")
    return names


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_exist(page: str) -> None:
    sections = "|".join(name for name in Settings.model_fields)
    named = {word for word in words_of(page) if re.fullmatch(rf"({sections})\.[\w.]+", word)}
    assert named <= setting_names(Settings)


def test_log_lines_that_operators_look_for_exist() -> None:
    looked_for = re.findall(r"\| log `([^`]+)`", (DOCS / "operations.md").read_text())
    assert len(looked_for) >= 5
    logged = [line for path in SOURCES for line in path.read_text().splitlines() if re.search(r"\blog\.\w+\(", line)]
    assert [text for text in looked_for if not any(text in line for line in logged)] == []
