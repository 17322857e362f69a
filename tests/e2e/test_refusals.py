"""What cannot work is refused before anything heavy starts: in seconds, with one last line."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint, write_json, write_safetensors
from tests.processes import ft

LIMIT_S = 5.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def assert_refused(*argv: str, names: tuple[str, ...], **environ: str) -> None:
    begun_s = time.monotonic()
    with ft("serve", *argv, **environ) as running:
        code = running.wait(LIMIT_S)
        assert code == 2, running.output
        assert running.last_line.startswith("ft: error: "), running.output
        for name in names:
            assert name in running.last_line
        assert "Traceback" not in running.output
        assert time.monotonic() - begun_s < LIMIT_S


def test_a_busy_port(model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert_refused(str(model), "--port", port, names=(port, "in use", "--port"))


def test_a_missing_directory(tmp_path: Path) -> None:
    assert_refused(str(tmp_path / "none"), names=(str(tmp_path / "none"),))


def remove_shard(model: Path) -> None:
    (model / "model-2.safetensors").unlink()


def cut_shard(model: Path) -> None:
    os.truncate(model / "model-1.safetensors", (model / "model-1.safetensors").stat().st_size - 3)


def break_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0"}')


def break_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def quantise(model: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "awq"}}
    write_json(model / "config.json", config)


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (remove_shard, ("model-2.safetensors is missing",)),
        (cut_shard, ("model-1.safetensors", "bytes")),
        (break_tokenizer, ("tokenizer.json",)),
        (break_config, ("config.json",)),
        (quantise, ("awq",)),
    ],
)
def test_a_damaged_checkpoint(
    model: Path, damage: Callable[[Path], None], names: tuple[str, ...]
) -> None:
    damage(model)
    assert_refused(str(model), "--port", "0", names=names)


def test_more_weights_than_memory(model: Path) -> None:
    """A sparse file: its size is real, its blocks are not."""
    (model / "model.safetensors.index.json").unlink()
    write_safetensors(model / "model.safetensors", {"w": [0, 1 << 20]})
    shard = model / "model.safetensors"
    header = shard.read_bytes()[8:]
    elements = 1 << 40
    text = header.replace(b"[0, 1048576]", b"[%d, 1048576]" % (elements >> 20))
    text = text.replace(b'"data_offsets": [0, 0]', b'"data_offsets": [0, %d]' % (2 * elements))
    shard.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(shard, 8 + len(text) + 2 * elements)
    assert_refused(str(model), "--port", "0", names=("2048.00 GiB", "GiB are available"))


@pytest.mark.parametrize(
    ("argv", "environ", "names"),
    [
        (("--port-numer", "1"), {}, ("--port-numer", "--port?")),
        ((), {"FREETOKEN_PROT": "1"}, ("FREETOKEN_PROT", "FREETOKEN_PORT?")),
        (("--num-tokens", "33"), {}, ("33", "16")),
        (("--run-dir", "/tmp/" + "x" * 120), {}, ("107", "--run-dir")),
    ],
)
def test_options_that_cannot_work(
    model: Path, argv: tuple[str, ...], environ: dict[str, str], names: tuple[str, ...]
) -> None:
    assert_refused(str(model), *argv, names=names, **environ)
