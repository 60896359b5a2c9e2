"""`attn_ext.plot`: what is drawn, from 5 to 5,000 words, and what is written beside it."""

import itertools
import unicodedata
import warnings

import pytest
import torch

import attn_ext
from attn_ext import plot
from attn_ext._text import characters, columns, cut
from attn_ext.plot import _heads, _recorded, _style

pytest.importorskip("matplotlib")

FAMILY = "👩‍👩‍👧‍👦"
ACCENTED = "e\u0301"
FLAG = "🇯🇵"


@pytest.fixture(autouse=True)
def _missing_fonts_do_not_matter():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no installed font")
        yield


def rendered(figure):
    """A byte a channel, (height, width, 4)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        canvas.draw()
    return torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8).unflatten(
        0, (*canvas.get_width_height()[::-1], 4)
    )


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


class TestText:
    @pytest.mark.parametrize("one", [FAMILY, ACCENTED, FLAG, "👍🏽", "❤️", "한", "각", "नि", "注"])
    def test_what_is_read_as_one_character_is_one(self, one):
        assert characters(one * 2 + "x") == [one, one, "x"]

    @pytest.mark.parametrize(
        ("text", "width"), [("abc", 3), ("注意", 4), (ACCENTED, 1), (FAMILY, 2), (FLAG, 2), ("", 0), ("❤️", 2)]
    )
    def test_columns_of_a_terminal(self, text, width):
        assert columns(text) == width

    @pytest.mark.parametrize(
        "text", ["attention" * 3, "注意機構は長い" * 3, ACCENTED * 9, FAMILY * 5, FLAG * 5]
    )
    @pytest.mark.parametrize("width", [1, 2, 5, 8])
    def test_cut_by_width_and_never_inside_of_a_character(self, text, width):
        short = cut(text, width)
        assert columns(short) <= width
        assert short.endswith("…")
        assert characters(text)[: len(characters(short)) - 1] == characters(short)[:-1]
        following = "".join(characters(text)[: len(characters(short))]) + "…"
        assert columns(following) > width

    def test_what_fits_is_left_as_it_is(self):
        assert cut("注意", 4) == "注意"


class TestLabels:
    @pytest.mark.parametrize("word", ["x" * 50, "注意" * 30, ACCENTED * 50, FAMILY * 30, "i" * 200])
    def test_are_cut_by_the_width_that_they_are_drawn_in(self, word):
        short = _style.shortened(word)
        assert short.endswith("…")
        assert _style.text_inches(short) <= _style.LABEL_WIDTH
        assert _style.LABEL_WIDTH - _style.text_inches(short) < 0.35
        assert word.startswith(short[:-1])

    def test_narrow_letters_have_room_for_more_of_them(self):
        assert len(_style.shortened("i" * 99)) > 2 * len(_style.shortened("W" * 99))

    def test_words_label_both_sides(self):
        axes = plot.heatmap(torch.rand(2, 3), ["x", "y", "z"], row_tokens=["a", "b"])
        assert labels(axes.yaxis) == ["a", "b"]
        assert labels(axes.xaxis) == ["x", "y", "z"]

    @pytest.mark.parametrize(
        ("words", "angle"), [("abcd", 0), (["long word"] * 4, 45), (["long word"] * 90, 90)]
    )
    def test_stand_upright_only_where_they_must(self, words, angle):
        axes = plot.heatmap(torch.rand(len(words), len(words)), list(words))
        assert {label.get_rotation() for label in axes.get_xticklabels()} == {angle}

    def test_a_long_text_names_only_as_many_words_as_fit(self):
        words = [f"word{i}" for i in range(400)]
        axes = plot.heatmap(torch.rand(400, 400), words)
        assert 10 < len(labels(axes.xaxis)) <= 40
        assert labels(axes.xaxis)[:2] == ["word0", f"word{400 // len(labels(axes.xaxis))}"]
        axes.figure.canvas.draw()
        assert axes.xaxis.majorTicks[0].tick1line.get_markersize() > 0

    def test_has_no_ticks_where_every_word_is_named(self):
        axes = plot.heatmap(torch.rand(5, 5), list("abcde"))
        assert {tick.tick1line.get_markersize() for tick in axes.xaxis.majorTicks} == {0}

    def test_a_font_that_is_missing_is_named(self, monkeypatch):
        monkeypatch.setattr(_style, "_font_characters", lambda: frozenset(range(0x250)))
        with pytest.warns(UserWarning, match="no installed font has 注 意: .* such as Noto Sans CJK JP"):
            plot.heatmap(torch.rand(2, 2), ["注", "意注"])
        assert _style.missing_glyphs(["plain", "é", f"{FAMILY}!"]) == [FAMILY]

    def test_markup_is_drawn_as_it_is(self):
        words = [r"$x^2$", "\\frac", "_", "<b>"]
        axes = plot.heatmap(torch.rand(4, 4), words, title="$5 & more_")
        rendered(axes.figure)
        assert labels(axes.xaxis) == words

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"tokens": ["a"]}, "tokens has 1 words for weights of 4 keys"),
            ({"row_tokens": list("abcd")}, "row_tokens has 4 words for weights of 3 rows"),
        ],
    )
    def test_words_that_do_not_fit(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            plot.heatmap(torch.rand(3, 4), **arguments)
        with pytest.raises(ValueError, match=message):
            plot.heads(torch.rand(2, 3, 4), **arguments)


class TestHeatmaps:
    @pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 12, 64])
    def test_one_panel_a_head_and_one_color_bar(self, heads):
        figure = plot.heads(torch.rand(heads, 3, 4).softmax(-1), list("wxyz"), row_tokens=list("abc"))
        panels = [axes for axes in figure.axes if axes.images]
        assert len(panels) == heads
        assert len([axes for axes in figure.axes if axes.axison]) == heads + 1
        assert {image.norm.vmin for axes in panels for image in axes.images} == {0.0}
        assert len({image.norm.vmax for axes in panels for image in axes.images}) == 1

    @pytest.mark.parametrize("words", [1, 5, 50, 500])
    @pytest.mark.parametrize("dark", [False, True])
    def test_any_length_dark_and_light(self, words, dark):
        axes = plot.heatmap(torch.eye(words), [f"w{i}" for i in range(words)], dark=dark)
        pixels = rendered(axes.figure).float()
        corner, colors = pixels[0, 0, :3], axes.images[0].cmap(1.0)
        assert (corner.mean() < 60) == dark
        strong = torch.tensor(colors[:3]) * 255
        assert ((pixels[..., :3] - strong).abs().amax(-1) < 3).any()

    def test_5000_words_are_joined_to_their_largest_and_that_is_said(self):
        weights = torch.zeros(5000, 5000)
        weights[1234, 4321] = 0.7
        axes = plot.heatmap(weights, [f"w{i}" for i in range(5000)])
        image = torch.from_numpy(axes.images[0].get_array().data)
        assert image.shape == (1000, 1000)
        assert image[1234 // 5, 4321 // 5] == image.max() == weights.max()
        assert axes.get_xlabel() == "each cell is the largest of 5 by 5 weights"
        assert labels(axes.xaxis)[1] == f"w{5 * int(axes.get_xticks()[1])}"

    def test_into_axes_that_are_given(self):
        from matplotlib.figure import Figure

        left, right = Figure().subplots(1, 2)
        assert plot.heatmap(torch.rand(3, 3), axes=left) is left
        assert plot.key_mass(torch.rand(3), axes=right) is right

    def test_a_grid_of_layers_and_heads(self):
        layers = [torch.rand(3, 4, 4), torch.rand(2, 300, 200)]
        figure = plot.grid(layers, ["first", "second"], title="all")
        assert [len(axes.images) for axes in figure.axes] == [1, 1, 1, 1, 1, 0]
        assert max(axes.images[0].get_array().shape[0] for axes in figure.axes[:5]) <= 64
        assert figure.axes[0].get_ylabel() == "first"

    def test_rows_that_see_nothing_and_no_rows(self):
        rendered(plot.heatmap(torch.zeros(3, 3)).figure)
        rendered(plot.heatmap(torch.zeros(0, 3)).figure)

    @pytest.mark.parametrize(
        ("draw", "weights", "message"),
        [
            (plot.heatmap, torch.rand(2, 3, 3), r"one head, \(Lq, Lk\), got \(2, 3, 3\)"),
            (plot.heads, torch.rand(3, 3), r"a layer's heads, \(H, Lq, Lk\), got \(3, 3\)"),
            (plot.grid, [torch.rand(3, 3)], r"\(H, Lq, Lk\) a layer, got \(3, 3\)"),
            (plot.grid, [], "at least one layer, got none"),
            (plot.key_mass, torch.rand(2, 2, 2), r"\(Lk,\) or \(H, Lk\), got \(2, 2, 2\)"),
            (plot.entropy, [torch.rand(3)], r"\(H, Lq\) a layer, got \(3,\)"),
            (plot.entropy, [], "at least one layer, got none"),
        ],
    )
    def test_other_dims_are_refused(self, draw, weights, message):
        with pytest.raises(ValueError, match=message):
            draw(weights)

    def test_colors_darken_evenly(self):
        lightness = [_lightness(color) for color in _style.LIGHT_COLORS]
        steps = [before - after for before, after in itertools.pairwise(lightness)]
        assert max(steps) - min(steps) < 1.0


class TestBarsAndLines:
    def test_key_mass_has_a_bar_a_word_of_the_mean_height(self):
        mass = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        axes = plot.key_mass(mass, ["a", "b"])
        assert [bar.get_height() for bar in axes.patches] == [2.0, 1.0]
        assert labels(axes.xaxis) == ["a", "b"]
        assert len(axes.collections) == 2

    def test_5000_words_are_summed_and_that_is_said(self):
        axes = plot.key_mass(torch.ones(5000))
        assert [bar.get_height() for bar in axes.patches] == [5.0] * 1000
        assert axes.get_xlabel() == "each bar is the sum of 5 words"

    def test_key_mass_wants_a_word_a_key(self):
        with pytest.raises(ValueError, match="tokens has 1 words for a key mass of 2 keys"):
            plot.key_mass(torch.ones(2), ["a"])

    def test_entropy_has_a_dot_a_head_and_a_line_of_means(self):
        axes = plot.entropy([torch.full((4, 7), 1.5), torch.full((4, 7), 0.5)], ["low", "high"])
        assert list(axes.lines[0].get_ydata()) == [1.5, 0.5]
        assert [len(dots.get_offsets()) for dots in axes.collections] == [4, 4]
        assert axes.get_ylim()[0] == 0


class TestFiles:
    @pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
    def test_are_written(self, tmp_path, kind):
        figure = plot.heads(torch.rand(2, 3, 3))
        plot.save(figure, tmp_path / f"a.{kind}")
        assert (tmp_path / f"a.{kind}").stat().st_size > 1000

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            ("a.xyz", ValueError, "'.xyz' is not one of"),
            ("a", ValueError, "it has no extension"),
            ("no/a.png", FileNotFoundError, "there is no folder"),
        ],
    )
    def test_what_is_no_picture(self, tmp_path, name, error, message):
        with pytest.raises(error, match=message):
            plot.save(plot.heads(torch.rand(2, 3, 3)), tmp_path / name)
        assert list(tmp_path.iterdir()) == []

    def test_one_that_fails_leaves_nothing(self, tmp_path, monkeypatch):
        figure = plot.heads(torch.rand(2, 3, 3))

        def full(file, **_):
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(figure, "savefig", full)
        with pytest.raises(OSError, match=r"cannot write .*a.png: No space left on device; nothing is left"):
            plot.save(figure, tmp_path / "a.png")
        assert list(tmp_path.iterdir()) == []


class TestOfARecording:
    @pytest.fixture
    def seen(self):
        layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2)
        with attn_ext.record(model, what=("weights", "key_mass", "entropy", "lse")) as seen:
            model(torch.randn(2, 5, 16))
        return seen

    def test_heads_of_a_layer(self, seen):
        figure = seen.plot(1, list("abcde"), batch=1)
        panels = [axes for axes in figure.axes if axes.images]
        assert torch.equal(torch.tensor(panels[3].images[0].get_array().data), seen[1][0][1, 3])
        assert figure.get_suptitle() == "layers.1.self_attn"

    def test_all_layers(self, seen):
        figure = seen.plot()
        assert len(figure.axes) == 8
        assert [axes.get_ylabel() for axes in figure.axes[::4]] == ["0", "1"]

    def test_key_mass_and_entropy(self, seen):
        bars = seen.plot("layers.0.self_attn", list("abcde"), what="key_mass").axes[0].patches
        assert [bar.get_height() for bar in bars] == pytest.approx(seen[0, "key_mass"][0][0].mean(0).tolist())
        line = seen.plot(what="entropy").axes[0].lines[0]
        assert list(line.get_ydata()) == pytest.approx(
            [seen[i, "entropy"][0][0].mean().item() for i in (0, 1)]
        )

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (
                {"layer": 0, "tokens": list("abc")},
                ValueError,
                "3 words, but layers.0.self_attn looks at 5 keys",
            ),
            ({"layer": 0, "batch": 2}, IndexError, "batch=2: layers.0.self_attn has 2"),
            ({"layer": 0, "call": 1}, IndexError, "call=1: layers.0.self_attn has 1"),
            ({"layer": "layers.3"}, KeyError, "'layers.3' was not recorded; close to it: 'layers"),
            ({"what": "lse"}, ValueError, "there is no picture of lse"),
            ({"what": "key_mass"}, ValueError, "key mass is drawn of one layer"),
        ],
    )
    def test_what_cannot_be_drawn(self, seen, arguments, error, message):
        with pytest.raises(error, match=message):
            seen.plot(**arguments)

    def test_short_names(self):
        names = ["model.layers.0.attn", "model.layers.11.attn"]
        assert _recorded.short_names(names) == ["0", "11"]
        assert _recorded.short_names(["one"]) == ["one"]
        assert _recorded.short_names(["a", "a.b"]) == ["a", "a.b"]


def test_importing_the_package_imports_no_matplotlib():
    import subprocess
    import sys

    late = ("matplotlib", "pandas", "attn_ext.plot", "attn_ext.recording")
    code = (
        f"import attn_ext, sys; print([m for m in {late} if m in sys.modules], attn_ext.plot.save.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] save\n"
    assert {"plot", "record", "recording"} < set(dir(attn_ext))
    with pytest.raises(AttributeError, match="module 'attn_ext' has no attribute 'plots'"):
        attn_ext.plots  # noqa: B018


def test_words_may_be_in_any_script():
    assert unicodedata.normalize("NFC", ACCENTED) == "é"
    axes = plot.heatmap(torch.rand(4, 4), ["注意機構", FAMILY, ACCENTED * 20, "कुत्ता"])
    rendered(axes.figure)
    assert labels(axes.xaxis)[:2] == ["注意機構", FAMILY]
    assert _heads.CELL_INCHES > 0


def _lightness(color: str) -> float:
    """CIELAB lightness of an sRGB color."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance
