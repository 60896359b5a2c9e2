"""MkDocs hooks: formulas as MathML, the notebook as a page, and the documents that lie in the root."""

import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook import as_page

ROOT = Path(__file__).resolve().parents[2]
#: Documents of the root and the pages that they are.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
#: What Material's offline plugin would load where the site is opened from files.
SHIM = "https://unpkg.com/iframe-worker/shim"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^]\n]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not lie in docs/ as a page."""
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, PAGES[name], content=from_root(text)))
    notebooks = [
        ROOT / "docs" / "tutorial.ipynb",
        ROOT / "build" / "tutorial.ipynb",
    ]  # as committed, as executed
    latest = max(filter(Path.exists, notebooks), key=lambda path: path.stat().st_mtime)
    markdown, pictures = as_page(latest)
    markdown += "\nThis page as a notebook: [tutorial.ipynb](tutorial.ipynb).\n"
    files.append(File.generated(config, "tutorial.md", content=markdown))
    for name, picture in pictures.items():
        files.append(File.generated(config, name, content=picture))
    return files


def from_root(text: str) -> str:
    """A document of the root with its links as they are seen from docs/."""
    return LINK.sub(
        lambda found: f"[{found[1]}]({seen_from_docs(found[2])}{found[3] or ''})",
        text,
    )


def seen_from_docs(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to documents go to their pages, by their titles; what is no page is named, not linked."""
    up = "../" * page.file.src_uri.count("/")

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if target.startswith(up + "../"):
            outside = target.removeprefix(up + "../")
            if outside not in PAGES:
                return text
            target = up + PAGES[outside]
        elif target.endswith("tutorial.ipynb") and page.file.src_uri != "tutorial.md":
            target = target.removesuffix("ipynb") + "md"
        document = files.get_file_from_path(
            posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), target))
        )
        if text.endswith(".md") and document and document.page:
            text = document.page.title
        return f"[{text}]({target}{anchor})"

    return LINK.sub(link, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, which browsers draw by themselves."""
    return FORMULA.sub(lambda found: as_mathml(found[3], found[2] == "["), html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The search without the network."""
    return output.replace(SHIM, "../" * page.url.count("/") + "assets/search-from-files.js")


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """The page for what is not found, which only a server shows."""
    return output.replace(f'<script src="{SHIM}"></script>', "")


def as_mathml(formula: str, block: bool) -> str:
    for entity, character in ENTITIES.items():
        formula = formula.replace(entity, character)
    mathml = convert(formula, display="block" if block else "inline")
    # The letters of one upright word belong together; a negative space has no name in MathML Core.
    mathml = re.sub(
        r'(?:<mi mathvariant="normal">\w</mi>){2,}',
        lambda found: f"<mi>{re.sub('<.*?>', '', found[0])}</mi>",
        mathml,
    )
    return mathml.replace('width="negativethinmathspace"', 'width="-0.167em"')
