// What a kernel of several roles waits with: barriers in shared memory that count arrivals and bytes, bulk copies that report to them, and meetings of all blocks
// of a launch. From Ampere on; bulk copies are Hopper's, before it a warp copies 16 bytes a lane.
#pragma once

#include "backends/cuda/tensor_code.cuh"

namespace pocket::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kHasStreams = false;                         // none of this
#else
constexpr bool kHasStreams = true;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kCopyArrivals = 32;                           // each lane reports its own copies
#else
constexpr int kCopyArrivals = 1;
#endif

// Where a fault would wait for ever, builds with POCKET_CUDA_WAITS_END stop the kernel instead.
__device__ __forceinline__ void count_wait([[maybe_unused]] std::uint32_t& turns) {
#ifdef POCKET_CUDA_WAITS_END
    if (++turns > (1u << 22)) __trap();
#endif
}

__device__ __forceinline__ void start_barrier(std::uint32_t barrier, int arrivals) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void publish_barriers() {        // also to the copies
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 800
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ bool has_passed(std::uint32_t barrier, std::uint32_t parity) {
    std::uint32_t passed = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
#elif __CUDA_ARCH__ >= 800
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
#endif
    return passed != 0;
}
__device__ __forceinline__ void wait_for(std::uint32_t barrier, std::uint32_t parity) {
    std::uint32_t turns = 0;
    while (!has_passed(barrier, parity)) count_wait(turns);
}

// The warp fills rows of a stage: lane l < 16 asks for `bytes` (a multiple of 16) from `from`, or for none where that is null; `total` bytes are asked for in all.
// `barrier` passes when all are there.
__device__ __forceinline__ void fill_stage(std::uint32_t stage, int stride, const std::uint8_t* from, int bytes, [[maybe_unused]] int total, std::uint32_t barrier) {
    [[maybe_unused]] const int lane = threadIdx.x & 31;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(total) : "memory");
    __syncwarp();
    if (from) {
        std::uint64_t policy;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(stage + lane * stride), "l"(from), "r"(bytes),
                     "r"(barrier), "l"(policy)
                     : "memory");
    }
#elif __CUDA_ARCH__ >= 800
    for (int row = 0; row < 16; ++row) {
        const auto* start = reinterpret_cast<const std::uint8_t*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(from), row));
        if (!start) continue;
        for (int at = 16 * lane; at < bytes; at += 512) copy_16_bytes(stage + row * stride + at, start + at);
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// Of the threads that compute, without the warps that copy.
template <int kThreads>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Of a part of them, in a block of several such parts.
template <int kThreads>
__device__ __forceinline__ void meet_part(int part) {
    asm volatile("bar.sync %0, %1;" ::"r"(part + 3), "n"(kThreads) : "memory");
}

// One thread of a block reports that the block has come, and waits until `count` have.
__device__ __forceinline__ void meet_blocks(std::uint32_t* meetings, std::uint32_t count) {
#if __CUDA_ARCH__ >= 800
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(meetings) : "memory");
    std::uint32_t come = 0, turns = 0;
    do {
        count_wait(turns);
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(come) : "l"(meetings) : "memory");
    } while (static_cast<std::int32_t>(come - count) < 0);
#endif
}

}  // namespace pocket::cuda
