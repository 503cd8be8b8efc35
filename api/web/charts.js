// Draws the service's Vega-Lite specifications; the scheme of the page gives the colours of ink.
import { el } from "./dom.js";

let loading = null;
const drawn = new Set();
const dark = matchMedia("(prefers-color-scheme: dark)");
const MANY = 1500; // marks beyond which pixels are faster than elements

function vega() {
  loading ??= new Promise((resolve, reject) => {
    const script = el("script", { src: "web/vega.js" });
    script.addEventListener("load", () => resolve(window.vegaEmbed));
    script.addEventListener("error", () => reject(new Error("the charts' script did not load")));
    document.head.append(script);
  });
  return loading;
}

function inked(config, width) {
  const style = getComputedStyle(document.documentElement);
  const [ink, soft, line] = ["--ink", "--soft", "--line"].map((name) =>
    style.getPropertyValue(name).trim(),
  );
  return {
    ...config,
    background: null,
    text: { ...config.text, color: ink },
    rule: { color: soft },
    axis: {
      ...config.axis,
      labelColor: soft,
      titleColor: soft,
      titleFontWeight: "normal",
      gridColor: line,
      gridOpacity: 1,
    },
    legend: { ...config.legend, labelColor: ink, columns: Math.max(2, Math.floor(width / 125)) },
    title: { ...config.title, color: ink, subtitleColor: soft },
  };
}

async function embed(place, spec) {
  const embedded = await vega();
  const marks = Object.values(spec.datasets ?? {}).reduce((sum, rows) => sum + rows.length, 0);
  const { title, ...untitled } = spec; // the page has the title as a caption
  const shown = { ...untitled, width: "container", config: inked(spec.config, place.clientWidth) };
  await embedded(place, shown, {
    actions: false,
    ast: true,
    defaultStyle: false,
    renderer: marks > MANY ? "canvas" : "svg",
    tooltip: { disableDefaultStyle: true },
    logLevel: 1,
  });
}

/** A figure with the chart, drawn when it has a place on the page. */
export function chart(spec) {
  const place = el("div", { class: "chart", role: "img", "aria-label": spec.description });
  const entry = { place, spec };
  drawn.add(entry);
  requestAnimationFrame(() =>
    embed(place, spec).catch((error) => place.replaceChildren(error.message)),
  );
  return el(
    "figure",
    {},
    el("figcaption", {}, spec.title.text),
    spec.title.subtitle ? el("p", { class: "note" }, spec.title.subtitle) : null,
    place,
  );
}

dark.addEventListener("change", () => {
  for (const entry of drawn) {
    if (entry.place.isConnected) embed(entry.place, entry.spec);
    else drawn.delete(entry);
  }
});
