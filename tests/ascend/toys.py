"""Small kernels, one for each thing that the Ascend tooling has to see."""

import triton
import triton.language as tl


@triton.jit
def scaled_rows(x, scale, y, n_rows, n_cols, factor, BLOCK: tl.constexpr):
    """y = x * scale[row] * factor: a persistent loop over rows, one tile per row, one number per row. It passes."""
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        start = row.to(tl.int64) * n_cols
        value = tl.load(x + start + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + start + cols, value * tl.load(scale + row) * factor, mask=mask)


@triton.jit
def scaled_tiles(x, scale, y, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The same with tiles of several rows; the last tile is short in both directions."""
    cols = tl.arange(0, BLOCK)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        at = (tile * ROWS).to(tl.int64) * n_cols + tl.arange(0, ROWS)[:, None] * n_cols + cols
        mask = (rows < n_rows)[:, None] & (cols < n_cols)
        factors = tl.load(scale + rows, mask=rows < n_rows, other=0.0)
        tl.store(y + at, tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * factors[:, None], mask=mask)


@triton.jit
def scaled_whole_rows(x, y, n_rows, COLS: tl.constexpr, ROWS: tl.constexpr):
    """y = 2 x in tiles of whole rows: the compiler folds each tile to one dimension."""
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        start = (tile * ROWS).to(tl.int64) * COLS
        mask = (tile * ROWS + tl.arange(0, ROWS) < n_rows)[:, None]
        tl.store(y + start + at, tl.load(x + start + at, mask=mask, other=0.0) * 2, mask=mask)


@triton.jit
def converted(x, y, BLOCK: tl.constexpr):
    """y = trunc(x), floor(x), and not (x > 0), as int32: what bishengir rewrites for the vector unit."""
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(y + at, value.to(tl.int32))
    tl.store(y + BLOCK + at, tl.floor(value).to(tl.int32))
    tl.store(y + 2 * BLOCK + at, tl.where(~(value > 0), 1, 0))


@triton.jit
def beyond_the_end(x, y, n_rows, n_cols, LOADS: tl.constexpr, BLOCK: tl.constexpr):
    """y = x by blocks of all elements, the last of them without its mask: of the load, or of the store."""
    n = n_rows * n_cols
    for start in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        if LOADS:
            tl.store(y + at, tl.load(x + at), mask=at < n)
        else:
            tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0))


@triton.jit
def before_the_start(x, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y = x in one block, as many elements too early as there are rows."""
    at = tl.arange(0, BLOCK)
    tl.store(y - n_rows + at, tl.load(x + at))


@triton.jit
def far_away(x, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y = x in one block, at an address that is nobody's."""
    at = tl.arange(0, BLOCK)
    tl.store(y + n_rows.to(tl.int64) * 1000000000000 + at, tl.load(x + at))


@triton.jit
def grid_of_three(y, X: tl.constexpr, Y: tl.constexpr):
    """Writes its program's number at its place: 32 copies of x + 10 y + 100 z."""
    x, z = tl.program_id(0), tl.program_id(2)
    place = (z * Y + tl.program_id(1)) * X + x
    tl.store(y + place * 32 + tl.arange(0, 32), tl.full((32,), 0, tl.int32) + x + 10 * tl.program_id(1) + 100 * z)


@triton.jit
def gathered_rows(x, index, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y[row] = x[row, index]: the gather by a vector of indices becomes a loop over single elements."""
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        where = tl.load(index + cols, mask=mask, other=0)
        tl.store(y + row * n_cols + cols, tl.load(x + row * n_cols + where, mask=mask, other=0.0), mask=mask)


@triton.jit
def running_sums(x, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y = cumsum(x): a loop over single elements inside the buffer, without one in HBM."""
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        value = tl.load(x + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + row * n_cols + cols, tl.cumsum(value, 0), mask=mask)


@triton.jit
def columns(x, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y = x.T by columns: each transfer fetches single elements, a row apart."""
    rows = tl.arange(0, BLOCK)
    mask = rows < n_rows
    for col in tl.range(tl.program_id(0), n_cols, tl.num_programs(0)):
        tl.store(y + col * n_rows + rows, tl.load(x + rows * n_cols + col, mask=mask, other=0.0), mask=mask)


@triton.jit
def column_sums(x, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y += x.sum(0), by atomics."""
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        value = tl.load(x + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        tl.atomic_add(y + cols, value, mask=mask)


@triton.jit
def scalar_logsumexp(x, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y = logsumexp(x, 1) with the running maximum and sum as scalars: both units wait for each other at each block."""
    cols = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        top = -float("inf")
        total = 0.0
        for start in tl.range(0, n_cols, BLOCK):
            at = start + cols
            value = tl.load(x + row * n_cols + at, mask=at < n_cols, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(value, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher), 0)
            top = higher
        tl.store(y + row, top + tl.log(total))


@triton.jit
def block_maxima(x, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y = x.max(1), each block reduced to a scalar: few switches in the text, but some for each block."""
    cols = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        top = -float("inf")
        for start in tl.range(0, n_cols, BLOCK):
            at = start + cols
            value = tl.load(x + row * n_cols + at, mask=at < n_cols, other=-float("inf")).to(tl.float32)
            highest = tl.max(value, 0)
            top = tl.where(highest > top, highest, top)
        tl.store(y + row, top)


@triton.jit
def doubled(x, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y = 2 x by blocks; `doubled_in_place` does it through one argument."""
    cols = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        for start in tl.range(0, n_cols, BLOCK):
            at = row.to(tl.int64) * n_cols + start + cols
            mask = start + cols < n_cols
            tl.store(y + at, tl.load(x + at, mask=mask, other=0.0) * 2, mask=mask)


@triton.jit
def doubled_in_place(x, n_rows, n_cols, BLOCK: tl.constexpr):
    """x = 2 x: as the compiler cannot tell the blocks apart, each load waits for the store before it."""
    cols = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        for start in tl.range(0, n_cols, BLOCK):
            at = row.to(tl.int64) * n_cols + start + cols
            mask = start + cols < n_cols
            tl.store(x + at, tl.load(x + at, mask=mask, other=0.0) * 2, mask=mask)


@triton.jit
def silu(x, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y = x sigmoid(x) by full blocks: at a large BLOCK temporaries lie where the next block is to be loaded."""
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        for start in tl.range(0, n_cols, BLOCK):
            at = row.to(tl.int64) * n_cols + start + tl.arange(0, BLOCK)
            value = tl.load(x + at).to(tl.float32)
            tl.store(y + at, (value * tl.sigmoid(value)).to(y.dtype.element_ty))


@triton.jit
def row_maxima(x, y, n_rows, n_cols, BLOCK: tl.constexpr, SELECT: tl.constexpr):
    """y = x.max(1) with a running maximum for each lane, by `tl.where` or by `tl.maximum`."""
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        top = tl.full((BLOCK,), -3.0e38, tl.float32)
        for start in tl.range(0, n_cols, BLOCK):
            value = tl.load(x + row.to(tl.int64) * n_cols + start + tl.arange(0, BLOCK)).to(tl.float32)
            if SELECT:
                top = tl.where(value > top, value, top)
            else:
                top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + row, tl.max(top, 0))


@triton.jit
def zeros(y, n_rows, n_cols, BLOCK: tl.constexpr):
    """What is stored is made once, before the loop."""
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        tl.store(y + row * n_cols + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))


@triton.jit
def refused(x, y, BLOCK: tl.constexpr):
    """Not valid Triton: the two shapes do not broadcast."""
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) + tl.arange(0, BLOCK * 2))
