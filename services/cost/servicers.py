"""The cost: a second reward, of what is to be kept low, in a service of its own."""

from rolemesh.engine.specs import CostSpec
from rolemesh.services.reward.servicers import RewardRole


class CostRole(RewardRole):
    """A reward whose judgements are costs."""

    name = "cost"
    spec_class = CostSpec
    column = "costs"
