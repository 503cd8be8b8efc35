// Plans that probes are spent on: which there are, and one as it goes.
import { ask, events } from "./api.js";
import { chart } from "./charts.js";
import { bullets, cards, el, table, tell } from "./dom.js";
import { count, moment, percent, seconds } from "./format.js";
import { PLAN_COLUMNS, paged } from "./plans.js";

const PROBE_COLUMNS = [
  { name: "Layout", head: true, wide: true, of: (probe) => probe.layout },
  { name: "Job", of: (probe) => `${probe.model} on ${count(probe.num_gpus)} x ${probe.gpu}` },
  {
    name: "State",
    of: (probe) =>
      el(
        "span",
        { class: "badge" },
        probe.failure ? `${probe.state}: ${probe.failure}` : probe.state,
      ),
  },
  { name: "Progress", of: (probe) => probe.message ?? probe.progress },
  {
    name: "Plan",
    of: (probe) =>
      probe.plan_id
        ? el("a", { href: `#/plan/${encodeURIComponent(probe.plan_id)}` }, probe.plan_id)
        : null,
  },
  { name: "Asked (UTC)", short: true, of: (probe) => moment(probe.created_at) },
];

export async function studies() {
  const open = await paged(
    "plans?open=true",
    "Plans that probes are being spent on.",
    PLAN_COLUMNS,
  );
  const probes = await paged(
    "probes",
    "Layouts measured, or waiting for it, newest first.",
    PROBE_COLUMNS,
  );
  return [
    el("h1", {}, "Studies"),
    ...(open ?? [
      el("p", {}, "No study is running. A job with ", el("code", {}, "probe"), " starts one."),
    ]),
    el("h2", {}, "Probes"),
    ...(probes ?? [el("p", {}, "Nothing was probed yet.")]),
  ];
}

const WORDS = { asked: "probe", told: "measured", stopped: "stopped" };

/** A study as it goes; `ended` is called with its last event. */
export function liveStudy(plan, signal, ended) {
  const figures = el("div", { "aria-live": "polite" });
  const drawing = el("div", {});
  let waiting = false;
  // many results may come at once, at the start all of them: they are drawn together
  const redraw = () => {
    if (waiting) return;
    waiting = true;
    setTimeout(async () => {
      waiting = false;
      const spec = await ask(`plans/${encodeURIComponent(plan.id)}/charts/progress`).catch(
        () => null,
      );
      if (spec?.datasets.points.length && !signal.aborted) drawing.replaceChildren(chart(spec));
    }, 200);
  };
  const log = el("tbody", { role: "rowgroup" });
  const probes = el("tbody", { role: "rowgroup" });
  const known = new Map();
  const cell = (name, text, wide) =>
    el("td", { role: "cell", "data-label": name, class: wide ? "wide" : null }, text ?? "-");
  const head = (...names) =>
    el(
      "thead",
      { role: "rowgroup" },
      el(
        "tr",
        { role: "row" },
        names.map((name) => el("th", { scope: "col", role: "columnheader" }, name)),
      ),
    );
  const heard = (name, data) => {
    if (name === "study") {
      figures.replaceChildren(
        cards([
          ["Probes", `${data.probes} of ${data.probes + data.probes_left}`],
          ["Best so far", seconds(data.best_step_seconds), "seconds of a step"],
          ["Expected regret", percent(data.expected_regret)],
          ["GPU-seconds left", count(data.gpu_seconds_left)],
        ]),
      );
      if (data.event === "told") redraw();
      log.prepend(
        el(
          "tr",
          { role: "row" },
          cell("", WORDS[data.event] ?? data.event),
          cell("Layout", data.layout, true),
          cell("What happened", data.message),
          cell("At (UTC)", moment(data.at)),
        ),
      );
    } else if (name === "probe") {
      const row = el(
        "tr",
        { role: "row" },
        cell("Probe", data.id, true),
        cell("State", data.state),
        cell("Progress", data.message ?? data.progress),
      );
      known.get(data.id)?.replaceWith(row) ?? probes.prepend(row);
      known.set(data.id, row);
    } else if (name === "done") ended(data);
  };
  events(`plans/${encodeURIComponent(plan.id)}/events`, heard, signal).catch((error) => {
    if (!signal.aborted) tell(error.message, "wrong");
  });
  const cancel = el(
    "button",
    {
      type: "button",
      on: {
        click: async () => {
          cancel.disabled = true;
          await ask(`plans/${encodeURIComponent(plan.id)}`, undefined, "DELETE").catch((error) =>
            tell(error.message, "wrong"),
          );
        },
      },
    },
    "End with the best so far",
  );
  return [
    el("h1", {}, `Study ${plan.id}`),
    el("p", { class: "lede" }, `${plan.status}${plan.progress ? `: ${plan.progress}` : ""}`),
    plan.message ? bullets([plan.message], "wrong") : null,
    figures,
    drawing,
    ["queued", "running"].includes(plan.status) ? cancel : null,
    el(
      "table",
      { class: "stacks", role: "table" },
      el("caption", {}, "What the study did, newest first."),
      head("", "Layout", "What happened", "At (UTC)"),
      log,
    ),
    el(
      "table",
      { class: "stacks", role: "table" },
      el("caption", {}, "Its probes."),
      head("Probe", "State", "Progress"),
      probes,
    ),
  ].filter(Boolean);
}
