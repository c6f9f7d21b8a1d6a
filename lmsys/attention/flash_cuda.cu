// FlashAttention-2 in CUDA C++: the algorithm and the names of flash_triton.py. flash_cuda.py compiles this file and
// calls the functions at its end. The instructions and the copies between memories are in flash_cuda.cuh.
//
// Forward (Dao 2023, arXiv 2307.08691, Algorithm 1): a thread block owns a tile of queries and walks over the keys
// that it sees; o and the log-sum-exp leave the chip once. Backward (Algorithm 2) in two passes that recompute P:
// dq_kernel owns query tiles, dkdv_kernel owns key tiles, so every sum has one owner and one order, and repeats are
// bitwise equal. The price is 7 matmuls in place of 5.
//
// How it is made for tensor cores (sm_75 and later; float32 runs the same code on plain arithmetic):
// - A warp owns whole rows, 16 or 32, so a softmax needs shuffles among four threads and nothing else, and P and dS go
//   from one product into the next in registers.
// - Two stages of shared memory: while a tile is used, cp.async brings the next. One barrier a tile. (sm_75 has no
//   cp.async: there each thread loads and stores its part of the next tile, and then computes.)
// - The tiles that a thread block owns (Q and dO in dq_kernel, K and V in dkdv_kernel) are kept in registers where
//   these suffice, else each product reads them from shared memory.
// - A warp skips what its own rows do not see, and masks only the tiles that its diagonal or the end of the keys cuts.
// - Under a causal mask the tiles of queries that see most keys come first, in groups of heads whose keys and values
//   stay in L2 together.
// - With a window, which is causal, query i sees keys i - window + 1 to i, and only tiles that some query sees are
//   visited. A query that comes more than a window after the last key sees none: o is 0, and the log-sum-exp -inf.
//
// Compiled for one dtype and head dimension, for a window or without: -DELEMENT=__nv_bfloat16 -DHEAD_DIM=128 -DWINDOWED=0,
// and a tile for each kernel, -DFWD_TILE=... -DDQ_TILE=... -DDKDV_TILE=... (flash_cuda.py chooses).
//
// Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension.

#include "flash_cuda.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr int HEADS_AT_ONCE = 8;
constexpr float LAZY = 8;                    // in base 2: how far a row's scores may exceed `top`, see `softmax`
constexpr int SHARED_BYTES = (LMSYS_TURING ? 64 : 99) * 1024; // of a thread block, on any GPU that this is compiled for

struct Tile {
    int block_q, block_k, warps;
    int at_once; // columns of scores that a warp of the backward holds at a time
    bool kept;   // true: the owned tiles are kept in registers
    int blocks;  // thread blocks that a multiprocessor should hold
};
constexpr Tile FWD{FWD_TILE}, DQ{DQ_TILE}, DKDV{DKDV_TILE};

struct View { // a tensor (B, H, S, D) with D contiguous; strides in elements
    T* data;
    int64_t batch_stride, head_stride;
    int row_stride;
    __device__ Head head(int batch, int head) const {
        return {data + batch * batch_stride + head * head_stride, row_stride};
    }
};

struct Problem {
    View q, k, v, o, d_o, dq, dk, dv;
    float* lse;    // (B, H, Q), natural logarithm
    float2* stats; // (B, H, Q): the log-sum-exp in base 2, and delta = rowsum(o * do)
    int batch, heads, group, queries, keys, causal;
    float scale;
    int device;
    cudaStream_t stream;
    int window; // where WINDOWED: at most `queries`
};

struct Owned { // `head` among the heads of all batch entries
    int head, tile;
};

// What this thread block owns: within HEADS_AT_ONCE heads tile 0 of each, then tile 1 of each ...
__device__ inline Owned owned_tile(int num_heads, int num_tiles) {
    const int first_head = blockIdx.x / (HEADS_AT_ONCE * num_tiles) * HEADS_AT_ONCE;
    const int heads = min(HEADS_AT_ONCE, num_heads - first_head);
    const int within = blockIdx.x - first_head * num_tiles;
    return {first_head + within % heads, within / heads};
}

__host__ __device__ constexpr int num_tiles(int length, int block) { return (length + block - 1) / block; }

__device__ inline int first_key(int query, const Problem& p) { return WINDOWED ? max(0, query - p.window + 1) : 0; }

// Under a causal mask a query sees the keys up to its own position, and with a window only the last p.window of them.
__device__ inline bool sees(int query, int key, const Problem& p) {
    return WINDOWED ? unsigned(query - key) < unsigned(p.window) : key <= query;
}

// Queries from `row` on, keys from `col` on: hides the keys past the end and, if causal, those that a query does not see.
template <int BLOCKS, int COLUMNS>
__device__ inline void hide(float (&scores)[BLOCKS][COLUMNS][4], int row, int col, const Problem& p) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int query = row + 16 * block + g() + i / 2 * 8, key = col + 8 * column + 2 * t() + i % 2;
                if (key >= p.keys || (p.causal && !sees(query, key, p))) scores[block][column][i] = -INF;
            }
}

// Online softmax: scores become P = 2 ** (scale (score - top)). `top` follows the maximum of a row only when a row of
// the warp has grown by more than 2 ** LAZY, and only then what was summed before is rescaled (as in FlashAttention-4):
// any top gives the same quotient. With a window a row may have seen nothing yet: its top is -INF.
template <int BLOCKS, int COLUMNS>
__device__ inline void softmax(float (&scores)[BLOCKS][COLUMNS][4], float (&acc)[BLOCKS][D / 8][4],
                               float (&top)[BLOCKS][2], float (&total)[BLOCKS][2], float scale) {
    float new_top[BLOCKS][2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
        float& largest = new_top[i / 2][i % 2] = top[i / 2][i % 2];
#pragma unroll
        for (int j = 0; j < 2 * COLUMNS; ++j) largest = fmaxf(largest, scores[i / 2][j / 2][i % 2 * 2 + j % 2]);
        largest = row_max(largest);
        grown |= (largest - top[i / 2][i % 2]) * scale > LAZY;
    }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            float rescale = exp2_fast((top[i / 2][i % 2] - new_top[i / 2][i % 2]) * scale);
            if (WINDOWED && new_top[i / 2][i % 2] == -INF) rescale = 1;
            top[i / 2][i % 2] = new_top[i / 2][i % 2];
            total[i / 2][i % 2] *= rescale;
#pragma unroll
            for (int j = 0; j < D / 4; ++j) acc[i / 2][j / 2][i % 2 * 2 + j % 2] *= rescale;
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
        const float shift = WINDOWED && top[i / 2][i % 2] == -INF ? 0 : top[i / 2][i % 2] * scale;
#pragma unroll
        for (int j = 0; j < 2 * COLUMNS; ++j) {
            float& x = scores[i / 2][j / 2][i % 2 * 2 + j % 2];
            x = exp2_fast(fmaf(x, scale, -shift));
            total[i / 2][i % 2] += x; // only this thread's columns; row_sum adds those of the others at the end
        }
    }
}

extern __shared__ uint4 shared[];

__global__ void __launch_bounds__(FWD.warps * 32, FWD.blocks) fwd_kernel(const __grid_constant__ Problem p) {
    constexpr int BLOCK_Q = FWD.block_q, BLOCK_K = FWD.block_k;
    constexpr int THREADS = FWD.warps * 32, BLOCKS = BLOCK_Q / FWD.warps / 16;
    const int tiles = num_tiles(p.queries, BLOCK_Q);
    const auto [head_index, tile] = owned_tile(p.batch * p.heads, tiles);
    const int batch = head_index / p.heads, head = head_index % p.heads;
    const int row = (p.causal ? tiles - 1 - tile : tile) * BLOCK_Q; // longest first
    const int own_row = row + warp() * BLOCKS * 16, last_row = own_row + BLOCKS * 16 - 1;
    const int start = first_key(row, p) / BLOCK_K * BLOCK_K, stop = p.causal ? min(p.keys, row + BLOCK_Q) : p.keys;
    const float scale = p.scale * LOG2_E; // scores in base 2: exp2 is one instruction
    T* const q_tile = reinterpret_cast<T*>(shared);
    T* const stages = q_tile + (FWD.kept ? 0 : BLOCK_Q * D);
    const Head k = p.k.head(batch, head / p.group), v = p.v.head(batch, head / p.group);
    const auto load = [&](int col, int stage) {
        load_tile<BLOCK_K, THREADS>(stages + stage * 2 * BLOCK_K * D, k, col, p.keys);
        load_tile<BLOCK_K, THREADS>(stages + (stage * 2 + 1) * BLOCK_K * D, v, col, p.keys);
    };

    Rows<BLOCKS, FWD.kept> q(q_tile);
    load_tile<BLOCK_Q, THREADS>(q_tile, p.q.head(batch, head), row, p.queries);
    if (FWD.kept) { // then the stages take the place of q in shared memory
        wait_for_copies();
        __syncthreads();
        q.keep();
        __syncthreads();
    }
    load(start, 0);
    float acc[BLOCKS][D / 8][4] = {}, top[BLOCKS][2], total[BLOCKS][2] = {};
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) top[i / 2][i % 2] = -INF;
    for (int col = start, stage = 0; col < stop; col += BLOCK_K, stage ^= 1) {
        wait_for_copies();
        __syncthreads(); // this stage has arrived, and no warp reads the other one any more
        if (col + BLOCK_K < stop) load(col + BLOCK_K, stage ^ 1);
        if (p.causal && col > last_row) continue;
        if (WINDOWED && col + BLOCK_K <= first_key(own_row, p)) continue;
        const T *const k_tile = stages + stage * 2 * BLOCK_K * D, *const v_tile = k_tile + BLOCK_K * D;
        float scores[BLOCKS][BLOCK_K / 8][4];
        dot_rows(scores, q, k_tile);
        if (col + BLOCK_K > p.keys || (p.causal && col + BLOCK_K - 1 > own_row) ||
            (WINDOWED && col < first_key(last_row, p)))
            hide(scores, own_row, col, p);
        softmax(scores, acc, top, total, scale);
        add_dot(acc, scores, v_tile);
    }
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
        const float sum = row_sum(total[i / 2][i % 2]), inverse = WINDOWED && sum == 0 ? 0 : 1 / sum;
        const int query = own_row + 8 * i + g();
        if (t() == 0 && query < p.queries)
            p.lse[int64_t(head_index) * p.queries + query] = (top[i / 2][i % 2] * scale + log2f(sum)) * LN_2;
#pragma unroll
        for (int j = 0; j < D / 4; ++j) acc[i / 2][j / 2][i % 2 * 2 + j % 2] *= inverse;
    }
    if (WINDOWED) wait_for_copies(); // where no query sees a key, the loop has not waited
    __syncthreads();
    store_rows(q_tile, acc, p.o.head(batch, head), row, p.queries);
}

__global__ void __launch_bounds__(DQ.warps * 32, DQ.blocks) dq_kernel(const __grid_constant__ Problem p) {
    constexpr int BLOCK_Q = DQ.block_q, BLOCK_K = DQ.block_k, AT_ONCE = DQ.at_once;
    constexpr int THREADS = DQ.warps * 32, BLOCKS = BLOCK_Q / DQ.warps / 16;
    const int tiles = num_tiles(p.queries, BLOCK_Q);
    const auto [head_index, tile] = owned_tile(p.batch * p.heads, tiles);
    const int batch = head_index / p.heads, head = head_index % p.heads;
    const int row = (p.causal ? tiles - 1 - tile : tile) * BLOCK_Q;
    const int own_row = row + warp() * BLOCKS * 16, last_row = own_row + BLOCKS * 16 - 1;
    const int start = first_key(row, p) / BLOCK_K * BLOCK_K, stop = p.causal ? min(p.keys, row + BLOCK_Q) : p.keys;
    const float scale = p.scale * LOG2_E;
    T* const q_tile = reinterpret_cast<T*>(shared);
    T* const do_tile = q_tile + BLOCK_Q * D;
    T* const stages = q_tile + (DQ.kept ? 0 : 2 * BLOCK_Q * D);
    const Head k = p.k.head(batch, head / p.group), v = p.v.head(batch, head / p.group);
    const Head o = p.o.head(batch, head), d_o = p.d_o.head(batch, head);
    const auto load = [&](int col, int stage) {
        load_tile<BLOCK_K, THREADS>(stages + stage * 2 * BLOCK_K * D, k, col, p.keys);
        load_tile<BLOCK_K, THREADS>(stages + (stage * 2 + 1) * BLOCK_K * D, v, col, p.keys);
    };

    Rows<BLOCKS, DQ.kept> q(q_tile), grad(do_tile);
    load_tile<BLOCK_Q, THREADS>(q_tile, p.q.head(batch, head), row, p.queries);
    load_tile<BLOCK_Q, THREADS>(do_tile, d_o, row, p.queries);
    if (DQ.kept) {
        wait_for_copies();
        __syncthreads();
        q.keep();
        grad.keep();
        __syncthreads();
    }
    load(start, 0);
    float lse[BLOCKS][2], delta[BLOCKS][2];
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
        const int query = own_row + 8 * i + g();
        const bool inside = query < p.queries;
        const int64_t at = int64_t(head_index) * p.queries + query;
        float sum = 0;
        for (int chunk = t(); inside && chunk < CHUNKS; chunk += 4)
            sum += dot_chunk(o.at(query, chunk), d_o.at(query, chunk));
        delta[i / 2][i % 2] = row_sum(sum);
        lse[i / 2][i % 2] = inside ? p.lse[at] * LOG2_E : INF; // INF makes P zero
        if (WINDOWED && lse[i / 2][i % 2] == -INF) lse[i / 2][i % 2] = INF;
        if (t() == 0 && inside) p.stats[at] = {lse[i / 2][i % 2], delta[i / 2][i % 2]}; // for dkdv_kernel
    }
    float dq[BLOCKS][D / 8][4] = {};
    for (int col = start, stage = 0; col < stop; col += BLOCK_K, stage ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (col + BLOCK_K < stop) load(col + BLOCK_K, stage ^ 1);
        if (p.causal && col > last_row) continue;
        if (WINDOWED && col + BLOCK_K <= first_key(own_row, p)) continue;
        const bool cut = col + BLOCK_K > p.keys || (p.causal && col + BLOCK_K - 1 > own_row) ||
                         (WINDOWED && col < first_key(last_row, p));
#pragma unroll 1
        for (int first = 0; first < BLOCK_K; first += AT_ONCE) {
            const T *const k_tile = stages + (stage * 2 * BLOCK_K + first) * D, *const v_tile = k_tile + BLOCK_K * D;
            float scores[BLOCKS][AT_ONCE / 8][4], dp[BLOCKS][AT_ONCE / 8][4];
            dot_rows(scores, q, k_tile);
            dot_rows(dp, grad, v_tile);
            if (cut) hide(scores, own_row, col + first, p);
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                for (int i = 0; i < AT_ONCE / 2; ++i) {
                    const float weight = exp2_fast(fmaf(scores[block][i / 4][i % 4], scale, -lse[block][i % 4 / 2]));
                    dp[block][i / 4][i % 4] = weight * (dp[block][i / 4][i % 4] - delta[block][i % 4 / 2]); // dS
                }
            add_dot(dq, dp, k_tile);
        }
    }
#pragma unroll
    for (int i = 0; i < BLOCKS * D / 2; ++i) dq[i / (D / 2)][i / 4 % (D / 8)][i % 4] *= p.scale;
    if (WINDOWED) wait_for_copies(); // where no query sees a key, the loop has not waited
    __syncthreads();
    store_rows(q_tile, dq, p.dq.head(batch, head), row, p.queries);
}

__global__ void __launch_bounds__(DKDV.warps * 32, DKDV.blocks) dkdv_kernel(const __grid_constant__ Problem p) {
    constexpr int BLOCK_Q = DKDV.block_q, BLOCK_K = DKDV.block_k, AT_ONCE = DKDV.at_once;
    constexpr int THREADS = DKDV.warps * 32, BLOCKS = BLOCK_K / DKDV.warps / 16;
    const int kv_heads = p.heads / p.group;
    const auto [head_index, tile] = owned_tile(p.batch * kv_heads, num_tiles(p.keys, BLOCK_K)); // of key/value heads
    const int batch = head_index / kv_heads, kv_head = head_index % kv_heads;
    const int col = tile * BLOCK_K, own_col = col + warp() * BLOCKS * 16, last_col = own_col + BLOCKS * 16 - 1;
    const int start = p.causal ? col / BLOCK_Q * BLOCK_Q : 0;
    const int stop = WINDOWED ? min(p.queries, col + BLOCK_K - 1 + p.window) : p.queries;
    const int steps = max(0, num_tiles(stop - start, BLOCK_Q)); // of each head of the group
    const float scale = p.scale * LOG2_E;
    float2* const stats_stages = reinterpret_cast<float2*>(shared); // 2 x BLOCK_Q
    T* const k_tile = reinterpret_cast<T*>(stats_stages + 2 * BLOCK_Q);
    T* const v_tile = k_tile + BLOCK_K * D;
    T* const stages = k_tile + (DKDV.kept ? 0 : 2 * BLOCK_K * D);
    const auto load = [&](int step, int stage) {
        const int head = kv_head * p.group + step / steps, row = start + step % steps * BLOCK_Q;
        load_tile<BLOCK_Q, THREADS>(stages + stage * 2 * BLOCK_Q * D, p.q.head(batch, head), row, p.queries);
        load_tile<BLOCK_Q, THREADS>(stages + (stage * 2 + 1) * BLOCK_Q * D, p.d_o.head(batch, head), row, p.queries);
        const float2* const stats = p.stats + (int64_t(batch) * p.heads + head) * p.queries;
        for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
            const bool inside = row + i < p.queries; // else zeros: P is 1 there, but q and do are zero
            start_copy_8(stats_stages + stage * BLOCK_Q + i, stats + (inside ? row + i : 0), inside);
        }
    };

    Rows<BLOCKS, DKDV.kept> k(k_tile), v(v_tile);
    load_tile<BLOCK_K, THREADS>(k_tile, p.k.head(batch, kv_head), col, p.keys);
    load_tile<BLOCK_K, THREADS>(v_tile, p.v.head(batch, kv_head), col, p.keys);
    if (DKDV.kept) {
        wait_for_copies();
        __syncthreads();
        k.keep();
        v.keep();
        __syncthreads();
    }
    if (steps) load(0, 0);
    float dk[BLOCKS][D / 8][4] = {}, dv[BLOCKS][D / 8][4] = {};
    for (int step = 0, stage = 0; step < p.group * steps; ++step, stage ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (step + 1 < p.group * steps) load(step + 1, stage ^ 1);
        const int row = start + step % steps * BLOCK_Q;
        if ((p.causal && row + BLOCK_Q - 1 < own_col) || (WINDOWED && row >= last_col + p.window)) continue;
        const bool cut = (p.causal && row < last_col) || (WINDOWED && row + BLOCK_Q > own_col + p.window);
#pragma unroll 1
        for (int first = 0; first < BLOCK_Q; first += AT_ONCE) {
            const T *const q_tile = stages + (stage * 2 * BLOCK_Q + first) * D, *const do_tile = q_tile + BLOCK_Q * D;
            float weights[BLOCKS][AT_ONCE / 8][4], dp[BLOCKS][AT_ONCE / 8][4]; // transposed: (keys, queries)
            dot_rows(weights, k, q_tile);
            dot_rows(dp, v, do_tile);
#pragma unroll
            for (int column = 0; column < AT_ONCE / 8; ++column) {
                const float2* const stats = stats_stages + stage * BLOCK_Q + first + 8 * column + 2 * t();
                const float4 two = *reinterpret_cast<const float4*>(stats); // (log-sum-exp, delta) of two queries
#pragma unroll
                for (int i = 0; i < 4 * BLOCKS; ++i) {
                    float &weight = weights[i / 4][column][i % 4], &ds = dp[i / 4][column][i % 4];
                    weight = exp2_fast(fmaf(weight, scale, -(i % 2 ? two.z : two.x)));
                    const int query = row + first + 8 * column + 2 * t() + i % 2, key = own_col + 8 * (i / 2) + g();
                    if (cut && !sees(query, key, p)) weight = 0;
                    ds = weight * (ds - (i % 2 ? two.w : two.y));
                }
            }
            add_dot(dv, weights, do_tile);
            add_dot(dk, dp, q_tile);
        }
    }
#pragma unroll
    for (int i = 0; i < BLOCKS * D / 2; ++i) dk[i / (D / 2)][i / 4 % (D / 8)][i % 4] *= p.scale;
    wait_for_copies(); // where no query sees these keys, the loop has not waited for k and v
    __syncthreads();
    store_rows(k_tile, dk, p.dk.head(batch, kv_head), col, p.keys);
    __syncwarp();
    store_rows(k_tile, dv, p.dv.head(batch, kv_head), col, p.keys);
}

// Bytes of shared memory: tiles that are kept in registers leave their place to the stages.
constexpr int shared_bytes(int row_tiles, int rows, int stage_rows, bool kept) {
    const int owned = row_tiles * rows, staged = 2 * 2 * stage_rows;
    return (kept ? (owned > staged ? owned : staged) : owned + staged) * D * int(sizeof(T));
}
constexpr int FWD_BYTES = shared_bytes(1, FWD.block_q, FWD.block_k, FWD.kept);
constexpr int DQ_BYTES = shared_bytes(2, DQ.block_q, DQ.block_k, DQ.kept);
constexpr int STATS_BYTES = 2 * DKDV.block_q * int(sizeof(float2));
constexpr int DKDV_BYTES = STATS_BYTES + shared_bytes(2, DKDV.block_k, DKDV.block_q, DKDV.kept);
static_assert(FWD_BYTES <= SHARED_BYTES && DQ_BYTES <= SHARED_BYTES && DKDV_BYTES <= SHARED_BYTES);
static_assert(!FLOAT32 || !(FWD.kept || DQ.kept || DKDV.kept), "fragments that are kept are of 16-bit elements");

// Launches a kernel with a thread block of `warps` warps for each tile of each head, and `bytes` of shared memory.
static cudaError_t launch(void (*kernel)(Problem), int heads, int tiles, int warps, int bytes, const Problem& p) {
    cudaError_t error = cudaSetDevice(p.device);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    const int64_t blocks = int64_t(p.batch) * heads * tiles;
    void* arguments[] = {const_cast<Problem*>(&p)};
    return cudaLaunchKernel(kernel, dim3(unsigned(blocks)), dim3(warps * 32), arguments, bytes, p.stream);
}

// Each function launches a kernel and returns a cudaError_t. fwd reads q, k, v and writes o and lse; dq reads those and
// d_o and writes dq and stats; dkdv, after it, reads q, k, v, d_o and stats and writes dk and dv.
extern "C" int flash_fwd(const Problem* p) {
    return launch(fwd_kernel, p->heads, num_tiles(p->queries, FWD.block_q), FWD.warps, FWD_BYTES, *p);
}
extern "C" int flash_dq(const Problem* p) {
    return launch(dq_kernel, p->heads, num_tiles(p->queries, DQ.block_q), DQ.warps, DQ_BYTES, *p);
}
extern "C" int flash_dkdv(const Problem* p) {
    return launch(dkdv_kernel, p->heads / p->group, num_tiles(p->keys, DKDV.block_k), DKDV.warps, DKDV_BYTES, *p);
}
extern "C" const char* flash_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
