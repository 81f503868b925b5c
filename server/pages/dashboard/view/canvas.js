/** Drawing: canvases as sharp as the screen, and the colours of the page. */

/** The context of a canvas that is as wide as its place and `height` high, cleared. */
export function context(canvas, height) {
  const width = canvas.parentElement.clientWidth;
  const scale = window.devicePixelRatio || 1;
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

const dark = matchMedia("(prefers-color-scheme: dark)");
let known = new Map();
dark.addEventListener("change", () => (known = new Map()));

/** A colour of the style sheet, by the name of its variable. */
export function colour(name) {
  if (!known.has(name)) {
    known.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  }
  return known.get(name);
}

/** Of a sequence, by its id: neighbours differ as much as hues can. */
export function sequenceColour(id, muted = false) {
  const hue = (id * 137.508) % 360;
  const [saturation, light] = dark.matches ? [46, 60] : [50, 54];
  return `hsl(${hue.toFixed(0)} ${saturation}% ${light}% / ${muted ? 0.16 : 1})`;
}

const [SHORTEST, LONGEST] = [20, 120]; // points of a line that is as wide as its tile

/** A line over an area, without axes: for a tile. */
export function spark(canvas, values, top = 0) {
  const { pen, width, height } = context(canvas, 30);
  const shown = values.slice(-LONGEST);
  const most = Math.max(top, ...shown.filter((value) => value !== null), 1e-9);
  const step = width / (Math.max(shown.length, SHORTEST) - 1);
  const path = new Path2D();
  let begun = false;
  shown.forEach((value, place) => {
    if (value === null) return;
    const x = width - (shown.length - 1 - place) * step;
    const y = height - 1.5 - (value / most) * (height - 4);
    if (begun) path.lineTo(x, y);
    else path.moveTo(x, y);
    begun = true;
  });
  pen.strokeStyle = colour("--accent");
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  pen.stroke(path);
}
