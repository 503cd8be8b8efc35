// Numbers as the command line writes them.
const UNITS = [
  ["TiB", 2 ** 40],
  ["GiB", 2 ** 30],
  ["MiB", 2 ** 20],
  ["KiB", 2 ** 10],
];

export const none = "-";
const missing = (value) => value === null || value === undefined;
const three = (value) =>
  Math.abs(value) >= 99.95
    ? Math.round(Number(value.toPrecision(3))).toLocaleString("en")
    : String(Number(value.toPrecision(3)));

export const rate = (value) =>
  missing(value) ? none : value >= 100 ? Math.round(value).toLocaleString("en") : three(value);
export const percent = (share, digits = 1) =>
  missing(share) ? none : `${(100 * share).toFixed(digits)}%`;
export const risk = (share) =>
  missing(share) ? none : share < 0.001 ? "under 0.1%" : percent(share);
export const count = (value) => (missing(value) ? none : Math.round(value).toLocaleString("en"));
export const money = (dollars) =>
  missing(dollars) ? none : dollars >= 100 ? `$${count(dollars)}` : `$${dollars.toFixed(2)}`;
export const moment = (text) => (text ? `${text.slice(0, 10)} ${text.slice(11, 16)}` : none);

export function bytes(value) {
  if (missing(value)) return none;
  const [unit, size] = UNITS.find(([, size]) => Math.abs(value) >= size) ?? ["B", 1];
  return `${(value / size).toFixed(size > 1 ? 1 : 0)} ${unit}`;
}

export function seconds(value) {
  if (missing(value)) return none;
  if (value >= 2 * 86400) return `${(value / 86400).toFixed(1)} d`;
  if (value >= 2 * 3600) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 999.5) return `${Math.round(value)} s`;
  const [unit, size] = [
    ["s", 1],
    ["ms", 1e-3],
    ["us", 1e-6],
  ].find(([, size]) => value >= 0.9995 * size) ?? ["us", 1e-6];
  return `${three(value / size)} ${unit}`;
}

export const energy = (joules) => {
  if (missing(joules)) return none;
  const kwh = joules / 3.6e6;
  return kwh >= 1000 ? `${three(kwh / 1000)} MWh` : `${three(kwh)} kWh`;
};
export const mass = (grams) =>
  missing(grams) ? none : grams >= 1e6 ? `${three(grams / 1e6)} t` : `${three(grams / 1e3)} kg`;
export const signed = (share) =>
  missing(share) ? none : `${share > 0 ? "+" : ""}${percent(share)}`;
/** Numbers with repeats shortened: 9, 10, 10 and 9 become "9,10x2,9". */
const runs = (numbers) => {
  const found = [];
  for (const one of numbers) {
    const last = found.at(-1);
    if (last?.one === one) last.count += 1;
    else found.push({ one, count: 1 });
  }
  return found.map(({ one, count }) => (count > 1 ? `${one}x${count}` : one)).join(",");
};
export const value = (any) =>
  any === null ? "none" : Array.isArray(any) ? runs(any) : typeof any === "object" ? JSON.stringify(any) : String(any);
