"""How experts are chosen by each routing method, as far as the kernel can do it with the same result."""

from dataclasses import dataclass

from jmx.routing import GroupedTopK, Method, SigmoidTopK, SoftmaxTopK, SqrtSoftplusTopK, TopKSoftmax

MOST_SLOTS = 8  # each is a pass; and sums of more weights have no order that is defined
_METHODS = (TopKSoftmax, SoftmaxTopK, SigmoidTopK, SqrtSoftplusTopK, GroupedTopK)


@dataclass(frozen=True)
class Choice:
    """What decides which experts a token has.

    Args:
        softmax_of: the kernel's weights are a softmax over the "chosen" or over "all"; None: it computes none.
        biased: whether keys are the sigmoids of logits plus a correction bias; otherwise they are the logits, which
            order the experts as any scores do.
        num_groups, topk_groups: experts are chosen among those of so many groups; 1, 1: there are no groups.
        best_of_group: how many keys of a group are added up to its own.
    """

    softmax_of: str | None
    biased: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    best_of_group: int = 1

    @classmethod
    def of(cls, method: Method, biased: bool, num_experts: int) -> "Choice | None":
        """That of a method with or without a correction bias; None: the kernel does not have it."""
        if method.top_k > MOST_SLOTS or type(method) not in _METHODS:  # a subclass may route in another way
            return None
        match method:
            case TopKSoftmax() | SoftmaxTopK(renormalize=True):
                return cls("chosen")
            case SoftmaxTopK():
                return cls("all")
            case SigmoidTopK():
                return cls(None, biased)
            case SqrtSoftplusTopK():
                return None if biased else cls(None)
            case GroupedTopK():
                if biased and method.scoring != "sigmoid":
                    return None
                if method.topk_groups == method.num_groups:
                    return cls(None, biased)
                if num_experts & (num_experts - 1) or method.num_groups & (method.num_groups - 1):
                    return None
                return cls(None, biased, method.num_groups, method.topk_groups, 2 if biased else 1)
        return None
