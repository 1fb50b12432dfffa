"use strict";
// The theme that was chosen last is set before anything is drawn. A browser may refuse a page its storage.
const root = document.documentElement;
const chosen = (theme) => {
  try {
    if (theme) localStorage.setItem("fedman-theme", theme);
    return localStorage.getItem("fedman-theme");
  } catch { return theme; }
};
if (["light", "dark"].includes(chosen())) root.style.colorScheme = chosen();

document.addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.style.colorScheme = now === "dark" ? "light" : "dark";
    chosen(root.style.colorScheme);
  });

  // Buttons hide the curves of one algorithm, or all plain ones, or all with MAN, in their group of pictures.
  for (const buttons of document.querySelectorAll(".buttons")) {
    const group = buttons.closest(".group");
    const apply = () => {
      const off = [...buttons.querySelectorAll('[aria-pressed="false"]')].map((b) => b.dataset.toggle);
      for (const curve of group.querySelectorAll("[data-series]")) {
        curve.toggleAttribute("data-hidden", curve.dataset.series.split(" ").some((word) => off.includes(word)));
      }
    };
    buttons.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      apply();
    });
    apply();
  }

  // A tip shows the values at the pointer, or where the arrow keys have moved to. After a touch it stays until the next.
  const tip = document.getElementById("tip");
  const shown = (value) => (value === 0 || (Math.abs(value) >= 0.01 && Math.abs(value) < 1e4) ? value.toPrecision(4) : value.toExponential(1));
  const html = (tag, className, ...children) => {
    const element = document.createElement(tag);
    element.className = className;
    element.append(...children);
    return element;
  };
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  class Reader {
    constructor(drawing, data) {
      this.svg = drawing.querySelector("svg");
      this.data = data;
      this.layer = this.svg.appendChild(svg("g", {}));
      this.index = 0;
      for (const name of ["pointermove", "pointerdown"]) drawing.addEventListener(name, (e) => this.point(e));
      drawing.addEventListener("pointerleave", (e) => e.pointerType === "touch" || this.clear());
      drawing.addEventListener("blur", () => this.clear());
      document.addEventListener("pointerdown", (e) => drawing.contains(e.target) || this.clear());
      drawing.addEventListener("keydown", (e) => this.key(e));
    }
    get scale() { return this.svg.getBoundingClientRect().width / this.svg.viewBox.baseVal.width; }
    place(value, limits, log, from, to) {
      const f = log ? Math.log : Number;
      return from + ((f(value) - f(limits[0])) / (f(limits[1]) - f(limits[0]))) * (to - from);
    }
    x(value) { return this.place(value, this.data.xlim, this.data.xlog, this.data.box[0], this.data.box[2]); }
    y(value) { return this.place(value, this.data.ylim, this.data.ylog, this.data.box[3], this.data.box[1]); }
    clear() {
      if (tip.reader === this) tip.hidden = true;
      this.layer.replaceChildren();
    }
    point({ clientX, clientY }) {
      const box = this.svg.getBoundingClientRect();
      const at = [(clientX - box.left) / this.scale, (clientY - box.top) / this.scale];
      this.clear();
      if (this.data.lines) this.lines(at);
      else if (this.data.points) this.nearest(at);
      else this.cell(at);
    }
    visible() {
      return this.data.lines.filter(({ series }) => this.svg.querySelector(`[data-series="${series}"]:not([data-hidden])`));
    }
    lines(at) {
      const lines = this.visible();
      if (!lines.length) return;
      const far = lines[0].x.map((x) => Math.abs(this.x(x) - at[0]));
      this.index = far.indexOf(Math.min(...far));
      this.column(lines);
    }
    column(lines) {
      const x = lines[0].x[this.index];
      this.layer.append(svg("line", { class: "cursor", x1: this.x(x), x2: this.x(x), y1: this.data.box[1], y2: this.data.box[3] }));
      const rows = lines.map(({ label, series, x: xs, y: ys }) => {
        let i = xs.length - 1;
        while (i > 0 && Math.abs(xs[i - 1] - x) <= Math.abs(xs[i] - x)) i--;
        const style = `--c: var(--${series.split(" ")[0]}, var(--muted))`;
        if (ys[i] >= this.data.ylim[0]) this.layer.append(svg("circle", { class: "knob", cx: this.x(x), cy: this.y(ys[i]), r: 2.4, style }));
        const dot = html("i", series.endsWith("plain") ? "dot open" : "dot");
        dot.style.cssText = style;
        return { label: html("span", "", dot, label), value: ys[i] };
      });
      rows.sort((a, b) => b.value - a.value);
      this.show(`${this.data.x} ${Number(x.toPrecision(4))}`, rows, this.x(x), this.data.box[1]);
    }
    nearest(at) {
      const points = this.data.points.map(([x, y, text]) => ({ far: Math.hypot(this.x(x) - at[0], this.y(y) - at[1]), x: this.x(x), y: this.y(y), text }));
      const best = points.reduce((a, b) => (b.far < a.far ? b : a), { far: 26 });
      if (!best.text) return;
      this.layer.append(svg("circle", { class: "ring", cx: best.x, cy: best.y, r: 5 }));
      this.show(best.text, [], best.x, best.y);
    }
    cell(at) {
      const { box, grid, rows, columns, xlim, ylim, names, axes, value } = this.data;
      if (at[0] < box[0] || at[0] > box[2] || at[1] < box[1] || at[1] > box[3]) return;
      const x = xlim[0] + ((at[0] - box[0]) / (box[2] - box[0])) * (xlim[1] - xlim[0]);
      const y = ylim[0] + ((box[3] - at[1]) / (box[3] - box[1])) * (ylim[1] - ylim[0]);
      const pick = (v, ends, n) => Math.max(0, Math.min(n - 1, Math.round(((v - ends[0]) / (ends[1] - ends[0])) * (n - 1))));
      const [row, column] = [pick(y, rows, grid.length), pick(x, columns, grid[0].length)];
      if (names) return this.show(`${names[0]} ${column}, ${names[1]} ${row}: ${grid[row][column]} ${value}`, [], ...at);
      const place = (i, ends, n) => (ends[0] + (i / (n - 1)) * (ends[1] - ends[0])).toFixed(2).replace("-", "−");
      const where = `${axes[0]} ${place(column, columns, grid[0].length)}, ${axes[1]} ${place(row, rows, grid.length)}`;
      this.show(where, [{ label: html("span", "", value), value: grid[row][column] }], ...at);
    }
    key(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const lines = step && this.data.lines ? this.visible() : [];
      if (!lines.length) return;
      event.preventDefault();
      this.clear();
      this.index = Math.max(0, Math.min(lines[0].x.length - 1, this.index + step));
      this.column(lines);
    }
    show(title, rows, x, y) {
      tip.replaceChildren(html("strong", "", title), ...rows.map(({ label, value }) => html("div", "", label, shown(value))));
      tip.hidden = false;
      tip.reader = this;
      const box = this.svg.getBoundingClientRect();
      const [left, top] = [box.left + x * this.scale, box.top + y * this.scale];
      const flip = left + 16 + tip.offsetWidth > innerWidth - 8;
      tip.style.left = `${Math.max(8, flip ? left - tip.offsetWidth - 14 : left + 14) + scrollX}px`;
      tip.style.top = `${Math.max(8, Math.min(top, innerHeight - tip.offsetHeight - 8)) + scrollY}px`;
    }
  }
  for (const drawing of document.querySelectorAll("[data-hover]")) new Reader(drawing, JSON.parse(drawing.dataset.hover));

  // Tables are sorted by a click on a column's head: up, down, as they were. Long ones have a field that filters them.
  const LONG = 12;
  const texts = (row) => [...row.cells].map((cell) => cell.textContent.trim());
  const number = (text) => parseFloat(text.replace("−", "-").replace(/,(?=\d{3})/g, ""));
  const order = (a, b) => {
    const blank = (text) => text === "" || text === "–";
    if (blank(a) || blank(b)) return blank(a) - blank(b);
    const [x, y] = [number(a), number(b)];
    return Number.isFinite(x) && Number.isFinite(y) ? x - y : a.localeCompare(b, "en", { numeric: true });
  };

  function sortable(table, rows) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = html("button", "sort", ...head.childNodes);
      button.type = "button";
      head.append(button);
      button.addEventListener("click", () => {
        const next = { ascending: "descending", descending: "" }[head.ariaSort] ?? "ascending";
        for (const other of heads) other.ariaSort = null;
        head.ariaSort = next || null;
        const sign = next === "descending" ? -1 : 1;
        const text = (row) => texts(row)[column];
        const last = (row) => ["", "–"].includes(text(row));  // blanks stay at the end
        const sorted = next ? [...rows].sort((a, b) => last(a) - last(b) || sign * order(text(a), text(b))) : rows;
        table.tBodies[0].append(...sorted);
      });
    });
  }

  function filterable(figure, rows) {
    const field = html("input", "");
    Object.assign(field, { type: "search", placeholder: "filter, e.g. fedavg iid", ariaLabel: "filter the rows" });
    const count = html("span", "note");
    const bar = html("div", "filter", field, count);
    figure.querySelector(".scroll").before(bar);
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) {
        const text = texts(row).join(" ").toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
      count.textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
    });
  }

  // Runs that are ticked in their table are drawn over each other; the labels say how they differ.
  const NAMES = 6;  // columns that say which run it is
  const COLOURS = 8;
  class Ticked {
    constructor(figure, rows) {
      const { x, runs } = JSON.parse(figure.dataset.curves);
      this.heads = texts(figure.querySelector("thead tr"));
      this.curves = new Map(rows.map((row, i) => [row, { x: x[runs[i][0]], y: runs[i][1] }]));
      this.boxes = new Map(rows.map((row) => [row, this.box(row)]));
      this.panel = html("div", "ticked");
      figure.querySelector(".scroll").before(this.panel);
      this.draw();
    }
    box(row) {
      const box = html("input", "");
      Object.assign(box, { type: "checkbox", ariaLabel: `compare ${texts(row).slice(0, NAMES).join(" ")}` });
      box.addEventListener("change", () => this.draw());
      row.cells[0].prepend(html("label", "tick", box));
      return box;
    }
    draw() {
      const rows = [...this.boxes.keys()].filter((row) => this.boxes.get(row).checked);
      tip.hidden = true;
      if (!rows.length) return this.panel.replaceChildren(html("p", "note", "Tick runs to compare them."));
      const cells = rows.map(texts);
      const all = [...this.heads.keys()].slice(0, NAMES);
      const differing = all.filter((i) => new Set(cells.map((row) => row[i])).size > 1);
      const said = differing.length ? differing : [2, 5];
      const label = (row) => said.map((i) => (Number.isFinite(number(row[i])) ? `${this.heads[i]} ${row[i]}` : row[i])).filter(Boolean).join(", ");
      const lines = rows.map((row, i) => ({ ...this.curves.get(row), label: label(cells[i]), series: `run${i % COLOURS} ${i}` }));
      const labels = rows.map((row, i) => {
        const button = html("button", "", html("i", "dot"), `${lines[i].label} `, html("b", "", "×"));
        Object.assign(button, { type: "button", ariaLabel: `leave out ${lines[i].label}` });
        button.style.setProperty("--c", `var(--run${i % COLOURS})`);
        button.addEventListener("click", () => { this.boxes.get(row).checked = false; this.draw(); });
        return button;
      });
      this.panel.replaceChildren(html("div", "buttons", ...labels), chart(lines.filter(({ x }) => x.length), "round", this.heads[NAMES], Math.min(this.panel.clientWidth, 900)));
    }
  }

  // A chart of lines, with as many round ticks as fit.
  function chart(lines, xName, yName, width) {
    const height = 120 + width / 4, box = [52, 22, width - 16, height - 44];
    const ends = (values) => [Math.min(...values), Math.max(...values)];
    const xlim = [0, ends(lines.flatMap(({ x }) => x))[1]];
    const [low, high] = ends(lines.flatMap(({ y }) => y));
    const margin = 0.04 * (high - low) || 1;
    const data = { lines, x: xName, box, xlim, ylim: [low - margin, high + margin] };
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}` });
    const drawing = html("div", "drawing", picture);
    Object.assign(drawing, { tabIndex: 0, role: "img", ariaLabel: `${yName} of the runs ticked` });
    const write = (text, attributes) => picture.appendChild(svg("text", attributes)).append(text);
    const reader = new Reader(drawing, data);
    for (const v of ticks(...data.xlim)) {
      picture.append(svg("line", { class: "rule", x1: reader.x(v), x2: reader.x(v), y1: box[1], y2: box[3] }));
      write(`${v}`, { x: reader.x(v), y: box[3] + 16, "text-anchor": "middle" });
    }
    for (const v of ticks(...data.ylim)) {
      picture.append(svg("line", { class: "rule", x1: box[0], x2: box[2], y1: reader.y(v), y2: reader.y(v) }));
      write(`${v}`, { x: box[0] - 8, y: reader.y(v) + 4, "text-anchor": "end" });
    }
    write(yName, { x: 0, y: 10 });
    write(xName, { x: (box[0] + box[2]) / 2, y: height - 6, "text-anchor": "middle" });
    for (const { series, x, y } of lines) {
      const points = x.map((v, i) => `${reader.x(v).toFixed(1)},${reader.y(y[i]).toFixed(1)}`).join(" ");
      picture.append(svg("polyline", { "data-series": series, points, style: `--c: var(--${series.split(" ")[0]})` }));
    }
    picture.append(reader.layer);
    return drawing;
  }
  function ticks(low, high) {
    const raw = (high - low) / 6, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(6)));
    return found;
  }

  for (const figure of document.querySelectorAll("figure.table")) {
    const table = figure.querySelector("table"), rows = [...table.tBodies[0].rows];
    if (rows.length > 1) sortable(table, rows);
    if (rows.length > LONG) filterable(figure, rows);
    if (figure.dataset.curves) new Ticked(figure, rows);
  }
});
