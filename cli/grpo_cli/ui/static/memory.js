// The view of memory: what `grpo plan` says of the job, for the GPU that is chosen here.

import { empty, h, table } from "/dom.js";

const GIB = 2 ** 30;
const LEAST = GIB / 100; // bytes of the smallest part that has a row

let gpu = ""; // the job's own, or that of --gpu

export async function showMemory(host, gpus) {
  if (!host.firstChild) {
    const choose = (event) => {
      gpu = event.target.value;
      host.lastChild.replaceChildren();
      showMemory(host, gpus);
    };
    const names = [h("option", { value: "" }, "as the job or --gpu says"), gpus.map((name) => h("option", { value: name }, name))];
    host.append(h("label", { class: "tools" }, "GPU", h("select", { onchange: choose }, names.flat())), h("div"));
  }
  const asked = gpu;
  let found;
  try {
    const answer = await fetch(`/api/plan?gpu=${asked}`);
    found = answer.ok ? await answer.json() : { state: "failed", error: await answer.text() };
  } catch {
    return; // the page says above that the server has ended
  }
  const key = JSON.stringify(found);
  if (asked !== gpu || (host.lastChild.firstChild && host.dataset.key === key)) return;
  host.dataset.key = key;
  host.lastChild.replaceChildren(...{ "GPU unknown": unknown, pending, failed, made }[found.state](found));
}

const unknown = () => [empty("Which GPU?", "Neither --gpu nor the pods' node selectors say it: choose one above.")];
const pending = () => [empty("Planning", "The model's configuration is read and its passes are counted. This takes seconds.")];
const failed = (found) => [empty("No plan", found.error)];
const made = (found) => [h("article", { class: "card wide" }, h("pre", { id: "verdict" }, found.lines.join("\n"))), ...found.plan.places.map(place)];

function place(one) {
  const phases = Object.keys(one.phases);
  const sums = phases.map((phase) => Object.values(one.phases[phase]).reduce((sum, size) => sum + size, 0));
  if (!sums.some(Boolean)) return "";
  const parts = new Set(phases.flatMap((phase) => Object.entries(one.phases[phase]).flatMap(([name, size]) => (size >= LEAST ? [name] : []))));
  const rows = [...parts].map((name) => [name, ...phases.map((phase) => gib(one.phases[phase][name] ?? 0))]);
  const total = ["total", ...sums.map(gib)].map((text) => h("b", {}, text));
  const limit = one.limit === null ? "" : `of ${(one.limit / GIB).toFixed(1)} GiB`;
  const title = h("h3", {}, h("span", {}, `${one.name}${one.isHost ? " host memory" : ""}, GiB`), h("output", {}, limit));
  return h("article", { class: "card wide" }, title, table(["", ...phases], [...rows, total]));
}

const gib = (size) => (size >= LEAST ? (size / GIB).toFixed(2) : "");
