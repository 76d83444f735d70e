// A rectangle for each KV block: 0 free, 1 cached, 2 read by several, else 3 + the slot of the request that holds it.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function palette() {
  const colours = [css("--free"), css("--cached"), css("--shared")];
  // Neighbouring slots far apart on the wheel.
  for (let slot = 0; slot < 253; slot += 1) colours.push(`hsl(${(20 + slot * 137.5) % 360} 62% 52%)`);
  return colours;
}

export function drawBlocks(parent, groups) {
  const colours = palette();
  let held = 0;
  let all = 0;
  while (parent.children.length > groups.length) parent.lastChild.remove();
  groups.forEach((group, index) => {
    const states = Uint8Array.from(atob(group.states), (c) => c.charCodeAt(0));
    const canvas = parent.children[index] ?? parent.appendChild(document.createElement("canvas"));
    canvas.setAttribute("role", "img");
    const columns = Math.max(16, Math.min(256, Math.ceil(Math.sqrt(states.length * 3))));
    const cell = Math.max(2, Math.floor(768 / columns));
    canvas.width = columns * cell;
    canvas.height = Math.ceil(states.length / columns) * cell;
    const context = canvas.getContext("2d");
    const gap = cell > 4 ? 1 : 0;
    states.forEach((state, block) => {
      context.fillStyle = colours[state];
      context.fillRect((block % columns) * cell, Math.floor(block / columns) * cell, cell - gap, cell - gap);
    });
    const own = states.reduce((sum, state) => sum + (state > 1), 0);
    canvas.setAttribute("aria-label", `group ${group.group_id}: ${own} of ${states.length} blocks held`);
    canvas.dataset.held = own;
    held += own;
    all += states.length;
  });
  return `${held.toLocaleString()} of ${all.toLocaleString()} held`;
}
