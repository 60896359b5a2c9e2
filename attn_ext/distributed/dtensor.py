"""The ops on distributed tensors."""


def register_dtensor() -> None:
    r"""Let the ops take :class:`torch.distributed.tensor.DTensor`.

    Call it once, before the first such call; more often does no harm. Each op then takes tensors

    - replicated: every rank computes the same;
    - sharded in a batch dim: each rank its part of the batch;
    - sharded in the dim of the heads: each rank its heads, if the heads of keys divide by the ranks or there
      is one.

    An input that has 1 in that dim is replicated, and its gradient is partial: DTensor sums it over the
    ranks. Anything else, a sharded sequence as well, is gathered first, as DTensor does:
    :func:`attn_ext.distributed.context_parallel_sdpa` is what leaves a sequence where it lies.

    Dropout with a shard is refused: the draw is that of the whole call, which a rank does not see.

    Raises:
        RuntimeError: not by this function, but by calls: dropout with a sharded tensor; a tensor passed by
            keyword that would have to be moved to another placement.

    Example:
        >>> import attn_ext.distributed
        >>> attn_ext.distributed.register_dtensor()
    """
    from .sharding import register

    register()
