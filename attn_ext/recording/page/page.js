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

// The overview and a layer

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
