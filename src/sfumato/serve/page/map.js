// The map: a canvas with one dot and one ellipse for every item, the queries and their hits on top. An ellipse has the shape
// of one standard deviation and a size on a log scale, since at the scale of the map it could not be seen.
// It knows points, marks and gestures; what they mean and what a pick does is the page's business.

const THUMBNAIL = 30;
const DOT = 1.8;
const [SMALLEST, LARGEST] = [4, 12]; // half axes of the ellipses in pixels, at the scale that shows all
const PICTURES = 12; // hits that show their pictures
const [LABELS, COMPACT, ALIKE] = [16, 0.7, 0.5]; // of groups: how many, how close together, how many items in common

// Words that many names near each other have in common: [{label, x, y}], the largest groups first.
export function groupsOf(points, nameOf) {
  const members = new Map();
  for (const point of points)
    for (const word of new Set(nameOf(point).toLowerCase().match(/\p{L}{3,}/gu)))
      members.set(word, [...(members.get(word) ?? []), point]);
  const middle = (values) => values.sort((one, other) => one - other)[values.length >> 1];
  const place = (some) => {
    const [x, y] = [middle(some.map((point) => point.x)), middle(some.map((point) => point.y))];
    return { x, y, spread: middle(some.map((point) => Math.hypot(point.x - x, point.y - y))) };
  };
  const whole = points.length && place(points).spread;
  const found = [...members]
    .filter(([, some]) => some.length >= Math.max(4, points.length / 150))
    .map(([label, some]) => ({ label, some, ...place(some) }))
    .filter(({ spread }) => spread < COMPACT * whole)
    .sort((one, other) => other.some.length - one.some.length);
  const groups = [];
  for (const group of found) {
    const all = new Set(group.some);
    const alike = ({ some }) => some.filter((point) => all.has(point)).length > ALIKE * Math.min(some.length, all.size);
    if (groups.length < LABELS && !groups.some(alike)) groups.push(group);
  }
  return groups.map(({ label, x, y }) => ({ label, x, y }));
}

export class CollectionMap {
  #canvas;
  #tip;
  #picture;
  #describe;
  #pick;
  #points = [];
  #groups = [];
  #marks = [];
  #sizes = [0, 0]; // least and largest half axis
  #chosen = -1;
  #scale = 1; // pixels per unit, the same on both axes: an ellipse keeps its shape
  #whole = 1; // the scale that shows all
  #centre = [0, 0]; // what lies in the middle of the canvas
  #images = new Map();
  #pointers = new Map();
  #moved = 0;
  #frame = 0;

  // picture(path, size) -> promise of a URL; describe(point) -> nodes for the tip; pick(point): it was chosen for good.
  constructor(canvas, tip, { picture, describe, pick }) {
    [this.#canvas, this.#tip, this.#picture, this.#describe, this.#pick] = [canvas, tip, picture, describe, pick];
    const on = (type, act, options) => canvas.addEventListener(type, act, options);
    on("pointerdown", (event) => this.#down(event));
    on("pointermove", (event) => this.#move(event));
    for (const end of ["pointerup", "pointercancel"]) on(end, (event) => this.#up(event));
    on("pointerleave", ({ pointerType }) => pointerType === "mouse" && !this.#pointers.size && this.#choose(-1));
    on("blur", () => this.#choose(-1));
    on("keydown", (event) => this.#key(event));
    on("wheel", (event) => {
      event.preventDefault();
      this.zoom(1.0015 ** -event.deltaY, this.#at(event));
    }, { passive: false });
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // points and groups: of the collection. marks: [{label, dashed, ellipse, hits}], one for each query; hits: ids.
  // Returns the least and the largest half axis.
  show({ points, groups }, marks) {
    const other = points !== this.#points;
    [this.#points, this.#groups, this.#marks] = [points, groups, marks];
    const axes = [...points, ...marks.flatMap(({ ellipse }) => ellipse ?? [])].flatMap(({ a, b }) => [a, b]).filter((v) => v > 0);
    this.#sizes = axes.length ? axes.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, 0]) : [0, 0];
    this.#choose(-1);
    if (other || marks.some(({ ellipse }) => ellipse && !this.#inside(ellipse))) this.fit();
    else this.draw();
    return { least: this.#sizes[0], most: this.#sizes[1] };
  }

  fit() {
    const all = [...this.#points, ...this.#marks.flatMap(({ ellipse }) => ellipse ?? [])];
    const [width, height] = this.#size;
    const range = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
    const [left, right] = range(all.flatMap(({ x, a }) => [x - a, x + a]));
    const [low, high] = range(all.flatMap(({ y, a }) => [y - a, y + a]));
    this.#centre = all.length ? [(left + right) / 2, (low + high) / 2] : [0, 0];
    this.#scale = this.#whole = 0.94 * Math.min(width / (right - left || 1), height / (high - low || 1)) || 1;
    this.draw();
  }

  // Keeps the place under the pointer where it is; a factor of 0 shows all.
  zoom(factor, [px, py] = this.#size.map((v) => v / 2)) {
    if (!factor) return this.fit();
    const before = this.#world(px, py);
    this.#scale *= factor;
    const after = this.#world(px, py);
    this.#centre = [this.#centre[0] + before[0] - after[0], this.#centre[1] + before[1] - after[1]];
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.#paint());
  }

  get #size() {
    return [this.#canvas.clientWidth, this.#canvas.clientHeight];
  }

  #screen({ x, y }) {
    const [width, height] = this.#size;
    return [(x - this.#centre[0]) * this.#scale + width / 2, (this.#centre[1] - y) * this.#scale + height / 2];
  }

  #world(px, py) {
    const [width, height] = this.#size;
    return [(px - width / 2) / this.#scale + this.#centre[0], this.#centre[1] - (py - height / 2) / this.#scale];
  }

  // The length of a half axis: on a log scale, and growing slowly with the map.
  #pixels(axis) {
    const [least, most] = this.#sizes;
    if (!(axis > 0)) return 0;
    const part = most > least ? Math.log(axis / least) / Math.log(most / least) : 0.5;
    return (SMALLEST + (LARGEST - SMALLEST) * part) * Math.max(1, Math.sqrt(this.#scale / this.#whole));
  }

  #inside(point, margin = 0) {
    const [x, y] = this.#screen(point);
    const [width, height] = this.#size;
    return x > -margin && y > -margin && x < width + margin && y < height + margin;
  }

  #paint() {
    const [width, height] = this.#size;
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    [this.#canvas.width, this.#canvas.height] = [width * ratio, height * ratio];
    const ctx = this.#canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    const style = getComputedStyle(this.#canvas);
    const colour = (name) => style.getPropertyValue(`--${name}`);
    const shape = (point, least = 0) => {
      const [x, y] = this.#screen(point);
      ctx.beginPath();
      // y points up on the map and down on the screen, so angles change their sign
      ctx.ellipse(x, y, Math.max(least, this.#pixels(point.a)), Math.max(least, this.#pixels(point.b)), -point.angle, 0, 7);
    };
    const dot = (point, radius) => {
      ctx.beginPath();
      ctx.arc(...this.#screen(point), radius, 0, 7);
    };
    const seen = this.#points.filter((point) => this.#inside(point, THUMBNAIL + this.#pixels(point.a)));
    ctx.strokeStyle = ctx.fillStyle = colour("soft");
    for (const point of seen) {
      if (!point.a) continue;
      shape(point);
      ctx.globalAlpha = 0.08;
      ctx.fill();
      ctx.globalAlpha = 0.22;
      ctx.stroke();
    }
    const near = seen.length < (width * height) / 4000; // room for pictures
    ctx.globalAlpha = near ? 0.9 : 0.7;
    for (const point of seen) if (!near || !this.#thumbnail(ctx, point)) dot(point, DOT), ctx.fill();
    ctx.globalAlpha = 1;

    for (const { hits } of this.#marks) {
      ctx.strokeStyle = ctx.fillStyle = colour("sure");
      ctx.lineWidth = 2;
      const order = [...hits];
      const found = seen.filter(({ id }) => hits.has(id)).sort((one, other) => order.indexOf(other.id) - order.indexOf(one.id));
      for (const point of found) {
        if (order.indexOf(point.id) < PICTURES && this.#thumbnail(ctx, point)) ctx.stroke();
        else dot(point, 2 * DOT), ctx.fill();
      }
    }
    ctx.textBaseline = "middle";
    const taken = []; // [left, top, right, bottom] of what is written
    const write = (label, left, top, colour) => {
      const long = ctx.measureText(label).width;
      const box = [left - 3, top - 11, left + long + 3, top + 11];
      if (taken.some(([l, t, r, b]) => box[0] < r && l < box[2] && box[1] < b && t < box[3])) return false;
      taken.push(box);
      ctx.lineWidth = 4;
      ctx.lineJoin = "round";
      ctx.strokeStyle = card;
      ctx.strokeText(label, left, top);
      ctx.fillStyle = colour;
      ctx.fillText(label, left, top);
      return true;
    };
    const card = colour("card");
    for (const { label, dashed, ellipse } of this.#marks) {
      if (!ellipse) continue;
      ctx.strokeStyle = ctx.fillStyle = colour("query");
      ctx.lineWidth = 3;
      ctx.setLineDash(dashed ? [5, 4] : []);
      shape(ellipse, 7);
      ctx.globalAlpha = 0.25;
      ctx.fill();
      ctx.globalAlpha = 1;
      ctx.stroke();
      ctx.setLineDash([]);
      dot(ellipse, 4);
      ctx.fill();
      ctx.font = `700 15px ${style.fontFamily}`;
      const short = label.length > 40 ? `${label.slice(0, 39)}…` : label;
      const [x, y] = this.#screen(ellipse);
      const left = Math.max(4, Math.min(x + 20, width - ctx.measureText(short).width - 8));
      for (let top = y; !write(short, left, top, colour("query")); ) top += 22; // below each other rather than on top
    }
    ctx.font = `600 13px ${style.fontFamily}`;
    for (const group of this.#groups) {
      if (!this.#inside(group)) continue;
      const [x, y] = this.#screen(group);
      write(group.label, x - ctx.measureText(group.label).width / 2, y, colour("ink"));
    }
    const chosen = this.#points[this.#chosen];
    if (!chosen) return;
    ctx.strokeStyle = colour("ink");
    ctx.lineWidth = 2;
    shape(chosen, 7);
    ctx.stroke();
  }

  // Draws the picture of a point in a frame, which is the path afterwards; if it has not come yet, sends for it.
  #thumbnail(ctx, point) {
    if (!point.picture) return false;
    const image = this.#images.get(point.picture);
    if (image?.complete && image.naturalWidth) {
      const [x, y] = this.#screen(point);
      const size = THUMBNAIL / Math.max(image.naturalWidth, image.naturalHeight);
      const [w, h] = [image.naturalWidth * size, image.naturalHeight * size];
      ctx.beginPath();
      ctx.roundRect(x - w / 2, y - h / 2, w, h, 6);
      ctx.save();
      ctx.clip();
      ctx.drawImage(image, x - w / 2, y - h / 2, w, h);
      ctx.restore();
      return true;
    }
    if (!image) {
      const fresh = new Image();
      this.#images.set(point.picture, fresh);
      fresh.onload = () => this.draw();
      this.#picture(point.picture, 64).then((url) => (fresh.src = url), () => {}); // without its picture an item stays a dot
    }
    return false;
  }

  #choose(index) {
    if (index === this.#chosen) return;
    this.#chosen = index;
    const point = this.#points[index];
    this.#tip.hidden = !point;
    this.#canvas.classList.toggle("over", Boolean(point));
    if (point) {
      this.#tip.replaceChildren(...this.#describe(point));
      const [x, y] = this.#screen(point);
      const [width, height] = this.#size;
      const left = Math.max(6, Math.min(x + 16, width - this.#tip.offsetWidth - 6));
      const top = y + 16 + this.#tip.offsetHeight < height ? y + 16 : Math.max(6, y - 16 - this.#tip.offsetHeight);
      this.#tip.style.transform = `translate(${left}px, ${top}px)`;
    }
    this.draw();
  }

  #at(event) {
    const box = this.#canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  #nearest([px, py], reach) {
    let [best, least] = [-1, reach];
    this.#points.forEach((point, index) => {
      const [x, y] = this.#screen(point);
      const distance = Math.hypot(x - px, y - py);
      if (distance < least) [best, least] = [index, distance];
    });
    return best;
  }

  #down(event) {
    this.#canvas.setPointerCapture(event.pointerId);
    this.#pointers.set(event.pointerId, this.#at(event));
    if (this.#pointers.size === 1) this.#moved = 0;
  }

  #move(event) {
    const now = this.#at(event);
    const before = this.#pointers.get(event.pointerId);
    if (!before) return this.#choose(this.#nearest(now, 16));
    const other = [...this.#pointers].find(([id]) => id !== event.pointerId)?.[1];
    this.#moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
    this.#pointers.set(event.pointerId, now);
    if (this.#moved < 5) return;
    this.#choose(-1);
    if (other) {
      const far = (from) => Math.hypot(from[0] - other[0], from[1] - other[1]) || 1;
      this.zoom(far(now) / far(before), [(now[0] + other[0]) / 2, (now[1] + other[1]) / 2]);
    } else this.#pan(now[0] - before[0], now[1] - before[1]);
  }

  #up(event) {
    const down = this.#pointers.delete(event.pointerId);
    if (!down || event.type === "pointercancel" || this.#moved >= 5) return;
    const index = this.#nearest(this.#at(event), event.pointerType === "touch" ? 24 : 16);
    // a finger cannot hover: its first tap shows what is there, the second one picks it
    if (event.pointerType === "touch" && index !== this.#chosen) this.#choose(index);
    else if (index >= 0) this.#pick(this.#points[index]);
  }

  #pan(dx, dy) {
    this.#centre = [this.#centre[0] - dx / this.#scale, this.#centre[1] + dy / this.#scale];
    this.draw();
  }

  #key(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (step && event.shiftKey) this.#pan(-60 * step[0], -60 * step[1]);
    else if (step) this.#step(step);
    else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.fit();
    else if (event.key === "Escape") this.#choose(-1);
    else if (event.key === "Enter" && this.#chosen >= 0) this.#pick(this.#points[this.#chosen]);
    else return;
    event.preventDefault();
  }

  // To the nearest item in this direction, or to the one in the middle if none is chosen.
  #step([dx, dy]) {
    const [width, height] = this.#size;
    const from = this.#points[this.#chosen];
    let next = this.#nearest([width / 2, height / 2], Infinity);
    if (from) {
      const [x, y] = this.#screen(from);
      let least = Infinity;
      this.#points.forEach((point, index) => {
        const [px, py] = this.#screen(point);
        const [along, across] = [(px - x) * dx + (py - y) * dy, Math.abs((px - x) * dy + (py - y) * dx)];
        if (along > 0 && along + 2 * across < least) [next, least] = [index, along + 2 * across];
      });
      if (least === Infinity) return;
    }
    const point = this.#points[next];
    if (!this.#inside(point)) this.#centre = [point.x, point.y];
    this.#choose(next);
  }
}
