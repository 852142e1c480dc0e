"""The slide viewer as a component of the page: its loader, its markup, and the data it takes."""

from functools import cache
from importlib.resources import files
from typing import Any

import streamlit as st
from streamlit.components.v2.types import ComponentRenderer

from apps.viewer.routes import assets_base

# The component's files come over our own routes: the page itself only carries these lines, and no installed
# manifest has to be found. OpenSeadragon is a classic script and puts itself on `window`.
_LOADER = """
function script(address) {
  return new Promise((resolve, reject) => {
    const tag = document.createElement("script");
    tag.addEventListener("load", resolve);
    tag.addEventListener("error", reject);
    tag.src = address;
    document.head.append(tag);
  });
}
let library;
export default function (component) {
  const address = (name) => new URL(`${component.data.assets}/${name}`, document.baseURI).href;
  library ??= script(address("openseadragon.min.js"));
  let close = null;
  let closed = false;
  library.then(() => import(address("index.js"))).then((viewer) => {
    if (!closed) close = viewer.default(component);
  });
  return () => {
    closed = true;
    close?.();
  };
}
"""


@cache
def _renderer() -> ComponentRenderer:
    folder = files("apps.viewer") / "component"
    return st.components.v2.component(
        "wsi_mil_slide_viewer",
        html=(folder / "viewer.html").read_text(encoding="utf-8"),
        css=(folder / "viewer.css").read_text(encoding="utf-8"),
        js=_LOADER,
    )


def slide_viewer(data: dict[str, Any]) -> None:
    """Show a slide. The one viewer of the page lives through reruns and takes up what changed in `data`."""
    _renderer()(data=data | {"assets": assets_base()}, key="slide-viewer", height="content")
