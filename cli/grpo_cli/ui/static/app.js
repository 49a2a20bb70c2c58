// Requests new rows every few seconds, and shows them.

import { draw, showCurves } from "/curves.js";
import { $, duration, number, remember, remembered } from "/dom.js";
import { showMemory } from "/memory.js";
import { banners, showCompletions, showEvents, showRanks } from "/panels.js";

const SECONDS = 2;
const SECONDS_ENDED = 15;
const SECONDS_IDLE = 120;
const STEPS_IDLE = 5; // without a step for this many step times, the page is not shown as live
const MAX_POINTS = 2500; // with more, all steps are requested again, averaged
const MAX_COMPLETIONS = 2000;
const VIEWS = ["curves", "completions", "ranks", "memory", "events"];
const THEMES = ["system", "light", "dark"];

const data = { generation: 0, metrics: [], completions: [], ranks: null, each: 1, state: null };
let heard = null;

async function poll() {
  let wait = SECONDS;
  try {
    const after = data.metrics.length > MAX_POINTS ? -1 : (data.metrics.at(-1)?.step ?? -1);
    const answer = await fetch(`/api/state?generation=${data.generation}&after=${after}`);
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    take(await answer.json());
    heard = Date.now();
    if (data.state.job?.ended) wait = SECONDS_ENDED;
  } catch (error) {
    data.state = { ...(data.state ?? { note: "", job: null, age: null }), error: `grpo ui has ended (${error.message}): start it again.` };
  }
  show();
  setTimeout(poll, 1000 * (document.hidden ? SECONDS_ENDED : wait));
}

function take(state) {
  if (state.generation !== data.generation || state.after === -1) {
    data.metrics = [];
    data.completions = [];
  }
  data.generation = state.generation;
  data.metrics.push(...state.metrics);
  data.completions = [...data.completions, ...state.completions].slice(-MAX_COMPLETIONS);
  data.ranks = state.ranks;
  if (state.after === -1) data.each = state.each;
  data.state = state;
}

function show() {
  const state = data.state;
  document.title = `${state.title ?? "grpo"} · grpo`;
  $("title").textContent = state.title ?? "grpo";
  $("where").textContent = state.where ?? "";
  $("banners").replaceChildren(...banners(state));
  showPhase(state);
  $("tab-memory").hidden = !state.gpus;
  showEvents($("events"), state.job, state.logs ?? {});
  const view = current();
  for (const name of VIEWS) {
    $(name).hidden = name !== view;
    $(`tab-${name}`).setAttribute("aria-selected", String(name === view));
  }
  if (view === "curves") showCurves($("curves"), data.metrics, data.each);
  if (view === "completions") showCompletions($("completions"), data.completions);
  if (view === "ranks") showRanks($("ranks"), data.ranks, state.job);
  if (view === "memory") showMemory($("memory"), state.gpus);
}

function showPhase(state) {
  const job = state.job;
  const last = data.metrics.at(-1);
  $("phase").hidden = !job;
  if (job) {
    $("phase").textContent = job.phase;
    $("phase").className = `badge ${{ Failed: "bad", Invalid: "bad", Restarting: "warn", Running: "good", Succeeded: "good" }[job.phase] ?? ""}`;
  }
  const training = job?.training;
  const step = training?.step ?? (last ? last.step + 1 : null);
  $("progress").hidden = step === null;
  $("progress").classList.toggle("open", !training);
  if (step !== null) {
    const total = training?.total_steps;
    $("done").style.width = total ? `${(100 * step) / total}%` : "0";
    const parts = [total ? `step ${step} of ${total}` : `step ${step}`];
    if (last) parts.push(`reward ${number(last.reward)}`, `${duration(last.step_time)} a step`);
    if (training?.eta_seconds) parts.push(`${duration(training.eta_seconds)} to go`);
    if (job?.restarts) parts.push(`restarts: ${job.restarts}`);
    if (job?.bill) parts.push(job.bill);
    $("progress-text").textContent = parts.join(" · ");
  }
  const idle = job ? job.training?.idle_seconds : state.idle;
  const isIdle = idle > Math.max(SECONDS_IDLE, STEPS_IDLE * (last?.step_time ?? 0)) || job?.ended;
  $("live").textContent = state.error ? "not live" : !isIdle ? "live" : idle ? `last step ${duration(idle)} ago` : "ended";
  $("live").className = `live ${state.error ? "bad" : isIdle ? "" : "good"}`;
  $("live").title = heard ? `last answer ${new Date(heard).toLocaleTimeString()}` : "";
}

const current = () => {
  const wanted = location.hash.slice(1);
  return VIEWS.includes(wanted) && !$(`tab-${wanted}`).hidden ? wanted : "curves";
};

function theme(next) {
  const chosen = THEMES.includes(next) ? next : "system";
  document.documentElement.dataset.theme = chosen;
  $("theme").textContent = { system: "◐ system", light: "☀ light", dark: "☾ dark" }[chosen];
  remember("theme", chosen);
}

theme(remembered("theme", "system"));
$("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
document.querySelectorAll("nav [data-view]").forEach((tab) => tab.addEventListener("click", () => (location.hash = tab.dataset.view)));
addEventListener("hashchange", () => data.state && show());
addEventListener("resize", () => requestAnimationFrame(draw));
poll();
