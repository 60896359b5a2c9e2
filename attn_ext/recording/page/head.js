// The view of one head: the map, the words, and what a row shows.

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
