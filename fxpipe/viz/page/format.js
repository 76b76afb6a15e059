// Numbers as people read them; the same rules as fxpipe/viz/drawing/numbers.py.
const SECONDS = { s: 1, ms: 1e-3, us: 1e-6 };

function numberText(value) {
  if (value === 0 || !isFinite(value)) return String(value);
  if (Math.abs(value) >= 1e7) return value.toPrecision(3);
  const digits = Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value))));
  const text = value.toLocaleString("en-US", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
  return text;
}

function scaledText(value, base, names) {
  let level = 0;
  while (Math.abs(value) >= base * 0.9995 && level < names.length - 1) { value /= base; level += 1; }
  const digits = level === 0 && Number.isInteger(value) ? 0 : Math.abs(value) < 10 ? 2 : 1;
  return `${value.toFixed(digits)} ${names[level]}`;
}

function unitText(value, unit) {
  if (unit === "bytes") return scaledText(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  if (unit in SECONDS) {
    const seconds = value * SECONDS[unit];
    for (const [size, name] of [[1, "s"], [1e-3, "ms"]]) {
      if (Math.abs(seconds) >= size * 0.9995) return `${+(seconds / size).toPrecision(4)} ${name}`;
    }
    return `${+(seconds / 1e-6).toPrecision(4)} µs`;
  }
  return unit ? `${numberText(value)} ${unit}` : numberText(value);
}

function percentText(share) { return `${(100 * share).toFixed(1)}%`; }

function niceTicks(start, end, most) {
  const rough = (end - start) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10, 20].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(start / step - 1e-9); n * step <= end * 1.0001; n += 1) ticks.push(n * step);
  return ticks;
}

function mixColours(colour, other, share) {
  const part = (text, i) => parseInt(text.slice(i, i + 2), 16);
  const mixed = [1, 3, 5].map((i) => Math.round(part(colour, i) + (part(other, i) - part(colour, i)) * share));
  return `rgb(${mixed.join(",")})`;
}
