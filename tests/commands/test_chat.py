"""`ft chat` against a real server, and against servers that misbehave."""

from __future__ import annotations

import http.server
import io
import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from freetoken.api.client import ChatClient, ClientError
from freetoken.api.tokenizer import Tokenizer
from freetoken.commands.chat import Chat, converse, run
from freetoken.errors import ConfigError
from freetoken.wire.messages import FinishReason, Submit, unpack_ids
from tests.api import conftest
from tests.api.fake_scheduler import FakeScheduler, Reply, accept_only, delta, saying
from tests.api.running import RunningApi

EOS = 2

# The fixtures of the api's tests.
api, fake, served = conftest.api, conftest.fake, conftest.served
model_dir, tokenizer = conftest.model_dir, conftest.tokenizer


def answering(tokenizer: Tokenizer, text: str) -> Reply:
    return saying([*tokenizer.encode(text, add_special_tokens=False), EOS])


def prompt_of(tokenizer: Tokenizer, submit: Submit) -> str:
    return tokenizer.decode(list(unpack_ids(submit.prompt_ids)), skip_special_tokens=False)


def read_lines(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """A terminal with these lines and interrupts, then Ctrl-D."""
    rest = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(rest, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read_line


def test_a_prompt_gets_one_answer(
    api: RunningApi,
    fake: FakeScheduler,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.reply = answering(tokenizer, "grüße 👋")
    options = ["--system", "Be kind.", "--temperature", "0.5", "--max-tokens", "7", "--seed", "3"]
    assert run(["--url", api.url, *options, "Hello"]) == 0
    assert capsys.readouterr().out == "grüße 👋\n"
    submit = fake.submits[0]
    assert prompt_of(tokenizer, submit).startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello"
    )
    assert submit.max_tokens == 7
    assert (submit.sampling.temperature, submit.sampling.seed) == (0.5, 3)


def test_piped_text_gets_one_answer(
    api: RunningApi,
    fake: FakeScheduler,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.reply = answering(tokenizer, "ok")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert run(["--url", f"{api.url}/v1/", "--model", "tiny"]) == 0
    assert capsys.readouterr().out == "ok\n"
    assert "from a pipe" in prompt_of(tokenizer, fake.submits[0])


def test_turns_follow_each_other_and_a_stopped_answer_stays_in_the_conversation(
    api: RunningApi, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = answering(tokenizer, "one two")
    written: list[str] = []
    has_stopped = False

    def write(text: str) -> None:
        nonlocal has_stopped
        written.append(text)
        if not has_stopped and "two" in "".join(written):
            has_stopped = True
            raise KeyboardInterrupt

    with closing(ChatClient(api.url)) as client:
        chat = Chat(client, "tiny", None, {})
        converse(chat, read_lines("first", "", KeyboardInterrupt, "second"), write)
    roles = [message["role"] for message in chat.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert chat.messages[1]["content"].startswith("one t")
    assert "first" in prompt_of(tokenizer, fake.submits[1])
    assert "one t" in prompt_of(tokenizer, fake.submits[1])
    assert "tiny" in written[0]


def test_stopping_an_answer_aborts_it_at_the_server(
    api: RunningApi, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = saying(tokenizer.encode("endless", add_special_tokens=False), None)

    def write(text: str) -> None:
        raise KeyboardInterrupt

    with closing(ChatClient(api.url)) as client:
        chat = Chat(client, "tiny", None, {})
        with pytest.raises(KeyboardInterrupt):
            chat.ask("go", write)
    fake.wait_for(lambda fake: fake.aborts == [fake.submits[0].request_id])


def test_errors_are_one_clear_line(
    api: RunningApi, fake: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--url", api.url, "--model", "gpt-4", "Hello"]) == 1
    assert capsys.readouterr().err == (
        "ft chat: error: the server answers 404: model 'gpt-4' is not served here; "
        "available: tiny\n"
    )
    assert run(["--url", "http://127.0.0.1:9", "Hello"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "cannot reach http://127.0.0.1:9" in error
    assert "ft serve" in error
    assert run(["--url", "127.0.0.1", "Hello"]) == 1
    assert "is no URL" in capsys.readouterr().err
    assert run(["--url", api.url, "  "]) == 1
    assert "empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temprature", "0", "Hello"], "unknown option --temprature, did you mean --temperature"),
        (["--max-token=5", "Hello"], "unknown option --max-token, did you mean --max-tokens"),
        (["--seed", "x", "Hello"], "--seed: invalid int value: 'x'"),
        (["Hello", "you"], "unexpected argument 'you'"),
    ],
)
def test_a_wrong_option_is_refused_by_name(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(argv)


@pytest.mark.parametrize(
    "argv", [["- a list_of things"], ["--", "--no_flag"], ["--max_tokens", "5", "--", "-x"]]
)
def test_a_prompt_may_begin_with_dashes(
    api: RunningApi, fake: FakeScheduler, tokenizer: Tokenizer, argv: list[str]
) -> None:
    fake.reply = answering(tokenizer, "ok")
    assert run(["--url", api.url, *argv]) == 0
    assert f"user\n{argv[-1]}<|im_end|>" in prompt_of(tokenizer, fake.submits[0])


def test_an_error_in_a_conversation_does_not_end_it(
    api: RunningApi, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = answering(tokenizer, "fine")
    written: list[str] = []
    with closing(ChatClient(api.url)) as client:
        chat = Chat(client, "tiny", None, {"temperature": 99})
        converse(chat, read_lines("bad"), written.append)
        assert chat.messages == []
        assert "error: the server answers 400: temperature" in "".join(written)
        chat = Chat(client, "tiny", None, {})
        converse(chat, read_lines("good"), written.append)
    assert written[-2:] == ["\n\n", "\n"]


class Misbehaving(http.server.BaseHTTPRequestHandler):
    """Answers with whatever the test put into `reply`."""

    reply: tuple[int, str] = (200, "")

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer()

    def answer(self) -> None:
        status, text = Misbehaving.reply
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def misbehaving() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (500, "<html>oops\nmore</html>", "answers 500: <html>oops more</html>"),
        (429, '{"error": "slow down"}', "answers 429: slow down"),
        (200, "data: {broken\n\n", "no JSON"),
        (200, 'data: {"error": {"message": "out of\\nmemory"}}\n\n', "out of memory"),
        (200, 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "before its end"),
        (200, "", "before its end"),
    ],
)
def test_misbehaving_servers_end_in_a_client_error(
    misbehaving: str, status: int, text: str, expected: str
) -> None:
    Misbehaving.reply = (status, text)
    with closing(ChatClient(misbehaving)) as client, pytest.raises(ClientError, match=expected):
        list(client.chat("any", [{"role": "user", "content": "x"}], {}))


@pytest.mark.parametrize("text", ["", "{}", '{"data": [1]}', '{"data": 1}'])
def test_a_list_of_models_that_is_none_is_a_client_error(misbehaving: str, text: str) -> None:
    Misbehaving.reply = (200, text)
    with closing(ChatClient(misbehaving)) as client, pytest.raises(ClientError, match="no list"):
        client.models()


def test_comments_and_foreign_events_are_skipped(misbehaving: str) -> None:
    Misbehaving.reply = (
        200,
        ": keep-alive\n\nevent: ping\ndata: 7\n\n"
        'data: {"choices": []}\n\ndata: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
        'data: {"choices": [{"delta": {"content": "hi"}}]}\n\ndata: [DONE]\n\n',
    )
    with closing(ChatClient(misbehaving)) as client:
        assert list(client.chat("any", [], {})) == ["hi"]


def test_in_a_terminal_it_converses_until_ctrl_d(
    api: RunningApi, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = answering(tokenizer, "over the \x1b]0;title\x07dog")
    script = (
        "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from freetoken.commands.chat import run; sys.exit(run(sys.argv[1:]))"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script, "--url", api.url],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TERM": "dumb"},
        start_new_session=True,  # the terminal becomes its own, so that Ctrl-C reaches it
    )
    os.close(theirs)
    seen = b""

    def read_until(text: bytes, in_silence: Callable[[], None] = lambda: None) -> None:
        nonlocal seen
        silent_s = 0
        while text not in seen:
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)
            else:
                silent_s += 1
                assert silent_s < 10, seen
                in_silence()
        seen = seen.split(text, 1)[1]

    try:
        read_until(b"Ctrl-D ends")
        read_until(b"> ")
        os.write(ours, b"hello\n")
        read_until(b"over the ]0;titledog")
        read_until(b"> ")
        fake.reply = accept_only
        os.write(ours, b"again\n")
        submit = fake.wait_submit(1)
        more = delta(submit.request_id, tokenizer.encode("wait", add_special_tokens=False))
        fake.say(more)
        read_until(b"wait")
        os.write(ours, b"\x03")  # Ctrl-C: just before it waits for more, it is noticed only after
        read_until(b"> ", in_silence=lambda: fake.say(more))
        fake.wait_for(lambda fake: fake.aborts == [submit.request_id])
        os.write(ours, b"\x04")  # Ctrl-D
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_length_limit_is_no_error(
    api: RunningApi,
    fake: FakeScheduler,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = tokenizer.encode("and so on", add_special_tokens=False)
    fake.reply = saying(ids, FinishReason.LENGTH)
    assert run(["--url", api.url, "Hello"]) == 0
    assert capsys.readouterr().out == "and so on\n"
