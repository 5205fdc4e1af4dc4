"""The documentation site builds without warnings and has no broken internal links."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """The targets of links and the anchors of an HTML page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = set(), {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links |= {found[name] for name in ("href", "src") if found.get(name)}


def broken_links(folder):
    """Return "page: link" for each internal link that has no file or no anchor."""
    pages = {path.resolve(): Page(path.read_text()) for path in folder.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                found.append(f"{path.relative_to(folder.resolve())}: {link}")
    return found


@pytest.mark.slow
def test_the_site_builds_and_its_internal_links_are_valid(tmp_path):
    site, words = tmp_path / "site", ["-q", "-W", "--keep-going", "-d", tmp_path / "parsed", "-c", "jobs/site"]
    command = [sys.executable, "-m", "sphinx", *words, ".", site]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert not broken_links(site)
    api = (site / "jobs" / "site" / "api.html").read_text()
    for name in ("rlfuse.notebook.train", "rlfuse.rewards.api.items.Item", "rlfuse.fusion.decisions.Snapshot"):
        assert f'id="{name}"' in api
    assert (site / "index.html").read_text().count("jobs/site/index.html") == 1


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="x"></h1><a href="b.html#y"></a><a href="https://e.org/z"></a>')
    (tmp_path / "b.html").write_text('<a href="a.html#x"></a><a href="c.html"></a><a href="#no"></a>')
    assert sorted(broken_links(tmp_path)) == ["a.html: b.html#y", "b.html: #no", "b.html: c.html"]
