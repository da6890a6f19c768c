"""``--drafter`` and what it stands for."""

import dataclasses

import jax
import pytest
import tokenizers
from jax.sharding import PartitionSpec

import specjax
from specjax.certificates.tiny import table_model
from specjax.checkpoints.heads import save_head
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.cli import drafters
from specjax.cli.drafters import DRAFTERS, Part, make_drafter, parse_drafter
from specjax.cli.options import CallError
from specjax.drafters import PromptLookup, Stacked
from specjax.parallel import make_mesh
from specjax.tree import DraftTree
from tests import heads


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("none", ()),
        ("auto", (Part("auto"),)),
        ("lookup", (Part("lookup"),)),
        ("draft=a.gguf", (Part("draft", "a.gguf"),)),
        ("lookup+draft=a.gguf", (Part("lookup"), Part("draft", "a.gguf"))),
        ("draft=a+b.gguf", (Part("draft", "a+b.gguf"),)),
        ("lookup+eagle", (Part("lookup"), Part("eagle"))),
        ("medusa=heads", (Part("medusa", "heads"),)),
        ("lookup+draft=a+lookups/b=c", (Part("lookup"), Part("draft", "a+lookups/b=c"))),
    ],
)
def test_what_can_be_asked_for(text, parts):
    assert parse_drafter(text, None) == parts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--drafter is ''; it must be none, lookup, draft=MODEL, .* or auto, or several joined by +"),
        ("guess", "--drafter is 'guess'"),
        ("lookup+guess", r"--drafter is 'lookup\+guess'"),
        ("lookup=3", "--drafter is 'lookup=3'"),
        ("lookup+", r"--drafter is 'lookup\+'"),
        ("none=1", "--drafter is 'none=1'"),
        ("lookup+draft", r"lookup\+draft: draft is incomplete: --drafter draft=MODEL"),
        ("lookup+none", "none stands alone; it cannot be stacked"),
        ("auto+draft=a", "auto stands alone; it cannot be stacked"),
        ("draft=a+lookup", r"draft always proposes something, .* put it last \(lookup can come first\)"),
        ("draft=a+draft=b", "draft always proposes something"),
        ("lookup+lookup", "lookup is there twice"),
        ("lookup+lookup+draft=a", "lookup is there twice"),
        ("eagle+lookup", "eagle always proposes something"),
    ],
)
def test_what_cannot(text, message):
    with pytest.raises(CallError, match=message):
        parse_drafter(text, None)


def test_a_name_whose_argument_may_be_left_out(monkeypatch):
    kind = drafters.Kind(None, None, argument="PATH", needs_argument=False)
    monkeypatch.setitem(DRAFTERS, "heads", kind)
    assert parse_drafter("heads", None) == (Part("heads"),)
    assert parse_drafter("lookup+heads=a", None) == (Part("lookup"), Part("heads", "a"))
    assert drafters.known_names() == "none, lookup, draft=MODEL, medusa[=FOLDER], eagle[=FOLDER], heads[=PATH] or auto"
    with pytest.raises(CallError, match="heads is incomplete"):
        parse_drafter("heads=", None)


def test_what_is_made(chat_model):
    assert make_drafter((), None, None, None) is None
    lookup = make_drafter((Part("lookup"),), 3, None, None).functions
    assert isinstance(lookup, PromptLookup)
    assert lookup.num_speculative_tokens == 3
    stack = make_drafter(parse_drafter(f"lookup+draft={chat_model}", 5), 5, "float32", heads.target()).functions
    assert isinstance(stack, Stacked)
    assert (stack.first.tree.num_nodes, stack.then.tree.num_nodes) == (5, 5)
    assert stack.sources == ("prompt_lookup", "draft_model(tiny-chat)")


def test_a_draft_model_that_is_split_is_read_into_shares(chat_model):
    parts = parse_drafter(f"lookup+draft={chat_model}", 2)
    whole = make_drafter(parts, 2, "float32", heads.target())
    split = make_drafter(parts, 2, "float32", heads.target(), split_over=make_mesh(1, 2))
    assert (whole.functions.then.split, split.functions.then.split) == (False, True)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(whole.params)} == {1}
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(split.params)} == {2}
    assert split.params[1]["layers"][0]["mlp"]["down"].sharding.spec == PartitionSpec(None, "model")


def test_what_cannot_be_split_is_refused(tmp_path):
    save_head(heads.draft_layers(), tmp_path / "distilled")
    distilled = f"lookup+draft={tmp_path / 'distilled'}"
    for text, mesh, message in (
        ("auto", "model=2", "--drafter auto has no draft model to split; it must have draft=MODEL"),
        ("lookup+eagle", "model=2", r"--drafter lookup\+eagle has no draft model to split"),
        ("none", "model=2", "--drafter none has no draft model to split"),
        ("draft=a.gguf", None, "--split-draft is given without --mesh, whose devices the draft model is split over"),
        (distilled, "model=2", "distilled was distilled from the target, .* leave --split-draft out"),
    ):
        with pytest.raises(CallError, match=message):
            drafters.check_split_draft(parse_drafter(text, None), text, mesh)
    drafters.check_split_draft(parse_drafter("lookup+draft=a.gguf", None), "lookup+draft=a.gguf", "data=8")


def test_heads_are_found_by_folder(tmp_path):
    """And a head of another kind, or for another target, is told before or with the target's name."""
    save_head(dataclasses.replace(heads.eagle_head(), tree=DraftTree((-1, 0, 0))), tmp_path / "head")
    part = (Part("eagle", str(tmp_path / "head")),)
    made = make_drafter(part, None, None, heads.target())
    assert made.functions.tree == DraftTree((-1, 0, 0))
    assert make_drafter(part, 3, None, heads.target()).functions.tree == DraftTree.chain(3)
    with pytest.raises(ValueError, match=r"rule 'block' takes drafts of shape .*; this drafter proposes a tree"):
        drafters.check_drafter(part, None, "block", greedy=False, allow_lossy=False)
    drafters.check_drafter(part, 3, "block", greedy=False, allow_lossy=False)  # then it is a chain
    with pytest.raises(ValueError, match="was trained as eagle: --drafter eagle="):
        drafters.check_drafter((Part("medusa", part[0].argument),), None, "auto", greedy=False, allow_lossy=False)
    # A distilled draft model's folder stands where a model's name or folder does.
    save_head(dataclasses.replace(heads.draft_layers(), tree=DraftTree((-1, 0, 0))), tmp_path / "draft")
    part = (Part("draft", str(tmp_path / "draft")),)
    made = make_drafter(part, None, None, heads.target())
    assert (made.name, made.functions.tree) == ("draft_model(1 layers for tiny)", DraftTree((-1, 0, 0)))
    assert make_drafter(part, 3, None, heads.target()).functions.tree == DraftTree.chain(3)
    with pytest.raises(ValueError, match=r"rule 'block' takes drafts of shape .*; this drafter proposes a tree"):
        drafters.check_drafter(part, None, "block", greedy=False, allow_lossy=False)
    with pytest.raises(ValueError, match="was trained as eagle: --drafter eagle="):
        drafters.check_drafter((Part("draft", str(tmp_path / "head")),), None, "auto", greedy=False, allow_lossy=False)
    with pytest.raises(ValueError, match="no medusa head for 'tiny' comes with specjax"):
        make_drafter((Part("medusa"),), None, None, heads.target())


def test_a_draft_with_another_vocabulary(monkeypatch, capsys):
    def model(words):
        vocabulary = tokenizers.models.WordLevel({word: id for id, word in enumerate(words)}, words[0])
        tokenizer = Tokenizer(tokenizers.Tokenizer(vocabulary))
        return dataclasses.replace(table_model(len(words), seed=0), tokenizer=tokenizer, name=words)

    loaded = {"same.gguf": model("abcd"), "other.gguf": model("dxa"), "foreign.gguf": model("wxyz")}
    monkeypatch.setattr(specjax, "load_model", lambda source, dtype, mesh: loaded[source], raising=False)

    def draft_of(source, target):
        return make_drafter((Part("draft", source),), 2, None, target)

    target = model("abcd")
    assert draft_of("same.gguf", target).model is loaded["same.gguf"]
    assert capsys.readouterr().err == ""
    assert draft_of("other.gguf", target).model.tokenizer is target.tokenizer
    line = "draft dxa: 2 tokens are in both vocabularies: 50.0% of the target's 4, 66.7% of the draft's 3"
    assert line in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError, match="target abcd and the draft wxyz have too little in common"):
        draft_of("foreign.gguf", target)
