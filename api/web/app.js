// Which part of the page is shown: the address after "#" says it, so that every view is a link.
import { key } from "./api.js";
import { el, tell } from "./dom.js";
import { accuracy } from "./accuracy.js";
import { calibrations } from "./calibrations.js";
import { newPlan } from "./new.js";
import { onePlan } from "./plan.js";
import { plans } from "./plans.js";
import { studies } from "./studies.js";
import { oneSweep, sweeps } from "./sweeps.js";

const ROUTES = {
  plans,
  plan: onePlan,
  new: newPlan,
  studies,
  sweeps,
  sweep: oneSweep,
  accuracy,
  calibrations,
};
const SECTION = { plan: "plans", sweep: "sweeps" };
const main = document.getElementById("main");
let leave = null;

async function show(first = false) {
  const [, name = "plans", ...rest] = location.hash.replace(/^#\/?/, "/").split("/");
  // an address of before: the id of a plan alone
  const [route, id] =
    name in ROUTES ? [name, rest.join("/")] : name ? ["plan", name] : ["plans", ""];
  leave?.abort();
  leave = new AbortController();
  const { signal } = leave;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${SECTION[route] ?? route}`)
      link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  tell("Loading …");
  try {
    const view = await ROUTES[route](decodeURIComponent(id), signal);
    if (signal.aborted) return;
    main.replaceChildren(...view);
    tell("");
  } catch (error) {
    if (signal.aborted) return;
    const needsKey = error.status === 401;
    main.replaceChildren(
      el("h1", {}, needsKey ? "This service has keys" : "That did not work"),
      el("p", { class: "wrong" }, error.message),
      needsKey ? el("p", {}, "Type yours into the field at the top.") : null,
    );
    tell("");
  }
  document.title = `${main.querySelector("h1")?.textContent ?? "planner"} · planner`;
  main.dataset.shown = `${route}/${id}`;
  if (!first) main.focus();
}

const form = document.getElementById("key");
form.key.value = key.get();
form.addEventListener("submit", (event) => event.preventDefault());
form.key.addEventListener("change", () => {
  key.set(form.key.value);
  show();
});
addEventListener("hashchange", () => show());
show(true);
