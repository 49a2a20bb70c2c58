// Other runs whose curves stand in the same charts: their list, the chosen ones, and their rows.

import { h, number } from "/dom.js";

const SECONDS = 5;
const COLOURS = 8;

const chosen = new Map(); // name -> { colour, metrics, error }
const list = h("div", { class: "choices" });
const legend = h("span", { class: "legend" });
const details = h("details", { class: "picker" }, h("summary", {}, "Compare with"), list);
let redraw = () => {};

export const comparePicker = h("div", { class: "compare", id: "compare", hidden: true }, details, legend);

export function onCompare(draw) {
  redraw = draw;
}

// The curves of a metric, of all chosen runs that have it.
export function compared(metric) {
  return [...chosen]
    .map(([name, { colour, metrics }]) => ({ name, colour, rows: metrics.filter((row) => typeof row[metric] === "number") }))
    .filter(({ rows }) => rows.length)
    .map(({ name, colour, rows }) => ({ name, colour, steps: rows.map((row) => row.step), values: rows.map((row) => row[metric]) }));
}

// The values of such curves at the step nearest to a given one, or their last ones.
export function valuesOf(runs, step) {
  return runs.map(({ name, colour, steps, values }) => {
    const at = step === null ? values.length - 1 : steps.reduce((best, one, index) => (Math.abs(one - step) < Math.abs(steps[best] - step) ? index : best), 0);
    return h("span", { title: `${name}, step ${steps[at] + 1}` }, h("i", { class: `part-${colour}` }), number(values[at]));
  });
}

async function names() {
  const answer = await fetch("/api/others");
  if (!answer.ok) return;
  const found = await answer.json();
  comparePicker.hidden = !found.length;
  list.replaceChildren(
    ...found.map((name) => {
      const box = h("input", { type: "checkbox", checked: chosen.has(name), value: name });
      box.addEventListener("change", () => choose(name, box.checked));
      return h("label", {}, box, name);
    }),
  );
}

function choose(name, isChosen) {
  if (isChosen) {
    const taken = [...chosen.values()].map((run) => run.colour);
    const free = [...Array(COLOURS).keys()].find((colour) => !taken.includes(colour)) ?? chosen.size % COLOURS;
    chosen.set(name, { colour: free, metrics: [], error: "" });
    read(name);
  } else {
    chosen.delete(name);
    show();
  }
}

async function read(name) {
  const run = chosen.get(name);
  try {
    const answer = await fetch(`/api/curves?run=${encodeURIComponent(name)}`);
    if (!answer.ok) throw new Error(await answer.text());
    const { metrics, note } = await answer.json();
    Object.assign(run, { metrics, error: metrics.length ? "" : note });
  } catch (error) {
    run.error = error.message;
  }
  show();
}

function show() {
  legend.replaceChildren(
    ...[...chosen].map(([name, run]) => h("span", {}, h("i", { class: `part-${run.colour}` }), run.error ? `${name}: ${run.error}` : name)),
  );
  redraw();
}

async function follow() {
  if (!document.hidden) await Promise.all([...chosen.keys()].map(read));
  setTimeout(follow, 1000 * SECONDS);
}

details.addEventListener("toggle", () => details.open && names());
names();
follow();
