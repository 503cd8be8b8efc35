// Elements from plain values. What the service says is set as text, never as markup.

/** An element. properties: attributes; `on` holds listeners, `class` its classes. */
export function el(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "on")
      for (const [event, heard] of Object.entries(value)) element.addEventListener(event, heard);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(key, value);
  }
  element.append(
    ...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/**
 * A table that becomes a list of cards on narrow screens.
 * columns: {name, of: (row) => text or element, number, wide, short, head}; `head` is the row's header.
 */
export function table(caption, columns, rows, kindOf = () => null) {
  const cells = (row) =>
    columns.map(({ name, of, number, wide, short, head }) =>
      el(
        head ? "th" : "td",
        {
          role: head ? "rowheader" : "cell",
          scope: head ? "row" : null,
          "data-label": name,
          class:
            [number && "number", wide && "wide", short && "short"].filter(Boolean).join(" ") ||
            null,
        },
        of(row) ?? "-",
      ),
    );
  return el(
    "table",
    { class: "stacks", role: "table" },
    el("caption", {}, caption),
    el(
      "thead",
      { role: "rowgroup" },
      el(
        "tr",
        { role: "row" },
        columns.map(({ name, number }) =>
          el("th", { scope: "col", role: "columnheader", class: number ? "number" : null }, name),
        ),
      ),
    ),
    el(
      "tbody",
      { role: "rowgroup" },
      rows.map((row) => el("tr", { role: "row", class: kindOf(row) }, cells(row))),
    ),
  );
}

export const bullets = (lines, kind = null) =>
  lines.length
    ? el(
        "ul",
        { class: ["plain", kind].filter(Boolean).join(" ") },
        lines.map((line) => el("li", {}, line)),
      )
    : null;

/** Figures side by side: [name, value, note]. */
export const cards = (figures) =>
  el(
    "dl",
    { class: "cards" },
    figures.map(([name, value, note]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value), note ? el("dd", {}, note) : null),
    ),
  );

export function copyButton(text, label) {
  const button = el(
    "button",
    {
      type: "button",
      on: {
        click: async () => {
          try {
            await navigator.clipboard.writeText(text);
            button.textContent = "Copied";
          } catch {
            button.textContent = "Select the text and copy it";
          }
          setTimeout(() => {
            button.textContent = label;
          }, 2000);
        },
      },
    },
    label,
  );
  return button;
}

export const tell = (words, kind = "") => {
  const status = document.getElementById("status");
  status.textContent = words;
  status.className = kind;
};
