"""A loss lab from the per-token arrays of one forward, as `session.loss_lab` makes it of the ranks' answer."""

from rlbench.session.lab.inputs import scored
from rlbench.session.lab.loss_lab import make_lab, named_losses


def loss_lab(batch, tokens, losses, aggregation=None):
    """`tokens`: flat arrays, `logprobs` and `entropy`, and `old_logprobs` and `ref_logprobs` where they are known."""
    known = {name: tokens[name] for name in ("old_logprobs", "ref_logprobs") if name in tokens}
    forward = scored(batch.replace(**known), {name: tokens[name] for name in ("logprobs", "entropy")})
    return make_lab(forward, named_losses(losses), aggregation)
