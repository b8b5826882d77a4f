"""The site: these pages, the README and the docstrings, by Sphinx. `.ci/docs OUT` builds it; every warning is an error.

The root is the repository, so that links are those of GitHub. docs/README.md is the first page, and its lists are the sidebar.
The pages of a folder stand below its first page, and are called there as in its links.
"""

import importlib.util
import re
import shutil
from pathlib import Path

from sphinx.util import logging

project = "onepass"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "docs/**"]
root_doc = "docs/README"
suppress_warnings = ["myst.header"]  # a page of GitHub's may begin at any level

myst_heading_anchors = 6
highlight_language = "none"  # of blocks that name none: what a command prints
default_role = "py:obj"  # a name in a docstring is a link where it is known
autodoc_mock_imports = [name for name in ("transformers", "kernels") if importlib.util.find_spec(name) is None]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "onepass"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

FOLDERS = {"docs/guide": "docs/ops", "docs/notes/README": "docs/notes"}  # of a first page; else the one of its name
_log = logging.getLogger(__name__)


def add_sidebar(app, docname, source):
    """Make a table of contents of each list of the first page, and of what a folder's first page has of the folder."""
    text, root = source[0], Path(app.srcdir).resolve()
    folder = FOLDERS.get(docname, docname)
    if docname == root_doc:
        parts = [part.partition("\n") for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    elif (root / folder).is_dir():
        parts = [("", "", text)]
    else:
        return
    for caption, _, body in parts:
        pages = {}
        for title, link in re.findall(r"\[([^]]+)\]\(([^)#:]+\.md)\)", body):
            page = Path(root, docname).parent.joinpath(link).resolve().relative_to(root).with_suffix("").as_posix()
            if docname == root_doc or page.startswith(f"{folder}/"):
                pages.setdefault(page, title.replace("`", ""))
        lines = "\n".join(f"{title} </{page}>" for page, title in pages.items())
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n{f':caption: {caption}' if caption else ''}\n\n{lines}\n```\n"


def prepare_docstring(app, what, name, found, options, lines):
    """Mark what is indented after a paragraph as code, as Markdown has it. Warn where there is no docstring."""
    if what in ("class", "function") and not any(line.strip() for line in lines):
        _log.warning("%s has no docstring", name)
    for at in range(len(lines) - 1, 1, -1):
        before, gap, line = lines[at - 2 : at + 1]
        if line.startswith("    ") and not gap and before and not before.startswith(" "):
            lines[at:at] = ["::", ""]


def copy_images(app, error):
    """Copy what pages show by HTML of their own, such as a picture in light and dark, of which Sphinx knows nothing."""
    shutil.copytree(Path(app.srcdir, "docs", "images"), Path(app.outdir, "docs", "images"), dirs_exist_ok=True)


def setup(app):
    app.connect("build-finished", copy_images)
    app.connect("source-read", add_sidebar)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)  # before napoleon
