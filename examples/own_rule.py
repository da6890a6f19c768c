"""A verification rule of your own, certified by the same call as the built-in ones.

Run it with ``python examples/own_rule.py``. The rule accepts draft tokens more cautiously than it has to. That alone costs speed
and nothing else, if the correction token is drawn from what is then left of the target's distribution. The first try forgets to,
and the certificate says where that shows; the second is exact.
"""

import dataclasses

import jax.numpy as jnp

import specjax
from specjax.choices import Stream
from specjax.tree import ROOT, Law
from specjax.verification import CHAIN, Verdict, proposal_log_probs
from specjax.verification.rejection import walk_down


@dataclasses.dataclass(frozen=True)
class Cautious:
    caution: float = 1.5
    right_residual: bool = True
    name, lossless, seed_stable, laws, shapes = "cautious", True, False, (Law.INDEPENDENT,), frozenset({CHAIN})

    def __call__(self, choices, draft, target_log_probs) -> Verdict:
        def test(draft, node, children, target):  # letters in shapes: B rows, V tokens
            child = children[:, 0]  # [B] the draft token that comes next; ROOT where there is none
            log_q = proposal_log_probs(draft, jnp.maximum(child, 1), target.shape[1], target.dtype)
            p, q, row = jnp.exp(target), jnp.exp(log_q), jnp.arange(len(child))
            accepts = jnp.minimum(q, p / self.caution)  # [B, V] probability to be drawn and accepted
            token = draft.tokens[row, jnp.maximum(child, 1) - 1]
            chance = jnp.where(child > ROOT, accepts[row, token] / q[row, token], 0)
            passed = choices.bernoulli(Stream.ACCEPT, child, chance)
            left = p - accepts if self.right_residual else p - jnp.minimum(p, q)
            left = jnp.log(left / jnp.sum(left, axis=1, keepdims=True))
            return jnp.where(passed, child, ROOT), jnp.where((child > ROOT)[:, None], left, target)

        return walk_down(test, choices, draft, target_log_probs)


def main() -> None:
    for rule in (Cautious(right_residual=False), Cautious()):
        certificate = specjax.certify(rule)
        print(f"{rule}: lossless {certificate.lossless}, error {certificate.max_error:.0e}")
        if not certificate.lossless:
            print(f"  {certificate.counterexample}")
        else:
            token = specjax.certify("token")
            print(f"  {certificate.expected_tokens:.3f} tokens per round; token verification {token.expected_tokens:.3f}")


if __name__ == "__main__":
    main()
