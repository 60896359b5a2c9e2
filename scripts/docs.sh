#!/usr/bin/env bash
# Executes the tutorial and builds the documentation as a site into build/site; a broken link or anchor, an API
# name that is not there, or a cell of the tutorial that fails stops it. What is written with Markdown can be
# looked at while it is being written: .venv/bin/mkdocs serve
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_attn_ext docs
cd "$root"
"$venv/bin/python" scripts/site/notebook.py build/tutorial.ipynb
export NO_MKDOCS_2_WARNING=1 # of Material about MkDocs 2; the versions are fixed in pyproject.toml
"$venv/bin/mkdocs" build --strict # --quiet would hide the warnings from --strict too
if grep -rlE '<(script|img|iframe)[^>]* src="?(https?:)?//|<link[^>]* href="?(https?:)?//' --include='*.html' build/site; then
  stop "a page of the site asks the network for what it shows."
fi
if grep -rlE 'class="arithmatex"|:(math|func|class|meth):`' --include='*.html' build/site; then
  stop "a page of the site shows the source of a formula or of a link."
fi
echo "The site is build/site/index.html"
