"""What the pages say runs: their Python as it stands, their commands as far as the program's own options, and their links."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer

import specjax
from specjax.checkpoints.heads import save_head
from specjax.cli.app import app
from specjax.cli.drafters import parse_drafter
from specjax.cli.options import Settings, join_arguments
from specjax.statistics import expected_tokens
from tests import heads

ROOT = Path(__file__).parents[1]
PATHS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "checkpoints").rglob("*.md")])
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PATHS}
EXAMPLES = "\n".join(path.read_text() for path in sorted((ROOT / "examples").glob("*.py")))
NEEDS_THE_DEFAULT_MODEL = ("README.md",)


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language; "" for those that name none."""
    fences = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", PAGES[page], re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, name, text in fences if name == language]


def code(page: str) -> list[str]:
    """The Python of a page, but for what it shows of an example, word for word, which runs in test_examples.py."""
    return [text for text in blocks(page, "python") if text not in EXAMPLES]


def run(page: str, **names):
    for block in code(page):
        exec(compile(block, page, "exec"), dict(names))


def test_every_fence_is_of_a_known_kind():
    for page, text in PAGES.items():
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) % 2 == 0, page
        assert set(re.findall(r"^ *```(\w+)$", text, re.MULTILINE)) <= {"python"}, page
        assert len(blocks(page, "python")) == text.count("```python"), page


@pytest.mark.parametrize(
    "page", [page for page in PAGES if code(page) and page not in (*NEEDS_THE_DEFAULT_MODEL, "docs/training.md")]
)
def test_the_code_runs(page):
    run(page)


def test_the_code_about_trained_drafts_runs(tmp_path, monkeypatch):
    """With a tiny model in place of the reader's, and untrained drafts for it in the folders that the page names."""
    monkeypatch.chdir(tmp_path)
    for name, make in (("eagle", heads.eagle_head), ("medusa", heads.medusa_heads), ("draft", heads.draft_layers)):
        save_head(make(), f"{name}_folder")
    assert len(code("docs/training.md")) == 1
    run(
        "docs/training.md",
        model=heads.target(),
        prompts=[[1, 2, 3], [5]],
        params=specjax.SamplingParams(max_tokens=4, seed=1),
    )


@pytest.mark.default_model
@pytest.mark.parametrize("page", NEEDS_THE_DEFAULT_MODEL)
def test_the_code_with_the_default_model_runs(page, smollm2, monkeypatch, capsys):
    """The model is loaded once for all tests, in float32."""
    asked = []
    monkeypatch.setattr(specjax, "load_model", lambda *source: asked.append(source) or smollm2, raising=False)
    run(page)
    assert asked == [("smollm2-135m-instruct",)]
    assert len(capsys.readouterr().out.split()) > 50


def commands(page: str) -> list[list[str]]:
    """The command lines of a page as lists of words, without comments and redirections."""
    text = "\n".join(blocks(page, "")).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    started = ("specjax ", "make ", "python scripts/", "scripts/")
    split = [shlex.split(line, comments=True) for line in lines if line.startswith(started)]
    return [[word for word in words if not re.match(r"\d?[<>]", word)] for words in split]


ALL_COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(
    ("page", "words"), ALL_COMMANDS, ids=lambda value: value if isinstance(value, str) else " ".join(value[:3])
)
def test_the_commands_exist(page, words):
    program, *arguments = words
    if program == "specjax":
        name, *arguments = arguments
        command = typer.main.get_command(app).commands[name]
        # Parses all options and calls nothing. What is wrong is an exception.
        context = command.make_context(name, arguments, obj=Settings())
        assert not context.args
        if context.params.get("drafter") is not None:
            parse_drafter(context.params["drafter"], context.params["num_speculative_tokens"])
        if "distributed" in context.params:
            join = ("coordinator_address", "num_processes", "process_id", "distributed", "mesh")
            join_arguments(*(context.params[option] for option in join))
    elif program == "make":
        (target,) = [word for word in arguments if "=" not in word]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "scripts/tpu_vm_batch.sh":
        done = subprocess.run(["sh", program, "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        # The part of specjax is one of its calls.
        line = shlex.split(next(word for word in shlex.split(done.stdout) if word.startswith("--command=")))
        test_the_commands_exist(page, ["specjax", *line[line.index("batch") :]])
    else:
        script = (ROOT / arguments[0] if program == "python" else ROOT / program).read_text()
        for option in (word.split("=")[0] for word in arguments if word.startswith("--")):
            named = {option, option.removeprefix("--").replace("-", "_")}
            shared = (ROOT / "scripts" / "training_run.py").read_text() if "training_run" in script else ""
            assert any(name in script + shared for name in named), option


def test_commands_were_found():
    programs = {words[0] for _, words in ALL_COMMANDS}
    assert programs >= {"specjax", "make", "python", "scripts/tpu_vm_batch.sh"}
    assert len(ALL_COMMANDS) > 15


def anchors(page: Path) -> set[str]:
    """What can stand behind # in a link to a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_the_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_is_in_the_index():
    index = PAGES["docs/README.md"]
    for page in PAGES:
        name = page.removeprefix("docs/")
        if page.startswith("docs/") and name != "README.md":
            assert f"({name})" in index, page


def numbers(row: str) -> list[float]:
    """The numbers in the cells of a table's row, but for its first cell."""
    return [float(number) for number in re.findall(r"[\d.]+", row.split("|", 2)[2])]


def test_the_figures_about_speed_are_those_that_were_measured():
    page, measurements = PAGES["docs/speed.md"], ROOT / "docs" / "measurements"
    found = {row["drafter"]: row for row in json.loads((measurements / "drafts.json").read_text())["results"]}
    labels = {
        "prompt lookup, K = 8": "lookup 8",
        "trained head, chain of 4": "eagle chain 4",
        "trained head, tree of 16": "eagle tree 16",
        "trained head, growing tree of 16": "eagle growing tree 16",
        "lookup, else the head as a chain of 4": "lookup 8, then eagle chain 4",
    }
    for label, name in labels.items():
        (row,) = re.findall(rf"^\| {label} \|.*$", page, re.MULTILINE)
        kinds = found[name]["by_category"]
        assert numbers(row) == pytest.approx(
            [found[name]["tokens_per_round"], *(kinds[kind] for kind in ("writing", "math", "extraction"))], abs=0.0051
        ), label
    costs = json.loads((measurements / "round_cpu.json").read_text())["verify_cost_over_fastest_plain"]
    for dtype in ("bfloat16", "float32"):
        (row,) = re.findall(rf"^\| {dtype}, over the fastest plain step \|.*$", page, re.MULTILINE)
        assert numbers(row) == pytest.approx([costs[dtype][size] for size in ("2", "4", "8", "16")], abs=0.0051)


def test_the_table_of_the_formula_is_right():
    rows = re.findall(r"^\| (0\.\d) \|(.*)\|$", PAGES["docs/speed.md"], re.MULTILINE)
    assert len(rows) == 4
    for acceptance, cells in rows:
        wanted = [expected_tokens(float(acceptance), length) for length in (1, 2, 4, 8)]
        assert [float(cell) for cell in cells.split("|")] == pytest.approx(wanted, abs=0.0051)


def test_the_api_reference_has_every_public_name(tmp_path):
    command = [sys.executable, "-W", "error", ROOT / "scripts" / "make_docs.py", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, "")
    top = (tmp_path / "specjax.html").read_text(encoding="utf-8")
    for name in specjax.__all__:
        is_module = (tmp_path / "specjax" / f"{name}.html").exists()
        assert is_module == (name == "drafters")
        assert is_module or f'id="{name}"' in top, name
    # Modules of packages that list their public names are there too.
    assert (tmp_path / "specjax" / "serving" / "engine.html").exists()
