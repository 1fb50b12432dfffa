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

  // A pointer, or the arrow keys, shows the values below it.
  const tip = document.getElementById("tip");
  const xmlns = "http://www.w3.org/2000/svg";
  const plain = (value) => Number(value.toPrecision(4)).toString();
  const shown = (value) => (value === 0 || (Math.abs(value) >= 0.01 && Math.abs(value) < 1e4) ? value.toPrecision(4) : value.toExponential(1));

  class Reader {
    constructor(drawing) {
      this.drawing = drawing;
      this.svg = drawing.querySelector("svg");
      this.data = JSON.parse(drawing.dataset.hover);
      this.layer = null;
      this.index = 0;
      drawing.addEventListener("pointermove", (e) => this.point(e.clientX, e.clientY));
      drawing.addEventListener("pointerdown", (e) => this.point(e.clientX, e.clientY));
      drawing.addEventListener("pointerleave", () => this.clear());
      drawing.addEventListener("blur", () => this.clear());
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
      this.layer?.remove();
      this.layer = null;
      tip.hidden = true;
    }
    mark(tag, attributes) {
      const element = document.createElementNS(xmlns, tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      this.layer.append(element);
    }
    begin() {
      this.clear();
      this.layer = document.createElementNS(xmlns, "g");
      this.svg.append(this.layer);
    }
    point(clientX, clientY) {
      const box = this.svg.getBoundingClientRect();
      const at = [(clientX - box.left) / this.scale, (clientY - box.top) / this.scale];
      if (this.data.lines) this.lines(at);
      else if (this.data.points) this.nearest(at);
      else this.cell(at);
    }
    visible() {
      return this.data.lines.filter((line) => {
        const curve = this.svg.querySelector(`[data-series="${line.series}"]`);
        return curve && !curve.hasAttribute("data-hidden");
      });
    }
    lines(at) {
      const lines = this.visible();
      if (!lines.length) return this.clear();
      const xs = lines[0].x;
      this.index = xs.reduce((best, x, i) => (Math.abs(this.x(x) - at[0]) < Math.abs(this.x(xs[best]) - at[0]) ? i : best), 0);
      this.column(lines);
    }
    column(lines) {
      const x = lines[0].x[this.index];
      this.begin();
      this.mark("line", { class: "cursor", x1: this.x(x), x2: this.x(x), y1: this.data.box[1], y2: this.data.box[3] });
      const rows = [];
      for (const line of lines) {
        let i = line.x.length - 1;
        while (i > 0 && Math.abs(line.x[i - 1] - x) <= Math.abs(line.x[i] - x)) i--;
        const y = line.y[i];
        const colour = `var(--${line.series.split(" ")[0]}, var(--muted))`;
        if (y >= this.data.ylim[0]) this.mark("circle", { class: "knob", cx: this.x(x), cy: this.y(y), r: 2.4, style: `fill: ${colour}` });
        rows.push({ label: line.label, y, colour, hollow: line.series.endsWith("plain") });
      }
      rows.sort((a, b) => b.y - a.y);
      this.say(`${this.data.x} ${plain(x)}`, rows, this.x(x), this.data.box[1]);
    }
    nearest(at) {
      let best = null;
      for (const [x, y, text] of this.data.points) {
        const far = Math.hypot(this.x(x) - at[0], this.y(y) - at[1]);
        if (!best || far < best.far) best = { far, x: this.x(x), y: this.y(y), text };
      }
      if (!best || best.far > 26) return this.clear();
      this.begin();
      this.mark("circle", { cx: best.x, cy: best.y, r: 5, style: "fill: none; stroke: var(--ink); stroke-width: .8" });
      this.say(best.text, [], best.x, best.y);
    }
    cell(at) {
      const { box, grid, rows, columns, xlim, ylim, names, value } = this.data;
      if (at[0] < box[0] || at[0] > box[2] || at[1] < box[1] || at[1] > box[3]) return this.clear();
      const x = xlim[0] + ((at[0] - box[0]) / (box[2] - box[0])) * (xlim[1] - xlim[0]);
      const y = ylim[0] + ((box[3] - at[1]) / (box[3] - box[1])) * (ylim[1] - ylim[0]);
      const pick = (v, ends, n) => Math.max(0, Math.min(n - 1, Math.round(((v - ends[0]) / (ends[1] - ends[0])) * (n - 1))));
      const [row, column] = [pick(y, rows, grid.length), pick(x, columns, grid[0].length)];
      const where = names ? `${names[0]} ${column}, ${names[1]} ${row}: ` : "";
      this.begin();
      this.say(`${where}${grid[row][column]} ${names ? value : ""}`.trim(), names ? [] : [{ label: value, y: grid[row][column] }], at[0], at[1]);
    }
    key(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.data.lines) return;
      const lines = this.visible();
      if (!lines.length) return;
      event.preventDefault();
      this.index = Math.max(0, Math.min(lines[0].x.length - 1, this.index + step));
      this.column(lines);
    }
    say(title, rows, x, y) {
      tip.replaceChildren();
      const strong = document.createElement("strong");
      strong.textContent = title;
      tip.append(strong);
      for (const { label, y: value, colour, hollow } of rows) {
        const row = document.createElement("span");
        const name = document.createElement("em");
        name.style.fontStyle = "normal";
        if (colour) {
          const dot = document.createElement("i");
          dot.className = "dot";
          dot.style.cssText = hollow ? `box-shadow: inset 0 0 0 2px ${colour}` : `background: ${colour}`;
          name.append(dot);
        }
        name.append(label);
        row.append(name, shown(value));
        tip.append(row);
      }
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
