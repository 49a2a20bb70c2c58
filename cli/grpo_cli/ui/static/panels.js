// The views of completions, of ranks and pods, and of conditions and events.

import { $, bytes, duration, empty, h, number, table } from "/dom.js";

const PHASES = ["generate", "reward", "journal", "gather", "train", "sync", "agree", "prompts"];
const LATE = 1.5; // times the mean of all ranks

let step = null; // null: the newest

export function showCompletions(host, rows) {
  if (!rows.length) {
    host.replaceChildren(empty("No completion yet", "Each step keeps some completions for reading."));
    return;
  }
  const steps = [...new Set(rows.map((row) => row.step))];
  const shown = step !== null && steps.includes(step) ? step : steps.at(-1);
  const redraw = (to) => {
    step = to === steps.at(-1) ? null : to;
    showCompletions(host, rows);
  };
  const place = steps.indexOf(shown);
  // The slider is not replaced while it is dragged.
  let slider = host.querySelector("input[type=range]");
  if (!slider) {
    slider = h("input", { type: "range", min: 0, "aria-label": "Step" });
    host.replaceChildren(h("div", { class: "tools", id: "stepper" }), h("div", { id: "answers" }));
    host.querySelector("#stepper").append(
      h("button", { type: "button", title: "Step before" }, "‹"),
      slider,
      h("button", { type: "button", title: "Next step" }, "›"),
      h("output", {}),
    );
  }
  const [before, next] = host.querySelectorAll("#stepper button");
  slider.max = steps.length - 1;
  slider.value = place;
  slider.oninput = () => redraw(steps[Number(slider.value)]);
  before.onclick = () => redraw(steps[Math.max(0, place - 1)]);
  next.onclick = () => redraw(steps[Math.min(steps.length - 1, place + 1)]);
  before.disabled = place === 0;
  next.disabled = place === steps.length - 1;
  host.querySelector("#stepper output").textContent = `step ${shown + 1}${step === null ? ", the newest" : ""}`;
  const key = JSON.stringify([shown, rows.filter((row) => row.step === shown).length]);
  const answers = host.querySelector("#answers");
  if (answers.dataset.key === key) return;
  answers.dataset.key = key;
  answers.replaceChildren(...rows.filter((row) => row.step === shown).map(answer));
}

function answer(row) {
  const messages = typeof row.prompt === "string" ? [{ role: "prompt", content: row.prompt }] : (row.prompt ?? []);
  const sign = row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "";
  return h(
    "article",
    { class: "card answer" },
    h(
      "div",
      { class: "scores" },
      score("reward", number(row.reward), ""),
      score("advantage", row.advantage > 0 ? `+${number(row.advantage)}` : number(row.advantage), sign),
      facts(row.episode ?? {}),
    ),
    h("div", { class: "talk" }, messages.map((message) => said(message.role, content(message.content))), turns(row.completion ?? "", row.episode ?? {}), lost(row.episode ?? {})),
  );
}

const score = (name, value, sign) => h("div", { class: `score ${sign}` }, h("span", { class: "quiet" }, name), h("b", {}, value));
const said = (role, text, more = "") =>
  h("div", { class: `said ${role === "completion" ? "own" : ""}` }, h("span", { class: "quiet" }, `${role}${more}`), h("pre", {}, text));
// Of an episode, each turn with its calls, and each result. Tokens are counted by turn, and of all results after it.
function turns(completion, episode) {
  if (typeof completion === "string") return said("completion", completion);
  const counts = [...(episode.tokens ?? [])];
  return completion.map((message, place) => {
    const own = message.role === "assistant";
    const first = own || completion[place - 1]?.role === "assistant";
    const count = first && counts.length ? ` · ${counts.shift()} tokens${own ? "" : " read"}` : "";
    const name = message.name ? ` ${message.name}` : "";
    const calls = (message.tool_calls ?? []).map((call) => `→ ${call.function.name}(${content(call.function.arguments)})`);
    return said(own ? "completion" : message.role, [message.content, ...calls].filter(Boolean).map(content).join("\n"), `${name}${count}`);
  });
}
const lost = (episode) => (episode.lost ? h("p", { class: "bad" }, `lost (${episode.lost}), counts nowhere: ${episode.failure}`) : "");
const facts = (episode) =>
  [
    episode.turns !== undefined && score("turns", String(episode.turns), ""),
    episode.calls !== undefined && score(episode.failed_calls ? `calls, ${episode.failed_calls} failed` : "calls", String(episode.calls), ""),
    episode.calls > 0 && score("in calls", duration(episode.call_seconds), ""),
    episode.wait_seconds >= 0.1 && score("waited for a session", duration(episode.wait_seconds), ""),
    episode.retries > 0 && score("began again", String(episode.retries), ""),
    episode.is_truncated && score("truncated", "yes", ""),
  ].filter(Boolean);
const content = (value) => (typeof value === "string" ? value : JSON.stringify(value));

export function showRanks(host, ranks, job) {
  const parts = [];
  if (job?.groups.length) parts.push(groups(job));
  if (ranks) parts.push(rankTable(ranks, job));
  if (job?.pods?.length) parts.push(podTable(job));
  host.replaceChildren(
    ...(parts.length ? parts : [empty("No data of ranks yet", "Ranks report their part of a step when the step is finished.")]),
  );
}

function groups(job) {
  const rows = job.groups.map((group) => [
    group.name,
    group.role,
    job.shapes[group.name] ? `${job.shapes[group.name]} GPUs` : "–",
    h("span", { class: group.ready < group.desired ? "bad" : "good" }, `${group.ready} of ${group.desired} ready`),
    group.incarnation ? `recreated ${group.incarnation} times` : "",
  ]);
  const missing = job.troubles.map((trouble) =>
    h("p", {}, h("b", {}, trouble.pods.join(", ")), trouble.ranks ? ` (ranks ${trouble.ranks})` : "", `: ${trouble.cause}`),
  );
  return h("article", { class: "card wide" }, h("h3", {}, h("span", {}, "groups")), table(["group", "role", "pods", "", ""], rows), missing);
}

function rankTable(row, job) {
  const podOf = new Map((job?.pods ?? []).flatMap((pod) => pod.ranks.map((rank) => [rank, pod])));
  const work = row.ranks.map((rank) => ["prompts", "generate", "reward", "journal"].reduce((sum, name) => sum + (rank.seconds[name] ?? 0), 0));
  const mean = work.reduce((sum, seconds) => sum + seconds, 0) / work.length;
  const slowest = work.indexOf(Math.max(...work));
  const longest = Math.max(...row.ranks.map((rank) => PHASES.reduce((sum, name) => sum + (rank.seconds[name] ?? 0), 0)));
  const rows = row.ranks.map((rank, index) => {
    const late = index === slowest && row.ranks.length > 1 && work[index] > mean * LATE;
    const use = rank.gpu_utilization;
    return [
      h("span", {}, String(rank.rank), late ? h("span", { class: "badge warn" }, "the others wait for it") : ""),
      podOf.has(rank.rank) ? podOf.get(rank.rank).name : "–",
      h("div", { class: "phases", title: "seconds by phase" }, PHASES.map((name, at) => phase(rank, name, at, longest))),
      number(rank.generated_tokens_per_second),
      number(rank.trained_tokens),
      use === undefined || use === null ? "–" : `${number(use)} %`,
      bytes(rank.memory_used_peak),
    ];
  });
  const heads = ["rank", "pod", "seconds by phase", "generated tokens/s", "trained tokens", "GPU use", "peak memory"];
  const told = heads.map((_, column) => rows.some((cells) => cells[column] !== "–"));
  const legend = PHASES.map((name, at) => h("span", {}, h("i", { class: `part-${at}` }), name));
  return h(
    "article",
    { class: "card wide", id: "rank-table" },
    h("h3", {}, h("span", {}, `ranks in step ${row.step + 1}`)),
    table(
      heads.filter((_, column) => told[column]),
      rows.map((cells) => cells.filter((_, column) => told[column])),
    ),
    h("div", { class: "legend" }, legend),
  );
}

function phase(rank, name, at, longest) {
  const seconds = rank.seconds[name] ?? 0;
  const part = h("span", { class: `part-${at}`, title: `${name} ${duration(seconds)}` });
  part.style.width = `${(100 * seconds) / (longest || 1)}%`;
  return part;
}

function podTable(job) {
  const rows = job.pods.map((pod) => [
    pod.name,
    pod.ranks.length ? `${pod.ranks[0]}${pod.ranks.length > 1 ? `–${pod.ranks.at(-1)}` : ""}` : "–",
    pod.node || "–",
    h("span", { class: pod.ready ? "good" : "" }, pod.ready ? "ready" : pod.phase),
    pod.waiting,
  ]);
  return h("article", { class: "card wide" }, h("h3", {}, h("span", {}, "pods")), table(["pod", "ranks", "node", "state", ""], rows));
}

export function showEvents(host, job, logs) {
  $("tab-events").hidden = !job && !Object.keys(logs).length;
  readKeptLogs(JSON.stringify(logs));
  const kept = readLogs.map(([pod, text]) =>
    h("article", { class: "card wide" }, h("h3", {}, h("span", {}, `end of the log of ${pod}`)), h("pre", {}, text)),
  );
  if (!job) {
    host.replaceChildren(...kept);
    return;
  }
  const conditions = job.conditions.map((one) => [
    one.type,
    h("span", { class: one.status === "True" && one.type === "Failed" ? "bad" : "" }, one.status),
    one.reason,
    one.message,
    ago(one.lastTransitionTime ?? one.last_transition_time),
  ]);
  const events = job.events.map((event) => [
    `${duration(event.seconds_ago)} ago`,
    h("span", { class: event.is_warning ? "bad" : "" }, event.reason),
    event.about,
    event.message,
  ]);
  host.replaceChildren(
    h("article", { class: "card wide" }, h("h3", {}, h("span", {}, "conditions")), table(["condition", "", "reason", "", "since"], conditions)),
    events.length
      ? h("article", { class: "card wide" }, h("h3", {}, h("span", {}, "events")), table(["when", "reason", "about", ""], events))
      : empty("No events", "The cluster keeps events for an hour."),
    ...kept,
  );
}

let readLogs = [];
let readSums = "{}";

async function readKeptLogs(sums) {
  if (sums === readSums) return;
  const answer = await fetch("/api/logs");
  if (answer.ok) [readSums, readLogs] = [sums, Object.entries(await answer.json())];
}

const ago = (moment) => (moment ? `${duration((Date.now() - Date.parse(moment)) / 1000)} ago` : "");

export function banners(state) {
  const found = [];
  const job = state.job;
  if (state.error) {
    const old = state.age === null ? "Nothing has been read yet." : `What is shown is from ${duration(state.age)} ago.`;
    found.push(banner("bad", "The source does not answer", `${state.error} ${old}`));
  }
  if (job?.failure) {
    const failure = job.failure;
    const whose = [failure.pod, failure.node].filter(Boolean).join(" on ");
    found.push(
      h(
        "div",
        { class: "banner bad", id: "failure" },
        h("b", {}, `${failure.reason}${whose ? `: ${whose}` : ""}`),
        h("span", { class: "quiet" }, ` attempt ${failure.attempt}, ${duration(job.failure_seconds)} ago`),
        h("pre", {}, failure.message),
      ),
    );
  }
  if (job && (job.why || job.cure) && !["Running", "Succeeded"].includes(job.phase)) {
    found.push(banner("warn", job.reason || job.phase, `${job.why}${job.cure ? ` What to do: ${job.cure}.` : ""}`));
  }
  if (job?.training?.advice) found.push(banner("", "Advice", job.training.advice));
  if (state.note) found.push(banner("", "", state.note));
  return found;
}

const banner = (kind, title, text) => h("div", { class: `banner ${kind}` }, title ? h("b", {}, title) : "", " ", text);
