// A new plan: a form made of the job's schema, and the job as text; each follows the other.
import { ask } from "./api.js";
import { bullets, el, tell } from "./dom.js";

const EXAMPLE = {
  model: "llama3-8b",
  cluster: { gpu: "h100-sxm-80gb", num_gpus: 64 },
  training: { seq_len: 8192, global_batch_size: 256 },
};
const FIRST = [
  ["model", null],
  ["cluster", "gpu"],
  ["cluster", "num_gpus"],
  ["training", "seq_len"],
  ["training", "global_batch_size"],
  ["training", "trainer"],
  ["search", "objective"],
];
const TITLES = {
  model: "Model",
  cluster: "Cluster",
  training: "Training",
  layout: "Layout that runs today",
  search: "Search",
  probe: "Probes",
  current: "Your trainer's own file",
};
const LISTS = { "model.": "models", "cluster.gpu": "gpus", "training.trainer": "defaults" };
const words = (name) => name.replaceAll("_", " ");

export async function newPlan() {
  const [schema, ...lists] = await Promise.all([
    ask("jobs/schema"),
    ...["models", "gpus", "defaults"].map((kind) => ask(`catalog/${kind}`)),
  ]);
  let job = structuredClone(EXAMPLE);
  const inputs = new Map(); // "part.field" -> every input of it
  const text = el("textarea", { rows: 16, spellcheck: "false", "aria-describedby": "text-help" });
  const faults = el("div", { role: "alert" });
  const button = el("button", { class: "main" }, "Plan");

  const shapeOf = (part) =>
    schema.properties[part].anyOf?.find((one) => one.type === "object") ?? schema.properties[part];
  const get = (part, field) => (field === null ? job[part] : job[part]?.[field]);
  const spelled = (any) =>
    any === undefined ? "" : typeof any === "object" ? JSON.stringify(any) : String(any);
  const write = () => {
    text.value = JSON.stringify(job, null, 2);
  };

  function set(part, field, given) {
    if (field === null) {
      if (given === undefined) delete job[part];
      else job[part] = given;
    } else {
      const inner = job[part] && typeof job[part] === "object" ? { ...job[part] } : {};
      if (given === undefined) delete inner[field];
      else inner[field] = given;
      if (Object.keys(inner).length) job[part] = inner;
      else delete job[part];
    }
    write();
    fill();
  }

  /** What was typed: a number, a JSON list or mapping, a truth value, or the words themselves. */
  function meant(typed) {
    const trimmed = typed.trim();
    if (trimmed === "") return undefined;
    try {
      return JSON.parse(trimmed);
    } catch {
      /* words, such as 400 Gb/s */
    }
    if (/^\d+(\s*,\s*\d+)+$/.test(trimmed)) return trimmed.split(",").map(Number);
    return trimmed;
  }

  function fill() {
    for (const [path, found] of inputs) {
      const [part, field] = path.split(".");
      const shown = spelled(get(part, field || null));
      for (const input of found)
        if (document.activeElement !== input || input.tagName === "SELECT") input.value = shown;
    }
  }

  function control(part, field) {
    const shape = field === null ? schema.properties[part] : shapeOf(part).properties[field];
    const kinds = [shape, ...(shape.anyOf ?? [])].map((one) =>
      one.$ref ? schema.$defs[one.$ref.split("/").pop()] : one,
    );
    const choices =
      kinds.find((one) => one.enum)?.enum ??
      (kinds.some((one) => one.type === "boolean") ? [true, false] : null);
    const path = `${part}.${field ?? ""}`;
    const unset =
      shape.default === undefined || shape.default === null
        ? "not set"
        : `not set (${spelled(shape.default)})`;
    const input = choices
      ? el(
          "select",
          {},
          el("option", { value: "" }, unset),
          choices.map((one) => el("option", { value: String(one) }, String(one))),
        )
      : el("input", { list: LISTS[path] ?? null, placeholder: unset, autocomplete: "off" });
    input.addEventListener("change", () => set(part, field, meant(input.value)));
    inputs.set(path, [...(inputs.get(path) ?? []), input]);
    return el(
      "label",
      {},
      words(field ?? part),
      input,
      shape.description ? el("small", {}, shape.description) : null,
    );
  }

  const section = (part) =>
    el(
      "details",
      {},
      el(
        "summary",
        {},
        `${TITLES[part]} `,
        el("small", {}, schema.properties[part].description ?? ""),
      ),
      el("div", { class: "fields" }, [
        ...(schema.properties[part].anyOf ? [control(part, null)] : []),
        ...Object.keys(shapeOf(part).properties).map((field) => control(part, field)),
      ]),
    );

  async function read(content, name) {
    faults.replaceChildren();
    try {
      const found = await ask("jobs/read", { text: content, name });
      // a part of a job, or a trainer's file, is put into what is here already
      job = found.kind === "job" ? found.job : { ...job, ...found.job };
      if ("current" in found.job) for (const part of ["training", "layout"]) delete job[part];
      write();
      fill();
      tell(`Read as ${found.kind}.`);
      const still = found.wrong.filter(({ field }) => !(field.split(".")[0] in job));
      if (still.length)
        faults.replaceChildren(
          el("p", { class: "warn" }, "Still to say:"),
          bullets(still.map((one) => `${one.field} ${one.message}; ${one.remedy}`)),
        );
    } catch (error) {
      faults.replaceChildren(bullets(error.lines?.length ? error.lines : [error.message], "wrong"));
    }
  }

  const file = el("input", {
    type: "file",
    on: {
      change: async () => {
        if (file.files[0]) await read(await file.files[0].text(), file.files[0].name);
      },
    },
  });
  const drop = el(
    "div",
    { class: "drop" },
    el(
      "label",
      {},
      "A config.json, a TorchTitan TOML, command or log, a Megatron-LM script, or a job in YAML or JSON: drop it here, or choose it",
      file,
    ),
  );
  for (const name of ["dragenter", "dragover"])
    drop.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  for (const name of ["dragleave", "drop"])
    drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", async (event) => {
    event.preventDefault();
    const [dropped] = event.dataTransfer.files;
    if (dropped) await read(await dropped.text(), dropped.name);
    else await read(event.dataTransfer.getData("text"), "pasted");
  });
  text.addEventListener("change", async () => {
    try {
      job = JSON.parse(text.value);
      fill();
      faults.replaceChildren();
    } catch {
      await read(text.value, "pasted");
    }
  });

  async function plan(event) {
    event.preventDefault();
    button.disabled = true;
    faults.replaceChildren();
    tell("Planning …");
    try {
      const { id } = await ask("plan", job);
      location.hash = `#/plan/${encodeURIComponent(id)}`;
    } catch (error) {
      tell("");
      faults.replaceChildren(
        el("p", { class: "wrong" }, error.status === 409 ? "Nothing fits:" : "This has to change:"),
        bullets(error.lines?.length ? error.lines : [error.message]),
      );
      faults.scrollIntoView({ block: "nearest" });
    } finally {
      button.disabled = false;
    }
  }

  const form = el(
    "form",
    { id: "job", on: { submit: plan } },
    el(
      "div",
      { class: "fields" },
      FIRST.map(([part, field]) => control(part, field)),
    ),
    el("div", { class: "row" }, button),
    faults,
    drop,
    el("h2", {}, "Every field"),
    el(
      "p",
      { class: "note" },
      "What is not set comes from the GPU, the trainer and its release. Quantities take units: 400 Gb/s, 80 GiB, 700 W.",
    ),
    Object.keys(TITLES).map(section),
    el("h2", {}, "The job as text"),
    el(
      "label",
      {},
      "JSON, or YAML to be read",
      text,
      el(
        "small",
        { id: "text-help" },
        "What POST /plan takes, and ",
        el("code", {}, "planner-cli recommend --job FILE"),
        ". The form above follows it.",
      ),
    ),
    lists.map((list) =>
      el(
        "datalist",
        { id: list.kind },
        list.items.map(({ name }) => el("option", { value: name })),
      ),
    ),
  );
  write();
  fill();
  return [
    el("h1", {}, "New plan"),
    el(
      "p",
      { class: "lede" },
      "The layouts that train this model fastest on this cluster, and how sure that is.",
    ),
    form,
  ];
}
