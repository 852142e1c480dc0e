// The slide viewer: a deep-zoom slide, and over it one raster of scores that is coloured here.
// Called at every rerun of the page with the same markup; the viewer is made once and then told what changed. What is
// returned is called when the markup leaves the page.

import { colourIndex, decodeTable, paint, shade } from "./heat.js";

const viewers = new WeakMap();
const MAGNIFICATIONS = [1, 5, 10, 20, 40];
const MICRONS_AT_1X = 10;
const MOST_SINGLE_CELLS = 5000;

export default function mount({ parentElement, data }) {
  const root = parentElement.querySelector(".wsi");
  if (!viewers.has(root)) viewers.set(root, new SlideViewer(root));
  viewers.get(root).update(data);
  return () => {
    viewers.get(root)?.close();
    viewers.delete(root);
  };
}

class SlideViewer {
  constructor(root) {
    this.root = root;
    root.slideViewer = this;
    this.parts = Object.fromEntries([...root.querySelectorAll("[data-id]")].map((part) => [part.dataset.id, part]));
    this.data = null;
    this.values = null;
    this.shading = null;
    this.heatRequest = 0;
    this.cells = document.createElement("canvas");
    this.overlay = document.createElement("canvas");
    this.overlay.className = "overlay";
    this.osd = window.OpenSeadragon({
      element: this.parts.slide,
      prefixUrl: "",
      drawer: "canvas",
      showNavigationControl: false,
      showNavigator: true,
      navigatorPosition: "TOP_RIGHT",
      navigatorAutoFade: false,
      navigatorSizeRatio: 0.16,
      maxZoomPixelRatio: 8,
      minZoomImageRatio: 0.7,
      visibilityRatio: 0.3,
      animationTime: 0.5,
      placeholderFillStyle: "#ffffff",
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
    });
    this.osd.canvas.append(this.overlay);
    this.osd.navigator?.element.classList.add("navigator");
    this.listen();
  }

  listen() {
    this.osd.addHandler("open", () => this.opened());
    this.osd.addHandler("update-viewport", () => this.draw());
    this.osd.addHandler("animation-finish", () => this.remember());
    this.osd.addHandler("tile-load-failed", (event) => this.explain(event.tile?.getUrl?.()));
    const parts = this.parts;
    for (const name of ["visible", "opacity", "smooth"]) parts[name].addEventListener("input", () => this.draw());
    for (const name of ["threshold", "colormap"]) parts[name].addEventListener("input", () => this.paint());
    parts.scale.addEventListener("input", () => this.shade());
    parts.home.addEventListener("click", () => this.osd.viewport.goHome());
    parts.rotate.addEventListener("click", () => this.osd.viewport.rotateBy(90));
    parts.full.addEventListener("click", () => this.toggleFull());
    parts.link.addEventListener("click", () => this.copyLink());
    parts.slide.addEventListener("pointermove", (event) => this.point(event));
    parts.slide.addEventListener("pointerleave", () => (parts.pointer.textContent = ""));
    this.root.addEventListener("keydown", (event) => this.key(event));
  }

  close() {
    this.heatRequest += 1;
    this.osd.destroy();
  }

  update(data) {
    const before = this.data;
    this.data = data;
    if (before?.slide.base !== data.slide.base) this.open(data.slide);
    if (JSON.stringify(before?.heat) !== JSON.stringify(data.heat)) {
      this.fillChoices(before?.heat);
      this.fillGallery();
      this.load();
    }
  }

  open(slide) {
    this.parts.banner.hidden = true;
    const query = new URLSearchParams({ t: slide.token });
    this.osd.open({
      width: slide.width,
      height: slide.height,
      tileSize: slide.tilePx,
      tileOverlap: slide.overlapPx,
      minLevel: Math.min(8, slide.topLevel),
      maxLevel: slide.topLevel,
      getTileUrl: (level, x, y) => `${slide.base}/tile/${level}/${x}_${y}.jpg?${query}`,
    });
    const native = MICRONS_AT_1X / slide.mpp;
    const buttons = MAGNIFICATIONS.filter((times) => times <= 2.2 * native).map((times) => {
      const button = this.button(`${times}\u00d7`, () => this.magnify(times));
      button.dataset.times = times;
      return button;
    });
    this.parts.magnifications.replaceChildren(...buttons);
  }

  opened() {
    const [slideId, x, y, zoom] = decodeURIComponent(location.hash.replace(/^#view=/, "")).split("|");
    if (slideId === this.data.slide.id && zoom) this.goTo(Number(x), Number(y), Number(zoom), true);
    this.root.dataset.slide = this.data.slide.id;
    this.draw();
  }

  // ---- where we are. zoom: CSS pixels per level-0 pixel; x, y: level-0 pixels

  image() {
    return this.osd.world.getItemAt(0);
  }

  zoom() {
    return this.image().viewportToImageZoom(this.osd.viewport.getZoom(true));
  }

  goTo(x, y, zoom, immediately = false) {
    const viewport = this.osd.viewport;
    viewport.zoomTo(this.image().imageToViewportZoom(zoom), null, immediately);
    viewport.panTo(this.image().imageToViewportCoordinates(x, y), immediately);
    if (immediately) viewport.applyConstraints(true);
  }

  centre() {
    return this.image().viewportToImageCoordinates(this.osd.viewport.getCenter(true));
  }

  magnify(times) {
    const centre = this.image().viewportToImageCoordinates(this.osd.viewport.getCenter(false));
    this.goTo(centre.x, centre.y, (times * this.data.slide.mpp) / MICRONS_AT_1X);
  }

  remember() {
    if (!this.image()) return;
    const centre = this.centre();
    const place = [this.data.slide.id, Math.round(centre.x), Math.round(centre.y), this.zoom().toPrecision(4)];
    history.replaceState(history.state, "", `#view=${encodeURIComponent(place.join("|"))}`);
  }

  // ---- heat

  async load() {
    const request = ++this.heatRequest;
    const { slide, heat } = this.data;
    this.values = null;
    delete this.root.dataset.heat;
    const response = await fetch(`${slide.base}/heat.f32?${new URLSearchParams({ ...heat.address, t: slide.token })}`);
    const content = response.ok ? new Float32Array(await response.arrayBuffer()) : null;
    if (request !== this.heatRequest) return;
    if (!content) {
      this.say(`The scores could not be loaded (${response.status}). Reload the page.`);
      return;
    }
    this.values = content;
    this.shade();
    this.root.dataset.heat = heat.name;
  }

  shade() {
    if (!this.values) return;
    const { heat, note } = this.data;
    const scale = this.parts.scale.value;
    this.shading = shade(this.values, heat, scale);
    const named = !heat.label || heat.name.includes(heat.label);
    this.parts["legend-title"].textContent = named ? heat.name : `${heat.name} \u00b7 class ${heat.label}`;
    this.parts.meaning.textContent = heat.scales[scale];
    this.parts.note.textContent = note;
    this.parts.ticks.replaceChildren(...this.shading.ticks.map(([share, text]) => {
      const tick = document.createElement("span");
      tick.style.left = `${share * 100}%`;
      tick.textContent = text;
      return tick;
    }));
    this.paint();
  }

  paint() {
    if (!this.shading) return;
    const threshold = Number(this.parts.threshold.value);
    const table = decodeTable(this.data.colormaps[this.parts.colormap.value]);
    this.index = colourIndex(this.shading.position, threshold);
    this.styles = Array.from({ length: 256 }, (_, i) => `rgb(${table.subarray(3 * i, 3 * i + 3).join(",")})`);
    paint(this.cells, this.index, this.data.heat, table);
    const shown = this.index.reduce((count, index) => count + (index >= 0), 0);
    const all = this.values.reduce((count, value) => count + Number.isFinite(value), 0);
    this.parts["threshold-text"].textContent = threshold > 0 ? `\u2265 ${this.shading.at(threshold)}` : "all";
    this.parts.shown.textContent = `${shown} of ${all} cells coloured (${Math.round((100 * shown) / all)}% of the tiled area)`;
    this.paintBar(table, threshold);
    this.draw();
  }

  paintBar(table, threshold) {
    const context = this.parts["legend-bar"].getContext("2d");
    const image = context.createImageData(256, 1);
    for (let i = 0; i < 256; i++) {
      image.data.set(table.subarray(3 * i, 3 * i + 3), 4 * i);
      image.data[4 * i + 3] = i / 255 >= threshold ? 255 : 40;
    }
    context.putImageData(image, 0, 0);
  }

  draw() {
    if (!this.image()) return;
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth, clientHeight } = this.parts.slide;
    const [width, height] = [Math.round(clientWidth * ratio), Math.round(clientHeight * ratio)];
    if (this.overlay.width !== width || this.overlay.height !== height) Object.assign(this.overlay, { width, height });
    const context = this.overlay.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, width, height);
    this.drawScale();
    if (!this.shading || !this.values || !this.parts.visible.checked) return;
    this.overlay.style.opacity = this.parts.opacity.value;
    context.setTransform(...this.levelZero(ratio));
    this.drawCells(context);
  }

  /** The affine map from level-0 pixels to device pixels, from three points, so that turning needs no other code. */
  levelZero(ratio) {
    const at = (x, y) => this.osd.viewport.pixelFromPoint(this.image().imageToViewportCoordinates(x, y, true), true);
    const { width, height } = this.data.slide;
    const [corner, right, below] = [at(0, 0), at(width, 0), at(0, height)];
    return [(right.x - corner.x) / width, (right.y - corner.y) / width, (below.x - corner.x) / height,
      (below.y - corner.y) / height, corner.x, corner.y].map((part) => part * ratio);
  }

  /**
   * Single cells are filled with soft edges, which add up where they meet; a picture of all cells is quicker but its
   * edges snap to device pixels, so it serves where cells are small and many, and for smoothing.
   */
  drawCells(context) {
    const { origin, cell, filled, columns, rows } = this.data.heat;
    const { first, last } = this.cellsInView(context);
    const gaps = filled[0] < cell[0] || filled[1] < cell[1];
    const many = (last[0] - first[0]) * (last[1] - first[1]) > MOST_SINGLE_CELLS;
    if (this.parts.smooth.checked || (many && !gaps)) {
      context.imageSmoothingEnabled = this.parts.smooth.checked;
      context.drawImage(this.cells, origin[0], origin[1], columns * cell[0], rows * cell[1]);
      return;
    }
    context.globalCompositeOperation = "lighter";
    for (let row = first[1]; row < last[1]; row++) {
      for (let column = first[0]; column < last[0]; column++) {
        const index = this.index[row * columns + column];
        if (index < 0) continue;
        context.fillStyle = this.styles[index];
        context.fillRect(origin[0] + column * cell[0], origin[1] + row * cell[1], filled[0], filled[1]);
      }
    }
    context.globalCompositeOperation = "source-over";
  }

  /** Columns and rows from `first` up to, not with, `last` that can be seen. */
  cellsInView(context) {
    const { origin, cell, columns, rows } = this.data.heat;
    const back = context.getTransform().inverse();
    const [w, h] = [this.overlay.width, this.overlay.height];
    const corners = [[0, 0], [w, 0], [0, h], [w, h]].map(([x, y]) => back.transformPoint({ x, y }));
    const range = (values, start, step, count) => {
      const places = values.map((value) => (value - start) / step);
      const inside = (place) => Math.min(count, Math.max(0, place));
      return [inside(Math.floor(Math.min(...places))), inside(Math.ceil(Math.max(...places)))];
    };
    const x = range(corners.map((corner) => corner.x), origin[0], cell[0], columns);
    const y = range(corners.map((corner) => corner.y), origin[1], cell[1], rows);
    return { first: [x[0], y[0]], last: [x[1], y[1]] };
  }

  // ---- what stands around the slide

  fillChoices(before) {
    const { heat, colormaps } = this.data;
    const names = { percentile: "percentile", raw: "raw score", lift: "\u00d7 uniform" };
    const scales = Object.keys(heat.scales);
    choose(this.parts.scale, scales, (scale) => names[scale], this.parts.scale.value);
    const kept = before?.colormap === heat.colormap ? this.parts.colormap.value : heat.colormap;
    choose(this.parts.colormap, Object.keys(colormaps), (name) => name, kept);
  }

  fillGallery() {
    const { slide, heat } = this.data;
    const buttons = heat.gallery.map((tile, index) => {
      const button = this.button("", () => this.visit(tile, button));
      const picture = document.createElement("img");
      const query = { x: tile.x, y: tile.y, w: tile.w, h: tile.h, px: 256, t: slide.token };
      picture.src = `${slide.base}/crop.jpg?${new URLSearchParams(query)}`;
      picture.alt = `Tile ${index + 1}`;
      picture.loading = "lazy";
      const text = document.createElement("span");
      text.textContent = `${index + 1} \u00b7 ${Number(tile.score.toPrecision(3))}`;
      button.title = `Score ${tile.score.toPrecision(4)}, higher than ${Math.round(tile.rank * 100)}% of the tiles`;
      button.append(picture, text);
      return button;
    });
    this.parts.gallery.replaceChildren(...buttons);
  }

  visit(tile, button) {
    for (const other of this.parts.gallery.children) other.setAttribute("aria-pressed", String(other === button));
    const room = Math.min(this.parts.slide.clientWidth, this.parts.slide.clientHeight);
    this.goTo(tile.x + tile.w / 2, tile.y + tile.h / 2, room / (3 * Math.max(tile.w, tile.h)));
  }

  drawScale() {
    const mpp = this.data.slide.mpp / this.zoom();
    const power = 10 ** Math.floor(Math.log10(120 * mpp));
    const microns = [5, 2, 1].map((step) => step * power).find((length) => length <= 120 * mpp * (1 + 1e-9));
    this.parts["scale-bar"].style.width = `${microns / mpp}px`;
    this.parts["scale-text"].textContent = microns >= 1000 ? `${microns / 1000} mm` : `${microns} \u00b5m`;
    const times = MICRONS_AT_1X / mpp;
    this.parts["zoom-text"].textContent = `${times >= 10 ? Math.round(times) : Number(times.toPrecision(2))}\u00d7`;
    for (const button of this.parts.magnifications.children) {
      button.setAttribute("aria-pressed", String(Math.abs(times / button.dataset.times - 1) < 0.01));
    }
  }

  point(event) {
    if (!this.image() || !this.shading || !this.values) return;
    const box = this.parts.slide.getBoundingClientRect();
    const pixel = new window.OpenSeadragon.Point(event.clientX - box.left, event.clientY - box.top);
    const place = this.image().viewportToImageCoordinates(this.osd.viewport.pointFromPixel(pixel, true));
    const { origin, cell, columns, rows } = this.data.heat;
    const column = Math.floor((place.x - origin[0]) / cell[0]);
    const row = Math.floor((place.y - origin[1]) / cell[1]);
    const index = row * columns + column;
    const inside = column >= 0 && row >= 0 && column < columns && row < rows && Number.isFinite(this.values[index]);
    const rank = inside && this.parts.scale.value === "percentile" ? ` (${Math.round(this.shading.position[index] * 100)}%)` : "";
    this.parts.pointer.textContent = inside ? `Under the pointer: ${Number(this.values[index].toPrecision(3))}${rank}` : "";
  }

  key(event) {
    if (event.key === "h" && !event.ctrlKey && !event.metaKey) {
      this.parts.visible.checked = !this.parts.visible.checked;
      this.draw();
    }
  }

  toggleFull() {
    if (document.fullscreenElement) document.exitFullscreen();
    else this.root.requestFullscreen();
  }

  async copyLink() {
    this.remember();
    try {
      await navigator.clipboard.writeText(location.href);
      this.parts.link.textContent = "Copied";
    } catch {
      this.parts.link.textContent = "See address bar";
    }
    setTimeout(() => (this.parts.link.textContent = "Copy link"), 1500);
  }

  async explain(url) {
    if (!url || !this.parts.banner.hidden) return;
    const response = await fetch(url);
    if (!response.ok) this.say(`A part of this slide cannot be shown: ${await response.text()}`);
  }

  say(text) {
    this.parts.banner.textContent = text;
    this.parts.banner.hidden = false;
  }

  button(text, act) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", act);
    return button;
  }
}

function choose(select, values, name, wanted) {
  const options = values.map((value) => new Option(name(value), value));
  select.replaceChildren(...options);
  select.value = values.includes(wanted) ? wanted : values[0];
}
