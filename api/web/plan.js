// One plan: what wins, by how much, how sure, why, and what to paste.
import { ask } from "./api.js";
import { chart } from "./charts.js";
import { bullets, cards, copyButton, el, table, tell } from "./dom.js";
import {
  bytes,
  count,
  energy,
  mass,
  money,
  moment,
  none,
  percent,
  rate,
  risk,
  seconds,
  value,
} from "./format.js";
import { liveStudy } from "./studies.js";

const SOURCES = {
  screened: "priced by closed form",
  simulated: "its pipeline played out action by action",
  emulated: "smaller runs, or single ranks of it, measured in its place",
  probed: "measured here",
};
const path = (plan, rest) => `plans/${encodeURIComponent(plan.id)}${rest}`;
const named = (thing, name) =>
  typeof thing === "string" ? thing : (thing?.[name] ?? thing?.base ?? thing?.name);

export async function onePlan(id, signal) {
  const plan = await ask(`plans/${encodeURIComponent(id)}`);
  if (plan.ranked) return shown(plan);
  return liveStudy(plan, signal, (done) => {
    tell(`The study is ${done.status}.`);
    if (["done", "cancelled"].includes(done.status)) dispatchEvent(new Event("hashchange"));
  });
}

async function shown(plan) {
  const [pareto, memory, time] = await Promise.all(
    ["pareto", "memory", "time"].map((kind) => ask(path(plan, `/charts/${kind}`))),
  );
  const progress = plan.probing
    ? await ask(path(plan, "/charts/progress")).catch(() => null)
    : null;
  const first = plan.ranked[0];
  return [
    el("h1", {}, first.label),
    el("p", { class: "lede" }, question(plan)),
    el("div", { id: "resting" }, resting(plan)),
    figures(first),
    ranked(plan),
    chart(pareto),
    progress ? chart(progress) : null,
    el("div", { class: "pair" }, chart(memory), chart(time)),
    ...communication(plan),
    ...pipeline(plan),
    ...why(plan),
    ...compare(plan),
    ...current(plan),
    ...warnings(plan),
    ...sizes(plan),
    ...wholeRun(first),
    ...files(plan),
    el("h2", {}, "How it was found"),
    el("p", { class: "note" }, searched(plan)),
    el(
      "p",
      { class: "note" },
      `Plan ${plan.id}, ${moment(plan.created_at)} UTC, calibration ${plan.calibration_id}, model ${plan.model_version}, seed ${plan.seed}. `,
      el("a", { href: "#/new" }, "Ask for another"),
      ".",
    ),
  ].filter(Boolean);
}

function question(plan) {
  const { model, cluster, training = {} } = plan.job;
  const size = plan.num_parameters ? ` (${rate(plan.num_parameters / 1e9)}B parameters)` : "";
  return (
    `${named(model, "name") ?? "the model"}${size} on ${count(plan.ranked[0].num_gpus)} GPUs (${named(named(cluster, "gpu"), "name")}), ` +
    `${count(training.seq_len)} tokens x ${count(training.global_batch_size)} sequences, ${training.trainer ?? "torchtitan"}`
  );
}

function resting(plan) {
  const { fastest_on_paper: paper, best_measured: other } = plan;
  return [
    plan.rests_on ? el("p", { class: "warn" }, `It ${plan.rests_on}.`) : null,
    plan.rests_on && other
      ? el("p", { class: "note" }, `Number ${other.rank}: ${other.label}`)
      : null,
    paper
      ? el(
          "p",
          { class: "note" },
          `Fastest on paper${paper.rank ? ` (number ${paper.rank})` : ""}: ${paper.label}. ${paper.statement}.`,
        )
      : null,
  ];
}

function figures({ shown, estimate }) {
  const predicted = shown.predicted_step_seconds !== null;
  const [fast, slow] = shown.step_interval ?? [];
  const work = shown.tokens_per_second_per_gpu * shown.step_seconds;
  const coverage = percent(estimate.interval?.coverage, 0);
  return cards([
    [
      "Tokens/s/GPU",
      rate(shown.tokens_per_second_per_gpu),
      predicted
        ? `predicted ${rate(estimate.tokens_per_second_per_gpu)}`
        : fast
          ? `${rate(work / slow)} to ${rate(work / fast)}, ${coverage}`
          : "",
    ],
    [
      "Step",
      seconds(shown.step_seconds),
      predicted
        ? `predicted ${seconds(shown.predicted_step_seconds)}`
        : fast
          ? `${seconds(fast)} to ${seconds(slow)}`
          : "",
    ],
    ["MFU", percent(shown.mfu), `HFU ${percent(shown.hfu)}`],
    ["Memory", bytes(shown.device_bytes), `of ${bytes(estimate.usable_bytes)} usable`],
    [
      "Runs out of memory",
      risk(shown.oom_probability),
      `with all of the card ${risk(estimate.oom_probability_full_card)}`,
    ],
  ]);
}

const MINIMISED = {
  cost: [{ name: "Price", number: true, of: (one) => money(one.shown.cost) }],
  energy: [
    {
      name: "J/token",
      number: true,
      of: (one) => (one.run ? String(Number(one.run.joules_per_token.toPrecision(3))) : none),
    },
  ],
};

function ranked(plan) {
  const several = new Set(plan.ranked.map((one) => one.num_gpus)).size > 1;
  const columns = [
    { name: "#", number: true, of: (one) => `${one.rank}${one.unmeasured.length ? "*" : ""}` },
    {
      name: "Layout",
      head: true,
      wide: true,
      of: (one) => (several ? `${count(one.num_gpus)} GPUs: ${one.label}` : one.label),
    },
    {
      name: "tok/s/GPU",
      number: true,
      of: (one) => rate(one.shown.tokens_per_second_per_gpu),
    },
    { name: "MFU", number: true, of: (one) => percent(one.shown.mfu) },
    {
      name: "Step",
      number: true,
      of: (one) => seconds(one.shown.step_seconds),
    },
    { name: "Memory", number: true, of: (one) => bytes(one.shown.device_bytes) },
    { name: "Out of memory", number: true, of: (one) => risk(one.shown.oom_probability) },
    ...(MINIMISED[plan.job.search?.objective] ?? []),
    { name: "Source", short: true, of: (one) => one.source },
  ];
  const sources = Object.keys(SOURCES)
    .filter((name) => plan.ranked.some((one) => one.source === name))
    .map((name) => `${name}: ${SOURCES[name]}`);
  const unmeasured = [...new Set(plan.ranked.flatMap((one) => one.unmeasured))];
  const shown = table("Layouts, best first.", columns, plan.ranked, (one) =>
    one.rank === 1 ? "first" : null,
  );
  shown.id = "ranked";
  return el(
    "section",
    {},
    el("h2", {}, "Layouts"),
    shown,
    el(
      "p",
      { class: "note" },
      `${sources.join("; ")}.${unmeasured.length ? ` * No run behind the calibration used ${unmeasured.join(", ")}.` : ""}`,
    ),
  );
}

const choice = (plan, label, chosen, changed) =>
  el(
    "label",
    {},
    label,
    el(
      "select",
      { on: { change: (event) => changed(Number(event.target.value)) } },
      plan.ranked.map((one) =>
        el(
          "option",
          { value: one.rank, selected: one.rank === chosen },
          `#${one.rank} ${one.label}`,
        ),
      ),
    ),
  );

function communication(plan) {
  const talking = plan.ranked.filter((one) => one.estimate.communication?.length);
  if (!talking.length) return [];
  const columns = [
    { name: "", head: true, of: (row) => row.dimension },
    { name: "Collective", of: (row) => row.operation },
    { name: "Ranks", number: true, of: (row) => count(row.group_size) },
    { name: "Level", of: (row) => row.level },
    { name: "Algorithm", of: (row) => row.algorithm },
    { name: "A step", number: true, of: (row) => count(row.per_step) },
    { name: "Message", number: true, of: (row) => bytes(row.message_bytes) },
    { name: "Sent", number: true, of: (row) => bytes(row.volume_bytes) },
    { name: "Alone", number: true, of: (row) => seconds(row.seconds) },
    { name: "Exposed", number: true, of: (row) => seconds(row.exposed_seconds) },
  ];
  const place = el("div", { id: "communication", "aria-live": "polite" });
  const draw = (rank) => {
    const one = talking.find((entry) => entry.rank === rank);
    place.replaceChildren(
      table(
        "Of one GPU in one step, as predicted. Sent: all that it sends of them. Alone: with nothing beside. Exposed: what the step waits. All-reduces of a few bytes are in the optimizer's time.",
        columns,
        one.estimate.communication,
      ),
    );
  };
  draw(talking[0].rank);
  return [
    el("h2", {}, "What it communicates"),
    choice({ ranked: talking }, "Layout", talking[0].rank, draw),
    place,
  ];
}

function pipeline(plan) {
  const piped = plan.ranked.filter((one) => one.layout.pp > 1);
  if (!piped.length) return [];
  const place = el("div", { id: "timeline", "aria-live": "polite" });
  const draw = async (rank) => {
    place.setAttribute("aria-busy", "true");
    try {
      place.replaceChildren(chart(await ask(path(plan, `/charts/timeline?rank=${rank}`))));
    } catch (error) {
      place.replaceChildren(el("p", { class: "note" }, error.message));
    }
    place.removeAttribute("aria-busy");
  };
  draw(piped[0].rank);
  return [
    el("h2", {}, "The pipeline in time"),
    choice({ ranked: piped }, "Layout", piped[0].rank, draw),
    place,
  ];
}

function why(plan) {
  return [
    el("h2", {}, "Why number 1"),
    bullets(plan.ranked[0].reasons),
    ...(plan.regret && !plan.probing
      ? [el("h3", {}, "How sure"), bullets([plan.regret.statement])]
      : []),
    ...(plan.sensitivity.length ? [steps(plan)] : []),
  ];
}

function steps(plan) {
  const columns = [
    {
      name: "Change",
      head: true,
      wide: true,
      of: (step) => `${step.field} ${value(step.old)} → ${value(step.new)}`,
    },
    {
      name: "Times as fast",
      number: true,
      of: (step) => (step.step_ratio ? (1 / step.step_ratio).toFixed(2) : null),
    },
    { name: "Memory", number: true, of: (step) => bytes(step.device_bytes) },
    { name: "", of: (step) => step.refused ?? (step.fits === false ? "does not fit" : "") },
  ];
  return el(
    "details",
    {},
    el("summary", {}, "One step in each field ", el("small", {}, "what it would change")),
    table("Against number 1.", columns, plan.sensitivity),
  );
}

const FIGURES = [
  ["tokens_per_second_per_gpu", "tokens/s/GPU", rate],
  ["tokens_per_second", "tokens/s in all", rate],
  ["step_seconds", "step", seconds],
  ["predicted_step_seconds", "predicted step", seconds],
  ["time_to_train_seconds", "time to train", seconds],
  ["cost", "price of the run", money],
  ["mfu", "MFU", percent],
  ["hfu", "HFU", percent],
  ["device_bytes", "device memory", bytes],
  ["peak_allocated_bytes", "peak allocated", bytes],
  ["oom_probability", "runs out of memory", risk],
];

function compare(plan) {
  if (plan.ranked.length < 2) return [];
  const place = el("div", { id: "compared", "aria-live": "polite" });
  let chosen = [1, 2],
    asked = 0;
  const draw = async () => {
    const turn = ++asked;
    const [a, b] = chosen.map((rank) => plan.ranked.find((one) => one.rank === rank));
    const explained = await ask(path(plan, `/explain?rank=${b.rank}&versus=${a.rank}`)).catch(
      (error) => ({ lines: [error.message] }),
    );
    if (turn !== asked) return;
    const differs = new Set(Object.keys(explained.changed ?? {}));
    const rows = [
      ...FIGURES.map(([name, words, text]) => ({
        name: words,
        a: text(a.shown[name]),
        b: text(b.shown[name]),
      })),
      ...Object.keys(a.layout).map((name) => ({
        name,
        a: value(a.layout[name]),
        b: value(b.layout[name]),
        differs: differs.has(name),
      })),
    ];
    const columns = [
      { name: "Field", head: true, wide: true, of: (row) => row.name },
      { name: `#${a.rank}`, of: (row) => row.a },
      { name: `#${b.rank}`, of: (row) => row.b },
    ];
    const [figures, fields] = [rows.slice(0, FIGURES.length), rows.slice(FIGURES.length)];
    const alike = fields.filter((row) => !row.differs);
    place.replaceChildren(
      bullets(explained.lines.slice(2)) ?? "",
      table(
        "Figures, and the fields that differ.",
        columns,
        [...figures, ...fields.filter((row) => row.differs)],
        (row) => (row.differs ? "differs" : null),
      ),
      el(
        "details",
        {},
        el("summary", {}, `${alike.length} fields are alike`),
        table("Fields that both have alike.", columns, alike),
      ),
    );
  };
  const pick = (side) => (rank) => {
    chosen[side] = rank;
    draw();
  };
  draw();
  return [
    el("h2", {}, "Any two compared"),
    el(
      "div",
      { class: "row" },
      choice(plan, "This", 1, pick(0)),
      choice(plan, "against", 2, pick(1)),
    ),
    place,
  ];
}

function current(plan) {
  const versus = plan.versus_current;
  if (!versus) return [];
  const times = versus.times_as_fast;
  return [
    el("h2", {}, "Against what runs today"),
    el("p", {}, versus.label),
    el(
      "p",
      {},
      times
        ? `Number 1 is ${times.toFixed(2)} times as fast.${versus.keep ? " The gain cannot be told from the model's uncertainty: keep it." : ""}`
        : "It cannot run as it stands.",
    ),
    bullets([
      ...versus.violations.map((v) => `${v.field} = ${value(v.value)}: ${v.rule}; ${v.remedy}`),
      ...versus.reasons,
      ...versus.notes,
    ]),
    versus.diff
      ? el(
          "div",
          {},
          copyButton(versus.diff, "Copy the change"),
          el("pre", { tabindex: "0" }, versus.diff),
        )
      : null,
  ].filter(Boolean);
}

const blocked = (entry) =>
  Object.entries(entry.export).flatMap(([trainer, exported]) =>
    (exported.blockers ?? []).map(
      (b) => `#${entry.rank}, ${trainer}: ${b.field} = ${value(b.value)}: ${b.rule}; ${b.remedy}`,
    ),
  );

function warnings(plan) {
  const lines = plan.ranked.flatMap(blocked);
  if (!plan.warnings.length && !lines.length) return [];
  return [
    el("h2", {}, "Warnings"),
    bullets(plan.warnings, "warn"),
    ...(lines.length
      ? [el("h3", {}, "What cannot be written for its trainer"), bullets(lines)]
      : []),
  ].filter(Boolean);
}

function sizes(plan) {
  if (plan.sizes.length < 2) return [];
  const columns = [
    {
      name: "GPUs",
      head: true,
      number: true,
      of: (one) => `${count(one.num_gpus)}${one.on_front ? "*" : ""}`,
    },
    { name: "tok/s", number: true, of: (one) => rate(one.tokens_per_second) },
    { name: "Time", number: true, of: (one) => seconds(one.time_to_train_seconds) },
    { name: "Price", number: true, of: (one) => money(one.cost) },
    { name: "Energy", number: true, of: (one) => energy(one.energy_joules) },
    { name: "CO2", number: true, of: (one) => mass(one.co2_grams) },
    { name: "Layout", wide: true, of: (one) => one.label },
  ];
  return [
    el("h2", {}, "Price and size"),
    table(
      "The best layout of each number of GPUs. * No other size is both sooner done and cheaper.",
      columns,
      plan.sizes,
      (one) => (one.num_gpus === plan.ranked[0].num_gpus ? "first" : null),
    ),
  ];
}

function wholeRun({ run, num_gpus: gpus }) {
  if (!run) return [];
  return [
    el("h2", {}, `The whole run: ${rate(run.tokens / 1e9)}B tokens`),
    cards([
      [
        "Time to train",
        seconds(run.time_to_train_seconds),
        `${rate(run.tokens_per_second)} tokens/s on ${count(gpus)} GPUs`,
      ],
      [
        "Goodput",
        percent(run.goodput, 2),
        `${percent(run.saving_share, 2)} saving, ${percent(run.lost_share, 2)} redone`,
      ],
      ["Price", money(run.cost), `${count(run.gpu_hours)} GPU-hours`],
      ["Energy", energy(run.energy_joules), `${mass(run.co2_grams)} CO2`],
    ]),
    el("p", { class: "note" }, `${run.assumptions.join("; ")}.`),
  ];
}

function files(plan) {
  const place = el("div", { id: "files" });
  const draw = (rank) => {
    const entry = plan.ranked.find((one) => one.rank === rank);
    place.replaceChildren(
      ...Object.entries(entry.export)
        .flatMap(([trainer, exported]) => {
          const command = (exported.command ?? []).join(" ");
          return [
            el("h3", {}, `Run it with ${trainer} ${exported.version ?? ""}`),
            bullets(exported.notes ?? []),
            ...(command
              ? [
                  el(
                    "div",
                    { class: "file" },
                    copyButton(command, "Copy the command"),
                    el("pre", { tabindex: "0" }, command),
                  ),
                ]
              : []),
            ...Object.entries(exported.files ?? {}).map(([name, text]) =>
              el(
                "details",
                { class: "file" },
                el(
                  "summary",
                  {},
                  name,
                  " ",
                  el("small", {}, `${count(text.split("\n").length)} lines`),
                ),
                copyButton(text, "Copy"),
                el("pre", { tabindex: "0" }, text),
              ),
            ),
          ];
        })
        .filter(Boolean),
    );
    place.querySelector("details")?.setAttribute("open", "");
  };
  draw(1);
  return [el("h2", {}, "To run it"), choice(plan, "Layout", 1, draw), place];
}

function searched({ searched: found, rejected }) {
  const reasons = Object.entries(rejected)
    .map(([reason, number]) => `${reason}: ${count(number)}`)
    .join("; ");
  return (
    `Looked at ${count(found.layouts)} legal layouts: ${count(found.priced)} priced (the others cannot win), ${count(found.fitting)} fit; ` +
    `${count(found.simulated)} simulated, in ${seconds(found.seconds)}.${reasons ? ` Rejected: ${reasons}.` : ""}`
  );
}
