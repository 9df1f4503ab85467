"""Position to sample: the only randomness, the only rank arithmetic. Pure numpy.

`hashing` makes keys · `permutation` shuffles by function · `epochs` orders one dataset ·
`weights` become integers · `mixture` orders many, by stages · `plan` cuts positions into batches,
steps and ranks' shares.
"""

from penstock.order.epochs import EpochOrder
from penstock.order.mixture import MixtureOrder, Stage
from penstock.order.permutation import Permutation, permute
from penstock.order.plan import Plan, Segment, deal, rest_of_epoch, share
from penstock.order.weights import check_weights, quantise, shares

ORDER_VERSION = 1

__all__ = [
    "ORDER_VERSION",
    "EpochOrder",
    "MixtureOrder",
    "Permutation",
    "Plan",
    "Segment",
    "Stage",
    "check_weights",
    "deal",
    "permute",
    "quantise",
    "rest_of_epoch",
    "share",
    "shares",
]
