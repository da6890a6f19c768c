"""The rules once more, in NumPy, one row at a time and straight from their definitions.

Every function takes a ``Row`` and returns the accepted path, what the next token is drawn from, and the coins that were asked:
{node: probability}.
"""

import dataclasses

import numpy as np

from specjax.tree import DraftTree, Law


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a draft: ``p`` and ``q`` [T, V] after every node, a leaf's q unused; ``tokens``, ``valid``, ``coins`` [N]."""

    tree: DraftTree
    laws: tuple[Law, ...]
    p: np.ndarray
    q: np.ndarray
    tokens: np.ndarray
    valid: np.ndarray
    coins: np.ndarray

    def children(self, node):
        return [child for child in self.tree.children[node] if self.valid[child - 1]]

    def proposal(self, node):
        """What the token of ``node`` was drawn from."""
        parent, law, token = self.tree.parents[node], self.laws[node - 1], self.tokens[node - 1]
        if law is Law.DETERMINISTIC:
            return np.eye(self.p.shape[1])[token]
        q = self.q[parent].copy()
        if law is Law.WITHOUT_REPLACEMENT:
            q[[self.tokens[other - 1] for other in self.children(parent) if other < node]] = 0
            q /= q.sum()
        return q


def ratio(p, q):
    """min(1, p / q); nothing that the target excludes passes."""
    return 0.0 if p == 0 else 1.0 if q == 0 else min(1.0, p / q)


def normalised(excess, otherwise):
    return excess / excess.sum() if excess.sum() > 1e-12 else otherwise


def top_down(row):
    """Leviathan et al. 2023, algorithm 1; SpecInfer; RSD: children one after another, each against what is left of p."""
    node, path, asked = 0, [], {}
    while True:
        left = row.p[node]
        for child in row.children(node):
            q, token = row.proposal(child), row.tokens[child - 1]
            asked[child] = ratio(left[token], q[token])
            if row.coins[child - 1] < asked[child]:
                node = child
                path.append(child)
                break
            left = normalised(np.maximum(left - q, 0), left)
        else:
            return path, left, asked


def block(row):
    """Sun et al. 2024, algorithm 2: of a chain the last place whose coin passes, not the first that fails."""
    length = int(np.argmin([*row.valid, False]))
    weights = [1.0]
    for i in range(1, length + 1):
        token = row.tokens[i - 1]
        p, q = row.p[i - 1, token], row.proposal(i)[token]
        weights.append(0.0 if p == 0 else 1.0 if q == 0 else min(1.0, weights[-1] * p / q))

    def excess(i):
        return np.maximum(weights[i] * row.p[i] - row.proposal(i + 1), 0)

    passes = {}
    for i in range(1, length):
        whole = excess(i).sum() + 1 - weights[i]
        passes[i] = excess(i).sum() / whole if whole > 1e-12 else 1.0
    if length:
        passes[length] = weights[length]
    last = max((i for i in passes if row.coins[i - 1] < passes[i]), default=0)
    emitted = row.p[last] if last == length else normalised(excess(last), row.p[last])
    return list(range(1, last + 1)), emitted, {i: passes[i] for i in passes if i >= last}


def traversal(row):
    """Weng et al. 2025, recursively: everything below a node is tried before the node itself."""
    asked = {}

    def visit(node, w):
        """The accepted node at or below ``node`` and what its p has become, or None; its weight and p if all below failed."""
        p = row.p[node]
        for child in row.children(node):
            q, token = row.proposal(child), row.tokens[child - 1]
            weight = 0.0 if p[token] == 0 else 1.0 if q[token] == 0 else min(1.0, w * p[token] / q[token])
            found = visit(child, weight)
            if found is not None:
                return found
            excess = np.maximum(w * p - q, 0)
            whole = excess.sum() + 1 - w
            p, w = normalised(excess, p), excess.sum() / whole if whole > 1e-12 else 1.0
        if node == 0:
            return node, p
        asked[node] = w
        return (node, p) if row.coins[node - 1] < w else None

    node, p = visit(0, 1.0)
    return list(row.tree.paths[node]), p, asked


def chances(p, q, rho, count):
    beta = min(1.0, np.minimum(q, p / rho).sum())
    return beta, 1 - (1 - beta) ** count


def kseq(row):
    """Sun et al. 2023, algorithm 2; the factor by bisection."""
    node, path, asked = 0, [], {}
    while row.children(node):
        p, q, children = row.p[node], row.q[node], row.children(node)
        low, high = 1.0, float(len(children))
        for _ in range(100):
            middle = (low + high) / 2
            beta, passes = chances(p, q, middle, len(children))
            low, high = (low, middle) if passes <= middle * beta else (middle, high)
        beta, passes = chances(p, q, high, len(children))
        for child in children:
            token = row.tokens[child - 1]
            asked[child] = ratio(p[token], high * q[token])
            if row.coins[child - 1] < asked[child]:
                node = child
                path.append(child)
                break
        else:
            excess = p - np.minimum(q, p / high) * (passes / beta if beta else 0)
            return path, normalised(np.maximum(excess, 0), p), asked
    return path, row.p[node], asked


def typical(row, epsilon=0.09, delta=0.3):
    """Medusa, section 2.3.1: the longest path of kept tokens, of equally long ones the most likely."""

    def kept(node):
        p = row.p[row.tree.parents[node]]
        entropy = -sum(x * np.log(x) for x in p if x > 0)
        return row.valid[node - 1] and p[row.tokens[node - 1]] > min(epsilon, delta * np.exp(-entropy))

    def likelihood(path):
        return sum(np.log(row.p[row.tree.parents[node], row.tokens[node - 1]]) for node in path)

    whole = [path for path in row.tree.paths if all(map(kept, path))]
    best = max(whole, key=lambda path: (len(path), likelihood(path)))
    return list(best), row.p[best[-1] if best else 0], {}


def random_rows(tree, laws, batch, seed, vocab_size=6):
    """[B] rows whose tokens are drawn by their laws; now and then q and p are equal, exclude tokens or are certain."""
    random = np.random.default_rng(seed)

    def distributions(shape):
        values = random.dirichlet(np.full(vocab_size, 0.7), shape)
        values = np.where(random.random(values.shape) < 0.15, 0, values) + 1e-300
        values /= values.sum(-1, keepdims=True)
        return np.where(values < 1e-6, 0, values) / np.where(values < 1e-6, 0, values).sum(-1, keepdims=True)

    rows = []
    for number in range(batch):
        p, q = distributions(tree.size), distributions(tree.size)
        if number % 7 == 0:
            q = p.copy()
        elif number % 7 < 4:  # close to each other: whole paths are accepted
            q = 0.8 * p + 0.2 * q
        if number % 5 == 0:  # a greedy row
            p = np.eye(vocab_size)[p.argmax(-1)]
        tokens, valid = np.zeros(tree.num_nodes, int), np.ones(tree.num_nodes, bool)
        asked = tree.num_nodes if number % 3 else random.integers(tree.num_nodes + 1)
        for node in range(1, tree.size):
            parent = tree.parents[node]
            row = Row(tree, laws, p, q, tokens, valid, None)
            valid[node - 1] = node <= asked and (parent == 0 or valid[parent - 1])
            taken = [tokens[other - 1] for other in row.children(parent) if other < node]
            if laws[node - 1] is Law.WITHOUT_REPLACEMENT and q[parent].sum() - q[parent][taken].sum() < 1e-9:
                valid[node - 1] = False  # nothing is left to draw
            if laws[node - 1] is Law.DETERMINISTIC or not valid[node - 1]:
                tokens[node - 1] = random.integers(vocab_size)
            else:
                tokens[node - 1] = random.choice(vocab_size, p=row.proposal(node))
        rows.append(Row(tree, laws, p, q, tokens, valid, random.random(tree.num_nodes)))
    return rows
