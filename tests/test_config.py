import re
import tomllib
from pathlib import Path

import pytest

from freetoken import options, tomlfile
from freetoken.commands.config import as_table, as_toml, dump
from freetoken.config import Config
from freetoken.errors import ConfigError

UNITS = (
    "token", "page", "slot", "second", "request", "name", "address", "port", "share", "thread",
    "step", "cache in",
)  # fmt: skip


def resolve(*argv: str, **environ: str) -> options.Resolved:
    parser = options.Parser("ft serve", "")
    options.add_options(parser)
    return options.resolve(parser.parse(argv), environ)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ft.toml"


def test_flags_win_over_environment_over_file_over_defaults(file: Path) -> None:
    file.write_text("port = 1\npage_size = 2\nmax_rows = 3\n")
    environ = {"FREETOKEN_PORT": "10", "FREETOKEN_PAGE_SIZE": "20"}
    resolved = resolve("--config", str(file), "--port", "100", **environ)
    config, origins = resolved.config, resolved.origins
    assert (config.port, config.page_size, config.max_rows) == (100, 20, 3)
    assert config.max_step_tokens == Config().max_step_tokens
    assert origins["port"] == "--port"
    assert origins["page_size"] == "FREETOKEN_PAGE_SIZE"
    assert origins["max_rows"] == str(file)
    assert origins["max_step_tokens"] == "default"


def test_the_environment_may_name_the_file_and_a_flag_wins(file: Path, tmp_path: Path) -> None:
    file.write_text("port = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("port = 2\n")
    assert resolve(FREETOKEN_CONFIG=str(file)).config.port == 1
    assert resolve("--config", str(other), FREETOKEN_CONFIG=str(file)).config.port == 2


def test_the_model_is_positional_or_a_flag_but_not_two_models() -> None:
    assert resolve("m", "--port", "1").config.model == "m"
    assert resolve("--port", "1", "m").origins["model"] == "MODEL"
    assert resolve("--model", "m").config.model == "m"
    assert resolve("m", FREETOKEN_MODEL="n").config.model == "m"
    with pytest.raises(ConfigError, match="two models given: m and --model n"):
        resolve("m", "--model", "n")


def test_underscores_in_flags_and_dashes_in_keys_are_understood(file: Path) -> None:
    file.write_text("max-rows = 7\n")
    config = resolve("--page_size=32", "--config", str(file)).config
    assert (config.page_size, config.max_rows) == (32, 7)


def test_lists_come_from_repeated_flags_commas_and_toml(file: Path) -> None:
    file.write_text('served_model_name = ["a", "b"]\n')
    for resolved in (
        resolve("--served-model-name", "a", "--served-model-name", "b"),
        resolve("--served-model-name", "a,b"),
        resolve(FREETOKEN_SERVED_MODEL_NAME="a, b"),
        resolve("--config", str(file)),
    ):
        assert resolved.config.served_model_name == ["a", "b"]


def test_a_switch_is_a_flag_without_a_value(file: Path) -> None:
    file.write_text("moe_cache_auto = true\n")
    assert resolve("--moe-cache-auto", "m").config.model == "m"
    for resolved in (
        resolve("m", "--moe-cache-auto"),
        resolve(FREETOKEN_MOE_CACHE_AUTO="1"),
        resolve("--config", str(file)),
    ):
        assert resolved.config.moe_cache_auto
    assert not resolve().config.moe_cache_auto
    with pytest.raises(ConfigError, match="--moe-cache-auto"):
        resolve("--moe-cache-auto=maybe")


def test_an_empty_variable_counts_as_not_set() -> None:
    assert resolve(FREETOKEN_API_KEY="", FREETOKEN_PORT="").config == Config()


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--port-numer", "1"], {}, "unknown option --port-numer, did you mean --port?"),
        (["--max-rwos=1"], {}, "unknown option --max-rwos, did you mean --max-rows?"),
        (["--moe-cache"], {}, "unknown option --moe-cache, did you mean --moe-cache-"),
        (["--zzz"], {}, "unknown option --zzz$"),
        (["-p", "1"], {}, "unknown option -p"),
        (["--por", "1"], {}, "unknown option --por, did you mean --port?"),
        (["a", "b"], {}, "unexpected argument 'b'"),
        (["--port"], {}, "--port: expected one argument"),
        ([], {"FREETOKEN_PROT": "1"}, "FREETOKEN_PROT, did you mean FREETOKEN_PORT?"),
        (["--port", "70000"], {}, "--port 70000 must be less than or equal to 65535 (TCP port"),
        (["--num-tokens", "-5"], {}, "--num-tokens -5 must be greater than or equal to 1"),
        (["--port", "x"], {}, "--port x must be a valid integer"),
        ([], {"FREETOKEN_PORT": "x"}, "FREETOKEN_PORT=x must be a valid integer"),
        (["--extend-threshold", "x"], {}, "--extend-threshold x must be a valid integer or 'auto'"),
        (["--extend-threshold", "-1"], {}, "must be greater than or equal to 0 or 'auto'"),
        (["--dtype", "bf16"], {}, "--dtype bf16 must be 'auto', 'bfloat16', 'float32' or"),
        (["--stall-timeout-s", "nan"], {}, "--stall-timeout-s nan must be a finite number"),
        (["--served-model-name", "a,"], {}, "--served-model-name a, must have at least 1 char"),
        (["--host", ""], {}, "--host  must have at least 1 character"),
        (["--moe-cache-rate", "1.5"], {}, "--moe-cache-rate 1.5 must be less than or equal to 1"),
    ],
)
def test_a_bad_value_or_name_is_refused_with_source_and_limit(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    pattern = message if message.endswith("$") else re.escape(message)
    with pytest.raises(ConfigError, match=pattern):
        resolve(*argv, **environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown key prot in FILE, did you mean port?"),
        ("[http]\nport = 1", "unknown key http in FILE"),
        ("port = 70000", "port = 70000 in FILE must be less than or equal to 65535"),
        ("port = true", "port = true in FILE must not be a boolean"),
        ("max-rows = 1\nmax_rows = 2", "FILE sets max_rows twice"),
        ("port = ", "FILE is not valid TOML"),
        (
            'served_model_name = ["a", 1]',
            "served_model_name = ['a', 1] in FILE must be a valid str",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message.replace("FILE", str(file)))):
        resolve("--config", str(file))


def test_a_missing_file_is_refused_by_name(file: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{file}: No such file")):
        resolve("--config", str(file))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-tokens 32 --num-pages 2", "--num-tokens 32 and --num-pages 2 both"),
        ("--num-tokens 33", "--num-tokens 33 is no multiple of the page size 16; use 32 or 48"),
        ("--num-tokens 5", "no multiple of the page size 16; use 16$"),
        ("--num-pages 2 --context-tokens 33", "--context-tokens 33 does not fit .* 32 tokens"),
        ("--num-tokens 32 --kv-reserve-tokens 48", "--kv-reserve-tokens 48 does not fit"),
        ("--context-tokens 9 --max-seq-len-override 8", "9 exceeds --max-seq-len-override 8"),
        ("--moe-cache-size 4 --moe-cache-rate .5", "--moe-cache-size 4 and --moe-cache-rate 0.5"),
        ("--moe-cache-auto --moe-cache-rate .5", "--moe-cache-rate 0.5 and --moe-cache-auto both"),
        ("--moe-cache-size 4 --experts in-place", "--moe-cache-size is about expert slots"),
        ("--moe-cache-auto --experts in-place", "--moe-cache-auto is about expert slots"),
        ("--extend-threshold 0 --experts in-place", "--extend-threshold is about expert slots"),
    ],
)
def test_contradictions_are_refused_with_both_values(argv: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(*argv.split())


@pytest.mark.parametrize(
    "argv",
    [
        "--num-tokens 32 --context-tokens 32",
        "--num-pages 2 --kv-reserve-tokens 32",
        "--moe-cache-size 4 --experts slots",
        "--moe-cache-rate 1 --experts auto --extend-threshold 0",
        "--page-size 1 --num-tokens 33",
        "--port 0",
    ],
)
def test_values_at_their_limits_are_accepted(argv: str) -> None:
    resolve(*argv.split())


@pytest.mark.parametrize("show", [as_table, as_toml])
def test_a_secret_is_never_shown(show: object) -> None:
    resolved = resolve("--api-key", "hunter2")
    assert callable(show)
    assert "hunter2" not in show(resolved)
    assert "hunter2" not in repr(resolved.config)
    with pytest.raises(ConfigError) as caught:
        resolve("--api-key", "hunter2 with blanks")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        resolve("--api-key", "hunter2", "--num-tokens", "3")
    assert "hunter2" not in str(caught.value)


def test_the_table_names_every_option_and_its_origin() -> None:
    table = as_table(resolve("--port", "7", FREETOKEN_MAX_ROWS="3"))
    lines = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert lines.keys() == Config.model_fields.keys()
    assert lines["port"] == ["7", "--port"]
    assert lines["max_rows"] == ["3", "FREETOKEN_MAX_ROWS"]
    assert lines["model"] == ["-", "default"]


def test_printed_toml_is_a_file_that_gives_the_same_configuration(file: Path) -> None:
    resolved = resolve("some/model", "--port", "7", "--run-dir", "/r", "--served-model-name", "a,b")
    file.write_text(as_toml(resolved))
    assert resolve("--config", str(file)).config == resolved.config


def test_a_dumped_configuration_is_read_back_with_its_secrets(file: Path) -> None:
    config = Config(
        model='a "b"\\c\n\x7fé',
        api_key="k'\"\\",
        moe_cache_rate=0.1,
        stall_timeout_s=1e-5,
        extend_threshold=3,
        run_dir=Path("/tmp/ü"),
    )
    file.write_text(dump(config), encoding="utf-8")
    assert resolve("--config", str(file)).config == config


@pytest.mark.parametrize("value", ["", "é\t\0", 'q"\\', 1, 1.5, 1e-7, 1e300, True, ["a", "b"], []])
def test_a_formatted_value_is_that_value_in_toml(value: object) -> None:
    assert tomllib.loads(f"x = {tomlfile.format_value(value)}") == {"x": value}


def test_a_path_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        tomlfile.format_value(Path("/tmp/\udcff"))


def test_every_option_is_documented_with_its_unit_limits_and_default() -> None:
    parser = options.Parser("ft serve", "")
    options.add_options(parser)
    text = " ".join(parser.format_help().split())
    for name, field in Config.model_fields.items():
        assert options.flag_of(name) in text
        assert field.description, name
        if {int, float} & set(options.leaves_of(field.annotation)):
            assert any(unit in field.description for unit in UNITS), name
        if name not in ("model", "served_model_name") and field.default not in (None, False):
            assert f"[{field.default}]" in text, name
    assert "at least 1, at most 1024 [16]" in text
    assert "at least 0, below 1 [0.2]" in text


def test_every_section_of_the_help_begins_at_a_field() -> None:
    assert options.GROUPS.keys() <= Config.model_fields.keys()
    assert next(iter(options.GROUPS)) == next(iter(Config.model_fields))
