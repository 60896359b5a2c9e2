"""Pictures of a recording: the same as by hand, with its names and words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..recording._views import view_of, words_of
from ._heads import grid, heads
from ._lines import entropy, key_mass

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..recording import Recording


def plot_recording(
    seen: "Recording",
    layer: str | int | None = None,
    tokens: Sequence[str] | None = None,
    *,
    what: str | None = None,
    row_tokens: Sequence[str] | None = None,
    call: int | None = None,
    batch: int = 0,
    title: str | None = None,
    dark: bool = False,
) -> "Figure":
    """See :meth:`attn_ext.recording.Recording.plot`."""
    what = what or next(
        (kind for kind in ("weights", "key_mass", "entropy") if kind in seen.what), seen.what[0]
    )
    paths = list(seen.layers) if layer is None else [seen.path_of(layer)]
    views = [view_of(seen, path, what, call, batch) for path in paths]
    options: dict[str, Any] = {"title": title if title is not None else ", ".join(paths[:1]), "dark": dark}
    if what == "weights":
        if layer is None and len(paths) > 1:
            options["title"] = title or ""
            return grid([view.tensor for view in views], short_names(paths), **options)
        rows, keys = words_of(views[0], tokens, row_tokens)
        names = [f"head {head}" for head in views[0].heads]
        return heads(views[0].tensor, keys, row_tokens=rows, names=names, **options)
    if what == "key_mass":
        if len(paths) > 1:
            raise ValueError(f"key mass is drawn of one layer: choose one of {', '.join(paths)}")
        figure: Figure = key_mass(views[0].tensor, words_of(views[0], tokens, None)[1], **options).figure  # type: ignore[assignment]
        return figure
    if what == "entropy":
        options["title"] = title or ""
        axes = entropy([view.tensor for view in views], short_names(paths), **options)
        return axes.figure  # type: ignore[return-value]
    raise ValueError(f"there is no picture of {what}: record weights, key_mass or entropy")


def short_names(paths: Sequence[str]) -> list[str]:
    """Paths without what they all begin and end with."""
    parts = [path.split(".") for path in paths]
    if len(parts) < 2:
        return list(paths)
    shortest = min(map(len, parts))
    before = 0
    while before < shortest - 1 and len({part[before] for part in parts}) == 1:
        before += 1
    after = 0
    while after < shortest - 1 - before and len({part[-1 - after] for part in parts}) == 1:
        after += 1
    return [".".join(part[before : len(part) - after]) for part in parts]
