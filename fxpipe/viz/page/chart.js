// The canvas with one row per rank, and the one with memory curves below it.
class Chart {
  constructor(canvas, memory) {
    this.canvas = canvas;
    this.memory = memory;
    this.schedule = null;
    this.view = [0, 1];
    this.hovered = -1;
    this.selected = -1;
    this.showCritical = false;
    this.showTransfers = true;
    this.unit = "";
    this.memoryUnit = "";
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colours = {};
    for (const name of ["paper", "ink", "muted", "rule", "idle", "accent", "area", "bar"]) {
      this.colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
  }

  show(schedule) {
    this.schedule = schedule;
    this.view = [0, schedule.makespan || 1];
    this.hovered = this.selected = -1;
    this.layOut();
  }

  layOut() {
    const schedule = this.schedule;
    const narrow = this.canvas.clientWidth < 500;
    this.left = narrow ? 46 : 64;
    this.right = narrow ? 6 : 76;
    this.rowHeight = schedule.ranks <= 12 ? 26 : schedule.ranks <= 32 ? 18 : 13;
    let y = 6;
    this.rows = schedule.rows.map((row) => {
      const top = y;
      y += this.rowHeight + 2;
      const lanes = this.showTransfers ? row.lanes.length : 0;
      const laneTop = y;
      y += lanes * 8 + (this.rowHeight > 14 ? 6 : 3);
      return { top, laneTop, lanes };
    });
    this.axis = y;
    this.height = y + 20;
    this.strip = schedule.ranks <= 12 ? 30 : 18;
    this.memoryHeight = schedule.ranks * (this.strip + 6) + 4;
  }

  get plot() { return Math.max(this.canvas.clientWidth - this.left - this.right, 40); }
  x(time) { return this.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.plot; }
  time(x) { return this.view[0] + ((x - this.left) / this.plot) * (this.view[1] - this.view[0]); }

  setView(start, end) {
    const whole = this.schedule.makespan || 1;
    const span = Math.min(Math.max(end - start, whole / 2000), whole);
    start = Math.min(Math.max(start, 0), whole - span);
    this.view = [start, start + span];
    this.draw();
  }

  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    this.setView(around - (around - this.view[0]) * factor, around + (this.view[1] - around) * factor);
  }

  prepare(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif";
    return context;
  }

  draw() {
    if (!this.schedule) return;
    this.layOut();
    const context = this.prepare(this.canvas, this.height);
    this.drawGrid(context);
    this.schedule.rows.forEach((row, rank) => this.drawRow(context, row, rank));
    this.clipToPlot(context, this.height, () => {
      if (this.showCritical) this.drawCritical(context);
      const shown = this.hovered >= 0 ? this.hovered : this.selected;
      if (shown >= 0) this.drawDependencies(context, shown);
      if (this.selected >= 0) this.outline(context, this.selected, this.colours.accent, 3);
    });
    this.drawMemory();
  }

  clipToPlot(context, height, paint) {
    context.save();
    context.beginPath();
    context.rect(this.left - 1, 0, this.plot + 2, height);
    context.clip();
    paint();
    context.restore();
  }

  drawGrid(context) {
    context.textAlign = "center";
    for (const tick of niceTicks(this.view[0], this.view[1], this.plot / 80)) {
      const x = this.x(tick);
      context.fillStyle = this.colours.rule;
      context.fillRect(x, 2, 1, this.axis);
      context.fillStyle = this.colours.muted;
      context.fillText(numberText(tick), x, this.axis + 15);
    }
  }

  drawRow(context, row, rank) {
    const { top, laneTop, lanes } = this.rows[rank];
    const middle = top + this.rowHeight / 2 + 4;
    context.fillStyle = this.colours.idle;
    context.fillRect(this.left, top, this.plot, this.rowHeight);
    context.fillStyle = this.colours.ink;
    context.textAlign = "right";
    context.fillText(this.left < 60 ? `r${rank}` : `rank ${rank}`, this.left - 8, middle);
    if (this.right > 40) {
      context.textAlign = "left";
      context.fillStyle = this.colours.muted;
      context.fillText(`${Math.round(100 * this.schedule.idle_per_rank[rank])}% idle`, this.left + this.plot + 8, middle);
    }
    this.clipToPlot(context, this.height, () => {
      this.drawVisible(row.compute, (i) => this.drawCompute(context, i, top));
      for (let lane = 0; lane < lanes; lane += 1) {
        this.drawVisible(row.lanes[lane], (i) => this.drawTransfer(context, i, laneTop + lane * 8));
      }
    });
  }

  drawVisible(list, paint) {
    for (let n = Math.max(0, this.schedule.at(list, this.view[0])); n < list.length; n += 1) {
      if (this.schedule.start[list[n]] > this.view[1]) break;
      paint(list[n]);
    }
  }

  drawCompute(context, i, top) {
    const schedule = this.schedule;
    const parts = schedule.partsOf(i);
    const x = this.x(schedule.start[i]);
    const width = this.x(schedule.end[i]) - x;
    const height = (this.rowHeight - (parts.length - 1)) / parts.length;
    parts.forEach(([kind, stage, microbatch], n) => {
      drawBox(context, {
        x, y: top + n * (height + 1), width: width > 3 ? width - 0.8 : Math.max(width, 0.6), height,
        colour: schedule.colourOf(kind, stage), hatch: schedule.kinds[kind].hatch,
        label: microbatch < 0 ? "" : `${schedule.kinds[kind].letter}${microbatch}`, short: String(microbatch),
      });
    });
  }

  drawTransfer(context, i, top) {
    const schedule = this.schedule;
    const kind = schedule.kinds[schedule.kind[i]];
    const x = this.x(schedule.start[i]);
    const width = Math.max(this.x(schedule.end[i]) - x, 2.5);
    context.fillStyle = kind.transfer && !kind.sends ? mixColours(kind.colour, "#ffffff", 0.5) : kind.colour;
    drawArrow(context, x, top, width, 7, kind.transfer ? kind.direction : 0);
  }

  place(i) {
    const schedule = this.schedule;
    const row = this.rows[schedule.rank[i]];
    const lane = schedule.lane[i];
    if (lane < 0) return { top: row.top, height: this.rowHeight };
    return { top: row.laneTop + lane * 8, height: 7 };
  }

  outline(context, i, colour, width) {
    const { top, height } = this.place(i);
    const x = this.x(this.schedule.start[i]);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(x, top, Math.max(this.x(this.schedule.end[i]) - x, 2), height);
  }

  drawCritical(context) {
    for (const i of this.schedule.critical) {
      if (this.schedule.lane[i] < 0) this.outline(context, i, this.colours.ink, 2);
    }
  }

  drawDependencies(context, i) {
    const { waits, feeds, start, end } = this.schedule;
    this.outline(context, i, this.colours.ink, 2);
    const join = (from, to, colour) => {
      const a = this.place(from), b = this.place(to);
      const x0 = this.x(end[from]), x1 = this.x(start[to]);
      const y0 = a.top + a.height / 2, y1 = b.top + b.height / 2;
      const bend = Math.max(12, Math.abs(x1 - x0) / 2);
      // Within a row the line bows above the boxes, whose labels it would strike out.
      const bow = y0 === y1 ? this.rowHeight * 0.9 : 0;
      context.strokeStyle = colour;
      context.lineWidth = 1.6;
      context.beginPath();
      context.moveTo(x0, y0);
      context.bezierCurveTo(x0 + bend / 2, y0 - bow, x1 - bend / 2, y1 - bow, x1, y1);
      context.stroke();
      context.fillStyle = colour;
      context.beginPath();
      context.arc(x1, y1, 3, 0, 7);
      context.fill();
    };
    for (const source of waits[i]) { this.outline(context, source, this.colours.ink, 1); join(source, i, this.colours.ink); }
    for (const target of feeds[i]) { this.outline(context, target, this.colours.accent, 1); join(i, target, this.colours.accent); }
  }

  drawMemory() {
    const schedule = this.schedule;
    const context = this.prepare(this.memory, this.memoryHeight);
    const most = Math.max(...schedule.peak, 1e-30);
    schedule.memory.forEach((curve, rank) => {
      const base = (rank + 1) * (this.strip + 6) - 4;
      context.fillStyle = this.colours.ink;
      context.textAlign = "right";
      context.fillText(this.left < 60 ? `r${rank}` : `rank ${rank}`, this.left - 8, base - 3);
      if (curve.length) this.clipToPlot(context, this.memoryHeight, () => this.drawCurve(context, curve, base, most));
      context.fillStyle = this.colours.rule;
      context.fillRect(this.left, base, this.plot, 1);
      const text = curve.length ? unitText(schedule.peak[rank], this.memoryUnit) : "not measured";
      context.fillStyle = this.colours.muted;
      if (this.right > 40) {
        context.textAlign = "left";
        context.fillText(text, this.left + this.plot + 8, base - 3);
      } else {
        context.textAlign = "right";
        context.strokeStyle = this.colours.paper;
        context.lineWidth = 4;
        context.strokeText(`peak ${text}`, this.left + this.plot - 2, base - 4);
        context.fillText(`peak ${text}`, this.left + this.plot - 2, base - 4);
      }
    });
  }

  drawCurve(context, curve, base, most) {
    const height = (held) => base - (held / most) * this.strip;
    context.beginPath();
    context.moveTo(this.x(0), base);
    let held = 0;
    for (let i = 0; i < curve.length; i += 2) {
      context.lineTo(this.x(curve[i]), height(held));
      held = curve[i + 1];
      context.lineTo(this.x(curve[i]), height(held));
    }
    context.lineTo(this.x(this.schedule.makespan), height(held));
    context.strokeStyle = this.colours.accent;
    context.lineWidth = 1.2;
    context.stroke();
    context.lineTo(this.x(this.schedule.makespan), base);
    context.closePath();
    context.fillStyle = this.colours.area;
    context.fill();
  }

  // The action under a point of the canvas, or -1.
  hit(x, y) {
    const time = this.time(x);
    if (x < this.left || x > this.left + this.plot) return -1;
    for (let rank = 0; rank < this.rows.length; rank += 1) {
      const { top, laneTop, lanes } = this.rows[rank];
      let list = null;
      if (y >= top && y < top + this.rowHeight) list = this.schedule.rows[rank].compute;
      else if (y >= laneTop && y < laneTop + lanes * 8) list = this.schedule.rows[rank].lanes[Math.floor((y - laneTop) / 8)];
      if (!list) continue;
      const n = this.schedule.at(list, time);
      if (n >= 0 && time <= this.schedule.end[list[n]]) return list[n];
    }
    return -1;
  }

  // Move the view so that an action can be seen.
  reveal(i) {
    const { start, end } = this.schedule;
    const [from, to] = this.view;
    if (start[i] < from || end[i] > to) {
      const span = Math.max(to - from, (end[i] - start[i]) * 1.2);
      const middle = (start[i] + end[i]) / 2;
      this.setView(middle - span / 2, middle + span / 2);
    }
  }
}
