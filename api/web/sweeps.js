// Sweeps: known jobs measured again and again.
import { ask } from "./api.js";
import { chart } from "./charts.js";
import { bullets, el, table } from "./dom.js";
import { moment, seconds, signed } from "./format.js";
import { paged } from "./plans.js";

const COLUMNS = [
  {
    name: "Sweep",
    head: true,
    wide: true,
    of: (sweep) => el("a", { href: `#/sweep/${encodeURIComponent(sweep.id)}` }, sweep.name),
  },
  { name: "State", of: (sweep) => sweep.state },
  { name: "Next (UTC)", short: true, of: (sweep) => moment(sweep.next_due_at) },
  { name: "Newest run", wide: true, of: (sweep) => sweep.runs[0]?.message ?? sweep.runs[0]?.state },
  { name: "Id", short: true, of: (sweep) => el("code", {}, sweep.id) },
];

export async function sweeps() {
  const list = await paged("sweeps", "Stored sweeps, newest first.", COLUMNS);
  return [
    el("h1", {}, "Sweeps"),
    ...(list ?? [
      el(
        "p",
        {},
        "There are none yet: ",
        el("code", {}, "planner-cli sweep schedule FILE"),
        " or POST /sweeps adds one.",
      ),
    ]),
  ];
}

const LINES = [
  { name: "Layout", head: true, wide: true, of: (line) => line.layout },
  { name: "Job", of: (line) => line.job },
  { name: "Why", of: (line) => line.why },
  {
    name: "Step",
    number: true,
    of: (line) => (line.status === "ok" ? seconds(line.step_seconds) : line.status),
  },
  { name: "Predicted", number: true, of: (line) => seconds(line.predicted_step_seconds) },
  { name: "Since the last run", number: true, of: (line) => signed(line.change) },
  {
    name: "Message",
    of: (line) =>
      line.message ??
      (Object.entries(line.versions_changed ?? {})
        .map(([name, [old, now]]) => `${name} ${old} -> ${now}`)
        .join(", ") ||
        null),
  },
];

// What the layouts' history says, newest change first.
function driftOf(drift) {
  if (!drift) return [];
  const young = drift.too_few_nights?.layouts
    ? el(
        "p",
        {},
        `Too few nights to tell of ${drift.too_few_nights.layouts} layouts: ${drift.too_few_nights.most} of ${drift.too_few_nights.needed} nights.`,
      )
    : null;
  if (drift.threshold === null) return young ? [el("h3", {}, "Drift"), young] : [];
  const said = [
    ...drift.changes.map((change) => `${change.new ? "new" : "stands"}: ${change.statement}`),
    ...drift.hosts.map((host) => host.statement),
    ...(drift.creeps ?? []).map((creep) => creep.statement),
    ...drift.outliers.map(
      (outlier) => `far off this time only: ${outlier.layout} ${signed(outlier.change)}`,
    ),
  ];
  const watched =
    `${drift.layouts} layouts over ${drift.nights} runs, at most one false alarm in ` +
    `${drift.runs_per_false_alarm} runs`;
  return [
    el("h3", {}, "Drift"),
    el("p", {}, said.length ? watched : `${watched}: none`),
    young,
    bullets(said),
  ];
}

function standing(now) {
  const out = now.quarantined.length ? `, kept out: ${now.quarantined.join(", ")}` : "";
  return (
    `${now.layouts} of ${now.num_layouts} layouts, ${now.running} running, ` +
    `${now.failures} failed, ${now.probes} of ${now.max_probes} probes, ` +
    `${Math.round(now.gpu_seconds)} of ${Math.round(now.max_gpu_seconds)} GPU-seconds${out}`
  );
}

export async function oneSweep(id) {
  const path = `sweeps/${encodeURIComponent(id)}`;
  const [sweep, drawing] = await Promise.all([ask(path), ask(`${path}/chart`)]);
  const runs = sweep.runs.map((run) => {
    const lines = (run.report?.jobs ?? []).flatMap((job) =>
      job.layouts.map((line) => ({ ...line, job: `${job.model} on ${job.num_gpus} x ${job.gpu}` })),
    );
    const winners = (run.report?.jobs ?? [])
      .filter((job) => job.new_winner)
      .map((job) => `new winner of ${job.model}: ${job.winner} (before: ${job.winner_before})`);
    const hosts = (run.report?.quarantined ?? []).map(
      (bad) => `host ${bad.host} is kept out for a day: ${bad.evidence.join("; ")}`,
    );
    return el(
      "section",
      {},
      el(
        "h2",
        {},
        `${moment(run.due_at)}: ${run.report?.headline ?? run.progress ?? run.message ?? run.state}`,
      ),
      run.standing && !run.report ? el("p", {}, standing(run.standing)) : null,
      bullets([...winners, ...hosts]),
      ...driftOf(run.report?.drift),
      lines.length
        ? table(`${run.id}, ${run.state}`, LINES, lines, (line) =>
            line.changed ? "differs" : null,
          )
        : null,
    );
  });
  return [
    el("h1", {}, `Sweep ${sweep.name}`),
    el(
      "p",
      { class: "lede" },
      `${sweep.state}${sweep.next_due_at ? `, next at ${moment(sweep.next_due_at)} UTC` : ""}`,
    ),
    drawing.datasets.points.length ? chart(drawing) : el("p", {}, "Nothing was measured yet."),
    ...runs,
  ];
}
