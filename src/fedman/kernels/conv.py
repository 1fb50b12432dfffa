"""Stacked convolution on the tensor cores as implicit GEMM: forward, input gradient, weight gradient.

All tensors are channels last with a client dimension in front; client s uses its own weights. The reduction runs
over the taps of the kernel, so no im2col matrix is written. Weights are held as [S, O, k·k·C] (`pack`), in the
order (tap, channel): the channels of one tap are then contiguous, as they are in the images.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedman.kernels.stage import STORAGE, Launch, Stage
from fedman.kernels.tiles import dot


@triton.jit
def _pack(
    w, out, P,
    C: tl.constexpr, CP: tl.constexpr, O: tl.constexpr, KS: tl.constexpr, PAIR: tl.constexpr,  # noqa: E741
    KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    RUN: tl.constexpr = KS + PAIR - 1
    o, right, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    w += s * P
    k = tl.arange(0, BLOCK)
    c, kh, kw = k % CP, k // (CP * RUN), k // CP % RUN - right
    inside = (kh < KS) & (kw >= 0) & (kw < KS)
    v = tl.load(w + o * (C * KS * KS) + (c * KS + kh) * KS + kw, mask=inside & (c < C), other=0.0)
    if CP > C:
        v = tl.where((c == CP - 1) & (kh == KS // 2) & (kw == KS // 2), tl.load(w + O * C * KS * KS + o), v)
    tl.store(out + ((s * PAIR + right) * O + o) * KP + k, v, mask=k < KP)


def _channels(stage: Stage) -> tuple[int, int, int, int, int]:
    """Channels of the conv, as stored and of its output; kernel size; outputs that share a patch."""
    return stage.image or stage.channels, stage.channels, stage.out, stage.kernel, 2 if stage.image else 1


def pack(w: Tensor, stage: Stage, precision: str) -> Tensor:
    """Rows of parameters (conv weight [O, C, k, k], then bias) as [S, O, K] in the operands' type.

    The first stage gets [S, 2, O, K] for the left and the right of a pair of outputs that share a patch of k × (k + 1)
    pixels, with the bias as the weight of the last channel at the central tap, K padded to a power of two.
    """
    *_, pair = shape = _channels(stage)
    out = w.new_empty(len(w), pair, stage.out, stage.depth, dtype=STORAGE[precision])
    block = triton.next_power_of_2(stage.depth)
    _pack[(stage.out, pair, len(w))](w, out, w.stride(0), *shape, stage.depth, BLOCK=block)
    return out if pair == 2 else out[:, 0]


@triton.jit(do_not_specialize=["PARTS"])  # avoids recompilation for some numbers of clients
def _unpack(
    part, out, P, PARTS,
    C: tl.constexpr, CP: tl.constexpr, O: tl.constexpr, KS: tl.constexpr, PAIR: tl.constexpr,  # noqa: E741
    KP: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    o, s = tl.program_id(0), tl.program_id(2).to(tl.int64)
    tap = tl.arange(0, TAPS)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    k = (tap // KS * (KS + PAIR - 1) + tap % KS)[:, None] * CP + c[None, :]
    part += s * PARTS * (O * KP) + o * KP
    total = tl.zeros((TAPS, BC), tl.float32)
    for start in range(0, PARTS, ROWS):
        p = start + tl.arange(0, ROWS)
        at = (p * (O * KP) + p % PAIR * CP)[:, None, None] + k[None, :, :]  # the right of a pair: one pixel later
        mask = (p < PARTS)[:, None, None] & (tap < KS * KS)[None, :, None]
        total += tl.sum(tl.load(part + at, mask=mask, other=0.0), 0)
    to, mask = c[:, None] * (KS * KS) + tap[None, :], (tap < KS * KS)[None, :]
    to += o * (C * KS * KS)
    if CP > C:
        mask = mask & ((c < C)[:, None] | ((c == CP - 1)[:, None] & (tap == KS // 2 * (KS + 1))[None, :]))
        to = tl.where((c == CP - 1)[:, None], O * C * KS * KS + o, to)
    tl.store(out + s * P + to, tl.trans(total), mask=mask)


def unpack(part: Tensor, out: Tensor, stage: Stage) -> None:
    """Sum of partial gradients [S, parts, O, K] into `out`, rows of gradients laid out like the parameters.

    In the first stage, partial gradients of the left and the right of a pair alternate. In the others the number of
    channels is a multiple of 16.
    """
    clients, parts, _, size = part.shape
    taps = triton.next_power_of_2(stage.kernel**2)
    block = stage.channels if stage.image else _block(stage.channels, 64)
    rows = min(triton.next_power_of_2(parts), max(1, 4096 // (taps * block)))
    _unpack[(stage.out, stage.channels // block, clients)](
        part, out, out.stride(0), parts, *_channels(stage), size, ROWS=rows, TAPS=taps, BC=block,
    )  # fmt: skip


@triton.jit
def _conv(
    x, w, bias, out, B, P,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr,  # noqa: E741
    KS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BO channels by a tile of pixels, of one client.

    With ROWS a tile keeps to one map row (of several samples), so that taps above and below the image are not
    computed: for the input gradient of an unpadded 5×5 conv (PAD is then 4) that saves 29 % of the work. Channels are
    the rows of the product and pixels its columns: one instruction takes 64 rows and up to 256 columns, and the more
    columns it takes, the fewer times operands are read again.

    The input gradient of a conv with a stride (TRANSPOSED) has pixels of STRIDE² kinds: a pixel meets every
    STRIDE-th tap, which ones depends on its row and column modulo STRIDE. A tile has pixels of one kind.
    """
    KINDS: tl.constexpr = STRIDE if TRANSPOSED else 1
    STEP: tl.constexpr = 1 if TRANSPOSED else STRIDE
    STEPS: tl.constexpr = (C + BC - 1) // BC
    KH: tl.constexpr = (OH + KINDS - 1) // KINDS
    KW: tl.constexpr = (OW + KINDS - 1) // KINDS
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    s = tl.program_id(2).to(tl.int64)
    x += s * B * (H * W * C)
    w += s * (C * O * KS * KS)
    if ROWS:
        TILES = tl.cdiv(B * OW, BM)
        n = tl.program_id(0) % TILES * BM + tl.arange(0, BM)
        row = tl.program_id(0) // TILES
        b, column, ok = n // OW, n % OW, n < B * OW
        first, last, across = tl.maximum(PAD - row, 0), tl.minimum(H + PAD - row, KS), KS
    else:
        TILES = tl.cdiv(B * KH * KW, BM)
        n = tl.program_id(0) % TILES * BM + tl.arange(0, BM)
        b, row, column, ok = n // (KH * KW), n // KW % KH, n % KW, n < B * KH * KW
        first, last, across = 0, KS, KS
    top, left = row * STEP - PAD, column * STEP - PAD
    tap_row, tap_column = 0, 0
    if KINDS > 1:
        kind = tl.program_id(0) // TILES
        tap_row, tap_column = (PAD + KINDS - kind // KINDS) % KINDS, (PAD + KINDS - kind % KINDS) % KINDS
        top = row + (kind // KINDS + tap_row - PAD + PAD * KINDS) // KINDS - PAD  # an exact division of a number ≥ 0
        left = column + (kind % KINDS + tap_column - PAD + PAD * KINDS) // KINDS - PAD
        last, across = (KS - tap_row + KINDS - 1) // KINDS, (KS - tap_column + KINDS - 1) // KINDS
        row, column = row * KINDS + kind // KINDS, column * KINDS + kind % KINDS
        ok = ok & (row < OH) & (column < OW)
    start = ((b * H + top) * W + left) * C
    acc = tl.zeros((BO, BM), tl.float32)
    for step in range(first * across * STEPS, last * across * STEPS):
        tap = step // STEPS
        c = step % STEPS * BC + tl.arange(0, BC)
        kh, kw = tap // across, tap % across
        mask = ok
        if PAD > 0 or KINDS > 1:
            mask = ok & (left + kw >= 0) & (left + kw < W)
        if (PAD > 0 or KINDS > 1) and not ROWS:
            mask = mask & (top + kh >= 0) & (top + kh < H)
        mask = mask[:, None]
        if C % BC != 0:
            mask = mask & (c < C)[None, :]
        a = tl.load(x + (start + (kh * W + kw) * C)[:, None] + c[None, :], mask=mask, other=0.0)
        if KINDS > 1:
            tap = (tap_row + kh * KINDS) * KS + tap_column + kw * KINDS
        if TRANSPOSED:
            at = c[:, None] * (O * KS * KS) + (KS * KS - 1 - tap) * O + o[None, :]
        else:
            at = o[:, None] * (C * KS * KS) + tap * C + c[None, :]
        if C % BC != 0 or O % BO != 0:
            if TRANSPOSED:
                weight = tl.load(w + at, mask=(c < C)[:, None] & (o < O)[None, :], other=0.0)
            else:
                weight = tl.load(w + at, mask=(o < O)[:, None] & (c < C)[None, :], other=0.0)
        else:
            weight = tl.load(w + at)
        if TRANSPOSED:
            weight = tl.trans(weight)
        acc = dot(weight, tl.trans(a), acc, PRECISION)
    if BIAS:
        acc += tl.load(bias + s * P + o, mask=o < O, other=0.0)[:, None]
    at = (s * B + b[:, None]) * (OH * OW * O) + (row * OW + column)[:, None] * O + o[None, :]
    mask = ok[:, None]
    if O % BO != 0:
        mask = mask & (o < O)[None, :]
    tl.store(out + at, tl.trans(acc), mask=mask)


def _block(size: int, most: int) -> int:
    """A tile of channels: a power of two from 16 to `most`, without a remainder where there is such a one."""
    return next((n for n in (128, 64, 32, 16) if n <= most and size % n == 0), min(most, _power_of_2(size)))


def _power_of_2(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _conv_options(channels: int, out: int, pixels: int, precision: str) -> Launch:
    """Tiles chosen on an H200 for the layers of a ResNet-18 and of the paper's CNN."""
    block = _block(channels, 64 if precision == "bf16" else 32)
    if precision != "bf16":
        return {"BM": 128, "BC": block, "BO": _block(out, 64), "num_warps": 8, "num_stages": 3}
    if out % 128:
        return {"BM": 128, "BC": block, "BO": _block(out, 64), "num_warps": 4, "num_stages": 3}
    if pixels <= 1024:
        return {"BM": 64, "BC": block, "BO": 128, "num_warps": 4, "num_stages": 4}
    return {"BM": 256 if channels >= 256 else 128, "BC": block, "BO": 128, "num_warps": 8, "num_stages": 3}


def _convolve(
    stage: Stage,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    shape: tuple[int, int, int],
    transposed: bool,
    precision: str,
) -> Tensor:
    """An output of `shape` for every sample."""
    clients, batch, height, width, channels = x.shape
    oh, ow, o = shape
    out = x.new_empty(clients, batch, *shape)
    padding = stage.kernel - 1 - stage.padding if transposed else stage.padding
    kinds = stage.stride if transposed else 1
    pixels = batch * -(-oh // kinds) * -(-ow // kinds)  # of one kind
    options = _conv_options(channels, o, pixels, precision)
    rows = padding > 1 and stage.stride == 1
    tiles = oh * triton.cdiv(batch * ow, options["BM"]) if rows else kinds**2 * triton.cdiv(pixels, options["BM"])
    _conv[(tiles, triton.cdiv(o, options["BO"]), clients)](
        x, w, x if bias is None else bias, out, batch, 0 if bias is None else bias.stride(0), height, width, channels,
        oh, ow, o, stage.kernel, stage.stride, padding, transposed, bias is not None, rows, PRECISION=precision,
        **options,
    )  # fmt: skip
    return out


def forward(stage: Stage, x: Tensor, w: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """The map z [S, B, OH, OW, O] of images x [S, B, H, W, C], packed weights w and bias (rows [S, O])."""
    return _convolve(stage, x, w, bias, (*stage.map, stage.out), False, precision)


def input_gradient(stage: Stage, dz: Tensor, w: Tensor, precision: str) -> Tensor:
    """dF/dx [S, B, H, W, C] from dF/dz: the convolution with the kernel flipped and transposed."""
    return _convolve(stage, dz, w, None, (stage.height, stage.width, stage.channels), True, precision)


@triton.jit(do_not_specialize=["STEPS"])  # avoids recompilation for some numbers of clients
def _weight_gradient(
    x, dz, part, B, STEPS,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, KS: tl.constexpr, PAD: tl.constexpr,  # noqa: E741
    STRIDE: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row of taps of BO output by BC input channels, summed over a fixed range of pairs of pixels.

    Both pixels of a pair use the same k + 1 columns of inputs: the left one at taps 0..k−1, the right one column later.
    With a stride a pair is a single pixel.
    """
    PAIR: tl.constexpr = 2 if STRIDE == 1 else 1
    PAIRS: tl.constexpr = (OW + PAIR - 1) // PAIR
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    WHOLE: tl.constexpr = C % BC == 0 and O % BO == 0
    kh, block = tl.program_id(0) % KS, tl.program_id(0) // KS
    c = block % BLOCKS * BC + tl.arange(0, BC)
    o = block // BLOCKS * BO + tl.arange(0, BO)
    split, s = tl.program_id(1), tl.program_id(2).to(tl.int64)
    x += s * B * (H * W * C)
    dz += s * B * (OH * OW * O)
    taps = (tl.zeros((BO, BC), tl.float32),) * KS
    for step in range(split * STEPS, (split + 1) * STEPS):
        n = step * BK + tl.arange(0, BK)
        line, ow = n // PAIRS, n % PAIRS * PAIR
        b, row = line // OH, line % OH * STRIDE + kh - PAD
        ok = line < B * OH
        at = (line * OW + ow)[:, None] * O + o[None, :]
        mask = ok[:, None]
        if not WHOLE:
            mask = mask & (o < O)[None, :]
        left = tl.trans(tl.load(dz + at, mask=mask, other=0.0))
        if PAIR == 2:
            right = tl.trans(tl.load(dz + at + O, mask=mask & (ow + 1 < OW)[:, None], other=0.0))
        if PAD > 0:
            ok = ok & (row >= 0) & (row < H)
        start = ((b * H + row) * W + ow * STRIDE - PAD) * C
        for column in tl.static_range(KS + PAIR - 1):
            mask = ok
            if PAD > 0 or OW % PAIR == 1:
                mask = ok & (ow * STRIDE + column >= PAD) & (ow * STRIDE + column < W + PAD)
            mask = mask[:, None]
            if not WHOLE:
                mask = mask & (c < C)[None, :]
            a = tl.load(x + (start + column * C)[:, None] + c[None, :], mask=mask, other=0.0)
            if column < KS:
                taps = taps[:column] + (dot(left, a, taps[column], PRECISION),) + taps[column + 1 :]  # noqa: RUF005
            if PAIR == 2 and column > 0:
                taps = taps[: column - 1] + (dot(right, a, taps[column - 1], PRECISION),) + taps[column:]  # noqa: RUF005
    part += (s * tl.num_programs(1) + split) * (O * KS * KS * C)
    at = o[:, None] * (KS * KS * C) + kh * (KS * C) + c[None, :]
    for kw in tl.static_range(KS):
        if WHOLE:
            tl.store(part + at + kw * C, taps[kw])
        else:
            tl.store(part + at + kw * C, taps[kw], mask=(o < O)[:, None] & (c < C)[None, :])


def _weight_options(stage: Stage, clients: int, pairs: int, precision: str) -> Launch:
    """As many ranges of pairs as fill an H200, with two (of many taps or channels) or three programs per
    multiprocessor, so that the last wave is nearly full."""
    depth, width, stages = (32, 64, 3) if precision == "bf16" else (16, 32, 2)  # operands twice as large as in bf16
    wide = precision == "bf16" and stage.kernel <= 3 and stage.out % 128 == 0
    options = {"BK": depth, "BC": _block(stage.channels, width), "BO": 128 if wide else _block(stage.out, 64)}
    blocks = clients * stage.kernel * -(-stage.channels // options["BC"]) * -(-stage.out // options["BO"])
    room = 132 * (3 if stage.kernel <= 3 and not wide else 2)
    possible = range(1, max(1, min(16, pairs // depth)) + 1)
    splits = min(possible, key=lambda n: triton.cdiv(blocks * n, room) / n * (1 + 0.02 * n))
    return options | {"SPLITS": splits, "num_warps": 8 if wide else 4, "num_stages": stages}


def _pairs(stage: Stage, batch: int) -> int:
    height, width = stage.map
    return batch * height * (-(-width // 2) if stage.stride == 1 else width)


def weight_parts(stage: Stage, clients: int, batch: int, precision: str) -> int:
    """The number of partial sums of `weight_gradient`."""
    parts: int = _weight_options(stage, clients, _pairs(stage, batch), precision)["SPLITS"]
    return parts


def weight_gradient(stage: Stage, x: Tensor, dz: Tensor, precision: str) -> Tensor:
    """Partial sums [S, splits, O, k·k·C] of the weight gradient, each over a range of pixels."""
    clients, batch = dz.shape[:2]
    pairs = _pairs(stage, batch)
    options = _weight_options(stage, clients, pairs, precision)
    splits = options.pop("SPLITS")
    steps = triton.cdiv(triton.cdiv(pairs, options["BK"]), splits)
    part = torch.empty(clients, splits, stage.out, stage.depth, device=x.device)
    blocks = triton.cdiv(stage.channels, options["BC"]) * triton.cdiv(stage.out, options["BO"])
    grid = (stage.kernel * blocks, splits, clients)
    _weight_gradient[grid](
        x, dz, part, batch, steps, **stage.constants(_weight_gradient), PRECISION=precision, **options
    )
    return part
