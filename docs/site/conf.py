"""How Sphinx makes the site; build.py calls it. Nothing here or in what it makes asks the network for anything."""

import sys
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

project = "ddlsim"
project_copyright = "the authors of ddlsim, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "docstrings", "mathml"]
root_doc = "index"
default_role = "code"
highlight_language = "text"
language = "en"
smartquotes = False  # a quoted value is to be copied

myst_heading_anchors = 6  # as forges make them
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"
nb_execution_mode = "cache"
nb_execution_timeout = 1800  # s for a cell; a busy machine may take long
nb_execution_raise_on_error = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # the usual ones come from the network

autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "start, updates, label"}  # what strategies are to the event loop
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the tables of arguments say more than annotations with their rules
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "ddlsim"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # a summary is fetched, which a page opened from a file may not do


def setup(app: Sphinx) -> None:
    """Tables of measurements are shown as they are."""
    app.add_lexer("csv", TextLexer)
