"""The command line: flags, help, exit codes, and the terminal chat."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import pocketllm
from pocketllm.backends.base import LoadProgress
from pocketllm.cli import main as main_module
from pocketllm.cli.chat import Conversation
from pocketllm.cli.main import main
from pocketllm.cli.options import Parser, add_options, flag_of, given_options
from pocketllm.cli.progress import ProgressLine
from pocketllm.config import EngineArgs, ServerArgs
from pocketllm.errors import ConfigurationError
from pocketllm.generation import GenerationService
from pocketllm.llm import LLM
from tests.conftest import WriteGGUF
from tests.fake_serving import fake, make_service

ROOT = Path(__file__).resolve().parents[2]


def parse(*argv: str) -> argparse.Namespace:
    parser = Parser("pocketllm test")
    add_options(parser, EngineArgs, "engine")
    return parser.parse_args(argv)


def test_every_field_is_a_flag_and_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for cls in (EngineArgs, ServerArgs):
        for option in dataclasses.fields(cls):
            assert flag_of(option.name) in text
    assert "--no-enable-prefix-caching" in text
    assert "examples:" in text


def test_flags_become_options() -> None:
    arguments = parse("--max-model-len", "64", "--no-enable-prefix-caching", "--kv-cache-memory=1GiB", "--backend-options", '{"a": 1}')
    assert given_options(arguments, EngineArgs) == {
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "kv_cache_memory": "1GiB",
        "backend_options": {"a": 1},
    }
    assert given_options(parse(), EngineArgs) == {}


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["serve", "--prot", "5"], "--prot is not known; did you mean --port?"),
        (["serve", "--max-model", "5"], "--max-model is not known; did you mean --max-model-len?"),
        (["serve", "extra"], "extra is not known"),
        (["chat", "--host", "x"], "--host is not known"),
        (["server"], "invalid choice: 'server'"),
        (["serve", "--port"], "argument --port: expected one argument"),
    ],
)
def test_unknown_arguments_are_one_line_and_exit_2(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("pocketllm: error: ")
    assert part in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["serve", "--port", "x"], "\"port\" = 'x' is not valid"),
        (["serve", "--port", "99999"], '"port" = 99999 is not valid'),
        (["serve", "--backend", "cuda"], "\"backend\" = 'cuda' is not valid: send one of auto, torch, cpp"),
        (["chat", "--temperature", "hot"], '"temperature" = "hot" is not supported'),
        (["chat", "--temperature", "-1", "-p", "Hi"], '"temperature" = -1 is not supported'),
        (["chat", "--reasoning-effort", "odd", "--model", "/no/such/model.gguf"], '"reasoning_effort" = "odd"'),
        (["inspect", "--model-format", "zip"], '"model_format"'),
        (["serve", "--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["chat", "--model", "/no/such/model.gguf", "-p", "Hi"], "/no/such/model.gguf"),
        (["inspect", "/no/such/model.gguf"], "/no/such/model.gguf"),
    ],
)
def test_wrong_values_are_one_line_and_exit_2(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = ["--port", "0"] if argv[0] == "serve" and "--port" not in argv else []
    assert main([*argv, *port]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("pocketllm: error: ")
    assert part in last


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pocketllm {pocketllm.__version__}\n"
    assert main([]) == 2
    assert "pocketllm serve" in capsys.readouterr().out


def test_module_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "pocketllm", "--version"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == f"pocketllm {pocketllm.__version__}\n"


def test_closed_pipe_is_no_traceback() -> None:
    code = (
        "import sys; from pocketllm.cli import main as m; m._inspect = lambda _: [print('x' * 100) for _ in range(9999)] and 0; sys.exit(m.main(['inspect']))"
    )
    command = f'"{sys.executable}" -c "$0" | head -1'
    run = subprocess.run(["bash", "-c", command, code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == "x" * 100 + "\n"
    assert run.stderr == ""


def test_output_that_the_terminal_can_not_show_is_escaped(write_gguf: WriteGGUF) -> None:
    path = write_gguf("modèle.gguf")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-m", "pocketllm", "inspect", path], capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert "mod\\xe8le.gguf" in run.stdout


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "_inspect", interrupted)
    assert main(["inspect"]) == 130


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_rewritten_on_a_terminal_and_sparse_elsewhere() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with ProgressLine(stream) as line:
            for index in range(30):
                line(LoadProgress(index / 30, f"weights {index}/30"))
    assert terminal.getvalue().count("\n") == 0
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert "weights 29/30" in terminal.getvalue()
    assert pipe.getvalue() == "pocketllm: loading   0%  weights 0/30\n"


def test_what_the_log_says_while_loading_has_lines_of_its_own() -> None:
    logger, level = logging.getLogger("pocketllm.torch_engine"), logging.getLogger("pocketllm").level
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with ProgressLine(stream) as line:
            line(LoadProgress(0.0, "importing torch"))
            logger.info("a vision tower is skipped")
            logger.warning("max_model_len is %d", 544)
        logger.warning("after the load")
    assert pipe.getvalue() == "pocketllm: loading   0%  importing torch\npocketllm: a vision tower is skipped\npocketllm: max_model_len is 544\n"
    assert "importing torch\r\x1b[Kpocketllm: a vision tower is skipped\n" in terminal.getvalue()
    assert "after" not in terminal.getvalue()
    assert logging.getLogger("pocketllm").level == level


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Makes `pocketllm chat` open a fake backend with these options."""
    options: dict[str, Any] = {"eos_after": 6}

    def open_(_args: EngineArgs, progress: Any = None) -> GenerationService:
        return make_service(fake(**options), progress or (lambda _progress: None))

    monkeypatch.setattr(GenerationService, "open", open_)
    return options


def chat(monkeypatch: pytest.MonkeyPatch, stdin: str, *argv: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    return main(["chat", "--temperature", "0", *argv])


@pytest.mark.usefixtures("fake_model")
class TestChat:
    def test_one_prompt(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        assert chat(monkeypatch, "", "-p", "Hi", "--system", "Be short.") == 0
        out = capsys.readouterr().out
        assert len(out) == 7
        assert chat(monkeypatch, "", "-p", "Hi") == 0
        assert capsys.readouterr().out != out  # the system message was part of the prompt

    def test_piped_lines_have_history(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        assert chat(monkeypatch, "Hi\n\nHi\n/history\n") == 0
        first, second, *history = capsys.readouterr().out.splitlines()
        assert first != second  # the second has the first turn in its prompt
        assert history == ["user: Hi", f"assistant: {first}", "user: Hi", f"assistant: {second}"]

    def test_reset_and_retry(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        assert chat(monkeypatch, "Hi\n/retry\n/reset\nHi\n/system Be short.\n/reset\nHi\n/history\n") == 0
        first, again, reset, system, *history = capsys.readouterr().out.splitlines()
        assert first == again == reset != system
        assert history == ["system: Be short.", "user: Hi", f"assistant: {system}"]

    def test_set(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        assert chat(monkeypatch, "/set max_tokens 2\nHi\n/set max_tokens default\n/reset\nHi\n/set\n/system\n/help\n") == 0
        captured = capsys.readouterr()
        assert [len(line) for line in captured.out.splitlines()] == [2, 6]
        assert "temperature = 0" in captured.err
        assert "(no system message)" in captured.err
        for command in ("/help", "/reset", "/system", "/set", "/history", "/save", "/retry", "/quit"):
            assert command in captured.err

    def test_save(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert chat(monkeypatch, f"Hi\n/save {tmp_path}/talk.json\n/quit\nnever answered\n") == 0
        (answer,) = capsys.readouterr().out.splitlines()
        saved = json.loads((tmp_path / "talk.json").read_text())
        assert saved == {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]}

    @pytest.mark.parametrize(
        ("line", "part"),
        [
            ("/save /no/such/directory/talk.json", "/no/such/directory/talk.json can't be written (No such file or directory)"),
            ("/save", "/save needs the name of a file"),
            ("/save ~no_such_user/x", "can't be written"),
            ("/nonsense", "/nonsense is no command: /help lists them"),
            ("/set nonsense 1", "nonsense is no setting"),
            ("/set temperature hot", '"temperature" = "hot" is not supported'),
            ("/set top_k 1.5", '"top_k" = 1.5 is not supported'),
            ("/retry", "There is no message to answer again"),
            ("/set reasoning_effort odd", '"reasoning_effort" = "odd"'),
        ],
    )
    def test_mistakes_are_one_line_and_the_talk_goes_on(
        self, line: str, part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert chat(monkeypatch, f"{line}\n/set reasoning_effort default\nHi\n") == 2
        captured = capsys.readouterr()
        assert len(captured.out.splitlines()) == 1
        (error,) = [text for text in captured.err.splitlines() if text.startswith("pocketllm: error: ")]
        assert part in error

    def test_failed_turn_is_not_in_the_history(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fake_model: dict[str, Any]) -> None:
        fake_model["context_length"] = 40
        assert chat(monkeypatch, f"Hi\n{'x' * 50}\n/history\n") == 2
        answer, *history = capsys.readouterr().out.splitlines()
        assert history == ["user: Hi", f"assistant: {answer}"]

    def test_an_answer_that_breaks_off_leaves_the_error_a_line_of_its_own(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fake_model: dict[str, Any]
    ) -> None:
        fake_model["fail_after"] = 2
        assert chat(monkeypatch, "", "-p", "Hi") == 2
        captured = capsys.readouterr()
        assert re.fullmatch(r"[a-z]{2}\n", captured.out)
        assert captured.err.splitlines()[-1].startswith("pocketllm: error: ")

    def test_input_that_is_no_text_is_one_line(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
        assert main(["chat"]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("pocketllm: error: The input is not utf-8 text")

    def test_ctrl_c_stops_the_answer_alone(self, capsys: pytest.CaptureFixture[str], fake_model: dict[str, Any]) -> None:
        fake_model.update(eos_after=None, tokens_per_second=100)
        conversation = Conversation()
        with LLM(EngineArgs()) as llm:
            end = time.monotonic() + 5
            interrupt = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.3); os.kill({os.getpid()}, {int(signal.SIGINT)})"])
            assert conversation.answer(llm, "Hi") is None
            interrupt.wait()
            assert time.monotonic() < end
            partial = capsys.readouterr().out.strip()
            assert conversation.turns == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": partial}]
            assert 0 < len(partial) < 400


def test_settings_know_their_names() -> None:
    conversation = Conversation()
    conversation.set("temperature", "0.5")
    conversation.set("reasoning_effort", "low")
    assert conversation.settings == {"temperature": 0.5, "reasoning_effort": "low"}
    with pytest.raises(ConfigurationError):
        conversation.set("temperature", "-1")
    assert conversation.settings["temperature"] == 0.5


SERVE = """
import sys
sys.path.insert(0, {root!r})
from tests.fake_serving import fake, make_service
from pocketllm.generation import GenerationService
GenerationService.open = lambda args, progress=None: make_service(fake(context_length=args.max_model_len), progress)
from pocketllm.cli.main import main
sys.exit(main(["serve", "--port", "0", "--max-model-len", "77"]))
"""


def test_serve_shows_how_far_it_is_and_uses_the_flags() -> None:
    code = SERVE.format(root=str(ROOT))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"ready at (http\S+)", line):
                break
        assert httpx.get(f"{match[1]}/health").json()["max_model_len"] == 77
        assert "pocketllm: loading  50%  weights 1/2\n" in lines
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


TALK = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C on the terminal is a signal to this process
sys.path.insert(0, {root!r})
from tests.fake_serving import fake, make_service
from pocketllm.generation import GenerationService
GenerationService.open = lambda args, progress=None: make_service(fake(tokens_per_second=50), progress)
from pocketllm.cli.main import main
sys.exit(main(["chat", "--temperature", "0", "--max-tokens", "400"]))
"""


def test_chat_on_a_terminal() -> None:
    code = TALK.format(root=str(ROOT))
    terminal, inner = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
    os.close(inner)
    seen = ""

    def wait_for(pattern: str) -> None:
        """Read until `pattern` shows up in what has not been waited for yet."""
        nonlocal seen
        while not (match := re.search(pattern, seen)):
            ready, _, _ = select.select([terminal], [], [], 20)
            assert ready, f"{pattern!r} did not come; what did is {seen!r}"
            seen += os.read(terminal, 10_000).decode()
        seen = seen[match.end() :]

    try:
        wait_for("/help lists the commands")
        wait_for("> ")
        os.write(terminal, b"Hi\n")
        wait_for("Hi\r\n[a-z]{3}")
        os.write(terminal, b"\x03")  # stops the answer
        wait_for(r"\(stopped\)")
        wait_for("> ")
        time.sleep(0.3)  # a Ctrl-C between readline's prompt and its wait for a key is only seen at the next key
        os.write(terminal, b"\x03")  # at the prompt: no answer to stop, and no reason to leave
        wait_for("Ctrl-D or /quit leaves.")
        wait_for("> ")
        os.write(terminal, b"/set max_tokens 3\nHi\n")
        wait_for(r"\(3 tokens, ")
        wait_for("> ")
        os.write(terminal, b"\x04")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
