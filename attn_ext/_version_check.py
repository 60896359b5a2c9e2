"""Says in one sentence why the extension cannot be loaded, before the loader says it in mangled symbols."""

import json
import os
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import torch

# This very Python's: the environment need not be activated.
_PIP_INSTALL = f"{shlex.quote(sys.executable)} -m pip install"


def check_build() -> None:
    """Raises ImportError where attn_ext is not built, or is built against another minor version of torch."""
    try:
        from ._build_info import torch_version as built
    except ImportError:
        folder = Path(__file__).resolve().parent
        raise ImportError(
            f"{folder} is the source of attn_ext, not built: run `{_PIP_INSTALL} "
            f"--no-build-isolation -e {folder.parent}`, or start Python elsewhere to use an installed one."
        ) from None
    if _minor(built) != _minor(torch.__version__):
        raise ImportError(
            f"attn_ext was built against torch {built} and cannot be loaded under torch {torch.__version__}: "
            f"run `{_mend(built)}`."
        )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _mend(built: str) -> str:
    """The command that puts it right: build again where the source is known, else bring back that torch."""
    origin = _origin()
    source = unquote(urlparse(origin.get("url", "")).path)
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        place = f"'attn_ext @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}'"
    elif "dir_info" in origin and os.path.exists(os.path.join(source, "setup.py")):
        if origin["dir_info"].get("editable"):
            return f"{_PIP_INSTALL} --no-deps --no-build-isolation -e {source}"
        place = source
    else:
        return f"{_PIP_INSTALL} 'torch=={'.'.join(_minor(built))}.*'"
    return f"{_PIP_INSTALL} --no-deps --force-reinstall --no-cache-dir {place}"


def _origin() -> dict[str, Any]:
    """What pip noted about where the package came from (PEP 610)."""
    try:
        text = metadata.distribution("attn_ext").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    return dict(json.loads(text)) if text else {}
