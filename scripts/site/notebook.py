"""Executes the tutorial, and turns an executed notebook into a page.

python scripts/site/notebook.py build/tutorial.ipynb   # executes docs/tutorial.ipynb into it
python scripts/site/notebook.py docs/tutorial.ipynb    # the same in place, to commit its outputs
"""

import base64
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "docs" / "tutorial.ipynb"
SECONDS = 120


def execute(target: Path) -> None:
    """Run every cell in order in a kernel of this very Python, and write the notebook with its outputs."""
    from nbclient import NotebookClient
    from tqdm import tqdm

    notebook = nbformat.read(SOURCE, as_version=4)
    with tqdm(total=len(notebook.cells), unit="cell", disable=None) as bar:
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
            on_cell_complete=lambda **_: bar.update(),
            resources={"metadata": {"path": str(target.parent)}},
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        client.execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    nbformat.write(notebook, target)


def as_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """The notebook in Markdown, and its pictures by their paths."""
    notebook = nbformat.read(path, as_version=4)
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            parts.append(_shown(output, pictures))
    return "\n\n".join(parts) + "\n", pictures


def _shown(output: nbformat.NotebookNode, pictures: dict[str, bytes]) -> str:
    if output.output_type == "stream":
        return _text(output.text)
    if output.output_type == "error":
        raise ValueError(f"a cell of the notebook failed: {output.ename}: {output.evalue}")
    if "image/png" in output.data:
        name = f"pictures/tutorial-{len(pictures) + 1}.png"
        pictures[name] = base64.b64decode(output.data["image/png"])
        return f"![]({name})"
    return _text(output.data["text/plain"])


def _text(text: str) -> str:
    return f"``` {{.text .output .no-copy}}\n{text.rstrip()}\n```"


if __name__ == "__main__":
    execute(Path(sys.argv[1]).resolve())
