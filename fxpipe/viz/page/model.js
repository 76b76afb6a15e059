// One schedule's data, unpacked: spans by rank and lane, dependencies both ways.
class Schedule {
  constructor(raw, kinds) {
    Object.assign(this, raw);
    this.kinds = kinds;
    this.count = raw.start.length;
    this.waits = raw.waits;
    this.feeds = Array.from({ length: this.count }, () => []);
    raw.waits.forEach((sources, target) => sources.forEach((source) => this.feeds[source].push(target)));
    this.critical = new Set(raw.critical);
    this.rows = Array.from({ length: raw.ranks }, () => ({ compute: [], lanes: [] }));
    for (let i = 0; i < this.count; i += 1) {
      const row = this.rows[raw.rank[i]];
      if (raw.lane[i] < 0) row.compute.push(i);
      else (row.lanes[raw.lane[i]] ??= []).push(i);
    }
    this.hasTransfers = this.rows.some((row) => row.lanes.length > 0);
  }

  partsOf(i) { return this.parts[i] ?? [[this.kind[i], this.stage[i], this.microbatch[i]]]; }

  isTransfer(i) { return this.peer[i] >= 0; }

  // The text form of an action, such as 2F0 or 1RECV_F3.
  actionText(i) {
    const parts = this.partsOf(i).map(([kind, stage, microbatch]) => {
      return `${stage}${this.kinds[kind].text}${microbatch < 0 ? "" : microbatch}`;
    });
    return parts.length > 1 ? `(${parts.join(";")})` : parts[0];
  }

  describe(i) {
    const words = this.partsOf(i).map(([kind, stage, microbatch]) => {
      let text = `${this.kinds[kind].name}, stage ${stage}`;
      if (microbatch >= 0) text += `, microbatch ${microbatch}`;
      return text;
    });
    if (this.isTransfer(i)) {
      words[0] += `, ${this.kinds[this.kind[i]].sends ? "to" : "from"} stage ${this.peer[i]}`;
    }
    return words;
  }

  colourOf(kind, stage) { return mixColours(this.kinds[kind].colour, "#ffffff", this.tones[stage] ?? 0.3); }

  // The last span of a sorted list that starts at or before a time.
  at(list, time) {
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[list[middle]] <= time) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  memoryAt(rank, time) {
    const curve = this.memory[rank];
    let held = 0;
    for (let i = 0; i < curve.length && curve[i] <= time; i += 2) held = curve[i + 1];
    return held;
  }
}
