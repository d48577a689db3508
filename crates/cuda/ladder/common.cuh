// What the kernel benches share: error checks, random data, threads on the host, timing.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "hopper.cuh"

using hopper::bf16;

#define CHECK(call)                                                                                      \
    do {                                                                                                 \
        cudaError_t e_ = (call);                                                                         \
        if (e_ != cudaSuccess) {                                                                         \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_));           \
            std::exit(1);                                                                                \
        }                                                                                                \
    } while (0)

// A uniform number in [-1, 1) from (seed, index).
__host__ __device__ inline float noise(uint32_t seed, uint64_t index) {
    uint64_t z = index * 0x9e3779b97f4a7c15ull + (uint64_t(seed) << 32) + seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return float(uint32_t((z ^ (z >> 31)) >> 40)) / 8388608.0f - 1.0f;
}

__global__ void fill_bf16(bf16* p, size_t n, uint32_t seed, float scale) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        p[i] = __float2bfloat16(noise(seed, i) * scale);
}

__global__ void fill_f32(float* p, size_t n, uint32_t seed, float scale, float offset) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        p[i] = noise(seed, i) * scale + offset;
}

template <class T>
struct Buffer {
    T* p = nullptr;
    size_t n = 0;
    explicit Buffer(size_t count) : n(count) {
        CHECK(cudaMalloc(&p, n * sizeof(T)));
        CHECK(cudaMemset(p, 0, n * sizeof(T)));
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(p); }
    std::vector<T> host() const {
        std::vector<T> v(n);
        CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
    void set(const std::vector<T>& v) { CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice)); }
};

inline void random_bf16(Buffer<bf16>& b, uint32_t seed, float scale) { fill_bf16<<<1024, 256>>>(b.p, b.n, seed, scale); }

inline void parallel(int n, const std::function<void(int)>& body) {
    int count = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    for (int t = 0; t < count; t++)
        threads.emplace_back([=, &body] {
            for (int i = t; i < n; i += count) body(i);
        });
    for (auto& t : threads) t.join();
}

// Median microseconds of one of `inner` runs, over `outer` timings.
inline double time_us(int outer, int inner, const std::function<void()>& run) {
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    run();
    CHECK(cudaDeviceSynchronize());
    std::vector<float> times;
    for (int i = 0; i < outer; i++) {
        CHECK(cudaEventRecord(a));
        for (int j = 0; j < inner; j++) run();
        CHECK(cudaEventRecord(b));
        CHECK(cudaEventSynchronize(b));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, a, b));
        times.push_back(ms * 1000 / inner);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

// Squared error over squared size.
template <class A, class B>
double nmse(const std::vector<A>& got, const std::vector<B>& want) {
    double error = 0, size = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double d = double(got[i]) - double(want[i]);
        error += d * d;
        size += double(want[i]) * double(want[i]);
    }
    return error / size;
}

inline float value(bf16 x) { return __bfloat162float(x); }
