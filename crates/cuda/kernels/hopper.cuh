// Hopper's warpgroup products and bulk tensor copies (sm_90a).
#pragma once

#include "common.cuh"

#include <cuda.h>

// Whether this compilation has Hopper's own instructions.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER 1
#else
#define HOPPER 0
#endif

#if HOPPER

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Whether it is.
__device__ __forceinline__ bool barrier_passed(uint32_t barrier, uint32_t parity) {
    uint32_t passed;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(passed)
        : "r"(barrier), "r"(parity)
        : "memory");
    return passed;
}

// A box of a two-dimensional tensor to shared memory; its bytes count towards the barrier.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// The same for what is read once: it goes from the L2 cache first.
__device__ __forceinline__ void copy_box_once(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
    const uint64_t evict_first = 0x12f0000000000000;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], "
        "%5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(evict_first)
        : "memory");
}

// An operand tile of 128-byte rows (64 fp16 of k) with the 128-byte swizzle, at a multiple of 1,024 bytes.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
    return uint64_t((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// D (64 x N, fp32) = A (64 x 16) B (16 x N) of a warpgroup, added to D if `add`. Warp w, lane (g, t): d[4 j + c] is row 16 w + g + 8 (c / 2),
// column 8 j + 2 t + c % 2. The instruction names its registers, and inputs are numbered after them: hence a line a width.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)
#define RH "%0, %1, %2, %3, %4, %5, %6, %7"
#define R0 RH ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R1 R0 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R2 R1 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define R3 R2 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R4 R3 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define R5 R4 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define R7 R5 ", %96, %97, %98, %99, %100, %101, %102, " \
    "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, " \
    "%125, %126, %127"
#define PRODUCT(n, registers, a, b, add, flags) \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" registers "}, " a ", " b ", p, 1, 1, " flags ";\n}"

// Both operands from shared memory, k contiguous.
template <int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {
#define WIDTH(n, registers, a_at, b_at, add_at, ...) \
    if constexpr (N == n) asm volatile(PRODUCT(n, registers, a_at, b_at, add_at, "0, 0") : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));
    static_assert(N == 16 || N == 32 || N == 64 || N == 96 || N == 128 || N == 160 || N == 192 || N == 256, "a width of wgmma");
    WIDTH(16, RH, "%8", "%9", "%10", D4(0), D4(4))
    WIDTH(32, R0, "%16", "%17", "%18", D16(0))
    WIDTH(64, R1, "%32", "%33", "%34", D16(0), D16(16))
    WIDTH(96, R2, "%48", "%49", "%50", D16(0), D16(16), D16(32))
    WIDTH(128, R3, "%64", "%65", "%66", D64(0))
    WIDTH(160, R4, "%80", "%81", "%82", D64(0), D16(64))
    WIDTH(192, R5, "%96", "%97", "%98", D64(0), D16(64), D16(80))
    WIDTH(256, R7, "%128", "%129", "%130", D64(0), D64(64))
#undef WIDTH
}

// A from registers, as mma.m16n8k16 holds it, 16 rows a warp; B from shared memory with k contiguous, or n if TRANSPOSED.
template <int N, bool TRANSPOSED = false>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {
#define WIDTH(n, transposed, registers, a_at, b_at, add_at, ...)                      \
    if constexpr (N == n && TRANSPOSED == transposed)                                 \
        asm volatile(PRODUCT(n, registers, "{" a_at "}", b_at, add_at, #transposed)   \
                     : __VA_ARGS__                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    static_assert(TRANSPOSED ? N == 128 : N == 16 || N == 32 || N == 64 || N == 96 || N == 128 || N == 160 || N == 256, "a width of wgmma");
    WIDTH(16, 0, RH, "%8, %9, %10, %11", "%12", "%13", D4(0), D4(4))
    WIDTH(32, 0, R0, "%16, %17, %18, %19", "%20", "%21", D16(0))
    WIDTH(64, 0, R1, "%32, %33, %34, %35", "%36", "%37", D16(0), D16(16))
    WIDTH(96, 0, R2, "%48, %49, %50, %51", "%52", "%53", D16(0), D16(16), D16(32))
    WIDTH(128, 0, R3, "%64, %65, %66, %67", "%68", "%69", D64(0))
    WIDTH(128, 1, R3, "%64, %65, %66, %67", "%68", "%69", D64(0))
    WIDTH(160, 0, R4, "%80, %81, %82, %83", "%84", "%85", D64(0), D16(64))
    WIDTH(256, 0, R7, "%128, %129, %130, %131", "%132", "%133", D64(0), D64(64))
#undef WIDTH
}
#undef D4
#undef D16
#undef D64
#undef RH
#undef R0
#undef R1
#undef R2
#undef R3
#undef R4
#undef R5
#undef R7
#undef PRODUCT

// Keeps what products wrote from being used before the wait that precedes this.
template <int N>
__device__ __forceinline__ void settled(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#endif
