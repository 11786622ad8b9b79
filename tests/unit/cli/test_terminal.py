"""Text of stores and files on its way to a terminal."""

import json

import pytest

from gradsharding.cli import terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("u/a b-ü-模.npy", "u/a b-ü-模.npy"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("a\r\nerror: b\tc", "a\\r\\nerror: b\\tc"),
        ("\x9b31m\x85", "\\x9b31m\\x85"),
        ("abc\u202egnp.\u2066", "abc\\u202egnp.\\u2066"),
        ("\u2028\u2029\ufeff\x7f", "\\u2028\\u2029\\ufeff\\x7f"),
        ("\ud800", "\\ud800"),
    ],
)
def test_printable(text, shown):
    assert terminal.printable(text) == shown


MARKUP = "[red]x[/red] [link=http://a]b[/link] :smile: [/]"


@pytest.mark.parametrize("show", [terminal.say, lambda text: terminal.complain("error", text)])
def test_markup_and_controls_do_nothing_in_messages(capsys, monkeypatch, show):
    monkeypatch.setenv("FORCE_COLOR", "1")
    show(f"{MARKUP}\x1b[5m")
    shown = capsys.readouterr().err
    assert f"{MARKUP}\\x1b[5m\n" in shown
    assert "\x1b[5m" not in shown


def test_a_table_shows_text_as_it_is_on_one_line(capsys):
    terminal.print_table([("output", MARKUP), ("", "k" * 500 + "\x1b[A")])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"output  {MARKUP}"
    assert second == " " * 8 + "k" * 500 + "\\x1b[A"


def test_further_lines_of_an_error_cannot_pass_for_ours(capsys):
    terminal.complain("error", "the log:\nerror: all is lost\x1b[A\nbye")
    assert capsys.readouterr().err == "error: the log:\n  error: all is lost\\x1b[A\n  bye\n"


def test_json_is_ascii_on_one_line(capsys):
    document = {"key": "a\x1b\u202e\n\ud800ü"}
    terminal.print_json(document)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == document


def test_tracebacks_hide_signatures(capsys):
    url = "http://s/k?X-Amz-Credential=AKIA%2F1&X-Amz-Expires=9&X-Amz-Signature=0badc0de&x-amz-security-token=t0ken"
    terminal.show_traceback(ValueError(url))
    shown = capsys.readouterr().err
    assert "X-Amz-Expires=9" in shown
    assert not [secret for secret in ("AKIA", "0badc0de", "t0ken") if secret in shown]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (36_870_024, "36.9 MB"), (5e13, "50.0 TB")]
)
def test_in_bytes(count, text):
    assert terminal.in_bytes(count) == text
