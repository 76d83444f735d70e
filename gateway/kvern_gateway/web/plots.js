// The last three minutes, a point a second, from differences of what the status counts.

const LENGTH = 180;
const SVG = "http://www.w3.org/2000/svg";
const ms = (value) => `${(value * 1000).toFixed(1)} ms`;
const KINDS = [
  ["tokens", "Output tokens/s", (value) => value.toFixed(0)],
  ["running", "Running", (value) => value.toFixed(0)],
  ["waiting", "Waiting", (value) => value.toFixed(0)],
  ["held", "KV blocks held", (value) => `${(100 * value).toFixed(1)} %`],
  ["first", "Time to first token (mean)", ms],
  ["between", "Between tokens (mean)", ms],
];

const sum = (groups, name) => groups.reduce((total, group) => total + group[name], 0);

function mean(now, before) {
  const count = now.count - before.count;
  return count > 0 ? (now.seconds - before.seconds) / count : null;
}

export class Plots {
  constructor(parent) {
    this.series = Object.fromEntries(KINDS.map(([name]) => [name, []]));
    this.parent = parent;
    this.last = null;
  }

  add(status) {
    const now = { at: performance.now() / 1000, ...status.gateway };
    if (this.last) {
      const seconds = now.at - this.last.at;
      const blocks = sum(status.groups, "num_blocks");
      const idle = sum(status.groups, "num_free_blocks") + sum(status.groups, "num_cached_blocks");
      this.push({
        tokens: Math.max(0, now.generation_tokens - this.last.generation_tokens) / seconds,
        running: sum(status.groups, "num_running"),
        waiting: sum(status.groups, "num_waiting"),
        held: blocks ? 1 - idle / blocks : 0,
        first: mean(now.time_to_first_token, this.last.time_to_first_token),
        between: mean(now.inter_token, this.last.inter_token),
      });
      this.draw();
    }
    this.last = now;
  }

  push(values) {
    for (const [name, points] of Object.entries(this.series)) {
      // Where nothing was measured the line goes on as it was.
      points.push(values[name] ?? points.at(-1) ?? 0);
      if (points.length > LENGTH) points.shift();
    }
  }

  draw() {
    this.parent.replaceChildren(...KINDS.map(([name, title, format]) => this.figure(this.series[name], title, format)));
  }

  figure(points, title, format) {
    const most = Math.max(...points, 1e-9);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "plot");
    svg.setAttribute("viewBox", `0 0 ${LENGTH - 1} 100`);
    svg.setAttribute("preserveAspectRatio", "none");
    const axis = document.createElementNS(SVG, "path");
    axis.setAttribute("d", `M0 99.5 H${LENGTH - 1}`);
    const line = document.createElementNS(SVG, "polyline");
    const first = LENGTH - points.length;
    line.setAttribute("points", points.map((value, i) => `${first + i},${98 - (92 * value) / most}`).join(" "));
    svg.append(axis, line);
    const caption = document.createElement("figcaption");
    const value = document.createElement("b");
    value.textContent = format(points.at(-1));
    caption.append(`${title} `, value, ` of at most ${format(most)}`);
    const figure = document.createElement("figure");
    figure.append(caption, svg);
    return figure;
  }
}
