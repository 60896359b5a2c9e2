"""Pictures of attention, by matplotlib: axes or nothing go in, axes or a figure come out.

matplotlib is imported when something is drawn: ``pip install 'attn_ext[plot]'``. No function opens a window
or touches the state of ``matplotlib.pyplot``.
"""

from ._heads import grid, heads, heatmap
from ._lines import entropy, key_mass
from ._recorded import plot_recording
from ._style import check_picture, save

__all__ = ["check_picture", "entropy", "grid", "heads", "heatmap", "key_mass", "plot_recording", "save"]
