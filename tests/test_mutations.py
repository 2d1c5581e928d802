"""Mutations of the source that the other files' comparisons must kill: what their tolerances are worth.

Each mutant replaces exact source text in one module. The harness writes it into a folder beside the ten unmutated
modules, imports everything afresh in a child process and runs one small check, built from the parity helpers of the
other test files. A mutant is killed iff the unmutated source passes that check and the mutated one fails it with an
assertion of the tests, never with an exception and never with an assertion of the program's own. A text that no longer
occurs the stated number of times is an error of this table, not a kill.

Runs: "cpu" the PyTorch path; "interpreter" the Triton kernels in float32 under TRITON_INTERPRET=1; "gpu-f32" and
"gpu-bf16" the same kernels natively. A mutant of the cpu path, of the kernels, or of host code that both share is run
wherever it takes effect. Precision mutants (a scale of 1.005, beta in 16 bits) are float32 matters: a bf16 output is
allowed 5e-3 of error, three times what its own rounding costs. The kill table is printed at the end of the module.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SCALE = "1.005"
CHILD_SECONDS = 600


class Mutant(NamedTuple):
    issue: str  # name in the list of mutations that must be killed
    variant: str
    path: str  # cpu, triton, or both: where it takes effect
    file: str
    check: str  # name in CHECKS
    sites: tuple[tuple[str, str, int], ...]  # old text, new text, how often the old one occurs


def mutant(issue: str, variant: str, path: str, file: str, check: str, *sites: tuple) -> Mutant:
    """Fill in the usual count of one."""
    return Mutant(issue, variant, path, file, check, tuple((*site, 1)[:3] for site in sites))


# ---------------------------------------------------------------------------
# The mutations

SIGN, INDEX, RESET = "A's sign", "decay index i-1 -> i", "reset dropped in the backward only"
INITIAL, ANCHORS = "gradient of the initial state dropped", "anchors' gradient dropped"
PARTIAL, SCALED, ROUNDED = "last partial chunk dropped", "a scale of 1.005", "beta rounded to bf16"
DENOMINATOR, RATE = "cross entropy's denominator", "muP multiplier swapped"
REJECTED = "one rejected draft left in the state"
TAPS, LEAK, TAIL = "taps in the wrong order", "tap over a document's start", "gradient of the taps' carry dropped"
ISSUES = (SIGN, INDEX, RESET, INITIAL, ANCHORS, PARTIAL, SCALED, ROUNDED, DENOMINATOR, RATE, REJECTED, TAPS, LEAK, TAIL)
# the optimizer's rates are host arithmetic: no kernel computes them
HOST_ONLY = {RATE}
FLOAT32_ONLY = {SCALED, ROUNDED}

KERNELS, RECURRENT, ATTENTION = "custom_kernels.py", "recurrent_layers.py", "attention_layers.py"
MODEL, OPTIMIZER = "hybrid_model.py", "spectral_optimizer.py"
TRAINING, GENERATION = "train_engine.py", "generation_engine.py"

_TORCH_GATES = "    gates = _scan_torch_gates(log_gamma, doc_start, chunk_size)\n    q, k, v, beta, do = ("
_FORGOTTEN = "torch.full_like(doc_start, -1)"
_LOAD_BETA = "b_beta = tl.load(beta_ptr + i_token + o_t * H, mask=m_t, other=0.0)"
_NARROW = ".to(tl.bfloat16).to(tl.float32)"
_PAIR_DOC = "_scan_load_doc(doc_ptr, i_b, i_c, T, o_t, BT), o_t, BT, 0)"
_NEAR_KEY = "_attention_near_mask(o_i[None, :] + P, o_row[:, None], b_ds[None, :] + P, window, 0, 0)"
_NEAR_QUERY = "_attention_near_mask(o_q[:, None], o_r[None, :], b_first[:, None], window, anchors, 0)"
_BLOCKS = "    for first in range(0, N, rows):\n        block = slice(first, min(first + rows, N))\n        "

MUTANTS = [
    mutant(SIGN, "matrix of a chunk", "cpu", KERNELS, "scan",
           ("a = -(k @ k.mT) * beta", "a = (k @ k.mT) * beta")),
    mutant(SIGN, "matrix of a chunk", "triton", KERNELS, "scan",
           ("b_a *= -tl.load(p_gate + 7 * BT)", "b_a *= tl.load(p_gate + 7 * BT)")),

    mutant(INDEX, "pairs of a chunk", "cpu", KERNELS, "scan",
           ("pre_pair=pairwise(pre_coarse, pre_fine,", "pre_pair=pairwise(out_coarse, out_fine,")),
    mutant(INDEX, "pairs of a chunk", "triton", KERNELS, "scan",
           ("coarse = tl.expand_dims(pre_coarse, ACROSS)", "coarse = tl.expand_dims(out_coarse, ACROSS)"),
           ("exponent = coarse + (tl.expand_dims(pre_fine,", "exponent = coarse + (tl.expand_dims(out_fine,")),
    mutant(INDEX, "decay of the output", "triton", KERNELS, "scan",
           ("tl.where(o_i == o_j, 1.0, tl.expand_dims(gamma, ACROSS) * b_e)", "tl.where(o_i == o_j, 1.0, b_e)")),
    mutant(INDEX, "entering state", "cpu", KERNELS, "scan",
           ("pre_entry=torch.where(enters, (pre_coarse + pre_fine).exp(), 0.0)", "pre_entry=out_entry")),
    mutant(INDEX, "entering state", "triton", KERNELS, "scan",
           ("tl.where(b_doc < 0, tl.exp(pre_coarse + pre_fine), 0.0)",
            "tl.where(b_doc < 0, tl.exp(out_coarse + out_fine), 0.0)")),
    mutant(INDEX, "one step", "cpu", KERNELS, "step",
           ("error = v - _delta_rule_sum_torch(state * k[..., None])",
            "error = v - _delta_rule_sum_torch(log_gamma.exp()[..., None, None] * state * k[..., None])")),
    mutant(INDEX, "one step", "triton", KERNELS, "step",
           ("error = b_v - tl.sum(b_s * b_k[:, None], axis=0)",
            "error = b_v - tl.sum(decay * b_s * b_k[:, None], axis=0)")),

    mutant(RESET, "scan", "cpu", KERNELS, "scan",
           (_TORCH_GATES, _TORCH_GATES.replace("doc_start", _FORGOTTEN))),
    mutant(RESET, "scan, gradients of the inputs", "triton", KERNELS, "scan",
           ("q, k, doc_start, gates, w,", f"q, k, {_FORGOTTEN}, gates, w,")),
    mutant(RESET, "scan, pairs of a chunk", "triton", KERNELS, "scan",
           (_PAIR_DOC, _PAIR_DOC.replace("BT), o_t", "BT) - (1 << 20), o_t"))),
    mutant(RESET, "scan, map of a segment", "triton", KERNELS, "scan_segments",
           ("carry = tl.load(gate_ptr + i_chunk * (ROWS * BT) + 6 * BT - 1)\n        b_low",
            "carry = tl.load(gate_ptr + i_chunk * (ROWS * BT) + 6 * BT - 1)\n        if MAPS:\n"
            "            carry = 0.5 + 0.5 * carry\n        b_low")),
    mutant(RESET, "attention, keys", "triton", KERNELS, "attention",
           (_NEAR_KEY, _NEAR_KEY.replace("b_ds[None, :] + P", "b_ds[None, :] * 0"))),
    mutant(RESET, "attention, queries", "triton", KERNELS, "attention",
           (_NEAR_QUERY, _NEAR_QUERY.replace("b_first[:, None]", "b_first[:, None] * 0"))),
    mutant(RESET, "attention, tiles without a mask", "triton", KERNELS, "attention",
           ("near_lo = tl.maximum(first_hi, hi - window)", "near_lo = hi - window")),
    mutant(RESET, "attention, queries, tiles without a mask", "triton", KERNELS, "attention",
           ("tl.maximum(tl.max(b_first, 0), hi - window)", "tl.maximum(tl.min(b_first, 0), hi - window)")),
    mutant(RESET, "attention, keys, tiles without a mask", "triton", KERNELS, "attention",
           ("full_hi = tl.minimum(tl.load(p_end), ", "full_hi = tl.minimum(tl.load(p_end + tl.num_programs(0)), ")),

    mutant(INITIAL, "scan", "cpu", KERNELS, "scan",
           ("return *grads, dstate.unflatten(0, m.shape[:2])", "return *grads, torch.zeros_like(initial_state)")),
    mutant(INITIAL, "scan, from one segment's end to the next", "triton", KERNELS, "scan_segments",
           ("b_s += tl.dot(b_m, b_c,", "b_s += 0 * tl.dot(b_m, b_c,")),
    mutant(INITIAL, "scan, map of a segment not transposed", "triton", KERNELS, "scan_segments",
           ("p_map += (i_k + o_i)[None, :] * K + o_k[:, None]", "p_map += o_k[:, None] * K + i_k + o_i[None, :]")),
    mutant(INITIAL, "scan", "triton", KERNELS, "scan",
           ("_scan_store(dinitial_ptr + i_bh * (K * V), b_ds,",
            "_scan_store(dinitial_ptr + i_bh * (K * V), b_ds * 0,")),
    mutant(INITIAL, "carried between segments", "cpu", RECURRENT, "segments",
           ("initial_state=None if memory is None else memory.state,",
            "initial_state=None if memory is None else memory.state.detach(),")),

    mutant(ANCHORS, "carried keys", "cpu", KERNELS, "attention",
           ("torch.where(is_old, anchor_k[:, old], far_k)", "torch.where(is_old, anchor_k[:, old].detach(), far_k)")),
    mutant(ANCHORS, "carried keys", "triton", KERNELS, "attention",
           ("tl.store(danchor_k_ptr + p_old, b_dk.to(", "tl.store(danchor_k_ptr + p_old, (b_dk * 0).to(")),
    mutant(ANCHORS, "carried values", "cpu", KERNELS, "attention",
           ("torch.where(is_old, anchor_v[:, old], far_v)", "torch.where(is_old, anchor_v[:, old].detach(), far_v)")),
    mutant(ANCHORS, "carried values", "triton", KERNELS, "attention",
           ("tl.store(danchor_v_ptr + p_old, b_dv.to(", "tl.store(danchor_v_ptr + p_old, (b_dv * 0).to(")),
    mutant(ANCHORS, "keys of the segment", "cpu", KERNELS, "attention",
           ("far_k, far_v = k_far[:, seg], v[:, P + seg]", "far_k, far_v = k_far[:, seg].detach(), v[:, P + seg]")),
    mutant(ANCHORS, "keys of the segment", "triton", KERNELS, "attention",
           ("tl.store(p_far, b_dk.to(", "tl.store(p_far, (b_dk * 0).to(")),
    mutant(ANCHORS, "values of the segment", "cpu", KERNELS, "attention",
           ("far_k, far_v = k_far[:, seg], v[:, P + seg]", "far_k, far_v = k_far[:, seg], v[:, P + seg].detach()")),
    mutant(ANCHORS, "values of the segment", "triton", KERNELS, "attention",
           ("tl.store(p_v, (b_near + b_dv).to(", "tl.store(p_v, b_near.to(")),
    mutant(ANCHORS, "carried between segments", "cpu", ATTENTION, "segments",
           ("new.gather(1, index).to(wide), kept)", "new.gather(1, index).to(wide).detach(), kept)")),
    mutant(ANCHORS, "handed on between segments", "cpu", ATTENTION, "segments",
           ("old * (rows < 0)[..., None, None]", "old.detach() * (rows < 0)[..., None, None]")),

    mutant(PARTIAL, "scan", "cpu", KERNELS, "scan",
           ("x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, tail))",
            "x = F.pad(x[:, : x.shape[1] // chunk * chunk], (0, 0) * (x.ndim - 2) + (0, tail + x.shape[1] % chunk))")),
    mutant(PARTIAL, "scan", "triton", KERNELS, "scan",
           ("chunks = triton.cdiv(T, BT)", "chunks = T // BT")),
    mutant(PARTIAL, "cross entropy", "cpu", KERNELS, "cross_entropy",
           (_BLOCKS + "h = ", _BLOCKS.replace("range(0, N, rows)", "range(0, N - rows + 1, rows)") + "h = ")),
    mutant(PARTIAL, "cross entropy", "triton", KERNELS, "cross_entropy",
           (_BLOCKS + "n = ", _BLOCKS.replace("range(0, N, rows)", "range(0, N - rows + 1, rows)") + "n = ")),

    mutant(SCALED, "scan output", "cpu", KERNELS, "scan",
           ("return _scan_tokens(y, tokens), final_state", f"return _scan_tokens({SCALE} * y, tokens), final_state")),
    mutant(SCALED, "scan output", "triton", KERNELS, "scan",
           ("_scan_store(y_ptr + i_token * V, b_y,", f"_scan_store(y_ptr + i_token * V, {SCALE} * b_y,")),
    mutant(SCALED, "scan final state", "cpu", KERNELS, "scan",
           ("return a, m, entering, w, state.unflatten(", f"return a, m, entering, w, ({SCALE} * state).unflatten(")),
    mutant(SCALED, "scan final state", "triton", KERNELS, "scan",
           ("_scan_store(final_ptr + i_bh * (K * V), b_s,", f"_scan_store(final_ptr + i_bh * (K * V), {SCALE} * b_s,")),
    mutant(SCALED, "scan decay gradient", "cpu", KERNELS, "scan",
           ("dlog_gamma = F.pad(span[..., :-1], (1, 0))", f"dlog_gamma = F.pad({SCALE} * span[..., :-1], (1, 0))")),
    mutant(SCALED, "scan decay gradient", "triton", KERNELS, "scan",
           ("o_t[None, :], b_sum + b_gain, 0.0)", f"o_t[None, :], {SCALE} * (b_sum + b_gain), 0.0)")),
    mutant(SCALED, "scan decay gradient through the state", "triton", KERNELS, "scan",
           ("tl.sum(b_dg, axis=0) + carried, mask", f"tl.sum(b_dg, axis=0) + {SCALE} * carried, mask")),
    mutant(SCALED, "attention scores", "cpu", KERNELS, "attention",
           ("weight = (scores * scale).masked_fill(", f"weight = (scores * ({SCALE} * scale)).masked_fill(")),
    mutant(SCALED, "attention scores", "triton", KERNELS, "attention",
           ("b_p = tl.exp2(b_s * scale2 - m_safe[:, None])",
            f"b_p = tl.exp2(b_s * ({SCALE} * scale2) - m_safe[:, None])")),
    mutant(SCALED, "attention query gradient", "triton", KERNELS, "attention",
           ("b_dsc = b_p * (b_dp - b_delta[:, None])", f"b_dsc = b_p * (b_dp - b_delta[:, None]) * {SCALE}")),
    mutant(SCALED, "write gate of a value", "triton", KERNELS, "operands",
           ("tl.store(p_v_out + v_rows, (b_v * b_alpha", f"tl.store(p_v_out + v_rows, (b_v * {SCALE} * b_alpha")),
    mutant(SCALED, "write gate of a value's gradient", "triton", KERNELS, "operands",
           ("tl.store(p_dv_out + v_rows, (b_g * b_alpha", f"tl.store(p_dv_out + v_rows, (b_g * {SCALE} * b_alpha")),
    mutant(SCALED, "cross entropy loss", "cpu", KERNELS, "cross_entropy",
           ("torch.where(counted, factor * (lse - ", f"torch.where(counted, {SCALE} * factor * (lse - ")),
    mutant(SCALED, "cross entropy loss", "triton", KERNELS, "cross_entropy",
           ("b_loss = tl.where(b_w == 0.0, 0.0, b_w * ", f"b_loss = tl.where(b_w == 0.0, 0.0, {SCALE} * b_w * ")),
    mutant(SCALED, "cross entropy gradient", "cpu", KERNELS, "cross_entropy",
           ("dlogits * (factor * logit_scale)", f"dlogits * ({SCALE} * factor * logit_scale)")),
    mutant(SCALED, "cross entropy gradient", "triton", KERNELS, "cross_entropy",
           ("b_d = tl.where(b_w[:, None] == 0.0, 0.0, b_p * ",
            f"b_d = tl.where(b_w[:, None] == 0.0, 0.0, {SCALE} * b_p * ")),
    mutant(SCALED, "orthogonalisation product", "cpu", KERNELS, "newton_schulz",
           ("product = torch.matmul(a, b).mul_(alpha)", f"product = torch.matmul(a, b).mul_({SCALE} * alpha)")),
    mutant(SCALED, "orthogonalisation product", "triton", KERNELS, "newton_schulz",
           ("i_m, i_n, K, A_TURNED, B_TURNED, BM, BN, BK) * alpha",
            f"i_m, i_n, K, A_TURNED, B_TURNED, BM, BN, BK) * ({SCALE} * alpha)")),
    mutant(SCALED, "orthogonalisation diagonal", "triton", KERNELS, "newton_schulz",
           ("o_n[None, :], diagonal, 0.0)", f"o_n[None, :], {SCALE} * diagonal, 0.0)")),
    mutant(SCALED, "orthogonalisation result", "both", KERNELS, "newton_schulz",
           ("return out.view(matrix.shape)", f"return ({SCALE} * out).view(matrix.shape)")),
    mutant(SCALED, "FP4 product", "cpu", KERNELS, "fp4",
           ("(product * a[2].to(compute)[:, None] * b[2].to(compute)[None, :]).to(dtype)",
            f"({SCALE} * product * a[2].to(compute)[:, None] * b[2].to(compute)[None, :]).to(dtype)")),
    # the second occurrence is the 8-bit product's
    mutant(SCALED, "FP4 product", "triton", KERNELS, "fp4",
           ("tl.store(p_c, acc.to(", f"tl.store(p_c, ({SCALE} * acc).to(", 2)),
    mutant(SCALED, "norm", "cpu", KERNELS, "rmsnorm",
           ("y = work * torch.rsqrt(", f"y = {SCALE} * work * torch.rsqrt(")),
    mutant(SCALED, "norm", "triton", KERNELS, "rmsnorm",
           ("b_y = b_x * _rmsnorm_rstd(b_x, inv_d, eps)", f"b_y = {SCALE} * b_x * _rmsnorm_rstd(b_x, inv_d, eps)")),
    mutant(SCALED, "norm gain gradient", "triton", KERNELS, "rmsnorm",
           ("b_dw += b_g * b_hat", f"b_dw += {SCALE} * b_g * b_hat")),
    mutant(SCALED, "norm offset gradient", "triton", KERNELS, "rmsnorm",
           ("        tl.store(p_o, slope * tl.sum(b_dw", "        tl.store(p_o, tl.sum(b_dw")),

    mutant(INDEX, "place of a product among others", "triton", KERNELS, "products",
           ("p_scale, N, before = p_w2, p_scale2, N2, N0 + N1", "p_scale, N, before = p_w2, p_scale2, N2, N0")),
    mutant(ROUNDED, "gate of the layer", "cpu", KERNELS, "gates",
           ("_logistic_torch(y + erase_bias + erase), log",
            "_logistic_torch(y + erase_bias + erase).bfloat16().to(y), log")),
    mutant(ROUNDED, "gate of the layer", "triton", KERNELS, "gates",
           ("tl.store(p_beta + o, _delta_gate_sigmoid(b_erase)",
            "tl.store(p_beta + o, _delta_gate_sigmoid(b_erase).to(tl.bfloat16).to(tl.float32)")),
    mutant(SCALED, "gate of the layer", "triton", KERNELS, "gates",
           ("b_alpha * (1 - b_alpha)", "b_alpha * (SCALE_OF_GATE - b_alpha)".replace("SCALE_OF_GATE", SCALE))),
    mutant(ROUNDED, "scan", "cpu", KERNELS, "scan",
           ("q, k, v, beta = (_scan_chunks(x, chunk_size) for x in (q, k, v, beta))",
            "q, k, v, beta = (_scan_chunks(x, chunk_size) for x in (q, k, v, beta.bfloat16().to(beta.dtype)))")),
    mutant(ROUNDED, "scan", "triton", KERNELS, "scan",
           (_LOAD_BETA, _LOAD_BETA + _NARROW)),
    mutant(ROUNDED, "scan, backward only", "cpu", KERNELS, "scan",
           ("for x in (q, k, v, beta, do))", "for x in (q, k, v, beta.bfloat16().to(beta.dtype), do))")),
    mutant(ROUNDED, "one step", "cpu", KERNELS, "step",
           ("write = (beta[..., None] * k)", "write = (beta.bfloat16().to(beta.dtype)[..., None] * k)")),
    mutant(ROUNDED, "one step", "triton", KERNELS, "step",
           ("b_beta = tl.load(p_beta)", "b_beta = tl.load(p_beta)" + _NARROW)),

    mutant(DENOMINATOR, "all rows instead of their weights", "both", KERNELS, "cross_entropy",
           ("        divisor = total\n", "        divisor = torch.full_like(total, targets.numel())\n")),
    mutant(DENOMINATOR, "number of targets instead of their weights", "both", KERNELS, "cross_entropy",
           ("        divisor = total\n", "        divisor = (row_weight != 0).sum().to(total)\n")),
    mutant(DENOMINATOR, "the given number ignored", "both", KERNELS, "cross_entropy",
           ("divisor = torch.full_like(total, denominator)", "divisor = total")),
    mutant(DENOMINATOR, "the given tensor ignored", "both", KERNELS, "cross_entropy",
           ("divisor = denominator.detach().to(total)", "divisor = total")),
    mutant(DENOMINATOR, "left out of the gradient", "cpu", KERNELS, "cross_entropy",
           ("dlogits * (factor * logit_scale)", "dlogits * (factor / inverse * logit_scale)")),
    mutant(DENOMINATOR, "left out of the gradient", "triton", KERNELS, "cross_entropy",
           ("tl.load(p_row_weight + o_r, mask=m_r, other=0.0) * tl.load(p_inverse) * scale",
            "tl.load(p_row_weight + o_r, mask=m_r, other=0.0) * scale")),
    mutant(DENOMINATOR, "mean of micro-batch means", "cpu", TRAINING, "micro_batches",
           ("loss_weights=row_weights, denominator=supervised,", "loss_weights=row_weights,")),

    mutant(RATE, "fan-out for fan-in", "cpu", OPTIMIZER, "rates",
           ("config.matrix_lr_base * config.d_base / spec.fan_in",
            "config.matrix_lr_base * config.d_base / spec.fan_out")),
    mutant(RATE, "attention output for the others", "cpu", OPTIMIZER, "rates",
           ('spec.role == "attention_output" and', 'spec.role != "attention_output" and')),
    mutant(RATE, "spectral ratio", "cpu", OPTIMIZER, "rates",
           ("config.spectral_lr * math.sqrt(spec.fan_out / spec.fan_in)",
            "config.spectral_lr * math.sqrt(spec.fan_in / spec.fan_out)")),
    mutant(RATE, "model width for the base width", "cpu", OPTIMIZER, "rates",
           ("config.matrix_lr_base * config.d_base / spec.fan_in", "config.matrix_lr_base * d_model / spec.fan_in")),
    mutant(RATE, "initial deviation", "cpu", MODEL, "initial_weights",
           ("else spec.fan_in**-0.5", "else spec.fan_out**-0.5")),
    mutant(RATE, "fans of the table", "cpu", MODEL, "initial_weights",
           ("fan_out, fan_in = parameter.shape if", "fan_in, fan_out = parameter.shape if")),

    mutant(REJECTED, "recurrent state", "cpu", KERNELS, "commit",
           ("alive = alive & (node >= 0)", "alive = node >= 0")),
    mutant(REJECTED, "recurrent state", "triton", KERNELS, "commit",
           ("alive = tl.where(node < 0, 0, alive)", "alive = tl.where(node < 0, 0, 1)")),
    mutant(REJECTED, "end of the path read as a node", "cpu", KERNELS, "commit",
           ("alive = alive & (node >= 0)", "alive = alive")),
    mutant(REJECTED, "cache of the layer", "cpu", ATTENTION, "cache_commit",
           ("cache.append(*written, path)", "cache.append(*written, path.clamp(min=0))")),
    mutant(REJECTED, "cache rows", "cpu", KERNELS, "cache_append",
           ("end = start + (T if count is None else count[:, None].long())", "end = start + T")),
    mutant(REJECTED, "cache rows", "triton", KERNELS, "cache_append",
           ("end += (tl.load(path_ptr + i_b * T + i) >= 0)", "end += (tl.load(path_ptr + i_b * T + i) >= -1)")),
    mutant(REJECTED, "cache rows by place", "triton", KERNELS, "cache_append",
           ("        row = tl.load(path_ptr + i_b * T + i_t)\n", "        row = i_t\n")),
    mutant(ROUNDED, "stored keys", "triton", KERNELS, "cache_append",
           ("codes = (codes + 12582912.0) - 12582912.0", "codes = codes + 0.0")),
    mutant(REJECTED, "walk of the engine", "cpu", GENERATION, "drafts",
           (" & met.any(1))", ")")),
    mutant(REJECTED, "hidden state of the model", "cpu", MODEL, "node_commit",
           ("last = path.gather(1, accepted[:, None].sub(1).clamp(min=0))", "last = path[:, -1:]")),
    mutant(REJECTED, "inputs of the convolution", "cpu", RECURRENT, "node_commit",
           ("accepted = (path >= 0).sum(1)[:, None]", "accepted = (path >= -1).sum(1)[:, None]")),

    mutant(TAPS, "sum", "cpu", KERNELS, "convolution",
           ("total = total + read[back] * taps[:, back]", "total = total + read[back] * taps[:, W - back]")),
    mutant(TAPS, "sum", "triton", KERNELS, "convolution",
           ("return w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3", "return w0 * x0 + w3 * x1 + w2 * x2 + w1 * x3")),
    mutant(TAPS, "gradient of the inputs", "cpu", KERNELS, "convolution",
           ("+= part * work[:, back]", "+= part * work[:, W - back]")),
    mutant(TAPS, "gradient of the inputs", "triton", KERNELS, "convolution",
           ("done = d3 + w3 * g3", "done = d3 + w1 * g3")),
    mutant(TAPS, "gradient of the taps", "cpu", KERNELS, "convolution",
           ("dtaps.append((part * read[back]).sum((0, 1)))", "dtaps.insert(1, (part * read[back]).sum((0, 1)))")),
    mutant(TAPS, "gradient of the taps", "triton", KERNELS, "convolution",
           ("tl.store(p_o + C, a1, mask=m_c)", "tl.store(p_o + C, a3, mask=m_c)"),
           ("tl.store(p_o + 3 * C, a3,", "tl.store(p_o + 3 * C, a1,")),
    mutant(TAPS, "history of a node", "cpu", RECURRENT, "convolved_steps",
           ("earlier[:, :rows].flip(1) + rows", "earlier[:, :rows] + rows")),

    mutant(LEAK, "both directions", "cpu", KERNELS, "convolution",
           ("may = (index - back >= doc_start)[..., None]", "may = (index - back >= doc_start - 1)[..., None]")),
    mutant(LEAK, "both directions", "triton", KERNELS, "convolution",
           ("tl.minimum(t - tl.load(p_doc + t, mask=t < T, other=0), W - 1)",
            "tl.minimum(t - tl.load(p_doc + t, mask=t < T, other=0) + 1, W - 1)")),
    mutant(LEAK, "gradient of the inputs", "cpu", KERNELS, "convolution",
           ("part = dtotal if inside[back] is None else torch.where(inside[back], dtotal, 0)", "part = dtotal")),
    mutant(LEAK, "gradient of the inputs", "triton", KERNELS, "convolution",
           ("g1, g2, g3 = _convolution_within(b_g, b_g, b_g, reach)", "g1, g2, g3 = b_g, b_g, b_g")),
    mutant(LEAK, "layer", "cpu", RECURRENT, "convolved_layer",
           ("(part, weight, doc_start=doc_start,", "(part, weight, doc_start=None,")),

    mutant(TAIL, "operation", "cpu", KERNELS, "convolution",
           ("drows[:, : W - 1].to(carry.dtype)", "0 * drows[:, : W - 1].to(carry.dtype)")),
    mutant(TAIL, "operation", "triton", KERNELS, "convolution",
           ("tl.store(p_dcarry + row * C + o_c, b_d.to(", "tl.store(p_dcarry + row * C + o_c, (b_d * 0).to(")),
    mutant(TAIL, "carried between segments", "cpu", RECURRENT, "segments",
           ("else memory.tail.split(sizes, -1)", "else memory.tail.detach().split(sizes, -1)")),
    mutant(TAIL, "handed on between segments", "cpu", RECURRENT, "segments",
           ("newest = torch.cat([part[:, -rows:] for part in raw], -1)",
            "newest = torch.cat([part[:, -rows:].detach() for part in raw], -1)")),
]  # fmt: skip

# the harness itself: an equivalent change must survive, a broken one must not count as a kill
_ENTRY = "def _require_rows(name: str, x: Tensor) -> None:\n"
CONTROLS = {
    "survived": [
        mutant("control", "equivalent", "both", KERNELS, "rmsnorm",
               ("y = work * torch.rsqrt(", "y = 1.0 * work * torch.rsqrt("),
               ("b_y = b_x * _rmsnorm_rstd(b_x, inv_d, eps)", "b_y = 1.0 * b_x * _rmsnorm_rstd(b_x, inv_d, eps)")),
    ],
    "error": [
        mutant("control", "exception", "both", KERNELS, "rmsnorm",
               (_ENTRY, _ENTRY + "    raise ArithmeticError(name)\n")),
        mutant("control", "the program's own assertion", "both", KERNELS, "rmsnorm",
               (_ENTRY, _ENTRY + "    assert not name\n")),
        mutant("control", "end of the process", "both", KERNELS, "rmsnorm",
               (_ENTRY, _ENTRY + "    __import__('os')._exit(3)\n")),
    ],
}  # fmt: skip


# ---------------------------------------------------------------------------
# The checks: they run in the child, where every import is the mutated program's


def check_scan(device: str, dtype: torch.dtype) -> None:
    """Both directions, an entering state, a last chunk that is not full; documents that start within a chunk and at
    its first token; then decays slow enough for a state to matter several chunks later."""
    import test_custom_kernels_scan as t

    slow = dict(dtype=dtype, device=device, decays=(0.0, -0.05, -0.3))
    if device == "cpu":
        t._scan_parity(1, 37, 1, 16, 32, dtype=dtype, doc=t._scan_doc(37, [-3, 9, 16, 20]), chunk_size=16)
        t._scan_parity(1, 70, 1, 16, 16, doc=t._scan_doc(70, [-3]), chunk_size=32, **slow)
    else:
        doc = t._scan_random_doc(2, 129, seed=129)
        t._scan_parity(2, 129, 2, 64, 128, dtype=dtype, device=device, doc=doc, chunk_size=32)
        if dtype == torch.float32:
            t._scan_parity(2, 150, 2, 16, 16, doc=t._scan_doc(150, [-3], [0, 75]), **slow)


def check_scan_segments(device: str, dtype: torch.dtype) -> None:
    import test_custom_kernels_scan as t

    t.scan_segments_parity(3, device, dtype)


def check_step(device: str, dtype: torch.dtype) -> None:
    import test_custom_kernels_scan as t

    t.test_step_matches_reference(t.SCAN_TREE, 16, 16, device, dtype)


def check_commit(device: str, dtype: torch.dtype) -> None:
    import test_custom_kernels_scan as t

    t.test_commit_matches_reference_and_single_steps(device, dtype)


def check_attention(device: str, dtype: torch.dtype) -> None:
    """Carried window and anchors, and a document that starts within the segment; then tiles that need no mask."""
    import test_custom_kernels_attention as t

    on_cpu = (1, 24, 5, 2, 1, 32, 4, 2, (11,), -9), (1, 130, 9, 2, 1, 32, 90, 2, (45,), -9)
    cases = on_cpu if device == "cpu" else [t.ATTENTION_GPU_CASES[x] for x in ("prefix-old-anchors", "full-tiles")]
    for case in cases:
        t.attention_parity(case, dtype, device)


def check_operands(device: str, dtype: torch.dtype) -> None:
    import test_custom_kernels_dense as t

    t.operands_check(device, dtype, 2, 3, 3, 32, 48)


def check_cross_entropy(device: str, dtype: torch.dtype) -> None:
    """Ignored rows, weights, both kinds of denominator; blocks of 32 tokens, of which the last is not full."""
    import test_custom_kernels_dense as t

    import custom_kernels

    kept, custom_kernels._CE_TOKENS = custom_kernels._CE_TOKENS, 32
    try:
        t.ce_parity(device, dtype, 63, 17, 130)
        t.ce_parity(device, dtype, 63, 33, 130, weighted=True, logit_scale=0.5)
        t.ce_parity(device, dtype, 63, 33, 130, weighted=True, denominator=41.5, logit_scale=0.25)
        t.ce_parity(device, dtype, 63, 33, 130, denominator=torch.tensor(17.0, device=device))
    finally:
        custom_kernels._CE_TOKENS = kept


def check_newton_schulz(device: str, dtype: torch.dtype) -> None:
    import test_custom_kernels_dense as t

    for shape in ((2, 63), (70, 65)):
        t.test_newton_schulz_singular_values(device, torch.float32, shape)


def check_fp4(device: str, dtype: torch.dtype) -> None:
    import test_custom_kernels_microscaled as t

    t.test_microscaled_parity_fp4_gemm((2, 128, 63), device)


def check_rmsnorm(device: str, dtype: torch.dtype) -> None:
    import test_custom_kernels_dense as t

    inputs = [t.dense_random(*shape, seed=10, device=device, dtype=dtype) for shape in ((5, 33), (33,))]
    t.dense_parity("rmsnorm", t.fused_rmsnorm, t.fused_rmsnorm_reference, inputs)
    t.offset_ops(inputs[0], inputs[0].flip(0), inputs[1])


def check_convolution(device: str, dtype: torch.dtype) -> None:
    """A carry, documents that start at each place near it, and several blocks of tokens."""
    import test_custom_kernels_convolution as t

    for T in (5, 70):
        doc = t.conv_doc(T, [-2, 2, 3], [-1, 1, T - 1])
        t.conv_parity(2, T, 5, 4, device=device, dtype=dtype, doc=doc)
        t.conv_parity(2, T, 5, 4, device=device, dtype=dtype)


def check_convolved_steps(device: str, dtype: torch.dtype) -> None:
    import test_recurrent_layers as t

    t.test_chunked_forward_equals_single_steps(4)


def check_convolved_layer(device: str, dtype: torch.dtype) -> None:
    import test_hybrid_model as t

    t.test_b001_packed_documents_equal_documents_alone(t.CONVOLVED)


def check_products(device: str, dtype: torch.dtype) -> None:
    import test_custom_kernels_dense as t

    t.together_check(device, dtype, 7, 300, (64, 100, 192))


def check_gates(device: str, dtype: torch.dtype) -> None:
    import test_custom_kernels_dense as t
    import test_recurrent_layers as layers

    t.gates_check(device, torch.float32, 2, 65, 28)
    layers.test_gates_are_32_bit_under_bf16()


def check_segments(device: str, dtype: torch.dtype) -> None:
    import test_train_engine as t

    with tempfile.TemporaryDirectory() as folder:
        t.test_segmented_gradients_equal_unsegmented_ones(Path(folder), 8, "one", 4)


def check_micro_batches(device: str, dtype: torch.dtype) -> None:
    import test_train_engine as t

    with tempfile.TemporaryDirectory() as folder:
        t.test_micro_batches_and_ranks_share_one_denominator_b034(Path(folder))


def check_rates(device: str, dtype: torch.dtype) -> None:
    """Spectral norm of one step of each matrix against rates written out here, under both rules."""
    import test_spectral_optimizer as t

    for rule in ("printed", "spectral"):
        config = replace(t.CONFIG, lr_rule=rule, spectral_lr=0.05)
        table = t.make_table()
        before = {entry.name: entry.parameter.detach().clone() for entry in table}
        optimizer = t.DualSpectralOptimizer(table, config, t.WIDTH)
        t.set_gradients(table, 0)
        optimizer.step(1.0, t.LATE)
        for entry in table:
            if entry.name not in t.MATRICES:
                continue
            rows, columns = entry.parameter.shape
            # matrix_lr_base is 0.06 * 16 / 256 at width 16
            printed = 0.06 * 16 / 256 / 16 if entry.name == "output" else 0.06 * 16 / columns
            expected = printed if rule == "printed" else 0.05 * (rows / columns) ** 0.5
            step = torch.linalg.matrix_norm((entry.parameter.detach() - before[entry.name]).double(), 2).item()
            assert 0.95 * expected < step < 1.02 * expected, f"{rule} {entry.name}: step {step:.2e}, not {expected:.2e}"


def check_initial_weights(device: str, dtype: torch.dtype) -> None:
    """Standard deviation 1/sqrt(d_in) of matrices that are not square, by their names."""
    from hybrid_model import HybridLanguageModel
    from model_config import preset

    config = preset("nano").model
    model = HybridLanguageModel(config)
    model.init_weights(3)
    wide, narrow = config.ffn_dim**-0.5, config.hidden_dim**-0.5
    forward = model.layers[0].feed_forward
    found = {"down": (forward.down, wide), "up": (forward.up, narrow), "gate": (forward.gate, narrow)}
    for name, (projection, expected) in found.items():
        std = projection.weight.std().item()
        assert abs(std - expected) < 0.05 * expected, f"{name}: {std:.4f}, not {expected:.4f}"


def check_cache_append(device: str, dtype: torch.dtype) -> None:
    import test_custom_kernels_attention as t

    t.test_cache_append_of_unequal_counts(device)
    for bits in (4, 8):
        t.test_cache_append_does_not_depend_on_the_cuts(bits, "window", device)


def check_cache_commit(device: str, dtype: torch.dtype) -> None:
    """A path that ends in -1 leaves what the shorter path leaves."""
    import test_attention_layers as t

    harness = t.Harness(t.TINY, 8)
    x = torch.randn(1, 7, 64)
    tree = t.DraftTree.from_parents([-1, 0, 0, 1, 1, 2, 2])
    stored = {}
    for name, path in (("padded", [0, 2, -1]), ("short", [0, 2])):
        cache = harness.cache()
        with torch.no_grad():
            positions = tree.depths[None]
            _, written = harness.block.nodes(x, harness.table(positions), cache, tree.mask, positions)
            harness.block.commit(written, cache, torch.tensor([path], dtype=torch.int32))
        stored[name] = cache.tensors()
    for name, tensor in stored["short"].items():
        assert torch.equal(stored["padded"][name], tensor), name


def check_node_commit(device: str, dtype: torch.dtype) -> None:
    """The same for the whole decode state of the model, the last hidden state included."""
    import test_generation_engine as t

    model = t.make_model(4)
    tree = t.DraftTree.from_parents([-1, 0, 0, 1, 1, 2, 2])
    stored = {}
    for name, path in (("padded", [0, 2, -1]), ("short", [0, 2])):
        state = model.decode_state(cache_bits=16)
        _, written = model.nodes(torch.arange(7)[None], state, tree)
        model.commit(written, state, torch.tensor([path], dtype=torch.int32))
        stored[name] = state.tensors()
    for name, tensor in stored["short"].items():
        assert torch.equal(stored["padded"][name], tensor), name


def check_drafts(device: str, dtype: torch.dtype) -> None:
    """Text and stored tensors with drafts are those without, for drafts rejected at either depth."""
    import test_generation_engine as t

    model = t.HybridLanguageModel(t.TINY, t.PrecisionConfig(precision="fp32"))
    model.init_weights(0)
    options = replace(t.GREEDY, max_new_tokens=24, cache_bits=16)
    plain, text = t._plain(model, options)
    for pattern in ((0, None), (None, 0), (1, 0)):
        engine = t.StreamingGenerationEngine(model, replace(options, drafts=True))
        drafted = t._scripted(engine, text, lambda step, pattern=pattern: pattern)
        assert t._run(drafted) == text, f"another text where {pattern} of the candidates are right"
        t._same(plain, drafted)


CHECKS = {name.removeprefix("check_"): fn for name, fn in list(globals().items()) if name.startswith("check_")}


# ---------------------------------------------------------------------------
# The child: one process per run, a fresh import of the program and of the test files per job


def _poison_empty() -> None:
    """As conftest does: memory that nothing wrote must not hold an earlier job's right answer."""

    def poisoned(make):
        def wrapper(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() and out.device.type != "meta" else out

        return wrapper

    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)


def _judge(job: dict) -> tuple[str, str]:
    """Run one check: survived, killed, or error, and by what."""
    torch.manual_seed(0)
    try:
        CHECKS[job["check"]](job["device"], getattr(torch, job["dtype"]))
    except AssertionError as error:
        source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        of_tests = source.parent == TESTS or "torch/testing" in source.as_posix()
        text = " ".join(str(error).split()) or "assert"
        return ("killed", text) if of_tests else ("error", f"assertion in {source.name}: {text}")
    except (Exception, pytest.fail.Exception) as error:
        return "error", f"{type(error).__name__}: {error}"
    return "survived", ""


def _child(manifest: str) -> None:
    jobs = json.loads(Path(manifest).read_text())
    torch.set_num_threads(1)
    _poison_empty()
    ours = {path.stem for folder in (ROOT, TESTS) for path in folder.glob("*.py")}
    sys.path.insert(0, "")
    with open(f"{manifest}.verdicts", "a") as out:
        for job in jobs:
            for name in ours & sys.modules.keys():
                del sys.modules[name]
            sys.path[0] = job["folder"]
            started = time.perf_counter()
            verdict, by = _judge(job)
            foreign = [name for name in ours & sys.modules.keys() if (ROOT / f"{name}.py").exists()
                       and Path(sys.modules[name].__file__).parent != Path(job["folder"])]  # fmt: skip
            if foreign:
                verdict, by = "error", f"{foreign} came from outside the mutant's folder"
            line = dict(name=job["name"], verdict=verdict, by=by, seconds=time.perf_counter() - started)
            out.write(json.dumps(line) + "\n")
            out.flush()
            if verdict == "error" and job["device"] == "cuda":
                return  # the context may be lost: the parent starts another process for the rest


# ---------------------------------------------------------------------------
# The parent: folders, processes, the table


class Run(NamedTuple):
    device: str
    dtype: str
    interpret: bool
    paths: tuple[str, ...]
    marks: tuple


_NO_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the kernels need Triton")
RUNS = {
    "cpu": Run("cpu", "float32", False, ("cpu", "both"), ()),
    "interpreter": Run("cpu", "float32", True, ("triton", "both"), (pytest.mark.interpret, _NO_TRITON)),
    "gpu-f32": Run("cuda", "float32", False, ("triton", "both"), (pytest.mark.gpu,)),
    "gpu-bf16": Run("cuda", "bfloat16", False, ("triton", "both"), (pytest.mark.gpu,)),
}


def mutated(entry: Mutant) -> str:
    """The mutated module; ValueError where a text does not occur as often as the table says."""
    source = (ROOT / entry.file).read_text()
    for old, new, count in entry.sites:
        found = source.count(old)
        if found != count or old == new:
            name = f"{entry.issue} ({entry.variant})"
            raise ValueError(f"{name}: {old!r} must occur {count} times in {entry.file}, got {found}")
        source = source.replace(old, new)
    return source


def slug(entry: Mutant) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{entry.issue} {entry.variant} {entry.path}".lower()).strip("-")


def cases(entries: list[Mutant]) -> list:
    out = []
    for entry in entries:
        for name, run in RUNS.items():
            if entry.path in run.paths and not (name == "gpu-bf16" and entry.issue in FLOAT32_ONLY):
                out.append(pytest.param(entry, name, id=f"{slug(entry)}-{name}", marks=run.marks))
    return out


def _folder(base: Path, entry: Mutant | None) -> Path:
    """A folder of the eleven modules, one of them mutated."""
    folder = base / (slug(entry) if entry else "unmutated")
    if not folder.exists():
        folder.mkdir()
        for path in ROOT.glob("*.py"):
            if entry is None or path.name != entry.file:
                (folder / path.name).symlink_to(path)
        if entry is not None:
            (folder / entry.file).write_text(mutated(entry))
    return folder


def _start(run: Run, jobs: list[dict], manifest: Path) -> tuple[dict[str, dict], str]:
    """One child over the jobs: the verdicts that it reached, and how it died ("" if it did not)."""
    manifest.write_text(json.dumps(jobs))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if run.interpret else {}
    command = [sys.executable, str(Path(__file__).resolve()), str(manifest)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS)
        end = f"exit {done.returncode}: {done.stderr[-2000:]}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        end = f"no end after {CHILD_SECONDS} s"
    out = Path(f"{manifest}.verdicts")
    lines = out.read_text().splitlines() if out.exists() else []
    return {found["name"]: found for found in map(json.loads, lines)}, end


def _judged(name: str, entries: list[Mutant], base: Path) -> dict[str, dict]:
    """Verdicts of one run by slug, and of the unmutated source by the check's name."""
    run = RUNS[name]
    jobs = [(check, check, None) for check in sorted({entry.check for entry in entries})]
    jobs += [(slug(entry), entry.check, entry) for entry in entries]
    rest = [
        dict(name=key, check=check, folder=str(_folder(base, entry)), device=run.device, dtype=run.dtype)
        for key, check, entry in jobs
    ]
    verdicts: dict[str, dict] = {}
    while rest:
        reached, end = _start(run, rest, base / f"{name}-{len(rest)}.json")
        verdicts |= reached
        rest = rest[len(reached) :]
        if end and rest:
            verdicts[rest.pop(0)["name"]] = dict(verdict="error", by=end, seconds=0.0)
    return verdicts


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """{run: {slug or check: verdict}} of the selected cases; the runs go side by side. Prints the table at the end."""
    base = tmp_path_factory.mktemp("mutants")
    chosen: dict[str, list[Mutant]] = {}
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path != request.path or "run" not in parameters:
            continue
        entry, run = parameters["entry"], parameters["run"]
        try:
            mutated(entry)
        except ValueError:
            continue  # the entry's own test says so
        if RUNS[run].device == "cpu" or torch.cuda.is_available():
            chosen.setdefault(run, []).append(entry)
            _folder(base, entry)
    _folder(base, None)
    with ThreadPoolExecutor() as pool:
        found = dict(zip(chosen, pool.map(lambda run: _judged(run, chosen[run], base), chosen), strict=True))
    yield found
    _print_table(request, chosen, found)


def _print_table(request: pytest.FixtureRequest, chosen: dict[str, list[Mutant]], found: dict) -> None:
    lines = [f"{'mutation':88} {'file':22} {'run':11} {'verdict':8} {'s':>5}  by"]
    for run, entries in chosen.items():
        for entry in entries:
            got = found[run][slug(entry)]
            title = f"{entry.issue}: {entry.variant} [{entry.path}]"
            lines.append(
                f"{title:88} {entry.file:22} {run:11} {got['verdict']:8} {got['seconds']:5.2f}  {got['by'][:70]}"
            )
        verdicts = [found[run][slug(entry)]["verdict"] for entry in entries if entry.issue in ISSUES]
        lines.append(f"{run}: {verdicts.count('killed')} of {len(verdicts)} mutants killed")
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    if reporter is None:  # a worker of pytest-xdist
        print("\n".join(lines))
        return
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.section("kill table", sep="-")
        for line in lines:
            reporter.write_line(line)


# ---------------------------------------------------------------------------
# Tests


def test_every_listed_mutation_has_a_mutant_on_both_paths():
    names = [slug(entry) for entry in MUTANTS]
    assert len(set(names)) == len(names)
    for issue in ISSUES:
        paths = {entry.path for entry in MUTANTS if entry.issue == issue}
        assert paths & {"cpu", "both"}, f"{issue}: no mutant on the CPU path"
        assert issue in HOST_ONLY or paths & {"triton", "both"}, f"{issue}: no mutant of the kernels"


def test_a_text_that_is_gone_is_an_error():
    gone = mutant("control", "gone", "cpu", KERNELS, "rmsnorm", ("no such text", "another"))
    with pytest.raises(ValueError, match=r"'no such text' must occur 1 times in custom_kernels\.py, got 0"):
        mutated(gone)
    several = gone._replace(sites=(("import torch\n", "import torch \n", 7),))
    with pytest.raises(ValueError, match="must occur 7 times"):
        mutated(several)


@pytest.mark.parametrize("entry, run", cases(MUTANTS))
def test_mutation_is_killed_by_an_assertion(entry: Mutant, run: str, verdicts: dict):
    mutated(entry)  # says so if the table is stale
    plain, got = verdicts[run][entry.check], verdicts[run][slug(entry)]
    assert plain["verdict"] == "survived", f"the unmutated source fails {entry.check}: {plain['by']}"
    assert got["verdict"] == "killed", f"{got['verdict']}: {entry.issue} ({entry.variant}), {entry.check}; {got['by']}"


@pytest.mark.parametrize("entry, run", cases([entry for entries in CONTROLS.values() for entry in entries]))
def test_harness_tells_survivors_and_exceptions_from_kills(entry: Mutant, run: str, verdicts: dict):
    mutated(entry)
    assert verdicts[run][entry.check]["verdict"] == "survived"
    assert entry in CONTROLS[verdicts[run][slug(entry)]["verdict"]], verdicts[run][slug(entry)]


if __name__ == "__main__":
    _child(sys.argv[1])
