"""wsi-mil view: one process, one port, this machine only unless asked otherwise."""

import socket
import threading
import webbrowser
from pathlib import Path

import streamlit as st
import uvicorn
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from streamlit import config as streamlit_config

from apps.viewer.library import Library, install
from apps.viewer.routes import routes
from wsi_mil.errors import ConfigError
from wsi_mil.results.cases import check_tested
from wsi_mil.runs import RunDir

_LAST_PORT = 65_535
_LOOPBACK = ("127.0.0.1", "localhost")
_SETTINGS = {
    "browser.gatherUsageStats": False,
    "server.fileWatcherType": "none",
    "server.headless": True,
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "none",
    "theme.base": "light",
    "theme.primaryColor": "#1f6f8b",
    "theme.font": "sans-serif",
}


def view(
    run: Path, *, slides: Path | None = None, host: str = "127.0.0.1", port: int = 8501, open_browser: bool = False
) -> None:
    """Look at a run in the browser: cases, slides, heatmaps. Ends with Ctrl+C.

    Args:
        run: The run folder that crossval or predict wrote.
        slides: Folder of the slides; the one the run was made from when not given.
        host: Address to listen on; the default serves this machine alone.
        port: Port to listen on.
        open_browser: Open the page in the default browser.
    """
    if not 0 <= port <= _LAST_PORT:
        raise ConfigError(f"port is {port}; it must be from 1 to {_LAST_PORT}, or 0 for any that is free.")
    folder = RunDir(run)
    check_tested(folder)
    library = Library(folder, slides)
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"Viewer of {run}: {address}  (end with Ctrl+C)", flush=True)
    if host not in _LOOPBACK:
        print("Everyone who reaches this address can see the slides of this run.", flush=True)
    if open_browser:
        threading.Timer(1.5, webbrowser.open, (address,)).start()
    uvicorn.Server(uvicorn.Config(make_app(library, host=host, port=port), log_level="warning")).run([listening])


def make_app(library: Library, *, host: str = "127.0.0.1", port: int = 8501) -> st.App:
    """The whole viewer as an ASGI application, without a server."""
    install(library)
    for name, value in (_SETTINGS | {"server.address": host, "server.port": port}).items():
        streamlit_config.set_option(name, value)
    hosts = list(dict.fromkeys([*_LOOPBACK, host, *_own_names(host)]))
    return st.App(
        Path(__file__).with_name("page.py"),
        routes=routes(),
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
    )


def _own_names(host: str) -> list[str]:
    """The names under which a machine that listens to all can be reached; none for one that listens to itself."""
    if host in _LOOPBACK:
        return []
    name = socket.gethostname()
    try:
        addresses = socket.gethostbyname_ex(name)[2]
    except OSError:
        addresses = []
    return [name, socket.getfqdn(), *addresses]


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Its protocol is named, because asyncio turns Nagle's delay off only for sockets that name TCP."""
    listening = None
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)[0]
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind(where)
        listening.listen(128)
    except OSError as error:
        if listening is not None:
            listening.close()
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}. Another viewer may be running there; "
            f"give another one, such as --port {port + 1}, or another --host."
        ) from error
    return listening
