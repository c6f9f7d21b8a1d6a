// What flash_cuda.cu is made of: the PTX instructions, tiles in shared memory, and products of tiles by one warp.
//
// T is the dtype and D the head dimension. Both are fixed when compiling (-DELEMENT, -DHEAD_DIM), and so is whether there
// is a window (-DWINDOWED). A warp owns BLOCKS blocks of 16 rows. Results live in registers in the layout of mma.sync
// (PTX ISA, mma.m16n8k16). In a block of 16 x 8, thread 4 g + t of a warp holds four numbers: [0] and [1] are columns 2 t
// and 2 t + 1 of row g, [2] and [3] the same columns of row g + 8. Two such blocks side by side, rounded and packed, are
// the left operand of the next product: P and dS stay in registers.

#ifndef LMSYS_FLASH_CUDA_CUH
#define LMSYS_FLASH_CUDA_CUH

#include <cstdint>

// Turing (sm_75) has neither cp.async nor mma.m16n8k16, and no bfloat16. Its `start_copy` and `mma` are made of other
// instructions. They stand outside of the block LMSYS_INSTRUCTIONS, which the tests' emulator replaces by its own.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define LMSYS_TURING 1
#else
#define LMSYS_TURING 0
#endif

#ifndef LMSYS_INSTRUCTIONS // defined by the tests' emulator, which has functions of the same names
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ inline uint32_t shared_address(const void* x) { return uint32_t(__cvta_generic_to_shared(x)); }

#if !LMSYS_TURING
// Starts a copy of 16 (or 8) bytes to shared memory, or of zeros if not `inside`. The bytes are there after
// wait_for_copies().
__device__ inline void start_copy(void* to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(inside ? 16 : 0));
}
__device__ inline void start_copy_8(void* to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(inside ? 8 : 0));
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// c (16 x 8) += a (16 x 16) b (16 x 8). The first argument names the dtype of a and b.
__device__ inline void mma(__nv_bfloat16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma(__half, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
// c (16 x 8) += a (16 x 8) b (8 x 8)
__device__ inline void mma_k8(__half, float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}
#endif

// Loads four 8 x 8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)));
}
__device__ inline void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)));
}

// pack rounds two numbers to the 16-bit dtype of the first argument, side by side; unpack is the reverse.
__device__ inline uint32_t pack(__nv_bfloat16, float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ inline uint32_t pack(__half, float low, float high) {
    const __half2 packed = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&packed);
}
__device__ inline float2 unpack(__nv_bfloat16, uint32_t x) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
__device__ inline float2 unpack(__half, uint32_t x) { return __half22float2(*reinterpret_cast<const __half2*>(&x)); }

__device__ inline float exp2_fast(float x) { // one instruction
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

#if LMSYS_TURING
template <class Bytes>
__device__ inline void copy_now(void* to, const void* from, bool inside) {
    *static_cast<Bytes*>(to) = inside ? *static_cast<const Bytes*>(from) : Bytes{};
}
__device__ inline void start_copy(void* to, const void* from, bool inside) { copy_now<uint4>(to, from, inside); }
__device__ inline void start_copy_8(void* to, const void* from, bool inside) { copy_now<float2>(to, from, inside); }
__device__ inline void wait_for_copies() {}

// Columns 0 to 7 of a times rows 0 to 7 of b, then columns 8 to 15 times rows 8 to 15.
template <class Half>
__device__ inline void mma(Half, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_k8(Half(), c, a[0], a[1], b0);
    mma_k8(Half(), c, a[2], a[3], b1);
}
#endif

uint32_t pack(float, float, float); // float32 is never packed: declared only for branches that it discards
float2 unpack(float, uint32_t);

using T = ELEMENT;
constexpr int D = HEAD_DIM;
constexpr bool FLOAT32 = sizeof(T) == 4;
constexpr int PER_CHUNK = 16 / sizeof(T);  // elements of a chunk: 16 bytes, the unit of every move
constexpr int CHUNKS = D / PER_CHUNK;      // of a row of D elements
constexpr float INF = __builtin_inff();

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int warp() { return threadIdx.x / 32; }
__device__ inline int g() { return lane() / 4; }
__device__ inline int t() { return lane() % 4; }

// Max or sum over the four threads that share a row.
__device__ inline float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A tile is rows of D elements, whose chunks are permuted: eight rows at one column, which a matrix load or a quarter
// of a warp asks for at once, then lie in eight different groups of banks.
constexpr int PERMUTED = CHUNKS < 8 ? CHUNKS : 8; // chunks that change places among themselves
__device__ inline int permutation(int row) { return CHUNKS < 8 ? row / 2 % PERMUTED : row % 8; }

// A chunk of a tile. `at` finds the chunk that is `rows` (a multiple of 8) further down, in column
// `column` ^ `columns`. If these are constants, it costs one exclusive or, which the compiler makes once for all tiles.
struct Chunk {
    const T* row;
    int column;
    __device__ Chunk(const T* tile, int row, int column) : row(tile + row * D), column(column ^ permutation(row)) {}
    __device__ T* at(int rows, int columns) const {
        const int permuted = (column ^ columns % PERMUTED) + columns / PERMUTED * PERMUTED;
        return const_cast<T*>(row) + permuted * PER_CHUNK + rows * D;
    }
};
__device__ inline T* chunk_at(const T* tile, int row, int column) {
    return Chunk(tile, row, column % PERMUTED).at(0, column / PERMUTED * PERMUTED);
}

// One head of a tensor in memory: rows (S, D), `row_stride` elements apart.
struct Head {
    T* data;
    int row_stride;
    __device__ T* at(int row, int chunk) const { return data + int64_t(row) * row_stride + chunk * PER_CHUNK; }
};

// Starts the copy of rows [row, row + ROWS) of `head` to `tile`; rows from `length` on become zeros.
template <int ROWS, int THREADS>
__device__ inline void load_tile(T* tile, const Head& head, int row, int length) {
    constexpr int AT_ONCE = THREADS / CHUNKS; // rows
    const int first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const T* from = head.at(row + first, chunk);
#pragma unroll
    for (int next = 0; next < ROWS; next += AT_ONCE, from += int64_t(AT_ONCE) * head.row_stride)
        if (ROWS % AT_ONCE == 0 || first + next < ROWS)
            start_copy(chunk_at(tile, first + next, chunk), from, row + first + next < length);
}

// The rows of a left operand that this warp owns, BLOCKS blocks of 16: read from their tile at every use, or KEPT in
// registers.
template <int BLOCKS, bool KEPT>
struct Rows {
    const T* tile;
    Chunk lanes;
    uint32_t kept[KEPT ? BLOCKS : 1][KEPT ? D / 16 : 1][4];

    __device__ explicit Rows(const T* all) 
        : tile(all + warp() * BLOCKS * 16 * D), lanes(tile, lane() % 16, lane() / 16) {}

    __device__ void keep() {
        if constexpr (KEPT)
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                for (int step = 0; step < D / 16; ++step) load(kept[block][step], block, step);
    }
    __device__ void load(uint32_t (&to)[4], int block, int step) const {
        load_matrices(to, lanes.at(block * 16, 2 * step));
    }
    __device__ void fragment(uint32_t (&to)[4], int block, int step) const {
        if constexpr (KEPT)
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = kept[block][step][i];
        else
            load(to, block, step);
    }
};

// out (rows x 8 COLUMNS) = a bᵀ: `b` is a tile whose rows are the columns of the result.
template <int BLOCKS, int COLUMNS, bool KEPT>
__device__ inline void dot_rows(float (&out)[BLOCKS][COLUMNS][4], const Rows<BLOCKS, KEPT>& a, const T* b) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[block][column][i] = 0;
    if constexpr (FLOAT32) {
#pragma unroll 2
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i) {
                const float4 x = *reinterpret_cast<const float4*>(chunk_at(a.tile, 8 * i + g(), chunk));
#pragma unroll
                for (int j = 0; j < 2 * COLUMNS; ++j) {
                    const float4 y = *reinterpret_cast<const float4*>(chunk_at(b, j / 2 * 8 + 2 * t() + j % 2, chunk));
                    // Four products are summed apart: D roundings one after another lose what logits of 100 need.
                    out[i / 2][j / 2][i % 2 * 2 + j % 2] += fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, x.x * y.x)));
                }
            }
    } else {
        const Chunk lanes(b, lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            uint32_t x[BLOCKS][4];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) a.fragment(x[block], block, step);
#pragma unroll
            for (int column = 0; column < COLUMNS; column += 2) {
                uint32_t y[4]; // two blocks of 8 columns
                load_matrices(y, lanes.at(column * 8, 2 * step));
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    mma(T(), out[block][column], x[block], y[0], y[1]);
                    mma(T(), out[block][column + 1], x[block], y[2], y[3]);
                }
            }
        }
    }
}

// acc (rows x D) += p b: `p` (rows x 8 COLUMNS) in registers, `b` a tile with a row for each column of p.
template <int BLOCKS, int COLUMNS>
__device__ inline void add_dot(float (&acc)[BLOCKS][D / 8][4], const float (&p)[BLOCKS][COLUMNS][4], const T* b) {
    if constexpr (FLOAT32) {
        // Each tile is summed apart: tens of thousands of roundings one after another would be too many.
#pragma unroll
        for (int first = 0; first < D / 8; first += 4) {
            float sum[BLOCKS][4][4] = {};
            if (LMSYS_TURING) __syncwarp(); // else ptxas loads so far ahead for sm_75 that registers spill
#pragma unroll
            for (int k = 0; k < 8 * COLUMNS; ++k) {
                float2 y[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    y[i] = *reinterpret_cast<const float2*>(chunk_at(b, k, 2 * (first + i) + t() / 2) + t() % 2 * 2);
#pragma unroll
                for (int j = 0; j < 2 * BLOCKS; ++j) {
                    const float x = __shfl_sync(0xffffffffu, p[j / 2][k / 8][j % 2 * 2 + k % 2], g() * 4 + k % 8 / 2);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        sum[j / 2][i][j % 2 * 2] = fmaf(x, y[i].x, sum[j / 2][i][j % 2 * 2]);
                        sum[j / 2][i][j % 2 * 2 + 1] = fmaf(x, y[i].y, sum[j / 2][i][j % 2 * 2 + 1]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 16 * BLOCKS; ++i)
                acc[i / 16][first + i / 4 % 4][i % 4] += sum[i / 16][i / 4 % 4][i % 4];
        }
    } else {
        const Chunk lanes(b, lane() % 16, lane() / 16);
#pragma unroll
        for (int step = 0; step < COLUMNS / 2; ++step) {
            uint32_t x[BLOCKS][4];
#pragma unroll
            for (int i = 0; i < 4 * BLOCKS; ++i) {
                const float(&pair)[4] = p[i / 4][2 * step + i % 4 / 2];
                x[i / 4][i % 4] = pack(T(), pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
#pragma unroll
            for (int column = 0; column < D / 8; column += 2) {
                uint32_t y[4]; // two blocks of 8 columns
                load_matrices_transposed(y, lanes.at(step * 16, column));
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    mma(T(), acc[block][column], x[block], y[0], y[1]);
                    mma(T(), acc[block][column + 1], x[block], y[2], y[3]);
                }
            }
        }
    }
}

// Stores this warp's rows of a result to memory, by way of its own part of a tile, so that every store is of 16 bytes.
template <int BLOCKS>
__device__ inline void store_rows(T* tile, const float (&acc)[BLOCKS][D / 8][4], const Head& head, int row,
                                  int length) {
    tile += warp() * BLOCKS * 16 * D;
    row += warp() * BLOCKS * 16;
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i)
#pragma unroll
        for (int column = 0; column < D / 8; ++column) {
            const float low = acc[i / 2][column][i % 2 * 2], high = acc[i / 2][column][i % 2 * 2 + 1];
            T* const at = chunk_at(tile, 8 * i + g(), (8 * column + 2 * t()) / PER_CHUNK) + 2 * t() % PER_CHUNK;
            if constexpr (FLOAT32)
                *reinterpret_cast<float2*>(at) = {low, high};
            else
                *reinterpret_cast<uint32_t*>(at) = pack(T(), low, high);
        }
    __syncwarp();
    for (int i = lane(); i < 16 * BLOCKS * CHUNKS; i += 32)
        if (row + i / CHUNKS < length)
            *reinterpret_cast<uint4*>(head.at(row + i / CHUNKS, i % CHUNKS)) =
                *reinterpret_cast<const uint4*>(chunk_at(tile, i / CHUNKS, i % CHUNKS));
}

// Sum of the products of two chunks.
__device__ inline float dot_chunk(const T* a, const T* b) {
    float sum = 0;
    if constexpr (FLOAT32) {
        const float4 x = *reinterpret_cast<const float4*>(a), y = *reinterpret_cast<const float4*>(b);
        sum = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, x.x * y.x)));
    } else {
        const uint4 x = *reinterpret_cast<const uint4*>(a), y = *reinterpret_cast<const uint4*>(b);
        const uint32_t left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 u = unpack(T(), left[i]), v = unpack(T(), right[i]);
            sum = fmaf(u.y, v.y, fmaf(u.x, v.x, sum));
        }
    }
    return sum;
}

#endif
