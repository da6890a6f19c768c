"""Help, version, and how errors look."""

import subprocess
import sys

import pytest

import specjax


def test_version(specjax_command):
    outcome = specjax_command("--version")
    assert (outcome.code, outcome.out) == (0, f"specjax {specjax.__version__}\n")


def test_help_lists_the_commands_there_are(specjax_command):
    for arguments in (["--help"], []):
        outcome = specjax_command(*arguments)
        for command in ("models", "pull", "generate", "certify"):
            assert command in outcome.out + outcome.err


def test_help_and_version_do_not_wait_for_jax():
    script = (
        "import sys\nfrom specjax.cli import main\n"
        "try: main([sys.argv[1]])\nexcept SystemExit: pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    for option in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", script, option], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        (["--draft-max", "4"], "--num-speculative-tokens K"),
        (["--draft-max=4"], "--num-speculative-tokens K"),
        (["--num-assistant-tokens", "4"], "--num-speculative-tokens K"),
        (["--num_assistant_tokens", "4"], "--num-speculative-tokens K"),
        (["--speculative-num-steps", "4"], "--num-speculative-tokens K"),
        (["--num_speculative_tokens", "4"], "--num-speculative-tokens K"),
        (["--prompt-lookup-num-tokens", "4"], "--drafter lookup --num-speculative-tokens K"),
        (["--assistant-model", "x"], "--drafter draft=MODEL"),
        (["assistant_model=x"], "--drafter draft=MODEL"),
        (["--max-new-tokens", "4"], "--max-tokens"),
        (["--max_tokens", "4"], "--max-tokens"),
    ],
)
def test_a_near_miss_is_answered_with_our_name(specjax_command, arguments, ours):
    outcome = specjax_command("generate", "--prompt", "x", *arguments)
    name = arguments[0].split("=")[0]
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"specjax: no option {name}: here it is {ours}\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nonsense"], "nonsense"),
        (["bench", "--nonsense"], "--nonsense"),
        (["--nonsense"], "--nonsense"),
        (["generate", "--nonsense"], "--nonsense"),
        (["generate", "a prompt"], "--prompt TEXT"),
        (["generate", "--prompt"], "--prompt"),
        (["generate", "--prompt", "x", "--drafter", "none", "--num-speculative-tokens", "3"], "must be 0 or left out; it is 3"),
        (["generate", "--prompt", "x", "--num-speculative-tokens", "33"], "is 33; it must be from 0 to 32"),
        (["generate", "--prompt", "x", "--num-speculative-tokens", "-1"], "is -1; it must be from 0 to 32"),
        (["generate", "--prompt", "x", "--num-speculative-tokens", "two"], "--num-speculative-tokens"),
        (["generate", "--prompt", "x", "--drafter", "medusa=nowhere"], "no trained head is called 'nowhere'"),
        (["generate", "--prompt", "x", "--drafter", "lookup+eagle=nowhere"], "no trained head is called 'nowhere'"),
        (["generate", "--prompt", "x", "--drafter", "draft"], "--drafter draft=MODEL"),
        (["generate", "--prompt", "x", "--drafter", "lookup=3"], "'lookup=3'"),
        (["generate", "--prompt", "x", "--drafter", "guess"], "'guess'"),
        (["generate", "--prompt", "x", "--top-p", "1.5"], "top_p is 1.5"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "--prompt", "x", "--seed", "-1"], "seed is -1"),
        (["generate", "--prompt", "\udcff"], "not UTF-8"),
        (["pull"], "NAME"),
        (["certify"], "give one of --rule NAME, --table and --all"),
        (["certify", "--all", "--table"], "give one of --rule NAME, --table and --all"),
        (["certify", "--rule", "tokens"], "--rule is 'tokens'; it must be one of block, greedy"),
        (["certify", "--table", "--vocab-size", "1"], "--vocab-size is 1; it must be at least 2"),
        (["certify", "--table", "--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["certify", "--table", "--depth", "20"], "at most 200000 can be gone through"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(specjax_command, arguments, part):
    outcome = specjax_command(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert len(outcome.err.splitlines()) == 1
    assert outcome.err.startswith("specjax: ")
    assert part in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [["pull", "no-such-model"], ["generate", "--prompt", "x", "--model", "no-such-model"]],
)
def test_a_failure_is_one_line_and_status_1(specjax_command, arguments):
    outcome = specjax_command(*arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert len(outcome.err.splitlines()) == 1
    assert "no model is called 'no-such-model'" in outcome.err


@pytest.mark.parametrize("place", ["before", "after"])
def test_verbose_adds_the_traceback(specjax_command, place):
    arguments = ["--verbose", "pull", "no-such-model"] if place == "before" else ["pull", "no-such-model", "--verbose"]
    outcome = specjax_command(*arguments)
    assert outcome.code == 1
    assert "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("specjax: no model is called")
