// One request: a bar for each phase, and the same in words.
import { element } from "/ui/app.js";

const SVG = "http://www.w3.org/2000/svg";

function bar(line, total, several) {
  const node = element("div", "", "bar");
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 1000 10");
  svg.setAttribute("preserveAspectRatio", "none");
  const rect = document.createElementNS(SVG, "rect");
  const start = (1000 * line.start) / total;
  for (const [name, value] of Object.entries({
    x: Math.min(start, 997), y: 0, height: 10, width: Math.max(3, (1000 * line.seconds) / total),
    class: line.kind.replace(" ", "-"),
  })) rect.setAttribute(name, value);
  svg.append(rect);
  const label = several ? `${line.kind} [${line.choice}]` : line.kind;
  const time = line.seconds >= 1 ? `${line.seconds.toFixed(2)} s` : `${(line.seconds * 1000).toFixed(1)} ms`;
  node.append(element("span", label), svg, element("span", time));
  return node;
}

export function showTimeline(parent, story) {
  const total = Math.max(1e-9, ...story.lines.map((line) => line.start + line.seconds));
  const several = story.lines.some((line) => line.choice > 0);
  const words = document.createElement("ul");
  words.append(...story.lines.map((line) => element("li", `${line.kind}: ${line.text}`)));
  parent.replaceChildren(
    element("p", story.title), ...story.lines.map((line) => bar(line, total, several)), words);
}
