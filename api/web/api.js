// The service, asked with the key that was typed. Only this origin is ever asked.
const KEY = "planner-key";
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (secret) => sessionStorage.setItem(KEY, secret),
};

const headers = (more = {}) => ({
  ...(key.get() ? { authorization: `Bearer ${key.get()}` } : {}),
  ...more,
});

/** An error of the service: what is wrong by field, and what would pass. */
export class Problem extends Error {
  constructor(body, status) {
    super(
      [
        body.field && `${body.field}:`,
        body.message ?? body.detail,
        body.remedy && `(${body.remedy})`,
      ]
        .filter(Boolean)
        .join(" "),
    );
    this.status = status;
    this.lines = body.detail ? body.detail.split("; ") : [];
    this.body = body;
  }
}

/** What the service answers; a body makes it a POST. Throws Problem. */
export async function ask(path, body, method) {
  const answer = await fetch(path, {
    method: method ?? (body === undefined ? "GET" : "POST"),
    headers: headers({
      accept: "application/json",
      ...(body === undefined ? {} : { "content-type": "application/json" }),
    }),
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const value = await answer.json();
  if (!answer.ok) throw new Problem(value, answer.status);
  return value;
}

/** Server-sent events until the last one, each as (name, data). A header can hold a key, which EventSource cannot send. */
export async function events(path, heard, signal) {
  const answer = await fetch(path, { headers: headers({ accept: "text/event-stream" }), signal });
  if (!answer.ok) throw new Problem(await answer.json(), answer.status);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (waiting + value).split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const lines = Object.fromEntries(
        block
          .split("\n")
          .filter((line) => /^(event|data):/.test(line))
          .map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]),
      );
      if (lines.data) heard(lines.event, JSON.parse(lines.data));
    }
  }
}
