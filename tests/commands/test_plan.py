"""`ft plan`: what it prints, what it refuses, and that it needs config.json only."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from freetoken import cli
from freetoken.commands.plan import run
from freetoken.commands.resolve import resolve_config
from freetoken.errors import ConfigError
from freetoken.worker.memory import Memory, ShortfallError
from tests.planned import MODELS

QWEN = str(MODELS / "qwen3-30b-a3b")
CARD = ("--vram", "24GiB", "--host-ram", "64GiB", "--link", "25GB/s")


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run(argv) == 0
    return capsys.readouterr().out


def test_the_plan_is_printed_part_by_part_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, QWEN, *CARD)
    assert "48 layers of 128 experts, 8 a token, 9.00 MiB each" in text
    gpu = text.partition("GPU memory, MiB")[2].partition("host memory, MiB")[0]
    sizes = {
        line.split()[0]: int(line.split()[1].replace(",", "")) for line in gpu.strip().splitlines()
    }
    total = sizes.pop("sum")
    assert {"weights", "ring", "scratch", "graphs", "kv", "slots"} <= sizes.keys()
    assert 0 <= sum(sizes.values()) - total <= len(sizes), "each rounded up"
    assert re.search(r"banks +55,296 ", text)
    assert re.search(r"^context +40960 tokens per request, window 40960 ", text, re.MULTILINE)
    assert re.search(r"^slots +\d+ of 6144 experts resident \(\d\d\.\d %\)", text, re.MULTILINE)
    assert "passes of 32768 tokens" in text


def test_more_context_costs_resident_experts_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, QWEN, *CARD)
    rows = re.findall(r"^[* ] +(\d+) +([\d.]+) % +([\d.]+) +([\d.]+) +([\d.]+) s$", text, re.M)
    columns = [[float(row[i]) for row in rows] for i in range(5)]
    assert columns[0] == [4096, 8192, 16384, 32768, 40960]
    for falling in columns[1:4]:
        assert falling == sorted(falling, reverse=True)
    assert columns[4] == sorted(columns[4])
    assert all(local > uniform for uniform, local in zip(*columns[2:4], strict=True))
    assert "link copies 25.0 GB/s and gathers 23.0 GB/s" in text


def test_a_context_that_cannot_be_is_said_so_in_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = plan(capsys, QWEN, *CARD, "--max-seq-len-override", "262144")
    assert re.search(r"262144 +does not fit: [\d,]+ MiB short", text)


def test_the_help_promises_no_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "MODEL directory with a config.json, or hub name options:" in text
    assert "demo" not in text


def test_the_options_of_serve_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(
        capsys, QWEN, *CARD, "--moe-cache-size", "800", "--num-tokens", "32768",
        "--extend-threshold", "0", "--max-step-tokens", "1024", "--page-size", "64",
    )  # fmt: skip
    assert "slots        800 of 6144" in text
    assert "(512 pages of 64)" in text
    assert "up to 0 new tokens on demand" in text
    assert "1024 at a time" in text


def test_what_cannot_be_ends_with_the_typed_shortfall(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ShortfallError) as refused:
        run([str(MODELS / "gpt-oss-120b"), *CARD])
    assert refused.value.memory is Memory.HOST
    assert cli.main(["plan", QWEN, *CARD, "--moe-cache-rate", "0.9"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("ft: error: the model with a KV pool of ")
    assert "short; use a larger GPU, ask for fewer expert slots" in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no model is given"),
        ([QWEN, "--vram", "24"], "--vram 24: give a size with its unit"),
        ([QWEN, "--link", "25GB"], "--link 25GB: give bytes per second"),
        ([QWEN, "--tflops", "much"], "--tflops much must be a number above 0"),
        ([QWEN, "--device", "cpu"], "ft plan is about GPUs; leave --device cpu out"),
        ([QWEN, "--experts", "in-place"], "leave --experts in-place out"),
        (["/nowhere/at/all"], "no directory /nowhere/at/all"),
        ([QWEN, "--vrma", "1GiB"], "unknown option --vrma, did you mean --vram"),
    ],
)
def test_a_bad_request_is_refused_by_name(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run([*argv[:1], *CARD, *argv[1:]] if argv else [*CARD])


def test_without_a_gpu_the_hardware_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU to plan for; give --vram and --host-ram, for"):
        run([QWEN])
    with pytest.raises(ConfigError, match="no GPU to plan for; give --host-ram, for"):
        run([QWEN, "--vram", "24GiB"])


def test_a_config_without_a_type_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(QWEN, tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    del config["torch_dtype"]
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"does not say in which type .* give --dtype"):
        run([str(tmp_path / "m"), *CARD])
    assert "9.00 MiB each" in plan(capsys, str(tmp_path / "m"), *CARD, "--dtype", "bfloat16")


def test_of_a_model_on_the_hub_only_the_config_is_fetched() -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, patterns: list[str]) -> Path:
        asked.append((name, patterns))
        return Path(QWEN)

    found = resolve_config("owner/model", download=download)
    assert (str(found.directory), found.name) == (QWEN, "owner/model")
    assert asked == [("owner/model", ["config.json", "hf_quant_config.json"])]
