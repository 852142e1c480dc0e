"""Starting the viewer: what it loads, what it refuses, whom it answers."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from apps.viewer.launch import make_app, view
from apps.viewer.library import Library
from wsi_mil.errors import UserError


def test_the_viewer_loads_no_network_library() -> None:
    code = (
        "import sys, apps.viewer.launch, apps.viewer.page, wsi_mil.runs, wsi_mil.heatmap, wsi_mil.stages.heatmap\n"
        "print([m for m in ('torch', 'torchvision', 'lightning', 'timm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_busy_port_is_named(study, capsys) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port}.*--port {port + 1}"):
            view(study.run, port=port)


def test_a_folder_without_a_run_or_without_slides_is_refused(study, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        view(tmp_path)
    with pytest.raises(UserError, match="--slides DIR"):
        view(study.run, slides=tmp_path / "nowhere")
    copy = tmp_path / "run"
    shutil.copytree(study.run, copy)
    config = (copy / "config.yaml").read_text().replace(str(study.slides), "null")
    (copy / "config.yaml").write_text(config)
    with pytest.raises(UserError, match="does not say where its slides are"):
        view(copy)


def test_only_this_machines_names_are_answered(library: Library) -> None:
    app = make_app(library)
    with TestClient(app, base_url="http://127.0.0.1:8501") as client:
        assert client.get("/_stcore/health").status_code == 200
        assert client.get("/_stcore/health", headers={"host": "evil.example"}).status_code == 400
        assert client.get("/wsi/anything").status_code == 404
        assert client.get("/wsi/%2e%2e/secret").status_code in (400, 404)
        page = client.get("/")
        assert page.status_code == 200
        assert "text/html" in page.headers["content-type"]
