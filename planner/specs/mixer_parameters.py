"""Parameters of each mixer of tokens but attention."""

from collections.abc import Callable, Mapping

from planner.specs.mixers import Mixers


def _gated_delta(model: Mixers, hidden: int) -> int:
    """Projections in and out, convolution, two scalars a head for the decay, and the gated norm."""
    keys, values = model.linear_key_width, model.linear_value_width
    heads = model.linear_num_value_heads
    into = hidden * (2 * keys + 2 * values + 2 * heads)
    mixed = model.linear_conv_kernel_dim * (2 * keys + values) + 2 * heads
    return into + mixed + model.linear_value_head_dim + values * hidden


def _kimi_delta(model: Mixers, hidden: int) -> int:
    """A gated DeltaNet whose decay, one a channel, and gate are products of low rank."""
    width, heads = model.linear_value_width, model.linear_num_value_heads
    rank = model.linear_value_head_dim
    gates = 2 * hidden * width if model.linear_full_gates else 2 * rank * (hidden + width)
    into = hidden * (3 * width + heads) + gates
    mixed = model.linear_conv_kernel_dim * 3 * width + width + heads
    return into + mixed + rank + width * hidden


def _lightning(model: Mixers, hidden: int) -> int:
    """Projections in and out, a gate, and a norm over all heads."""
    return model.linear_value_width * (5 * hidden + 1)


def _mamba2(model: Mixers, hidden: int) -> int:
    """Projections in and out, convolution, three scalars a head, and the gated norm."""
    width, heads = model.mamba_width, model.mamba_num_heads
    mixed = width + 2 * model.mamba_n_groups * model.ssm_state_size
    taps = mixed * (model.mamba_d_conv + model.mamba_conv_bias)
    biases = model.mamba_proj_bias * (width + mixed + heads + hidden)
    own = taps + 3 * heads + width * model.mamba_norm
    return hidden * (width + mixed + heads) + own + width * hidden + biases


def _mamba(model: Mixers, hidden: int) -> int:
    """Projections in and out, convolution, the step's low rank, states and norms."""
    width, rank, state = model.mamba_width, model.mamba_dt_rank, model.ssm_state_size
    taps = width * (model.mamba_d_conv + model.mamba_conv_bias)
    low = width * (2 * rank + 2 * state + 1) + model.mamba_norm * (rank + 2 * state)
    biases = model.mamba_proj_bias * (2 * width + hidden)
    return 3 * hidden * width + biases + taps + low + width * (state + 1)


def _short_conv(model: Mixers, hidden: int) -> int:
    """Projections in and out, and the convolution."""
    return 4 * hidden**2 + hidden * (model.linear_conv_kernel_dim + 5 * model.short_conv_bias)


def _block_indexer(model: Mixers, hidden: int) -> int:
    """Queries and one key head of the indexer, and a norm of each."""
    heads, width = model.index_n_heads, model.index_head_dim
    return hidden * (heads + 1) * width + 2 * width


# their own norms included
MIXER_PARAMETERS: Mapping[str, Callable[[Mixers, int], int]] = {
    "gated-delta": _gated_delta,
    "kimi-delta": _kimi_delta,
    "lightning": _lightning,
    **dict.fromkeys(("mamba2", "attention-mamba2"), _mamba2),
    "mamba": _mamba,
    "short-conv": _short_conv,
    "msa": _block_indexer,
}
