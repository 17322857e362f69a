import pytest

from freetoken.commands.quantity import parse_bytes, parse_rate, show_gib
from freetoken.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24GB", 24_000_000_000),
        ("0.5TiB", 512 << 30),
        (" 64 gib ", 64 << 30),
        ("512MiB", 512 << 20),
        ("1.5k", 1500),
        (".5g", 500_000_000),
        ("24G", 24_000_000_000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text, "--vram") == size


@pytest.mark.parametrize("text", ["24", "", "GiB", "-1GiB", "24 bytes", "1e3GB", "24GiB/s", "24XB"])
def test_a_size_without_a_unit_or_a_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--vram .*give a size with its unit, such as 24GiB"):
        parse_bytes(text, "--vram")


def test_nothing_is_no_size() -> None:
    with pytest.raises(ConfigError, match="--vram 0GiB must be above 0"):
        parse_bytes("0GiB", "--vram")


def test_rates_are_sizes_per_second() -> None:
    assert parse_rate("25GB/s", "--link") == 25e9
    assert parse_rate("1.5 TB / s", "--link") == 1.5e12
    assert parse_rate("25gb/s", "--link") == 25e9
    for text in ("25GB", "25", "25GB/h", "/s", "25Gb/s", "25 Gib /s"):
        with pytest.raises(ConfigError, match="--link"):
            parse_rate(text, "--link")


def test_sizes_are_shown_in_gib() -> None:
    assert show_gib(24 << 30) == "24.0 GiB"
