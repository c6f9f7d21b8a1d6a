"""Hopper's instructions that Gluon does not offer, as inline PTX, and the names that differ between Triton's versions.

The kernels of this folder call these functions. A new function in inline PTX also needs a stand-in in the tests'
simulation (`kernels` in `tests/support/gluon_simulator.py`). The hardware has 16 named barriers: Triton takes the low
numbers, the kernels those from FIRST_BARRIER on. All functions are called by a warp group, which is 4 warps of 32
threads.

A *semaphore* is an int32 in global memory, by which the CTAs (programs) of a kernel wait for one another: dq.py says
what its value means. A *consumer* is a warp group that computes, the *producer* the one that loads for consumers.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.6 has the first name of each pair, 3.9 the second.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_memory = gl.shared_memory_descriptor
reinterpret = _memory._reinterpret if hasattr(_memory, "_reinterpret") else _memory.reinterpret
_renamed = hasattr(tma, "async_load")  # asks for a new name: the old ones may still exist, and raise errors
async_load = tma.async_load if _renamed else tma.async_copy_global_to_shared
async_store = tma.async_store if _renamed else tma.async_copy_shared_to_global
FIRST_BARRIER = triton.language.constexpr(8)  # the number of the kernels' first named barrier
WARPS = triton.language.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # layout of (128,) numbers, one for a thread


@gluon.constexpr_function
def _barrier_asm(kind, num_threads):
    """The PTX of `named_barrier`."""
    return f"bar.{kind} $1, {num_threads}; mov.b32 $0, $1;"


@gluon.constexpr_function
def _acquire_asm(first):
    """The PTX of `semaphore_wait`: warp 0 spins until the semaphore has the expected value.

    Then it arrives at the named barriers `first` and `first` + 1. 160 threads take part in each: the 128 of a consumer
    and the 32 of this warp.
    """
    return f"""{{
        .reg .pred other, late;
        mov.b32 $0, $2;
        setp.ge.s32 other, $3, 32;
        @other bra.uni given;
        again: ld.acquire.gpu.global.b32 $0, [$1];
        setp.ne.b32 late, $0, $2;
        vote.sync.any.pred late, late, 0xffffffff;
        @late bra.uni again;
        bar.arrive {first}, 160;
        bar.arrive {first + 1}, 160;
        given:
    }}"""


@gluon.constexpr_function
def _clear_asm():
    """The PTX of `clear`: each thread stores 8 times 16 bytes, and the 128 threads 2,048 bytes at a time."""
    stores = [f"st.global.v4.b32 [$1 + {2048 * i}], {{$0, $0, $0, $0}};" for i in range(8)]
    return " ".join(["mov.b32 $0, 0;", *stores])


@gluon.jit
def named_barrier(KIND: gl.constexpr, barrier, NUM_THREADS: gl.constexpr):
    """4 warps reach a barrier. With KIND "sync" they wait there for NUM_THREADS threads, with "arrive" they go on."""
    operands = [gl.full([128], barrier, gl.int32, WARPS)]
    gl.inline_asm_elementwise(_barrier_asm(KIND, NUM_THREADS), "=r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _by_all(INSTRUCTION: gl.constexpr):
    """All of 4 warps execute an instruction without operands."""
    operands = [gl.full([128], 0, gl.int32, WARPS)]
    gl.inline_asm_elementwise(
        INSTRUCTION + "; mov.b32 $0, $1;", "=r,r", operands, dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def semaphore_release(semaphore):
    """Adds 1 to the semaphore, once other CTAs can see everything that this CTA has done before.

    Only thread 96, in the last of the 4 warps, adds, and waits until earlier writes are visible. The other warps go on.
    """
    ASM: gl.constexpr = """{
        .reg .pred mine;
        setp.eq.s32 mine, $2, 96;
        @mine red.release.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, $2;
    }"""
    places = (semaphore + gl.full([128], 0, gl.int32, WARPS)).to(gl.int64)
    thread = gl.arange(0, 128, layout=WARPS)
    gl.inline_asm_elementwise(ASM, "=r,l,r", [places, thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def semaphore_wait(semaphore, expected, FIRST: gl.constexpr):
    """Waits until the semaphore has the expected value, then lets consumers pass named barriers FIRST and FIRST + 1.

    The consumers then see everything that was done before the releases. Only the first of the 4 warps waits.
    """
    places = (semaphore + gl.full([128], 0, gl.int32, WARPS)).to(gl.int64)
    wanted = gl.full([128], expected, gl.int32, WARPS)
    operands = [places, wanted, gl.arange(0, 128, layout=WARPS)]
    gl.inline_asm_elementwise(_acquire_asm(FIRST), "=&r,l,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def semaphore_acquire(semaphore, expected, FIRST: gl.constexpr):
    """`semaphore_wait` for the deterministic mode, in which this CTA releases the semaphore next.

    It is a function of its own because the tests' simulation checks that a CTA adds only to tiles that it has acquired.
    """
    semaphore_wait(semaphore, expected, FIRST)


@gluon.jit
def await_acquired(barrier):
    """Waits, with all 4 warps of a consumer, until a warp of the producer has acquired the semaphore for them."""
    named_barrier("sync", barrier, 160)


@gluon.jit
def gdc_wait():
    """Waits until the kernel before this one in its stream has ended.

    A kernel that is launched with Triton's option `launch_pdl` (programmatic dependent launch) may begin earlier.
    """
    _by_all("griddepcontrol.wait")


@gluon.jit
def gdc_launch_dependents():
    """Lets the kernel after this one in its stream begin, once all CTAs have reached this call."""
    _by_all("griddepcontrol.launch_dependents")


@gluon.jit
def add_registers(ptr, x):
    """Adds x (64, 64) float32, a matmul's result, to 4096 numbers at `ptr`, in the order of the matmul's registers.

    Four numbers that a thread holds are adjacent in memory, so each instruction of a warp adds to 512 contiguous bytes.
    Only `semaphore_acquire` gives the additions of CTAs an order.
    """
    _put_registers("red.global.add.v4.f32", ptr, x)


@gluon.jit
def store_registers(ptr, x):
    """Stores x (64, 64) float32 at `ptr` in the order in which `add_registers` adds it."""
    _put_registers("st.global.v4.f32", ptr, x)


@gluon.jit
def _put_registers(INSTRUCTION: gl.constexpr, ptr, x):
    """Executes INSTRUCTION for the numbers of x (64, 64), four at a time, in the order that `add_registers` names."""
    # Rows are (4 warps, 2 halves, 8 rows), columns (8 groups, 4 threads, 2 numbers). A thread of a warp holds the four
    # numbers of both halves in a group, which become adjacent.
    x = x.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([1024, 2, 2])
    left, right = gl.split(x)
    a, c = gl.split(left)
    b, d = gl.split(right)
    places = (ptr + 4 * gl.arange(0, 1024, layout=a.type.layout)).to(gl.int64)
    ASM: gl.constexpr = INSTRUCTION + " [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(ASM, "=r,l,f,f,f,f", [places, a, b, c, d], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def clear(ptr):
    """Writes 4096 float32 zeros at `ptr`, with all 4 warps."""
    places = (ptr + 4 * gl.arange(0, 128, layout=WARPS)).to(gl.int64)
    gl.inline_asm_elementwise(_clear_asm(), "=&r,l", [places], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_rows(desc, batch, head, row, barrier, tile):
    """Starts the copy of rows [row, row + n) of a (B, H, S, D) tensor into tile (n, D); rows past the end are zero."""
    wide = reinterpret(tile, desc.dtype, [1, 1, tile.shape[0], tile.shape[1]], desc.layout)
    async_load(desc, [batch, head, row, 0], barrier, wide)


@gluon.jit
def store_rows(desc, batch, head, row, tile):
    """Starts the copy of tile (n, D) to rows [row, row + n) of a (B, H, S, D) tensor; rows past the end are dropped."""
    wide = reinterpret(tile, desc.dtype, [1, 1, tile.shape[0], tile.shape[1]], desc.layout)
    async_store(desc, [batch, head, row, 0], wide)


@gluon.jit
def narrow(x, DTYPE: gl.constexpr):
    """x.to(DTYPE) for float32 x. It is PTX, since LLVM would move the conversion to where it costs more registers."""
    if gl.bfloat16 == DTYPE:
        ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(ASM, "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        ASM: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(ASM, "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def widen(x, DTYPE: gl.constexpr):
    """x.to(float32) for x of DTYPE: the inverse of `narrow`."""
    if gl.bfloat16 == DTYPE:
        ASM: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        ASM: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.constexpr_function
def _exp2_asm():
    """The PTX of `exp2_of_eight`."""
    one_by_fmas = """{
        .reg .f32 x, m, t, p;
        .reg .b32 exponent, bits;
        max.NaN.f32 x, $15, 0fC2FE0000;  // -127
        add.rn.f32 m, x, 0f4B400000;  // 1.5 * 2^23: rounds x to a whole number, which stands in the low bits
        sub.rn.f32 t, m, 0f4B400000;
        sub.rn.f32 t, x, t;
        fma.rn.f32 p, t, 0f3D5F9CB9, 0f3E7807F4;  // 0.054593, 0.242218
        fma.rn.f32 p, p, t, 0f3F31809B;  // 0.693369
        fma.rn.f32 p, p, t, 0f3F800000;
        mov.b32 exponent, m;
        shl.b32 exponent, exponent, 23;
        mov.b32 bits, p;
        add.s32 exponent, exponent, bits;
        mov.b32 $7, exponent;
    }"""
    others = [f"ex2.approx.ftz.f32 ${i}, ${8 + i};" for i in range(7)]
    return " ".join([*others, *[line.partition("//")[0] for line in one_by_fmas.splitlines()]])


@gluon.jit
def exp2_of_eight(x):
    """2 ** x for float32 x that are not much above 0. Of each eight consecutive numbers of a thread, FMAs compute one.

    The hardware's unit for exponentials computes the other seven. It has an eighth of the throughput of FMAs, so the
    two share the work. The method of the FMAs is Cody and Waite's: a power of two by the exponent's bits, times a cubic
    on [-1/2, 1/2] whose relative error is 1.2e-4. The result is 0 for x <= -127.
    """
    constraints: gl.constexpr = "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f"
    return gl.inline_asm_elementwise(_exp2_asm(), constraints, [x], dtype=gl.float32, is_pure=True, pack=8)


@gluon.jit
def scale_rows(x, factor):
    """x (M, N) times factor (M,), without moving data: a thread with numbers of a row already has that row's factor."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def owned_tile(index, num_tiles, num_heads, at_once):
    """(head, tile) of work item `index`, of `num_heads` heads with `num_tiles` tiles each.

    Items take `at_once` heads at a time, whose data share the L2 cache: tile 0 of each, then tile 1 of each, ...
    """
    first_head = index // (at_once * num_tiles) * at_once
    heads = gl.minimum(at_once, num_heads - first_head)
    within = index - first_head * num_tiles
    return first_head + within % heads, within // heads


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT memory barriers (mbarrier), each of which completes a phase after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made
