// Scores -> positions on the colour bar -> pixels. The same rules as wsi_mil/heatmap.py, without the DOM.

/** 256 x RGB of a colormap that was sent as base64. */
export function decodeTable(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

/** Share of the finite values that are lower, equal ones counted half; NaN stays NaN. */
export function percentileRanks(values) {
  const sorted = Float32Array.from(values.filter((value) => Number.isFinite(value))).sort();
  const ranks = new Float32Array(values.length).fill(NaN);
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i])) {
      ranks[i] = (lowerBound(sorted, values[i], false) + lowerBound(sorted, values[i], true)) / 2 / sorted.length;
    }
  }
  return ranks;
}

function lowerBound(sorted, value, past) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value || (past && sorted[middle] === value)) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Position of each cell along the colour bar (0 to 1, NaN where there is no tile) and the numbers at the bar. */
export function shade(values, heat, scale) {
  if (scale === "percentile") {
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => [share, `${Math.round(share * 100)}%`]);
    return { position: percentileRanks(values), ticks, at: (share) => `${Math.round(share * 100)}%` };
  }
  const factor = scale === "lift" ? 1 / (heat.tileMean || 1) : 1;
  const [low, high] = span(values, heat.kind, scale, factor);
  const position = values.map((value) => Math.min(1, Math.max(0, (value * factor - low) / (high - low))));
  const at = (share) => `${Number((low + share * (high - low)).toPrecision(3))}`;
  return { position, ticks: [0, 0.5, 1].map((share) => [share, at(share)]), at };
}

function span(values, kind, scale, factor) {
  if (kind === "probability" && scale === "raw") return [0, 1];
  let most = 0;
  for (const value of values) {
    const size = kind === "contribution" ? Math.abs(value * factor) : value * factor;
    if (size > most) most = size;
  }
  most = most || 1;
  return kind === "contribution" ? [-most, most] : [0, most];
}

/** Index into the colormap of each cell; -1 where there is no tile or the position is below the threshold. */
export function colourIndex(position, threshold) {
  return Int16Array.from(position, (share) => (share >= threshold ? Math.min(255, Math.floor(share * 255 + 0.5)) : -1));
}

/** One pixel a cell, transparent where nothing is shown. */
export function paint(canvas, index, heat, table) {
  canvas.width = heat.columns;
  canvas.height = heat.rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(heat.columns, heat.rows);
  for (let i = 0; i < index.length; i++) {
    if (index[i] < 0) continue;
    image.data.set(table.subarray(3 * index[i], 3 * index[i] + 3), 4 * i);
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}
