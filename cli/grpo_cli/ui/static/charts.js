// Curves and stacked bars as SVG, redrawn when the data, the width or the step under the pointer changes.

import { duration, number, svg } from "/dom.js";

const HEIGHT = 150;
const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;
const BARS = 140;
const SMOOTHING = 0.8;

export function line(host, { steps, values, others, hover, onhover, smooth, name }) {
  const known = [values, ...others.map((other) => other.values)].flat().filter((value) => value !== null);
  const all = others.length ? [...new Set([steps, ...others.map((other) => other.steps)].flat())].sort((one, two) => one - two) : steps;
  const width = host.clientWidth || 320;
  const [low, high] = spread(Math.min(...known), Math.max(...known));
  const x = scale(all[0], all.at(-1), LEFT, width - RIGHT);
  const y = scale(low, high, HEIGHT - BOTTOM, TOP);
  const picture = frame(width, { x, y, steps: all, ticks: ticks(low, high, 4), text: number, label: `${name} by step` });
  for (const other of others) {
    const shown = smooth && other.values.length > 2 ? smoothed(other.values) : other.values;
    picture.append(svg("path", { class: `compared stroke-${other.colour}`, d: path(other.steps, shown, x, y) }));
  }
  if (smooth && known.length > 2) {
    picture.append(svg("path", { class: "line faint", d: path(steps, values, x, y) }));
    picture.append(svg("path", { class: "line", d: path(steps, smoothed(values), x, y) }));
  } else {
    picture.append(svg("path", { class: "line", d: path(steps, values, x, y) }));
  }
  const at = hover === null ? lastKnown(values) : nearest(steps, hover);
  if (values[at] !== null && values[at] !== undefined) {
    if (hover !== null) picture.append(svg("line", { class: "cross", x1: x(steps[at]), x2: x(steps[at]), y1: TOP, y2: HEIGHT - BOTTOM }));
    picture.append(svg("circle", { class: "dot", cx: x(steps[at]), cy: y(values[at]), r: 3.5 }));
  }
  listen(picture, all, width, onhover);
  host.replaceChildren(picture);
}

export function bars(host, { steps, parts, hover, onhover }) {
  const width = host.clientWidth || 640;
  const each = Math.max(1, Math.ceil(steps.length / BARS));
  const columns = [];
  for (let first = 0; first < steps.length; first += each) {
    const last = Math.min(first + each, steps.length);
    columns.push({ step: steps[last - 1], sizes: parts.map((part) => mean(part.values.slice(first, last))) });
  }
  const totals = columns.map((column) => column.sizes.reduce((sum, size) => sum + size, 0));
  const high = Math.max(...totals) || 1;
  const y = scale(0, high, HEIGHT - BOTTOM, TOP);
  const slot = (width - LEFT - RIGHT) / columns.length;
  const middle = (index) => LEFT + slot * (index + 0.5);
  const places = columns.map((column) => column.step);
  const x = (step) => middle(nearest(places, step));
  const picture = frame(width, { x, y, steps: places, ticks: ticks(0, high, 3), text: duration, label: "seconds of a step by phase" });
  const chosen = hover === null ? -1 : nearest(places, hover);
  columns.forEach((column, index) => {
    let below = 0;
    const column_ = svg("g", { class: chosen === -1 || chosen === index ? "column" : "column other" });
    column.sizes.forEach((size, part) => {
      const top = y(below + size);
      const height = y(below) - top;
      if (height > 0.2) {
        const wide = Math.max(1, Math.min(24, slot * 0.8));
        column_.append(svg("rect", { class: `part part-${parts[part].index}`, x: middle(index) - wide / 2, width: wide, y: top, height }));
      }
      below += size;
    });
    picture.append(column_);
  });
  listen(picture, places, width, onhover, (at) => nearestIndex((at - LEFT) / slot - 0.5, columns.length));
  host.replaceChildren(picture);
  return columns[chosen === -1 ? columns.length - 1 : chosen];
}

function frame(width, { x, y, steps, ticks: marks, text, label }) {
  const picture = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const mark of marks) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }));
    picture.append(svg("text", { class: "tick", x: LEFT - 6, y: y(mark) + 3.5, "text-anchor": "end" }, text(mark)));
  }
  const shown = steps.length > 1 ? [steps[0], steps[Math.floor((steps.length - 1) / 2)], steps.at(-1)] : steps;
  shown.forEach((step, index) => {
    const anchor = index === 0 ? "start" : index === shown.length - 1 ? "end" : "middle";
    const place = index === 0 ? LEFT : index === shown.length - 1 ? width - RIGHT : x(step);
    picture.append(svg("text", { class: "tick", x: place, y: HEIGHT - 5, "text-anchor": anchor }, String(step + 1)));
  });
  return picture;
}

function listen(picture, steps, width, onhover, find) {
  const by = scale(LEFT, width - RIGHT, steps[0], steps.at(-1));
  picture.addEventListener("pointermove", (event) => {
    const at = event.clientX - picture.getBoundingClientRect().left;
    onhover(find ? steps[find(at)] : steps[nearest(steps, by(at))]);
  });
  picture.addEventListener("pointerleave", () => onhover(null));
}

const scale = (from, to, first, last) => (value) => (to === from ? (first + last) / 2 : first + ((value - from) / (to - from)) * (last - first));

function spread(low, high) {
  if (low !== high) return [low - (high - low) * 0.05, high + (high - low) * 0.05];
  return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const marks = [];
  for (let mark = Math.ceil(low / size) * size; mark <= high + size * 1e-9; mark += size) marks.push(Math.abs(mark) < size * 1e-9 ? 0 : mark);
  return marks;
}

function path(steps, values, x, y) {
  let pen = "M";
  let text = "";
  values.forEach((value, index) => {
    if (value === null) {
      pen = "M";
      return;
    }
    text += `${pen}${x(steps[index]).toFixed(1)},${y(value).toFixed(1)}`;
    pen = "L";
  });
  return text;
}

function smoothed(values) {
  let average = null;
  return values.map((value) => {
    if (value === null) return null;
    average = average === null ? value : SMOOTHING * average + (1 - SMOOTHING) * value;
    return average;
  });
}

function nearest(steps, wanted) {
  let low = 0;
  let high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= wanted) low = middle;
    else high = middle;
  }
  return Math.abs(steps[high] - wanted) < Math.abs(steps[low] - wanted) ? high : low;
}

const nearestIndex = (place, count) => Math.max(0, Math.min(count - 1, Math.round(place)));
const lastKnown = (values) => values.findLastIndex((value) => value !== null);
const mean = (values) => values.reduce((sum, value) => sum + (value ?? 0), 0) / values.length;
