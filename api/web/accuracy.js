// Predicted against measured, for the runs in this database.
import { ask } from "./api.js";
import { chart } from "./charts.js";
import { el, table } from "./dom.js";
import { count, seconds, signed } from "./format.js";

const COLUMNS = [
  { name: "Layout", head: true, wide: true, of: (run) => run.layout },
  {
    name: "Job",
    of: (run) => `${run.model} on ${count(run.num_gpus)} x ${run.gpu}, ${run.trainer}`,
  },
  { name: "How", of: (run) => run.rung },
  { name: "Measured", number: true, of: (run) => seconds(run.measured_seconds) },
  { name: "Predicted", number: true, of: (run) => seconds(run.predicted_seconds) },
  { name: "Error", number: true, of: (run) => signed(run.error) },
];

export async function accuracy() {
  const found = await ask("accuracy");
  if (!found.runs.length) {
    return [
      el("h1", {}, "Predicted against measured"),
      el(
        "p",
        {},
        "No measured run is stored here yet. Probes store theirs; ",
        el("code", {}, "planner-cli measurements import"),
        " takes your own.",
      ),
    ];
  }
  return [
    el("h1", {}, "Predicted against measured"),
    el(
      "p",
      { class: "lede" },
      "Runs stored here beside what the calibration that ships predicts, which has learned nothing from them. Marked: further off than the band.",
    ),
    found.refused
      ? el("p", { class: "note" }, `${found.refused} more are given no prediction.`)
      : null,
    chart(found.chart),
    table("Every run, newest first.", COLUMNS, found.runs, (run) =>
      Math.abs(run.error) > found.band ? "differs" : null,
    ),
  ].filter(Boolean);
}
