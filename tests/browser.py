"""A real browser for the tests of the page: Debian's Chromium, driven by Playwright, and axe-core, which looks for what
keeps people with disabilities out.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PACKAGE, AXE = "axe-core@4.14.1", "axe-4.14.1.min.js"
SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"


@contextmanager
def chromium() -> Iterator[Browser]:
    """The Chromium of this machine. Skips the test where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("the page is tested in Chromium, which is not here: apt-get install chromium")
    with sync_playwright() as playwright:
        # Chromium's own sandbox needs rights that containers lack; it opens nothing here but our own page.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def axe_source() -> str:
    """axe-core, fetched by npm at the first use and kept in the environment. Skips the test where there is no npm."""
    found = Path(sys.prefix) / AXE
    if not found.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("axe-core is fetched by npm, which is not here")
        with tempfile.TemporaryDirectory(dir=found.parent) as folder:
            subprocess.run([npm, "pack", "--silent", "--ignore-scripts", PACKAGE], cwd=folder, check=True, timeout=240)
            [archive] = Path(folder).glob("*.tgz")
            with tarfile.open(archive) as packed:
                packed.extract("package/axe.min.js", folder, filter="data")
            script = Path(folder, "package", "axe.min.js")
            assert hashlib.sha256(script.read_bytes()).hexdigest() == SHA256, "not the axe-core that was pinned"
            script.rename(found)
    return found.read_text(encoding="utf-8")


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it stands, best practices included."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe_source())  # over the debugger, because the page's policy forbids foreign scripts
    found: list[dict[str, Any]] = page.evaluate("axe.run().then(({violations}) => violations)")
    return [f"{each['id']}: {each['help']}: {node['html']}" for each in found for node in each["nodes"]]
