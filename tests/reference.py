"""Naive float64-capable forms of every kernel, token by token; never imported by the product."""

import math

import numpy as np
import torch
from torch import Tensor


def linear_product_reference(x: Tensor, weight: Tensor) -> Tensor:
    return (x.unsqueeze(-2) * weight).sum(-1)


def fused_rmsnorm_reference(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def l2_normalize_reference(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def fused_residual_sphere_reference(residual: Tensor, branch: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return fused_rmsnorm_reference(residual + fused_rmsnorm_reference(branch, weight, eps), None, eps)


def fused_swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def fused_chunked_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    loss_weights: Tensor | None = None,
    denominator: float | Tensor | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Loss and argmax from all logits at once."""
    logits = logit_scale * hidden @ weight.T
    log_probability = logits - logits.logsumexp(-1, keepdim=True)
    valid = targets != -100
    row_weight = torch.ones_like(logits[:, 0]) if loss_weights is None else loss_weights.to(logits.dtype)
    row_weight = row_weight * valid
    picked = log_probability.gather(-1, (targets * valid).unsqueeze(-1)).squeeze(-1)
    total = row_weight.sum() if denominator is None else denominator
    loss = -(row_weight * picked).sum() / total if row_weight.any() else 0 * logits.sum()
    is_top = logits == logits.amax(-1, keepdim=True)
    return loss, is_top.int().argmax(-1)


def newton_schulz_orthogonalize_reference(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """The same map applied to the singular values of one matrix, from a float64 decomposition."""
    m = matrix.double()
    if not m.any():
        return torch.zeros_like(m)
    m = m / m.abs().max()
    norm, row_sum, column_sum = m.norm(), m.abs().sum(1).max(), m.abs().sum(0).max()
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    bound = torch.minimum(norm, (row_sum * column_sum).sqrt())
    s = s / torch.maximum((norm * row_sum + 1e-7).sqrt(), bound)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    for _ in range(2):
        s = 1.5 * s - 0.5 * s**3
    return u @ torch.diag(s) @ vh


def causal_convolution_reference(x: Tensor, taps: Tensor, *, doc_start=None, carry=None) -> Tensor:
    """Token by token and tap by tap: silu(x_t + sum_j taps_j x_{t-j}), j while t - j is in the document."""
    B, T, C = x.shape
    taps = taps.reshape(C, -1)
    W = taps.shape[1]
    rows = []
    for b in range(B):
        for t in range(T):
            first = -(W - 1) if doc_start is None else int(doc_start[b, t])
            total = x[b, t]
            for j in range(min(W, t - first + 1)):
                if t - j >= 0:
                    total = total + taps[:, j] * x[b, t - j]
                elif carry is not None:
                    total = total + taps[:, j] * carry[b, W - 1 + t - j]
            rows.append(total * torch.sigmoid(total))
    return torch.stack(rows).view(B, T, C)


def scan_reference(q, k, v, beta, log_gamma, *, initial_state=None, doc_start=None) -> tuple[Tensor, Tensor]:
    """Token by token: S_t = gamma_t S_{t-1} + beta_t (v_t - S_{t-1} k_t) k_t^T, y_t = S_t q_t; state = S^T."""
    B, T, H, K = q.shape
    V = v.shape[-1]
    state = q.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(q.dtype)
    outputs = []
    for t in range(T):
        if doc_start is not None:
            # a document that starts at this very token reads nothing of what came before it
            state = torch.where((doc_start[:, t] == t)[:, None, None, None], torch.zeros_like(state), state)
        kt, vt, qt = k[:, t], v[:, t], q[:, t]
        error = vt - torch.einsum("bhk,bhkv->bhv", kt, state)
        decay = log_gamma[:, t].to(q.dtype).exp()[..., None, None]
        write = torch.einsum("bhk,bhv->bhkv", beta[:, t].to(q.dtype)[..., None] * kt, error)
        state = decay * state + write
        outputs.append(torch.einsum("bhk,bhkv->bhv", qt, state))
    return torch.stack(outputs, dim=1), state


def scan_decay_first_reference(q, k, v, beta, log_gamma, *, initial_state) -> tuple[Tensor, Tensor]:
    """The common rule, which decays before it predicts: R = gamma S, S = R + beta k (v - k R)^T, y = q S."""
    state, outputs = initial_state.to(q.dtype), []
    for t in range(q.shape[1]):
        decayed = log_gamma[:, t].exp()[..., None, None] * state
        recalled = (decayed * k[:, t][..., None]).sum(-2)
        delta = beta[:, t][..., None] * (v[:, t] - recalled)
        state = decayed + k[:, t][..., None] * delta[..., None, :]
        outputs.append((state * q[:, t][..., None]).sum(-2))
    return torch.stack(outputs, dim=1), state


def scan_affine_token(k, v, beta, log_gamma) -> tuple[Tensor, Tensor]:
    """One token's affine map state -> M state + S, M = gamma I - beta k k^T, S = beta k v^T; k (..., K), v (..., V)."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    kb = beta[..., None] * k
    m = log_gamma.exp()[..., None, None] * eye - kb[..., :, None] * k[..., None, :]
    return m, kb[..., :, None] * v[..., None, :]


def compose_affine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The map that applies `first`, then `second`: (M2 M1, M2 S1 + S2). M = 0 at a reset, which forgets all before."""
    (m1, s1), (m2, s2) = first, second
    return m2 @ m1, m2 @ s1 + s2


def delta_rule_step_reference(q, k, v, beta, log_gamma, state, *, parents=None) -> Tensor:
    """Every node of the draft tree by a token loop over its own path from the committed state."""
    N = q.shape[1]
    parents = list(range(-1, N - 1)) if parents is None else [int(p) for p in parents]
    outputs = []
    for node in range(N):
        path, cursor = [], node
        while cursor >= 0:
            path.insert(0, cursor)
            cursor = parents[cursor]
        args = [x[:, path] for x in (q, k, v, beta, log_gamma)]
        outputs.append(scan_reference(*args, initial_state=state)[0][:, -1])
    return torch.stack(outputs, dim=1)


def delta_rule_commit_reference(k, v, beta, log_gamma, state, path) -> Tensor:
    """The state after the tokens of each row's path, up to its first -1."""
    rows = []
    for b in range(k.shape[0]):
        steps = []
        for node in path[b].tolist():
            if node < 0:
                break
            steps.append(node)
        one = state[b : b + 1].to(k.dtype)
        if steps:
            kb, vb, bb, gb = (x[b : b + 1, steps] for x in (k, v, beta, log_gamma))
            one = scan_reference(kb, kb, vb, bb, gb, initial_state=one)[1]
        rows.append(one)
    return torch.cat(rows)


def windowed_attention_reference(
    q, k, v, q_far, k_far, *, window, anchors, doc_start=None, anchor_k=None, anchor_v=None, scale=None,
    k_quant=None, v_quant=None,
):
    """One query at a time, one key at a time, straight from the law; any float type, differentiable."""
    B, T, H, K = q.shape
    G, P = k.shape[2], k.shape[1] - T
    scale = K**-0.5 if scale is None else scale
    if doc_start is None:
        doc_start = torch.zeros(B, T, dtype=torch.int32)
    starts = doc_start.tolist()
    rows = []
    for b in range(B):
        for i in range(T):
            d = starts[b][i]
            near, quantised, far, old = [], [], [], []
            for j in range(d, i + 1):
                if i - j < window:
                    two_pages = (i - d) // 64 - (j - d) // 64 >= 2 and j - d >= anchors
                    (quantised if two_pages and k_quant is not None else near).append(P + j)
                elif j < d + anchors:
                    if j >= 0:
                        far.append(j)
                    elif anchor_k is not None and j - starts[b][0] < anchor_k.shape[1]:
                        old.append(j - starts[b][0])
            keys, values, queries = [k[b, near]], [v[b, near]], [q[b, i]] * len(near)
            if quantised:
                keys, values = [*keys, k_quant[b, quantised]], [*values, v_quant[b, quantised]]
                queries = queries + [q[b, i]] * len(quantised)
            if far:
                keys, values = [*keys, k_far[b, far]], [*values, v[b, [P + j for j in far]]]
                queries = queries + [q_far[b, i]] * len(far)
            if old:
                keys, values = [*keys, anchor_k[b, old]], [*values, anchor_v[b, old]]
                queries = queries + [q_far[b, i]] * len(old)
            keys = torch.cat(keys).repeat_interleave(H // G, 1)            # (N, H, K)
            values = torch.cat(values).repeat_interleave(H // G, 1)
            weight = ((torch.stack(queries) * keys).sum(-1) * scale).softmax(0)
            rows.append((weight[..., None] * values).sum(0))
    return torch.stack(rows).view(B, T, H, K)


def rotary_reference(x, cos, sin):
    """Pair by pair."""
    K = x.shape[-1]
    columns = [None] * K
    for c in range(K // 2):
        a, b, co, si = x[..., c], x[..., c + K // 2], cos[..., c, None].to(x.dtype), sin[..., c, None].to(x.dtype)
        columns[c], columns[c + K // 2] = a * co - b * si, b * co + a * si
    return torch.stack(columns, -1)


def hadamard_reference(x):
    """Dense Walsh-Hadamard product."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while matrix.shape[0] < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return x @ matrix * x.shape[-1] ** -0.5


def paged_attention_reference(q, q_far, keys, values, raw_keys, keys_quant, values_quant, parents, length, *,
                              window, anchors, scope, scale=None):
    """One node at a time from the full lists (L + N, G, K) of one sequence, the nodes' rows last.

    parents[n] is the parent node of n, -1 for a root; a node's path decides which of the last N rows it sees.
    """
    N, H, K = q.shape
    G = keys.shape[1]
    scale = K**-0.5 if scale is None else scale
    out = []
    for n in range(N):
        path, m = [], n
        while m >= 0:
            path.insert(0, m)
            m = parents[m]
        seen = list(range(length)) + [length + m for m in path]            # row of the key at each position
        i = len(seen) - 1
        scores, picked = [], []
        for j, row in enumerate(seen):
            old = i // 64 - j // 64 >= 2 and j >= anchors
            if scope == "full" or i - j < window:
                key, query = (keys_quant if old else keys)[row], q[n]
            elif j < anchors:
                key, query, old = raw_keys[row], q_far[n], False
            else:
                continue
            scores.append((query * key.repeat_interleave(H // G, 0)).sum(-1) * scale)
            picked.append((values_quant if old else values)[row].repeat_interleave(H // G, 0))
        weight = torch.stack(scores).softmax(0)                            # (keys, H)
        out.append((weight[..., None] * torch.stack(picked)).sum(0))
    return torch.stack(out)


E2M1_TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def minifloat_table_reference(exponent_bits: int, mantissa_bits: int) -> list[float]:
    """Values of the non-negative codes by the format's definition; inf and NaN codes included as plain numbers."""
    bias, values = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        if exponent == 0:
            values.append(mantissa / 2**mantissa_bits * 2.0 ** (1 - bias))
        else:
            values.append((1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))
    return values


# 0 ... 448 and 0 ... 57344: the codes above are NaN, or infinity and NaN
E4M3_TABLE = minifloat_table_reference(4, 3)[:127]
E5M2_TABLE = minifloat_table_reference(5, 2)[:124]


def hadamard_transform_reference(x: Tensor, signs: Tensor | None = None, inverse: bool = False) -> Tensor:
    """In-place butterflies over pairs (j, j + h), h = 1, 2, ... 64, in x's own precision."""
    y = x.clone() if signs is None or inverse else x * signs.to(x.dtype)
    y = y.reshape(-1, 128)
    h = 1
    while h < 128:
        for j in range(128):
            if j & h == 0:
                upper, lower = y[:, j].clone(), y[:, j + h].clone()
                y[:, j], y[:, j + h] = upper + lower, upper - lower
        h *= 2
    y = (y * 128**-0.5).reshape(x.shape)
    return y * signs.to(x.dtype) if inverse and signs is not None else y


def hadamard_matrix_reference() -> Tensor:
    matrix = [[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]
    return torch.tensor(matrix, dtype=torch.float64) / math.sqrt(128)


def philox_reference(seed: int, c0: np.ndarray, c1: np.ndarray, c2: int) -> list[np.ndarray]:
    """Philox-4x32-10 in numpy's 64-bit unsigned integers."""
    u = np.uint64
    low, x = u(0xFFFFFFFF), [c0.astype(u), c1.astype(u), np.full_like(c0, c2).astype(u), np.zeros_like(c0).astype(u)]
    k0, k1 = u(seed & 0xFFFFFFFF), u(seed >> 32)
    for _ in range(10):
        p0, p2 = x[0] * u(0xD2511F53), x[2] * u(0xCD9E8D57)
        x = [(p2 >> u(32)) ^ x[1] ^ k0, p2 & low, (p0 >> u(32)) ^ x[3] ^ k1, p0 & low]
        k0, k1 = (k0 + u(0x9E3779B9)) & low, (k1 + u(0xBB67AE85)) & low
    return x


def noise_reference(seed: int, stream: int, rows: int, width: int) -> Tensor:
    row, column = np.meshgrid(np.arange(rows), np.arange(width), indexing="ij")
    words = np.stack(philox_reference(seed, column // 4, row, stream), axis=-1)
    word = np.take_along_axis(words, (column % 4)[..., None], axis=-1)[..., 0]
    return torch.from_numpy(((word >> np.uint64(13)).astype(np.float64) + 0.5) / 2**19)


def _nearest_even(a: Tensor, candidates: Tensor) -> Tensor:
    """Index of the nearest candidate (last dim), ties to the even index."""
    distance = (a[..., None] - candidates).abs()
    best = distance.min(dim=-1, keepdim=True).values
    tied = distance == best
    index = torch.arange(candidates.shape[-1])
    even_first = torch.where(tied, index % 2 * 1000 + index, 10**6)
    return even_first.argmin(dim=-1)


def _nearest_even_sorted(a: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest entry of one sorted table, ties to the even index; a does not exceed the table."""
    upper = torch.searchsorted(table, a)
    lower = (upper - 1).clamp(min=0)
    to_upper, to_lower = table[upper] - a, a - table[lower]
    return torch.where((to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0)), upper, lower)


def _covering_power(amax: float, limit: float) -> int:
    """Smallest k with amax <= limit * 2^k, k in -126 ... 126."""
    if amax == 0:
        return -126
    k = math.ceil(math.log2(amax / limit)) + 2
    while k > -126 and amax <= limit * 2.0 ** (k - 1):
        k -= 1
    return min(max(k, -126), 126)


def quantize_fp4_reference(
    x: Tensor, *, signs: Tensor | None = None, stochastic: bool = False, seed: int = 0, stream: int = 0, per_row=False
) -> tuple[Tensor, Tensor, Tensor]:
    """(nibbles (rows, width), scale bytes (rows, width / 32), global scale) of finite x, by tables in float64."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 128))
    if signs is not None:
        x = hadamard_transform_reference(x, torch.nn.functional.pad(signs, (0, x.shape[1] - signs.shape[0])))
    x = x.double()
    rows, width = x.shape
    amax = x.abs().amax(dim=1) if per_row else x.abs().amax().reshape(1)
    global_scale = torch.tensor([2.0 ** _covering_power(v, 2688.0) for v in amax.tolist()], dtype=torch.float64)
    a = (x.abs() / global_scale[:, None]).view(rows, -1, 32)
    table = torch.tensor(E4M3_TABLE, dtype=torch.float64)
    block_amax = a.amax(dim=2)
    if stochastic:
        scale_code = (6 * table < block_amax[..., None]).sum(dim=-1)
    else:
        scale_code = _nearest_even(block_amax, 6 * table)
    s = table[scale_code][..., None]
    grid = torch.tensor(E2M1_TABLE, dtype=torch.float64)
    if stochastic:
        below = ((grid * s[..., None] <= a[..., None]).sum(dim=-1) - 1).clamp(0, 7)
        above = (below + 1).clamp(max=7)
        noise = noise_reference(seed, stream, rows, width).view_as(a)
        up = a + noise * (grid[above] - grid[below]) * s >= grid[above] * s
        code = torch.where(up, above, below)
    else:
        code = _nearest_even(a, grid * s[..., None])
    code = torch.where(s > 0, code, 0).view(rows, width)
    return code + 8 * (x < 0), scale_code, global_scale


def dequantize_fp4_reference(nibbles: Tensor, scale_code: Tensor, global_scale: Tensor) -> Tensor:
    grid = torch.tensor(E2M1_TABLE + [-v for v in E2M1_TABLE], dtype=torch.float64)
    scale = torch.tensor(E4M3_TABLE, dtype=torch.float64)[scale_code].repeat_interleave(32, dim=1)
    return grid[nibbles] * scale * global_scale[:, None]


def microscaled_fp4_gemm_reference(x, weight, dy, signs_of, seed=0, dtype=torch.float64):
    """(y, dx, dweight); signs_of(width) gives the random signs; products in dtype."""

    def operand(t, **options):
        return dequantize_fp4_reference(*quantize_fp4_reference(t, signs=signs_of(t.shape[1]), **options)).to(dtype)

    y = operand(x, per_row=True) @ operand(weight).T
    dx = operand(dy, per_row=True, stochastic=True, seed=seed, stream=0) @ operand(weight.T).T
    dweight = operand(dy.T, per_row=True, stochastic=True, seed=seed, stream=1) @ operand(x.T, per_row=True).T
    return y, dx, dweight


def quantize_fp8_reference(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """(values (rows, width), block power (rows, width / 32)) of finite x with an independent power per block."""
    table = torch.tensor(E4M3_TABLE if format == "e4m3" else E5M2_TABLE, dtype=torch.float64)
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).double()
    blocks = x.view(x.shape[0], -1, 32)
    amax = blocks.abs().amax(dim=2)
    power = torch.tensor([_covering_power(v, table[-1].item()) for v in amax.flatten().tolist()]).view_as(amax)
    factor = torch.pow(2.0, power.double())[..., None]
    code = _nearest_even_sorted(blocks.abs() / factor, table)
    return (table[code] * factor * blocks.sign()).view_as(x), power


def fp8_linear_reference(x, weight, dy, dtype=torch.float64):
    """(y, dx, dweight): E4M3 by E4M3 forward, E5M2 gradient by E4M3 backward."""

    def operand(t, format="e4m3"):
        return quantize_fp8_reference(t, format)[0].to(dtype)

    y = operand(x) @ operand(weight).T
    dx = operand(dy, "e5m2") @ operand(weight.T).T
    dweight = operand(dy.T, "e5m2") @ operand(x.T).T
    return y, dx, dweight
