"""Chromium without a window: a page as it is after its scripts ran, its pictures, and what it complained of."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DARK = {"dark": 0, "light": 1}
WIDTHS = {"wide": 1280, "narrow": 390}


@dataclass(frozen=True)
class Browser:
    """``program`` is started anew for every question, with a profile in ``folder``."""

    program: str
    folder: Path

    def dom(self, page: Path, width: int = 1280) -> str:
        """The document once its scripts have run; fails where a script or the page's policy complained."""
        done = self._run("--dump-dom", page, width, "light")
        self._require_silence(done.stderr)
        return done.stdout

    def picture(self, page: Path, theme: str, width: int, out: Path) -> Path:
        """A screenshot of the first 1,600 pixels."""
        done = self._run(f"--screenshot={out}", page, width, theme)
        self._require_silence(done.stderr)
        return out

    def _require_silence(self, log: str) -> None:
        complaints = re.findall(r"CONSOLE[^\n]*", log)
        assert not complaints, complaints

    def _run(self, action: str, page: Path, width: int, theme: str) -> subprocess.CompletedProcess[str]:
        command = [
            *(
                self.program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--disable-extensions",
            ),
            *("--enable-logging=stderr", "--log-level=0", f"--user-data-dir={self.folder}", "--no-first-run"),
            *(f"--window-size={width},1600", f"--blink-settings=preferredColorScheme={DARK[theme]}"),
            *("--virtual-time-budget=2000", action, page.as_uri()),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)


def find_browser(folder: Path) -> Browser:
    """The browser of this machine; without one the test is skipped, or fails where ``make test-pages`` runs it."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        message = f"no browser ({', '.join(NAMES)}): apt-get install chromium"
        if os.environ.get("BROWSER_REQUIRED"):
            pytest.fail(message)
        pytest.skip(message)
    return Browser(program, folder)
