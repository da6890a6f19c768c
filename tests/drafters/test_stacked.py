"""A stack of a lookup and a draft model: trees, rows of both kinds in one batch, caches, counts. Losslessness: certificates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax import SamplingParams
from specjax.certificates.certificate import QUICKLY
from specjax.decoding import run_rounds
from specjax.drafters import NoDrafter, bind, draft_model, prompt_lookup, stacked
from specjax.drafters.stacked import _asked, overlay
from specjax.row_trees import TreeBounds
from specjax.statistics import SourceStats
from specjax.tree import NO_SOURCE, DraftTree, Law
from tests import hash_model as tiny
from tests.drafters.test_prompt_lookup import reference


def followed(table, prompt, text):
    """The table of a target that is sure of ``text`` after ``prompt``."""
    table = table.copy()
    for place, state in enumerate(tiny.states([*prompt, *text])[len(prompt) - 1 : -1]):
        table[state, text[place]] += 1000
    return table


# Some find themselves again, some not; the first repeats itself for a while.
PROMPTS = [[1, 2, 3, 1, 2], [*range(4, 20), 1, 2], [7], [9, 8, 9]]
TABLE = followed(tiny.random_table(0), PROMPTS[0], [3, 1, 2, 3, 1, 2, 4])
CLOSE_TABLE = TABLE + 0.7 * tiny.random_table(1)


@dataclasses.dataclass(frozen=True)
class Watched(tiny.HashModel):
    """Counts the passes that are really made, by their width."""

    seen: list = dataclasses.field(default_factory=list, compare=False)

    def apply(self, params, tokens, positions, cache, block_mask):
        width = tokens.shape[1]
        jax.debug.callback(lambda: self.seen.append(width))
        return super().apply(params, tokens, positions, cache, block_mask)


WATCHED = Watched()
TARGET, CLOSE = dataclasses.replace(tiny.model(TABLE), functions=WATCHED), tiny.model(CLOSE_TABLE, name="close")
LEVELS = DraftTree((-1, 0, 0, 1, 1, 2))
LOOKUP = prompt_lookup(4, prompt_lookup_min=1)
CHAINS = stacked(LOOKUP, draft_model(CLOSE, 3))
TREES = stacked(LOOKUP, draft_model(CLOSE, tree=LEVELS))
BOTH = pytest.mark.parametrize("stack", [CHAINS, TREES], ids=["chains", "trees"])
NAMES = ("prompt_lookup", "draft_model(close)")
MIXED = [
    SamplingParams(temperature=1.0, top_p=0.9, max_tokens=20, seed=5),
    SamplingParams(temperature=0.0, max_tokens=14),
    SamplingParams(temperature=0.8, top_k=5, max_tokens=20, seed=2**40 + 11),
    SamplingParams(temperature=0.5, max_tokens=17, seed=1),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


# Trees


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 6), st.lists(st.integers(0, 9), max_size=9))
def test_an_overlay_holds_both(length, numbers):
    tree = DraftTree((-1, *(number % node for node, number in enumerate(numbers, 1))))
    both, chain, nodes = overlay(length, tree)
    assert len(chain) == length
    assert [both.parents[node] for node in chain] == [0, *chain][:length]
    places = (0, *nodes)
    assert [both.parents[node] for node in nodes] == [places[parent] for parent in tree.parents[1:]]
    # Siblings keep their order, nothing stands in it twice, and nothing else is there.
    for node, children in enumerate(tree.children):
        assert [places[child] for child in children] == sorted(places[child] for child in children)
        assert both.children[places[node]][: len(children)] == tuple(places[child] for child in children)
    assert {*chain, *nodes} == set(range(1, both.size))
    if both != tree:
        assert list(both.depths) == sorted(both.depths)


def test_overlays_worth_seeing():
    assert overlay(2, DraftTree.chain(3)) == (DraftTree.chain(3), (1, 2), (1, 2, 3))
    assert overlay(3, DraftTree.chain(2)) == (DraftTree.chain(3), (1, 2, 3), (1, 2))
    assert overlay(1, LEVELS)[0] is LEVELS
    # Numbered by branch; with a node more by depth.
    branches = DraftTree((-1, 0, 1, 1, 0, 4))
    assert overlay(2, branches) == (branches, (1, 2), (1, 2, 3, 4, 5))
    assert overlay(3, branches) == (DraftTree((-1, 0, 0, 1, 1, 2, 3)), (1, 3, 6), (1, 3, 4, 2, 5))


# Proposals

HISTORIES = [[1, 2, 3, 1, 2], [*range(4, 20)], [5, 6], [9, 8, 9], [7, 1, 7], [3, 4]]
PARAMS = [SamplingParams(temperature=temperature, seed=seed) for seed, temperature in enumerate((1, 1, 0, 0.7, 0, 1.3))]


@functools.cache
def proposer(bound, law):
    functions = bound.functions.with_law(law)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def propose(context, asked):
        state = functions.init(bound.params, len(HISTORIES), 64)
        return functions.propose(bound.params, state, context, tiny.keys(context), asked)[0].checked()

    return lambda asked: jax.device_get(propose(tiny.context(HISTORIES, PARAMS), jnp.asarray(asked, jnp.int32)))


@pytest.mark.parametrize(("stack", "law"), [(CHAINS, Law.INDEPENDENT), (TREES, Law.WITHOUT_REPLACEMENT)], ids=["chains", "trees"])
def test_rows_of_one_batch_from_different_sources(stack, law):
    tree, chain, nodes = overlay(4, stack.parts[1].functions.tree)
    asked = [tree.num_nodes, tree.num_nodes, tree.num_nodes, 1, 0, 0]
    draft = proposer(stack, law)(asked)
    found, drawn = (proposer(part, part_law)([part.functions.tree.num_nodes] * 6) for part, part_law in
                    zip(stack.parts, (Law.DETERMINISTIC, law), strict=True))  # fmt: skip
    assert draft.source.tolist() == [0, 1, 1, 0, NO_SOURCE, NO_SOURCE]
    assert stack.functions.sources == NAMES
    assert set(draft.laws) == {law}
    chain, nodes = np.array(chain) - 1, np.array(nodes) - 1
    for row, (source, num_asked) in enumerate(zip(draft.source, asked, strict=True)):
        part, places = ((found, chain), (drawn, nodes))[int(source == 1)]
        expected = np.zeros(tree.num_nodes, bool)
        expected[places] = part.valid[row]
        expected &= np.arange(tree.num_nodes) < num_asked
        assert draft.valid[row].tolist() == expected.tolist()
        tokens = draft.tokens[row][places]
        assert tokens[expected[places]].tolist() == part.tokens[row][expected[places]].tolist()
        # q: certain of what was found, else that of the draft model.
        for node in np.flatnonzero(expected) + 1:
            q = draft.parent_log_probs[row, tree.inner_index[tree.parents[node]]]
            if source == 0:
                assert np.flatnonzero(q > -np.inf).tolist() == [draft.tokens[row, node - 1]]
                assert q.max() == 0
            else:
                own = stack.parts[1].functions.tree
                parent = own.parents[nodes.tolist().index(node - 1) + 1]
                np.testing.assert_array_equal(q, drawn.parent_log_probs[row, own.inner_index[parent]])


def test_budgets_are_the_first_nodes_of_the_whole_tree():
    tree = TREES.functions.tree
    propose = proposer(TREES, Law.WITHOUT_REPLACEMENT)
    whole = propose([tree.num_nodes] * 6)
    for asked in range(tree.num_nodes + 1):
        draft = propose([asked] * 6)
        within = np.arange(tree.num_nodes)[None, :] < asked
        np.testing.assert_array_equal(draft.valid, whole.valid & within)
        np.testing.assert_array_equal(draft.tokens[draft.valid], whole.tokens[draft.valid])
        assert (draft.source == NO_SOURCE).all() == (asked == 0)


def test_budgets_of_a_draft_model_that_numbers_in_another_order():
    # Its nodes 1 to 5 are nodes 1 3 4 2 5 of the whole: behind one that is out of reach it drafts nothing.
    assert _asked((1, 3, 4, 2, 5), jnp.arange(7)).tolist() == [0, 1, 1, 2, 4, 5, 5]
    assert _asked((), jnp.arange(3)).tolist() == [0, 0, 0]


def test_a_stack_of_stacks():
    careful, drawing = prompt_lookup(4, prompt_lookup_min=2), CHAINS.parts[1]
    stack = stacked(careful, stacked(prompt_lookup(2, prompt_lookup_min=1), drawing))
    names = ("prompt_lookup", "prompt_lookup (2)", "draft_model(close)")
    assert stack.functions.sources == names
    assert stacked(stacked(careful, LOOKUP), drawing).functions.sources == names
    draft = proposer(stack, Law.INDEPENDENT)([4, 4, 4, 4, 1, 0])
    assert draft.source.tolist() == [0, 2, 2, 1, 1, NO_SOURCE]
    assert draft.valid.sum(axis=1).tolist() == [4, 3, 3, 2, 1, 0]
    assert [draft.tokens[row, : draft.valid[row].sum()].tolist() for row in (0, 3, 4)] == [[3, 1, 2, 3], [8, 9], [1]]


def test_no_q_where_all_laws_are_deterministic():
    functions = CHAINS.functions.with_law(Law.DETERMINISTIC)
    context = tiny.context(HISTORIES, PARAMS)
    state = functions.init(CHAINS.params, 6, 64)
    draft, _ = jax.eval_shape(
        functools.partial(functions.propose, choices=None), CHAINS.params, state, context, num_draft=jnp.full(6, 4)
    )
    assert draft.parent_log_probs is None
    assert set(draft.laws) == {Law.DETERMINISTIC}


# Rounds


@BOTH
def test_the_tokens_are_those_of_plain_decoding(stack):
    completions = specjax.generate(TARGET, PROMPTS, MIXED, drafter=stack, rule="gumbel")
    assert tokens_of(completions) == tokens_of(specjax.generate(TARGET, PROMPTS, MIXED))
    for name in NAMES:
        assert sum(c.stats.by_source[name].num_accepted_tokens for c in completions) > 0
    assert any(all(c.stats.by_source[name].num_drafts for name in NAMES) for c in completions)


@BOTH
def test_the_draft_model_knows_the_text_after_rounds_that_were_not_its_own(stack):
    """Its proposals are those of a draft model that has just been shown the whole text, whoever drafted it."""
    looping = [[row, 20 + row, *range(30, 36), row, 20 + row] for row in range(4)]
    # Two rows go round and round, so that the lookup is right for many rounds; then they leave.
    table = TABLE
    for row in (0, 2):
        table = followed(table, looping[row], ((looping[row][2:8] + looping[row][:2]) * 3)[: 24 - 2 * row])
    params = [dataclasses.replace(GREEDY, max_tokens=40)] * 4
    target = dataclasses.replace(TARGET, params=tiny.model(table).params)
    batch, state = tiny.start(target, looping, params, stack)
    then = batch.program.drafter.then

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def proposals(params, state):
        context = batch.program.context(params, state)
        asked = jnp.full((4,), then.tree.num_nodes)
        fresh = then.init(params.drafter[1], 4, batch.capacity).replace(observed=state.lengths)
        both = (then.propose(params.drafter[1], s, context, tiny.keys(context), asked)[0] for s in (state.drafter.then, fresh))
        return [(draft.tokens, draft.valid) for draft in both]

    without = np.zeros(4, int)
    longest = 0
    for _ in range(12):
        before = np.asarray(state.counters.by_source.num_drafts)
        state, _ = tiny.one_round(batch, state)
        own = np.asarray(state.counters.by_source.num_drafts)[:, 1] > before[:, 1]
        without = np.where(own, 0, without + 1)
        longest = max(longest, without.max())
        if np.asarray(state.running).all():
            assert state.drafter.then.observed.tolist() == state.lengths.tolist()
            kept, fresh = proposals(batch.params, state)
            for one, other in zip(kept, fresh, strict=True):
                np.testing.assert_array_equal(one, other)
    assert longest >= 3


def test_what_only_one_of_them_drafted_is_verified_alone():
    assert TREES.functions.passes == ((1, 3, 6, 7), (1, 2, 3, 4, 5))
    assert CHAINS.functions.passes == ((1, 2, 3),)
    assert stacked(LOOKUP, draft_model(CLOSE, 4)).functions.passes == ()
    found, drawn = PROMPTS[0], PROMPTS[2]
    for prompts, width in (([found] * 4, 5), ([drawn, [8], [5, 6], [3]], 6), ([drawn, found, drawn, found], 8)):
        batch, state = tiny.start(TARGET, prompts, MIXED, TREES)
        jax.effects_barrier()
        WATCHED.seen.clear()
        tiny.one_round(batch, state)
        jax.effects_barrier()
        assert WATCHED.seen == [width]


def test_rounds_that_do_not_need_the_draft_model_do_not_run_it():
    """Also where the chain of the lookup is deeper than what the draft model drafts: to be shown its tokens costs no pass."""
    model = Watched()
    stack = stacked(LOOKUP, draft_model(dataclasses.replace(CLOSE, functions=model), 2))
    functions = stack.functions.with_law(Law.DETERMINISTIC)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def of_a_round(context, state, tokens, counts):
        draft, state = functions.propose(stack.params, state, context, None, jnp.full(2, 4))
        state = functions.observe(stack.params, state, tokens, jnp.zeros((*tokens.shape, 0, 1)), counts)
        return draft.source, state

    state = functions.init(stack.params, 2, 64)
    texts = [[1, 2] * 2, [3] * 2]
    for num_found in (2, 2, 1):
        if num_found == 1:
            texts[1].append(40)  # which is nowhere else
        model.seen.clear()
        context = tiny.context(texts, [GREEDY] * 2)
        source, state = of_a_round(context, state, jnp.array([[1, 2, 1, 2, 1], [3] * 5]), jnp.array([4, 5]))
        jax.effects_barrier()
        assert source.tolist() == [0, int(num_found == 1)]
        assert (len(model.seen) > 0) == (num_found == 1)
        texts = [[*texts[0], 1, 2, 1, 2], [*texts[1], *[3] * 5]]
    assert state.then.observed.tolist() == [12, 15]


def simulated(prompt, tokens, length):
    """What becomes of a greedy row under CHAINS, on the host: for each source rounds, drafted, accepted and emitted tokens."""
    counts = {name: np.zeros(4, int) for name in NAMES}
    text, end = list(prompt), len(prompt) + length
    while len(text) < end:
        room = end - len(text) - 1
        found = reference(text, 3, 1, 4)[:room]
        drawn = tiny.greedy(CLOSE_TABLE, text, 3)[:room]
        name, draft = (NAMES[0], found) if found else (NAMES[1], drawn)
        rest = tokens[len(text) - len(prompt) :]
        accepted = next((i for i, (x, y) in enumerate(zip(draft, rest, strict=False)) if x != y), len(draft))
        if draft:
            counts[name] += (1, len(draft), accepted, accepted + 1)
        text += rest[: accepted + 1]
    return counts


def test_counts_by_source_are_those_of_a_simulation():
    completions = specjax.generate(TARGET, PROMPTS, GREEDY, drafter=CHAINS)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = {name: SourceStats(*map(int, count)) for name, count in simulated(prompt, completion.token_ids, 20).items()}
        assert completion.stats.by_source == expected
    whole = specjax.statistics.total(c.stats for c in completions)
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(source, name) for source in whole.by_source.values()) == getattr(whole, name)
    # The last token of a row is drawn without a draft, unless it is a bonus token.
    assert sum(source.num_drafts for source in whole.by_source.values()) <= whole.num_drafts


def test_a_lookup_of_no_tokens_leaves_all_to_the_draft_model():
    draft = proposer(stacked(prompt_lookup(0), CHAINS.parts[1]), Law.INDEPENDENT)([3] * 6)
    alone = proposer(CHAINS.parts[1], Law.INDEPENDENT)([3] * 6)
    assert draft.source.tolist() == [1] * 6
    for name in ("tokens", "valid", "parent_log_probs"):
        np.testing.assert_array_equal(getattr(draft, name), getattr(alone, name))


def test_a_draft_model_of_no_tokens_leaves_all_to_the_lookup():
    stack = stacked(LOOKUP, draft_model(CLOSE, 0))
    assert stack.functions.law_choices == (Law.DETERMINISTIC,)
    draft = proposer(stack, Law.DETERMINISTIC)([4] * 6)
    assert draft.source.tolist() == [0, NO_SOURCE, NO_SOURCE, 0, 0, NO_SOURCE]
    assert draft.valid.all(axis=1).tolist() == draft.valid.any(axis=1).tolist() == (draft.source == 0).tolist()
    nobody = stacked(prompt_lookup(0), draft_model(CLOSE, 0))
    assert nobody.functions.tree == DraftTree.chain(0)
    assert proposer(nobody, Law.DETERMINISTIC)([0] * 6).source.tolist() == [NO_SOURCE] * 6


def test_one_program_for_all_settings():
    before = run_rounds._cache_size()
    rng = np.random.default_rng(0)
    for length in range(1, 10):
        params = SamplingParams(temperature=length % 3 / 2, top_k=length % 4, max_tokens=12 - length, seed=length)
        specjax.generate(TARGET, [rng.integers(0, 4, length) for _ in PROMPTS], params, drafter=TREES, rule="gumbel")
    assert run_rounds._cache_size() - before <= 1


# What is refused


class Unfit:
    """A tokenizer that is no other's."""

    size = tiny.VOCAB

    def check_same(self, other):
        raise ValueError("tokenizers differ")


def test_both_parts_must_fit_the_target():
    target = dataclasses.replace(TARGET, tokenizer=Unfit())
    other = draft_model(dataclasses.replace(CLOSE, tokenizer=Unfit()), 2)
    for stack in (stacked(LOOKUP, other), stacked(LOOKUP, stacked(LOOKUP, other))):
        with pytest.raises(ValueError, match="tokenizers differ"):
            specjax.generate(target, [[1]], GREEDY, drafter=stack)


def test_bad_input():
    tree, chain = draft_model(CLOSE, tree=LEVELS), draft_model(CLOSE, 2)
    drawn = bind(dataclasses.replace(draft_model(CLOSE, tree=DraftTree.chain(2)).functions, laws=(Law.INDEPENDENT,) * 2))
    with pytest.raises(ValueError, match="stacked: first is None; it must be a drafter that proposes something"):
        stacked(None, chain)
    with pytest.raises(ValueError, match="stacked: then is NoDrafter"):
        stacked(LOOKUP, NoDrafter())
    with pytest.raises(ValueError, match="drafter is 3; a drafter has tree"):
        stacked(LOOKUP, 3)
    with pytest.raises(ValueError, match=r"first is draft_model\(close\), which proposes the tree .*; it must propose chains"):
        stacked(tree, chain)
    with pytest.raises(ValueError, match=r"then is draft_model\(close\), which shapes a tree for every row"):
        stacked(LOOKUP, draft_model(CLOSE, tree=TreeBounds(3, 2)))
    with pytest.raises(ValueError, match=r"draws by \['independent'\]; it must be able to draft deterministically"):
        stacked(drawn, chain)
    with pytest.raises(ValueError, match="law is 'without_replacement'"):
        CHAINS.functions.with_law(Law.WITHOUT_REPLACEMENT)


def test_sources_without_names():
    drafter = dataclasses.replace(CHAINS, functions=dataclasses.replace(CHAINS.functions, sources=()))
    with pytest.raises(ValueError, match="it must name its sources and state each draft's, or do neither"):
        specjax.generate(TARGET, [[1, 2]], GREEDY, drafter=drafter)
