import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from freetoken.commands.resolve import complete, resolve_model
from freetoken.config import Config
from freetoken.errors import ConfigError
from tests.checkpoints import write_checkpoint, write_json
from tests.processes import ROOT, clean_environment, free_port

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def no_download(name: str, patterns: list[str]) -> Path:
    raise AssertionError(f"{name} must not be downloaded")


def test_no_model_is_the_demo(tmp_path: Path) -> None:
    found = resolve_model(None, ensure_demo=lambda: tmp_path / "the-demo")
    assert (found.directory, found.name) == (tmp_path / "the-demo", "the-demo")


def test_a_directory_is_itself_and_named_after_its_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    for model in (str(tmp_path / "m"), "m", "./m/", str(tmp_path / "m/../m")):
        found = resolve_model(model, download=no_download)
        assert (found.directory, found.name) == (tmp_path / "m", "m")


def test_a_completed_configuration_keeps_the_names_it_was_given(tmp_path: Path) -> None:
    found = resolve_model(None, ensure_demo=lambda: tmp_path / "demo")
    assert complete(Config(), found).served_model_name == ["demo"]
    assert complete(Config(), found).model == str(tmp_path / "demo")
    assert complete(Config(served_model_name=["x"]), found).served_model_name == ["x"]


@pytest.mark.parametrize(
    "model", ["/nowhere/at/all", "./here", "a/b/c", "~/none-such", "-x", "a//b"]
)
def test_a_path_that_is_not_there_is_no_hub_name(model: str) -> None:
    with pytest.raises(ConfigError, match=r"no directory .* is no hub name"):
        resolve_model(model, download=no_download)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="is a file; give the directory"):
        resolve_model(str(tmp_path / "model.gguf"))


# ---------------------------------------------------------------- the hub


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks of the hub to fetch `owner/tiny`; counts the files given out."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.directory = directory
        self.given: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        names = sorted(
            str(file.relative_to(self.server.directory))
            for file in self.server.directory.rglob("*")
            if file.is_file()
        )
        if path.startswith("/api/models/owner/tiny/tree/"):
            entries = [self._entry(name) for name in names]
            self._send(200, json.dumps(entries).encode(), with_body)
        elif path.startswith("/api/models/owner/tiny"):
            siblings = [{"rfilename": name} for name in names]
            answer = {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(answer).encode(), with_body)
        elif path.startswith(f"/owner/tiny/resolve/{COMMIT}/"):
            name = path.split("/", 5)[5]
            if with_body:
                self.server.given.append(name)
            self._send(200, (self.server.directory / name).read_bytes(), with_body)
        elif "gated" in path:
            self._send(403, b"{}", with_body, {"X-Error-Code": "GatedRepo"})
        else:
            self._send(404, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})

    def _entry(self, name: str) -> dict[str, object]:
        data = (self.server.directory / name).read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}

    def _send(
        self, status: int, body: bytes, with_body: bool, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    directory = write_checkpoint(tmp_path / "hub")
    (directory / "README.md").write_text("not needed")
    (directory / "consolidated.safetensors").write_text("the same weights in another form")
    (directory / "original").mkdir()
    (directory / "original/params.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("x")
    with Hub(directory) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def resolve_in_a_process(
    name: str, endpoint: str, home: Path, **extra: str
) -> subprocess.CompletedProcess[str]:
    """huggingface_hub reads its environment when imported, so each try is a process of its own."""
    program = (
        "import sys; from freetoken.commands.resolve import *; from freetoken.errors import *\n"
        "try: found = resolve_model(sys.argv[1]); print(found.directory, found.name)\n"
        "except EngineError as error: sys.exit(str(error))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, name],
        cwd=ROOT,
        env=clean_environment(HF_ENDPOINT=endpoint, HF_HOME=str(home), **extra),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_hub_name_is_downloaded_once_without_what_is_not_needed(hub: Hub, tmp_path: Path) -> None:
    done = resolve_in_a_process("owner/tiny", hub.url, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    directory, name = done.stdout.split()
    assert name == "owner/tiny"
    assert sorted(hub.given) == [
        "chat_template.jinja",
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert {path.name for path in Path(directory).iterdir()} == set(hub.given)
    assert "Fetching" in done.stderr, "a progress bar"
    offline = resolve_in_a_process(
        "owner/tiny", f"http://127.0.0.1:{free_port()}", tmp_path / "home"
    )
    assert offline.stdout == done.stdout, offline.stderr


def test_a_quantised_model_is_refused_before_its_weights_come(hub: Hub, tmp_path: Path) -> None:
    write_json(
        hub.directory / "config.json",
        {"model_type": "x", "quantization_config": {"quant_method": "gptq"}},
    )
    done = resolve_in_a_process("owner/tiny", hub.url, tmp_path / "home")
    assert done.returncode == 1
    assert "quant_method gptq" in done.stderr.splitlines()[-1]
    assert not any(name.endswith(".safetensors") for name in hub.given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/other", "no model owner/other at URL and no directory of that name here"),
        ("owner/gated", "owner/gated is gated: accept its terms at URL/owner/gated"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_line(
    hub: Hub, tmp_path: Path, name: str, message: str
) -> None:
    done = resolve_in_a_process(name, hub.url, tmp_path / "home")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(message.replace("URL", hub.url))


def test_a_hub_that_cannot_be_reached_is_one_clear_line(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = resolve_in_a_process("owner/tiny", url, tmp_path)
    assert done.returncode == 1
    assert f"{url} cannot be reached" in done.stderr.splitlines()[-1]
    offline = resolve_in_a_process("owner/tiny", url, tmp_path, HF_HUB_OFFLINE="1")
    assert "cannot be reached (HF_HUB_OFFLINE is set)" in offline.stderr.splitlines()[-1]
