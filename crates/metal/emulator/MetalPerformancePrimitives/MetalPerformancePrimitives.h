// The part of the Metal Performance Primitives that kernels/project_tensor.metal uses, written from what Apple's header says of
// it; see metal_stdlib. -*- C++ -*-
//
// matmul2d multiplies a left matrix [m][k] with a right one [k][n], or [n][k] if that is transposed. All threads of its
// scope have to reach `run`, which orders no memory of theirs. Elements outside of an operand's extents are not read and
// count as zeros. Sums lie with the threads; which thread has which is the operation's own affair, and some of what a
// thread has may be nobody's, so here the last element is.
#pragma once

#include <metal_tensor>

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int m, n, k;
    bool transpose_left, transpose_right, relaxed_precision;
    mode matmul_mode;
    constexpr matmul2d_descriptor(int m, int n, int k = int(metal::dynamic_extent), bool transpose_left = false,
                                  bool transpose_right = false, bool relaxed_precision = false,
                                  mode matmul_mode = mode::multiply)
        : m(m), n(n), k(k), transpose_left(transpose_left), transpose_right(transpose_right),
          relaxed_precision(relaxed_precision), matmul_mode(matmul_mode) {}
};

// Sums of an operation of `M` x `N` by so many threads.
template <int M, int N, int THREADS>
struct kipp_sums {
    static constexpr int OWN = M * N / THREADS;
    float kipp_elements[OWN + 1];
    constexpr int get_capacity() const { return OWN + 1; }
    bool is_valid_element(int i) const { return i < OWN; }
    // Column and row: threads have neighbouring columns.
    metal::array<int, 2> get_multidimensional_index(int i) const {
        int at = i * THREADS + int(emulator::here().thread_index);
        return {{at % N, at / N}};
    }
    float& operator[](int i) { return kipp_elements[i]; }
};

template <matmul2d_descriptor D, typename Scope>
struct matmul2d {
    static_assert(D.transpose_right && !D.transpose_left && !D.relaxed_precision, "the one form that kernels use");
    typedef kipp_sums<D.m, D.n, Scope::kipp_threads> Sums;

    template <typename Left, typename Right, typename T>
    Sums get_destination_cooperative_tensor() const {
        static_assert(sizeof(T) == 4, "sums are floats");
        return Sums();
    }

    template <typename Left, typename Right>
    KIPP_TOGETHER KIPP_UNSEEN void run(Left& left, Right& right, Sums& sums) const {
#ifndef KIPP_ADDRESS_SPACES
        emulator::tensor_operation(Scope::kipp_threads, __builtin_return_address(0));
        int k = D.k < 0 ? left.extents().extent(0) : D.k;
        // Whoever computes what, every element is read: seen by two simdgroups, so that a write without a barrier between is
        // a race whoever writes.
        if (emulator::here().lane == 0 && emulator::here().simdgroup < 2) {
            kipp_touch(left, D.m, k);
            kipp_touch(right, D.n, k);
        }
        for (int i = 0; i < Sums::OWN; i++) {
            auto at = sums.get_multidimensional_index(i);
            float sum = D.matmul_mode == matmul2d_descriptor::mode::multiply ? 0.0f : sums[i];
            if (at[0] < right.extents().extent(1) && at[1] < left.extents().extent(1)) {
                const auto* a = left.kipp_data + at[1] * ulong(left.kipp_strides[1]);
                const auto* b = right.kipp_data + at[0] * ulong(right.kipp_strides[1]);
                for (int j = 0; j < k; j++) sum = __builtin_fmaf(float(a[j]), float(b[j]), sum);
            }
            sums[i] = sum;
        }
#endif
    }

private:
    template <typename Operand>
    static void kipp_touch(const Operand& operand, int rows, int k) {
        for (int row = 0; row < rows && row < operand.extents().extent(1); row++)
            emulator::access(operand.kipp_data + row * ulong(operand.kipp_strides[1]),
                             k * sizeof(typename Operand::kipp_element), false);
    }
};

}  // namespace tensor_ops
}  // namespace mpp
