"""Sphinx configuration of the documentation site.

    sphinx-build -W --keep-going -c jobs/site . .cache/site

The sources are the pages of the repository as they are on GitHub, and docstrings (api.rst). Links to folders lead to
their READMEs. Links to other files become text, since a site has only pages.
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import rlfuse  # noqa: E402

project, author, release = "rlfuse", "the rlfuse authors", rlfuse.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "jobs/site/index"
include_patterns = ["*.md", "conf/*.md", "jobs/**", "notebooks/*.md", "rlfuse/**", "tests/**"]
exclude_patterns = ["**/.*", "rlfuse/conf", "rlfuse/tasks", "**/runs", "tests/unit/recorded_runs"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 4
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
smartquotes = False
html_theme = "furo"
html_extra_path = ["index.html"]  # leads to the first page
html_title = f"rlfuse {release}"

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def links_to_pages(app, name, source):
    """Rewrite links of a page to folders and to files that are not pages."""
    folder = Path(app.srcdir, name).parent

    def rewritten(link):
        target = folder / link[2]
        if target.is_dir() and (target / "README.md").is_file():
            return f"[{link[1]}]({link[2].rstrip('/')}/README.md{link[3] or ''})"
        page = os.path.relpath(target.resolve(), app.srcdir).rpartition(".")[0]
        is_page = target.suffix in source_suffix and page in app.env.found_docs
        return link[0] if is_page or not target.exists() else link[1]

    source[0] = LINK.sub(rewritten, source[0])


def setup(app):
    """Register the hook."""
    app.connect("source-read", links_to_pages)
