"use strict";
(() => {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.style.colorScheme = now === "dark" ? "light" : "dark";
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

  // A tip shows the values at the pointer, or where the arrow keys have moved to.
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
    constructor(drawing) {
      this.svg = drawing.querySelector("svg");
      this.data = JSON.parse(drawing.dataset.hover);
      this.layer = this.svg.appendChild(svg("g", {}));
      this.index = 0;
      for (const name of ["pointermove", "pointerdown"]) drawing.addEventListener(name, (e) => this.point(e));
      for (const name of ["pointerleave", "blur"]) drawing.addEventListener(name, () => this.clear());
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
      this.layer.replaceChildren();
      tip.hidden = true;
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
      const { box, grid, rows, columns, xlim, ylim, names, value } = this.data;
      if (at[0] < box[0] || at[0] > box[2] || at[1] < box[1] || at[1] > box[3]) return;
      const x = xlim[0] + ((at[0] - box[0]) / (box[2] - box[0])) * (xlim[1] - xlim[0]);
      const y = ylim[0] + ((box[3] - at[1]) / (box[3] - box[1])) * (ylim[1] - ylim[0]);
      const pick = (v, ends, n) => Math.max(0, Math.min(n - 1, Math.round(((v - ends[0]) / (ends[1] - ends[0])) * (n - 1))));
      const [row, column] = [pick(y, rows, grid.length), pick(x, columns, grid[0].length)];
      const text = names ? `${names[0]} ${column}, ${names[1]} ${row}: ${grid[row][column]} ${value}` : `${value} ${shown(grid[row][column])}`;
      this.show(text, [], at[0], at[1]);
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
      const box = this.svg.getBoundingClientRect();
      const [left, top] = [box.left + x * this.scale, box.top + y * this.scale];
      const flip = left + 16 + tip.offsetWidth > innerWidth - 8;
      tip.style.left = `${Math.max(8, flip ? left - tip.offsetWidth - 14 : left + 14) + scrollX}px`;
      tip.style.top = `${Math.max(8, Math.min(top, innerHeight - tip.offsetHeight - 8)) + scrollY}px`;
    }
  }
  for (const drawing of document.querySelectorAll("[data-hover]")) new Reader(drawing);
})();
