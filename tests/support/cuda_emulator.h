// Runs flash_cuda.cu on a CPU, without CUDA (test_flash_cuda.py), as compiled for the architecture __CUDA_ARCH__:
// `g++ -D__CUDA_ARCH__=800 -include cuda_emulator.h -x c++ flash_cuda.cu`. For 750 it has what an sm_75 has: no
// asynchronous copies, mma.m16n8k8, 64 KiB of shared memory.
//
// Every CUDA thread is a fiber. Barriers and operations of a warp (shuffles, matrix loads, mma.sync) wait for all threads
// that take part. In one thread block of three the warps keep pace; in the others the first or the last warp runs ahead.
// Half of the asynchronous copies arrive at once, half as late as they may. Shared memory begins as NaN. Fragments follow
// the PTX ISA (mma.m16n8k16, mma.m16n8k8, ldmatrix). So a wrong index, layout, wait or barrier gives a wrong result here
// as on a GPU.

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

#define LMSYS_INSTRUCTIONS
#define __device__
#define __host__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx emulated::thread
#define blockIdx emulated::block
#define blockDim emulated::block_size

struct dim3 {
    unsigned x;
    explicit dim3(unsigned x = 1) : x(x) {}
};
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { uint32_t x, y, z, w; };
struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
inline const char* cudaGetErrorString(int) { return "threads wait for one another, or shared memory is too small"; }
inline int cudaSetDevice(int) { return 0; }
template <class Kernel> int cudaFuncSetAttribute(Kernel, int, int bytes) {
    return bytes > (__CUDA_ARCH__ >= 800 ? 227 : 64) * 1024;
}

extern "C" {
long long num_copies = 0, num_products = 0; // asynchronous copies of 16 bytes; mma.sync, counted once for a warp
}
alignas(128) inline uint4 shared[227 * 1024 / 16];

namespace emulated {
inline dim3 thread, block, block_size;

// Opens when `size` threads have arrived; `generation` counts how often it has opened.
struct Barrier {
    unsigned size = 0, arrived = 0, generation = 0;
};
struct Warp {
    Barrier barrier;
    uint64_t slots[2][32][4]; // 32 bytes of each lane, for `exchange`; the two halves are used in turn
};
// A thread. It runs if it waits for no barrier, or if that has opened since generation `since`.
struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::unique_ptr<char[]> stack;
    const Barrier* waits_for = nullptr;
    unsigned since = 0, turn = 0;
    bool begun = false, done = false;
    std::vector<std::function<void()>> copies; // asynchronous ones that have not arrived
};
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Barrier all;
inline jmp_buf scheduler;
inline std::function<void()> body;

inline void wait(Barrier& barrier) {
    const unsigned since = barrier.generation;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        ++barrier.generation;
        return;
    }
    Fiber& me = fibers[thread.x];
    me.waits_for = &barrier;
    me.since = since;
    if (!_setjmp(me.at)) _longjmp(scheduler, 1);
}

inline void enter() {
    body();
    fibers[thread.x].done = true;
    _longjmp(scheduler, 1);
}

// Runs the threads of a block to their ends; false if all that are left wait for one another.
inline bool run_block(unsigned threads) {
    std::memset(shared, 0xff, sizeof shared);
    fibers = std::vector<Fiber>(threads);
    warps.assign(threads / 32, {});
    all = {threads};
    for (Warp& warp : warps) warp.barrier.size = 32;
    volatile unsigned last = threads - 1, left = threads;
    const auto ready = [](const Fiber& fiber) {
        return !fiber.done && (!fiber.waits_for || fiber.waits_for->generation != fiber.since);
    };
    while (left) {
        unsigned tried = 0, next = 0;
        do {
            const unsigned first = block.x % 3 == 0 ? last + 1 : 0;
            next = (block.x % 3 == 2 ? threads - 1 - tried : first + tried) % threads;
        } while (!ready(fibers[next]) && ++tried < threads);
        if (tried == threads) return false; // all wait for one another
        Fiber& fiber = fibers[next];
        fiber.waits_for = nullptr;
        thread.x = last = next;
        if (!fiber.begun) {
            fiber.begun = true;
            fiber.stack.reset(new char[1 << 17]);
            getcontext(&fiber.start);
            fiber.start.uc_stack.ss_sp = fiber.stack.get();
            fiber.start.uc_stack.ss_size = 1 << 17;
            makecontext(&fiber.start, enter, 0);
            if (!_setjmp(scheduler)) setcontext(&fiber.start);
        } else if (!_setjmp(scheduler)) {
            _longjmp(fiber.at, 1);
        }
        if (fibers[last].done) left = left - 1;
    }
    return true;
}

// Shows 32 bytes to the warp and returns what all its lanes show.
inline const uint64_t (*exchange(const void* mine, size_t bytes))[4] {
    Warp& warp = warps[thread.x / 32];
    auto& slots = warp.slots[fibers[thread.x].turn++ % 2];
    std::memcpy(slots[thread.x % 32], mine, bytes);
    wait(warp.barrier);
    return slots;
}

inline float to_float(__half x) {
    _Float16 y;
    std::memcpy(&y, &x, 2);
    return float(y);
}
inline float to_float(__nv_bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline uint16_t rounded(__half, float x) {
    const _Float16 y = _Float16(x);
    uint16_t bits;
    std::memcpy(&bits, &y, 2);
    return bits;
}
inline uint16_t rounded(__nv_bfloat16, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x != x ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
} // namespace emulated

template <class P>
int cudaLaunchKernel(void (*kernel)(P), dim3 grid, dim3 threads, void** arguments, size_t, cudaStream_t) {
    emulated::block_size = threads;
    emulated::body = [=] { kernel(*static_cast<P*>(arguments[0])); };
    for (unsigned i = 0; i < grid.x; ++i) {
        emulated::block.x = i;
        if (!emulated::run_block(threads.x)) return 1;
    }
    return cudaSuccess;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline void __syncthreads() { emulated::wait(emulated::all); }
inline float __shfl_sync(unsigned, float x, int lane) {
    float y;
    std::memcpy(&y, emulated::exchange(&x, 4)[lane], 4);
    return y;
}
inline bool __any_sync(unsigned, bool x) {
    const auto shown = emulated::exchange(&x, sizeof x);
    bool any = false;
    for (int lane = 0; lane < 32; ++lane) any |= *reinterpret_cast<const bool*>(shown[lane]);
    return any;
}
inline float __shfl_xor_sync(unsigned mask, float x, int bits) { return __shfl_sync(mask, x, threadIdx.x % 32 ^ bits); }

#if __CUDA_ARCH__ >= 800
template <int BYTES> void copy_now_or_later(void* to, const void* from, bool inside) {
    const auto copy = [=] {
        if (inside) std::memcpy(to, from, BYTES);
        else std::memset(to, 0, BYTES);
    };
    if (threadIdx.x % 2) copy();
    else emulated::fibers[threadIdx.x].copies.push_back(copy);
}
inline void start_copy(void* to, const void* from, bool inside) {
    ++num_copies;
    copy_now_or_later<16>(to, from, inside);
}
inline void start_copy_8(void* to, const void* from, bool inside) { copy_now_or_later<8>(to, from, inside); }
inline void wait_for_copies() {
    for (const auto& copy : emulated::fibers[threadIdx.x].copies) copy();
    emulated::fibers[threadIdx.x].copies.clear();
}
#else
inline void wait_for_copies();
#endif
inline void __syncwarp() {
    emulated::wait(emulated::warps[threadIdx.x / 32].barrier);
    wait_for_copies(); // late copies arrive here at the latest: if the kernel did not wait, they overwrite later data
}

inline void load_matrices(uint32_t (&to)[4], const void* row) {
    const auto rows = emulated::exchange(&row, sizeof row);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) // elements 2 t and 2 t + 1 of row g
        std::memcpy(&to[i], reinterpret_cast<const char*>(rows[8 * i + lane / 4][0]) + lane % 4 * 4, 4);
}
inline void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
    const auto rows = emulated::exchange(&row, sizeof row);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 8; ++i) // element g of rows 2 t and 2 t + 1
        std::memcpy(reinterpret_cast<char*>(&to[i / 2]) + i % 2 * 2,
                    reinterpret_cast<const char*>(rows[i / 2 * 8 + lane % 4 * 2 + i % 2][0]) + lane / 4 * 2, 2);
}

template <class T> float element(const uint64_t (&words)[4], int i) {
    T x;
    std::memcpy(&x, reinterpret_cast<const char*>(words) + 2 * i, 2);
    return emulated::to_float(x);
}

#if __CUDA_ARCH__ >= 800
template <class T> void mma(T, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    num_products += threadIdx.x % 32 == 0;
    const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto shown = emulated::exchange(mine, sizeof mine);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) {
            const int other = k % 8 / 2; // the thread of its four that holds element k; k / 8 and the row choose its word
            const float x = element<T>(shown[4 * g + other], (k / 8 * 2 + i / 2) * 2 + k % 2);
            const float y = element<T>(shown[4 * (2 * t + i % 2) + other], (4 + k / 8) * 2 + k % 2);
            c[i] += x * y;
        }
}
#else
inline void mma_k8(__half, float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    num_products += threadIdx.x % 32 == 0;
    const uint32_t mine[3] = {a0, a1, b};
    const auto shown = emulated::exchange(mine, sizeof mine);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 8; ++k) { // element k % 2 of the word that thread k / 2 of the row, or of the column, holds
            const float x = element<__half>(shown[4 * g + k / 2], i / 2 * 2 + k % 2);
            const float y = element<__half>(shown[4 * (2 * t + i % 2) + k / 2], 2 * 2 + k % 2);
            c[i] += x * y;
        }
}
#endif

template <class T> uint32_t pack(T, float low, float high) {
    return emulated::rounded(T(), low) | uint32_t(emulated::rounded(T(), high)) << 16;
}
template <class T> float2 unpack(T, uint32_t x) {
    T low, high;
    low.bits = uint16_t(x);
    high.bits = uint16_t(x >> 16);
    return {emulated::to_float(low), emulated::to_float(high)};
}
inline float exp2_fast(float x) { return exp2f(x); }
