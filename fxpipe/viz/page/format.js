// Numbers as people read them; the same rules as fxpipe/text.py.
const SECONDS = { s: 1, ms: 1e-3, us: 1e-6 };

function numberText(value) {
  if (value === 0 || !isFinite(value)) return String(value);
  if (Math.abs(value) >= 1e7) return value.toPrecision(3);
  const digits = Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value))));
  const text = value.toLocaleString("en-US", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
  return text;
}

function scaledText(value, names) {
  let level = 0;
  while (Math.abs(value) >= 999.5 && level < names.length - 1) { value /= 1000; level += 1; }
  return `${digitsText(value)} ${names[level]}`;
}

function digitsText(value) {
  return Math.abs(value) >= 999.5 ? value.toFixed(0) : String(+value.toPrecision(3));
}

function unitText(value, unit) {
  if (unit === "bytes") return scaledText(value, ["B", "kB", "MB", "GB", "TB", "PB"]);
  if (unit in SECONDS) {
    const seconds = value * SECONDS[unit];
    if (seconds === 0 || Math.abs(seconds) >= 0.9995) return `${digitsText(seconds)} s`;
    return scaledText(seconds * 1e9, ["ns", "us", "ms", "s"]);
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
