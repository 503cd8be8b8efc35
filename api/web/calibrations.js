// What the numbers rest on.
import { ask } from "./api.js";
import { bullets, el, table } from "./dom.js";
import { count, percent } from "./format.js";

const three = (value) => Number(value.toPrecision(3));
const KNOBS = [
  { name: "Knob", head: true, wide: true, of: (knob) => knob.name },
  { name: "Of", of: (knob) => knob.of ?? `every ${knob.scope} without runs` },
  { name: "Before", number: true, of: (knob) => three(knob.prior) },
  { name: "Now", number: true, of: (knob) => three(knob.value) },
  { name: "Uncertainty", number: true, of: (knob) => three(knob.shift_sd) },
];
const COLUMNS = [
  { name: "Calibration", head: true, wide: true, of: (one) => one.id },
  { name: "In use", of: (one) => (one.in_use ? "yes" : "no") },
  {
    name: "Learned for",
    of: (one) => (one.trainer ? `${one.trainer} on ${one.gpu}` : "everything (it ships)"),
  },
  { name: "Runs", number: true, of: (one) => count(one.runs) },
  { name: "A stack's spread", number: true, of: (one) => percent(one.stack_sd) },
  { name: "A run's spread", number: true, of: (one) => percent(one.run_sd) },
  { name: "Memory's spread", number: true, of: (one) => percent(one.memory_sd) },
];

export async function calibrations() {
  const { items } = await ask("calibrations?limit=50");
  return [
    el("h1", {}, "Calibrations"),
    el(
      "p",
      { class: "lede" },
      "What estimates rest on: the calibration that ships, and those learned from runs measured here. Spreads are of measured over predicted.",
    ),
    table("The one in use first.", COLUMNS, items),
    ...items.map((one) =>
      el(
        "details",
        {},
        el("summary", {}, one.id, " ", el("small", {}, `${one.knobs.length} knobs`)),
        bullets(
          Object.entries(one.own_runs).map(
            ([unit, runs]) => `${count(runs)} runs of one's own: ${unit}`,
          ),
        ),
        table("Each knob before and after the measured runs.", KNOBS, one.knobs),
      ),
    ),
  ];
}
