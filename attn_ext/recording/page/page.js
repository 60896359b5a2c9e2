"use strict";
// Weights are bytes: 255 * sqrt(weight / largest of its row). A head is decoded when it is looked at.

const data = JSON.parse(document.getElementById("data").textContent);
for (const layer of data.layers) layer.words = layer.words.map((number) => data.texts[number]);
const $ = (id) => document.getElementById(id);
const view = $("view");
const state = { layer: null, head: null, row: null, column: null, by: "row", scale: "row" };
const tables = {}; // colours by theme, 256 of [r, g, b]
let thumbs = null;
let shown = null; // the open head: cells, sums, canvases, words

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

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

// The three views

function showOverview() {
  const heads = Math.max(...data.layers.map((layer) => layer.heads.length));
  const side = Math.max(22, Math.min(96, Math.floor((Math.min(innerWidth, 1400) - 200) / heads) - 4));
  const grid = make("div", { className: "grid" });
  grid.style.gridTemplateColumns = `auto repeat(${heads}, ${side}px)`;
  const names = shortNames();
  const pattern = make("span", { className: "pattern", textContent: names.pattern });
  grid.append(pattern, ...Array.from({ length: heads }, (_, h) => make("span", { className: "number", textContent: `${h}` })));
  data.layers.forEach((layer, l) => {
    const name = make("button", { className: "name", type: "button", title: layer.name, onclick: () => go(l) });
    name.append(make("bdi", { textContent: names.short[l] }));
    grid.append(name);
    for (let h = 0; h < heads; h++) grid.append(h < layer.heads.length ? overviewTile(l, h, side) : make("span"));
  });
  grid.onkeydown = (event) => moveFocus(event, grid, heads);
  view.replaceChildren(make("div", { className: "overview" }, grid));
  say("Each square is a head: rows are the words that look, columns those that are looked at.");
}

function shortNames() {
  // What tells the layers apart, and what they share with * in its place.
  const names = data.layers.map((layer) => layer.name.split(".")), least = Math.min(...names.map((name) => name.length));
  const shares = (at) => names.every((name) => name.at(at) === names[0].at(at));
  let before = 0, after = 0;
  while (before < least - 1 && shares(before)) before++;
  while (after < least - 1 - before && shares(-1 - after)) after++;
  if (names.length < 2 || before + after === 0) return { pattern: "", short: data.layers.map((layer) => layer.name) };
  return {
    pattern: [...names[0].slice(0, before), "*", ...names[0].slice(names[0].length - after)].join("."),
    short: names.map((name) => name.slice(before, name.length - after).join(".")),
  };
}

function overviewTile(l, h, side) {
  const canvas = make("canvas"), { at, rows, columns } = data.layers[l].thumbs[h];
  paint(canvas, thumbs.subarray(at, at + rows * columns), rows, columns, columns, rows);
  canvas.style.cssText = `width:${side}px;height:${side}px`;
  return tile(canvas, l, h);
}

function tile(canvas, l, h, ...more) {
  const label = `${data.layers[l].name}, head ${data.layers[l].heads[h]}`;
  const button = make("button", { type: "button", className: "tile", title: label, onclick: () => go(l, h) }, canvas, ...more);
  button.setAttribute("aria-label", label);
  return button;
}

function moveFocus(event, grid, heads) {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -heads, ArrowDown: heads }[event.key];
  const tiles = [...grid.querySelectorAll(".tile")], place = tiles.indexOf(document.activeElement);
  if (!step || place < 0 || !tiles[place + step]) return;
  tiles[place + step].focus();
  event.preventDefault();
}

async function showLayer(l) {
  const layer = data.layers[l], grid = make("div", { className: "layer" });
  view.replaceChildren(grid);
  say(`${layer.name}: ${layer.heads.length} heads, ${layer.words[0].length} × ${layer.words[1].length} words.`);
  grid.onkeydown = (event) => moveFocus(event, grid, getComputedStyle(grid).gridTemplateColumns.split(" ").length);
  const canvases = layer.heads.map((number, h) => {
    const canvas = make("canvas", { width: 160, height: 160 });
    grid.append(tile(canvas, l, h, `head ${number}`));
    return canvas;
  });
  for (let h = 0; h < canvases.length && grid.isConnected; h++) {
    const { cells } = await decode(l, h);
    const side = (n) => (n >= 160 ? Math.min(n, 320) : n * Math.ceil(160 / n));
    paint(canvases[h], cells, layer.rows, layer.columns, side(layer.columns), side(layer.rows));
  }
}

async function showHead(l, h) {
  const layer = data.layers[l];
  const head = await decode(l, h);
  if (state.layer !== l || state.head !== h) return;
  shown = { layer, ...head };
  shown.sameWords = layer.same;
  const map = make("div", { className: "map" }, (shown.base = make("canvas")), (shown.over = make("canvas", { className: "over" })));
  const left = make("div", {}, map, legend());
  const right = make("div", {}, choices(), ...wordBoxes(), (shown.list = make("table")));
  view.replaceChildren(make("div", { className: "head" }, left, right));
  drawMap();
  listen();
  select(Math.min(state.row ?? firstRow(), layer.rows - 1));
}

function firstRow() { return Math.min(shown.layer.rows - 1, Math.floor(shown.layer.rows / 2)); }

function scaledCells() {
  if (state.scale === "row") return shown.cells;
  const { layer, cells, largest } = shown, top = largest.reduce((a, b) => Math.max(a, b), 0) || 1;
  const result = new Uint8Array(cells.length);
  for (let i = 0; i < layer.rows; i++) {
    const factor = Math.sqrt(largest[i] / top);
    for (let j = i * layer.columns; j < (i + 1) * layer.columns; j++) result[j] = Math.round(cells[j] * factor);
  }
  return result;
}

const MARGIN = 84; // for words beside the map

function drawMap() {
  const { layer, base, over } = shown, { rows, columns } = layer;
  const wide = innerWidth > 860, room = Math.min(wide ? innerWidth * 0.52 : innerWidth - 32, 800) - MARGIN;
  const cell = Math.min(room / columns, (wide ? Math.max(360, innerHeight - 260) : 1e9) / rows, 56);
  const width = Math.max(Math.round(cell * columns), 60), height = Math.max(Math.round(cell * rows), 60);
  const dense = Math.max(1, Math.min(2, devicePixelRatio)), inner = make("canvas");
  paint(inner, scaledCells(), rows, columns, Math.round(width * dense), Math.round(height * dense));
  for (const canvas of [base, over]) {
    canvas.width = (width + MARGIN) * dense;
    canvas.height = (height + MARGIN) * dense;
    canvas.style.cssText = `width:${width + MARGIN}px;height:${height + MARGIN}px`;
    canvas.getContext("2d").setTransform(dense, 0, 0, dense, 0, 0);
  }
  const context = base.getContext("2d");
  context.drawImage(inner, MARGIN, MARGIN, width, height);
  Object.assign(shown, { width, height });
  if (cell >= 9) drawGrid(context);
  drawNames(context);
}

function drawGrid(context) {
  const { layer, width, height } = shown;
  context.strokeStyle = getComputedStyle(document.body).backgroundColor;
  context.lineWidth = 1;
  context.beginPath();
  for (let j = 1; j < layer.columns; j++) {
    context.moveTo(MARGIN + (j * width) / layer.columns, MARGIN);
    context.lineTo(MARGIN + (j * width) / layer.columns, MARGIN + height);
  }
  for (let i = 1; i < layer.rows; i++) {
    context.moveTo(MARGIN, MARGIN + (i * height) / layer.rows);
    context.lineTo(MARGIN + width, MARGIN + (i * height) / layer.rows);
  }
  context.stroke();
}

function drawNames(context) {
  const { layer, width, height } = shown;
  const style = getComputedStyle(document.body);
  context.font = `12px ${style.fontFamily}`;
  context.fillStyle = style.color;
  context.strokeStyle = style.color;
  context.textBaseline = "middle";
  const name = (words, step, cells, size, turned) => {
    const least = Math.max(1, Math.ceil((15 * cells) / size));
    const every = cells > 200 ? roundStep(least * step) / step : least;
    for (let i = 0; i < cells; i += Math.max(1, Math.round(every))) {
      const place = MARGIN + ((i + 0.5) * size) / cells;
      context.save();
      if (turned) context.translate(place, MARGIN - 6), context.rotate(-Math.PI / 2);
      else context.translate(MARGIN - 6, place);
      context.textAlign = turned ? "left" : "right";
      context.fillText(cells > 200 ? i * step : fitted(words[i * step], MARGIN - 10, context), 0, 0);
      context.restore();
      if (every > 1) context.fillRect(turned ? place : MARGIN - 4, turned ? MARGIN - 4 : place, turned ? 1 : 3, turned ? 3 : 1);
    }
  };
  name(layer.words[0], layer.step, layer.rows, height, false);
  name(layer.words[1], layer.step, layer.columns, width, true);
}

function roundStep(least) {
  // 1, 2 or 5 with zeros.
  const unit = 10 ** Math.floor(Math.log10(least));
  return unit * [1, 2, 5, 10].find((times) => times * unit >= least);
}

function legend() {
  const canvas = make("canvas", { width: 256, height: 1 });
  paint(canvas, Uint8Array.from({ length: 256 }, (_, i) => i), 1, 256, 256, 1);
  const top = state.scale === "row" ? "the largest of its row" : "the largest of the head";
  return make("div", { className: "legend" }, "0", canvas, `${top} (the middle colour is a quarter of it)`);
}

function choices() {
  const box = make("div", { className: "choice" });
  const add = (name, value, text) => {
    const button = make("button", { type: "button", textContent: text, onclick: () => ((state[name] = value), show()) });
    button.setAttribute("aria-pressed", state[name] === value);
    box.append(button);
  };
  add("by", "row", "what a word looks at");
  add("by", "column", "what looks at a word");
  add("scale", "row", "colours by row");
  add("scale", "head", "colours by head");
  return box;
}

function wordBoxes() {
  const { layer } = shown;
  const box = (words) => {
    const spans = words.map((word, i) => make("span", { textContent: word, i }));
    return [spans, make("div", { className: "words" }, ...spans.flatMap((span) => [span, " "]))];
  };
  const [keySpans, keys] = box(layer.words[1]);
  shown.keySpans = keySpans;
  if (layer.same) {
    shown.rowSpans = keySpans;
    shown.boxes = [keys];
    return [keys];
  }
  const [rowSpans, rows] = box(layer.words[0]);
  shown.rowSpans = rowSpans;
  shown.boxes = [rows, keys];
  return [make("h2", { textContent: "looking" }), rows, make("h2", { textContent: "looked at" }), keys];
}

function listen() {
  const { over, layer } = shown;
  over.onpointermove = over.onpointerdown = (event) => {
    const bounds = over.getBoundingClientRect();
    const place = (at, size, cells) => Math.floor(((at - MARGIN) / size) * cells);
    const row = place(event.clientY - bounds.top, shown.height, layer.rows);
    const column = place(event.clientX - bounds.left, shown.width, layer.columns);
    if (row < 0 || row >= layer.rows || column >= layer.columns) return;
    select(row, column < 0 ? null : column);
  };
  shown.boxes.forEach((box, number) => {
    const ofRows = shown.boxes.length === 1 ? state.by === "row" : number === 0;
    box.onpointerover = box.onpointerdown = (event) => {
      if (event.target.i === undefined) return;
      const cell = Math.floor(event.target.i / layer.step);
      if (ofRows) { if (cell < layer.rows) select(cell); } else select(state.row, cell);
    };
  });
}

// What a row shows

function weight(row, column) {
  const share = shown.cells[row * shown.layer.columns + column] / 255;
  return share * share * shown.largest[row];
}

function select(row, column = state.column) {
  if (state.by === "row" && column === state.column) column = null;
  Object.assign(state, { row, column });
  const { layer } = shown, byRow = state.by === "row";
  const focus = byRow ? row : (column ?? Math.min(row, layer.columns - 1));
  const weights = Array.from({ length: byRow ? layer.columns : layer.rows }, (_, k) => (byRow ? weight(row, k) : weight(k, focus)));
  light(byRow ? shown.keySpans : shown.rowSpans, weights, byRow ? shown.rowSpans : shown.keySpans, focus);
  drawCross(byRow ? row : null, byRow ? column : focus);
  listLargest(weights, byRow ? layer.words[1] : layer.words[0]);
  const words = byRow ? layer.words[0] : layer.words[1], name = words[focus * layer.step];
  if (byRow && column !== null) say(`${name} → ${layer.words[1][column * layer.step]}: ${percent(weight(row, column))}`);
  else say(byRow ? `${name} (${focus * layer.step}) looks at` : `${name} (${focus * layer.step}) is looked at by`);
  history.replaceState(null, "", location_hash());
}

const LEVELS = 24; // of a word that lights up

function lightRules() {
  // One class a level, so that a word changes by a single write.
  return Array.from({ length: LEVELS }, (_, i) => {
    const [r, g, b] = colors()[Math.round(((i + 1) * 255) / LEVELS)];
    const ink = 0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#1a193d" : "#ffffff";
    return `.l${i + 1} { background: rgb(${r} ${g} ${b}); color: ${ink}; }`;
  }).join("\n");
}

function light(spans, weights, fromSpans, from) {
  const { step } = shown.layer, top = weights.reduce((a, b) => Math.max(a, b), 0) || 1;
  if (shown.lit !== spans) shown.levels = new Uint8Array(spans.length);
  shown.lit = spans;
  shown.from?.removeAttribute("data-from");
  for (let i = 0; i < spans.length; i++) {
    const level = Math.round(LEVELS * Math.sqrt((weights[Math.floor(i / step)] ?? 0) / top));
    if (level !== shown.levels[i]) spans[i].className = level ? `l${level}` : "";
    shown.levels[i] = level;
  }
  shown.from = fromSpans[from * step];
  shown.from?.setAttribute("data-from", "");
  const box = shown.from?.parentElement;
  if (box && !box.matches(":hover")) box.scrollTop = shown.from.offsetTop - box.clientHeight / 2;
}

function drawCross(row, column) {
  const { layer, over, width, height } = shown, context = over.getContext("2d");
  context.clearRect(0, 0, width + MARGIN, height + MARGIN);
  context.strokeStyle = isDark() ? "#ffffff" : "#22223b";
  context.lineWidth = 1.5;
  const band = (at, size, cells) => [MARGIN + (at * size) / cells, size / cells];
  const outline = (x, y, wide, tall) => {
    if (Math.min(wide, tall) >= 5) return context.strokeRect(x, y, wide, tall);
    context.fillStyle = context.strokeStyle; // lines above and below would hide what lies between them
    context.globalAlpha = 0.55;
    context.fillRect(x, y, Math.max(1, wide), Math.max(1, tall));
    context.globalAlpha = 1;
  };
  if (row !== null) {
    const [y, tall] = band(row, height, layer.rows);
    outline(MARGIN, y, width, tall);
  }
  if (column !== null) {
    const [x, wide] = band(column, width, layer.columns);
    outline(x, MARGIN, wide, height);
  }
}

function listLargest(weights, words) {
  const largest = [];
  weights.forEach((value, k) => {
    if (value <= 0 || (largest.length === 8 && value <= largest[7][0])) return;
    const place = largest.findIndex(([other]) => value > other);
    largest.splice(place < 0 ? largest.length : place, 0, [value, k]);
    largest.length = Math.min(largest.length, 8);
  });
  const top = largest.length ? largest[0][0] : 1;
  shown.list.replaceChildren(...largest.map(([value, k]) => {
    const bar = make("div", { className: "bar" });
    bar.style.width = `${(100 * value) / top}%`;
    const place = k * shown.layer.step, word = words[place];
    return make("tr", {}, make("td", { title: word }, word, make("small", { textContent: place })), make("td", {}, bar), make("td", { textContent: percent(value) }));
  }));
}

function percent(value) { return `${(100 * value).toFixed(value >= 0.0995 ? 0 : value >= 0.00995 ? 1 : 2)} %`; }

function say(text) { $("said").textContent = text; }

// Where you are

function location_hash() {
  const parts = [state.layer, state.head, state.head === null ? null : state.row].filter((part) => part !== null);
  return parts.length ? `#${parts.join("/")}` : location.pathname + location.search;
}

function go(layer = null, head = null) {
  const known = data.layers[layer];
  Object.assign(state, { layer: known ? layer : null, head: known && known.heads[head] !== undefined ? head : null });
  history.replaceState(null, "", location_hash());
  return show().then(() => view.focus({ preventScroll: true }));
}

function trail() {
  const steps = [["overview", () => go()]];
  if (state.layer !== null) steps.push([data.layers[state.layer].name, () => go(state.layer)]);
  if (state.head !== null) steps.push([`head ${data.layers[state.layer].heads[state.head]}`, () => go(state.layer, state.head)]);
  $("trail").replaceChildren(...steps.flatMap(([text, onclick], i) => {
    const button = make("button", { type: "button", textContent: text, onclick });
    if (i === steps.length - 1) button.setAttribute("aria-current", "page");
    return i ? ["›", button] : [button];
  }));
}

async function show() {
  trail();
  $("lights").textContent = lightRules();
  try {
    if (state.layer === null) return showOverview();
    await (state.head === null ? showLayer(state.layer) : showHead(state.layer, state.head));
  } catch (error) {
    view.textContent = error.message;
  }
}

function onKey(event) {
  if (event.target.closest(".words") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && state.layer !== null) return void go(state.head === null ? null : state.layer);
  if (state.head === null || !shown) return;
  const { layer } = shown, step = { ArrowUp: -1, ArrowDown: 1 }[event.key], turn = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step) {
    const column = state.by === "column" ? clamp((state.column ?? state.row) + step, layer.columns) : null;
    select(state.by === "column" ? state.row : clamp(state.row + step, layer.rows), column);
  } else if (turn && layer.heads[state.head + turn] !== undefined) go(state.layer, state.head + turn);
  else return;
  event.preventDefault();
}

function clamp(place, size) { return Math.max(0, Math.min(size - 1, place)); }

// `#measure` opens a head and moves over its words, and says to the console how long that took.

async function measure(opened) {
  const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const loaded = new Promise((done) => (document.readyState === "complete" ? done() : addEventListener("load", () => done())));
  await painted();
  const first = performance.now();
  await loaded;
  const whole = performance.now();
  const last = data.layers.length - 1;
  await go(last, data.layers[last].heads.length - 1);
  await painted();
  const head = performance.now() - whole, hovers = [];
  for (let i = 0; i < 40; i++) {
    const before = performance.now();
    select(Math.floor(((i * 7919) % 40) * shown.layer.rows / 40));
    view.getBoundingClientRect();
    hovers.push(performance.now() - before);
    await painted();
  }
  hovers.sort((a, b) => a - b);
  const result = { opened, first, whole, head, hover: hovers[20], slowest: hovers[39] };
  document.documentElement.dataset.measure = JSON.stringify(result);
  console.log("measure " + JSON.stringify(result));
}

async function start() {
  const wanted = location.hash, chosen = new URLSearchParams(location.search).get("theme");
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = chosen ?? (prefers.matches ? "dark" : "light");
  prefers.onchange = () => setTheme(prefers.matches ? "dark" : "light");
  $("theme").onclick = () => setTheme(isDark() ? "light" : "dark");
  $("summary").textContent = data.summary;
  $("precision").textContent = data.precision;
  try {
    thumbs = await inflate($("thumbs").textContent);
  } catch (error) {
    view.textContent = error.message;
    return;
  }
  const [layer, head, row] = /^#\d/.test(wanted) ? wanted.slice(1).split("/").map(Number) : [];
  state.row = row ?? null;
  await go(layer, head);
  addEventListener("keydown", onKey);
  let size = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== size) { size = innerWidth; show(); } });
  document.documentElement.dataset.ready = "yes";
  if (wanted === "#measure") measure(performance.now());
}

start();
