import json
import os
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from freetoken.commands import checkpoint
from freetoken.errors import ConfigError
from tests.checkpoints import write_checkpoint, write_json, write_safetensors


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def test_a_whole_checkpoint_is_described(directory: Path) -> None:
    found = checkpoint.check(directory)
    assert found.model_type == "qwen3_moe"
    assert found.weight_bytes == 2 * (6 + 4 + 5)
    assert found.has_chat_template


def test_a_single_file_needs_no_index(directory: Path) -> None:
    (directory / checkpoint.INDEX).unlink()
    (directory / "model-1.safetensors").rename(directory / checkpoint.SINGLE)
    assert checkpoint.check(directory).weight_bytes == 2 * 10


@pytest.mark.parametrize(
    ("dtype", "weight_bytes"), [("auto", 30), ("float32", 60), ("bfloat16", 30)]
)
def test_weights_are_priced_in_the_type_they_are_loaded_in(
    directory: Path, dtype: str, weight_bytes: int
) -> None:
    assert checkpoint.check_weights(directory, dtype) == weight_bytes


def test_integers_keep_their_type(directory: Path) -> None:
    write_safetensors(directory / "model-2.safetensors", {"c": [5]}, dtype="I16")
    assert checkpoint.check_weights(directory, "float32") == 4 * 10 + 2 * 5


def test_a_chat_template_may_be_a_file_or_absent(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    assert not checkpoint.check(directory).has_chat_template
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert checkpoint.check(directory).has_chat_template


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(text) and None


def write_bytes(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(data) and None


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    def cut_short(directory: Path) -> None:
        os.truncate(directory / name, (directory / name).stat().st_size - num_bytes)

    return cut_short


def quantise(config: object) -> Callable[[Path], None]:
    return lambda directory: write_json(
        directory / "config.json", {"model_type": "x", "quantization_config": config}
    )


def header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


ENTRY = {"dtype": "F99", "shape": [1], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), "model holds no config.json"),
        (write("config.json", "{"), "config.json is not valid JSON"),
        (write("config.json", "[]"), "config.json holds a JSON list"),
        (write("config.json", "{}"), "config.json names no model_type"),
        (write_bytes("config.json", b"\xff"), "config.json is not UTF-8"),
        (quantise({"quant_method": "awq"}), "quantised (quant_method awq)"),
        (write("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}'), "method FP8"),
        (
            write("config.json", '{"model_type": "x", "text": {"quantization_config": {"a": 1}}}'),
            "quantised (quant_method not named)",
        ),
        (quantise({"bits": 4}), "quantised (quant_method not named)"),
        (remove("model-2.safetensors"), "model-2.safetensors is missing (2 weight files"),
        (remove("model.safetensors.index.json"), "holds no weights (model.safetensors or"),
        (write("model.safetensors.index.json", "{}"), "index.json has no weight_map"),
        (
            write("model.safetensors.index.json", '{"weight_map": {"a": "../x"}}'),
            "index.json names '../x', which is no file name",
        ),
        (cut("model-1.safetensors", 1), "model-1.safetensors has"),
        (cut("model-2.safetensors", 11), "model-2.safetensors is no safetensors file, or cut"),
        (write_bytes("model-1.safetensors", b""), "cut short (0 bytes)"),
        (write_bytes("model-1.safetensors", b"\xff" * 99), "is no safetensors file"),
        (write_bytes("model-1.safetensors", header("{,}")), "has a damaged header"),
        (write_bytes("model-1.safetensors", header("[1]")), "has a damaged header"),
        (write_bytes("model-1.safetensors", header('{"a": 1}')), "has a damaged header"),
        (
            write_bytes("model-1.safetensors", header(json.dumps({"a": ENTRY})) + b"00"),
            "has a damaged header: KeyError('F99')",
        ),
        (
            lambda directory: write_safetensors(directory / "model-2.safetensors", {"d": [1]}),
            "model-2.safetensors lacks tensor c",
        ),
        (remove("tokenizer.json"), "holds no tokenizer.json"),
        (write("tokenizer.json", "{}"), "tokenizer.json is no tokenizer"),
        (write("tokenizer.json", '{"model": '), "tokenizer.json is no tokenizer"),
        (write("tokenizer_config.json", "{"), "tokenizer_config.json is not valid JSON"),
    ],
)
def test_a_fault_is_refused_by_the_name_of_its_file(
    directory: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(directory)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        checkpoint.check(directory)
    assert "\n" not in str(caught.value)


def test_other_formats_are_named(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"model\.gguf is a GGUF file, which is not supported"):
        checkpoint.check(tmp_path)
    remove(checkpoint.INDEX)(directory)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is pickled"):
        checkpoint.check(directory)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
@pytest.mark.parametrize(
    ("name", "mode"),
    [(".", 0), (".", 0o644), ("config.json", 0), ("model-1.safetensors", 0), ("tokenizer.json", 0)],
)
def test_what_cannot_be_read_is_refused_by_name(name: str, mode: int) -> None:
    with tempfile.TemporaryDirectory() as top:  # pytest's own are closed to others
        os.chmod(top, 0o755)
        directory = write_checkpoint(Path(top) / "model")
        (directory / name).chmod(mode)
        os.seteuid(65534)
        try:
            with pytest.raises(ConfigError, match=re.escape(str((directory / name).resolve()))):
                checkpoint.check(directory)
        finally:
            os.seteuid(0)


def test_the_unreadable_is_refused_for_its_owner_too(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: Is a directory"):
        checkpoint.check(directory)
