"use strict";
// How weights become colours: bytes are unpacked and painted.

// Colours

function isDark() { return document.documentElement.dataset.theme === "dark"; }

function colorTable(dark) {
  const stops = (dark ? data.dark : data.light).map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => {
    const place = (i / 255) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((c, k) => Math.round(c + (stops[low + 1][k] - c) * (place - low)));
  });
}

function colors() {
  const name = isDark() ? "dark" : "light";
  return (tables[name] ??= colorTable(isDark()));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  show();
}

// Bytes

async function inflate(text) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser cannot unpack the weights; one of 2023 or later can.");
  }
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const packed = new Map(); // "layer.head" to its comment
let scanned = 0;

function findPacked(name) {
  const nodes = $("heads") ? $("heads").childNodes : [];
  for (; scanned < nodes.length; scanned++) {
    const node = nodes[scanned];
    if (node.nodeType === 8) packed.set(node.data.slice(0, node.data.indexOf(" ")), node);
  }
  return packed.get(name);
}

async function waitFor(name) {
  for (;;) {
    const node = findPacked(name);
    // The last comment may still be growing while the page loads.
    if (node && (node.nextSibling || document.readyState !== "loading")) return node;
    if (document.readyState === "complete" && !node) throw new Error("The page is not whole: a head is missing.");
    await new Promise((done) => setTimeout(done, 20));
  }
}

const kept = new Map(); // decoded heads, the newest last

async function decode(layer, head) {
  const name = `${layer}.${head}`;
  if (!kept.has(name)) {
    const node = await waitFor(name), bytes = await inflate(node.data.slice(node.data.indexOf(" ") + 1));
    const { rows } = data.layers[layer];
    kept.set(name, { largest: new Float32Array(bytes.buffer, 0, rows), cells: bytes.subarray(4 * rows) });
    const most = Math.max(2, Math.floor(2e8 / bytes.length));
    for (const old of kept.keys()) if (kept.size > most) kept.delete(old);
  }
  return kept.get(name);
}

// Drawing

function paint(canvas, cells, rows, columns, width, height) {
  // The largest cell of those under a pixel, or the cell around it; then colours.
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const table = Uint32Array.from(colors(), ([r, g, b]) => 0xff000000 | (b << 16) | (g << 8) | r);
  const firsts = Array.from({ length: width + 1 }, (_, x) => Math.floor((x * columns) / width));
  for (let y = 0; y < height; y++) {
    const top = Math.floor((y * rows) / height), bottom = Math.max(top + 1, Math.floor(((y + 1) * rows) / height));
    for (let x = 0; x < width; x++) {
      const right = Math.max(firsts[x] + 1, firsts[x + 1]);
      let most = 0;
      for (let i = top; i < bottom; i++) {
        for (let j = firsts[x]; j < right; j++) if (cells[i * columns + j] > most) most = cells[i * columns + j];
      }
      pixels[y * width + x] = table[most];
    }
  }
  context.putImageData(image, 0, 0);
}

function fitted(text, width, context) {
  if (context.measureText(text).width <= width) return text;
  const parts = [...new Intl.Segmenter().segment(text)].map((part) => part.segment);
  while (parts.length && context.measureText(parts.join("") + "…").width > width) parts.pop();
  return parts.join("") + "…";
}
