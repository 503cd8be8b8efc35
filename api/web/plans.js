// All plans, newest first, a page at a time.
import { ask } from "./api.js";
import { el, table } from "./dom.js";
import { count, moment, rate } from "./format.js";

/** What the job trains with; nothing of a plan that an earlier version kept. */
const training = (plan) =>
  plan.seq_len
    ? `, ${count(plan.seq_len)} tokens x ${count(plan.global_batch_size)} sequences, ${plan.trainer}`
    : "";

export const PLAN_COLUMNS = [
  {
    name: "Job",
    head: true,
    wide: true,
    of: (plan) =>
      el(
        "a",
        { href: `#/plan/${encodeURIComponent(plan.id)}` },
        `${plan.model} on ${count(plan.num_gpus)} x ${plan.gpu}${training(plan)}`,
      ),
  },
  {
    name: "Layout",
    wide: true,
    of: (plan) => plan.layout ?? el("span", { class: "badge" }, plan.status),
  },
  { name: "tok/s/GPU", number: true, of: (plan) => rate(plan.tokens_per_second_per_gpu) },
  { name: "Made (UTC)", short: true, of: (plan) => moment(plan.created_at) },
  { name: "State", short: true, of: (plan) => plan.status },
  { name: "Id", short: true, of: (plan) => el("code", {}, plan.id) },
];

/** path of a list: its first page, and a button for each page after it. */
export async function paged(path, caption, columns) {
  const page = (cursor) =>
    ask(`${path}${path.includes("?") ? "&" : "?"}limit=50${cursor ? `&cursor=${cursor}` : ""}`);
  let { items, next_cursor: next } = await page();
  if (!items.length) return null;
  const shown = table(caption, columns, items);
  const more = el(
    "button",
    {
      type: "button",
      on: {
        click: async () => {
          more.disabled = true;
          const answer = await page(next);
          const rows = table("", columns, answer.items).querySelectorAll("tbody tr");
          shown.querySelector("tbody").append(...rows);
          rows[0]?.querySelector("a")?.focus();
          next = answer.next_cursor;
          more.disabled = false;
          more.hidden = !next;
        },
      },
    },
    "Show older",
  );
  more.hidden = !next;
  return [shown, more];
}

export async function plans() {
  const list = await paged(
    "plans",
    "Stored plans, and those that probes are still spent on, newest first.",
    PLAN_COLUMNS,
  );
  return [
    el("h1", {}, "Plans"),
    ...(list ?? [
      el("p", {}, "There are none yet. ", el("a", { href: "#/new" }, "Ask for the first one"), "."),
    ]),
  ];
}
