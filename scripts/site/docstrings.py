"""A griffe extension: the docstrings' Sphinx roles as Markdown, so that the site shows formulas and links."""

import re
import textwrap

from griffe import Extension, Object

#: Sections of our own, which griffe would make boxes of.
SECTION = re.compile(r"^(Shape|Dtypes|Source):\n((?: +\S.*\n?|\n(?= ))+)", re.MULTILINE)
TORCH = "https://docs.pytorch.org/docs/stable/generated/{}.html"
MATH_BLOCK = re.compile(r"^( *)\.\. math::\n((?:\1 +\S.*\n?|\n(?=\1 +\S))+)", re.MULTILINE)
MATH = re.compile(r":math:`([^`]+)`", re.DOTALL)
ROLE = re.compile(r":(?:func|class|meth|mod|attr|exc):`(~?)([\w.]+)`")


class SphinxRoles(Extension):
    """Formulas as TeX between dollars, names of this package as cross-references, torch's as links."""

    def on_instance(self, *, obj: Object, **_: object) -> None:
        if obj.docstring and not obj.is_alias:
            obj.docstring.value = as_markdown(obj.docstring.value, obj.path)


def as_markdown(docstring: str, path: str) -> str:
    """The docstring of the object at ``path`` in Markdown; its sections stay what they are."""
    text = re.sub(r"^Example:$", "Examples:", docstring, flags=re.MULTILINE)
    text = SECTION.sub(lambda found: f"**{found[1]}:**\n\n{textwrap.dedent(found[2])}", text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)  # before a literal block
    text = MATH_BLOCK.sub(lambda found: _block(found[1], found[2]), text)
    text = MATH.sub(lambda found: f"${' '.join(found[1].split())}$", text)
    return ROLE.sub(lambda found: _link(found[2], bool(found[1]), path), text)


def _block(indent: str, formula: str) -> str:
    body = textwrap.indent(textwrap.dedent(formula).strip(), indent)
    return f"{indent}$$\n{body}\n{indent}$$\n"


def _link(name: str, short: bool, path: str) -> str:
    shown = f"`{name.rsplit('.', 1)[-1] if short else name}`"
    if name.startswith("torch."):
        return f"[{shown}]({TORCH.format(name)})"
    if not name.startswith("attn_ext."):  # beside the object that says it, or in it
        module, _, last = path.rpartition(".")
        name = f"{path if last[:1].isupper() and name[:1].islower() else module}.{name}"
    return f"[{shown}][{name}]"
