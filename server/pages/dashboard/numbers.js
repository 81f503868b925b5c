/** Numbers as text; a unit stays on the line of its number. */

const NO_BREAK = "\u00a0";

export const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

/** With at most three digits that count: 0.42, 7.3, 128, 1,024. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${number(Math.round(value))}${NO_BREAK}s`;
  if (value >= 1) return `${value.toFixed(value >= 10 ? 1 : 2)}${NO_BREAK}s`;
  if (value >= 0.001) return `${number(value * 1000)}${NO_BREAK}ms`;
  return `${number(value * 1e6)}${NO_BREAK}µs`;
}

export function bytes(value) {
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= unit) return `${number(value / unit)}${NO_BREAK}${name}`;
  }
  return `${value} bytes`;
}

export function percent(share) {
  return share === null || Number.isNaN(share) ? "–" : `${number(Math.round(share * 1000) / 10)}${NO_BREAK}%`;
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}
