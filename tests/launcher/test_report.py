import io
import json
import shlex

import pytest

from freetoken.launcher.child import explain_exit
from freetoken.launcher.health import Health, read_health
from freetoken.launcher.notify import Notifier
from freetoken.launcher.report import Report, base_url, curl_line, describe_server, show_bytes
from freetoken.wire.messages import Phase

READY = Health(is_ready=True, phase=Phase.READY, context_tokens=8192, model="m'x")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def loading(loaded: int) -> Health:
    return Health(is_ready=False, phase=Phase.LOADING, loaded_bytes=loaded, total_bytes=2 * 10**9)


def show_start(out: io.StringIO) -> None:
    clock = Clock()
    report = Report(out, out, clock)
    report.progress(Health(is_ready=False, phase=Phase.STARTING))
    clock.now_s = 1.5
    report.progress(loading(0))
    clock.now_s = 4.0
    report.progress(loading(10**9))
    report.log_line("a log line")
    clock.now_s = 7.0
    report.progress(loading(2 * 10**9))
    clock.now_s = 9.0
    report.progress(Health(is_ready=False, phase=Phase.CHECKING))
    clock.now_s = 9.1
    report.ready(READY, "the text")


def test_each_phase_is_a_line_with_its_seconds() -> None:
    out = io.StringIO()
    show_start(out)
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["starting", "1.5", "s"],
        ["a", "log", "line"],
        ["loading", "5.5", "s", "2", "GB", "of", "2", "GB", "364", "MB/s", "…"],
        ["loading", "7.5", "s", "2", "GB", "267", "MB/s"],
        ["checking", "0.1", "s"],
        ["ready", "9.1", "s", "in", "all"],
        ["the", "text"],
    ]


def test_a_terminal_shows_the_running_phase_in_one_line_apart_from_logs() -> None:
    out = Terminal()
    show_start(out)
    shown = [line.rpartition("\x1b[2K")[2] for line in out.getvalue().split("\n")]
    assert "a log line" in shown
    assert sum("loading" in line for line in shown) == 1
    assert "1 GB of 2 GB" in out.getvalue()


def test_the_speed_of_a_moment_is_not_shown() -> None:
    out = Terminal()
    clock = Clock()
    report = Report(out, out, clock)
    report.progress(loading(0))
    for clock.now_s, loaded in ((0.3, 10**9), (1.0, 2 * 10**9)):
        report.progress(loading(loaded))
    first, second = out.getvalue().split("of 2 GB")[1:]
    assert "/s" not in first
    assert "2 GB/s" in second


@pytest.mark.parametrize("can_chat", [True, False])
def test_the_curl_line_is_what_a_shell_runs(can_chat: bool) -> None:
    words = shlex.split(curl_line("m'x", "http://h:1", has_key=True, can_chat=can_chat))
    body = json.loads(words[words.index("-d") + 1])
    assert words[:2] == ["curl", f"http://h:1/v1/{'chat/' if can_chat else ''}completions"]
    assert body["model"] == "m'x"
    assert ("messages" in body) == can_chat
    assert "Authorization: Bearer $FREETOKEN_API_KEY" in words


def test_the_description_has_url_and_context_and_no_key() -> None:
    text = describe_server(READY, "http://h:1", has_key=False, can_chat=True)
    assert "m'x is served at http://h:1/v1" in text
    assert "effective context: 8192 tokens" in text
    assert "Authorization" not in text


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("example.org", "http://example.org:1"),
    ],
)
def test_the_url_is_one_that_works_on_this_machine(host: str, url: str) -> None:
    assert base_url(host, 1) == url


def test_bytes_are_shown_in_decimal_units() -> None:
    shown = [show_bytes(count) for count in (0, 999, 1500, 2_000_000, 1_380_000_000)]
    assert shown == ["0 B", "999 B", "1.5 kB", "2 MB", "1.38 GB"]


@pytest.mark.parametrize(
    ("code", "lines", "reason"),
    [
        (1, ["a: error: no 7", "noise at exit"], "a: no 7"),
        (1, ["Traceback", "  x", "ValueError: 3", ""], "a ended with exit code 1: ValueError: 3"),
        (1, [], "a ended with exit code 1"),
        (0, ["bye"], "a ended with exit code 0"),
        (-11, ["b: error: other"], "a was killed by SIGSEGV"),
        (-9, [], "a was killed by SIGKILL (by hand, or by the kernel for want of memory)"),
        (-99, [], "a was killed by signal 99"),
    ],
)
def test_an_end_is_explained_by_the_process_s_own_last_word(
    code: int, lines: list[str], reason: str
) -> None:
    assert explain_exit("a", code, lines) == reason


def test_the_end_of_one_that_we_killed_is_explained_by_why_unless_it_says_more() -> None:
    assert explain_exit("a", -9, ["x"], "no pulse") == "a hung and was killed: no pulse"
    assert explain_exit("a", -9, ["a: error: no 7"], "no pulse") == "a: no 7"


def test_health_is_read_strictly_enough_to_know_our_own_answers() -> None:
    sizes = {"loaded_bytes": 1, "total_bytes": 2, "context_tokens": None}
    body = {"phase": "loading", "detail": "x", "model": "a", "given_up_pid": 0, **sizes}
    assert read_health(503, body) == Health(
        is_ready=False, phase=Phase.LOADING, detail="x", loaded_bytes=1, total_bytes=2, model="a"
    )
    ready = {**body, "phase": "ready", "context_tokens": 7}
    assert read_health(200, ready) == Health(True, Phase.READY, "x", 1, 2, 7, "a")
    for wrong in ({**body, "phase": "?"}, {}, [], None, "x", {**body, "loaded_bytes": None}):
        with pytest.raises((ValueError, LookupError, TypeError)):
            read_health(200, wrong)


def test_without_a_service_manager_nothing_is_sent_and_nothing_fails() -> None:
    for environ in ({}, {"NOTIFY_SOCKET": "/nowhere/sock"}, {"NOTIFY_SOCKET": "@no-such-socket"}):
        notifier = Notifier(environ)
        notifier.ready("x")
        notifier.alive()
        assert notifier.watchdog_s is None


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_watchdog_is_heeded_only_if_it_is_ours(
    environ: dict[str, str], seconds: float | None
) -> None:
    assert Notifier(environ).watchdog_s == seconds


def test_a_reader_that_went_away_does_not_end_the_server() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    show_start(Closed())
