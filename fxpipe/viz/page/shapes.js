// Boxes with a hatched foot, and arrows, as in the pictures.
const HATCHES = {};

function hatchPattern(context, name) {
  if (!(name in HATCHES)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const paint = tile.getContext("2d");
    paint.strokeStyle = paint.fillStyle = "rgba(0,0,0,0.5)";
    paint.lineWidth = 1.1;
    paint.beginPath();
    if (name === "rising") { paint.moveTo(-1, 7); paint.lineTo(7, -1); }
    else if (name === "falling") { paint.moveTo(-1, -1); paint.lineTo(7, 7); }
    else if (name === "cross") { paint.moveTo(3, 0); paint.lineTo(3, 6); paint.moveTo(0, 3); paint.lineTo(6, 3); }
    else { paint.rect(1, 1, 1.6, 1.6); paint.rect(4, 4, 1.6, 1.6); }
    if (name === "dots") paint.fill(); else paint.stroke();
    HATCHES[name] = context.createPattern(tile, "repeat");
  }
  return HATCHES[name];
}

function drawBox(context, { x, y, width, height, colour, hatch, label, short }) {
  context.fillStyle = colour;
  context.fillRect(x, y, width, height);
  const foot = height * 0.27;
  if (hatch && width > 4) {
    context.fillStyle = hatchPattern(context, hatch);
    context.fillRect(x, y + height - foot, width, foot);
  }
  const room = height - foot;
  if (!label || room < 8) return;
  context.fillStyle = "#1b1f24";
  context.textAlign = "center";
  const size = Math.min(11, room - 1);
  context.font = context.font.replace(/[\d.]+px/, `${size}px`);
  for (const text of [label, short]) {
    if (context.measureText(text).width + 2 <= width) {
      context.fillText(text, x + width / 2, y + room / 2 + 0.36 * size);
      break;
    }
  }
  context.font = context.font.replace(/[\d.]+px/, "11px");
}

function drawArrow(context, x, y, width, height, direction) {
  const point = direction ? Math.min(height / 2, width / 2) : 0;
  context.beginPath();
  if (direction >= 0) {
    context.moveTo(x, y);
    context.lineTo(x + width - point, y);
    context.lineTo(x + width, y + height / 2);
    context.lineTo(x + width - point, y + height);
    context.lineTo(x, y + height);
    if (!direction) { context.rect(x, y, width, height); }
  } else {
    context.moveTo(x + width, y);
    context.lineTo(x + point, y);
    context.lineTo(x, y + height / 2);
    context.lineTo(x + point, y + height);
    context.lineTo(x + width, y + height);
  }
  context.fill();
}
