"""The page that `seen.save` writes: what is in it, and in a real browser how it looks and how fast it is."""

import base64
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
import zlib

import pytest
import torch
from torch import nn

import attn_ext
from attn_ext.recording import _page
from attn_ext.recording._recording import CallShape, Recording
from attn_ext.recording._store import MemoryStore

pytest.importorskip("numpy")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt install chromium")


def recording_of(*layers, names="encoder.layer.{}.attention"):
    """A recording of weights (H, Lq, Lk), one layer each."""
    store = MemoryStore()
    seen = Recording(store, ("weights",))
    for number, weights in enumerate(layers):
        path = names.format(number)
        store.append("weights", path, weights.unsqueeze(0))
        seen.calls[path] = [CallShape(*weights.shape[1:])]
    return seen


def peaked(layers, heads, length):
    """Causal weights of which some heads look nearby, and some all over."""
    places = torch.arange(length)
    distance = (places[:, None] - places).abs()
    for layer in range(layers):
        scores = torch.randn(heads, length, length) * (1 + layer / 4)
        scores -= torch.rand(heads, 1, 1) ** 3 * distance
        yield scores.masked_fill(places > places[:, None], -torch.inf).softmax(-1)


def parsed(path):
    """The page's description, and each head's largest weights of a row and bytes."""
    text = path.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    heads = {}
    for layer, head, packed in re.findall(r"<!--(\d+)\.(\d+) (\S*)-->", text):
        raw = zlib.decompress(base64.b64decode(packed), -15)
        rows, columns = data["layers"][int(layer)]["rows"], data["layers"][int(layer)]["columns"]
        largest = torch.frombuffer(bytearray(raw[: 4 * rows]), dtype=torch.float32)
        cells = torch.frombuffer(bytearray(raw[4 * rows :]), dtype=torch.uint8).reshape(rows, columns)
        heads[int(layer), int(head)] = (cells / 255.0) ** 2 * largest[:, None]
    return text, data, heads


class TestWhatIsInIt:
    def test_weights_as_precise_as_it_says(self, tmp_path):
        layers = list(peaked(2, 3, 40))
        recording_of(*layers).save(tmp_path / "a.html")
        _, data, heads = parsed(tmp_path / "a.html")
        assert len(heads) == 6
        for (layer, head), shown in heads.items():
            weights = layers[layer][head]
            largest = weights.amax(-1, keepdim=True)
            assert ((shown - weights).abs() <= 0.004 * largest).all()
            small = weights < largest / 100
            assert ((shown - weights).abs() <= 0.0005 * largest)[small].all()
        assert "0.4 % of the largest of its row" in data["precision"]

    def test_nothing_from_a_network(self, tmp_path):
        recording_of(torch.rand(2, 4, 4)).save(tmp_path / "a.html", list("abcd"))
        text, _, _ = parsed(tmp_path / "a.html")
        assert not re.search(r"https?:|\bsrc=|@import|<link|url\(|fetch\(|import\(|XMLHttp|WebSocket", text)

    def test_words_and_title_are_text_whatever_they_hold(self, tmp_path):
        words = ["</script><b>", "--><i>", "@js@", "注意", "\u2028", '"\\']
        seen = recording_of(torch.rand(1, 6, 6), names="</script>{}")
        seen.save(tmp_path / "a.html", words, title="<title> & @data@")
        text, data, _ = parsed(tmp_path / "a.html")
        assert data["texts"] == [words]
        assert "<title>&lt;title&gt; &amp; @data@</title>" in text
        assert "<b>" not in text
        assert text.count("</script>") == 3

    def test_long_texts_are_joined_to_their_largest_and_it_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_page, "MAX_CELLS", 2 * 20 * 20)
        weights = torch.rand(2, 50, 50).softmax(-1)
        recording_of(weights).save(tmp_path / "a.html")
        _, data, heads = parsed(tmp_path / "a.html")
        assert data["layers"][0]["step"] == 3
        assert heads[0, 1].shape == (17, 17)
        assert heads[0, 1][2, 5] == pytest.approx(weights[1, 6:9, 15:18].max().item(), rel=0.01)
        assert "Each cell is the largest of 3 \N{MULTIPLICATION SIGN} 3 weights." in data["precision"]

    def test_a_generation_is_one_matrix(self, tmp_path):
        class Cached(nn.Module):
            def forward(self, query, key):
                return attn_ext.sdpa(
                    query, key, key, is_causal=True, query_offset=key.size(-2) - query.size(-2)
                )

        model, keys = Cached(), torch.randn(1, 2, 7, 4)
        with attn_ext.record(model) as seen:
            model(keys[..., :5, :], keys[..., :5, :])
            for length in (6, 7):
                model(keys[..., length - 1 : length, :], keys[..., :length, :])
        seen.save(tmp_path / "a.html", list("abcdefg"))
        _, data, heads = parsed(tmp_path / "a.html")
        whole = attn_ext.sdpa_with_weights(keys, keys, keys, is_causal=True)[1][0]
        assert (heads[0, 1] - whole[1]).abs().max() < 0.004
        assert data["layers"][0]["same"]

    def test_rows_that_were_chosen_have_their_words(self, tmp_path):
        model = attn_ext.MultiHeadAttention(16, 4)
        with attn_ext.record(model, rows=[1, 4], heads=[2]) as seen:
            model(torch.randn(2, 5, 16))
        seen.save(tmp_path / "a.html", list("abcde"), batch=1)
        _, data, _ = parsed(tmp_path / "a.html")
        assert [data["texts"][i] for i in data["layers"][0]["words"]] == [["b", "e"], list("abcde")]
        assert data["layers"][0]["heads"] == [2]
        assert not data["layers"][0]["same"]

    def test_cross_attention_has_words_on_both_sides(self, tmp_path):
        recording_of(torch.rand(1, 2, 3)).save(tmp_path / "a.html", list("abc"), row_tokens=["x", "y"])
        _, data, _ = parsed(tmp_path / "a.html")
        assert [data["texts"][i] for i in data["layers"][0]["words"]] == [["x", "y"], list("abc")]


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "arguments", "error", "message"),
        [
            (
                "a.html",
                {"tokens": ["a"]},
                ValueError,
                "tokens has 1 words, but encoder.layer.0.attention looks at 4",
            ),
            ("a.html", {"row_tokens": ["a"]}, ValueError, "row_tokens has 1 words, but .* has 3 query rows"),
            ("a.html", {"batch": 1}, IndexError, "batch=1: encoder.layer.0.attention has 1"),
            ("a.html", {"call": 1}, IndexError, "call=1: encoder.layer.0.attention has 1"),
            ("a.png", {}, ValueError, "cannot write .*a.png as a page: expected the extension .html"),
            ("no/a.html", {}, FileNotFoundError, "cannot write .*: No such file or directory"),
        ],
    )
    def test_in_a_sentence_and_nothing_is_written(self, tmp_path, name, arguments, error, message):
        with pytest.raises(error, match=message):
            recording_of(torch.rand(2, 3, 4)).save(tmp_path / name, **arguments)
        assert list(tmp_path.iterdir()) == []

    def test_weights_that_were_not_recorded(self, tmp_path):
        model = attn_ext.MultiHeadAttention(16, 4)
        with attn_ext.record(model, what="lse") as seen:
            model(torch.randn(2, 5, 16))
        with pytest.raises(ValueError, match="a page shows weights, and recorded were lse"):
            seen.save(tmp_path / "a.html")

    def test_calls_that_do_not_continue_each_other(self, tmp_path):
        model = attn_ext.MultiHeadAttention(16, 4)
        with attn_ext.record(model) as seen:
            model(torch.randn(2, 5, 16))
            model(torch.randn(2, 3, 16))
        with pytest.raises(
            ValueError, match=r"the model was called 2 times, .* choose one by call=0 to call=1"
        ):
            seen.save(tmp_path / "a.html")
        seen.save(tmp_path / "a.html", ["a", "b", "c"], call=1)

    def test_a_full_disk(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(_page._Layer, "packed", full)
        (tmp_path / "a.html").write_text("older")
        with pytest.raises(
            OSError, match=r"cannot write .*a.html: No space left on device; nothing is left of it"
        ):
            recording_of(torch.rand(1, 3, 3)).save(tmp_path / "a.html")
        assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]


class Browser:
    """Chromium without a window."""

    def __init__(self, folder):
        self.folder = folder

    def command(self, *options):
        fixed = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
        ]
        return [CHROMIUM, *fixed, f"--user-data-dir={self.folder / 'profile'}", *options]

    def screenshot(self, page, where="", size="1100,800"):
        """Pixels (height, width, 3)."""
        from matplotlib.image import imread

        picture = self.folder / "picture.png"
        options = [f"--window-size={size}", "--virtual-time-budget=4000", f"--screenshot={picture}"]
        done = subprocess.run(
            self.command(*options, page.as_uri() + where), capture_output=True, text=True, timeout=120
        )
        assert "Uncaught" not in done.stderr, done.stderr
        return torch.from_numpy(imread(picture).copy())[..., :3]

    def dom(self, page, where=""):
        options = ["--virtual-time-budget=4000", "--dump-dom"]
        return subprocess.run(
            self.command(*options, page.as_uri() + where), capture_output=True, text=True, timeout=120
        ).stdout

    def measure(self, page, limit=60):
        """What the page says of itself in milliseconds, where its address ends in #measure."""
        process = subprocess.Popen(
            self.command("--window-size=1280,900", page.as_uri() + "#measure"),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        end, text = time.monotonic() + limit, b""
        try:
            while time.monotonic() < end:
                if select.select([process.stderr], [], [], 1)[0]:
                    text += os.read(process.stderr.fileno(), 1 << 16)
                found = re.search(rb'"measure (\{.*?\})"', text)
                if found:
                    return json.loads(found[1])
            raise AssertionError(text.decode())
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def browser(tmp_path):
    return Browser(tmp_path)


@needs_chromium
class TestInABrowser:
    def test_opens_and_answers_fast(self, browser, tmp_path):
        """12 layers of 12 heads over 1,024 words."""
        recording_of(*list(peaked(1, 12, 1024)) * 12).save(
            tmp_path / "a.html", [f"word{i}" for i in range(1024)]
        )
        times = browser.measure(tmp_path / "a.html")
        assert times["first"] < 2000, times
        assert times["whole"] < 2000, times
        assert times["hover"] < 50, times

    @pytest.mark.parametrize("words", [5, 50, 500])
    def test_overview_layer_and_head_are_drawn_dark_and_light(self, browser, tmp_path, words):
        pytest.importorskip("matplotlib")
        recording_of(*peaked(2, 4, words)).save(tmp_path / "a.html", [f"w{i}" for i in range(words)])
        for where, theme, paper in (
            ("", "light", 0.99),
            ("#1", "dark", 0.08),
            (f"#1/2/{words // 2}", "light", 0.99),
            (f"#1/2/{words // 2}", "dark", 0.08),
        ):
            pixels = browser.screenshot(tmp_path / "a.html", f"?theme={theme}{where}")
            assert pixels[0, 0].mean() == pytest.approx(paper, abs=0.03)
            # The strongest colour, that of the largest weight of a row, is the paper of the other theme.
            strong = torch.tensor([26, 25, 61] if theme == "light" else [250, 246, 241]) / 255
            assert ((pixels - strong).abs().amax(-1) < 0.01).sum() > 40

    def test_fits_a_phone(self, browser, tmp_path):
        recording_of(*peaked(2, 4, 50)).save(tmp_path / "a.html", [f"word{i}" for i in range(50)])
        page = (tmp_path / "a.html").read_text(encoding="utf-8")
        widths = "document.documentElement.scrollWidth + ' ' + innerWidth"
        report = f"<script>setTimeout(() => document.title = {widths}, 2000)</script>"
        (tmp_path / "b.html").write_text(page.replace("</body>", report + "</body>"), encoding="utf-8")
        for where in ("", "#0", "#1/2/20"):
            options = ["--window-size=500,900", "--virtual-time-budget=4000", "--dump-dom"]
            command = browser.command(*options, (tmp_path / "b.html").as_uri() + where)
            dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
            needed, given = map(int, re.search(r"<title>(\d+) (\d+)</title>", dom).groups())
            assert needed <= given

    def test_a_row_lights_up_the_words_that_it_looks_at(self, browser, tmp_path):
        weights = torch.tensor([[[1.0, 0, 0], [0.25, 0.75, 0], [0.0, 0.2, 0.8]]])
        recording_of(weights).save(tmp_path / "a.html", ["alpha", "beta", "gamma"])
        dom = browser.dom(tmp_path / "a.html", "?theme=light#0/0/1")
        spans = re.findall(r"<span([^>]*)>(alpha|beta|gamma)</span>", dom)
        lit = {word: 'class="l' in attributes for attributes, word in spans}
        assert lit == {"alpha": True, "beta": True, "gamma": False}
        table = re.findall(r"<td title=\"(\w+)\">.*?<td>([\d.]+) %</td>", dom)
        assert table == [("beta", "75"), ("alpha", "25")]

    def test_keys_move_from_the_overview_to_a_row(self, browser, tmp_path):
        """Without a pointer."""
        recording_of(*peaked(2, 3, 9)).save(tmp_path / "a.html", [f"w{i}" for i in range(9)])
        page = (tmp_path / "a.html").read_text(encoding="utf-8")
        script = """<script>
        const down = (key) => new KeyboardEvent("keydown", { key, bubbles: true });
        const press = (key) => (document.activeElement || document.body).dispatchEvent(down(key));
        const wait = () => new Promise((done) => setTimeout(done, 150));
        (async () => {
          await wait();
          const seen = [], tiles = document.querySelectorAll(".tile");
          tiles[0].focus();
          press("ArrowRight"), press("ArrowDown");
          seen.push(document.activeElement.getAttribute("aria-label"));
          document.activeElement.click();
          await wait();
          seen.push(location.hash);
          press("ArrowDown");
          seen.push(location.hash);
          press("ArrowRight");
          await wait();
          seen.push(location.hash);
          press("Escape");
          await wait();
          seen.push(location.hash);
          press("Escape");
          await wait();
          seen.push(location.hash + document.querySelectorAll(".overview .tile").length);
          document.title = seen.join("|");
        })();
        </script>"""
        (tmp_path / "b.html").write_text(page.replace("</body>", script + "</body>"), encoding="utf-8")
        title = re.search(r"<title>(.*?)</title>", browser.dom(tmp_path / "b.html"))[1]
        assert title == "encoder.layer.1.attention, head 1|#1/1/4|#1/1/5|#1/2/5|#1|6"
