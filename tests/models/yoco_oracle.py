"""YOCO in NumPy, float64, from the paper's equations and the release's settings; nothing of kvjax.

Whole attention matrices, or a state that goes from token to token where a self-decoder has no
window (gated retention); weights under the release's names, pairs of RoPE as the release has them.
"""

import numpy as np

ARGS = {
    "dim": 32,
    "n_layers": 4,
    "hidden_dim": 48,
    "n_self_heads": 2,
    "n_attn_heads": 4,
    "n_attn_kv_heads": 2,
    "vocab_size": 64,
    "max_seq_len": 256,
    "norm_eps": 1e-5,
    "sliding_window": 11,
}


RETENTION = {name: value for name, value in ARGS.items() if name != "sliding_window"}
"""Settings of a model whose self-decoder is of gated retention."""


def released_weights(args=ARGS, seed=0):
    """Random float32 weights of a model, by the names of the release's state dict."""
    rng = np.random.default_rng(seed)
    size, wide = args["dim"], args["hidden_dim"]
    narrow = size // args["n_attn_heads"] * args["n_attn_kv_heads"]

    def matrix(rows, columns):
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def norm():
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    weights = {
        "embed_tokens.weight": matrix(args["vocab_size"], size),
        "output_projection.weight": 3 * matrix(args["vocab_size"], size),
        "layer_norm.weight": norm(),
        "cross_decoder.k_proj.weight": matrix(narrow, size),
        "cross_decoder.v_proj.weight": matrix(narrow, size),
        "cross_decoder.kv_layer_norm.weight": norm(),
    }
    retention = args.get("sliding_window") is None
    for decoder, parts in (("self", "qkvg" if retention else "qkv"), ("cross", "q")):
        for index in range(args["n_layers"] // 2):
            layer = f"{decoder}_decoder.layers.{index}"
            for part in (*(f"{p}_proj" for p in parts), "out_proj"):
                weights[f"{layer}.mixer.{part}.weight"] = matrix(size, size)
            if parts == "qkvg":
                # Three times as wide, so that gates differ: some forget in a few dozen tokens.
                weights[f"{layer}.mixer.gt_proj.weight"] = 3 * matrix(args["n_self_heads"], size)
            for part, shape in (
                ("fc1", (wide, size)),
                ("gate", (wide, size)),
                ("fc2", (size, wide)),
            ):
                weights[f"{layer}.ffn.{part}.weight"] = matrix(*shape)
            weights[f"{layer}.mixer_layer_norm.weight"] = norm()
            weights[f"{layer}.final_layer_norm.weight"] = norm()
    return weights


def rotated(heads, theta):
    """RoPE of pairs (2i, 2i + 1) of [T, H, D], token t at t; the last frequency is 1 / theta."""
    count, _, dim = heads.shape
    angles = np.arange(count)[:, None] * theta ** -np.linspace(0, 1, dim // 2)
    turn = np.exp(1j * angles)[:, None]
    turned = (heads[..., 0::2] + 1j * heads[..., 1::2]) * turn
    return np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape)


def attention(q, k, v, window=None):
    """Causal softmax(q k / sqrt(d)) v of each head, of the last `window` tokens if it is given."""
    count, heads, dim = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim)
    back = np.arange(count)[:, None] - np.arange(count)[None]
    seen = (back >= 0) & (back < (window or count))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(count, -1)


def retention(q, k, v, gates):
    """Each head's q S, of S = gate S + k v / sqrt(d), token by token."""
    count, heads, dim = q.shape
    states, out = np.zeros((heads, dim, v.shape[2])), np.empty_like(v)
    for t in range(count):
        states = gates[t][:, None, None] * states + k[t][:, :, None] * v[t][:, None] / np.sqrt(dim)
        out[t] = np.einsum("hk,hkv->hv", q[t], states)
    return out


def oracle_logits(weights, tokens, args=ARGS):
    """float64 [T, V]: what the model says after each token of one text."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    theta = args.get("rope_theta", 1e4)

    def plain_norm(x):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + args["norm_eps"])

    def norm(x, name):
        return plain_norm(x) * w[name]

    def heads(x, name, count):
        return (x @ w[name].T).reshape(len(x), count, -1)

    def silu(x):
        return x / (1 + np.exp(-x))

    def swiglu(x, layer):
        gate = x @ w[f"{layer}.ffn.fc1.weight"].T
        up = x @ w[f"{layer}.ffn.gate.weight"].T
        return (silu(gate) * up) @ w[f"{layer}.ffn.fc2.weight"].T

    x = np.sqrt(args["dim"]) * w["embed_tokens.weight"][np.asarray(tokens)]
    for index in range(args["n_layers"] // 2):
        layer, count = f"self_decoder.layers.{index}", args["n_self_heads"]
        y = norm(x, f"{layer}.mixer_layer_norm.weight")
        q, k, v = (heads(y, f"{layer}.mixer.{part}_proj.weight", count) for part in "qkv")
        q, k = rotated(q, theta), rotated(k, theta)
        if args.get("sliding_window") is None:
            gates = (1 / (1 + np.exp(-y @ w[f"{layer}.mixer.gt_proj.weight"].T))) ** (1 / 16)
            kept = plain_norm(retention(q, k, v, gates)).reshape(len(y), -1)
            y = silu(y @ w[f"{layer}.mixer.g_proj.weight"].T) * kept
        else:
            y = attention(q, k, v, args["sliding_window"])
        x = x + y @ w[f"{layer}.mixer.out_proj.weight"].T
        x = x + swiglu(norm(x, f"{layer}.final_layer_norm.weight"), layer)
    once = norm(x, "cross_decoder.kv_layer_norm.weight")
    k = rotated(heads(once, "cross_decoder.k_proj.weight", args["n_attn_kv_heads"]), theta)
    v = heads(once, "cross_decoder.v_proj.weight", args["n_attn_kv_heads"])
    for index in range(args["n_layers"] // 2):
        layer = f"cross_decoder.layers.{index}"
        y = norm(x, f"{layer}.mixer_layer_norm.weight")
        q = rotated(heads(y, f"{layer}.mixer.q_proj.weight", args["n_attn_heads"]), theta)
        x = x + attention(q, k, v) @ w[f"{layer}.mixer.out_proj.weight"].T
        x = x + swiglu(norm(x, f"{layer}.final_layer_norm.weight"), layer)
    return norm(x, "layer_norm.weight") @ w["output_projection.weight"].T
