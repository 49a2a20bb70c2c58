// The view of curves: chosen metrics, their cards, and the seconds of a step by phase.

import { bars, line } from "/charts.js";
import { compared, comparePicker, onCompare, valuesOf } from "/compare.js";
import { duration, empty, h, number, remember, remembered } from "/dom.js";

const FIRST = [
  "reward",
  "rewards/accuracy/mean",
  "eval/reward",
  "reward_std",
  "kl",
  "trained/entropy",
  "completions/mean_length",
  "completions/clipped_ratio",
  "loss",
  "grad_norm",
  "frac_reward_zero_std",
  "trained/sampling/kl",
  "tokens_per_second",
  "padding_fraction",
  "ranks/imbalance",
];
const PHASES = ["generate", "reward", "journal", "gather", "train", "sync", "agree", "prompts"];

let chosen = remembered("metrics", null);
let smooth = remembered("smooth", false);
let hover = null;
let drawn = null;

export function showCurves(host, rows, each) {
  if (!rows.length) {
    drawn = null;
    host.replaceChildren(empty("No step yet", "Curves begin with the first finished optimizer step. This page updates itself."));
    return;
  }
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => name !== "step" && !name.startsWith("time/"));
  const wanted = (chosen ?? FIRST).filter((name) => names.includes(name));
  const key = JSON.stringify([names, wanted, smooth]);
  if (drawn?.key !== key || !host.contains(drawn.root)) {
    drawn = { key, ...build(host, names, wanted) };
  }
  drawn.rows = rows;
  drawn.each.textContent = each > 1 ? `each point is the mean of ${each} steps` : "";
  draw();
}

function build(host, names, wanted) {
  const cards = wanted.map((name) => {
    const value = h("output", {});
    const picture = h("div", { class: "picture" });
    const others = h("div", { class: "legend" });
    const head = h("h3", {}, h("span", {}, name), value);
    return { name, value, picture, others, root: h("article", { class: "card", "data-metric": name }, head, picture, others) };
  });
  const phases = { value: h("output", {}), picture: h("div", { class: "picture" }), legend: h("div", { class: "legend" }) };
  const each = h("span", { class: "quiet" });
  const root = h(
    "div",
    {},
    h("div", { class: "tools" }, picker(host, names, wanted), toggle(host), comparePicker, each),
    h("div", { class: "cards" }, cards.map((card) => card.root)),
    h(
      "article",
      { class: "card wide", id: "phases" },
      h("h3", {}, h("span", {}, "seconds of a step by phase, rank 0"), phases.value),
      phases.picture,
      phases.legend,
    ),
  );
  host.replaceChildren(root);
  return { root, cards, phases, each, rows: [] };
}

function picker(host, names, wanted) {
  const count = h("span", { class: "quiet" }, ` ${wanted.length} of ${names.length}`);
  const boxes = names.map((name) => {
    const box = h("input", { type: "checkbox", checked: wanted.includes(name), value: name });
    box.addEventListener("change", () => {
      chosen = [...list.querySelectorAll("input:checked")].map((input) => input.value);
      chosen.sort((one, other) => order(one) - order(other));
      remember("metrics", chosen);
      count.textContent = ` ${chosen.length} of ${names.length}`;
    });
    return h("label", {}, box, name);
  });
  const list = h("div", { class: "choices" }, boxes);
  const details = h("details", { class: "picker" }, h("summary", {}, "Metrics", count), list);
  // Cards change when the list is closed, so that the list does not move while it is open.
  details.addEventListener("toggle", () => {
    if (!details.open && drawn) showCurves(host, drawn.rows, 1);
  });
  return details;
}

const order = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);

function toggle(host) {
  const box = h("input", { type: "checkbox", checked: smooth });
  box.addEventListener("change", () => {
    smooth = box.checked;
    remember("smooth", smooth);
    showCurves(host, drawn.rows, 1);
  });
  return h("label", { class: "toggle" }, box, "smooth");
}

export function draw() {
  if (!drawn?.rows.length || !drawn.root.isConnected || drawn.root.offsetParent === null) return;
  const steps = drawn.rows.map((row) => row.step);
  const onhover = (step) => {
    if (step !== hover) {
      hover = step;
      requestAnimationFrame(draw);
    }
  };
  const at = hover === null ? null : drawn.rows.reduce((best, row) => (Math.abs(row.step - hover) < Math.abs(best.step - hover) ? row : best));
  for (const card of drawn.cards) {
    const values = drawn.rows.map((row) => row[card.name] ?? null);
    const value = at ? (at[card.name] ?? null) : (values.findLast((one) => one !== null) ?? null);
    card.value.textContent = at ? `step ${at.step + 1}: ${number(value)}` : number(value);
    if (!values.some((one) => one !== null)) continue;
    // Evaluations are some steps apart: a line joins them.
    const kept = values.map((_, index) => index).filter((index) => !card.name.startsWith("eval/") || values[index] !== null);
    const shown = { steps: kept.map((index) => steps[index]), values: kept.map((index) => values[index]) };
    const others = compared(card.name);
    line(card.picture, { ...shown, others, hover, onhover, smooth, name: card.name });
    card.others.replaceChildren(...valuesOf(others, hover));
  }
  drawPhases(steps, onhover);
}

function drawPhases(steps, onhover) {
  const parts = PHASES.map((name, index) => ({ name, index, values: drawn.rows.map((row) => row[`time/${name}`] ?? null) })).filter((part) =>
    part.values.some((value) => value !== null),
  );
  drawn.phases.picture.closest("article").hidden = !parts.length;
  if (!parts.length) return;
  const column = bars(drawn.phases.picture, { steps, parts, hover, onhover });
  const total = column.sizes.reduce((sum, size) => sum + size, 0);
  drawn.phases.value.textContent = `step ${column.step + 1}: ${duration(total)}`;
  drawn.phases.legend.replaceChildren(
    ...parts.map((part, index) => h("span", {}, h("i", { class: `part-${part.index}` }), `${part.name} ${duration(column.sizes[index])}`)),
  );
}

onCompare(draw);
