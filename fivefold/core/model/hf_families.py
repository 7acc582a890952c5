"""Hugging Face configs of families with norms, rotations or blocks of another form, and the keys
that all decoders after GPT-2 share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from fivefold.core import Config, Fields, attention_bias, head_dim, indices
from fivefold.core.model.shape import Moe, Rope, RopeKind

GATED = {
    **{"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"},
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "geglu_tanh"),
}
PLAIN = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
PARTIAL = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"
ROPES = {kind: kind for kind in ("default", "llama3", "yarn", "linear", "longrope")}
_PHI3_ROPES = {"default": "default"} | dict.fromkeys(("longrope", "su", "yarn"), "longrope")


def decoder_fields(
    config: Config,
    eps: float = 1e-6,
    theta: float = 10_000.0,
    multi_head: bool = False,
    partial: float | None = None,
    activation: str = "hidden_act",
    kinds: Mapping[str, str] = GATED,
    ropes: Mapping[str, str] = ROPES,
    original: int | None = None,
) -> Fields:
    """What every family after GPT-2 shares: RMS norms, rotary positions, gated MLPs.

    Only a `multi_head` family may leave out its number of KV heads. `partial`: the part of a head
    that is rotated if a config does not say it, of a family that may rotate a part. `ropes`: what
    the family calls its scalings of positions. `original`: the length before these, of a family
    that says it beside their table or not at all. The first of `kinds` is the activation of a
    config that does not say one.
    """
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    max_seq = config.integer("max_position_embeddings")
    size = head_dim(config, width, heads)
    if partial is None:
        config.must_be(PARTIAL, 1)
    return {
        "layers": config.integer("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": config.integer("num_key_value_heads", heads if multi_head else None),
        "head_dim": size,
        "ffn": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "max_seq": max_seq,
        "tied": config.flag("tie_word_embeddings", False),
        "norm_eps": config.number("rms_norm_eps", eps),
        "activation": config.choice(activation, next(iter(kinds)), kinds),
        "attention_dropout": config.number("attention_dropout", 0.0),
        **_rotary(config, max_seq, theta, ropes, original),
        **({} if partial is None else _rotated(config, PARTIAL, partial, size)),
    }


def dropouts(config: Config, residual: str, embedding: str, default: float = 0.0) -> Fields:
    """Rates of what is added to the residual and of the embedding, each by its key."""
    rate, first = config.number(residual, default), config.number(embedding, default)
    return {"dropout": rate, "embedding_dropout": None if first == rate else first}


def _rotary(
    config: Config,
    max_seq: int,
    theta: float,
    ropes: Mapping[str, str] = ROPES,
    original: int | None = None,
) -> Fields:
    """Both spellings: `rope_theta` with `rope_scaling`, or the newer `rope_parameters`."""
    table = config.table(config.first_of(("rope_parameters", "rope_scaling")))
    original = config.integer(ORIGINAL) if config.has(ORIGINAL) else original
    return _rope(table, max_seq, config.number("rope_theta", theta), original, ropes)


def _rope(
    table: Config | None,
    max_seq: int,
    theta: float,
    original: int | None = None,
    ropes: Mapping[str, str] = ROPES,
) -> Fields:
    """The rotation that one such table says. An `original` length beside it has priority."""
    if table is None:
        return {"rope_theta": theta}
    theta = table.number("rope_theta", theta)
    kind = table.choice(table.first_of(("rope_type", "type")), "default", ropes)
    table.ignore(PARTIAL, ORIGINAL, "factor")  # which not all kinds and families read
    if kind == "default":
        return {"rope_theta": theta}
    extra = {
        "low_freq": ("low_freq_factor", 1.0),
        "high_freq": ("high_freq_factor", 4.0),
        "beta_fast": ("beta_fast", 32.0),
        "beta_slow": ("beta_slow", 1.0),
        "mscale": ("mscale", 0.0),
        "mscale_all_dim": ("mscale_all_dim", 0.0),
    }
    fields: Fields = {name: table.number(key, value) for name, (key, value) in extra.items()}
    fields["truncate"] = table.flag("truncate", True)
    if table.has("attention_factor"):
        fields["attention_factor"] = table.number("attention_factor")
    first = table.integer(ORIGINAL, max_seq) if original is None else original
    default = None
    if kind == "longrope":
        fields |= {"short": _factors(table, "short_factor"), "long": _factors(table, "long_factor")}
        default = max_seq / first
    rope = Rope(cast("RopeKind", kind), table.number("factor", default), first, **fields)
    return {"rope_theta": theta, "rope": rope}


def _factors(table: Config, key: str) -> tuple[float, ...]:
    """A list of numbers."""
    items = table.items(key) or []
    factors = [factor for factor in items if isinstance(factor, int | float)]
    if not factors or len(factors) < len(items):
        table.problem(key, "must be a list of numbers, one for each pair of a head")
    return tuple(map(float, factors))


def _rotated(config: Config, key: str, default: float, size: int) -> Fields:
    """How much of a head is rotated, which newer files say in `rope_parameters`."""
    share = config.number(key, default)
    table = config.table("rope_parameters")
    share = share if table is None else table.number(PARTIAL, share)
    dim = int(size * share)
    if not 0 < dim <= size and config.usable(key):
        config.problem(key, "must rotate some of a head, and no more than all of it")
    return {"rotary_dim": None if dim == size else max(dim, 1)}


def olmo2(config: Config) -> Fields:
    fields = decoder_fields(config, eps=1e-5, multi_head=True) | attention_bias(config)
    return fields | {"qk_norm": "full", "norm_at": "after"}


def _glm(config: Config) -> Fields:
    fields = decoder_fields(config, eps=1.5625e-07, partial=0.5)
    own: Fields = {"qkv_bias": config.flag("attention_bias", True), "rope_interleaved": True}
    return fields | own


def _glm4(config: Config) -> Fields:
    return _glm(config) | {"norm_at": "both"}


def _phi3(config: Config) -> Fields:
    own: Fields = {"ropes": _PHI3_ROPES, "original": 4096}
    fields = decoder_fields(config, eps=1e-5, multi_head=True, partial=1.0, **own)
    window = config.optional_integer("sliding_window")
    return fields | dropouts(config, "resid_pdrop", "embd_pdrop") | {"window": window}


def _layer_norms(config: Config, bias: bool, eps: str) -> Fields:
    """Of older families: LayerNorms with biases, and MLPs without a gate."""
    return {
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": config.number(eps, 1e-5),
        "mlp_bias": bias,
    }


def _gpt_neox(config: Config) -> Fields:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    max_seq, size = config.integer("max_position_embeddings"), head_dim(config, width, heads)
    parallel = config.flag("use_parallel_residual", True)
    return {
        "layers": config.integer("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": size,
        "ffn": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "max_seq": max_seq,
        "tied": config.flag("tie_word_embeddings", False),
        "activation": config.choice("hidden_act", "gelu", PLAIN),
        "dropout": config.number("hidden_dropout", 0.0),
        "attention_dropout": config.number("attention_dropout", 0.0),
        "parallel_block": parallel,
        "parallel_norms": 2 if parallel else 1,
        **attention_bias(config, default=True),
        **_layer_norms(config, True, "layer_norm_eps"),
        **_rotary(config, max_seq, config.number("rotary_emb_base", 10_000.0)),
        **_rotated(config, "rotary_pct", 0.25, size),
    }


def _falcon(config: Config) -> Fields:
    width = config.integer(config.first_of(("hidden_size", "n_embed")))
    heads = config.integer(config.first_of(("num_attention_heads", "n_head")))
    newer, bias = config.flag("new_decoder_architecture", False), config.flag("bias", False)
    shares = config.flag("multi_query", True)
    many = heads if newer or not shares else 1
    if not newer and not shares:
        config.must_be("num_kv_heads", heads)
    # Of one KV head, some files say the number of queries; widths are in `ffn_hidden_size` here.
    config.ignore("num_kv_heads", "intermediate_size")
    parallel = newer or config.flag("parallel_attn", True)
    norms = config.integer("num_ln_in_parallel_attn", 2 if newer else 1)
    config.must_be("parallel_attn", True, *(() if newer else (False,)))
    config.must_be("num_ln_in_parallel_attn", 1, *((2,) if newer else ()))
    config.must_be("alibi", False)
    for key in ("hidden_dropout", "attention_dropout"):
        config.must_be(key, 0)  # of the sum of attention and MLP, and of the residual
    max_seq = config.integer("max_position_embeddings", 2048)
    return {
        "layers": config.integer(config.first_of(("num_hidden_layers", "n_layer"))),
        "width": width,
        "heads": heads,
        "kv_heads": config.integer("num_kv_heads", many) if newer else many,
        "head_dim": head_dim(config, width, heads),
        "ffn": config.integer("ffn_hidden_size", 4 * width),
        "vocab": config.integer("vocab_size"),
        "max_seq": max_seq,
        "tied": config.flag("tie_word_embeddings", True),
        "activation": config.choice("activation", "gelu", PLAIN),
        "parallel_block": parallel,
        "parallel_norms": norms if parallel else 1,
        **dict.fromkeys(("qkv_bias", "out_bias"), bias),
        **_layer_norms(config, bias, "layer_norm_epsilon"),
        **_rotary(config, max_seq, 10_000.0),
    }


_TANH = {"gelu_pytorch_tanh": "geglu_tanh"} | GATED
# The official files of Gemma 1 say "gelu" and mean its approximation by tanh.
_GEMMA = {"hidden_act": _TANH | {"gelu": "geglu_tanh"}, "hidden_activation": _TANH}


def _gemma(config: Config, key: str = "hidden_act") -> Fields:
    """All Gemmas: norms of weights less 1, scaled embeddings, tied heads."""
    fields = decoder_fields(config, activation=key, kinds=_GEMMA[key]) | attention_bias(config)
    for other in _GEMMA.keys() - {key}:
        if config.has(other) and config.choice(other, "", _GEMMA[other]) != fields["activation"]:
            config.problem(other, f"contradicts {key}, which this family computes with")
    own: Fields = {"norm": "rms_offset", "scaled_embedding": True}
    own |= {"tied": config.flag("tie_word_embeddings", True)}
    return fields | own | {"head_dim": config.integer("head_dim", 256)}


def _gemma3(config: Config) -> Fields:
    config.must_be("use_bidirectional_attention", False)
    config.must_be("attn_logit_softcapping", None)  # there the package has a key and no effect
    fields = _gemma(config, "hidden_activation")
    fields |= alternating(config, 6, "sliding_window_pattern")
    own: Fields = {"norm_at": "both", "qk_norm": "head"}
    own |= {"logit_cap": _cap(config, "final_logit_softcapping", None)}
    local = config.number("rope_local_base_freq", 10_000.0)
    own |= two_rotations(config, fields["max_seq"], 1_000_000.0, local)
    return fields | own | _score_dim(config, fields["head_dim"])


def two_rotations(config: Config, max_seq: int, theta: float, local: float) -> Fields:
    """Of layers without a window, and of those with one, which nothing may scale."""
    nested = config.table("rope_parameters")
    full = None if nested is None else nested.table("full_attention")
    within = None if nested is None else nested.table("sliding_attention")
    if within is not None:
        within.must_be("rope_type", "default")
        local = within.number("rope_theta", local)
    scaling = config.table("rope_scaling") if full is None else full
    if scaling is not None and scaling.has("type") and not scaling.has("rope_type"):
        scaling.problem("type", "versions of transformers differ in what it means; say rope_type")
    rope = _rope(scaling, max_seq, config.number("rope_theta", theta))
    return {"local_theta": local, "rope": None} | rope


def _gemma2(config: Config) -> Fields:
    config.must_be("use_bidirectional_attention", False)
    fields = _gemma(config, "hidden_activation") | alternating(config, 2)
    if config.has("sliding_window_size"):
        config.must_be("sliding_window_size", fields["window"])
    own: Fields = {"norm_at": "both"} | _score_dim(config, fields["head_dim"])
    own |= {"score_cap": _cap(config, "attn_logit_softcapping", 50.0)}
    return fields | own | {"logit_cap": _cap(config, "final_logit_softcapping", 30.0)}


def _cap(config: Config, key: str, default: float | None) -> float | None:
    """Null is no cap."""
    if not config.has(key):
        return None if config.gives(key) else default
    return config.number(key)


def _score_dim(config: Config, size: int) -> Fields:
    dim = config.integer("query_pre_attn_scalar", 256)
    return {"score_dim": None if dim == size else dim}


def alternating(config: Config, every: int, pattern: str = "") -> Fields:
    """A window in all layers but each n-th, which `layer_types` may list."""
    every = config.integer(pattern, every) if pattern else every
    layers = config.integer("num_hidden_layers")
    kinds = config.items("layer_types")
    if kinds is not None and config.usable("num_hidden_layers"):
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        every = full[0] + 1 if full else max(every, layers + 1)
        names = ("sliding_attention", "full_attention")
        if kinds != [names[(i + 1) % every == 0] for i in indices(layers)]:
            config.problem("layer_types", "full_attention must be in each n-th layer only")
    window = config.optional_integer("sliding_window", 4096)
    return {"window": window, "global_every": every, "global_rotary": True}


def windows_of(config: Config, key: str, kinds: Sequence[object], layers: int) -> Fields:
    """A window in all layers, in none, or in all but each n-th; `key` says in which."""
    window = config.optional_integer("sliding_window", 4096)
    if window is None or all(kind == "full_attention" for kind in kinds):
        return {}
    if all(kind == "sliding_attention" for kind in kinds):
        return {"window": window}
    every = 1 + kinds.index("full_attention") if "full_attention" in kinds else 1
    names = ("sliding_attention", "full_attention")
    expected = [names[(i + 1) % every == 0] for i in indices(layers)]
    if config.usable("num_hidden_layers", key) and kinds != expected:
        config.problem(key, "a window on some layers only is not supported, but each n-th without")
    return {"window": window, "global_every": every, "global_rotary": True}


def _gpt_oss(config: Config) -> Fields:
    fields = decoder_fields(config, eps=1e-5, theta=150_000.0) | attention_bias(config, True)
    config.must_be("swiglu_alpha", 1.702)
    config.must_be("swiglu_limit", 7.0)
    config.must_be("hidden_act", "silu")
    moe = Moe(
        experts=config.integer(config.first_of(("num_local_experts", "num_experts"))),
        top_k=config.integer(config.first_of(("num_experts_per_tok", "experts_per_token"))),
        ffn=fields["ffn"],
        renormalise=True,
        biases=True,
    )
    own: Fields = {"moe": moe, "sinks": True, "activation": "swiglu_clamped"}
    own |= {"head_dim": config.integer("head_dim", 64)}
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        own |= {"rope": Rope("yarn", 32.0, 4096, truncate=False)}
    window = config.optional_integer("sliding_window", 128)
    return fields | alternating(config, 2) | own | {"window": window}


NEWER: dict[str, Callable[[Config], Fields]] = {
    "olmo2": olmo2,
    "glm": _glm,
    "glm4": _glm4,
    "phi3": _phi3,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "gemma": _gemma,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
